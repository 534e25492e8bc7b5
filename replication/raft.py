"""The replicated log over pysyncobj: ReplicatedLog as the node uses it.

Composes the engine (pysyncobj_seam.py), the journal and its disk (stable_storage.py), the exchange with peers
(conversation.py), the voters, the lease and the planned handover. Owns the order of work in a tick, the time of the
next tick, the refusal of proposals, and the moment at which the node hears of its role.

Invariants:
- `done` of a proposal is called once: with UNKNOWN if mastership is lost first.
- One change of the voters at a time, each counting from when it is written (`Voters`).
- After `fatal` nothing more is sent or applied.
- Once the journal has failed nothing is proposed, committed beyond what was durable, acknowledged or voted for: this
  node only hands over. `LogListener.damaged` hears of it, and stops the node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from tickwheel.proto.parsing import wants_memory
from tickwheel.proto.peer_pb2 import PeerFrame
from tickwheel.replication.config import RaftConfig
from tickwheel.replication.conversation import CaughtUp, Conversation
from tickwheel.replication.entries import REGULAR, Voters, command_of, naming, split
from tickwheel.replication.frames import Envelope
from tickwheel.replication.guards import Guards
from tickwheel.replication.handover import Handover
from tickwheel.replication.journal import Journal
from tickwheel.replication.judge import ImpossibleMessageError
from tickwheel.replication.lease import Lease
from tickwheel.replication.log import (
    NO_INTRODUCTION,
    ApplyLaterError,
    Introduction,
    LogListener,
    LogStatus,
    Member,
    PeerProgress,
    ProposalOutcome,
    ProposalResult,
    Role,
)
from tickwheel.replication.ports import NS_PER_MS, Clock, Executor, Network, Random
from tickwheel.replication.pysyncobj_globals import PickleRefusedError
from tickwheel.replication.pysyncobj_seam import CANDIDATE, LEADER, Engine
from tickwheel.replication.stable_storage import StableStorage
from tickwheel.storage.disk import DiskError, DiskFullError, NoDescriptorError

P = ParamSpec("P")
T = TypeVar("T")

IDLE_NS_MAX = 1_000 * NS_PER_MS
TICK_NS_MIN = 100_000
NO_ROOM_PAUSE_NS = 5 * NS_PER_MS
"""Pause before `may_apply` is asked again after it said no."""


class RaftLog:
    """Implements ReplicatedLog (log.py) and EngineHost (pysyncobj_seam.py): both state what the methods promise.

    `config`, `journal`, `engine` and `peers` are for observers to read.
    """

    def __init__(
        self,
        config: RaftConfig,
        node_id: str,
        cluster_id: str,
        clock: Clock,
        executor: Executor,
        network: Network,
        random: Random,
        listener: LogListener,
        journal: Journal,
        members: Sequence[Member],
        applied: tuple[int, int],
        *,
        wheel_group: int = 0,
        disk_uuid: str = "",
        joining: bool = False,
        guards: Guards | None = None,
    ) -> None:
        self.config = config
        self._guards = guards or Guards()
        self._clock = clock
        self._listener = listener
        self.journal = journal
        self._roster = Roster(node_id, members, network)
        self._voters = Voters(node_id, self._roster.voters)
        self._voters.find_written(journal, max(applied[0], journal.base_index), config.window_bytes_max)
        self._lease = Lease(config.lease_ms)
        self._handover = Handover(config)
        self._proposals = Proposals(config.proposals_max, config.proposal_bytes_max)
        self._caught_up = CaughtUp(applied[1])
        self._storage = StableStorage(
            config,
            journal,
            clock,
            executor,
            run_checked=self.run_checked,
            on_failure=self._failed,
            fsynced=self._fsynced,
            on_halt=self._halted,
        )
        self.peers = Conversation(
            config,
            self._guards,
            clock,
            network,
            random,
            listener,
            journal,
            Envelope(cluster_id, node_id, random.getrandbits(64) | 1, wheel_group, disk_uuid),
            voters=self._voters,
            lease=self._lease,
            handover=self._handover,
            storage=self._storage,
            caught_up=self._caught_up,
            joining=joining,
        )
        self.engine = Engine(
            self, self.peers, node_id, self._voters.ids, config, journal, applied[0], clock, random, self._guards
        )
        self.peers.engine = self.engine
        self._last_tick_ns = 0
        self._dead = False
        self._told: tuple[int, int, str | None] = (-1, -1, None)
        self._stirred = True
        """Whether the log's input or state has changed since the last tick, so that the next tick must do its work."""
        self._quiet_until_ns = 0
        """When the next tick is due. While `_stirred` is false, a tick before this monotonic_ns has nothing to do."""

    # -- life

    def start(self) -> None:
        now_ns = self._clock.monotonic_ns()
        self.peers.running = True
        self._stirred = True
        self.peers.started_ns = self._last_tick_ns = self._quiet_until_ns = now_ns
        self._roster.announce(self.engine.applied_index)

    def stop(self) -> None:
        if not self.peers.running:
            return
        self._end()

    def _fatal(self, reason: str) -> None:
        if self._dead:
            return
        self._dead = True
        self.peers.running = False
        self._listener.fatal(reason)
        self._end()

    def _end(self) -> None:
        self.peers.running = False
        self._storage.stop()
        self._fail_proposals()
        self._handover.abandon("this node stops")

    def run_checked(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T | None:
        """Run `work` and return its result; None after an error. A full disk halts this node's part in the log, any
        other error of the disk ends it. Any other expected error stops the node."""
        try:
            return work(*args, **named)
        except DiskFullError as error:
            self._storage.halt(str(error), no_descriptor=isinstance(error, NoDescriptorError))
        except DiskError as error:
            self._storage.fail(error)
        except (ImpossibleMessageError, AssertionError, PickleRefusedError) as error:
            self._fatal(str(error) or repr(error))
        return None

    # -- the loop

    def tick(self, asked_ns: int | None = None) -> int:
        now_ns = self._clock.monotonic_ns()
        if not self.peers.running:
            return now_ns + IDLE_NS_MAX
        stall_ns = self.config.stall_ms * NS_PER_MS
        if now_ns - self._last_tick_ns > stall_ns:
            self._lease.invalidate(now_ns)
        late_ns = now_ns - self._quiet_until_ns
        stood_still = late_ns > stall_ns or (asked_ns is not None and now_ns - asked_ns > stall_ns)
        if stood_still and self._guards.input_drained_first:
            self.engine.postpone_election(now_ns + self.config.campaign_round_ms * NS_PER_MS)
        if late_ns > stall_ns and self.engine.state == LEADER:
            self.peers.paused(late_ns, now_ns)  # the slaves may share the machine that is so busy
        self._last_tick_ns = now_ns
        if not self._stirred and now_ns < self._quiet_until_ns:
            return self._quiet_until_ns
        self._stirred = False
        notice_ns = 0

        def work() -> None:
            nonlocal notice_ns
            if self._storage.look_for_room(now_ns):
                self.engine.postpone_election(now_ns + self.config.election_timeout_ms_min * NS_PER_MS)
            if self.engine.state == LEADER and self.peers.sync_due(now_ns):
                self.engine.heartbeat_now()  # with the sync: one message to each slave, and one answer
            self.engine.run_due()
            self._drive_handover(now_ns)
            self.peers.answer_overdue(now_ns)
            if self.engine.state == LEADER and self._voters.others and self._storage.hangs(now_ns):
                self.engine.step_down()
            if self.engine.state == LEADER:
                self.peers.send_sync(now_ns)
                notice_ns = self.engine.send_new(self.config.commit_notice_ms * NS_PER_MS)
            self._storage.fsync()

        self.run_checked(work)
        self._tell_role()
        self._quiet_until_ns = self._deadline(now_ns, notice_ns)
        return self._quiet_until_ns

    def _deadline(self, now_ns: int, notice_ns: int) -> int:
        engine = self.engine
        if not self.peers.running:
            return now_ns + IDLE_NS_MAX
        if engine.applied_index < engine.commit_index:
            return now_ns if self.may_apply() else now_ns + NO_ROOM_PAUSE_NS
        until_ns = min(now_ns + IDLE_NS_MAX, self.peers.wanted_ns())
        if engine.state == LEADER:
            until_ns = min(until_ns, engine.heartbeat_due_ns, self._storage.hangs_from_ns() or until_ns)
            if notice_ns:
                until_ns = min(until_ns, notice_ns)
        elif round_over_ns := self.peers.round_over_ns():
            until_ns = min(until_ns, round_over_ns)
        elif self._voters.counts and not self.peers.keeps_from_campaigning(now_ns) and self._listener.may_vote():
            # Heartbeats want no tick. One that comes after now may bring the deadline forward to the shortest timeout.
            earliest_ns = now_ns + self.config.election_timeout_ms_min * NS_PER_MS
            until_ns = min(until_ns, engine.election_deadline_ns, earliest_ns)
        if handover_ns := self._handover.wanted_ns():
            until_ns = min(until_ns, handover_ns)
        return max(until_ns, now_ns + TICK_NS_MIN)

    def _tell_role(self) -> bool:
        """Tell the node of a change of its role, term or master. Returns whether there was one."""
        engine = self.engine
        now = (engine.state, engine.term, engine.leader_id)
        if now == self._told:
            return False
        was_leader = self._told[0] == LEADER and (now[0] != LEADER or now[1] != self._told[1])
        self._told = now
        if was_leader:
            self._lease.reset(self._clock.monotonic_ns())
            self._fail_proposals()
        self.peers.term_changed()
        if self.peers.running:
            self._listener.role_changed(self.status())
        return True

    def _fail_proposals(self) -> None:
        self._proposals.fail(
            ProposalOutcome.UNKNOWN if self._guards.loss_reported_unknown else ProposalOutcome.NOT_MASTER
        )

    # -- stable storage

    def _fsynced(self) -> None:
        self._stirred = True
        self.peers.entries_durable()

    def _halted(self) -> None:
        self._stirred = True
        self.peers.halted()
        if self.engine.state == LEADER:
            self.engine.step_down()

    def _failed(self, error: DiskError) -> None:
        self._stirred = True
        self.peers.halted()
        self._listener.damaged(error)

    # -- what the engine asks (EngineHost)

    def may_apply(self) -> bool:
        """False once this node has to stop: not even committed entries are applied then."""
        return self.peers.running and self._listener.may_apply()

    def apply_entry(self, index: int, term: int, command: bytes) -> object:
        try:
            body = command_of(command)
        except ValueError as error:
            if self._guards.foreign_commands_fatal:
                raise AssertionError(f"log entry {index}: {error}") from error
            body = b""
        if not self._guards.apply_errors_fatal:
            return self._listener.apply(index, term, body)
        try:
            return self._listener.apply(index, term, body)
        except ApplyLaterError:
            raise
        except Exception as error:
            if wants_memory(error):  # which says nothing of the entry: it is applied after the next start
                raise
            raise AssertionError(f"log entry {index} could not be applied: {error!r}") from error

    def damaged(self, error: DiskError) -> None:
        self._listener.damaged(error)

    def applied(self, index: int, term: int, value: object) -> None:
        if self._voters.changing:
            self._voters.applied(index)
            self._count_voters()
        if not self._caught_up.done:
            self._caught_up.applied(term)
            self._caught_up.look(self.engine.term, index, leads=self.engine.state == LEADER)
        self._proposals.applied(index, term, value)

    def became_leader(self) -> None:
        self._lease.reset(self._clock.monotonic_ns())
        self._handover.clear()
        self.peers.leads()

    def voters_written(self, index: int, entry: bytes) -> None:
        self._voters.written(index, split(entry)[0])
        self._count_voters()

    def entries_cut(self, index: int) -> None:
        if self._voters.changing:
            self._voters.cut_from(index)
            self._count_voters()

    # -- receiving

    def peer_connected(self, peer_id: str) -> None:
        self._stirred = True
        self.peers.connected(peer_id)

    def peer_disconnected(self, peer_id: str) -> None:
        self._stirred = True
        self.peers.disconnected(peer_id)

    def receive(self, peer_id: str, frame: PeerFrame) -> bool:
        if not self.peers.running:
            return False
        wants_tick: bool | None = True
        try:
            wants_tick = self.run_checked(self.peers.take, peer_id, frame)
        finally:
            changed = self._tell_role()
        if wants_tick is False and not changed:
            return False
        self._stirred = True
        return True

    def send_beside(self, peer_id: str, frame: PeerFrame) -> bool:
        return self.peers.send(peer_id, frame)

    # -- proposals

    def propose(self, command: bytes, done: Done, voters: Sequence[str] | None = None) -> None:
        engine = self.engine
        if not self.peers.running or engine.state != LEADER or self._told[0] != LEADER:
            done(ProposalResult(ProposalOutcome.NOT_MASTER))
            return
        if len(command) > self.config.command_bytes_max:
            done(ProposalResult(ProposalOutcome.TOO_LARGE))
            return
        if self._storage.halted or self._storage.failed or self._handover.parks_proposals or self._proposals.full:
            done(ProposalResult(ProposalOutcome.QUEUE_FULL))
            return
        if voters is not None and not self._may_change_voters():
            done(ProposalResult(ProposalOutcome.QUEUE_FULL))
            return
        entry = REGULAR + command if voters is None else naming(voters, command)
        index = self.run_checked(engine.append, entry)
        if index is None:
            # A full disk has written nothing. After any other failure only the next start knows what was written.
            unknown = self._storage.failed or not self.peers.running
            done(ProposalResult(ProposalOutcome.UNKNOWN if unknown else ProposalOutcome.QUEUE_FULL))
            return
        self._stirred = True
        self._proposals.add(index, engine.term, len(command), done)

    def in_flight(self) -> tuple[int, int]:
        return len(self._proposals), self._proposals.bytes

    # -- lease and handover

    def lease_held(self) -> bool:
        return self.lease_until_ns() > 0

    def lease_until_ns(self) -> int:
        if self.engine.state != LEADER or not self.peers.running:
            return 0
        return self._lease.until_ns(self._voters.others, self._clock.monotonic_ns())

    def transfer(self, target_id: str | None, done: Callable[[str | None], None], *, applying: bool = True) -> None:
        engine = self.engine
        if engine.state != LEADER:
            done("this node is not the master")
            return
        candidates = {p: engine.match_index(p) for p in self._voters.others if self.peers.peer(p).connected}
        if not applying:
            self._fail_proposals()
        now_ns = self._clock.monotonic_ns()
        if self._handover.begin(target_id, candidates, engine.term, now_ns, done, applying=applying):
            self._stirred = True
            self.peers.sync_now()

    def step_down(self) -> None:
        if self.engine.state == LEADER:
            self._stirred = True
            self.engine.step_down()
            self._tell_role()

    def _drive_handover(self, now_ns: int) -> None:
        engine = self.engine
        target = self._handover.target
        if target is None:
            return
        last_index = self.journal.last_index
        own_applied = engine.applied_index == last_index and not len(self._proposals)
        caught_up = (
            engine.match_index(target) == last_index
            and (own_applied or not self._handover.applying)
            and self._listener.handover_ready(target)
        )
        leading, term, leader_id = engine.state == LEADER, engine.term, engine.leader_id
        if self.peers.succeeded_by is not None:
            leading, (term, leader_id) = False, self.peers.succeeded_by
        send = self._handover.step(now_ns, leading=leading, term=term, leader_id=leader_id, caught_up=caught_up)
        if self._lease.given_up and not self._handover.lease_given_up and engine.state == LEADER:
            # Nobody became master in time, but TimeoutNow may still arrive. To keep leading in this term
            # could make two masters. Stand down, and let an election decide.
            engine.step_down()
            return
        self._lease.given_up = self._handover.lease_given_up
        if send:
            engine.send_timeout_now(target)

    # -- members and voters

    def _count_voters(self) -> None:
        """Tell the engine the voters, which may have changed."""
        self._stirred = True
        self.engine.set_voters(self._voters.ids)

    def _may_change_voters(self) -> bool:
        committed_here = self.journal.term_at(self.engine.commit_index) == self.engine.term
        return committed_here and not self._voters.changing

    def set_members(self, members: Sequence[Member]) -> None:
        self._roster.members = tuple(members)
        self._voters.set_applied(self._roster.voters)
        self._count_voters()
        if self.peers.running:
            self._roster.announce(self.engine.applied_index)
        if not self._voters.counts and self.engine.state == LEADER:
            self.engine.step_down()

    def introduce(self, introduction: Introduction) -> None:
        self._roster.introduction = introduction
        if self.peers.running:
            self._roster.announce(self.engine.applied_index)

    def introduced(self) -> Introduction:
        return self._roster.introduced(self.engine.applied_index)

    @property
    def voters(self) -> tuple[str, ...]:
        """Ids of the voters by the newest entry in this log that lists them, committed or not; sorted."""
        return self._voters.ids

    def members(self) -> Sequence[Member]:
        return self._roster.members

    # -- for observers, who only read

    @property
    def heeds(self) -> bool:
        """Whether frames have an effect: the log runs, and no full or failed disk ends its part."""
        return self.peers.running and not self._storage.halted and not self._storage.failed

    @property
    def other_voters(self) -> tuple[str, ...]:
        """The voters without this node."""
        return self._voters.others

    # -- checkpoints, status

    @property
    def fsyncing(self) -> bool:
        return self._storage.fsyncing

    def entries_after(self, index: int) -> int:
        return self.journal.bytes_after(index)

    def checkpointed(self, index: int, term: int) -> None:
        journal = self.journal
        base = journal.base_before(index, self.config.journal_tail_bytes_max)
        self._stirred = True
        if base > journal.base_index:
            self.run_checked(journal.compact, base, journal.term_at(base))

    def status(self) -> LogStatus:
        engine = self.engine
        now_ns = self._clock.monotonic_ns()
        if engine.state == LEADER:
            role = Role.MASTER
        elif not self._voters.counts:
            role = Role.LEARNER
        else:
            role = Role.CANDIDATE if engine.state == CANDIDATE else Role.SLAVE
        known = {member.node_id for member in self._roster.members}
        peers = {
            peer_id: PeerProgress(
                connected=peer.connected,
                match_index=engine.match_index(peer_id) if role is Role.MASTER else 0,
                sync_age_ms=(now_ns - peer.sync_answered_ns) // NS_PER_MS if peer.sync_answered_ns else 0,
            )
            for peer_id, peer in sorted(self.peers.peers.items())
            if peer_id in known or peer.connected
        }
        return LogStatus(
            role=role,
            term=engine.term,
            master_id=self.peers.known_master(now_ns),
            first_index=self.journal.first_index,
            last_index=self.journal.last_index,
            commit_index=engine.commit_index,
            applied_index=engine.applied_index,
            lease_held=self.lease_held(),
            peers=peers,
            halted=self._storage.halted,
            heard_commit_index=self.peers.heard_commit_index,
            caught_up=self._caught_up.done,
            hangs_ms=self._storage.hangs_ms(now_ns),
        )


Done = Callable[[ProposalResult], None]


@dataclass(slots=True)
class _Proposal:
    term: int
    bytes: int
    done: Done


class Proposals:
    """The proposals that this node has appended as master and not yet applied, by index.

    Each `done` is called exactly once: when the entry is applied, or when mastership is lost. The caller checks `full`
    before `add`; the last one may exceed the bytes.
    """

    def __init__(self, count_max: int, bytes_max: int) -> None:
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._waiting: dict[int, _Proposal] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def full(self) -> bool:
        return len(self._waiting) >= self._count_max or self.bytes >= self._bytes_max

    def add(self, index: int, term: int, size: int, done: Done) -> None:
        """An entry of `size` bytes was appended at `index`."""
        self._waiting[index] = _Proposal(term, size, done)
        self.bytes += size

    def applied(self, index: int, term: int, value: object) -> None:
        """The entry at `index` was applied. In another term it is not the proposed one, which then ends UNKNOWN."""
        proposal = self._waiting.pop(index, None)
        if proposal is None:
            return
        self.bytes -= proposal.bytes
        if proposal.term == term:
            proposal.done(ProposalResult(ProposalOutcome.COMMITTED, index, value))
        else:
            proposal.done(ProposalResult(ProposalOutcome.UNKNOWN))

    def fail(self, outcome: ProposalOutcome) -> None:
        """Mastership is over: end all waiting proposals with this outcome, in order of their indexes."""
        waiting, self._waiting = self._waiting, {}
        self.bytes = 0
        for index in sorted(waiting):
            waiting[index].done(ProposalResult(outcome))


class Roster:
    """The nodes that this log connects to: members by its applied entries, and members shown by a node ahead of it.

    Invariants: for a node in both lists the address of the applied entries wins. Shown members are only connected to:
    they have no vote by it. They are dropped once this node has applied as much of the log itself. The owner sets
    `members` and `introduction` as they become known, then calls `announce` to put them in force.
    """

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
