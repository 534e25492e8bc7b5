"""The port of the replicated log: one ordered sequence of commands, the same on every node.

Implemented by `raft.py` (pysyncobj, journal, transport guard). All methods are called on the
node's one thread and none blocks; what takes long goes through the executor port.

Invariants every implementation keeps:
- `apply` is called once per index and start, in order without gaps, with committed commands only.
- `done` of a proposal is called exactly once.
- `COMMITTED` means: on stable storage of a majority, and applied on this node.
- At most one node is master in a term.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tickwheel.proto.peer_pb2 import PeerFrame


class Role(enum.Enum):
    """What a node is in its term."""

    SLAVE = "slave"
    CANDIDATE = "candidate"
    MASTER = "master"
    LEARNER = "learner"


class Verdict(enum.Enum):
    """What became of a proposal."""

    COMMITTED = "committed"
    NOT_MASTER = "not_master"
    """Not appended anywhere: safe to propose elsewhere."""
    QUEUE_FULL = "queue_full"
    """Not appended: retry later."""
    TOO_LARGE = "too_large"
    """Not appended, and never will be: no peer could be sent it."""
    UNKNOWN = "unknown"
    """Mastership was lost on the way: it may commit or not."""


@dataclass(frozen=True, slots=True)
class ProposalResult:
    """Handed to `done`: the verdict, and for COMMITTED the index and what `apply` returned."""

    verdict: Verdict
    index: int = 0
    value: object = None


@dataclass(frozen=True, slots=True)
class Member:
    """A member of the cluster as the log knows it."""

    node_id: str
    peer_address: str
    client_address: str
    disk_uuid: str = ""
    learner: bool = False
    """It follows the log and does not count: not for what commits, not in an election."""


@dataclass(frozen=True, slots=True)
class Introduction:
    """The members as of an entry of the log, shown by a node that has applied it to one that may not have."""

    applied_index: int = 0
    members: tuple[Member, ...] = ()

    def named(self, node_id: str) -> Member | None:
        """The member of this id."""
        return next((member for member in self.members if member.node_id == node_id), None)


NO_INTRODUCTION = Introduction()


@dataclass(frozen=True, slots=True)
class PeerProgress:
    """What this node knows of a peer."""

    connected: bool
    match_index: int
    sync_age_ms: int


@dataclass(frozen=True, slots=True)
class LogStatus:
    """A snapshot of the log's state."""

    role: Role
    term: int
    master_id: str | None
    """Whom this node follows; None if it has not heard of a master for longer than an election takes to begin."""
    first_index: int
    last_index: int
    commit_index: int
    applied_index: int
    lease_held: bool
    peers: Mapping[str, PeerProgress] = field(default_factory=dict)
    halted: str = ""
    """Why this node takes no part (disk full); empty while it does."""
    master_commit_index: int = 0
    """How far the log is committed by the word of the master that was heard last; 0: none was."""
    caught_up: bool = True
    """Since its start this node has applied everything that was committed when it first heard of a master."""


class ApplyLaterError(Exception):
    """An entry cannot be applied now, and nothing of it was: it is given again once `may_apply` says so."""


