"""P7: at most one master per term, one lease at a time, and no delivery or extension without it.

Also their foundations: one vote a node and term, a master elected by a majority of the voters, a lease that ends
before a majority may vote for another, no lease for a member that was removed or lost its disk, and no node that
continues in a term after it heard of a higher one.
"""

from __future__ import annotations

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history_log import TermIgnored, VoteSeen
from tickwheel.chaos.sim.history_machines import Booted, DiskWiped, LeaseSeen, MemberRemoved, RoleSeen, Stopped
from tickwheel.chaos.sim.history_messages import Delivered, Extended


class OneMaster(Checker):
    """`elections` counts the terms that had a master."""

    promise = "P7"

    def __init__(self) -> None:
        self._masters: dict[int, tuple[str, int]] = {}
        self._lease: dict[str, tuple[int, int]] = {}  # node -> (term, until_ns)
        self._leading_term = 0
        self._terms_seen: dict[str, int] = {}
        self._votes: dict[tuple[str, int], str] = {}  # (voter, term) -> for whom
        self._removed: set[str] = set()
        self._wiped: set[str] = set()

    @property
    def elections(self) -> int:
        return len(self._masters)

    def _on_member_removed(self, record: MemberRemoved) -> None:
        self._removed.add(record.node)

    def _on_disk_wiped(self, record: DiskWiped) -> None:
        self._wiped.add(record.node)

    def _on_vote_seen(self, record: VoteSeen) -> None:
        if record.node not in self._wiped:
            known = self._votes.setdefault((record.node, record.term), record.voted_for)
            if known != record.voted_for:
                self.broken(f"{record.node} votes for {record.voted_for} in term {record.term}, had voted for {known}")

    def _on_term_ignored(self, record: TermIgnored) -> None:
        self.broken(f"{record.node} goes on in term {record.term} after it has heard of term {record.heard}")

    def _on_booted_or_stopped(self, record: Booted | Stopped) -> None:
        self._lease.pop(record.node, None)

    def _on_role_seen(self, record: RoleSeen) -> None:
        if record.node in self._wiped:
            if record.role == "master":
                self.broken(f"{record.node} is master of term {record.term}, with a disk that was wiped")
            return
        if record.term < self._terms_seen.get(record.node, 0):
            self.broken(f"{record.node} is in term {record.term}, had been in {self._terms_seen[record.node]}")
        self._terms_seen[record.node] = record.term
        if record.role != "master":
            return
        voters = record.voters
        votes = sum(
            1
            for (voter, term), name in self._votes.items()
            if term == record.term and name == record.node and (voter in voters or not voters)
        )
        nodes = len(voters) or self.run.nodes
        if nodes > 1 and votes <= nodes // 2:
            self.broken(f"{record.node} is master of term {record.term} by {votes} votes of {nodes} nodes")
        if voters and record.node not in voters:
            self.broken(f"{record.node} is master of term {record.term} and does not count")
        holder = self._masters.setdefault(record.term, (record.node, record.boot))
        if holder != (record.node, record.boot):
            self.broken(
                f"term {record.term} has two masters: {holder[0]} (boot {holder[1]}) "
                f"and {record.node} (boot {record.boot})"
            )

    def _on_lease_seen(self, record: LeaseSeen) -> None:
        self._lease[record.node] = (record.term, record.until_ns)
        if record.until_ns <= record.at_ns:
            return
        if record.node in self._removed:
            self.broken(f"{record.node} holds a lease (term {record.term}) after it was removed")
        if record.until_ns > record.refused_until_ns:
            self.broken(
                f"the lease of {record.node} (term {record.term}) lasts until {record.until_ns / 1e9:.6f} s; "
                f"a majority votes for another from {record.refused_until_ns / 1e9:.6f} s on"
            )
        for other, (term, until_ns) in self._lease.items():
            if other != record.node and until_ns > record.at_ns:
                self.broken(
                    f"{record.node} (term {record.term}) and {other} (term {term}) hold the lease at once; "
                    f"that of {other} until {until_ns / 1e9:.6f} s"
                )
        if record.term < self._leading_term:
            self.broken(f"{record.node} holds a lease in term {record.term} after one in term {self._leading_term}")
        self._leading_term = record.term

    def _on_delivered(self, record: Delivered) -> None:
        term, until_ns = self._lease.get(record.node, (0, 0))
        if until_ns <= record.at_ns or term != record.term:
            self.broken(
                f"{record.node} delivers message {record.uid} in term {record.term}; "
                f"its lease was of term {term} until {until_ns / 1e9:.6f} s"
            )
        if record.term < self._leading_term:
            self.broken(
                f"{record.node} delivers message {record.uid} in term {record.term}; "
                f"term {self._leading_term} has a master"
            )

    def _on_extended(self, record: Extended) -> None:
        if not record.leased:
            self.broken(
                f"{record.node} extends the lease of message {record.uid} in term {record.term} without its own lease"
            )
