"""Channels of this client over real sockets, to this server and to grpc's own."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from tests.transport.served import serving, started
from tests.transport.test_calls import LARGE, LIMITS, Service, grpcs_server, ours
from tickwheel.node.certs import make_certificates
from tickwheel.node.tls import PortFiles, server_context
from tickwheel.transport import channel as channel_module
from tickwheel.transport.channel import END_OF_STREAM, NO_ANSWER, NO_CONNECTION, Channel
from tickwheel.transport.client import CLOSED, NO_ADDRESS, OTHER_PROTOCOL, connect
from tickwheel.transport.limits import Limits
from tickwheel.transport.server import Server

SOON_S = 10.0


@asynccontextmanager
async def opened(address: str, limits: Limits = LIMITS, **more: Any) -> AsyncIterator[Channel]:
    """A channel, closed at the end; all that is done with it has SOON_S."""
    channel = Channel(address, limits, **more)
    async with asyncio.timeout(SOON_S):
        yield channel
    await channel.close()


def of(channel: Channel, kind: str, name: str) -> Any:
    """A method of the service, over bytes."""
    return getattr(channel, kind)(f"/s/{name}", bytes, bytes)


async def until(happened: Callable[[], bool]) -> None:
    """Let the loop run until something has happened that nothing tells of."""
    while not happened():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value


@pytest.fixture(params=["ours", "grpc's"])
def served(request: pytest.FixtureRequest) -> Callable[[Service], Any]:
    return grpcs_server if request.param == "grpc's" else lambda service: serving(ours(service))


async def test_every_kind_of_call(served: Callable[[Service], Any]) -> None:
    async with served(Service()) as address, opened(address) as channel:
        echo = of(channel, "unary_unary", "Echo")
        for message in (b"", b"x", bytes(16_379), bytes(16_380), LARGE):
            assert await echo(message) == message
        sent = [b"%d" % number * 999 for number in range(500)]
        assert await asyncio.gather(*map(echo, sent)) == sent
        assert [one async for one in of(channel, "unary_stream", "Count")(b"300")] == [b"%d" % n for n in range(300)]
        join = of(channel, "stream_unary", "Join")()
        for message in (b"a", LARGE, b"", b"c"):
            await join.write(message)
        await join.done_writing()
        assert await join == b"a" + LARGE + b"c"
        assert await of(channel, "stream_unary", "Join")(iter([b"a", LARGE, b"", b"c"])) == b"a" + LARGE + b"c"
        assert await of(channel, "stream_unary", "Join")(iter([])) == b""
        numbers = of(channel, "unary_stream", "Count")(b"300")
        assert [one async for one in of(channel, "stream_stream", "Both")(numbers)] == [b"%d" % n for n in range(300)]
        both = of(channel, "stream_stream", "Both")()
        for message in (b"1", LARGE, b"3"):
            await both.write(message)
            assert await both.read() == message
        await both.done_writing()
        assert await both.read() is END_OF_STREAM
        assert both.done() and not both.cancelled() and not both.cancel()
        assert channel.get_state() is grpc.ChannelConnectivity.READY
        [connection] = channel._connections
        assert not connection.streams and not connection.unread_bytes


async def test_a_call_can_be_awaited_again(served: Callable[[Service], Any]) -> None:
    """It answers as before, by its response or its error."""
    async with served(Service()) as address, opened(address) as channel:
        call = of(channel, "unary_unary", "Echo")(b"x")
        assert [await call, await call] == [b"x", b"x"]
        call = of(channel, "unary_unary", "Fail")(b"x")
        first, again = await failure(call), await failure(call)
        assert (again.code(), again.details()) == (first.code(), first.details())


async def test_small_frames_do_not_wait_for_acknowledgements() -> None:
    async with serving(ours(Service())) as address, opened(address) as channel:
        assert await of(channel, "unary_unary", "Echo")(b"x") == b"x"
        [connection] = channel._connections
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_requests_that_end_by_an_error_end_the_call(served: Callable[[Service], Any]) -> None:
    """Whatever iterates over them; and a call that ends first leaves none of them waiting."""

    async def broken() -> AsyncIterator[bytes]:
        yield b"x"
        raise KeyError("a mistake")

    left = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        try:
            yield b"abort"
            await asyncio.Event().wait()
        finally:
            left.set()

    async with served(Service()) as address, opened(address) as channel:
        refused = of(channel, "unary_stream", "None")(b"")
        error = await failure(of(channel, "stream_unary", "Join")(refused))
        assert error.code() is grpc.StatusCode.UNKNOWN and "UNIMPLEMENTED" in str(error.details())
        error = await failure(of(channel, "stream_unary", "Join")(broken()))
        assert error.code() is grpc.StatusCode.UNKNOWN and "a mistake" in str(error.details())
        error = await failure(of(channel, "stream_stream", "Both")(endless()).read())
        assert error.code() is grpc.StatusCode.DATA_LOSS
        await left.wait()


async def test_errors_come_as_they_are(served: Callable[[Service], Any]) -> None:
    async with served(Service()) as address, opened(address) as channel:
        text = "\t\nnot \u2014 found % \r\0 \u2603"
        error = await failure(of(channel, "unary_unary", "Fail")(text.encode()))
        assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, text)
        assert dict(cast(Any, error.trailing_metadata()))["more-bin"] == b"\0\xff"
        assert (await failure(of(channel, "unary_unary", "None")(b""))).code() is grpc.StatusCode.UNIMPLEMENTED
        both = of(channel, "stream_stream", "Both")()
        await both.write(b"abort")
        error = await failure(both.read())
        assert (error.code(), error.details()) == (grpc.StatusCode.DATA_LOSS, "as asked")
        with pytest.raises(grpc.aio.AioRpcError, match="as asked"):
            await both.write(b"too late")


async def test_metadata_goes_with_every_call(served: Callable[[Service], Any]) -> None:
    service = Service()
    metadata = (("x-first", "1"), ("x-last-bin", b"\1\2,\xff"))
    async with served(service) as address, opened(address, metadata=metadata) as channel:
        for _ in range(2):  # the service fails without
            assert await of(channel, "unary_unary", "Metadata")(b"") == b""


async def test_a_large_answer_is_refused(served: Callable[[Service], Any]) -> None:
    async with served(Service()) as address, opened(address, Limits(message_bytes_max=1_000)) as channel:
        error = await failure(of(channel, "unary_unary", "Echo")(bytes(1_001)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await of(channel, "unary_unary", "Echo")(b"still there") == b"still there"


@pytest.mark.parametrize("how", ["cancelled", "its task", "deadline", "closed"])
async def test_a_call_ends_from_this_side(served: Callable[[Service], Any], how: str) -> None:
    """And the server's handler with it."""
    service = Service()
    async with served(service) as address, opened(address) as channel:
        call = of(channel, "unary_unary", "Wait")(b"", timeout=0.2 if how == "deadline" else None)
        waiting = asyncio.ensure_future(call)
        if how != "deadline":
            await service.begun.wait()
        if how == "cancelled":
            assert call.cancel() and call.cancelled() and not call.cancel()
        elif how == "its task":
            waiting.cancel()
        elif how == "closed":
            await channel.close()
        if how == "deadline":
            assert (await failure(waiting)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        else:
            with pytest.raises(asyncio.CancelledError):
                await waiting
        if service.begun.is_set():
            await service.ended.wait()


async def test_a_deadline_leaves_what_has_come() -> None:
    """An answer that is here when time is over still counts."""
    async with serving(ours(Service())) as address, opened(address) as channel:
        call = of(channel, "unary_unary", "Echo")(b"x", timeout=60)
        await until(call.done)
        call._expire()
        assert await call == b"x"


async def test_what_was_not_read_of_a_cancelled_stream_makes_room() -> None:
    """Else the connection's window would shrink with each stream that is left."""
    async with serving(ours(Service())) as address, opened(address) as channel:
        counting = of(channel, "unary_stream", "Count")(b"2000")
        assert await counting.read() == b"0"
        await until(counting.done)
        [connection] = channel._connections
        assert connection.unread_bytes
        counting.cancel()
        assert not connection.unread_bytes


# -- no connection


async def test_nobody_listens_until_somebody_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls fail at once, for a moment without another attempt, and say that nothing was sent. Then they go through."""
    service = Service()
    server = ours(service)
    port = await started(server)
    await server.stop()
    async with opened(f"127.0.0.1:{port}") as channel:
        echo = of(channel, "unary_unary", "Echo")
        error = await failure(echo(b"x"))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert str(error.details()).startswith(NO_CONNECTION) and "Connection refused" in str(error.details())
        assert channel.get_state() is grpc.ChannelConnectivity.IDLE
        with monkeypatch.context() as patched:
            patched.setattr(channel, "_reach", lambda: pytest.fail("another attempt"))
            channel._fails_until_s = channel.loop.time() + 60
            assert (await failure(echo(b"x"))).details() == error.details()
        channel._fails_until_s = 0.0
        again = ours(service)
        again.listen(socket.create_server(("127.0.0.1", port)), None)
        await again.start()
        assert await echo(b"x") == b"x"
        await again.stop()


@pytest.mark.parametrize("address", ["nobody.invalid:1", "x" * 300 + ":1", "a..b:1"])
async def test_a_host_that_is_none(address: str) -> None:
    async with opened(address) as channel:
        error = await failure(of(channel, "unary_unary", "Echo")(b"x"))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert str(error.details()).startswith(NO_CONNECTION) and NO_ADDRESS in str(error.details())


@asynccontextmanager
async def accepting(answer: bytes | None, *, closes: bool = True) -> AsyncIterator[str]:
    """A server that says something to whoever connects, and closes; None: it says nothing and waits."""
    talks: list[asyncio.Task[Any]] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        talks.append(task)
        try:
            writer.write(answer or b"")
            if answer is None or not closes:
                await reader.read(-1)
        finally:
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for task in talks:
        task.cancel()
    await asyncio.gather(*talks, return_exceptions=True)


HTTP_1 = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "closes", "words"),
    [
        (None, False, [NO_ANSWER]),
        (b"", True, [CLOSED, "Connection reset"]),  # by what was unread when it closed
        (HTTP_1, False, [OTHER_PROTOCOL]),
        (bytes(100_000), False, [OTHER_PROTOCOL]),
    ],
)
async def test_a_server_that_is_none_of_grpc(
    monkeypatch: pytest.MonkeyPatch, answer: bytes | None, closes: bool, words: list[str]
) -> None:
    """It is silent, or hangs up, or speaks something else: the call was not sent, and says why."""
    monkeypatch.setattr(channel_module, "STEP_S", 0.3 if answer is None else 60.0)
    async with accepting(answer, closes=closes) as address, opened(address) as channel:
        error = await failure(of(channel, "unary_unary", "Echo")(b"x"))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        details = str(error.details())
        assert details.startswith(NO_CONNECTION) and any(said in details for said in words), details
        assert not channel._connections


async def test_a_pause_of_this_process_is_no_silence_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand clients that connect at once hold their loops up for seconds. Attempts given up for that, with
    the answer waiting to be read, were repeated for over a minute."""
    monkeypatch.setattr(channel_module, "STEP_S", 0.3)
    dials = 0

    async def held_up(*place: Any, **more: Any) -> Any:
        nonlocal dials
        dials += 1
        connection = await connect(*place, **more)
        time.sleep(2 * channel_module.STEP_S)  # noqa: ASYNC251  # nothing else runs, as in the pause
        return connection

    monkeypatch.setattr(channel_module, "connect", held_up)
    async with serving(ours(Service())) as address, opened(address) as channel:
        assert await of(channel, "unary_unary", "Echo")(b"x") == b"x"
    assert dials == 1


@pytest.mark.parametrize("how", ["cancelled", "its task", "deadline", "closed"])
async def test_a_call_that_waits_for_a_connection_ends(how: str) -> None:
    async with accepting(None) as address, opened(address) as channel:
        call = of(channel, "stream_stream", "Both")(timeout=0.1 if how == "deadline" else None)
        reading = asyncio.ensure_future(call.read())
        await asyncio.sleep(0)
        if how == "cancelled":
            assert call.cancel() and call.done()
        elif how == "its task":
            reading.cancel()
        elif how == "closed":
            await channel.close()
        if how == "deadline":
            assert (await failure(reading)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        else:
            with pytest.raises(asyncio.CancelledError):
                await reading
        with pytest.raises(grpc.aio.AioRpcError):
            await call.write(b"too late")


async def test_the_next_address_of_a_host_is_tried_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one takes connections and says nothing. The attempt there ends once there is a connection."""
    async with accepting(None) as silent, serving(ours(Service())) as address, opened("host:1") as channel:

        async def find(_: str) -> list[Any]:
            return [(socket.AF_INET, ("127.0.0.1", int(one.rpartition(":")[2]))) for one in (silent, address)]

        monkeypatch.setattr(channel._names, "find", find)
        assert await of(channel, "unary_unary", "Echo")(b"x") == b"x"
        assert len(channel._connections) == 1


async def test_a_mistake_while_dialling_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not repeated in a loop without rest."""
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
    async with opened("127.0.0.1:1") as channel:

        async def broken(_: str) -> list[Any]:
            raise KeyError("a mistake")

        monkeypatch.setattr(channel._names, "find", broken)
        error = await failure(of(channel, "unary_unary", "Echo")(b"x"))
        assert error.code() is grpc.StatusCode.UNAVAILABLE and "a mistake" in str(error.details())


# -- TLS


async def test_a_certificate_counts_for_the_name_that_was_dialled(tmp_path: Path) -> None:
    """Not for what the name resolves to. A name that no server can have is told like any other failure."""
    make_certificates(tmp_path, {"n1": ["localhost"]}, [], [], 1)
    server = server_context(
        PortFiles(*((tmp_path / one).read_bytes() for one in ("n1.key", "n1.crt", "ca.crt"))), required=False
    )
    client = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    client.set_alpn_protocols(["h2"])
    async with serving(ours(Service()), server) as address:
        port = address.rpartition(":")[2]
        for host, name, words in (
            ("localhost", "", ""),
            ("127.0.0.1", "localhost", ""),
            ("127.0.0.1", "", "IP address mismatch"),
            ("localhost", "other.example", "Hostname mismatch"),
            ("localhost", "a..b", "no name of a host"),
        ):
            async with opened(f"{host}:{port}", secured=client, server_name=name) as channel:
                if words:
                    error = await failure(of(channel, "unary_unary", "Echo")(b"x"))
                    details = str(error.details())
                    assert details.startswith(NO_CONNECTION) and words in details
                else:
                    assert await of(channel, "unary_unary", "Echo")(b"x") == b"x"


# -- connections that end or are full


async def test_a_lost_connection_ends_its_calls_and_the_next_call_dials() -> None:
    """They may have been carried out: their error does not say that nothing was sent."""
    server = ours(Service())
    async with serving(server) as address, opened(address) as channel:
        both = of(channel, "stream_stream", "Both")()
        await both.write(b"1")
        assert await both.read() == b"1"
        for one in list(server.connections):
            one.cut_off()
        error = await failure(both.read())
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert not str(error.details()).startswith(NO_CONNECTION)
        assert await of(channel, "unary_unary", "Echo")(b"x") == b"x"
        assert len(channel._connections) == 1


async def test_a_server_that_goes_away_ends_its_calls_in_peace() -> None:
    """Calls under way go on; others go to its successor at the same address."""
    first = ours(Service())
    port = await started(first)
    async with opened(f"127.0.0.1:{port}") as channel:
        both = of(channel, "stream_stream", "Both")()
        await both.write(b"1")
        assert await both.read() == b"1"
        stopping = asyncio.ensure_future(first.stop(SOON_S))
        await until(lambda: channel.connected is None)
        second = ours(Service())
        second.listen(socket.create_server(("127.0.0.1", port), reuse_port=False), None)
        await second.start()
        assert await of(channel, "unary_unary", "Echo")(b"x") == b"x"
        await both.write(b"2")
        assert await both.read() == b"2"
        await both.done_writing()
        assert await both.read() is END_OF_STREAM
        await stopping
        await second.stop()


async def test_calls_beyond_the_streams_of_a_connection_get_another_one() -> None:
    """A client with more consumers than a connection may have streams still serves all of them."""
    server = Server(Limits(streams_max=3))
    server.add_generic_rpc_handlers([Service()])
    async with serving(server) as address, opened(address) as channel:
        calls = []
        for number in range(10):
            calls.append(of(channel, "stream_stream", "Both")())
            await calls[-1].write(b"%d" % number)
            assert await calls[-1].read() == b"%d" % number
        assert len(channel._connections) == 4
        assert len(server.connections) == 4


async def test_a_connection_that_the_server_leaves_idle_is_replaced() -> None:
    server = Server(Limits(idle_s=0.05))
    server.add_generic_rpc_handlers([Service()])
    async with serving(server) as address, opened(address) as channel:
        for _ in range(3):
            assert await of(channel, "unary_unary", "Echo")(b"x") == b"x"
            await until(lambda: channel.connected is None)


async def test_who_waits_for_one_answer_asks_less_often_whether_the_server_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thousand idle clients wait for another master at each node, whom their pings would cost half a percent of a
    processor. A stream needs to know sooner."""
    limits = replace(LIMITS, ask_alive_s=10.0)
    async with serving(ours(Service())) as address, opened(address, limits) as channel:
        connection = await channel.connect()
        pings: list[bool] = []
        monkeypatch.setattr(connection, "ping", lambda: pings.append(True))

        def asks_after(silent_s: float) -> bool:
            pings.clear()
            connection.heard_s = connection.loop.time() - silent_s
            connection._look_at_peer()
            return bool(pings)

        assert not asks_after(limits.ask_alive_unary_s + 1), "nobody waits"
        waiting = of(channel, "unary_unary", "Wait")(b"")
        assert not asks_after(limits.ask_alive_s + 1)
        assert asks_after(limits.ask_alive_unary_s + 1)
        for kind, requests in (("stream_stream", ()), ("unary_stream", (b"",)), ("stream_unary", ())):
            stream = of(channel, kind, "Both")(*requests)
            assert asks_after(limits.ask_alive_s + 1), kind
            stream.cancel()
            assert not asks_after(limits.ask_alive_s + 1)
        waiting.cancel()
