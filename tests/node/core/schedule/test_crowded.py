"""A queue of schedules that stays full: who waits for room gets in, and the loop does not turn for nothing."""

from __future__ import annotations

from typing import Any

from tests.node.core.test_serving import core_of
from tests.node.core.trio import World
from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.schedule.intake import KIND_DUE, Row
from tickwheel.node.core.schedule.joining import RowCaller
from tickwheel.node.core.schedule.publisher import ROOM_WAIT_MS
from tickwheel.wheel.units import HOUR_MS


def schedule_rows(core: NodeCore, count: int, due_ms: int, client: str = "") -> None:
    """Single messages, of which nobody waits for the answer."""
    caller = RowCaller(lambda *placed: None, lambda failure: None)
    row = Row("t", KIND_DUE, due_ms, b"x")
    for _ in range(count):
        core.serving.run(caller.fail, lambda: core.parts.requests.schedule_row(row, client, "", caller))


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
    assert publisher.crowded
    told: list[Any] = []
    for _ in range(2):
        core.serving.start(publisher.room(), told.append)
    master.wake()
    world.run(ROOM_WAIT_MS // 2)
    assert not told
    world.run(ROOM_WAIT_MS)
    assert publisher.crowded and told == [None]


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
    assert core.state.topic_id("t") is not None and not publisher.waiting
    later_ms = world.now_ms + HOUR_MS
    schedule_rows(core, 1, later_ms, "a")
    schedule_rows(core, 100, 1 << 50, "b")
    schedule_rows(core, 1, later_ms, "c")
    assert publisher.take(1 << 20) is not None and publisher.cut_short and publisher.waiting
    now = core._now(core.monotonic_ns())
    assert publisher.wait_ms(now) == 0
    core.proposer.window.bytes = 0
    assert publisher.wait_ms(now) is None
