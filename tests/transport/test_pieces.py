"""Much that comes with one read is handled piece by piece, so that nobody keeps the loop: same order, same results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from tests.transport.served import dialled, serving
from tests.transport.test_calls import LIMITS, files, once
from tests.transport.test_costs import CALM, FLOODS, deaf, looked
from tests.transport.test_protocol import calls_of, echoing, ends, goes_on, with_path
from tests.transport.wires import POST, Caller, Frame, Wire
from tickwheel.node.certs import make_certificates
from tickwheel.node.tls import peer_context, server_context
from tickwheel.transport import turns, wire
from tickwheel.transport.client import CallError, ClientConnection
from tickwheel.transport.connection import OPENING_WORK
from tickwheel.transport.limits import Limits
from tickwheel.transport.messages import prefixed
from tickwheel.transport.server import DirectHandler, Server
from tickwheel.transport.turns import CONNECTION_WORK
from tickwheel.transport.wire import ErrorCode

F = wire.frame
MANY = 1_000
A_PASS = -(-CONNECTION_WORK // (1 + OPENING_WORK))
"""Streams of a connection opened in a pass at most."""


class Direct(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
    """Answers at once with what it was sent."""

    def __init__(self) -> None:
        self.begun: list[bytes] = []
        self.one_begun = asyncio.Event()

    def service(self, details: Any) -> Any:
        return DirectHandler(self._begin)

    def _begin(self, request: bytes, call: Any) -> None:
        self.begun.append(request)
        self.one_begun.set()
        call.answer(request)


def direct(limits: Limits | None = None) -> tuple[Server, Direct]:
    server, handlers = Server(limits), Direct()
    server.add_generic_rpc_handlers([handlers])
    return server, handlers


NUMBERS = [b"%d" % number for number in range(MANY)]


def many_calls(first: int = 1) -> bytes:
    """Whole calls with small messages, which number them."""
    block = wire.fields((name.encode(), value.encode()) for name, value in POST)
    return b"".join(
        F(wire.HEADERS, wire.END_HEADERS, first + 2 * number, block)
        + F(wire.DATA, wire.END_STREAM, first + 2 * number, prefixed(content))
        for number, content in enumerate(NUMBERS)
    )


def waiting(caller: Caller) -> int:
    """Bytes that were read and are not handled yet."""
    connection = caller.connection
    return len(connection._input) - connection._at + len(connection._rest)


async def handled(caller: Caller) -> list[Frame]:
    """Let the rest be handled; returns what is answered."""
    for _ in range(100_000):
        if not caller.connection.waits:
            return await caller.answered()
        await asyncio.sleep(0)
    pytest.fail("the rest has no end")


async def test_a_read_of_many_calls_takes_many_passes() -> None:
    """In each pass only so many begin, in order, and nothing is read until all are handled."""
    server, handlers = direct()
    caller = Caller(server)
    await caller.settled()
    caller.send(many_calls())
    begun = [len(handlers.begun)]
    while caller.connection.waits:
        assert not caller.wire.reading
        await asyncio.sleep(0)
        begun.append(len(handlers.begun))
    assert all(0 < after - before <= A_PASS for before, after in zip([0, *begun], begun, strict=False))
    assert handlers.begun == NUMBERS and caller.wire.reading and not waiting(caller)
    answers = [frame.payload for frame in await caller.answered() if frame.kind == wire.DATA]
    assert answers == list(map(prefixed, NUMBERS))
    await goes_on(caller, 2 * MANY + 1)


ENDS_OF_CALLS: dict[str, tuple[bytes, tuple[str, str] | None]] = {
    "one message": (prefixed(b"hello"), None),
    "no content": (prefixed(b""), None),
    "no message": (b"", None),
    "the largest message": (prefixed(bytes(1_000)), None),
    "too large a message": (prefixed(bytes(1_001)), None),
    "a compressed message": (b"\x01" + prefixed(b"hello")[1:], None),
    "two messages": (prefixed(b"one") + prefixed(b"two"), None),
    "an end within a message": (prefixed(b"hello")[:-1], None),
    "an end within a prefix": (b"\0\0", None),
    "the length that was announced": (prefixed(b"hello"), ("content-length", "10")),
    "more than was announced": (prefixed(b"hello"), ("content-length", "9")),
    "less than was announced": (prefixed(b"hello"), ("content-length", "11")),
    "a compression that is not read": (prefixed(b"hello"), ("grpc-encoding", "gzip")),
    "a time-out that is none": (prefixed(b"hello"), ("grpc-timeout", "soon")),
}


@pytest.mark.parametrize(("data", "more"), ENDS_OF_CALLS.values(), ids=ENDS_OF_CALLS)
async def test_a_call_in_one_frame_ends_as_one_in_pieces(data: bytes, more: tuple[str, str] | None) -> None:
    found = []
    for pieces in ([data], [data, b""], [data[:3], data[3:]]):
        server, handlers = direct(Limits(message_bytes_max=1_000))
        caller = Caller(server)
        await caller.settled()
        caller.headers(1, [*POST, *([more] if more else [])])
        for number, piece in enumerate(pieces, 1):
            caller.data(1, piece, end=number == len(pieces))
        answers = [frame for frame in await handled(caller) if frame.kind != wire.RST_STREAM or frame.code]
        found.append((handlers.begun, answers))
        assert not server.calls and not server.held_bytes and not caller.connection.unread_bytes
        await goes_on(caller, 3)
    assert found[0] == found[1] == found[2]


async def test_small_frames_take_many_passes() -> None:
    caller = Caller(deaf(Limits()))
    caller.headers(1, with_path("/any"))
    await caller.settled()
    stream = caller.connection.streams[1]
    caller.send(b"".join(F(wire.DATA, 0, 1, prefixed(bytes(6_000))[at : at + 1]) for at in range(5_005)))
    partial, passes = 0, 0
    while caller.connection.waits:
        assert 0 < stream._messages.partial_bytes - partial <= CONNECTION_WORK
        partial, passes = stream._messages.partial_bytes, passes + 1
        await asyncio.sleep(0)
    assert stream._messages.partial_bytes == 5_005 and passes == 5_005 // CONNECTION_WORK


COSTLY: dict[str, Callable[[Caller, int], bytes]] = {
    "fields": lambda caller, stream_id: F(
        wire.HEADERS,
        wire.END_HEADERS,
        stream_id,
        caller.encoder.encode(POST) + bytes(0x80 | 16 + (stream_id + number) % 12 for number in range(CONNECTION_WORK)),
    ),
    "Huffman coding": lambda caller, stream_id: F(
        wire.HEADERS,
        wire.END_HEADERS,
        stream_id,
        caller.encoder.encode([*POST, (f"x-{stream_id}", "\x7f~^`|" * 1_000)], huffman=True),
    ),
    "messages": lambda caller, stream_id: F(wire.DATA, 0, 1, prefixed(b"") * 3_000),
    "settings": lambda caller, stream_id: F(wire.SETTINGS, 0, 0, (b"\0\x77" + bytes(4)) * 2_000),
}


@pytest.mark.parametrize("costly", COSTLY.values(), ids=COSTLY)
async def test_few_frames_that_cost_much_take_a_pass_each(costly: Callable[[Caller, int], bytes]) -> None:
    caller = Caller(deaf(Limits()))
    caller.headers(1, with_path("/any"))
    await caller.settled()
    costs = [costly(caller, 2 * number + 3) for number in range(4)]
    caller.send(b"".join(costs))
    for left in (3, 2, 1):
        assert waiting(caller) == sum(map(len, costs[4 - left :]))
        await asyncio.sleep(0)
    assert not caller.connection.waits and not ends(await caller.answered())


def calling(frames: bytes) -> tuple[ClientConnection, Any, Wire]:
    """A client that has a call whose answer has begun with some frames."""
    connection, written = ClientConnection(asyncio.get_running_loop(), LIMITS, "localhost", "http"), Wire()
    connection.connection_made(written)
    call = connection.call("/any", bytes, bytes)
    block = wire.STATUS_200 + wire.field(b"content-type", b"application/grpc")
    connection.data_received(wire.settings({}) + F(wire.HEADERS, wire.END_HEADERS, 1, block))
    connection.data_received(frames)
    return connection, call, written


async def test_a_client_takes_a_pass_for_each_frame_that_costs_much() -> None:
    connection, call, written = calling(F(wire.DATA, 0, 1, prefixed(b"") * 3_000) * 3)
    for come in (1, 2, 3):
        assert len(call._messages.ready) == come * 3_000 and written.reading == (come == 3)
        await asyncio.sleep(0)
    connection.connection_lost(None)


async def test_a_client_handles_all_that_came_when_its_server_ends() -> None:
    """Up to a fault, if there is one."""
    messages = F(wire.DATA, 0, 1, prefixed(b"")) * 3_000
    for frames, count in ((messages, 3_000), (messages + F(wire.DATA, 0, 0, b"x") + messages, 3_000)):
        connection, call, _ = calling(frames)
        assert len(call._messages.ready) < count
        connection.eof_received()
        assert len(call._messages.ready) == count and not connection.waits
        connection.connection_lost(None)


async def test_blocks_that_are_known_cost_nothing_to_decode() -> None:
    """A client's calls of a method: A_PASS of them at once, however many fields they have."""
    caller = Caller(deaf(Limits()))
    await caller.settled()
    block = wire.fields((name.encode(), value.encode()) for name, value in with_path("/any"))
    block += wire.fields([(b"x", b"y" * 100)] * 20)
    caller.send(F(wire.HEADERS, wire.END_HEADERS, 1, block))
    caller.send(b"".join(F(wire.HEADERS, wire.END_HEADERS, 2 * number + 3, block) for number in range(A_PASS)))
    assert len(caller.connection.streams) == 1 + A_PASS and not caller.connection.waits


