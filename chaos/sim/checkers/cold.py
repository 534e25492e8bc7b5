"""The cold tier: a parked message comes to its group or was cancelled, even if its part is loaded through a failover.

Other checkers judge that it is not early, comes where it was moved to, under one id, and not after its cancel. Waiting
parts are listed until all their messages came, loaded ones are reported as loaded, and a look-up of a message tells its
true state.
"""

from __future__ import annotations

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history_bulk import ColdListed, ColdLoaded, ColdLooked, ColdParked
from tickwheel.chaos.sim.history_messages import (
    CancelAnswered,
    CancelSent,
    Delivered,
    RescheduleAnswered,
    RescheduleSent,
)


class ColdOnce(Checker):
    promise = "cold"
    what_is_owed = "cold messages"

    def __init__(self) -> None:
        self._due_ms: dict[int, int] = {}
        """The latest time at which a parked message may be due, as far as is known."""
        self._missing: dict[int, str] = {}
        """Group of each message that was parked, perhaps not cancelled, and not delivered yet."""
        self._maybe_cancelled: set[int] = set()
        self._parked: dict[int, int] = {}
        """By part: time since which it is known to be registered."""
        self._loaded: dict[int, int] = {}
        """By part: time since which it is known to be loaded."""
        self._uids: dict[int, tuple[int, ...]] = {}
        """By part: its messages."""
        self._maybe_moved: set[int] = set()

    def _on_delivered(self, record: Delivered) -> None:
        if record.uid in self._due_ms:
            self._missing.pop(record.uid, None)

    def _on_cold_loaded(self, record: ColdLoaded) -> None:
        self._loaded.setdefault(record.part, record.at_ns)

    def _on_cold_parked(self, record: ColdParked) -> None:
        self._parked.setdefault(record.part, record.at_ns)
        self._uids[record.part] = record.uids
        for uid, due_ms in zip(record.uids, record.due_ms, strict=True):
            if uid not in self._due_ms:
                self._due_ms[uid] = due_ms
                self._missing[uid] = record.group

    def _on_cancel_sent(self, record: CancelSent) -> None:
        if record.uid in self._due_ms:
            self._maybe_cancelled.add(record.uid)

    def _on_cancel_answered(self, record: CancelAnswered) -> None:
        if record.uid in self._due_ms:
            self._maybe_cancelled.discard(record.uid)
            if record.outcome == "NOT_FOUND" and record.uid in self._missing:
                self.broken(f"cold message {record.uid} was parked; its cancel says NOT_FOUND")
            if record.outcome == "CANCELLED":
                self._missing.pop(record.uid, None)

    def _on_reschedule_sent(self, record: RescheduleSent) -> None:
        if record.uid in self._due_ms:
            self._maybe_moved.add(record.uid)
            self._due_ms[record.uid] = max(self._due_ms[record.uid], record.due_ms)

    def _on_reschedule_answered(self, record: RescheduleAnswered) -> None:
        if record.uid in self._due_ms and record.outcome == "RESCHEDULED":
            self._due_ms[record.uid] = record.due_ms

    def _on_cold_looked(self, record: ColdLooked) -> None:
        uid = record.uid
        if uid not in self._missing:
            return
        if record.state == "NOT_FOUND":
            self.broken(f"cold message {uid} was parked, and now it is not found")
        if record.state == "MESSAGE_CANCELLED" and uid not in self._maybe_cancelled:
            self.broken(f"cold message {uid} is cancelled; nobody asked for that")

    def _on_cold_listed(self, record: ColdListed) -> None:
        for part, since_ns in self._parked.items():
            known = part in record.known or part in self._loaded or self._is_gone(part)
            if since_ns < record.asked_ns and not known:
                self.broken(f"part {part} was registered, was not loaded, and is not listed")
        for part in record.waiting:
            if self._loaded.get(part, record.asked_ns) < record.asked_ns:
                self.broken(f"part {part} is said to wait; it was loaded before")

    def _is_gone(self, part: int) -> bool:
        """Whether nothing of a part need be left where it was due: its load, whose answer is on its way, may have been
        long ago, and a part is forgotten with its hours."""
        excused = self._maybe_cancelled | self._maybe_moved
        return all(uid not in self._missing or uid in excused for uid in self._uids[part])

    def owed(self, at_ns: int) -> list[int]:
        wall_ms = self.wall_ms(at_ns)
        return sorted(uid for uid in self._missing if self._due_ms[uid] <= wall_ms and uid not in self._maybe_cancelled)
