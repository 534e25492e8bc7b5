"""P1 and P8 of the replicated log: a committed entry stays, in all logs and on the disks; and no foreign code in it."""

from __future__ import annotations

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history_log import (
    Applied,
    CommitSeen,
    CommittedCut,
    ProposalEnded,
    Proposed,
    Recovered,
    Unpickled,
)
from tickwheel.chaos.sim.history_machines import Booted


class CommittedNeverLost(Checker):
    """P1 and P8 of the replicated log alone: a committed entry stays in the same place on every node.

    Needs `Applied`, `Proposed` and `ProposalEnded` records; silent without them.

    One sequence of entries for all nodes and boots; committed proposals are in it, refused ones are not.
    """

    promise = "P1/P8 (log)"

    def __init__(self) -> None:
        self._entries: dict[int, tuple[int, int, str]] = {}  # index -> (term, command, first node that applied it)
        self._index_of: dict[int, int] = {}
        self._next: dict[str, int] = {}
        self._proposed: set[int] = set()
        self._refused: dict[int, str] = {}
        self._committed: dict[int, int] = {}

    def _on_booted(self, record: Booted) -> None:
        self._next.pop(record.node, None)

    def _on_proposed(self, record: Proposed) -> None:
        self._proposed.add(record.command)

    def committed_index(self) -> int:
        """Highest index reported to a client as committed."""
        return max(self._committed.values(), default=0)

    def applied_index(self, node: str) -> int:
        """Index of the last entry applied by this boot of the node; 0: none."""
        return self._next.get(node, 1) - 1

    def _on_applied(self, record: Applied) -> None:
        expected = self._next.get(record.node)
        if expected is not None and record.index != expected:
            self.broken(f"{record.node} applies {record.index} where {expected} is next")
        self._next[record.node] = record.index + 1
        known = self._entries.get(record.index)
        if known is None:
            self._entries[record.index] = (record.term, record.command, record.node)
            if record.command:
                self._new_command(record)
        elif known[:2] != (record.term, record.command):
            self.broken(
                f"index {record.index}: {known[2]} applied command {known[1]} of term {known[0]}, "
                f"{record.node} applies command {record.command} of term {record.term}"
            )

    def _new_command(self, record: Applied) -> None:
        command = record.command
        if command not in self._proposed:
            self.broken(f"{record.node} applies command {command}, which nobody proposed")
        if command in self._index_of:
            self.broken(f"command {command} is applied at {self._index_of[command]} and again at {record.index}")
        if command in self._refused:
            self.broken(f"command {command} is applied, its proposer was told {self._refused[command]}")
        self._index_of[command] = record.index

    def _on_proposal_ended(self, record: ProposalEnded) -> None:
        if record.outcome == "COMMITTED":
            self._committed[record.command] = record.index
            if self._index_of.get(record.command) != record.index:
                self.broken(
                    f"{record.node} says command {record.command} is committed at {record.index}; "
                    f"applied at {self._index_of.get(record.command)}"
                )
        elif record.outcome in ("NOT_MASTER", "QUEUE_FULL"):
            if record.command in self._index_of:
                self.broken(f"command {record.command} is applied, and then {record.outcome}")
            self._refused[record.command] = record.outcome

    def settle_accounts(self, at_ns: int) -> None:
        highest = self.committed_index()
        for node, following in sorted(self._next.items()):
            if following <= highest:
                self.broken(f"{node} has applied up to {following - 1} only; {highest} was committed")


class Durable(Checker):
    """P1, at the disks: a committed entry is on stable storage of a majority, stays in every log it is in, and
    survives.

    Judges the moment from which an entry could be lost, whether or not it is lost.

    `commits` counts the entries that were looked for on all disks.
    """

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


class NoForeignCode(Checker):
    """No input from outside runs as code: a node never unpickles."""

    promise = "foreign code"

    def _on_unpickled(self, record: Unpickled) -> None:
        self.broken(f"{record.node} has unpickled what a peer sent, and so run its code")
