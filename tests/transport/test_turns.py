"""However many connections flood a server, one pass of the loop costs one budget; connections take turns."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import grpc
import pytest

from tests.transport.served import dialled, serving
from tests.transport.test_calls import LIMITS, once
from tests.transport.test_costs import deaf, looked
from tests.transport.test_pieces import MANY, NUMBERS, direct, many_calls
from tests.transport.test_protocol import ends, with_path
from tests.transport.wires import Caller
from tickwheel.transport import server as servers
from tickwheel.transport import wire
from tickwheel.transport.connection import ENDING_WORK
from tickwheel.transport.limits import Limits
from tickwheel.transport.messages import prefixed
from tickwheel.transport.server import BEGINNING_WORK, DirectHandler, Opened, Server, StreamHandler
from tickwheel.transport.turns import CONNECTION_WORK, PASS_WORK, SLICE_WORK
from tickwheel.transport.wire import ErrorCode

F = wire.frame
A_PASS = PASS_WORK // (1 + BEGINNING_WORK) + 1
"""Calls that begin in a pass at most. The last one may begin with the last unit of work."""
LARGE = 300_000


async def connected(server: Server, count: int) -> list[Caller]:
    """Callers that have been greeted."""
    callers = [Caller(server) for _ in range(count)]
    for caller in callers:
        await caller.settled()
    return callers


async def passes() -> None:
    await asyncio.sleep(0)


@pytest.mark.parametrize("count", [2, 50, 200])
async def test_floods_of_many_connections_take_one_budget_a_pass(count: int) -> None:
    """In turns, each in order. Nothing more is read from who waits."""
    server, handlers = direct()
    callers = await connected(server, count)
    calls = 20_000 // count
    for caller in callers:
        caller.send(many_calls()[: calls * len(many_calls()) // MANY] if calls < MANY else many_calls())
    begun = [0, len(handlers.begun)]
    while any(caller.connection.waits for caller in callers):
        assert all(caller.connection.waits is not caller.wire.reading for caller in callers)
        await passes()
        begun.append(len(handlers.begun))
    assert all(0 < after - before <= A_PASS for before, after in pairwise(begun))
    assert all(caller.wire.reading for caller in callers)
    for caller in callers:
        found = [frame.payload for frame in await caller.answered() if frame.kind == wire.DATA]
        assert found == [prefixed(number) for number in NUMBERS[: len(found)]] and len(found) >= min(calls, MANY) - 2


async def test_floods_get_equal_shares() -> None:
    server, handlers = direct()
    callers = await connected(server, 100)
    for caller in callers:
        caller.send(many_calls())
    turns = 15 * -(-100 * SLICE_WORK // PASS_WORK)
    for _ in range(turns):  # the first ones to be read were ahead, and each decodes its fields once
        await passes()
    before = [caller.connection._at for caller in callers]
    for _ in range(turns):
        await passes()
    shares = [caller.connection._at - at for caller, at in zip(callers, before, strict=True)]
    assert 0 < max(shares) - min(shares) <= max(shares) // 4, Counter(shares)
    assert len(handlers.begun) <= (2 * turns + 2) * A_PASS


async def test_who_sends_little_waits_for_each_other_connection_once() -> None:
    server, handlers = direct()
    *flooding, other = await connected(server, 101)
    for caller in flooding:
        caller.send(many_calls())
    other.headers(1)
    other.data(1, prefixed(b"hello"), end=True)
    assert other.connection.waits
    for _ in range(2 * -(-100 * SLICE_WORK // PASS_WORK)):  # a slice ends behind the frame that reaches its end
        await passes()
    assert b"hello" in handlers.begun and not other.connection.waits
    assert all(caller.connection.waits for caller in flooding)


async def test_another_servers_connections_do_not_wait() -> None:
    """As those of a node's peers."""
    server, _ = direct()
    for caller in await connected(server, 100):
        caller.send(many_calls())
    [peer] = await connected(direct()[0], 1)
    peer.headers(1)
    peer.data(1, prefixed(b"hello"), end=True)
    assert not peer.connection.waits
    assert prefixed(b"hello") in [frame.payload for frame in await peer.answered()]


async def test_who_waits_for_its_turn_is_neither_slow_nor_dead() -> None:
    server, _ = direct(Limits(handshake_s=10.0))
    flooding, late = (await connected(server, 1))[0], Caller(server, greet=False)
    pinged = (await connected(server, 1))[0]
    pinged.connection.ping()
    flooding.send(many_calls())
    Caller(server).send(many_calls())
    Caller(server).send(many_calls())
    late.send(wire.PREFACE + wire.settings({}))
    pinged.send(F(wire.PING, wire.ACK, 0, bytes(8)))
    assert late.connection.waits and pinged.connection.waits
    await looked(server, 21)
    assert not late.wire.closed and not pinged.wire.closed
    assert not ends(await late.answered()) and late.connection.ready


