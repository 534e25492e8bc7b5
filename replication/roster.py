"""The nodes that this log connects to: the members by its applied entries, and members shown by a node ahead of it.

Invariants: for a node in both lists the address of the applied entries wins. Shown members are only connected to: they
have no vote by it. They are dropped once this node has applied as much of the log itself. Only raft.py uses this.
"""

from __future__ import annotations

from collections.abc import Sequence

from tickwheel.replication.log import NO_INTRODUCTION, Introduction, Member
from tickwheel.replication.ports import Network


class Roster:
    """The owner sets `members` and `introduction` as they become known, then calls `announce` to put them in force."""

    def __init__(self, node_id: str, members: Sequence[Member], network: Network) -> None:
        self._node_id = node_id
        self._network = network
        self.members = tuple(members)
        self.introduction = NO_INTRODUCTION

    @property
    def voters(self) -> list[str]:
        """Ids of the members that are no learners, by the applied entries."""
        return [member.node_id for member in self.members if not member.learner]

    def introduced(self, applied_index: int) -> Introduction:
        """The members shown to this node; empty if it has applied as much of the log itself."""
        return self.introduction if self.introduction.applied_index > applied_index else NO_INTRODUCTION

    def announce(self, applied_index: int) -> None:
        """Give the network the peers to connect to."""
        known = [*self.introduced(applied_index).members, *self.members]
        self._network.set_peers({m.node_id: m.peer_address for m in known if m.node_id != self._node_id})
