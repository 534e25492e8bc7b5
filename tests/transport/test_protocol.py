"""What breaks HTTP/2 ends the stream or the connection, as RFC 9113 says; what is allowed does not."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transport.wires import POST, Caller, Frame
from tickwheel.transport import wire
from tickwheel.transport.connection import StreamOverError
from tickwheel.transport.limits import Limits
from tickwheel.transport.messages import prefixed
from tickwheel.transport.server import Server
from tickwheel.transport.wire import ErrorCode

SELF_1 = (1).to_bytes(4, "big") + b"\0"


class Echo(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
    """Answers what it is sent, message by message."""

    def service(self, details: Any) -> Any:
        async def unary(request: bytes, context: Any) -> bytes:
            return request

        async def stream(requests: Any, context: Any) -> None:
            async for request in requests:
                await context.write(request)

        if details.method == "/test.Echo/Unary":
            return grpc.unary_unary_rpc_method_handler(unary)
        if details.method == "/test.Echo/Stream":
            return grpc.stream_stream_rpc_method_handler(stream)
        return None


def echoing(limits: Limits | None = None) -> Server:
    server = Server(limits)
    server.add_generic_rpc_handlers([Echo()])
    return server


def with_path(path: str) -> list[tuple[str, str]]:
    return [(name, path if name == ":path" else value) for name, value in POST]


def block_with(caller: Caller, *more: tuple[str, str], without: str = "") -> bytes:
    return caller.encoder.encode([pair for pair in POST if pair[0] != without] + list(more))


def ends(found: list[Frame]) -> set[tuple[str, ErrorCode]]:
    """How streams and the connection ended."""
    names = {wire.RST_STREAM: "stream", wire.GOAWAY: "connection"}
    return {(names[frame.kind], frame.code) for frame in found if frame.kind in names}


F = wire.frame
BROKEN: dict[str, tuple[ErrorCode, bytes]] = {
    "DATA without a stream": (ErrorCode.PROTOCOL_ERROR, F(wire.DATA, 0, 0, b"x")),
    "DATA for an idle stream": (ErrorCode.PROTOCOL_ERROR, F(wire.DATA, 0, 1, b"x")),
    "DATA with too much padding": (ErrorCode.PROTOCOL_ERROR, F(wire.DATA, wire.PADDED, 1, b"\x05x")),
    "HEADERS without a stream": (ErrorCode.PROTOCOL_ERROR, F(wire.HEADERS, wire.END_HEADERS, 0)),
    "HEADERS with an even number": (ErrorCode.PROTOCOL_ERROR, F(wire.HEADERS, wire.END_HEADERS, 2)),
    "HEADERS too short for a priority": (ErrorCode.FRAME_SIZE_ERROR, F(wire.HEADERS, 0x24, 1, b"xx")),
    "HEADERS on top of itself": (ErrorCode.PROTOCOL_ERROR, F(wire.HEADERS, 0x24, 1, SELF_1)),
    "HEADERS that cannot be decoded": (ErrorCode.COMPRESSION_ERROR, F(wire.HEADERS, wire.END_HEADERS, 1, b"\xff\xff")),
    "a field block that is interrupted": (
        ErrorCode.PROTOCOL_ERROR,
        F(wire.HEADERS, 0, 1) + F(wire.PING, 0, 0, bytes(8)),
    ),
    "CONTINUATION of nothing": (ErrorCode.PROTOCOL_ERROR, F(wire.CONTINUATION, 0, 1)),
    "CONTINUATION of another stream": (ErrorCode.PROTOCOL_ERROR, F(wire.HEADERS, 0, 1) + F(wire.CONTINUATION, 0, 3)),
    "PRIORITY without a stream": (ErrorCode.PROTOCOL_ERROR, F(wire.PRIORITY, 0, 0, bytes(5))),
    "RST_STREAM without a stream": (ErrorCode.PROTOCOL_ERROR, F(wire.RST_STREAM, 0, 0, bytes(4))),
    "RST_STREAM for an idle stream": (ErrorCode.PROTOCOL_ERROR, F(wire.RST_STREAM, 0, 1, bytes(4))),
    "RST_STREAM of three bytes": (ErrorCode.FRAME_SIZE_ERROR, F(wire.RST_STREAM, 0, 1, bytes(3))),
    "SETTINGS for a stream": (ErrorCode.PROTOCOL_ERROR, F(wire.SETTINGS, 0, 1)),
    "SETTINGS acknowledged with content": (ErrorCode.FRAME_SIZE_ERROR, F(wire.SETTINGS, wire.ACK, 0, bytes(6))),
    "SETTINGS of five bytes": (ErrorCode.FRAME_SIZE_ERROR, F(wire.SETTINGS, 0, 0, bytes(5))),
    "ENABLE_PUSH = 2": (ErrorCode.PROTOCOL_ERROR, wire.settings({wire.ENABLE_PUSH: 2})),
    "a window of 2^31": (ErrorCode.FLOW_CONTROL_ERROR, wire.settings({wire.INITIAL_WINDOW_SIZE: 1 << 31})),
    "frames of 16383 bytes": (ErrorCode.PROTOCOL_ERROR, wire.settings({wire.MAX_FRAME_SIZE: 16_383})),
    "frames of 2^24 bytes": (ErrorCode.PROTOCOL_ERROR, wire.settings({wire.MAX_FRAME_SIZE: 1 << 24})),
    "PUSH_PROMISE": (ErrorCode.PROTOCOL_ERROR, F(wire.PUSH_PROMISE, 4, 1, bytes(4))),
    "PING for a stream": (ErrorCode.PROTOCOL_ERROR, F(wire.PING, 0, 1, bytes(8))),
    "PING of seven bytes": (ErrorCode.FRAME_SIZE_ERROR, F(wire.PING, 0, 0, bytes(7))),
    "GOAWAY for a stream": (ErrorCode.PROTOCOL_ERROR, F(wire.GOAWAY, 0, 1, bytes(8))),
    "GOAWAY of seven bytes": (ErrorCode.FRAME_SIZE_ERROR, F(wire.GOAWAY, 0, 0, bytes(7))),
    "WINDOW_UPDATE by nothing": (ErrorCode.PROTOCOL_ERROR, wire.window_update(0, 0)),
    "WINDOW_UPDATE of three bytes": (ErrorCode.FRAME_SIZE_ERROR, F(wire.WINDOW_UPDATE, 0, 0, bytes(3))),
    "WINDOW_UPDATE for an idle stream": (ErrorCode.PROTOCOL_ERROR, wire.window_update(1, 1)),
    "the connection's window above 2^31-1": (ErrorCode.FLOW_CONTROL_ERROR, wire.window_update(0, wire.WINDOW_MAX)),
    "a frame that is too large": (ErrorCode.FRAME_SIZE_ERROR, F(wire.DATA, 0, 1, bytes(wire.FRAME_BYTES + 1))),
}


@pytest.mark.parametrize(("code", "data"), BROKEN.values(), ids=BROKEN)
async def test_what_breaks_the_connection_ends_it(code: ErrorCode, data: bytes) -> None:
    caller = Caller()
    await caller.settled()
    caller.send(data)
    assert ("connection", code) in ends(await caller.answered())
    assert caller.wire.closed
    caller.send(data)  # on its way when it closed
    assert not await caller.answered()


async def test_what_does_not_begin_as_it_must_is_closed() -> None:
    for data in (b"GET / HTTP/1.1\r\n\r\n", wire.PREFACE + F(wire.PING, 0, 0, bytes(8)), b"\x16\x03\x01"):
        caller = Caller(greet=False)
        caller.send(data)
        assert ("connection", ErrorCode.PROTOCOL_ERROR) in ends(await caller.answered())


MALFORMED: dict[str, tuple[tuple[tuple[str, str], ...], str]] = {
    "upper case": ((("X-Test", "1"),), ""),
    "an unknown pseudo-header": (((":test", "1"),), ""),
    "a pseudo-header of a response": (((":status", "200"),), ""),
    "a pseudo-header after others": ((("x", "1"), (":authority", "a")), ":authority"),
    "a pseudo-header twice": (((":path", "/"),), ""),
    "no method": ((), ":method"),
    "no scheme": ((), ":scheme"),
    "no path": ((), ":path"),
    "a field of HTTP/1.1": ((("connection", "keep-alive"),), ""),
    "te": ((("te", "gzip"),), "te"),
    "a line break": ((("x", "a\nb"),), ""),
    "a length that is no number": ((("content-length", "-1"),), ""),
    "a length of very many digits": ((("content-length", "9" * 5_000),), ""),
}


@pytest.mark.parametrize(("more", "without"), MALFORMED.values(), ids=MALFORMED)
async def test_a_malformed_request_loses_its_stream_alone(more: Any, without: str) -> None:
    caller = Caller(echoing())
    await caller.settled()
    caller.send(F(wire.HEADERS, wire.END_HEADERS | wire.END_STREAM, 1, block_with(caller, *more, without=without)))
    assert ends(await caller.answered()) == {("stream", ErrorCode.PROTOCOL_ERROR)}
    await goes_on(caller, 3)


async def goes_on(caller: Caller, stream_id: int) -> None:
    """The connection serves the next call."""
    caller.headers(stream_id)
    caller.data(stream_id, prefixed(b"hello"), end=True)
    found = await caller.answered()
    assert [frame.payload for frame in found if frame.kind == wire.DATA] == [prefixed(b"hello")]
    assert not ends(found) and not caller.connection.streams and not caller.server.calls


STREAM_ENDS: dict[str, tuple[ErrorCode, bytes]] = {
    "its window above 2^31-1": (ErrorCode.FLOW_CONTROL_ERROR, wire.window_update(1, wire.WINDOW_MAX)),
    "its window by nothing": (ErrorCode.PROTOCOL_ERROR, wire.window_update(1, 0)),
    "PRIORITY of four bytes": (ErrorCode.FRAME_SIZE_ERROR, F(wire.PRIORITY, 0, 1, bytes(4))),
    "PRIORITY over itself": (ErrorCode.PROTOCOL_ERROR, F(wire.PRIORITY, 0, 1, SELF_1)),
    "trailers that do not end it": (ErrorCode.PROTOCOL_ERROR, F(wire.HEADERS, wire.END_HEADERS, 1)),
    "trailers with a pseudo-header": (ErrorCode.PROTOCOL_ERROR, F(wire.HEADERS, 5, 1, wire.field(b":path", b"/"))),
}


@pytest.mark.parametrize(("code", "data"), STREAM_ENDS.values(), ids=STREAM_ENDS)
async def test_what_breaks_a_stream_ends_it_alone(code: ErrorCode, data: bytes) -> None:
    caller = Caller(echoing())
    await caller.settled()
    caller.headers(1)
    caller.send(data)
    found = await caller.answered()
    assert ("stream", code) in ends(found) and ("connection", code) not in ends(found)
    caller.data(1, b"what was on its way when the stream ended")
    assert not ends(await caller.answered())
    await goes_on(caller, 3)


async def test_frames_for_a_stream_that_has_ended() -> None:
    """After both sides ended it the peer must know better; after this side alone did, it cannot."""
    caller = Caller(echoing())
    await goes_on(caller, 1)
    caller.window(1, 10)
    caller.send(F(wire.PRIORITY, 0, 1, bytes(5)))
    caller.send(wire.rst_stream(1, ErrorCode.CANCEL))
    assert not ends(await caller.answered())
    caller.data(1, b"x")
    assert ends(await caller.answered()) == {("stream", ErrorCode.STREAM_CLOSED)}
    await goes_on(caller, 3)
    caller.headers(3)
    assert ends(await caller.answered()) == {("connection", ErrorCode.STREAM_CLOSED)}


async def test_numbers_of_streams_rise() -> None:
    caller = Caller(echoing())
    await goes_on(caller, 5)
    caller.headers(3)
    assert ends(await caller.answered()) == {("connection", ErrorCode.PROTOCOL_ERROR)}


async def test_a_length_that_is_not_true_ends_the_stream() -> None:
    caller = Caller(echoing())
    await caller.settled()
    caller.send(F(wire.HEADERS, wire.END_HEADERS, 1, block_with(caller, ("content-length", "6"))))
    caller.data(1, prefixed(b""), end=True)
    assert ends(await caller.answered()) == {("stream", ErrorCode.PROTOCOL_ERROR)}


async def test_pings_and_settings_are_acknowledged_and_unknown_frames_ignored() -> None:
    caller = Caller()
    await caller.settled()
    caller.send(
        F(wire.PING, 0, 0, b"12345678") + wire.settings({77: 1}) + F(0xF0, 0, 0, b"?") + F(wire.PING, 1, 0, bytes(8))
    )
    found = await caller.answered()
    assert [(frame.kind, frame.flags, frame.payload) for frame in found] == [
        (wire.PING, wire.ACK, b"12345678"),
        (wire.SETTINGS, wire.ACK, b""),
    ]


async def test_a_known_field_block_is_read_anew_once_the_table_was_emptied() -> None:
    """A block can empty the table and leave its size as it was."""
    caller = Caller(echoing())
    await caller.settled()
    block = wire.fields((name.encode(), value.encode()) for name, value in POST)
    caller.send(F(wire.HEADERS, 5, 1, b"\x40" + wire.field(b"x-a", b"b")[1:]))
    assert ends(await caller.answered()) == {("stream", ErrorCode.PROTOCOL_ERROR)}
    caller.send(F(wire.HEADERS, 4, 3, block + b"\xbe"))  # the field of the table
    caller.send(F(wire.HEADERS, 4, 5, b"\x20\x3f\xe1\x1f" + block))  # size 0, size 4,096
    assert not ends(await caller.answered())
    caller.send(F(wire.HEADERS, 4, 7, block + b"\xbe"))
    assert ends(await caller.answered()) == {("connection", ErrorCode.COMPRESSION_ERROR)}


class Parted(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
    """Handlers that read in a task of their own, as those of the node do."""

    def __init__(self) -> None:
        self.read: list[bytes] = []

    def service(self, details: Any) -> Any:
        async def take(requests: Any) -> None:
            async for request in requests:
                self.read.append(request)

        async def stream(requests: Any, context: Any) -> None:
            reader = asyncio.ensure_future(take(requests))
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.wait([reader])  # goes on after its call has ended
                with contextlib.suppress(StreamOverError):
                    await context.write(b"too late")
                    pytest.fail("nothing can be written to a call that has ended")

        return grpc.stream_stream_rpc_method_handler(stream)


async def test_a_reader_that_outlives_its_call_takes_nothing_twice() -> None:
    """A message and its call's end come in one go: what the call held is given back once, and no answer follows."""
    server, handlers = Server(), Parted()
    server.add_generic_rpc_handlers([handlers])
    caller = Caller(server)
    caller.headers(1, with_path("/read"))
    caller.data(1, prefixed(b"first"))
    await caller.settled()
    assert handlers.read == [b"first"]
    caller.send(F(wire.DATA, 0, 1, prefixed(b"second")) + wire.rst_stream(1, ErrorCode.CANCEL))
    assert not await caller.answered()
    assert handlers.read == [b"first"]
    assert (server.held_bytes, caller.connection.unread_bytes, server.calls) == (0, 0, 0)