async def test_who_waits_with_a_call_is_not_idle() -> None:
    server, handlers = direct(Limits(idle_s=10.0))
    *flooding, late = await connected(server, 5)
    for caller in flooding:
        caller.send(many_calls())
    late.headers(1)
    late.data(1, prefixed(b"hello"), end=True)
    assert late.connection.waits
    await looked(server, 11)
    assert not late.wire.closed
    await late.answered()
    assert b"hello" in handlers.begun
    await looked(server, 11)
    assert late.wire.closed


async def test_a_connection_that_ends_leaves_the_queue() -> None:
    server, handlers = direct()
    callers = await connected(server, 10)
    for caller in callers:
        caller.send(many_calls())
    for caller in callers[:5]:
        caller.connection.connection_lost(None)
    for caller in callers[5:9]:
        caller.connection.shut()
        caller.connection.connection_lost(None)
    await callers[9].answered()
    assert not server.turns._reading and not server.calls
    assert len(handlers.begun) < 2 * MANY


async def test_an_error_of_ours_ends_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others get their turns."""
    server, _ = direct()
    callers = await connected(server, 3)
    for caller in callers:
        caller.send(many_calls())
    errors: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    monkeypatch.setattr(callers[1].connection, "_take", lambda data, at: 1 // 0)
    found = [len(await caller.answered()) for caller in (callers[0], callers[2])]
    assert callers[1].wire.aborted and ZeroDivisionError in map(type, errors)
    assert min(found) > MANY


# -- large requests


class Heard(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
    """Notes in which pass of the loop each request begins, whatever its kind of method."""

    def __init__(self) -> None:
        self.now = 0
        self.begun: list[tuple[int, bytes]] = []
        """Pass, and the first byte of the request."""
        self.handled: list[tuple[int, bytes]] = []
        self._counting = asyncio.get_running_loop().call_soon(self._count)

    def _count(self) -> None:
        self.now += 1
        self._counting = asyncio.get_running_loop().call_soon(self._count)

    def stop(self) -> None:
        """Count no passes any more."""
        self._counting.cancel()

    def service(self, details: Any) -> Any:
        def read(data: bytes) -> bytes:
            self.begun.append((self.now, data[:1]))
            return data

        async def unary(request: bytes, context: Any) -> bytes:
            self.handled.append((self.now, request[:1]))
            return b""

        async def stream(requests: Any, context: Any) -> None:
            async for request in requests:
                self.handled.append((self.now, request[:1]))
                await context.write(b"")

        def begin(data: bytes, call: Any) -> None:
            read(data)
            call.answer(b"")

        def open_stream(call: Any) -> Opened:
            def take(data: bytes) -> None:
                read(data)
                call.post(b"")

            return Opened(take, lambda: None)

        made: dict[str, Any] = {
            "/direct": DirectHandler(begin),
            "/opened": StreamHandler(open_stream),
            "/unary": grpc.unary_unary_rpc_method_handler(unary, request_deserializer=read),
            "/stream": grpc.stream_stream_rpc_method_handler(stream, request_deserializer=read),
        }
        return made[details.method]


@pytest.fixture
def heard() -> Iterator[Callable[[], tuple[Server, Heard]]]:
    """Makes a server with such handlers."""
    made: list[Heard] = []

    def make() -> tuple[Server, Heard]:
        server = Server()
        made.append(Heard())
        server.add_generic_rpc_handlers([made[-1]])
        return server, made[-1]

    yield make
    for one in made:
        one.stop()


def large(caller: Caller, stream_id: int, path: str, name: bytes = b"x", size: int = LARGE, count: int = 1) -> None:
    """A call with large requests."""
    caller.headers(stream_id, with_path(path))
    data = prefixed(name * size) * count
    for at in range(0, len(data), wire.FRAME_BYTES):
        caller.data(stream_id, data[at : at + wire.FRAME_BYTES], end=at + wire.FRAME_BYTES >= len(data))


Make = Callable[[], tuple[Server, Heard]]


@pytest.mark.parametrize("path", ["/direct", "/unary", "/stream", "/opened"])
async def test_one_large_request_begins_in_a_pass(path: str, heard: Make) -> None:
    """Of all connections and their streams."""
    server, handlers = heard()
    callers = await connected(server, 10)
    for caller in callers:
        for stream_id in (1, 3, 5):
            large(caller, stream_id, path)
    while len(handlers.begun) < 30:
        await passes()
    numbers = [number for number, _ in handlers.begun]
    assert all(before < after for before, after in pairwise(numbers))
    for caller in callers:
        assert sum(frame.flags & wire.END_STREAM for frame in await caller.answered()) == 3
    assert not server.calls and not server.held_bytes and not server.turns._beginning


async def test_small_requests_of_streams_share_a_pass_by_their_bytes(heard: Make) -> None:
    """Streams whose handlers were all woken at once."""
    server, handlers = heard()
    callers = await connected(server, 40)
    for caller in callers:
        large(caller, 1, "/stream", size=10_000, count=20)
    while len(handlers.begun) < 800:
        await passes()
    most = max(Counter(number for number, _ in handlers.begun).values())
    assert 1 < most <= Limits().requests_bytes // 10_000 + 1
    for caller in callers:
        await caller.answered()
    assert not server.calls and not server.held_bytes


async def test_who_sends_many_large_requests_has_one_place(heard: Make) -> None:
    server, handlers = heard()
    first, second = await connected(server, 2)
    for number in range(20):
        large(first, 2 * number + 1, "/direct", b"1")
    large(second, 1, "/direct", b"2")
    while len(handlers.begun) < 21:
        await passes()
    assert b"2" in [name for _, name in handlers.begun[:4]]


async def test_requests_of_a_connection_begin_in_order(heard: Make) -> None:
    """Small ones behind large ones wait as well."""
    server, handlers = heard()
    [caller] = await connected(server, 1)
    for number in range(20):
        large(caller, 2 * number + 1, "/direct", b"%d" % (number % 10), LARGE // 2 if number % 3 else 1)
    await caller.answered()
    while len(handlers.begun) < 20:
        await passes()
    assert b"".join(name for _, name in handlers.begun) == b"01234567890123456789"


async def test_small_requests_pass_large_ones_of_other_connections(heard: Make) -> None:
    """Their frames wait for no large request, and they begin in the next turns."""
    server, handlers = heard()
    *sending, other = await connected(server, 6)
    for caller in sending:
        for number in range(10):
            large(caller, 2 * number + 1, "/direct")
    large(other, 1, "/direct", b"o", 10)
    before = len(handlers.begun)
    for _ in range(8):
        await passes()
    assert b"o" in [name for _, name in handlers.begun[: before + 8]]


@pytest.mark.parametrize("path", ["/direct", "/unary", "/stream"])
async def test_a_request_that_is_cancelled_while_it_waits_never_begins(path: str, heard: Make) -> None:
    server, handlers = heard()
    first, second = await connected(server, 2)
    for number in range(3):
        large(first, 2 * number + 1, "/direct", b"1")
    large(second, 1, path, b"2")
    large(second, 3, path, b"3")
    large(second, 5, path, b"4")
    await passes()
    second.send(wire.rst_stream(3, ErrorCode.CANCEL))
    while len(handlers.begun) < 5:
        await passes()
    await second.answered()
    assert sorted(name for _, name in handlers.begun) == [b"1", b"1", b"1", b"2", b"4"]
    large(first, 11, "/direct", b"5")
    large(first, 13, path, b"6")
    large(second, 7, path, b"7")
    second.connection.connection_lost(None)
    await first.answered()
    while len(handlers.begun) < 7:
        await passes()
    await first.answered()
    assert not server.calls and not server.held_bytes and not server.turns._beginning
    assert b"7" not in [name for _, name in handlers.begun]


async def test_a_request_that_was_long_to_decode_is_handled_in_another_pass(
    heard: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no other large one begins in that pass."""
    monkeypatch.setattr(servers, "LONG_S", -1.0)  # each
    server, handlers = heard()
    callers = await connected(server, 10)
    for caller in callers:
        large(caller, 1, "/unary")
    while len(handlers.handled) < 10:
        await passes()
    numbers = sorted(number for number, _ in handlers.begun + handlers.handled)
    assert len(set(numbers)) == 20


