"""P1 of dead letters: replayed messages come again, purged ones do not."""

from __future__ import annotations

from typing import ClassVar

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history import Record
from tickwheel.chaos.sim.history_messages import DeadPurged, DeadReplayAsked, DeadReplayed, Delivered

_Key = tuple[str, int]
"""(group, uid)"""


class DeadLetters(Checker):
    promise: ClassVar[str] = "P1"
    kinds: ClassVar[tuple[type[Record], ...]] = (Delivered, DeadReplayAsked, DeadReplayed, DeadPurged)

    def __init__(self) -> None:
        self._replaying: set[_Key] = set()
        """Messages whose replay was asked for, not delivered since."""
        self._owed: dict[_Key, int] = {}
        """By replayed message not delivered since: time of the answer."""
        self._purged: dict[_Key, int] = {}

    def observe(self, record: Record) -> None:
        match record:
            case Delivered():
                self._delivered(record)
            case DeadReplayAsked():
                self._replaying.update((record.group, uid) for uid in record.uids)
            case DeadReplayed():
                for uid in record.uids:
                    if (record.group, uid) in self._replaying:
                        self._owed[record.group, uid] = record.at_ns
            case DeadPurged():
                self._purged.update(((record.group, uid), record.at_ns) for uid in record.uids)

    def _delivered(self, record: Delivered) -> None:
        key = (record.group, record.uid)
        self._replaying.discard(key)
        self._owed.pop(key, None)
        what = f"message {record.uid} to {record.group} attempt {record.attempt} by {record.node}"
        if key in self._purged:
            self.broken(record.at_ns, f"{what}: it was purged from the dead letters at {self._purged[key] / 1e9:.6f} s")

    def missing(self, at_ns: int) -> str:
        return f"{len(self._owed)} replayed dead letters, for instance {min(self._owed)}" if self._owed else ""

    def settle_accounts(self, at_ns: int) -> None:
        if self._owed:
            group, uid = min(self._owed)
            self.broken(at_ns, f"{len(self._owed)} dead letters were replayed and never came: {uid} to {group}")
