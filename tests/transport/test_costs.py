"""What one connection may cost: windows, floods, silence. A server stays usable whatever its callers do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import pytest

from tests.transport.test_protocol import echoing, ends, goes_on, with_path
from tests.transport.wires import POST, Caller
from tickwheel.transport import wire
from tickwheel.transport.connection import BLOCKS_KEPT, BLOCKS_KEPT_BYTES, size_of
from tickwheel.transport.limits import Limits
from tickwheel.transport.messages import prefixed
from tickwheel.transport.server import Opened, Server, ServerStream, StreamHandler
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
        for name in ("heard_s", "opened_s", "busy_s", "closing_s", "pinged_s", "look_s"):
            at_s = getattr(connection, name)
            if at_s is not None:
                setattr(connection, name, at_s - after_s)
        for stream in connection.streams.values():
            stream.progress_s -= after_s
            if stream.deadline_s is not None:
                stream.deadline_s -= after_s
    server._look(loop)
    assert server._looking is not None
    server._looking.cancel()


async def test_silent_idle_and_unfinished_connections_end() -> None:
    limits = Limits(handshake_s=10, idle_s=100, ask_alive_s=60, dead_s=20, linger_s=5, message_s=1_000)
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

    quick = Caller(limits=Limits(handshake_s=10, idle_s=2), greet=False)
    await looked(quick.server, 0)
    quick.send(wire.PREFACE + wire.settings({}))
    await quick.settled()
    await looked(quick.server, 3)
    assert ends(await quick.answered()) == {("connection", ErrorCode.NO_ERROR)}, "its handshake came between two looks"

    idle = Caller(echoing(limits))
    await goes_on(idle, 1)
    await looked(idle.server, 101)
    assert ends(await idle.answered()) == {("connection", ErrorCode.NO_ERROR)} and idle.wire.closed


async def test_whoever_asks_whether_a_peer_answers_is_told_by_whatever_comes() -> None:
    """One ping for all who ask, and one call to each. A late answer is no reason to end the connection."""
    limits = Limits(ask_alive_s=60, dead_s=20, message_s=1_000)
    caller = Caller(deaf(limits))
    caller.headers(1)
    await caller.settled()
    told: list[int] = []
    for number in range(3):
        caller.connection.ask(partial(told.append, number))
    assert [frame.kind for frame in await caller.answered()] == [wire.PING] and not told
    caller.send(F(wire.PING, wire.ACK, 0, bytes(8)))
    assert told == [0, 1, 2]
    caller.connection.ask(partial(told.append, 3))
    caller.send(wire.window_update(0, 1))
    assert told == [0, 1, 2, 3], "it lives, and will answer the ping later"
    caller.send(F(wire.PING, wire.ACK, 0, bytes(8)))
    await caller.settled()
    caller.connection.ask(partial(told.append, 4))
    await caller.settled()
    await looked(caller.server, 59)
    assert not caller.wire.aborted and not await caller.answered()
    await looked(caller.server, 2)
    await looked(caller.server, 21)
    assert caller.wire.aborted and told == [0, 1, 2, 3], "it was silent for as long as any other may be"


async def test_a_mistake_in_a_look_ends_one_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are looked at, and again later: their silent peers and deadlines would never end."""
    limits = Limits(handshake_s=10)
    first, second = (Caller(limits=limits, greet=False) for _ in range(2))

    def broken(_: float) -> None:
        raise ValueError("a mistake")

    server = Server(limits)
    for caller in (first, second):
        caller.connection.look_s = 0.0
        server.connections.add(caller.connection)
    monkeypatch.setattr(first.connection, "look_at_peer", broken)
    await looked(server, 11)
    assert first.wire.aborted and "a mistake" in caplog.text
    assert ends(await second.answered()) == {("connection", ErrorCode.SETTINGS_TIMEOUT)}


async def test_a_mistake_in_an_answer_to_a_probe_ends_its_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: object) -> None:
        raise ValueError("a mistake")

    caller = Caller()
    await caller.settled()
    monkeypatch.setattr(ServerStream, "send", broken)
    caller.headers(1, [(":method", "GET"), *POST[1:]], end=True)
    await caller.answered()
    assert not caller.server.calls and "a mistake" in caplog.text


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


