"""The replicated log in memory: the same port without disk, network or time, for tests.

Owns the one sequence of entries that all logs of a `MemoryCluster` share. There are no elections: `elect` sets the
master. An entry is committed while a majority of the voters is up. It keeps the port's invariants: the suite that the
real log passes (tests/replication/test_conformance.py) also runs against this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tickwheel.proto.peer_pb2 import PeerFrame
from tickwheel.replication.log import (
    NO_INTRODUCTION,
    ApplyLaterError,
    Introduction,
    LogListener,
    LogStatus,
    Member,
    ProposalOutcome,
    ProposalResult,
    Role,
)

IDLE_NS = 1_000_000_000
COMMAND_BYTES_MAX = 48 << 20
PROPOSALS_MAX = 4096


class MemoryCluster:
    """The state that the logs share: entries, term, master."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = tuple(members)
        self.entries: list[tuple[int, bytes]] = []
        """(term, command); the first has index 1."""
        self.term = 0
        self.master_id: str | None = None
        self.logs: dict[str, MemoryLog] = {}

    @property
    def voters(self) -> list[str]:
        """Ids of the members that are no learners."""
        return [m.node_id for m in self.members if not m.learner]

    @property
    def has_majority(self) -> bool:
        """Whether a majority of the voters is up."""
        up = sum(voter in self.logs and self.logs[voter].running for voter in self.voters)
        return up > len(self.voters) // 2

    @property
    def commit_index(self) -> int:
        """Index of the last committed entry."""
        return len(self.entries) if self.has_majority else max((log.applied for log in self.logs.values()), default=0)

    def elect(self, node_id: str | None) -> None:
        """Make this node the master of a new term; None: there is no master. Raises ValueError if it cannot lead."""
        former = self.master_id
        if node_id is not None:
            if node_id not in self.voters or not self.logs[node_id].running or not self.has_majority:
                raise ValueError(f"{node_id}: only a running member of a majority can lead")
            self.term += 1
            self.entries.append((self.term, b""))
        self.master_id = node_id
        if former is not None and former != node_id and former in self.logs:
            self.logs[former].lose()
        for log in list(self.logs.values()):
            log.tell()


@dataclass(slots=True)
class _Proposal:
    term: int
    bytes: int
    done: Callable[[ProposalResult], None]


