"""A queue of schedules that stays full: who waits for room gets in, and the loop does not turn for nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tests.node.core.test_serving import core_of
from tests.node.core.trio import World
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.schedule.intake import KIND_DUE, Row, batch_of_rows
from tickwheel.node.core.schedule.joining import ROW_BYTES, RowCaller
from tickwheel.node.core.schedule.publisher import ROOM_WAIT_MS, ROWS
from tickwheel.node.failure import Failure
from tickwheel.proto import common_pb2 as pb
from tickwheel.wheel.units import HOUR_MS


def schedule_rows(core: NodeCore, count: int, due_ms: int, client: str = "") -> None:
    """Single messages, of which nobody waits for the answer."""
    caller = RowCaller(lambda *placed: None, lambda failure: None)
    row = Row("t", KIND_DUE, due_ms, b"x")
    for _ in range(count):
        core.serving.run(caller.fail, lambda: core.parts.publisher.schedule_row(row, client, "", caller))


def test_who_waits_for_room_gets_in_though_the_queue_stays_crowded() -> None:
    """Callers that do not wait keep it above its half and are never refused. One of those who wait is let in at a
    time."""
    world = World(4)
    master = world.elect()
    core = core_of(master)
    for node in world.nodes.values():
        node.holds_syncs = True  # the entries under way are never answered
    publisher = core.parts.publisher
    core.proposer.window.bytes = 0
    schedule_rows(core, core.config.intake_requests_max // 2, world.now_ms + HOUR_MS)
    assert publisher.crowded(ROWS)
    told: list[Any] = []
    for _ in range(2):
        core.serving.start(publisher.room(), told.append)
    master.wake()
    world.run(ROOM_WAIT_MS // 2)
    assert not told
    world.run(ROOM_WAIT_MS)
    assert publisher.crowded(ROWS) and told == [None]


def test_nothing_turns_at_once_while_schedules_may_not_leave() -> None:
    """After many refusals in one entry the publisher asks to be called again soon; but not before the window of
    schedules opens."""
    world = World(5)
    master = world.elect()
    core = core_of(master)
    publisher = core.parts.publisher
    schedule_rows(core, 1, world.now_ms + HOUR_MS)
    master.wake()
    world.run(200)
    assert core.state.topic_id("t") is not None and not publisher.waiting.requests
    later_ms = world.now_ms + HOUR_MS
    schedule_rows(core, 1, later_ms, "a")
    schedule_rows(core, 100, 1 << 50, "b")
    schedule_rows(core, 1, later_ms, "c")
    assert publisher.take(1 << 20) is not None and publisher.cut_short and publisher.waiting.requests
    now = core._now(core.monotonic_ns())
    assert publisher.wait_ms(now) == 0
    core.proposer.window.bytes = 0
    assert publisher.wait_ms(now) is None


def flood(
    core: NodeCore, connection: str, count: int, due_ms: int, size: int = 1_000, producer_id: str = "", owner: str = ""
) -> list[Any]:
    """Requests of one connection, of `size` bytes each; what they are told."""
    told: list[Any] = []
    for number in range(count):
        batch = batch_of_rows("t", KIND_DUE, [due_ms], [bytes(size - ROW_BYTES)])
        batch.connection, batch.producer_id, batch.owner = connection, producer_id, owner
        batch.sequence = number + 1 if producer_id else 0
        core.parts.publisher.schedule(batch, Reply.either(told.append))
    return told


def held_back() -> tuple[World, NodeCore]:
    """A master with the topic t whose schedules may not leave, with room for 64 requests of any size."""
    config = replace(CoreConfig(), segment_bytes=1 << 20, intake_requests_max=64)
    world = World(6, config=config)
    master = world.elect()
    core = core_of(master)
    schedule_rows(core, 1, world.now_ms + HOUR_MS)
    master.wake()
    world.run(200)
    assert core.state.topic_id("t") is not None and not core.parts.publisher.waiting.requests
    core.proposer.window.bytes = 0
    return world, core


def test_a_connection_with_much_waiting_does_not_hold_up_the_others() -> None:
    """A message by a call of its own, and a batch of another connection, are in the next entry though a flood came
    first. The flood keeps its order."""
    world, core = held_back()
    due_ms = world.now_ms + HOUR_MS
    flood(core, "flood", 40, due_ms, 10_000)
    flood(core, "other", 1, due_ms, 500)
    told: list[Any] = []
    caller = RowCaller(lambda *placed: None, told.append, "third")
    core.parts.publisher.schedule_row(Row("t", KIND_DUE, due_ms, b"single"), "", "", caller)
    taken = core.parts.publisher.take(25_000)
    assert taken is not None
    sizes = np.frombuffer(taken[0].publish.sizes, "<u4").tolist()
    assert sizes == [6, 500 - ROW_BYTES, 10_000 - ROW_BYTES, 10_000 - ROW_BYTES]


def test_naming_somebody_elses_producer_id_holds_nobody_up() -> None:
    """Requests of one producer keep their order over all connections, but only those of its owner."""
    world, core = held_back()
    due_ms = world.now_ms + HOUR_MS
    flood(core, "flood", 40, due_ms, 10_000, "victim", "somebody")
    flood(core, "victim", 1, due_ms, 500, "victim", "its owner")
    flood(core, "third", 1, due_ms, 600, "victim", "somebody")
    order = [core.parts.publisher._queue.pop().bytes for _ in range(42)]
    assert order[0] == 500 and order[-1] == 600


def test_a_connection_keeps_the_order_of_single_messages_and_batches() -> None:
    """Its single messages do not join those of others in front of its own batch, nor does the batch pass them."""
    world, core = held_back()
    due_ms = world.now_ms + HOUR_MS

    def single(text: bytes, connection: str) -> None:
        caller = RowCaller(lambda *placed: None, lambda failure: None, connection)
        core.parts.publisher.schedule_row(Row("t", KIND_DUE, due_ms, text), "", "", caller)

    single(b"1", "a")
    flood(core, "a", 1, due_ms, 5_000)
    single(b"22", "b")
    single(b"333", "a")
    single(b"4444", "b")
    taken = core.parts.publisher.take(1 << 20)
    assert taken is not None
    assert np.frombuffer(taken[0].publish.sizes, "<u4").tolist() == [1, 2, 4, 5_000 - ROW_BYTES, 3]


def test_what_is_left_of_a_queue_is_for_those_who_have_less_than_their_share() -> None:
    """A connection that fills the queue is refused before it is full. Others are not, and streams of theirs need not
    wait while it is half full."""
    world, core = held_back()
    due_ms, publisher = world.now_ms + HOUR_MS, core.parts.publisher
    flood(core, "other", 1, due_ms)
    assert not any(isinstance(answer, Failure) for answer in flood(core, "flood", 40, due_ms))
    assert publisher.crowded("flood") and not publisher.crowded("other") and not publisher.crowded("third")
    told = flood(core, "flood", 24, due_ms)
    assert len(told) == 17 and all(answer.reason == pb.LIMIT_REACHED for answer in told), "48 of 64 wait"
    assert publisher.crowded("third"), "little is left for anybody"
    assert not flood(core, "other", 10, due_ms) and not flood(core, "third", 6, due_ms)
    assert len(flood(core, "fourth", 1, due_ms)) == 1 and publisher.waiting.requests == 64


def test_a_connection_alone_may_fill_the_queue() -> None:
    world, core = held_back()
    told = flood(core, "alone", 65, world.now_ms + HOUR_MS)
    assert len(told) == 1 and told[0].reason == pb.LIMIT_REACHED