async def test_a_message_that_never_becomes_whole_ends_its_call() -> None:
    """It would hold a place and memory for ever. A stream between two messages may last."""
    caller = Caller(echoing(Limits(message_s=60, ask_alive_s=1_000)))
    await caller.settled()
    caller.headers(1)
    caller.headers(3)
    caller.data(3, prefixed(bytes(100))[:50])
    for stream_id in (5, 7):
        caller.headers(stream_id, with_path("/test.Echo/Stream"))
        caller.data(stream_id, prefixed(b"whole"))
    caller.data(7, prefixed(bytes(100))[:50])
    caller.headers(9, [(":method", "GET"), *POST[1:]])
    caller.headers(11, with_path("/test.Echo/Stream"))
    await caller.settled()
    await looked(caller.server, 61)
    found = [frame for frame in await caller.answered() if frame.kind == wire.HEADERS]
    assert {frame.stream_id for frame in found} == {1, 3, 7, 9} and list(caller.connection.streams) == [5, 11]
    assert all(b"grpc-status\x014" in frame.payload for frame in found)
    assert caller.server.calls == 2 and not caller.server.held_bytes


async def test_empty_streams_make_room_when_places_run_out() -> None:
    """They count for no caller yet, so one caller could take all places."""
    caller = Caller(deaf(Limits(calls_max=4, message_s=60, ask_alive_s=1_000)))
    await caller.settled()
    for stream_id in (1, 3, 5):
        caller.headers(stream_id, with_path("/any"))
    await looked(caller.server, 61)
    assert list(caller.connection.streams) == [3, 5]


