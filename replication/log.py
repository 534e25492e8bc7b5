"""The port of the replicated log: one ordered sequence of commands, the same on every node.

Implemented by `raft.py` (pysyncobj, journal, transport guard). All methods are called on the
node's one thread. None blocks: slow work goes through the executor port.

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
from tickwheel.storage.disk import DiskError


class Role(enum.Enum):
    """The part that a node plays in its term."""

    SLAVE = "slave"
    CANDIDATE = "candidate"
    MASTER = "master"
    LEARNER = "learner"


class ProposalOutcome(enum.Enum):
    """The outcome of a proposal."""

    COMMITTED = "committed"
    NOT_MASTER = "not_master"
    """Not appended anywhere: safe to propose elsewhere."""
    QUEUE_FULL = "queue_full"
    """Not appended: retry later."""
    TOO_LARGE = "too_large"
    """Not appended: no message to a peer can hold it. Do not retry."""
    UNKNOWN = "unknown"
    """Mastership was lost before the entry was applied: it may still commit, or not."""


@dataclass(frozen=True, slots=True)
class ProposalResult:
    """Handed to `done`: the outcome, and for COMMITTED the index and what `apply` returned."""

    outcome: ProposalOutcome
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
    """A learner receives the log but has no vote, neither on commits nor in elections."""


@dataclass(frozen=True, slots=True)
class Introduction:
    """The members as of entry `applied_index`. A node that has applied that entry shows them to peers that may not."""

    applied_index: int = 0
    members: tuple[Member, ...] = ()

    def named(self, node_id: str) -> Member | None:
        """The member with this id; None if it is not listed."""
        return next((member for member in self.members if member.node_id == node_id), None)


NO_INTRODUCTION = Introduction()


@dataclass(frozen=True, slots=True)
class PeerProgress:
    """This node's view of a peer. `match_index` is 0 unless this node is master."""

    connected: bool
    match_index: int
    sync_age_ms: int


@dataclass(frozen=True, slots=True)
class LogStatus:
    """A snapshot of the log's state, as this node sees it."""

    role: Role
    term: int
    master_id: str | None
    """The master that this node follows; None after `election_timeout_ms_max` without a word from it."""
    first_index: int
    last_index: int
    commit_index: int
    applied_index: int
    lease_held: bool
    peers: Mapping[str, PeerProgress] = field(default_factory=dict)
    halted: str = ""
    """Why this node neither votes nor acknowledges entries (a full disk); empty if it does."""
    heard_commit_index: int = 0
    """The highest commit index that a peer has reported; 0 before the first report."""
    caught_up: bool = True
    """Whether this node has applied everything that it had applied before its last stop (`CaughtUp`)."""
    hangs_ms: int = 0
    """How long an fsync of the log has been under way that takes too long for a master; 0: none does."""


class ApplyLaterError(Exception):
    """`apply` could not apply an entry: it does not count as applied. The log retries once `may_apply` is true.

    Either nothing has changed, or `may_apply` stays false until this node ends.
    """


class LogListener(Protocol):
    """The callbacks of a log. The node's core implements them."""

    def apply(self, index: int, term: int, command: bytes) -> object:
        """Apply a committed command. Any exception but ApplyLaterError stops the process, so bad content raises none.

        `command` is b"" for an entry without one (the no-op of an election).
        """
        ...

    def problem_of(self, entry: bytes, start: int) -> str:
        """Why this node could not apply a command of the master; empty if it can. Called before the entry is written.

        The command is `entry[start:]`. It is not sliced by the caller: that would copy every byte of the log.
        """
        ...

    def role_changed(self, status: LogStatus) -> None:
        """Role, term or known master has changed. A new MASTER proposes lead{term}."""
        ...

    def sync_out(self, peer_id: str) -> PeerFrame | None:
        """Master only: the 50 ms sync for one slave, as a frame with `sync` filled. None: send nothing now."""
        ...

    def sync_unsent(self, peer_id: str) -> None:
        """The frame that `sync_out` has just returned could not be sent: the connection takes no more."""
        ...

    def sync_in(self, peer_id: str, frame: PeerFrame) -> PeerFrame | None:
        """A `sync` of this term's master has arrived. Returns the answer, a frame with `sync_reply`; None for none."""
        ...

    def sync_reply_in(self, peer_id: str, frame: PeerFrame) -> None:
        """Master only: a slave has answered a sync of this term."""
        ...

    def beside_in(self, peer_id: str, frame: PeerFrame) -> PeerFrame | None:
        """A frame outside the log has arrived (`conversation.BESIDE`). Returns the answer, or None for none."""
        ...

    def may_apply(self) -> bool:
        """Whether the node has room for the effects of more entries. If not, they wait in the journal."""
        ...

    def may_vote(self) -> bool:
        """Whether this node may vote and stand for election. Once it may, it always may."""
        ...

    def handover_ready(self, peer_id: str) -> bool:
        """Whether this slave has all the state outside the log that it needs to lead without repeating deliveries."""
        ...

    def checkpoint_needed(self, peer_id: str, applied_index: int) -> None:
        """The master's log no longer reaches back to this slave: fetch the checkpoint of `peer_id`, restart from it."""
        ...

    def forgot(self, peer_id: str, last_index: int, acknowledged_index: int) -> None:
        """Master only: a peer's log ends at `last_index`, though it has acknowledged entries up to
        `acknowledged_index` in this term. An older copy of its directory was put back, or its disk has lost what an
        fsync had returned for. It gets the entries again."""
        ...

    def damaged(self, error: DiskError) -> None:
        """The journal cannot be read where this log needs it, or not be written: another node must lead, then this one
        must stop. Called each time; the log goes on as far as it can, which after a failed write is a handover."""
        ...

    def fatal(self, reason: str) -> None:
        """The process must stop now: an impossible state, a refused identity."""
        ...


