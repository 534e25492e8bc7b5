"""P1 of resets: messages due from a group's new place on come (again), and earlier ones do not.

Between the first request for a reset and its answer, the reset may have been carried out, even more than once. In that
time a message must be allowed by the old place or by the new one. Once a message came that only the new place allows,
the reset was carried out and the old place no longer counts. Only whole ticks count. Retries are not judged: they are
messages of their own, with later times.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history import Record, RunBegan
from tickwheel.chaos.sim.history_messages import Delivered, ScheduleAcknowledged, ScheduleSent
from tickwheel.chaos.sim.history_operators import ResetAnswered, ResetAsked
from tickwheel.chaos.sim.world import MS

TICK_MS = 1_000
AHEAD_MS = 100
"""A dispatch may be proposed this long before its due time, the error of the clock included."""


@dataclass(slots=True)
class _Place:
    """The place of a group: the messages that it forbids."""

    from_ms: int = 0
    """Messages due before this are forbidden."""
    void: set[int] = field(default_factory=set)
    """Messages forbidden by uid: they came before a reset to the next messages."""

    def forbids(self, uid: int, due_ms: int) -> str:
        """The reason why a message must not come; empty if it may."""
        if due_ms < self.from_ms:
            return f"due {self.from_ms - due_ms} ms before the group's place"
        return "which had come before the group was reset to what comes next" if uid in self.void else ""


class ResetsHold(Checker):
    """Judges the group reset last, which has one topic."""

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
        self._place = _Place()
        self._asked: _Place | None = None
        """The new place by the reset under way."""
        self._asked_ns = 0
        self._carried_out = False
        """The reset under way has been carried out at least once."""
        self._due_ms: dict[int, int] = {}
        """Due times, in any topic of labelled messages without a key or message group; -1 until acknowledged."""
        self._came_ns: dict[str, dict[int, int]] = {}
        """By group and message: time of the last delivery."""
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
                self._begin(record)
            case ResetAnswered():
                self._answered(record)
            case RunBegan():
                self._start_wall_ms = record.start_wall_ms

    def _begin(self, record: ResetAsked) -> None:
        self._group, self._asked_ns, self._carried_out = record.group, record.at_ns, False
        if record.from_ms < 0:
            self._asked = _Place(void=set(self._came_ns.get(record.group, ())))
        else:
            self._asked = _Place(record.from_ms // TICK_MS * TICK_MS)

    def _judge(self, record: Delivered) -> None:
        uid = record.uid
        self._came_ns.setdefault(record.group, {})[uid] = record.at_ns
        if record.group != self._group:
            return
        self._owed.discard(uid)
        if record.attempt > 1:
            return
        before = self._place.forbids(uid, record.due_ms)
        if self._asked is None:
            wrong = before
        else:
            wrong = self._asked.forbids(uid, record.due_ms)
            if not self._carried_out and not (before and wrong):
                self._carried_out = bool(before)
                return
        if wrong:
            since = "" if self._asked is None else f" (a reset is under way since {self._asked_ns / 1e9:.6f} s)"
            self.broken(record.at_ns, f"{record.node} delivers message {uid} to {record.group}, {wrong}{since}")

    def _answered(self, record: ResetAnswered) -> None:
        wall_ms = self._start_wall_ms + record.at_ns // MS
        came_ns = self._came_ns.get(record.group, {})
        assert self._asked is not None, "answered and never asked for"
        self._place, self._asked = self._asked, None
        if record.from_ms < 0:
            self._owed.clear()
            return
        self._owed = {
            uid
            for uid, due_ms in self._due_ms.items()
            if record.from_ms + TICK_MS <= due_ms <= wall_ms - AHEAD_MS and came_ns.get(uid, 0) < self._asked_ns
        }

    def missing(self, at_ns: int) -> str:
        return f"{len(self._owed)} messages after a reset, for instance {min(self._owed)}" if self._owed else ""

    def settle_accounts(self, at_ns: int) -> None:
        if self._owed:
            self.broken(at_ns, f"{len(self._owed)} messages did not come after a reset: {min(self._owed)}")
