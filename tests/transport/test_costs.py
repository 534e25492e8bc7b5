"""What one connection may cost: windows, floods, silence. A server stays usable whatever its callers do."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from tests.transport.test_protocol import echoing, ends, goes_on, with_path
from tests.transport.wires import POST, Caller
from tickwheel.transport import wire
from tickwheel.transport.limits import Limits
from tickwheel.transport.messages import prefixed
from tickwheel.transport.server import Server
from tickwheel.transport.wire import ErrorCode

CALM = {("connection", ErrorCode.ENHANCE_YOUR_CALM)}
F = wire.frame


async def test_an_answer_waits_for_the_callers_window() -> None:
    """It leaves as the windows of stream and connection allow, whichever is smaller."""
    caller = Caller(echoing())
    caller.send(wire.settings({wire.INITIAL_WINDOW_SIZE: 10}))
    await caller.settled()
    caller.headers(1)
    caller.data(1, prefixed(bytes(20_000))[:16_000])
    caller.data(1, bytes(4_005), end=True)

    async def sent() -> int:
        return sum(len(frame.payload) for frame in await caller.answered() if frame.kind == wire.DATA)

    assert await sent() == 10
    caller.window(1, 5)
    assert await sent() == 5
    caller.send(wire.settings({wire.INITIAL_WINDOW_SIZE: 0}))  # the stream's window is below zero now
    caller.window(1, 9)
    assert await sent() == 0
    caller.window(1, 1_000_000)
    assert await sent() == 20_005 - 15
    assert not caller.server.calls


async def test_the_connections_window_holds_all_streams() -> None:
    caller = Caller(echoing())
    caller.send(wire.settings({wire.INITIAL_WINDOW_SIZE: 1 << 20}))
    await caller.settled()
    for stream_id in (1, 3):
        caller.headers(stream_id)
        caller.data(stream_id, prefixed(bytes(16_000)), end=False)
        caller.data(stream_id, b"", end=True)
    for stream_id in (5, 7, 9):
        caller.headers(stream_id)
        caller.data(stream_id, prefixed(bytes(16_000)), end=True)
    found = await caller.answered()
    assert sum(len(frame.payload) for frame in found if frame.kind == wire.DATA) == wire.WINDOW_DEFAULT
    caller.window(0, 100_000)
    found = await caller.answered()
    assert sum(len(frame.payload) for frame in found if frame.kind == wire.DATA) == 5 * 16_005 - wire.WINDOW_DEFAULT
    assert not caller.server.calls


async def test_a_message_larger_than_the_window_arrives_and_its_credit_comes_back() -> None:
    limits = Limits(stream_window_bytes=40_000, connection_window_bytes=70_000)
    caller = Caller(echoing(limits))
    caller.send(wire.settings({wire.INITIAL_WINDOW_SIZE: 1 << 20}) + wire.window_update(0, 1 << 20))
    await caller.settled()
    caller.headers(1)
    message, at = prefixed(bytes(300_000)), 0
    room = {0: 70_000, 1: 40_000}
    while at < len(message):
        size = min(room[0], room[1], 16_000, len(message) - at)
        assert size > 0, "the server gives no more credit"
        at += size
        room = {stream: left - size for stream, left in room.items()}
        caller.data(1, message[at - size : at], end=at == len(message))
        for frame in await caller.answered():
            if frame.kind == wire.WINDOW_UPDATE and frame.stream_id in room:
                room[frame.stream_id] += int.from_bytes(frame.payload, "big")
    assert not caller.server.calls and not caller.connection.unread_bytes


class Deaf(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
    """Reads nothing of what it is sent."""

    def service(self, details: Any) -> Any:
        async def stream(requests: Any, context: Any) -> None:
            await asyncio.Event().wait()

        return grpc.stream_stream_rpc_method_handler(stream)


def deaf(limits: Limits) -> Server:
    server = Server(limits)
    server.add_generic_rpc_handlers([Deaf()])
    return server


async def test_what_no_handler_reads_gets_no_credit() -> None:
    """A stream holds its window of messages at most, however many are sent."""
    caller = Caller(deaf(Limits(stream_window_bytes=40_000, connection_window_bytes=1 << 20)))
    caller.headers(1)
    await caller.settled()
    for _ in range(2):
        caller.data(1, prefixed(bytes(15_000)))
    assert not [frame for frame in await caller.answered() if frame.kind == wire.WINDOW_UPDATE and frame.stream_id]
    caller.data(1, prefixed(bytes(15_000)))
    assert ends(await caller.answered()) == {("stream", ErrorCode.FLOW_CONTROL_ERROR)}
    assert not caller.server.held_bytes and not caller.connection.unread_bytes


async def test_a_server_holds_no_more_than_it_may() -> None:
    """Requests that are half there count as well. Small ones still get in."""
    server = echoing(Limits(held_bytes_max=100_000, stream_window_bytes=1 << 20))
    caller = Caller(server)
    await caller.settled()
    for stream_id in (1, 3):
        caller.headers(stream_id)
        for _ in range(3):
            caller.data(stream_id, prefixed(bytes(200_000))[:16_384] if not server.held_bytes else bytes(16_384))
    caller.headers(5)
    statuses = []
    for _ in range(6):
        caller.data(5, prefixed(bytes(200_000))[:16_384])
        statuses += [frame for frame in await caller.answered() if frame.kind == wire.HEADERS]
    assert statuses and server.held_bytes <= 100_000 + 16_384
    await goes_on_with(caller, 7)


async def goes_on_with(caller: Caller, stream_id: int) -> None:
    caller.headers(stream_id)
    caller.data(stream_id, prefixed(b"small"), end=True)
    assert prefixed(b"small") in [frame.payload for frame in await caller.answered()]


async def test_too_many_streams_are_refused_and_may_come_again() -> None:
    caller = Caller(deaf(Limits(streams_max=2)))
    await caller.settled()
    for stream_id in (1, 3, 5):
        caller.headers(stream_id, with_path("/any"))
    found = await caller.answered()
    assert [(frame.stream_id, frame.code) for frame in found] == [(5, ErrorCode.REFUSED_STREAM)]
    caller.send(wire.rst_stream(1, ErrorCode.CANCEL))
    caller.headers(7, with_path("/any"))
    assert not await caller.answered() and len(caller.connection.streams) == 2


async def test_the_server_refuses_calls_above_its_limit() -> None:
    server = deaf(Limits(calls_max=1))
    for number in range(2):
        caller = Caller(server)
        await caller.settled()
        caller.headers(1, with_path("/any"))
        caller.data(1, prefixed(b""))
        found = [frame for frame in await caller.answered() if frame.kind == wire.HEADERS]
        assert [b"grpc-status\x018" in frame.payload for frame in found] == [True] * number


FLOODS = {
    "pings": F(wire.PING, 0, 0, bytes(8)),
    "settings": wire.settings({}),
    "priorities": F(wire.PRIORITY, 0, 1, bytes(5)),
    "empty data": F(wire.DATA, 0, 1),
    "unknown frames": F(0xEE, 0, 0),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
async def test_floods_end_the_connection(flood: bytes) -> None:
    caller = Caller(deaf(Limits(controls_per_s=10)))
    caller.headers(1)
    await caller.settled()
    for _ in range(90):
        caller.send(flood)
    assert not ends(await caller.answered())
    caller.send(flood * 20)
    assert ends(await caller.answered()) == CALM


async def test_a_flood_of_continuations_ends_the_connection() -> None:
    """With content by its size, without by its number (CVE-2024-27316)."""
    for content, most in ((b"x" * 100, Limits(header_bytes_max=1_000)), (b"", Limits(controls_per_s=10))):
        caller = Caller(limits=most)
        await caller.settled()
        caller.send(F(wire.HEADERS, 0, 1) + F(wire.CONTINUATION, 0, 1, content) * 110)
        assert ends(await caller.answered()) == CALM


async def test_streams_opened_and_reset_at_once_end_the_connection() -> None:
    """CVE-2023-44487. A burst is allowed: a client that stops cancels what it has."""
    caller = Caller(echoing(Limits(resets_per_s=10)))
    await caller.settled()
    for number in range(120):
        if number == 95:
            assert not ends(await caller.answered())
        caller.headers(2 * number + 1)
        caller.send(wire.rst_stream(2 * number + 1, ErrorCode.CANCEL))
    assert ends(await caller.answered()) == CALM
    caller.connection.connection_lost(None)
    assert not caller.server.calls


async def test_small_fields_that_become_large_end_the_connection() -> None:
    """A field of the table is a byte on the wire (an HPACK bomb)."""
    caller = Caller(limits=Limits(header_bytes_max=16_384))
    await caller.settled()
    bomb = caller.encoder.encode([*POST, ("bomb", "x" * 3_000)], huffman=False)
    caller.send(F(wire.HEADERS, 5, 1, bomb))
    assert not [end for end in ends(await caller.answered()) if end[0] == "connection"]
    caller.send(F(wire.HEADERS, 5, 3, b"\xbe" * 1_000))
    assert {code for _, code in ends(await caller.answered())} == {ErrorCode.COMPRESSION_ERROR}


async def test_who_demands_answers_and_reads_none_is_cut_off() -> None:
    caller = Caller(limits=Limits(replies_bytes_max=100))
    await caller.settled()
    caller.connection.pause_writing()
    caller.send(F(wire.PING, 0, 0, bytes(8)) * 5)
    assert not ends(await caller.answered())
    caller.send(F(wire.PING, 0, 0, bytes(8)))
    assert ends(await caller.answered()) == CALM


async def test_writers_wait_for_a_caller_that_does_not_read() -> None:
    """However large the windows it offers."""
    caller = Caller(echoing())
    caller.send(wire.settings({wire.INITIAL_WINDOW_SIZE: 1 << 30}) + wire.window_update(0, 1 << 30))
    caller.headers(1, with_path("/test.Echo/Stream"))
    await caller.settled()
    caller.connection.pause_writing()
    for _ in range(10):
        caller.data(1, prefixed(bytes(1_000)))
    assert not [frame for frame in await caller.answered() if frame.kind == wire.DATA]
    caller.connection.resume_writing()
    assert len([frame for frame in await caller.answered() if frame.kind == wire.DATA]) == 10
    caller.data(1, b"", end=True)
    await caller.answered()
    assert not caller.server.calls


async def looked(server: Server, after_s: float) -> None:
    """Let the server look at its connections as if that much time had passed."""
    loop = asyncio.get_running_loop()
    for connection in server.connections:
        for name in ("heard_s", "opened_s", "busy_s", "closing_s", "pinged_s"):
            at_s = getattr(connection, name)
            if at_s is not None:
                setattr(connection, name, at_s - after_s)
        for stream in connection.streams.values():
            if stream.deadline_s is not None:
                stream.deadline_s -= after_s
    server._look(loop)
    assert server._looking is not None
    server._looking.cancel()


async def test_silent_idle_and_unfinished_connections_end() -> None:
    limits = Limits(handshake_s=10, idle_s=100, ask_alive_s=60, dead_s=20, linger_s=5)
    unfinished = Caller(limits=limits, greet=False)
    await looked(unfinished.server, 11)
    assert ends(await unfinished.answered()) == {("connection", ErrorCode.SETTINGS_TIMEOUT)}
    assert unfinished.wire.closed and not unfinished.wire.aborted
    await looked(unfinished.server, 6)
    assert unfinished.wire.aborted

    silent = Caller(deaf(limits))
    silent.headers(1)
    await silent.settled()
    await looked(silent.server, 61)
    assert [frame.kind for frame in await silent.answered()] == [wire.PING]
    silent.send(F(wire.PING, wire.ACK, 0, bytes(8)))
    await looked(silent.server, 59)
    assert not await silent.answered()
    await looked(silent.server, 2)
    await looked(silent.server, 21)
    assert silent.wire.aborted

    idle = Caller(echoing(limits))
    await goes_on(idle, 1)
    await looked(idle.server, 101)
    assert ends(await idle.answered()) == {("connection", ErrorCode.NO_ERROR)} and idle.wire.closed


async def test_a_deadline_ends_the_handler() -> None:
    caller = Caller(deaf(Limits()))
    await caller.settled()
    caller.headers(1, [*POST, ("grpc-timeout", "5S")])
    caller.data(1, prefixed(b""))
    await looked(caller.server, 4.9)
    assert not await caller.answered()
    await looked(caller.server, 0.2)
    found = await caller.answered()
    assert b"grpc-status\x014" in found[0].payload and not caller.connection.streams
