"""A channel and a server that does what no server should, frame by frame."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest

from tests.transport.test_channel import failure, of, opened, until
from tickwheel.transport import wire
from tickwheel.transport.channel import END_OF_STREAM, NO_CONNECTION, Channel
from tickwheel.transport.messages import prefixed, status_block
from tickwheel.transport.wire import ErrorCode

HEAD = wire.STATUS_200 + wire.field(b"content-type", b"application/grpc")
SETTINGS = wire.settings({})


def headers(stream_id: int, block: bytes = HEAD, *, end: bool = False) -> bytes:
    return wire.header_frames(stream_id, block, end_stream=end)


def data(stream_id: int, message: bytes = b"x") -> bytes:
    return wire.frame(wire.DATA, 0, stream_id, prefixed(message))


def answer(stream_id: int, message: bytes = b"x") -> bytes:
    return headers(stream_id) + data(stream_id, message) + headers(stream_id, status_block(0), end=True)


class Peer:
    """The server's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def put(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    async def until(self, kind: int) -> int:
        """Read up to a frame of this kind; returns its stream."""
        while True:
            size_and_kind, _, stream_id = wire.frame_head(await self.reader.readexactly(wire.HEADER_BYTES), 0)
            await self.reader.readexactly(size_and_kind >> 8)
            if size_and_kind & 0xFF == kind:
                return int(stream_id)

    async def call(self) -> int:
        """The stream of the next call."""
        return await self.until(wire.HEADERS)


Script = Callable[[Peer], Awaitable[None]]