async def test_a_reader_of_many_messages_lets_others_have_their_turn() -> None:
    server, handlers = Server(), Parted()
    server.add_generic_rpc_handlers([handlers])
    caller = Caller(server)
    caller.headers(1, with_path("/read"))
    caller.data(1, prefixed(b"") * 3_000)
    for _ in range(3):
        await asyncio.sleep(0)
    assert 0 < len(handlers.read) < 3_000
    for _ in range(3_000):
        await asyncio.sleep(0)
    assert len(handlers.read) == 3_000
    caller.connection.connection_lost(None)
    await asyncio.sleep(0)


async def test_nothing_is_written_to_a_transport_that_was_closed() -> None:
    caller = Caller(echoing())
    caller.headers(1, with_path("/test.Echo/Stream"))
    await caller.settled()
    stream = caller.connection.streams[1]
    caller.connection.shut()
    await caller.answered()
    await stream.write(b"x")
    assert not await caller.answered()


def calls_of(paths: list[str], caller: Caller) -> bytes:
    """The bytes of some calls, with everything that a field block and data can be wrapped in."""
    out = []
    for number, path in enumerate(paths):
        stream_id = 2 * number + 1
        block = caller.encoder.encode([*with_path(path), ("x-number", str(number))])
        out.append(
            F(wire.HEADERS, wire.PADDED | wire.WITH_PRIORITY, stream_id, b"\x03" + bytes(5) + block[:7] + bytes(3))
        )
        out.append(F(wire.CONTINUATION, 0, stream_id, block[7:11]) + F(wire.CONTINUATION, 4, stream_id, block[11:]))
        message = prefixed(b"message %d" % number)
        out.append(F(wire.DATA, 0, stream_id, message[:6]))
        out.append(F(wire.DATA, wire.PADDED | wire.END_STREAM, stream_id, b"\x02" + message[6:] + b"\0\0"))
    return b"".join(out)


