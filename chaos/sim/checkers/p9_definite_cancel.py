"""P9: a cancel has a definite answer, and a cancelled message is never delivered."""

from __future__ import annotations

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history_messages import (
    CancelAnswered,
    Delivered,
    RescheduleAnswered,
    RescheduleSent,
    ScheduleAcknowledged,
)
from tickwheel.chaos.sim.world import HOUR_MS

DISPATCH_SLACK_MS = 42
"""A dispatch may be proposed this much earlier than a right clock would."""
CLOCK_SLACK_MS = 1_000
"""The cluster's time may be ahead of the true one by this."""


def hour_may_be_gone(message_id: int, wall_ms: int, hours_kept: int) -> bool:
    """Whether the message's hour ended so long ago that it is removed once all is settled."""
    return message_id >> 32 < (wall_ms + CLOCK_SLACK_MS) // HOUR_MS - hours_kept


class DefiniteCancel(Checker):
    """Push-first has one exception: a message delivered ahead of a lost dispatch may be cancelled afterwards."""

    promise = "P9"

    def __init__(self) -> None:
        self._due_ms: dict[int, int] = {}
        self._moving: set[int] = set()
        self._delivered: dict[int, int] = {}
        self._cancelled: dict[int, int] = {}
        self._too_late: set[int] = set()

    def _on_delivered(self, record: Delivered) -> None:
        if record.uid in self._cancelled:
            self.broken(
                f"{record.node} delivers message {record.uid}, whose cancel was acknowledged "
                f"at {self._cancelled[record.uid] / 1e9:.6f} s"
            )
        self._delivered.setdefault(record.uid, record.at_ns)

    def _on_schedule_acknowledged(self, record: ScheduleAcknowledged) -> None:
        for uid, due_ms in zip(record.uids, record.due_ms, strict=True):
            self._due_ms.setdefault(uid, due_ms)

    def _on_reschedule_sent(self, record: RescheduleSent) -> None:
        self._moving.add(record.uid)

    def _on_reschedule_answered(self, record: RescheduleAnswered) -> None:
        self._moving.discard(record.uid)
        if record.outcome == "RESCHEDULED":
            self._due_ms[record.uid] = record.due_ms

    def _on_cancel_answered(self, record: CancelAnswered) -> None:
        uid = record.uid
        if record.outcome == "CANCELLED":
            if uid in self._delivered and not self.run.push_first:
                self.broken(f"message {uid} is CANCELLED; it was delivered at {self._delivered[uid] / 1e9:.6f} s")
            if uid in self._too_late:
                self.broken(f"message {uid} is CANCELLED; the answer before was ALREADY_DISPATCHED")
            self._cancelled[uid] = record.at_ns
        elif record.outcome == "ALREADY_DISPATCHED":
            if uid in self._cancelled:
                self.broken(f"message {uid} is ALREADY_DISPATCHED; the answer before was CANCELLED")
            wall_ms = self.now_ms
            ahead_ms = self.run.dispatch_ahead_ms + DISPATCH_SLACK_MS
            if uid in self._due_ms and uid not in self._moving and wall_ms < self._due_ms[uid] - ahead_ms:
                self.broken(f"message {uid} is ALREADY_DISPATCHED {self._due_ms[uid] - wall_ms} ms before its due time")
            self._too_late.add(uid)
        elif record.outcome == "NOT_FOUND" and uid in self._due_ms and not self._removed(record):
            self.broken(f"cancel of message {uid}, which was acknowledged: NOT_FOUND")

    def _removed(self, record: CancelAnswered) -> bool:
        """Whether its hour may have been removed: the message was delivered, and the hour ended long enough ago."""
        wall_ms = self.now_ms
        return record.uid in self._delivered and hour_may_be_gone(record.id, wall_ms, self.run.hours_kept)
