"""P1 of resets: what is due from a group's new place on comes (again), and what lies before it does not.

Between the first word of a reset and its answer everything is allowed: it may have been carried out, more than once.
Only whole ticks count. Retries are not judged: they are messages of their own, with later times.
"""

from __future__ import annotations

from typing import ClassVar

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history import Record, RunBegan
from tickwheel.chaos.sim.history_messages import Delivered, ScheduleAcknowledged, ScheduleSent
from tickwheel.chaos.sim.history_operators import ResetAnswered, ResetAsked
from tickwheel.chaos.sim.world import MS

TICK_MS = 1_000
AHEAD_MS = 100
"""A dispatch may be proposed this long before its due time, the error of the clock included."""


class ResetsHold(Checker):
    """Of the group that is reset, which has one topic."""

    promise: ClassVar[str] = "P1 (reset)"
    kinds: ClassVar[tuple[type[Record], ...]] = (
        RunBegan,
        ScheduleSent,
        ScheduleAcknowledged,
        ResetAsked,
        ResetAnswered,
        Delivered,
    )

    def __init__(self) -> None:
        self._start_wall_ms = 0
        self._group = ""
        self._asked_ns = 0
        """When the reset was asked for that is under way; 0: none is."""
        self._place_ms = 0
        """Since the last answer nothing that is due before comes."""
        self._void: set[int] = set()
        """Of a reset to what comes next: had come before, and does not come again."""
        self._due_ms: dict[int, int] = {}
        """Of what was acknowledged, in any topic of labelled messages without a key or message group."""
        self._came_ns: dict[str, dict[int, int]] = {}
        """When each message came last, by group."""
        self._owed: set[int] = set()

    def observe(self, record: Record) -> None:
        match record:
            case Delivered():
                if record.uid in self._due_ms:
                    self._judge(record)
            case ScheduleSent():
                label = record.rows[0].label
                if label is not None and label.lane is None and not label.key:
                    for row in record.rows:
                        self._due_ms.setdefault(row.uid, -1)
            case ScheduleAcknowledged():
                if record.uids[0] in self._due_ms:
                    for uid, due_ms in zip(record.uids, record.due_ms, strict=True):
                        self._due_ms[uid] = due_ms
            case ResetAsked():
                self._group, self._asked_ns = record.group, record.at_ns
            case ResetAnswered():
                self._answered(record)
            case RunBegan():
                self._start_wall_ms = record.start_wall_ms

    def _judge(self, record: Delivered) -> None:
        uid = record.uid
        self._came_ns.setdefault(record.group, {})[uid] = record.at_ns
        if record.group != self._group:
            return
        self._owed.discard(uid)
        if self._asked_ns or record.attempt > 1:
            return
        name = f"{record.node} delivers message {uid} to {record.group}"
        if record.due_ms < self._place_ms:
            self.broken(record.at_ns, f"{name}, due {self._place_ms - record.due_ms} ms before the group's new place")
        if uid in self._void:
            self.broken(record.at_ns, f"{name}, which had come before the group was reset to what comes next")

    def _answered(self, record: ResetAnswered) -> None:
        wall_ms = self._start_wall_ms + record.at_ns // MS
        asked_ns, self._asked_ns = self._asked_ns, 0
        came_ns = self._came_ns.get(record.group, {})
        before = {uid for uid, at_ns in came_ns.items() if at_ns < asked_ns}
        if record.from_ms < 0:
            self._place_ms, self._void = 0, before
            self._owed.clear()
            return
        self._void = set()
        self._place_ms = record.from_ms // TICK_MS * TICK_MS
        self._owed = {
            uid
            for uid, due_ms in self._due_ms.items()
            if record.from_ms + TICK_MS <= due_ms <= wall_ms - AHEAD_MS and came_ns.get(uid, 0) < asked_ns
        }

    def missing(self, at_ns: int) -> str:
        """See Checker."""
        return f"{len(self._owed)} messages after a reset, for instance {min(self._owed)}" if self._owed else ""

    def settle_accounts(self, at_ns: int) -> None:
        """See Checker."""
        if self._owed:
            self.broken(at_ns, f"{len(self._owed)} messages did not come after a reset: {min(self._owed)}")
