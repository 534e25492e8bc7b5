"""Whom this log connects to: the members by what is applied here, and those that it was shown by a node that has
applied more.

Invariants: what is applied here wins over what was shown; what was shown is connected to beside it, counts for nothing,
and is over once this node has applied as much itself. Only raft.py uses this.
"""

from __future__ import annotations

from collections.abc import Sequence

from tickwheel.replication.log import NO_INTRODUCTION, Introduction, Member
from tickwheel.replication.ports import Network


class Roster:
    """See the module. `members` and `introduction` are set as they become known; `announce` makes them count."""

    def __init__(self, node_id: str, members: Sequence[Member], network: Network) -> None:
        self._node_id = node_id
        self._network = network
        self.members = tuple(members)
        self.introduction = NO_INTRODUCTION

    @property
    def voters(self) -> list[str]:
        """Ids of the members that count, by what is applied."""
        return [member.node_id for member in self.members if not member.learner]

    def introduced(self, applied_index: int) -> Introduction:
        """What this node was shown and has not applied itself."""
        return self.introduction if self.introduction.applied_index > applied_index else NO_INTRODUCTION

    def announce(self, applied_index: int) -> None:
        """Tell the network whom to connect to."""
        known = [*self.introduced(applied_index).members, *self.members]
        self._network.set_peers({m.node_id: m.peer_address for m in known if m.node_id != self._node_id})
