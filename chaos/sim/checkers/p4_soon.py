"""P4: once all faults have ended, what is acknowledged from then on comes soon."""

from __future__ import annotations

from typing import ClassVar

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history import Healed, Record, RunBegan
from tickwheel.chaos.sim.history_messages import Delivered, ScheduleAcknowledged, ScheduleSent
from tickwheel.chaos.sim.world import MS, SECOND

LATE_NS_HEALED_MOST = 5 * SECOND
"""Consumers find the master again, leases of dead ones run out."""


class Soon(Checker):
    """First deliveries only, counted from the due time or the acknowledgement, whichever is later.

    Not in FIFO topics: there a message waits for those before it.
    """

    promise: ClassVar[str] = "P4"
    kinds: ClassVar[tuple[type[Record], ...]] = (RunBegan, Healed, ScheduleSent, ScheduleAcknowledged, Delivered)

    def __init__(self) -> None:
        self._start_wall_ms = 0
        self._healed = False
        self._awaited: dict[int, tuple[int, bool]] = {}  # uid -> (expected at ns, acknowledged after the heal)
        self._in_order: set[int] = set()
        self._seen: set[tuple[str, int]] = set()

    def observe(self, record: Record) -> None:
        match record:
            case Delivered():
                self._delivered(record)
            case ScheduleAcknowledged():
                for uid, due_ms in zip(record.uids, record.due_ms, strict=True):
                    due_ns = (due_ms - self._start_wall_ms) * MS
                    self._awaited.setdefault(uid, (max(due_ns, record.at_ns), self._healed))
            case ScheduleSent():
                label = record.rows[0].label
                if label is not None and label.lane is not None:
                    self._in_order.update(row.uid for row in record.rows)
            case Healed():
                self._healed = True
            case RunBegan():
                self._start_wall_ms = record.start_wall_ms

    def _delivered(self, record: Delivered) -> None:
        key = (record.group, record.uid)
        if key in self._seen:
            return
        self._seen.add(key)
        expected_ns, after_heal = self._awaited.get(record.uid, (record.at_ns, False))
        late_ns = record.at_ns - expected_ns
        if after_heal and late_ns > LATE_NS_HEALED_MOST and record.uid not in self._in_order:
            self.broken(
                record.at_ns, f"message {record.uid} reaches {record.group} {late_ns / SECOND:.3f} s late, long healed"
            )
