"""P1 of settlements: at the end each node lists every message with a final receipt as settled, and no others.

Judged by receipts: ACK, SKIP and DEAD end a message for a group. Replayed dead letters are left out.
"""

from __future__ import annotations

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history_messages import SETTLING, DeadReplayAsked, Settled, SettledSeen, SettleSent


class SettledHolds(Checker):
    """Judges groups that are never reset, and hours that are kept."""

    promise = "P1"

    def __init__(self) -> None:
        self._asked: dict[str, set[int]] = {}
        """By group: ids for which a consumer has sent a final answer."""
        self._settled: dict[str, dict[int, int]] = {}
        """By group and id: time of the first receipt for such an answer."""
        self._ids: dict[tuple[str, int], set[int]] = {}
        """By group and message: the ids for which a consumer has answered."""
        self._replayed: dict[str, set[int]] = {}
        """By group: ids of dead letters of which a replay was asked."""

    def _on_dead_replay_asked(self, record: DeadReplayAsked) -> None:
        for uid in record.uids:
            self._replayed.setdefault(record.group, set()).update(self._ids.get((record.group, uid), ()))

    def _on_settle_sent(self, record: SettleSent) -> None:
        self._ids.setdefault((record.group, record.uid), set()).add(record.id)
        if record.outcome in SETTLING:
            self._asked.setdefault(record.group, set()).add(record.id)

    def _on_settled(self, record: Settled) -> None:
        if record.outcome in SETTLING:
            self._settled.setdefault(record.group, {}).setdefault(record.id, record.at_ns)

    def _on_settled_seen(self, record: SettledSeen) -> None:
        replayed = self._replayed.get(record.group, set())
        done = set(record.done) - replayed
        open_still = [
            (id64, at_ns)
            for id64, at_ns in self._settled.get(record.group, {}).items()
            if at_ns <= record.asked_ns
            and id64 not in done
            and id64 not in replayed
            and id64 >> 32 >= record.hour_min_kept
        ]
        if open_still:
            id64, at_ns = open_still[0]
            self.broken(
                f"{record.node} holds {len(open_still)} messages of {record.group} for open that were answered as "
                f"settled, {id64:#x} at {at_ns / 1e9:.6f} s"
            )
        nobody = done - self._asked.get(record.group, set())
        if nobody:
            self.broken(
                f"{record.node} holds {len(nobody)} messages of {record.group} for settled that no consumer has "
                f"answered for: {min(nobody):#x}"
            )