async def test_a_reader_that_is_cancelled_while_others_have_their_turn_takes_nothing(
    heard: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had decoded is the next reader's."""
    monkeypatch.setattr(servers, "LONG_S", -1.0)  # each was long to decode
    server = Server()
    decoded: list[bytes] = []
    read: list[bytes] = []

    def decode(data: bytes) -> bytes:
        decoded.append(data[:1])
        return data

    async def stream(requests: Any, context: Any) -> None:
        first = asyncio.ensure_future(anext(requests))
        while not decoded:
            await passes()
        first.cancel()
        await asyncio.wait({first})
        assert first.cancelled()
        read.extend([request[:1] async for request in requests])

    handler = grpc.stream_stream_rpc_method_handler(stream, request_deserializer=decode)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("t", {"stream": handler})])
    [caller] = await connected(server, 1)
    caller.headers(1, with_path("/t/stream"))
    caller.data(1, prefixed(b"a") + prefixed(b"b"), end=True)
    while len(read) < 2:
        await passes()
    assert read == decoded == [b"a", b"b"]


async def test_what_is_taken_at_once_is_small_bounded_and_in_its_turn() -> None:
    """The rest is waited for, in order; the caller gets its window back, and nothing of it is held any more."""
    server = Server()
    at_once: list[list[bytes]] = []
    read: list[bytes] = []
    go = asyncio.Event()

    async def stream(requests: Any, context: Any) -> None:
        await go.wait()
        while len(read) < 206:
            taken = list(context.take_now())
            at_once.append(taken)
            read.extend(taken or [await anext(requests)])

    handler = grpc.stream_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("t", {"stream": handler})])
    [caller] = await connected(server, 1)
    caller.headers(1, with_path("/t/stream"))
    sent = [b"%d" % number for number in range(200)]
    sent += [bytes(servers.SMALL_BYTES + 1), *[bytes(servers.SMALL_BYTES)] * 5]
    for message in sent:
        data = prefixed(message)
        for place in range(0, len(data), wire.FRAME_BYTES):
            caller.data(1, data[place : place + wire.FRAME_BYTES])
    await caller.settled()
    server.turns.bytes_left = 0
    go.set()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not any(at_once[:1]), "the requests of this pass have used up their bytes"
    while len(read) < 206:
        await passes()
    assert read == sent
    sizes = [len(taken) for taken in at_once]
    assert max(sizes) <= servers.TURN_MESSAGES and sum(sizes) > 100
    large = [taken for taken in at_once if len(taken) and len(taken[0]) == servers.SMALL_BYTES]
    assert large and all(sum(map(len, taken)) <= servers.TAKEN_BYTES for taken in large)
    assert bytes(servers.SMALL_BYTES + 1) not in [message for taken in at_once for message in taken]
    assert not server.held_bytes and not caller.connection.unread_bytes