class MemoryLog:
    """Implements ReplicatedLog (log.py), which states what the methods promise."""

    def __init__(
        self, cluster: MemoryCluster, node_id: str, listener: LogListener, applied: int = 0, *, proposals_max: int = 0
    ) -> None:
        self._cluster = cluster
        self._node_id = node_id
        self._listener = listener
        self._proposals: dict[int, _Proposal] = {}
        self._proposals_max = proposals_max or PROPOSALS_MAX
        self._transfer: tuple[str, Callable[[str | None], None]] | None = None
        self.applied = applied
        self.running = False
        cluster.logs[node_id] = self

    def start(self) -> None:
        self.running = True
        self.tell()

    def stop(self) -> None:
        if not self.running:
            return
        self.running = False
        if self._cluster.master_id == self._node_id:
            self._cluster.elect(None)
        self.lose()

    def lose(self) -> None:
        """Mastership is lost: proposals that are not applied end UNKNOWN."""
        proposals, self._proposals = self._proposals, {}
        for index in sorted(proposals):
            proposals[index].done(ProposalResult(ProposalOutcome.UNKNOWN))
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            leads = self._cluster.master_id not in (None, self._node_id)
            transfer[1](None if leads else "this node stops")

    def tell(self) -> None:
        """Role, term or master may have changed."""
        if self.running:
            self._listener.role_changed(self.status())

    def tick(self, asked_ns: int | None = None) -> int:
        cluster = self._cluster
        while self.running and self.applied < cluster.commit_index and self._listener.may_apply():
            term, command = cluster.entries[self.applied]
            try:
                value = self._listener.apply(self.applied + 1, term, command)
            except ApplyLaterError:
                break
            self.applied += 1
            proposal = self._proposals.pop(self.applied, None)
            if proposal is not None:
                proposal.done(ProposalResult(ProposalOutcome.COMMITTED, self.applied, value))
        if self._transfer is not None and not self._proposals and self._listener.handover_ready(self._transfer[0]):
            cluster.elect(self._transfer[0])
        return IDLE_NS

    def receive(self, peer_id: str, frame: PeerFrame) -> bool:
        """Always raises: logs in memory exchange no frames."""
        raise AssertionError(f"a frame from {peer_id} at a log that sends none")

    def send_beside(self, peer_id: str, frame: PeerFrame) -> bool:
        return False

    def peer_connected(self, peer_id: str) -> None:
        """No effect: there are no connections."""

    def peer_disconnected(self, peer_id: str) -> None:
        """No effect: there are no connections."""

    def propose(
        self, command: bytes, done: Callable[[ProposalResult], None], voters: Sequence[str] | None = None
    ) -> None:
        """Append if this node is master. Ignores `voters`: new voters count when the listener applies the command."""
        cluster = self._cluster
        if not self.running or cluster.master_id != self._node_id:
            done(ProposalResult(ProposalOutcome.NOT_MASTER))
        elif len(command) > COMMAND_BYTES_MAX:
            done(ProposalResult(ProposalOutcome.TOO_LARGE))
        elif self._transfer is not None or len(self._proposals) >= self._proposals_max:
            done(ProposalResult(ProposalOutcome.QUEUE_FULL))
        else:
            cluster.entries.append((cluster.term, command))
            self._proposals[len(cluster.entries)] = _Proposal(cluster.term, len(command), done)

    def in_flight(self) -> tuple[int, int]:
        return len(self._proposals), sum(proposal.bytes for proposal in self._proposals.values())

    def lease_held(self) -> bool:
        return self.lease_until_ns() > 0

    def lease_until_ns(self) -> int:
        """The far future while this node leads a majority, as there is no time here; else 0."""
        leads = self.running and self._cluster.master_id == self._node_id
        return 1 << 62 if leads and self._cluster.has_majority else 0

    def transfer(self, target_id: str | None, done: Callable[[str | None], None], *, applying: bool = True) -> None:
        cluster = self._cluster
        others = [
            voter
            for voter in cluster.voters
            if voter != self._node_id and voter in cluster.logs and cluster.logs[voter].running
        ]
        if not self.running or cluster.master_id != self._node_id:
            done("this node is not the master")
        elif target_id is not None and target_id not in others:
            done(f"{target_id} is not a connected member that counts")
        elif not others:
            done("no other member that counts is connected")
        elif self._transfer is not None:
            done("a handover is under way")
        else:
            self._transfer = (target_id or others[0], done)

    def step_down(self) -> None:
        if self._cluster.master_id == self._node_id:
            self._cluster.elect(None)

    def set_members(self, members: Sequence[Member]) -> None:
        self._cluster.members = tuple(members)
        if self._cluster.master_id is not None and self._cluster.master_id not in self._cluster.voters:
            self._cluster.elect(None)

    def members(self) -> Sequence[Member]:
        return self._cluster.members

    def introduce(self, introduction: Introduction) -> None:
        """No effect: all logs share one list of members, so none is behind."""

    def introduced(self) -> Introduction:
        return NO_INTRODUCTION

    @property
    def fsyncing(self) -> bool:
        """Always false: there are no files."""
        return False

    def entries_after(self, index: int) -> int:
        return sum(len(command) for _, command in self._cluster.entries[index:])

    def checkpointed(self, index: int, term: int) -> None:
        """No effect: all entries stay in memory."""

    def status(self) -> LogStatus:
        cluster = self._cluster
        role = Role.SLAVE
        if cluster.master_id == self._node_id:
            role = Role.MASTER
        elif self._node_id not in cluster.voters:
            role = Role.LEARNER
        return LogStatus(
            role=role,
            term=cluster.term,
            master_id=cluster.master_id,
            first_index=1,
            last_index=len(cluster.entries),
            commit_index=cluster.commit_index,
            applied_index=self.applied,
            lease_held=self.lease_held(),
        )
