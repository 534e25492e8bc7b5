"""P3: no delivery before the due time, by true time.

A node may be early by the clock error that it reports, and by a few milliseconds more while oscillators drift by more
than it assumes. A clock, perhaps another and less certain one, also turned a delay into a due time: its error at that
time is allowed as well.
"""

from __future__ import annotations

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history_messages import (
    DelayCounted,
    Delivered,
    RescheduleAnswered,
    RescheduleSent,
    ScheduleSent,
)
from tickwheel.chaos.sim.world import MS


class NeverEarly(Checker):
    """Judges by the time that the client asked for, not by the due time that the node reports."""

    promise = "P3"

    def __init__(self) -> None:
        self._due_ms: dict[int, int] = {}
        self._relative: set[int] = set()
        self._counted_ms: dict[int, float] = {}
        """The largest error of a clock that may have counted a message's delay."""
        self._maybe_due_ms: dict[int, int] = {}  # a reschedule that is not answered yet

    def _on_schedule_sent(self, record: ScheduleSent) -> None:
        sent_ms = self.now_ms
        for row in record.rows:
            due_ms = row.due_ms if row.due_ms is not None else sent_ms + (row.delay_ms or 0)
            self._due_ms.setdefault(row.uid, due_ms)
            if row.due_ms is None:
                self._relative.add(row.uid)

    def _on_delay_counted(self, record: DelayCounted) -> None:
        for uid in record.uids:
            self._counted_ms[uid] = max(record.clock_error_ms, self._counted_ms.get(uid, 0.0))

    def _on_reschedule_sent(self, record: RescheduleSent) -> None:
        self._maybe_due_ms[record.uid] = min(record.due_ms, self._maybe_due_ms.get(record.uid, record.due_ms))

    def _on_reschedule_answered(self, record: RescheduleAnswered) -> None:
        # Another answer may hide an earlier success whose answer was lost: then both times stay possible.
        if record.outcome == "RESCHEDULED":
            self._maybe_due_ms.pop(record.uid, None)
            self._due_ms[record.uid] = record.due_ms

    def _on_delivered(self, record: Delivered) -> None:
        due_ms = self._due_ms.get(record.uid)
        if due_ms is None:
            return  # nobody scheduled it: P2
        allowed_ms = self.run.clock_allowance_ms + record.clock_error_ms
        if record.uid in self._relative:
            allowed_ms += self.run.clock_allowance_ms + self._counted_ms.get(record.uid, 0.0)
        allowed_ns = int(allowed_ms * MS)
        earliest_ms = min(due_ms, self._maybe_due_ms.get(record.uid, due_ms))
        early_ns = self.true_ns(earliest_ms) - allowed_ns - record.at_ns
        if early_ns > 0:
            self.broken(
                f"{record.node} delivers message {record.uid} {early_ns / MS:.1f} ms before its due time {due_ms}"
            )
