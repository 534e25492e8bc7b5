"""P1 of dead letters: replayed messages come again, purged ones do not."""

from __future__ import annotations

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history_messages import DeadPurged, DeadReplayAsked, DeadReplayed, Delivered

_Key = tuple[str, int]
"""(group, uid)"""


class DeadLetters(Checker):
    promise = "P1"
    what_is_owed = "replayed dead letters (group, message)"

    def __init__(self) -> None:
        self._replaying: set[_Key] = set()
        """Messages whose replay was asked for, not delivered since."""
        self._owed: set[_Key] = set()
        """Replayed messages not delivered since."""
        self._purged: dict[_Key, int] = {}

    def _on_dead_replay_asked(self, record: DeadReplayAsked) -> None:
        self._replaying.update((record.group, uid) for uid in record.uids)

    def _on_dead_replayed(self, record: DeadReplayed) -> None:
        self._owed |= self._replaying & {(record.group, uid) for uid in record.uids}

    def _on_dead_purged(self, record: DeadPurged) -> None:
        self._purged.update(((record.group, uid), record.at_ns) for uid in record.uids)

    def _on_delivered(self, record: Delivered) -> None:
        key = (record.group, record.uid)
        self._replaying.discard(key)
        self._owed.discard(key)
        what = f"message {record.uid} to {record.group} attempt {record.attempt} by {record.node}"
        if key in self._purged:
            self.broken(f"{what}: it was purged from the dead letters at {self._purged[key] / 1e9:.6f} s")

    def owed(self, at_ns: int) -> list[_Key]:
        return sorted(self._owed)