@asynccontextmanager
async def scripted(script: Script, first: bytes = SETTINGS) -> AsyncIterator[tuple[str, list[Peer]]]:
    """A server that plays this on each connection, and closes it at the end."""
    peers: list[Peer] = []
    tasks: list[asyncio.Task[Any]] = []

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.ensure_future(talk(Peer(reader, writer), reader, writer)))

    async def talk(peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peers.append(peer)
        try:
            peer.put(first)
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                await reader.readexactly(len(wire.PREFACE))
                await script(peer)
        finally:
            writer.close()

    server = await asyncio.start_server(begin, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", peers
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def for_ever(_: Peer) -> None:
    await asyncio.Event().wait()


def echo(channel: Channel, **more: Any) -> Any:
    return of(channel, "unary_unary", "Echo")(b"x", **more)


def nothing_is_left(channel: Channel) -> None:
    for connection in channel._connections:
        assert not connection.streams and not connection.unread_bytes and not connection._waiting


async def test_a_connection_that_breaks_under_a_large_request_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio warned of each further write, once for every 256 KiB that were still to be sent."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        async with opened(f"127.0.0.1:{server.getsockname()[1]}") as channel:
            first = asyncio.ensure_future(failure(echo(channel)))
            ours, _ = await loop.sock_accept(server)
            wide = wire.settings({wire.INITIAL_WINDOW_SIZE: 1 << 30})
            await loop.sock_sendall(ours, wide + wire.window_update(0, 1 << 30))
            await until(lambda: any(connection.send_window > 1 << 29 for connection in channel._connections))
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            ours.close()  # a reset, which the channel has not heard of when it goes on writing
            call = of(channel, "unary_unary", "Echo")(bytes(24 << 20))
            assert (await failure(call)).code() is grpc.StatusCode.UNAVAILABLE
            await first
    assert not caplog.records


@pytest.mark.parametrize(
    "first", [wire.settings({3: 0}), SETTINGS + wire.goaway(0, ErrorCode.NO_ERROR)], ids=["no streams", "goes away"]
)
async def test_a_server_without_room_is_not_dialled_without_end(first: bytes) -> None:
    async with scripted(for_ever, first) as (address, peers), opened(address) as channel:
        error = await failure(echo(channel))
        assert error.code() is grpc.StatusCode.UNAVAILABLE and str(error.details()).startswith(NO_CONNECTION)
        assert len(peers) == 1 and not channel._connections


async def test_a_server_that_greets_and_closes_is_not_dialled_without_end() -> None:
    """The connection may end before or after the call begins on it."""

    async def close(_: Peer) -> None:
        return

    async with scripted(close) as (address, peers), opened(address) as channel:
        for count in range(1, 6):
            assert (await failure(echo(channel))).code() is grpc.StatusCode.UNAVAILABLE
            assert len(peers) <= count
            await until(lambda: not channel._connections)


@pytest.mark.parametrize(
    ("frames", "code", "words"),
    [
        (lambda s: headers(s) + data(s) + data(s), grpc.StatusCode.INTERNAL, "more than one response"),
        (lambda s: headers(s) + headers(s, status_block(0), end=True), grpc.StatusCode.INTERNAL, "no response"),
        (lambda s: headers(s, HEAD + status_block(0), end=True), grpc.StatusCode.INTERNAL, "no response"),
        (lambda s: headers(s, end=True), grpc.StatusCode.INTERNAL, "PROTOCOL_ERROR"),
        (lambda s: headers(s, wire.field(b":status", b"\xff")), grpc.StatusCode.UNKNOWN, "HTTP \ufffd"),
        (
            lambda s: headers(s, wire.field(b":status", b"503"), end=True),
            grpc.StatusCode.UNAVAILABLE,
            "no gRPC answer, but HTTP 503",
        ),
        (
            lambda s: headers(s, wire.STATUS_200 + wire.field(b"content-type", b"text/html")),
            grpc.StatusCode.UNKNOWN,
            "another content type",
        ),
        (
            lambda s: headers(s, HEAD + status_block(5) + wire.field(b"a-bin", b"*"), end=True),
            grpc.StatusCode.INTERNAL,
            "PROTOCOL_ERROR",
        ),
        (lambda s: wire.rst_stream(s, ErrorCode.REFUSED_STREAM), grpc.StatusCode.UNAVAILABLE, "REFUSED_STREAM"),
        (lambda s: data(s) + wire.rst_stream(s, ErrorCode.CANCEL), grpc.StatusCode.CANCELLED, "CANCEL"),
        (lambda s: wire.goaway(0, ErrorCode.NO_ERROR), grpc.StatusCode.UNAVAILABLE, "REFUSED_STREAM"),
        (lambda s: answer(s + 2), grpc.StatusCode.UNAVAILABLE, "connection is lost"),
        (lambda s: bytes(10_000), grpc.StatusCode.UNAVAILABLE, "connection is lost"),
    ],
    ids=[
        "two responses",
        "none",
        "a status at once",
        "no status",
        "no HTTP status",
        "a proxy's",
        "another's",
        "metadata that cannot be read",
        "refused",
        "cancelled",
        "goes away",
        "a stream that never was",
        "garbage",
    ],
)
async def test_an_answer_that_is_none(
    caplog: pytest.LogCaptureFixture, frames: Callable[[int], bytes], code: grpc.StatusCode, words: str
) -> None:
    """The call ends with an error that says why, nothing of it is left, and nothing is logged."""

    async def talk(peer: Peer) -> None:
        peer.put(frames(await peer.call()))
        await for_ever(peer)

    async with scripted(talk) as (address, _), opened(address) as channel:
        error = await failure(echo(channel))
        assert error.code() is code and words in str(error.details()), error
        assert not str(error.details()).startswith(NO_CONNECTION)
        nothing_is_left(channel)
    assert not caplog.records


async def test_what_follows_the_trailers_leaves_the_answer() -> None:
    async def talk(peer: Peer) -> None:
        while True:
            stream = await peer.call()
            peer.put(answer(stream), data(stream), wire.rst_stream(stream, ErrorCode.NO_ERROR))

    async with scripted(talk) as (address, _), opened(address) as channel:
        for _ in range(3):
            assert await echo(channel) == b"x"
        nothing_is_left(channel)


async def test_a_connection_cut_at_every_byte() -> None:
    """Each call ends, with its answer or with an error of the connection."""
    whole = SETTINGS + answer(1)
    size = 0

    async def talk(peer: Peer) -> None:
        if size >= len(SETTINGS):
            await peer.call()
            peer.put(whole[len(SETTINGS) : size])
            await peer.writer.drain()

    for size in range(len(whole) + 1):  # read by `talk`
        async with scripted(talk, whole[: min(size, len(SETTINGS))]) as (address, _), opened(address) as channel:
            if size == len(whole):
                assert await echo(channel) == b"x"
                continue
            error = await failure(echo(channel))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert str(error.details()).startswith(NO_CONNECTION) == (size < len(SETTINGS)), (size, error.details())
            await until(lambda: not channel._connections)


async def test_settings_twice_lowered_and_a_slow_drip() -> None:
    """Calls above a lowered limit go elsewhere, those under way are answered."""

    async def talk(peer: Peer) -> None:
        stream = await peer.call()
        peer.put(wire.settings({3: 0}), wire.settings({4: 0}), wire.frame(wire.PING, 0, 0, bytes(8)))
        await peer.until(wire.PING)
        for byte in answer(stream):
            peer.put(bytes([byte]))
            await asyncio.sleep(0)
        await for_ever(peer)

    async with scripted(talk) as (address, peers), opened(address) as channel:
        first = asyncio.ensure_future(echo(channel))
        await until(lambda: bool(channel._connections) and channel.connected is None)
        assert await echo(channel) == b"x"
        assert await first == b"x"
        assert len(peers) == 2


@pytest.mark.parametrize("how", ["cancelled", "its task", "deadline", "closed", "reset"])
@pytest.mark.parametrize("kind", ["unary_unary", "stream_stream"])
async def test_a_request_that_waits_for_a_window_ends(kind: str, how: str) -> None:
    """A writer that is cancelled ends its call: half a request may have been sent."""
    go = asyncio.Event()

    async def talk(peer: Peer) -> None:
        stream = await peer.call()
        await go.wait()
        peer.put(wire.rst_stream(stream, ErrorCode.INTERNAL_ERROR))
        await for_ever(peer)

    async with scripted(talk) as (address, _), opened(address) as channel:
        timeout = 0.2 if how == "deadline" else None
        if kind == "unary_unary":
            call = of(channel, kind, "Echo")(bytes(1_000_000), timeout=timeout)
            waiting = asyncio.ensure_future(call)
        else:
            call = of(channel, kind, "Both")(timeout=timeout)
            waiting = asyncio.ensure_future(call.write(bytes(1_000_000)))
        await until(lambda: any(connection._waiting for connection in channel._connections) or call.done())
        if how == "cancelled":
            call.cancel()
        elif how == "its task":
            waiting.cancel()
        elif how == "closed":
            await channel.close()
        elif how == "reset":
            go.set()
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await waiting
        assert call.done()
        await until(lambda: not any(connection._waiting for connection in channel._connections))
        nothing_is_left(channel)


async def test_a_call_cancelled_at_each_turn_of_the_loop_leaves_nothing() -> None:
    """Before and while it is dialled, on its way, between its parts; other calls are not harmed."""

    async def talk(peer: Peer) -> None:
        while True:
            stream = await peer.call()
            for part in (headers(stream), data(stream), headers(stream, status_block(0), end=True)):
                peer.put(part)
                await asyncio.sleep(0)

    async with scripted(talk) as (address, _):
        ended = False
        turns = 1
        while not ended:
            async with opened(address) as channel:
                waiting = asyncio.ensure_future(echo(channel))
                for _ in range(turns):
                    await asyncio.sleep(0)
                ended = waiting.done()
                waiting.cancel()
                with suppress(asyncio.CancelledError):
                    assert await waiting == b"x"
                await until(lambda: channel._dialling is None)
                nothing_is_left(channel)
                assert await echo(channel) == b"x"
            assert not channel._connections
            turns += 1
            assert turns < 2_000


async def test_an_iteration_that_is_left_ends_its_call() -> None:
    async def talk(peer: Peer) -> None:
        stream = await peer.call()
        peer.put(headers(stream), data(stream), data(stream))
        await peer.until(wire.RST_STREAM)
        await for_ever(peer)

    async with scripted(talk) as (address, _), opened(address) as channel:
        call = of(channel, "unary_stream", "Count")(b"")
        async for response in call:
            assert response == b"x"
            break
        await until(call.done)
        nothing_is_left(channel)


async def test_a_server_that_goes_away_and_stays_loses_its_connection() -> None:
    """Else a client would keep one for each time."""

    async def talk(peer: Peer) -> None:
        stream = await peer.call()
        peer.put(wire.goaway(stream, ErrorCode.NO_ERROR), answer(stream))
        await for_ever(peer)

    async with scripted(talk) as (address, peers), opened(address) as channel:
        for count in range(1, 4):
            assert await echo(channel) == b"x"
            await until(lambda: not channel._connections)
            assert len(peers) == count


async def test_a_retired_channel_keeps_only_connections_with_calls() -> None:
    async def talk(peer: Peer) -> None:
        while True:
            stream = await peer.call()
            peer.put(headers(stream), data(stream))
            await peer.until(wire.DATA)
            peer.put(headers(stream, status_block(0), end=True))

    async with scripted(talk) as (address, _), opened(address) as channel:
        both = of(channel, "stream_stream", "Both")()
        assert await both.read() == b"x"
        channel.retire()
        await both.write(b"x")
        assert await both.read() is END_OF_STREAM
        await until(lambda: not channel._connections)


async def test_a_dial_that_others_cancelled_is_repeated() -> None:
    """As programs do that cancel all tasks of a loop, even one that has not begun."""

    async def talk(peer: Peer) -> None:
        peer.put(answer(await peer.call()))
        await for_ever(peer)

    async with scripted(talk) as (address, _), opened(address) as channel:
        call = echo(channel)
        await asyncio.sleep(0)
        assert channel._dialling is not None and channel._dialling.cancel()
        assert await call == b"x"


async def test_closing_does_not_wait_for_a_server_that_does_not_read() -> None:
    async with scripted(for_ever) as (address, _), opened(address) as channel:
        call = of(channel, "stream_stream", "Both")()
        writing = asyncio.ensure_future(call.write(bytes(60_000)))
        await until(lambda: bool(channel._connections))
        await channel.close()
        assert not channel._connections
        await asyncio.gather(writing, return_exceptions=True)