class Opening(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
    """Streams without a task that answer with what they get."""

    def service(self, details: Any) -> Any:
        return StreamHandler(lambda call: Opened(call.post, lambda: None))


async def test_streams_that_have_begun_without_a_task_keep_their_places() -> None:
    """They have sent something, so they are not empty ones that make room."""
    server = Server(Limits(calls_max=4, message_s=60, ask_alive_s=1_000))
    server.add_generic_rpc_handlers([Opening()])
    caller = Caller(server)
    for stream_id in (1, 3, 5):
        caller.headers(stream_id)
        caller.data(stream_id, prefixed(b"x"))
    await looked(server, 61)
    assert server.calls == 3
    caller.data(1, prefixed(b"y"))
    assert [frame.payload for frame in await caller.answered() if frame.kind == wire.DATA][-1] == prefixed(b"y")


async def test_a_message_under_way_is_given_its_time_from_its_own_begin() -> None:
    caller = Caller(echoing(Limits(message_s=60, ask_alive_s=1_000)))
    caller.headers(1, with_path("/test.Echo/Stream"))
    caller.data(1, prefixed(b"whole"))
    await caller.settled()
    await looked(caller.server, 61)
    caller.data(1, prefixed(bytes(100))[:50])
    await looked(caller.server, 59)
    caller.data(1, prefixed(bytes(100))[50:], end=True)
    assert prefixed(bytes(100)) in [frame.payload for frame in await caller.answered()]


async def test_streams_whose_caller_makes_this_side_reset_them_end_the_connection() -> None:
    """CVE-2025-8671: each begins work, as one that the caller resets does."""
    breaks: dict[str, Callable[[int], bytes]] = {
        "a window by nothing": lambda stream_id: wire.window_update(stream_id, 0),
        "a compressed message": lambda stream_id: F(wire.DATA, 0, stream_id, b"\1" + bytes(4)),
        "trailers that go on": lambda stream_id: F(wire.HEADERS, wire.END_HEADERS, stream_id),
    }
    for name, broken in breaks.items():
        caller = Caller(echoing(Limits(resets_per_s=10)))
        await caller.settled()
        for stream_id in range(1, 240, 2):
            if stream_id == 191:
                assert not {end for end in ends(await caller.answered()) if end[0] == "connection"}, name
            caller.headers(stream_id, with_path("/test.Echo/Stream"))
            caller.data(stream_id, prefixed(b"x"))
            caller.send(broken(stream_id))
        assert ends(await caller.answered()) >= CALM, name


async def test_answers_that_nobody_reads_are_bounded() -> None:
    """Statuses need no window of the caller's."""
    caller = Caller(echoing(Limits(streams_max=10)))
    await caller.settled()
    caller.connection.pause_writing()
    for number in range(20):
        caller.headers(2 * number + 1, with_path("/none"), end=True)
    assert not {end for end in ends(await caller.answered()) if end[0] == "connection"}
    caller.connection.resume_writing()
    caller.connection.pause_writing()
    for number in range(20, 41):
        caller.headers(2 * number + 1, with_path("/none"), end=True)
    assert ends(await caller.answered()) >= CALM


async def test_callers_that_open_streams_and_send_nothing_do_not_fill_the_server() -> None:
    caller = Caller(deaf(Limits(calls_max=2)))
    await caller.settled()
    for number in range(5):
        caller.headers(2 * number + 1, with_path("/any"))
    assert [frame.code for frame in await caller.answered()] == [ErrorCode.REFUSED_STREAM]
    assert caller.server.calls == 4


async def test_new_windows_for_many_streams_cost_their_sender() -> None:
    """A setting of six bytes reaches every open stream."""
    caller = Caller(deaf(Limits(controls_per_s=10)))
    await caller.settled()
    for number in range(320):
        caller.headers(2 * number + 1, with_path("/any"))
    moved = 0
    streams = caller.connection.streams
    for number in range(10):
        caller.send(wire.settings({wire.INITIAL_WINDOW_SIZE: 1_000 + number}))
        moved += streams[1].send_window == 1_000 + number
    assert ends(await caller.answered()) == CALM and moved < 6
    both = b"".join(b"\0\4" + window.to_bytes(4, "big") for window in (70_000, 90_000, 80_000))
    other = Caller(deaf(Limits()))
    other.headers(1, with_path("/any"))
    other.send(F(wire.SETTINGS, 0, 0, both))
    assert other.connection.streams[1].send_window == 80_000  # the last one counts


async def test_windows_that_were_open_wake_nobody() -> None:
    """Else each update of thirteen bytes would look at every writer that waits."""
    caller = Caller(echoing())
    caller.send(wire.settings({wire.INITIAL_WINDOW_SIZE: 0}))
    await caller.settled()
    caller.headers(1)
    caller.data(1, prefixed(b"x"), end=True)
    await caller.answered()
    (waiter,) = caller.connection._waiting.values()
    caller.window(0, 1)
    assert not waiter.done()
    caller.send(wire.settings({wire.INITIAL_WINDOW_SIZE: 100}))
    assert waiter.done()
    assert prefixed(b"x") in [frame.payload for frame in await caller.answered()]


async def test_kept_field_blocks_are_bounded() -> None:
    caller = Caller(deaf(Limits()))
    await caller.settled()
    for number in range(300):
        block = wire.fields((name.encode(), value.encode()) for name, value in with_path("/any"))
        block += wire.fields([(b"x-%d" % number, b"v" * 40)] * (number + 1))
        caller.send(F(wire.HEADERS, wire.END_HEADERS, 2 * number + 1, block))
    known = caller.connection._decoder.known
    assert 0 < len(known) <= BLOCKS_KEPT
    assert sum(len(data) + 2 * size_of(block.fields) for data, block in known.items()) <= BLOCKS_KEPT_BYTES


async def test_many_changes_of_the_header_tables_size_end_the_connection() -> None:
    caller = Caller(deaf(Limits()))
    await caller.settled()
    caller.send(F(wire.HEADERS, 5, 1, b"\x20" * 16_000))
    assert ends(await caller.answered()) == {("connection", ErrorCode.COMPRESSION_ERROR)}


async def test_small_messages_that_wait_count_what_they_cost() -> None:
    server = deaf(Limits(held_bytes_max=100_000))
    caller = Caller(server)
    caller.headers(1, with_path("/any"))
    caller.data(1, prefixed(b"ab") * 2_000)  # 14,000 bytes, of 2,000 objects
    found = await caller.answered()
    assert [frame for frame in found if frame.kind == wire.HEADERS and b"grpc-status\x018" in frame.payload]
    assert not server.held_bytes
