"""The cold tier: a parked message comes to its group or was cancelled, even if its part is loaded through a failover.

Other checkers judge that it is not early, comes where it was moved to, under one id, and not after its cancel. Waiting
parts are listed until all their messages came, loaded ones are reported as loaded, and a look-up of a message tells its
true state.
"""

from __future__ import annotations

from typing import ClassVar

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history import Record
from tickwheel.chaos.sim.history_bulk import ColdListed, ColdLoaded, ColdLooked, ColdParked
from tickwheel.chaos.sim.history_messages import (
    CancelAnswered,
    CancelSent,
    Delivered,
    RescheduleAnswered,
    RescheduleSent,
)
from tickwheel.chaos.sim.world import MS

LATE_NS = 1_000 * MS


class ColdOnce(Checker):
    promise: ClassVar[str] = "cold"
    kinds: ClassVar[tuple[type[Record], ...]] = (
        ColdParked,
        ColdLoaded,
        ColdLooked,
        ColdListed,
        CancelSent,
        CancelAnswered,
        RescheduleSent,
        RescheduleAnswered,
        Delivered,
    )

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

    def observe(self, record: Record) -> None:
        match record:
            case Delivered():
                if record.uid in self._due_ms:
                    self._missing.pop(record.uid, None)
            case ColdLoaded():
                self._loaded.setdefault(record.part, record.at_ns)
            case ColdListed():
                self._listed(record)
            case ColdParked():
                self._parked.setdefault(record.part, record.at_ns)
                self._uids[record.part] = record.uids
                for uid, due_ms in zip(record.uids, record.due_ms, strict=True):
                    if uid not in self._due_ms:
                        self._due_ms[uid] = due_ms
                        self._missing[uid] = record.group
            case CancelSent() if record.uid in self._due_ms:
                self._maybe_cancelled.add(record.uid)
            case CancelAnswered() if record.uid in self._due_ms:
                self._maybe_cancelled.discard(record.uid)
                if record.outcome == "NOT_FOUND" and record.uid in self._missing:
                    self.broken(record.at_ns, f"cold message {record.uid} was parked; its cancel says NOT_FOUND")
                if record.outcome == "CANCELLED":
                    self._missing.pop(record.uid, None)
            case RescheduleSent() if record.uid in self._due_ms:
                self._maybe_moved.add(record.uid)
                self._due_ms[record.uid] = max(self._due_ms[record.uid], record.due_ms)
            case RescheduleAnswered() if record.uid in self._due_ms:
                if record.outcome == "RESCHEDULED":
                    self._due_ms[record.uid] = record.due_ms
            case ColdLooked():
                self._looked(record)

    def _looked(self, record: ColdLooked) -> None:
        uid = record.uid
        if uid not in self._missing:
            return
        if record.state == "NOT_FOUND":
            self.broken(record.at_ns, f"cold message {uid} was parked, and now it is not found")
        if record.state == "MESSAGE_CANCELLED" and uid not in self._maybe_cancelled:
            self.broken(record.at_ns, f"cold message {uid} is cancelled; nobody asked for that")

    def _listed(self, record: ColdListed) -> None:
        for part, since_ns in self._parked.items():
            known = part in record.known or part in self._loaded or self._is_gone(part)
            if since_ns < record.asked_ns and not known:
                self.broken(record.at_ns, f"part {part} was registered, was not loaded, and is not listed")
        for part in record.waiting:
            if self._loaded.get(part, record.asked_ns) < record.asked_ns:
                self.broken(record.at_ns, f"part {part} is said to wait; it was loaded before")

    def _is_gone(self, part: int) -> bool:
        """Whether nothing of a part need be left where it was due: its load, whose answer is on its way, may have been
        long ago, and a part is forgotten with its hours."""
        excused = self._maybe_cancelled | self._maybe_moved
        return all(uid not in self._missing or uid in excused for uid in self._uids[part])

    def _outstanding(self, at_ns: int) -> list[int]:
        wall_ms = self.wall_ms(at_ns)
        return sorted(uid for uid in self._missing if self._due_ms[uid] <= wall_ms and uid not in self._maybe_cancelled)

    def missing(self, at_ns: int) -> str:
        late = self._outstanding(at_ns)
        return f"{len(late)} cold messages, for instance {late[0]}" if late else ""

    def settle_accounts(self, at_ns: int) -> None:
        late = self._outstanding(at_ns - LATE_NS)
        if late:
            self.broken(at_ns, f"{len(late)} cold messages never came: {late[:5]}")