class LogListener(Protocol):
    """What the log calls. The node's core is one."""

    def apply(self, index: int, term: int, command: bytes) -> object:
        """Apply a committed command. Never raises for bad content; an exception stops the process, but ApplyLaterError.

        `command` is b"" for an entry without one (the no-op of an election).
        """
        ...

    def problem_of(self, entry: bytes, start: int) -> str:
        """Why this node could not apply a command that a master sends; empty: it can. Asked before it is written.

        The command is what follows `start`: not cut out, for that would copy every byte of the log.
        """
        ...

    def role_changed(self, status: LogStatus) -> None:
        """Role, term or known master changed. On MASTER the node proposes lead{term}."""
        ...

    def sync_out(self, peer_id: str) -> PeerFrame | None:
        """The 50 ms sync for one slave (master only): a frame with `sync` filled, or None for nothing now."""
        ...

    def sync_in(self, peer_id: str, frame: PeerFrame) -> PeerFrame | None:
        """A `sync` of this term's master arrived: returns the frame with `sync_reply`."""
        ...

    def sync_reply_in(self, peer_id: str, frame: PeerFrame) -> None:
        """A slave answered a sync of this term."""
        ...

    def beside_in(self, peer_id: str, frame: PeerFrame) -> PeerFrame | None:
        """A frame that is no part of the log arrived (clock_ask, clock_answer): returns what is to be answered."""
        ...

    def may_apply(self) -> bool:
        """Whether there is room for what the next entries bring. If not, they wait in the journal: ask again soon."""
        ...

    def may_vote(self) -> bool:
        """Whether this node may vote and stand for election. Once it may, it always may."""
        ...

    def handover_ready(self, peer_id: str) -> bool:
        """Whether this slave has heard of everything beside the log that it needs to lead without a repeat."""
        ...

    def checkpoint_needed(self, peer_id: str, applied_index: int) -> None:
        """This slave is too far behind for the log: fetch the checkpoint of `peer_id` and restart from it."""
        ...

    def fatal(self, reason: str) -> None:
        """The process must stop now: a failed fdatasync, an impossible state, a refused identity."""
        ...


class ReplicatedLog(Protocol):
    """One replicated log on one node."""

    def start(self) -> None:
        """Replay from the journal, then take part."""
        ...

    def stop(self) -> None:
        """Idempotent; pending proposals end UNKNOWN."""
        ...

    def tick(self) -> int:
        """Run what is due and what arrived; returns the monotonic_ns when it wants the next call at the latest."""
        ...

    def receive(self, peer_id: str, frame: PeerFrame) -> None:
        """A frame from a peer whose identity the transport has checked."""
        ...

    def peer_connected(self, peer_id: str) -> None: ...

    def peer_disconnected(self, peer_id: str) -> None: ...

    def propose(
        self, command: bytes, done: Callable[[ProposalResult], None], voters: Sequence[str] | None = None
    ) -> None:
        """Append a command if this node is master. Bounded: QUEUE_FULL at the limit.

        `voters`: the ids of the members that count once this command is applied, if it changes them. They count as
        soon as it is written. QUEUE_FULL while another change is not applied, or no entry of this term has committed.
        """
        ...

    def send_beside(self, peer_id: str, frame: PeerFrame) -> bool:
        """A frame that is no part of the log, for `beside_in` of a peer; False if there is no connection."""
        ...

    def in_flight(self) -> tuple[int, int]:
        """Proposals not yet applied: number and bytes."""
        ...

    def lease_held(self) -> bool:
        """Whether this node may act as master now: a majority answered requests sent within the lease."""
        ...

    def lease_until_ns(self) -> int:
        """The monotonic_ns until which the lease holds if nothing more arrives; 0 if not held."""
        ...

    def transfer(self, target_id: str | None, done: Callable[[str | None], None]) -> None:
        """Planned handover: parks proposals, waits for the target, gives the lease up, sends the transfer.

        `done(None)` once another node leads, else `done(reason)`. This node goes on if the target did not catch up in
        time; once it has given its lease up, an election decides.
        """
        ...

    def step_down(self) -> None:
        """Stop leading, unplanned: an election decides, in which this node comes late. Nothing on a slave."""
        ...

    def set_members(self, members: Sequence[Member]) -> None:
        """The members, learners too, as just applied from the log or read from a manifest; one changes at a time."""
        ...

    def members(self) -> Sequence[Member]: ...

    def introduce(self, introduction: Introduction) -> None:
        """Members as of an entry that this node has not applied: connected to beside its own until it has.

        They count for nothing: who commits and who elects is said by this node's own log.
        """
        ...

    def introduced(self) -> Introduction:
        """That; empty once this node has applied as much itself."""
        ...

    def entries_after(self, index: int) -> int:
        """How many bytes of log a restart would replay after `index`: tells when a checkpoint pays."""
        ...

    @property
    def syncing(self) -> bool:
        """A sync is at work on the journal's files in another thread; also of a stopped log, until it has ended."""
        ...

    def checkpointed(self, index: int, term: int) -> None:
        """A durable checkpoint covers everything up to `index`: the journal may be cut below it."""
        ...

    def status(self) -> LogStatus: ...
