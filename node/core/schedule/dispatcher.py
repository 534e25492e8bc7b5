"""Decides, on the master, when the wheel's cursor moves and how far.

States (a table, drawn in docs/STATES.md):

    idle      -> aligning   lead{term} was applied here and the lease holds
    aligning  -> running    the cursor has met the clock
    aligning  -> waiting    the cursor is ahead of the clock
    waiting   -> running    the clock has caught up with it
    any       -> idle       mastership or the lease is gone

Aligning: the cursor is behind the clock, so messages are overdue. The master dispatches them at once, in
order, as fast as the limits allow. Waiting: the master dispatches nothing until the clock has caught up, so
that no message goes early or twice. Running: a dispatch is proposed `dispatch_ahead_ms` before the earliest
message is due. While entries of the log are spaced, it takes along what is due until the next entry. Delivery
holds messages that are not due yet.

Several dispatches may be in flight. The one log keeps them in order: a later one is never applied before an
earlier one. A failed dispatch is proposed again after pauses that grow by 100 ms up to a minute. From the
third failure in a row on, `blocked` is true: the wheel blocks rather than skips.
"""

from __future__ import annotations

import enum
from functools import partial

import numpy as np

from tickwheel.node.core.kernel import Kernel
from tickwheel.node.core.part import Part
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.schedule.push import PushAhead
from tickwheel.node.core.world import ClusterMs, Now
from tickwheel.node.failure import Failure
from tickwheel.node.state.machine import CommandResult
from tickwheel.proto.log_pb2 import Command, Dispatch
from tickwheel.wheel.units import CursorKey

RETRY_STEP_MS = 100
RETRY_MS_MAX = 60_000
FAILURES_BEFORE_BLOCKED = 3
DISPATCH_TOPICS_MAX = 256
"""Topics whose messages one dispatch moves, about. It is applied in one go, and each topic takes 20 to 40
microseconds: heartbeats and votes should not wait longer than ten milliseconds."""
FEW_TOPICS = 64
"""In a cluster of no more topics than that a dispatch counts as one to all of them."""


class Phase(enum.Enum):
    IDLE = "idle"
    ALIGNING = "aligning"
    WAITING = "waiting"
    RUNNING = "running"