# -- calls that end


async def test_calls_whose_deadlines_pass_together_end_in_pieces() -> None:
    """Each look ends so many, and the next one comes soon."""
    server = deaf(Limits())
    callers = await connected(server, 2)
    for caller in callers:
        for number in range(servers.LATE_MAX):
            caller.headers(2 * number + 1, with_path("/any"))
        await caller.settled()
        for stream in caller.connection.streams.values():
            stream.deadline_s = 0.0
        caller.connection.look_s = 0.0
    for left in (servers.LATE_MAX, 0):
        await looked(server, 0)
        assert server.calls == left
    server._look(asyncio.get_running_loop())
    assert server._looking is not None and server._looking.when() > asyncio.get_running_loop().time() + 0.1
    server._looking.cancel()


async def test_calls_that_their_caller_cancels_count_as_more_than_a_frame() -> None:
    server = deaf(Limits())
    [caller] = await connected(server, 1)
    for number in range(300):
        caller.headers(2 * number + 1, with_path("/any"))
        caller.data(2 * number + 1, prefixed(b"x"))
        await caller.settled()
    caller.send(b"".join(wire.rst_stream(2 * number + 1, ErrorCode.CANCEL) for number in range(300)))
    assert caller.connection.waits and server.calls == 300 - -(-CONNECTION_WORK // (1 + ENDING_WORK))
    await caller.settled()
    assert not server.calls


# -- over sockets


async def test_a_server_answers_others_while_a_hundred_connections_flood_it() -> None:
    """No pass of its loop begins more than a budget's worth of calls."""
    server, handlers = direct()
    most, seen, looking = 0, 0, True

    def look() -> None:
        nonlocal most, seen
        most, seen = max(most, len(handlers.begun) - seen), len(handlers.begun)
        if looking:
            loop.call_soon(look)

    loop = asyncio.get_running_loop()
    loop.call_soon(look)
    async with serving(server) as address, asyncio.timeout(60):
        host, _, port = address.rpartition(":")
        writers = [(await asyncio.open_connection(host, int(port)))[1] for _ in range(100)]
        async with await dialled(address, LIMITS) as connection:
            for writer in writers:
                writer.write(wire.PREFACE + wire.settings({}) + many_calls())
            await handlers.one_begun.wait()
            for number in range(5):
                assert await once(connection, "/s/any", b"%d" % (MANY + number)) == b"%d" % (MANY + number)
            assert len(handlers.begun) < 100 * MANY, "the flood is still there"
        for writer in writers:
            writer.transport.abort()
    looking = False
    assert 0 < most <= 2 * A_PASS, "a look may come once in two passes"