@given(
    cuts=st.lists(st.integers(0, 2_000), max_size=12), paths=st.lists(st.sampled_from(("Unary", "Stream")), max_size=4)
)
async def test_bytes_mean_the_same_however_they_are_cut(cuts: list[int], paths: list[str]) -> None:
    caller = Caller(echoing())
    await caller.settled()
    data = calls_of([f"/test.Echo/{path}" for path in paths], caller)
    at = 0
    for cut in [*sorted(cuts), len(data)]:
        caller.send(data[at:cut])
        at = max(at, min(cut, len(data)))
    found = await caller.answered()
    messages = sorted(frame.payload for frame in found if frame.kind == wire.DATA)
    assert messages == [prefixed(b"message %d" % number) for number in range(len(paths))]
    assert not ends(found) and not caller.server.calls and not caller.server.held_bytes


@given(
    st.lists(
        st.tuples(st.integers(0, 10), st.integers(0, 255), st.integers(0, 7), st.binary(max_size=40)), max_size=12
    ),
    st.binary(max_size=60),
)
async def test_garbage_ends_the_connection_at_worst(garbage: list[tuple[int, int, int, bytes]], rest: bytes) -> None:
    """Nothing is raised into the loop, and nothing is left of what it opened."""
    caller = Caller(echoing())
    caller.headers(1, with_path("/test.Echo/Stream"))
    caller.send(b"".join(F(*one) for one in garbage) + rest)
    await caller.answered()
    caller.connection.connection_lost(None)
    await caller.answered()
    assert not caller.server.calls and not caller.server.held_bytes and not caller.server.connections
    assert not caller.connection.unread_bytes
