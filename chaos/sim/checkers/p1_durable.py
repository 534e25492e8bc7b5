"""P1, at the disks: a committed entry is on stable storage of a majority, stays in every log it is in, and survives.

Judges the moment from which an entry could be lost, whether or not it is lost.
"""

from __future__ import annotations

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history_log import CommitSeen, CommittedCut, Recovered


class Durable(Checker):
    """`commits` counts the entries that were looked for on all disks."""

    promise = "P1"

    def __init__(self) -> None:
        self.commits = 0

    def _on_commit_seen(self, record: CommitSeen) -> None:
        self.commits += 1
        if record.holders <= record.voters // 2:
            self.broken(
                f"{record.node} applies entry {record.index} of term {record.term}; it is on stable storage "
                f"of {record.holders} of {record.voters} voters"
            )

    def _on_committed_cut(self, record: CommittedCut) -> None:
        self.broken(f"{record.node} cuts entry {record.index} of term {record.term} from its log; it was committed")

    def _on_recovered(self, record: Recovered) -> None:
        if record.last_index < record.durable_before:
            self.broken(
                f"the log of {record.node} (boot {record.boot}) ends at {record.last_index}; "
                f"up to {record.durable_before} it had been on stable storage"
            )
