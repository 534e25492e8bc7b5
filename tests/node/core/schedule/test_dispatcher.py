"""The dispatcher over a real wheel: many dispatches under way, answered late, out of order, or with failures."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.pacing import Spacing
from tickwheel.node.core.proposer import Answer
from tickwheel.node.core.schedule.dispatcher import DISPATCH_TOPICS_MAX, Dispatcher, Phase
from tickwheel.node.core.world import ClusterMs, Now, SteadyMs
from tickwheel.node.failure import limit_reached, not_master
from tickwheel.node.state.results import DispatchResult
from tickwheel.proto.log_pb2 import Command
from tickwheel.storage.simulated import SimulatedDisk
from tickwheel.wheel.engine import Wheel, WheelConfig
from tickwheel.wheel.units import UNIT, CursorKey

NOW_MS = 490_000 * 3_600_000
CONFIG = replace(CoreConfig(), dispatch_messages_max=10, dispatch_in_flight_max=4)


def at(now_ms: int) -> Now:
    """A tick of a master that may dispatch."""
    return Now(ClusterMs(now_ms), SteadyMs(0), acting=True, dispatching=True)


class Log:
    """Takes commands and lets the test say what becomes of them, in the order of the log."""

    def __init__(self, wheel: Wheel) -> None:
        self._wheel = wheel
        self.spacing = Spacing(CoreConfig().spaced_rate_min)
        self.waiting: list[tuple[Command, Answer]] = []
        self.dispatched: list[int] = []
        self.commands = 0
        self.topics: list[int] = []
        self.crowded = False

    def submit(self, command: Command, reply: Answer, *, may_gather: bool = False, topics: int = 1) -> None:
        self.commands += 1
        self.topics.append(topics)
        self.waiting.append((command, reply))

    def commit(self) -> None:
        """The oldest that waits is applied."""
        command, reply = self.waiting.pop(0)
        moved = self._wheel.dispatch(CursorKey(command.dispatch.due_ms, command.dispatch.index))
        self.dispatched += moved.units["index"].tolist()
        reply.done(DispatchResult(self._wheel.cursor, len(moved.units)))

    def fail(self) -> None:
        """The oldest that waits does not enter the log."""
        self.waiting.pop(0)[1].fail(limit_reached("log_in_flight", 8))


def made(config: CoreConfig, count: int = 100, topics: int = 1) -> tuple[Dispatcher, Log, Wheel]:
    """A dispatcher that leads, and a wheel with a message due in each of the last `count` milliseconds, for these
    topics in turn."""
    wheel = Wheel(SimulatedDisk(Random(1)), "wheel", WheelConfig())
    units = np.zeros(count, UNIT)
    units["due_requested_ms"] = NOW_MS - count + np.arange(count)
    units["size"] = 1
    units["topic_id"] = 1 + np.arange(count) % topics
    wheel.append(units, bytes(count))
    for job in wheel.jobs(NOW_MS):
        job.run()
        wheel.finish(job)
    log = Log(wheel)
    # What a dispatcher uses of a kernel; the log is the part of a proposer that it uses.
    state = SimpleNamespace(topics=range(topics))
    kernel: Any = SimpleNamespace(config=config, wheel=wheel, proposer=log, state=state)
    dispatcher = Dispatcher(kernel, None)
    dispatcher.begin(1, ClusterMs(NOW_MS))
    assert dispatcher.phase is Phase.ALIGNING
    dispatcher.tick(at(NOW_MS))
    return dispatcher, log, wheel


@pytest.mark.parametrize("in_flight", [1, 4])
def test_several_are_under_way_and_progress_is_in_order(in_flight: int) -> None:
    """As many as allowed, not one more; 1 is the synchronous mode; each message once, in order."""
    dispatcher, log, wheel = made(replace(CONFIG, dispatch_in_flight_max=in_flight))
    while log.waiting:
        assert dispatcher.in_flight == len(log.waiting) <= in_flight
        log.commit()
        dispatcher.tick(at(NOW_MS))
    assert log.dispatched == list(range(100))
    assert wheel.pending == 0
    assert dispatcher.phase is Phase.RUNNING


@pytest.mark.parametrize("topics", [100, DISPATCH_TOPICS_MAX, DISPATCH_TOPICS_MAX + 1, 1_000])
def test_a_dispatch_moves_messages_of_a_bounded_number_of_topics(topics: int) -> None:
    """It is applied in one go, at a cost for each topic. Whatever is left goes next, in order."""
    most = 1_000 if topics <= DISPATCH_TOPICS_MAX else DISPATCH_TOPICS_MAX
    dispatcher, log, wheel = made(replace(CONFIG, dispatch_messages_max=8_192), 1_000, topics)
    moved = []
    while log.waiting:
        before = len(log.dispatched)
        log.commit()
        moved.append(len(log.dispatched) - before)
        dispatcher.tick(at(NOW_MS))
    assert (
        moved == [min(most, 1_000 - first) for first in range(0, 1_000, most)]
        and log.dispatched == list(range(1_000))
        and not wheel.pending
    )
    assert log.topics[0] == min(topics, DISPATCH_TOPICS_MAX)


def test_no_dispatch_joins_a_full_entry_that_waits() -> None:
    """An answer of the log lets it go, and the tick after that proposes the next."""
    dispatcher, log, wheel = made(replace(CONFIG, dispatch_messages_max=10))
    log.commit()
    log.crowded = True
    before = log.commands
    while log.waiting:
        log.commit()
        dispatcher.tick(at(NOW_MS))
    assert log.commands == before and wheel.pending and dispatcher.wait_ms(at(NOW_MS)) is None
    log.crowded = False
    wait_ms = dispatcher.wait_ms(at(NOW_MS))
    assert wait_ms is not None and wait_ms <= 0
    dispatcher.tick(at(NOW_MS))
    assert log.waiting


def test_one_that_fails_between_others_is_not_skipped() -> None:
    """The second of four fails, the later ones are applied: its messages go with the third, none is lost or doubled."""
    dispatcher, log, wheel = made(CONFIG)
    log.commit()
    log.fail()
    log.commit()
    assert log.dispatched == list(range(30))
    log.commit()
    for now_ms in range(NOW_MS, NOW_MS + 1_000, 50):
        dispatcher.tick(at(now_ms))
        while log.waiting:
            log.commit()
    assert log.dispatched == list(range(100))
    assert wheel.pending == 0
    assert not dispatcher.blocked


def test_failures_pause_longer_and_longer_and_block_the_wheel() -> None:
    """100 ms more each time, up to a minute; from the third on it is blocked, asks for the same again, and recovers."""
    dispatcher, log, wheel = made(CONFIG)
    now_ms, first = NOW_MS, CursorKey(0, 0)
    for failures in range(1, 700):
        proposed = [CursorKey(c.dispatch.due_ms, c.dispatch.index) for c, _ in log.waiting]
        assert proposed, failures
        if failures == 1:
            first = proposed[0]
        assert proposed[0] == first, "the same dispatch, nothing beyond it"
        while log.waiting:
            log.fail()
        assert dispatcher.blocked == (failures >= 3)
        pause_ms = min(100 * failures, 60_000)
        dispatcher.tick(at(now_ms + pause_ms - 1))
        assert not log.waiting
        assert dispatcher.wait_ms(at(now_ms)) == pause_ms
        now_ms += pause_ms
        dispatcher.tick(at(now_ms))
    assert wheel.cursor == CursorKey(0, 0)
    while log.waiting:
        log.commit()
        dispatcher.tick(at(now_ms))
    assert not dispatcher.blocked
    assert log.dispatched == list(range(100))


def test_answers_of_an_earlier_mastership_count_for_nothing() -> None:
    """Mastership was lost with dispatches under way: late answers change no pause and no progress of the next."""
    dispatcher, log, _ = made(CONFIG)
    late, log.waiting = log.waiting, []
    dispatcher.end(not_master(None, None))
    assert dispatcher.wait_ms(at(NOW_MS)) is None
    dispatcher.begin(1, ClusterMs(NOW_MS))
    for _, reply in late:
        reply.fail(limit_reached("log_in_flight", 8))
    assert dispatcher.in_flight == 0 and not dispatcher.blocked
    dispatcher.tick(at(NOW_MS))
    while log.waiting:
        log.commit()
        dispatcher.tick(at(NOW_MS))
    assert log.dispatched == list(range(100))
