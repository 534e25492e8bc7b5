"""P1 of dead letters, and P5 of extended leases: what was replayed comes again, what was purged does not, and what a
consumer holds longer stays with it.

An extension is judged under the master that gave it: what the next one knows of it is another matter.
"""

from __future__ import annotations

from typing import ClassVar

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history import Record, RunBegan
from tickwheel.chaos.sim.history_messages import (
    DeadPurged,
    DeadReplayAsked,
    DeadReplayed,
    Delivered,
    Extended,
    SettleSent,
)
from tickwheel.chaos.sim.world import MS

_Key = tuple[str, int]
"""(group, uid)"""


class LettersAndLeases(Checker):
    """See the module."""

    promise: ClassVar[str] = "P1"
    kinds: ClassVar[tuple[type[Record], ...]] = (
        RunBegan,
        Delivered,
        SettleSent,
        Extended,
        DeadReplayAsked,
        DeadReplayed,
        DeadPurged,
    )

    def __init__(self) -> None:
        self._start_wall_ms = 0
        self._allowance_ms = 0
        self._replaying: set[_Key] = set()
        """Asked for, and not delivered since."""
        self._owed: dict[_Key, int] = {}
        """Replayed, and not delivered since: when that was answered."""
        self._purged: dict[_Key, int] = {}
        self._held: dict[_Key, Extended] = {}

    def observe(self, record: Record) -> None:
        match record:
            case Delivered():
                self._delivered(record)
            case SettleSent():
                self._held.pop((record.group, record.uid), None)
            case Extended():
                self._held[record.group, record.uid] = record
            case DeadReplayAsked():
                self._replaying.update((record.group, uid) for uid in record.uids)
            case DeadReplayed():
                for uid in record.uids:
                    if (record.group, uid) in self._replaying:
                        self._owed[record.group, uid] = record.at_ns
            case DeadPurged():
                self._purged.update(((record.group, uid), record.at_ns) for uid in record.uids)
            case RunBegan():
                self._start_wall_ms = record.start_wall_ms
                self._allowance_ms = record.clock_allowance_ms

    def _delivered(self, record: Delivered) -> None:
        key = (record.group, record.uid)
        self._replaying.discard(key)
        self._owed.pop(key, None)
        what = f"message {record.uid} to {record.group} attempt {record.attempt} by {record.node}"
        if key in self._purged:
            self.broken(record.at_ns, f"{what}: it was purged from the dead letters at {self._purged[key] / 1e9:.6f} s")
        held = self._held.pop(key, None)
        if held is None or held.term != record.term:
            return
        error_ms = record.clock_error_ms * 2 + 2 * self._allowance_ms
        if (held.until_ms - self._start_wall_ms - error_ms) * MS > record.at_ns:
            self.broken(record.at_ns, f"{what}: its lease was extended at {held.at_ns / 1e9:.6f} s and holds")

    def missing(self, at_ns: int) -> str:
        """See Checker."""
        return f"{len(self._owed)} replayed dead letters, for instance {min(self._owed)}" if self._owed else ""

    def settle_accounts(self, at_ns: int) -> None:
        """See Checker."""
        if self._owed:
            group, uid = min(self._owed)
            self.broken(at_ns, f"{len(self._owed)} dead letters were replayed and never came: {uid} to {group}")