class ReplicatedLog(Protocol):
    """One replicated log on one node."""

    def start(self) -> None:
        """Connect to the members and take part. The next ticks apply what the journal holds beyond the checkpoint."""
        ...

    def stop(self) -> None:
        """Take no more part. Idempotent; pending proposals end UNKNOWN."""
        ...

    def tick(self, asked_ns: int | None = None) -> int:
        """Do the work that is due. Returns the latest monotonic_ns at which the next call is needed. `asked_ns`: when
        the caller wanted this one at the latest, for purposes of its own. A call that comes much later shows that the
        node stood still."""
        ...

    def receive(self, peer_id: str, frame: PeerFrame) -> bool:
        """Take a frame from a peer whose identity the transport has checked. False: it repeats what is known, and the
        next `tick` may wait for the time that the last one returned."""
        ...

    def peer_connected(self, peer_id: str) -> None: ...

    def peer_disconnected(self, peer_id: str) -> None: ...

    def propose(
        self, command: bytes, done: Callable[[ProposalResult], None], voters: Sequence[str] | None = None
    ) -> None:
        """Append a command if this node is master. `done` is called exactly once; QUEUE_FULL at the limits.

        `voters`: for a command that changes the voters, the ids of all voters after the change. They count from the
        moment the entry is written (`Voters`). QUEUE_FULL while another change of the voters is not applied, or while
        no entry of this term has committed.
        """
        ...

    def send_beside(self, peer_id: str, frame: PeerFrame) -> bool:
        """Send a frame outside the log to `beside_in` of a peer. False: not connected, or its queue is full."""
        ...

    def in_flight(self) -> tuple[int, int]:
        """(number, bytes) of the proposals that are not applied yet."""
        ...

    def lease_held(self) -> bool:
        """Whether this node may act as master now: a majority has answered requests sent less than a lease ago."""
        ...

    def lease_until_ns(self) -> int:
        """The monotonic_ns at which the lease ends if no more answers arrive; 0 if it is not held."""
        ...

    def transfer(self, target_id: str | None, done: Callable[[str | None], None], *, applying: bool = True) -> None:
        """Hand mastership over as planned (handover.py). `target_id` None: to the voter with the longest log.

        Refuses proposals, waits until the target has all entries, gives up the lease and asks the target to lead.
        `done(None)` is called once another node leads, else `done(reason)`. If the target does not catch up in time,
        this node keeps leading. Once the lease is given up, an election decides. `applying` False: this node will apply
        nothing more, so its own apply is not waited for, and its pending proposals end UNKNOWN.
        """
        ...

    def step_down(self) -> None:
        """Stop leading without a handover; no effect on a slave. In the election that follows this node stands late."""
        ...

    def set_members(self, members: Sequence[Member]) -> None:
        """Set all members, learners too, as just applied from the log or read from a manifest.

        From one call to the next only one member changes.
        """
        ...

    def members(self) -> Sequence[Member]: ...

    def introduce(self, introduction: Introduction) -> None:
        """Also connect to these members, until this node has applied the entry that they are known from.

        They have no vote here: only this node's own log says who votes.
        """
        ...

    def introduced(self) -> Introduction:
        """The members given to `introduce`; empty once this node has applied as much of the log itself."""
        ...

    def entries_after(self, index: int) -> int:
        """Bytes of log that a restart would replay after entry `index`: tells when a checkpoint pays."""
        ...

    @property
    def fsyncing(self) -> bool:
        """Whether a worker runs an fsync of the journal's files. May stay true after `stop`, until it has ended."""
        ...

    def checkpointed(self, index: int, term: int) -> None:
        """A durable checkpoint covers all entries up to `index`: the journal may drop them.

        A tail of `journal_tail_bytes_max` stays for slaves that are only a little behind.
        """
        ...

    def status(self) -> LogStatus: ...
