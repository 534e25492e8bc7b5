"""Bulk load: each message of a bundle that was taken over comes, under one id, and none of a bundle nobody asked for.

Other checkers judge that it is not early, not twice and not after its cancel. The counts of a load are true.
"""

from __future__ import annotations

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.checkers.p9_definite_cancel import hour_may_be_gone
from tickwheel.chaos.sim.history_bulk import LoadAnswered, TakeOverAsked
from tickwheel.chaos.sim.history_messages import CancelAnswered, CancelSent, Delivered, ScheduleSent

GROUPS = ("shelves", "mirrors")


class LoadsOnce(Checker):
    """Judges the groups of loads.py."""

    promise = "load"
    what_is_owed = "deliveries (group, message) of what was loaded"

    def __init__(self) -> None:
        self._due_ms: dict[int, int] = {}
        self._bundles: dict[tuple[str, int], tuple[int, ...]] = {}
        self._taken: dict[str, int] = {}
        self._owner: dict[int, tuple[str, int]] = {}
        self._ids: dict[int, int] = {}
        self._cancelled: set[int] = set()
        """Messages that are cancelled, or may be, as far as is known."""
        self._missing: dict[str, set[int]] = {group: set() for group in GROUPS}
        self._came: dict[str, set[int]] = {group: set() for group in GROUPS}

    def _on_schedule_sent(self, record: ScheduleSent) -> None:
        if not record.node:
            self._due_ms.update((row.uid, row.due_ms or 0) for row in record.rows)

    def _on_take_over_asked(self, record: TakeOverAsked) -> None:
        self._bundles[record.job, record.sequence] = record.uids
        self._owner.update((uid, (record.job, record.sequence)) for uid in record.uids)

    def _on_cancel_sent(self, record: CancelSent) -> None:
        if record.uid in self._owner:
            self._cancelled.add(record.uid)

    def _on_delivered(self, record: Delivered) -> None:
        if record.uid not in self._owner:
            return
        uid = record.uid
        if self._ids.setdefault(uid, record.id) != record.id:
            job, sequence = self._owner[uid]
            self.broken(
                f"{record.node} delivers message {uid} of bundle {sequence} of {job} under two ids "
                f"({self._ids[uid]:#x}, {record.id:#x}): loaded twice"
            )
        self._came.setdefault(record.group, set()).add(uid)
        self._missing.setdefault(record.group, set()).discard(uid)

    def _on_load_answered(self, record: LoadAnswered) -> None:
        name = f"bundle {record.sequence} of {record.job}"
        if record.taken < record.sequence:
            self.broken(f"{name} was answered with {record.taken} bundles taken over")
        asked = [sequence for sequence in range(1, record.taken + 1) if (record.job, sequence) in self._bundles]
        units = sum(len(self._bundles[record.job, sequence]) for sequence in asked)
        if len(asked) < record.taken or units != record.units:
            self.broken(
                f"{name}: {record.taken} bundles with {record.units} messages are said to be taken over; "
                f"{len(asked)} of them, with {units}, were asked for"
            )
        for sequence in range(self._taken.get(record.job, 0) + 1, record.taken + 1):
            for uid in self._bundles[record.job, sequence]:
                for group, missing in self._missing.items():
                    if uid not in self._came[group] and uid not in self._cancelled:
                        missing.add(uid)
        self._taken[record.job] = max(record.taken, self._taken.get(record.job, 0))

    def _on_cancel_answered(self, record: CancelAnswered) -> None:
        uid = record.uid
        if uid not in self._owner:
            return
        if record.outcome == "NOT_FOUND" and not self._removed(record):
            self.broken(f"cancel of message {uid}, which was loaded as {record.id:#x}: NOT_FOUND")
        if record.outcome == "CANCELLED":
            for missing in self._missing.values():
                missing.discard(uid)
            return
        self._cancelled.discard(uid)
        job, sequence = self._owner[uid]
        for group, missing in self._missing.items():
            if sequence <= self._taken.get(job, 0) and uid not in self._came[group]:
                missing.add(uid)

    def _removed(self, record: CancelAnswered) -> bool:
        """Whether its hour may have been removed: the message came to every group, and the hour ended long enough
        ago."""
        wall_ms = self.now_ms
        came = all(record.uid in came for came in self._came.values())
        return came and hour_may_be_gone(record.id, wall_ms, self.run.hours_kept)

    def owed(self, at_ns: int) -> list[tuple[str, int]]:
        wall_ms = self.wall_ms(at_ns)
        return [
            (group, uid)
            for group, missing in self._missing.items()
            for uid in sorted(missing)
            if self._due_ms[uid] <= wall_ms and uid not in self._cancelled
        ]