class Faulty(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
    """A mistake in code that the connection calls."""

    def service(self, details: Any) -> Any:
        raise ZeroDivisionError


async def test_a_mistake_of_this_side_ends_the_connection_in_a_later_pass_too() -> None:
    """Not to read any more, without an end, would keep the peer waiting."""
    server = Server()
    server.add_generic_rpc_handlers([Faulty()])
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))
    caller = Caller(server)
    await caller.settled()
    caller.send(F(wire.PING, 0, 0, bytes(8)) * CONNECTION_WORK + many_calls())
    assert not caller.wire.reading and not told
    await asyncio.sleep(0)
    assert caller.wire.aborted and [type(error) for error in told] == [ZeroDivisionError]
    assert not caller.connection.waits and not waiting(caller)


@pytest.mark.parametrize("work", [1, 7, 100])
async def test_pieces_mean_the_same_as_the_whole(work: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field blocks in several frames, padding, changes of windows, pings, resets and mistakes among the calls."""

    async def answers(pass_work: int) -> tuple[object, ...]:
        monkeypatch.setattr(turns, "PASS_WORK", pass_work)
        monkeypatch.setattr(turns, "CONNECTION_WORK", pass_work)
        caller = Caller(echoing())
        await handled(caller)
        data = calls_of(["/test.Echo/Unary", "/test.Echo/Stream", "/none"] * 20, caller)
        data += wire.settings({wire.INITIAL_WINDOW_SIZE: 9}) + wire.window_update(0, 5_000)
        data += F(wire.PING, 0, 0, b"12345678") + F(wire.PRIORITY, 0, 121, bytes(5))
        data += F(wire.HEADERS, 4, 121, caller.encoder.encode(with_path("/test.Echo/Stream")))
        data += F(wire.DATA, 0, 121, prefixed(b"more than nine bytes")) + wire.window_update(121, 10_000)
        data += F(wire.HEADERS, 5, 123, caller.encoder.encode([*POST, ("UPPER", "x")])) + F(wire.DATA, 0, 123, b"x")
        data += wire.settings({wire.INITIAL_WINDOW_SIZE: 9_000}) + F(wire.DATA, 1, 121)
        data += F(wire.HEADERS, 4, 125, caller.encoder.encode(with_path("/test.Echo/Stream")))
        caller.send(data + wire.rst_stream(125, ErrorCode.CANCEL) + F(wire.PING, 0, 0, b"the last"))
        assert caller.wire.reading == (pass_work > MANY * MANY)
        heads: dict[int, list[Frame]] = {}
        contents: dict[int, bytes] = {}
        for frame in await handled(caller):
            if frame.kind == wire.DATA:  # pieces may be cut otherwise: windows open and close meanwhile
                contents[frame.stream_id] = contents.get(frame.stream_id, b"") + frame.payload
            else:
                heads.setdefault(frame.stream_id, []).append(frame)
        connection = caller.connection
        windows = (connection.peer_window, connection.send_window, connection._receive_window, connection.unread_bytes)
        return heads, contents, windows, connection.last_peer_stream, caller.wire.closed, caller.server.calls

    whole = await answers(1 << 30)
    assert await answers(work) == whole
    assert whole[-1] == 0 and len(cast(Any, whole[1])) == 41


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
async def test_floods_in_one_read_end_the_connection(flood: bytes) -> None:
    """The limits count over all pieces; what is left of the flood is dropped."""
    caller = Caller(deaf(Limits(controls_per_s=100)))
    caller.headers(1)
    await caller.settled()
    caller.send(flood * 15_000)
    assert caller.connection.waits and not caller.wire.closed
    assert ends(await handled(caller)) == CALM
    assert caller.wire.closed and not waiting(caller)


async def test_what_comes_while_a_rest_waits_is_handled_after_it() -> None:
    """A transport may have more in hand when it is asked to pause."""
    server, handlers = direct()
    caller = Caller(server)
    await caller.settled()
    data = many_calls()
    caller.send(data[:-50])
    before = len(handlers.begun)
    caller.send(data[-50:-20])
    caller.send(data[-20:])
    assert len(handlers.begun) == before
    await handled(caller)
    assert handlers.begun == NUMBERS and caller.wire.reading


async def test_others_get_their_turn_while_a_rest_waits() -> None:
    server, _ = direct()
    flooding, other = Caller(server), Caller(server)
    await flooding.settled()
    await other.settled()
    flooding.send(many_calls())
    other.headers(1)
    other.data(1, prefixed(b"hello"), end=True)
    assert prefixed(b"hello") in [frame.payload for frame in await other.answered()]
    assert flooding.connection.waits
    flooding.connection.connection_lost(None)


CLOSINGS: dict[str, Callable[[Caller], None]] = {
    "shut": lambda caller: caller.connection.shut(),
    "cut off": lambda caller: caller.connection.cut_off(),
    "lost": lambda caller: caller.connection.connection_lost(None),
}


@pytest.mark.parametrize("close", CLOSINGS.values(), ids=CLOSINGS)
async def test_nothing_of_a_rest_is_handled_once_the_connection_closes(close: Callable[[Caller], None]) -> None:
    server, handlers = direct()
    caller = Caller(server)
    await caller.settled()
    caller.send(many_calls())
    await asyncio.sleep(0)
    begun = len(handlers.begun)
    assert begun < MANY
    close(caller)
    assert not caller.connection.waits and not waiting(caller)
    for _ in range(5):
        await asyncio.sleep(0)
    caller.connection.connection_lost(None)
    assert len(handlers.begun) == begun and not server.calls
    assert caller.wire.reading or not caller.wire.closed or caller.wire.aborted, "TLS reads until it is closed"


async def test_a_fault_in_a_rest_ends_the_connection_there() -> None:
    server, handlers = direct()
    caller = Caller(server)
    await caller.settled()
    caller.send(many_calls() + F(wire.DATA, 0, 0, b"x") + many_calls(2 * MANY + 1))
    found = await handled(caller)
    assert ends(found) == {("connection", ErrorCode.PROTOCOL_ERROR)} and handlers.begun == NUMBERS
    assert int.from_bytes(found[-1].payload[:4], "big") == 2 * MANY - 1, "the last call that was taken"


async def test_who_is_not_read_is_not_dead() -> None:
    """The answer to a ping may wait behind a rest, or in the socket while reading is paused."""
    server, _ = direct()
    caller = Caller(server)
    await caller.settled()
    caller.send(many_calls())
    await looked(server, 61)
    assert caller.connection.pinged_s is not None
    await asyncio.sleep(0)
    assert caller.connection.waits
    await looked(server, 21)
    assert not caller.wire.aborted
    await handled(caller)
    caller.connection.ping()
    await looked(server, 21)
    assert caller.wire.aborted, "silent, and nothing of it waits"


# -- over sockets


async def test_a_caller_that_ends_after_its_calls_is_heard() -> None:
    """The end of the stream comes after the rest."""
    server, handlers = direct()
    async with serving(server) as address, asyncio.timeout(20):
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(wire.PREFACE + wire.settings({}) + many_calls())
        writer.write_eof()
        answered = await reader.read()
        while chunk := await reader.read():
            answered += chunk
        assert handlers.begun == NUMBERS
        assert all(prefixed(number) in answered for number in NUMBERS)
        writer.close()


async def test_a_server_stops_while_a_rest_waits() -> None:
    """Calls of the rest are not begun, and their callers learn that they may try elsewhere."""
    server, handlers = direct()
    async with serving(server) as address, asyncio.timeout(20):
        connection = await dialled(address, LIMITS)
        calls = [connection.call("/s/any", bytes, bytes) for _ in range(900)]
        for call in calls:
            await call.write(b"x")
            call.end()
        await handlers.one_begun.wait()
        assert [one.waits for one in server.connections] == [True]
        begun = len(handlers.begun)
        await server.stop(5.0)
        found = await asyncio.gather(*(call.read() for call in calls), return_exceptions=True)
        answered = sum(one == b"x" for one in found)
        assert answered == len(handlers.begun) == begun < 900
        assert all(
            one == b"x" or (isinstance(one, CallError) and one.code is grpc.StatusCode.UNAVAILABLE) for one in found
        )
        connection.close()


async def test_a_rest_goes_through_tls(tmp_path: Path) -> None:
    make_certificates(tmp_path, {"n1": ["127.0.0.1"], "n2": ["127.0.0.1"]}, ["app"], ["ops"], 30)
    server, handlers = direct()
    secured, tls = server_context(files(tmp_path, "n1"), required=True), peer_context(files(tmp_path, "n2"))
    async with serving(server, secured) as address, asyncio.timeout(20):
        async with await dialled(address, LIMITS, secured=tls, server_name="n1") as connection:
            for _ in range(3):
                sent = [once(connection, "/s/any", number) for number in NUMBERS[:900]]
                assert await asyncio.gather(*sent) == NUMBERS[:900]
        assert handlers.begun == NUMBERS[:900] * 3


async def test_answers_count_though_tls_ends_behind_them(tmp_path: Path) -> None:
    """TLS reports the end with the last bytes, while a rest of them may wait."""
    make_certificates(tmp_path, {"n1": ["127.0.0.1"], "n2": ["127.0.0.1"]}, ["app"], ["ops"], 30)
    calls = 1_500
    first = wire.STATUS_200 + wire.field(b"content-type", b"application/grpc")
    answer = wire.Answer(first, wire.field(b"grpc-status", b"0"))
    last, acknowledged = (2 * calls - 1).to_bytes(4, "big"), bytes.fromhex("000000 04 01 00000000")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(wire.settings({}))
        came = b""
        while came.count(last) < 2 or acknowledged not in came:
            came += await reader.read(1 << 16)
        writer.write(b"".join(answer.frames(2 * n + 1, b"%d" % n) for n in range(calls)))
        writer.close()

    served = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_context(files(tmp_path, "n1"), required=True))
    async with served, asyncio.timeout(20):
        address = f"127.0.0.1:{served.sockets[0].getsockname()[1]}"
        tls = peer_context(files(tmp_path, "n2"))
        connection: ClientConnection = await dialled(address, LIMITS, secured=tls, server_name="n1")
        async with connection:
            waiting = [asyncio.ensure_future(once(connection, "/s/any", b"x")) for _ in range(calls)]
            assert await asyncio.gather(*waiting) == [b"%d" % n for n in range(calls)]
