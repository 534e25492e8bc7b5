"""P1: an acknowledged schedule is delivered to every group, or cancelled, or still pending because it is not due."""

from __future__ import annotations

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history_keys import KeyedSeen
from tickwheel.chaos.sim.history_messages import (
    CancelAnswered,
    CancelSent,
    Delivered,
    Looked,
    RescheduleAnswered,
    RescheduleSent,
    ScheduleAcknowledged,
)
from tickwheel.chaos.sim.history_operators import SweptSeen


class NoLoss(Checker):
    """Also tells the drain which messages are still missing."""

    promise = "P1"
    what_is_owed = "acknowledged messages (group, message)"

    def __init__(self) -> None:
        self._due_ms: dict[int, int] = {}
        self._missing: dict[str, set[int]] = {}  # group -> acknowledged, not yet delivered
        self._delivered: dict[str, set[int]] = {}
        self._cancelled: set[int] = set()
        self._cancel_open: dict[int, int] = {}  # uid -> cancels sent and not answered
        self._reschedule_open: dict[int, int] = {}

    def _on_delivered(self, record: Delivered) -> None:
        self._delivered.setdefault(record.group, set()).add(record.uid)
        self._missing.setdefault(record.group, set()).discard(record.uid)

    def _on_schedule_acknowledged(self, record: ScheduleAcknowledged) -> None:
        for uid, due_ms in zip(record.uids, record.due_ms, strict=True):
            if uid not in self._due_ms:
                self._due_ms[uid] = due_ms
                for group in record.groups or self.run.groups:
                    if uid not in self._delivered.get(group, ()) and uid not in self._cancelled:
                        self._missing.setdefault(group, set()).add(uid)

    def _on_cancel_sent(self, record: CancelSent) -> None:
        self._cancel_open[record.uid] = self._cancel_open.get(record.uid, 0) + 1

    def _on_cancel_answered(self, record: CancelAnswered) -> None:
        self._cancel_open.pop(record.uid, None)
        if record.outcome == "CANCELLED":
            self._cancel(record.uid)

    def _cancel(self, uid: int) -> None:
        self._cancelled.add(uid)
        for missing in self._missing.values():
            missing.discard(uid)

    def _on_reschedule_sent(self, record: RescheduleSent) -> None:
        self._reschedule_open[record.uid] = record.due_ms

    def _on_reschedule_answered(self, record: RescheduleAnswered) -> None:
        self._reschedule_open.pop(record.uid, None)
        if record.outcome == "RESCHEDULED":
            self._due_ms[record.uid] = record.due_ms

    def _on_swept_seen(self, record: SweptSeen) -> None:
        # p9_sweeps judges whether the sweep was right: here the message is cancelled or has this due time.
        self._reschedule_open.pop(record.uid, None)
        self._due_ms[record.uid] = record.due_ms
        if record.state == "MESSAGE_CANCELLED":
            self._cancel(record.uid)

    def _on_keyed_seen(self, record: KeyedSeen) -> None:
        # p13_keys judges whether it may be so.
        self._reschedule_open.pop(record.uid, None)
        if record.owed:
            self._due_ms[record.uid] = record.due_ms
        else:
            self._cancel(record.uid)

    def owed(self, at_ns: int) -> list[tuple[str, int]]:
        wall_ms = self.wall_ms(at_ns)
        return [
            (group, uid)
            for group, missing in self._missing.items()
            for uid in sorted(missing)
            if self._latest_due_ms(uid) <= wall_ms and uid not in self._cancel_open
        ]

    def not_due(self, at_ns: int) -> list[int]:
        """Acknowledged, not delivered, due after `at_ns`."""
        wall_ms = self.wall_ms(at_ns)
        missing = set().union(*self._missing.values()) if self._missing else set()
        return sorted(uid for uid in missing if self._latest_due_ms(uid) > wall_ms and uid not in self._cancel_open)

    def _latest_due_ms(self, uid: int) -> int:
        return max(self._due_ms[uid], self._reschedule_open.get(uid, 0))

    def _on_looked(self, record: Looked) -> None:
        known = record.uid in self._due_ms
        doubtful = record.uid in self._cancel_open or record.uid in self._cancelled
        if known and record.state == "NOT_FOUND":
            self.broken(f"message {record.uid} was acknowledged as {record.id:#x}; now it is not found")
        if known and record.state == "MESSAGE_CANCELLED" and not doubtful:
            self.broken(f"message {record.uid} is cancelled; nobody asked for that")
        if known and record.state == "PENDING" and record.uid in self._cancelled:
            self.broken(f"message {record.uid} is pending after its cancel was acknowledged")