class Dispatcher(Part):
    """The driver calls `tick` after every input, and no later than `wanted_ms`."""

    of_master = True

    def __init__(self, core: Kernel, push: PushAhead | None) -> None:
        """`push` is given if the delivery order is push-first."""
        self._core = core
        self._config = core.config
        self._wheel = core.wheel
        self._proposer = core.proposer
        self._push = push
        self.phase = Phase.IDLE
        self._proposed = CursorKey(0, 0)
        self._in_flight = 0
        self._failures = 0
        self._paused_until_ms = 0
        self._rests_until_ms = 0
        """End of the pause after a dispatch that left nothing behind."""
        self._now_ms = 0
        """Cluster time at the last tick."""
        self._mastership = 0

    @property
    def blocked(self) -> bool:
        """At least `FAILURES_BEFORE_BLOCKED` dispatches in a row have failed."""
        return self._failures >= FAILURES_BEFORE_BLOCKED

    @property
    def in_flight(self) -> int:
        """Dispatch commands proposed and not yet answered."""
        return self._in_flight

    def begin(self, term: int, now_ms: ClusterMs) -> None:
        """Start aligning, or waiting if the cursor is ahead of the clock."""
        self._mastership += 1
        self._proposed = self._wheel.cursor
        self._in_flight = 0
        self._failures = 0
        self._now_ms = now_ms
        self._paused_until_ms = self._rests_until_ms = 0
        if self._push is not None:
            self._push.reset()
        self.phase = Phase.WAITING if self._wheel.cursor.due_ms - 1 > self._reach_ms(now_ms) else Phase.ALIGNING

    def end(self, failure: Failure) -> None:
        """Stop at once. Later answers to dispatches in flight are ignored."""
        self._mastership += 1
        self.phase = Phase.IDLE
        self._in_flight = 0
        if self._push is not None:
            self._push.reset()

    def tick(self, now: Now) -> None:
        """Propose every dispatch that is due, within the limits on what is in flight."""
        if not (now.acting and now.dispatching):
            return
        config, now_ms = self._config, now.cluster_ms
        self._now_ms = now_ms
        if self.phase is Phase.IDLE:
            return
        until_ms = self._reach_ms(now_ms)
        if self.phase is Phase.WAITING:
            if self._wheel.cursor.due_ms - 1 > until_ms:
                return
            self.phase = Phase.RUNNING
        while self._in_flight < config.dispatch_in_flight_max and now_ms >= self._paused_until_ms:
            if now_ms < self._rests_until_ms or self._proposer.crowded:
                return
            start = max(self._proposed, self._wheel.cursor)
            due = self._is_due(start, now_ms + config.dispatch_ahead_ms)
            planned = self._plan(start, until_ms) if due else None
            if planned is None:
                if self.phase is Phase.ALIGNING and self._in_flight == 0:
                    self.phase = Phase.RUNNING
                return
            target, topics = planned
            self._propose(target, topics, now_ms)
            if target.due_ms > until_ms:
                # Every due message is under way, so the cursor meets the clock however much arrives meanwhile.
                self.phase = Phase.RUNNING
                self._rests_until_ms = now_ms + config.dispatch_period_ms

    def _reach_ms(self, now_ms: int) -> int:
        """Up to which due time messages may be dispatched now."""
        return now_ms + self._config.dispatch_ahead_ms + self._proposer.spacing.unhurried_ms

    def _plan(self, start: CursorKey, until_ms: int) -> tuple[CursorKey, int] | None:
        """Where the next dispatch brings the cursor, and how many topics get messages by it, at most; None: nothing is
        due, or it is still being loaded."""
        target = self._wheel.plan(until_ms, self._config.dispatch_messages_max, after=start)
        topics = len(self._core.state.topics)
        if target is None or topics <= FEW_TOPICS:
            return None if target is None else (target, topics)
        units = self._wheel.peek(start, target)
        if units is None:
            return target, topics
        _, first_rows = np.unique(units["topic_id"], return_index=True)
        if len(first_rows) <= DISPATCH_TOPICS_MAX:
            return target, len(first_rows)
        # Up to the first message of one topic more.
        row = units[int(np.partition(first_rows, DISPATCH_TOPICS_MAX)[DISPATCH_TOPICS_MAX])]
        return CursorKey(int(row["due_ms"]), int(row["index"])), DISPATCH_TOPICS_MAX

    def _is_due(self, start: CursorKey, until_ms: int) -> bool:
        """Whether a message from `start` on may be due by then."""
        due_ms = self._wheel.window.next_due_ms(after=start)
        return due_ms is not None and due_ms <= until_ms

    def _propose(self, target: CursorKey, topics: int, now_ms: int) -> None:
        mastership = self._mastership
        before = self._proposed
        self._proposed = target
        self._in_flight += 1
        wheel = self._wheel
        if self._push is not None:
            self._push.proposing(max(before, wheel.cursor), target, now_ms)
        command = Command(
            dispatch=Dispatch(
                due_ms=target.due_ms,
                index=target.index,
                expected_tick=wheel.window.tick,
                expected_local_index=wheel.window.local_index,
            )
        )

        reply = Reply(partial(self._applied, mastership), partial(self._failed, mastership, before))
        self._proposer.submit(command, reply, topics=topics)

    def _applied(self, mastership: int, result: CommandResult) -> None:
        if mastership != self._mastership:
            return
        self._in_flight -= 1
        self._failures = 0
        if self._push is not None and not self._push.applied():
            self._core.fatal("a dispatch did not bring what had been delivered ahead of it")

    def _failed(self, mastership: int, before: CursorKey, failure: Failure) -> None:
        if mastership != self._mastership:
            return
        self._in_flight -= 1
        if self._push is not None:
            self._push.failed()
        self._proposed = min(self._proposed, before)
        if self._now_ms >= self._paused_until_ms:
            # Dispatches in flight beside it fail from the same cause: count one failure.
            self._failures += 1
            self._paused_until_ms = self._now_ms + min(RETRY_STEP_MS * self._failures, RETRY_MS_MAX)

    def wait_ms(self, now: Now) -> int | None:
        """Until the next dispatch is due, if it may be proposed then."""
        config = self._config
        if self.phase is Phase.IDLE or not (now.acting and now.dispatching):
            return None
        if self.phase is Phase.WAITING:
            return self._wheel.cursor.due_ms - 1 - self._reach_ms(now.cluster_ms)
        if self._in_flight >= config.dispatch_in_flight_max or self._proposer.crowded:
            return None  # an answer of the log will bring it
        earliest_ms = max(self._paused_until_ms, self._rests_until_ms)
        if now.cluster_ms < earliest_ms:
            return earliest_ms - now.cluster_ms
        due_ms = self._wheel.window.next_due_ms(after=max(self._proposed, self._wheel.cursor))
        return None if due_ms is None else due_ms - config.dispatch_ahead_ms - now.cluster_ms
