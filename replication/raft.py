"""The replicated log over pysyncobj: ReplicatedLog as the node uses it.

Composes the engine (pysyncobj_seam.py), the journal, the guard against its gaps, the lease and the
envelope. Owns: which proposals wait for what, which acknowledgements wait for the disk, the round of
questions before an election, the planned handover, when the sync goes out.

Invariants:
- Nothing is acknowledged that is not on this node's stable storage.
- No frame of another cluster, an earlier start, an earlier connection, or seen before acts.
- `done` of a proposal is called once; after mastership is lost with UNKNOWN.
- After `fatal` nothing more is sent or applied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tickwheel.proto.peer_pb2 import (
    AppendEntries,
    AppendResult,
    CheckpointNeeded,
    Entry,
    PeerFrame,
    Ping,
    Pong,
    RequestVote,
    TimeoutNow,
    Vote,
)
from tickwheel.replication.config import RaftConfig
from tickwheel.replication.frames import Envelope
from tickwheel.replication.guard import ImpossibleMessageError, judge
from tickwheel.replication.guards import Guards
from tickwheel.replication.handover import Handover
from tickwheel.replication.journal import Journal
from tickwheel.replication.lease import Lease
from tickwheel.replication.log import LogListener, LogStatus, Member, PeerProgress, ProposalResult, Role, Verdict
from tickwheel.replication.ports import Clock, Executor, Network, Random
from tickwheel.replication.pysyncobj_seam import (
    CANDIDATE,
    LEADER,
    NO_OP,
    NS_PER_MS,
    REGULAR,
    Engine,
    Message,
    PickleRefusedError,
)
from tickwheel.storage.disk import DiskError, DiskFullError, SyncFailedError

Done = Callable[[ProposalResult], None]
IDLE_NS_MAX = 1_000 * NS_PER_MS


@dataclass(slots=True)
class _Peer:
    connected: bool = False
    connection_id: int = 0
    last_heard_ns: int = 0
    rewound_ns: int = 0
    checkpoint_told_ns: int = 0
    clock_offset_ms: float = 0.0
    clock_error_ms: float = 0.0
    synced_ns: int = 0


@dataclass(slots=True)
class _Held:
    """An acknowledgement that waits for the disk."""

    leader_id: str
    term: int
    connection_id: int
    next_index: int
    echo_sent_ns: int
    silent_since_ns: int
    """Since when the master has had no answer because of it."""


@dataclass(slots=True)
class _Proposal:
    term: int
    bytes: int
    done: Done


@dataclass(slots=True)
class _Asked:
    """A round of questions before an election: who would vote."""

    since_ns: int
    willing: set[str]


class RaftLog:
    """See the module."""

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
        self._config = config
        self._guards = guards or Guards()
        self._node_id = node_id
        self._clock = clock
        self._executor = executor
        self._network = network
        self._random = random
        self._listener = listener
        self._journal = journal
        self._joining = joining
        self._members = tuple(members)
        self._voters = tuple(sorted(m.node_id for m in members))
        self._others = tuple(v for v in self._voters if v != node_id)
        self._envelope = Envelope(cluster_id, node_id, random.getrandbits(64) | 1, wheel_group, disk_uuid)
        self._peers: dict[str, _Peer] = {}
        self._lease = Lease(config.lease_ms)
        self._handover = Handover(config)
        self._engine = Engine(self, node_id, self._voters, config, journal, applied[0], clock, random, self._guards)
        self._held: _Held | None = None
        self._answering: tuple[str, int, int] | None = None
        self._asked: _Asked | None = None
        self._votes: set[str] = set()
        self._votes_term = 0
        self._transfer_term = 0
        self._proposals: dict[int, _Proposal] = {}
        self._proposal_bytes = 0
        self._syncing = False
        self._sync_began_ns = 0
        self._leader_heard_ns = 0
        self._started_ns = 0
        self._last_tick_ns = 0
        self._next_sync_ns = 0
        self._halted = ""
        self._halted_ns = 0
        self._running = False
        self._dead = False
        self._told: tuple[int, int, str | None] = (-1, -1, None)
        self._caught_up = False
        self._stirred = True
        """Something came in, or was said, since the last tick."""
        self._quiet_until_ns = 0
        """Unless stirred there is nothing to do before."""
        self._first_commit: tuple[int, int] = (-1, 0)
        """(term, commit index) when this node first heard of the master of that term."""
        self._applied_term = applied[1]

    # -- life

    def start(self) -> None:
        """See ReplicatedLog."""
        now_ns = self._clock.monotonic_ns()
        self._running = True
        self._stirred = True
        self._started_ns = self._last_tick_ns = now_ns
        self._announce_members()

    def stop(self) -> None:
        """See ReplicatedLog."""
        if not self._running:
            return
        self._running = False
        self._fail_proposals()
        self._handover.abandon("this node stops")

    def _fatal(self, reason: str) -> None:
        if self._dead:
            return
        self._dead = True
        self._running = False
        self._listener.fatal(reason)
        self._fail_proposals()
        self._handover.abandon("this node stops")

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run a piece of work; what must not happen stops the node, a full disk halts it."""
        try:
            work()
        except DiskFullError as error:
            self._halt(str(error))
        except (ImpossibleMessageError, SyncFailedError, DiskError, AssertionError, PickleRefusedError) as error:
            self._fatal(str(error) or repr(error))

    # -- the loop

    def tick(self) -> int:
        """See ReplicatedLog."""
        now_ns = self._clock.monotonic_ns()
        if not self._running:
            return now_ns + IDLE_NS_MAX
        if now_ns - self._last_tick_ns > self._config.stall_ms * NS_PER_MS:
            self._lease.invalidate(now_ns)
            if self._guards.input_drained_first:
                self._engine.postpone_election(now_ns + self._config.campaign_round_ms * NS_PER_MS)
        self._last_tick_ns = now_ns
        if not self._stirred and now_ns < self._quiet_until_ns:
            return self._quiet_until_ns
        self._stirred = False
        notice_ns = 0

        def work() -> None:
            nonlocal notice_ns
            self._recover_from_full(now_ns)
            self._engine.run_due()
            self._drive_handover(now_ns)
            self._answer_unsynced(now_ns)
            if self._engine.state == LEADER and self._others and self._disk_hangs(now_ns):
                self._engine.step_down()
            if self._engine.state == LEADER:
                self._send_sync(now_ns)
                notice_ns = self._engine.send_new(self._config.commit_notice_ms * NS_PER_MS)
            self._start_sync()

        self._guarded(work)
        self._tell_role()
        self._quiet_until_ns = self._deadline(now_ns, notice_ns)
        return self._quiet_until_ns

    def _deadline(self, now_ns: int, notice_ns: int) -> int:
        engine = self._engine
        if not self._running:
            return now_ns + IDLE_NS_MAX
        if engine.applied_index < engine.commit_index:
            return now_ns
        times = [now_ns + IDLE_NS_MAX]
        if engine.state == LEADER:
            times += [engine.heartbeat_due_ns, self._next_sync_ns]
            if self._syncing:
                times.append(self._sync_began_ns + (self._config.sync_hang_ms + 1) * NS_PER_MS)
            if notice_ns:
                times.append(notice_ns)
        elif self._asked is not None:
            times.append(self._asked.since_ns + self._config.campaign_round_ms * NS_PER_MS)
        elif self._node_id in self._voters and not self._halted:
            times.append(engine.election_deadline_ns)
        if self._held is not None:
            times.append(self._held.silent_since_ns + self._config.answer_within_ms * NS_PER_MS)
        wanted = self._handover.wanted_ns()
        if wanted:
            times.append(wanted)
        return max(min(times), now_ns + 100_000)

    def _tell_role(self) -> None:
        engine = self._engine
        now = (engine.state, engine.term, engine.leader_id)
        if now == self._told:
            return
        was_leader = self._told[0] == LEADER and (now[0] != LEADER or now[1] != self._told[1])
        self._told = now
        if was_leader:
            self._lease.reset()
            self._fail_proposals()
        if self._held is not None and self._held.term != engine.term:
            self._held = None
        if self._running:
            self._listener.role_changed(self.status())

    def _fail_proposals(self) -> None:
        proposals, self._proposals = self._proposals, {}
        self._proposal_bytes = 0
        verdict = Verdict.UNKNOWN if self._guards.loss_reported_unknown else Verdict.NOT_MASTER
        for index in sorted(proposals):
            proposals[index].done(ProposalResult(verdict))

    # -- stable storage

    def _start_sync(self) -> None:
        if self._syncing or not self._journal.needs_sync:
            return
        self._syncing = True
        self._sync_began_ns = self._clock.monotonic_ns()
        work = self._journal.begin_sync()

        def finished(_: object, error: BaseException | None) -> None:
            if not self._running:
                return
            self._syncing = False
            self._stirred = True

            def finish() -> None:
                self._journal.finish_sync(work)
                self._release_held()

            if error is not None and not isinstance(error, DiskFullError):
                self._fatal(f"the journal could not be written to stable storage: {error}")
                return
            self._guarded(finish)

        self._executor.submit(work.run, finished)

    def _release_held(self) -> None:
        held = self._held
        if held is None:
            return
        if held.term != self._engine.term:
            self._held = None
            return
        durable = self._journal.durable_index
        if durable + 1 >= held.next_index:
            self._held = None
        held.silent_since_ns = self._clock.monotonic_ns()
        next_index = min(held.next_index, durable + 1)
        result = AppendResult(next_index=next_index, success=True, echo_sent_ns=held.echo_sent_ns)
        self._send(held.leader_id, PeerFrame(append_result=result), connection_id=held.connection_id)

    def _answer_unsynced(self, now_ns: int) -> None:
        """The disk takes long: tell the master that this node hears it, and how far its log is durable."""
        held = self._held
        if held is None or now_ns - held.silent_since_ns < self._config.answer_within_ms * NS_PER_MS:
            return
        held.silent_since_ns = now_ns
        result = AppendResult(next_index=self._journal.durable_index + 1, echo_sent_ns=held.echo_sent_ns)
        self._send(held.leader_id, PeerFrame(append_result=result), connection_id=held.connection_id)

    def _disk_hangs(self, now_ns: int) -> bool:
        """A sync is under way for so long that a master would hold its lease and commit nothing."""
        return self._syncing and now_ns - self._sync_began_ns > self._config.sync_hang_ms * NS_PER_MS

    def _halt(self, reason: str) -> None:
        self._halted = f"the disk is full: {reason}; free space in the data directory"
        self._halted_ns = self._clock.monotonic_ns()
        self._stirred = True
        self._held = None
        if self._engine.state == LEADER:
            self._engine.step_down()

    def _recover_from_full(self, now_ns: int) -> None:
        journal = self._journal
        if not (journal.reserve_ready or journal.needs_sync or self._syncing or self._halted):
            self._halt("no room for the next file of the journal")
        if not self._halted or now_ns - self._halted_ns < self._config.disk_retry_ms * NS_PER_MS or self._syncing:
            return
        self._halted_ns = now_ns
        if self._journal.restore_reserve():
            self._halted = ""
            self._engine.postpone_election(now_ns + self._config.election_timeout_ms_min * NS_PER_MS)

    # -- what the engine asks (EngineHost)

    def outbound(self, peer_id: str, message: Message) -> bool:
        """See EngineHost."""
        if not self._running:
            return False
        kind = message["type"]
        if kind == "append_entries":
            return self._send_append(peer_id, message)
        if kind == "next_node_idx":
            return self._answer(
                peer_id, int(message["next_node_idx"]), bool(message["success"]), bool(message["reset"])
            )
        if kind == "request_vote":
            body = RequestVote(
                last_log_index=message["last_log_index"],
                last_log_term=message["last_log_term"],
                transfer=self._guards.transfer_marked and message["term"] == self._transfer_term,
            )
            return self._send(peer_id, PeerFrame(request_vote=body))
        if kind == "response_vote":
            return self._send(peer_id, PeerFrame(vote=Vote(granted=True)))
        if kind == "timeout_now":
            return self._send(peer_id, PeerFrame(timeout_now=TimeoutNow()))
        raise AssertionError(f"pysyncobj wants to send {kind}, which has no place here")

    def _send_append(self, peer_id: str, message: Message) -> bool:
        now_ns = self._clock.monotonic_ns()
        append = AppendEntries(commit_index=message["commit_index"], sent_ns=now_ns)
        if "prevLogIdx" in message:
            append.previous_index = message["prevLogIdx"]
            append.previous_term = message["prevLogTerm"]
            append.entries.extend(
                Entry(command=command, index=index, term=term) for command, index, term in message["entries"]
            )
        else:
            peer = self._peer(peer_id)
            if now_ns - peer.checkpoint_told_ns >= self._config.checkpoint_hint_ms * NS_PER_MS:
                peer.checkpoint_told_ns = now_ns
                hint = CheckpointNeeded(applied_index=self._journal.base_index, applied_term=self._journal.base_term)
                self._send(peer_id, PeerFrame(checkpoint_needed=hint))
        return self._send(peer_id, PeerFrame(append_entries=append))

    def _answer(self, peer_id: str, next_index: int, success: bool, reset: bool) -> bool:
        """Answer the append_entries being handled; a success waits for the disk."""
        answering = self._answering
        echo_ns = answering[1] if answering is not None and answering[0] == peer_id else 0
        connection_id = answering[2] if answering is not None else 0
        durable = self._journal.durable_index
        if success and self._guards.durable_before_acknowledged and next_index > durable + 1:
            # The disk is asked at once and answers soon; only if it does not is the master told that we live.
            now_ns = self._clock.monotonic_ns()
            silent_since_ns = now_ns if self._held is None else self._held.silent_since_ns
            self._held = _Held(peer_id, self._engine.term, connection_id, next_index, echo_ns, silent_since_ns)
            if now_ns - silent_since_ns < self._config.answer_within_ms * NS_PER_MS:
                return True
            self._held.silent_since_ns = now_ns
            success, next_index = False, durable + 1
        result = AppendResult(next_index=next_index, success=success, reset=reset, echo_sent_ns=echo_ns)
        return self._send(peer_id, PeerFrame(append_result=result), connection_id=connection_id)

    def may_campaign(self) -> bool:
        """See EngineHost: ask first, raise the term only when a majority would vote for this node."""
        now_ns = self._clock.monotonic_ns()
        if self._node_id not in self._voters or self._halted or self._disk_hangs(now_ns):
            return False
        if not self._others:
            return True
        needed = (len(self._others) + 1) // 2
        round_ns = self._config.campaign_round_ms * NS_PER_MS
        asked = self._asked
        if asked is not None and now_ns - asked.since_ns < round_ns:
            if len(asked.willing) >= needed:
                self._asked = None
                return True
            return False
        self._asked = _Asked(now_ns, set())
        for peer_id in self._others:
            self._send(peer_id, PeerFrame(ping=Ping(sent_ns=now_ns)))
        return False

    def apply_entry(self, index: int, term: int, command: bytes) -> object:
        """See EngineHost."""
        kind = command[:1]
        if kind == REGULAR:
            body = command[1:]
        elif kind == NO_OP or not self._guards.foreign_commands_fatal:
            body = b""
        else:
            raise AssertionError(f"log entry {index} is a command of kind {kind!r}, which this log never writes")
        if not self._guards.apply_errors_fatal:
            return self._listener.apply(index, term, body)
        try:
            return self._listener.apply(index, term, body)
        except Exception as error:
            raise AssertionError(f"log entry {index} could not be applied: {error!r}") from error

    def applied(self, index: int, term: int, value: object) -> None:
        """See EngineHost."""
        self._applied_term = term
        if not self._caught_up:
            self._check_caught_up(index)
        proposal = self._proposals.pop(index, None)
        if proposal is None:
            return
        self._proposal_bytes -= proposal.bytes
        if proposal.term == term:
            proposal.done(ProposalResult(Verdict.COMMITTED, index, value))
        else:
            proposal.done(ProposalResult(Verdict.UNKNOWN))

    def _check_caught_up(self, applied_index: int) -> None:
        """Whatever this node had applied before it stopped was committed, so a master's commit index covers it,
        once an entry of that master's own term is committed too."""
        term, commit_index = self._first_commit
        leads = self._engine.state == LEADER
        heard = term == self._engine.term and applied_index >= commit_index
        self._caught_up = self._applied_term == self._engine.term and (leads or heard)

    def became_leader(self) -> None:
        """See EngineHost."""
        self._lease.reset()
        self._handover.clear()
        self._asked = None
        self._held = None
        self._next_sync_ns = 0
        for peer in self._peers.values():
            peer.rewound_ns = 0

    # -- sending and receiving

    def _peer(self, peer_id: str) -> _Peer:
        peer = self._peers.get(peer_id)
        if peer is None:
            peer = self._peers[peer_id] = _Peer()
        return peer

    def _send(self, peer_id: str, frame: PeerFrame, *, connection_id: int | None = None) -> bool:
        peer = self._peer(peer_id)
        if not peer.connected:
            return False
        if connection_id is None:
            connection_id = peer.connection_id
        return self._network.send(peer_id, self._envelope.seal(frame, peer_id, self._engine.term, connection_id))

    def peer_connected(self, peer_id: str) -> None:
        """See ReplicatedLog."""
        self._stirred = True
        peer = self._peer(peer_id)
        if peer.connected:
            self.peer_disconnected(peer_id)
        peer.connected = True
        peer.connection_id = self._random.getrandbits(63) | 1
        peer.rewound_ns = 0
        self._engine.connected(peer_id)

    def peer_disconnected(self, peer_id: str) -> None:
        """See ReplicatedLog."""
        self._stirred = True
        peer = self._peer(peer_id)
        if not peer.connected:
            return
        peer.connected = False
        self._engine.disconnected(peer_id)
        if self._held is not None and self._held.leader_id == peer_id:
            self._held = None

    def receive(self, peer_id: str, frame: PeerFrame) -> None:
        """See ReplicatedLog."""
        if not self._running:
            return
        if self._envelope.refuses(peer_id, frame):
            return
        self._peer(peer_id).last_heard_ns = self._clock.monotonic_ns()
        self._stirred = True
        self._guarded(lambda: self._take(peer_id, frame))
        self._tell_role()

    def _take(self, peer_id: str, frame: PeerFrame) -> None:
        engine = self._engine
        kind = frame.WhichOneof("body")
        if kind == "request_vote":
            self._on_request_vote(peer_id, frame)
            return
        if kind == "pong":
            self._on_pong(peer_id, frame)
        if frame.term > engine.term and self._guards.higher_term_obeyed and (peer_id in self._voters or self._joining):
            # Steps down and grants nothing: no log is behind an empty one.
            engine.deliver(
                peer_id, {"type": "request_vote", "term": frame.term, "last_log_index": -1, "last_log_term": -1}
            )
        if kind == "append_entries":
            self._on_append(peer_id, frame)
        elif kind == "append_result":
            self._on_append_result(peer_id, frame)
        elif kind == "vote":
            self._on_vote(peer_id, frame)
        elif kind == "ping":
            self._on_ping(peer_id, frame)
        elif kind == "timeout_now":
            self._on_timeout_now(peer_id, frame)
        elif kind == "sync":
            self._on_sync(peer_id, frame)
        elif kind == "sync_reply":
            self._on_sync_reply(peer_id, frame)
        elif kind == "checkpoint_needed" and frame.term == engine.term and engine.leader_id == peer_id:
            self._listener.checkpoint_needed(peer_id, frame.checkpoint_needed.applied_index)

    def _on_append(self, peer_id: str, frame: PeerFrame) -> None:
        engine = self._engine
        append = frame.append_entries
        if frame.term < engine.term:
            # The envelope of the answer tells it our term.
            self._send(
                peer_id,
                PeerFrame(append_result=AppendResult(echo_sent_ns=append.sent_ns)),
                connection_id=frame.connection_id,
            )
            return
        if self._halted:
            self._leader_heard_ns = self._clock.monotonic_ns()
            engine.deliver(peer_id, {"type": "append_entries", "term": frame.term, "commit_index": engine.commit_index})
            return
        if engine.state == LEADER and frame.term == engine.term:
            raise ImpossibleMessageError(f"{peer_id} leads term {frame.term}, and so do we")
        self._leader_heard_ns = self._clock.monotonic_ns()
        self._asked = None
        if not self._caught_up:
            if self._first_commit[0] != frame.term:
                self._first_commit = (frame.term, append.commit_index)
            if engine.term == frame.term:
                self._check_caught_up(engine.applied_index)
        judgement = judge(frame.term, append, self._journal, engine.commit_index, self._guards)
        if self._held is not None and (self._held.term != frame.term or self._held.leader_id != peer_id):
            self._held = None
        self._answering = (peer_id, append.sent_ns, frame.connection_id)
        try:
            if judgement.hand_on is not None:
                engine.deliver(peer_id, judgement.hand_on)
            if judgement.next_index:
                self._answer(peer_id, judgement.next_index, judgement.success, judgement.reset)
            elif not append.HasField("previous_index"):
                # The master has no entry for us to follow on: it learns where we stand, perhaps with a checkpoint.
                self._answer(peer_id, engine.commit_index + 1, success=False, reset=True)
        finally:
            self._answering = None
        self._start_sync()

    def _on_append_result(self, peer_id: str, frame: PeerFrame) -> None:
        engine = self._engine
        peer = self._peer(peer_id)
        result = frame.append_result
        if engine.state != LEADER:
            return
        fenced = self._guards.answers_fenced
        if fenced and (frame.term != engine.term or frame.connection_id != peer.connection_id):
            return
        now_ns = self._clock.monotonic_ns()
        if peer_id in self._voters:
            self._lease.note(peer_id, result.echo_sent_ns if self._guards.lease_from_sending else now_ns)
        rewinds = result.reset and result.echo_sent_ns > peer.rewound_ns
        if rewinds:
            peer.rewound_ns = now_ns
        if result.success and result.next_index > self._journal.last_index + 1:
            raise ImpossibleMessageError(
                f"{peer_id} acknowledges up to {result.next_index - 1}, the log ends at {self._journal.last_index}"
            )
        engine.deliver_answer(
            peer_id,
            {
                "type": "next_node_idx",
                "next_node_idx": result.next_index,
                "reset": result.reset,
                "success": result.success,
            },
            rewinds=rewinds,
        )

    def _would_refuse(self, now_ns: int) -> bool:
        """Whether a vote would be refused: a live master is known, or this node has just started."""
        timeout_ns = self._config.election_timeout_ms_min * NS_PER_MS
        if self._engine.state == LEADER:
            return self.lease_held()
        if self._guards.votes_sticky and self._leader_heard_ns and now_ns - self._leader_heard_ns < timeout_ns:
            return True
        return self._guards.starts_silent and len(self._voters) > 1 and now_ns - self._started_ns < timeout_ns

    def _on_request_vote(self, peer_id: str, frame: PeerFrame) -> None:
        # A newcomer knows no members yet. It votes all the same, for a log that is not behind its own: the candidate
        # counts it only if it was added, and might otherwise never get the majority to tell the newcomer so.
        newcomer = self._joining and not self._voters
        if self._halted or not (newcomer or {peer_id, self._node_id} <= set(self._voters)):
            return
        request = frame.request_vote
        now_ns = self._clock.monotonic_ns()
        if not request.transfer and self._would_refuse(now_ns):
            return
        self._engine.deliver(
            peer_id,
            {
                "type": "request_vote",
                "term": frame.term,
                "last_log_index": request.last_log_index,
                "last_log_term": request.last_log_term,
            },
        )

    def _on_vote(self, peer_id: str, frame: PeerFrame) -> None:
        engine = self._engine
        if engine.state != CANDIDATE or frame.term != engine.term or not frame.vote.granted:
            return
        if self._guards.votes_counted_once:
            if peer_id not in self._voters:
                return
            if self._votes_term != engine.term:
                self._votes_term, self._votes = engine.term, set()
            if peer_id in self._votes:
                return
            self._votes.add(peer_id)
        engine.deliver(peer_id, {"type": "response_vote", "term": frame.term})

    def _on_ping(self, peer_id: str, frame: PeerFrame) -> None:
        now_ns = self._clock.monotonic_ns()
        pong = Pong(
            echo_sent_ns=frame.ping.sent_ns,
            clock_ms=self._clock.wall_ms(),
            hears_master=self._would_refuse(now_ns) or bool(self._halted),
            last_log_index=self._journal.last_index,
            last_log_term=self._journal.last_term,
        )
        self._send(peer_id, PeerFrame(pong=pong))

    def _on_pong(self, peer_id: str, frame: PeerFrame) -> None:
        pong = frame.pong
        asked = self._asked
        if asked is None or peer_id not in self._others or pong.echo_sent_ns < asked.since_ns or pong.hears_master:
            return
        if (pong.last_log_term, pong.last_log_index) <= (self._journal.last_term, self._journal.last_index):
            asked.willing.add(peer_id)

    def _on_timeout_now(self, peer_id: str, frame: PeerFrame) -> None:
        engine = self._engine
        if frame.term != engine.term or engine.leader_id != peer_id or self._halted:
            return
        if self._journal.durable_index < self._journal.last_index:
            return
        self._transfer_term = engine.term + 1
        engine.deliver(peer_id, {"type": "timeout_now", "term": frame.term})

    # -- the 50 ms sync

    def _send_sync(self, now_ns: int) -> None:
        if now_ns < self._next_sync_ns:
            return
        self._next_sync_ns = now_ns + self._config.append_period_ms * NS_PER_MS
        for peer_id in sorted(self._peers):
            if self._peers[peer_id].connected:
                frame = self._listener.sync_out(peer_id)
                if frame is not None:
                    frame.sync.sent_ns = now_ns
                    self._send(peer_id, frame)

    def _on_sync(self, peer_id: str, frame: PeerFrame) -> None:
        engine = self._engine
        if frame.term != engine.term or engine.leader_id != peer_id or engine.state == LEADER:
            return
        reply = self._listener.sync_in(peer_id, frame)
        if reply is not None:
            reply.sync_reply.clock_ms = self._clock.wall_ms()
            self._send(peer_id, reply, connection_id=frame.connection_id)

    def _on_sync_reply(self, peer_id: str, frame: PeerFrame) -> None:
        engine = self._engine
        peer = self._peer(peer_id)
        if engine.state != LEADER or frame.term != engine.term or frame.connection_id != peer.connection_id:
            return
        now_ns = self._clock.monotonic_ns()
        peer.synced_ns = now_ns
        round_trip_ms = (now_ns - frame.sync_reply.echo_sent_ns) / NS_PER_MS
        peer.clock_offset_ms = frame.sync_reply.clock_ms + round_trip_ms / 2 - self._clock.wall_ms()
        peer.clock_error_ms = round_trip_ms / 2 + 1
        self._listener.sync_reply_in(peer_id, frame)
        if self._handover.parks_proposals:
            self._next_sync_ns = 0

    # -- proposals

    def propose(self, command: bytes, done: Done) -> None:
        """See ReplicatedLog."""
        engine = self._engine
        config = self._config
        if not self._running or engine.state != LEADER or self._told[0] != LEADER:
            done(ProposalResult(Verdict.NOT_MASTER))
            return
        if len(command) > config.command_bytes_max:
            done(ProposalResult(Verdict.TOO_LARGE))
            return
        if self._halted or self._handover.parks_proposals:
            done(ProposalResult(Verdict.QUEUE_FULL))
            return
        if len(self._proposals) >= config.proposals_max or self._proposal_bytes >= config.proposal_bytes_max:
            done(ProposalResult(Verdict.QUEUE_FULL))
            return
        index = 0

        def append() -> None:
            nonlocal index
            index = engine.append(command)

        self._guarded(append)
        if not index:
            # A full disk took nothing; what another failure left in the journal is for the next start to find out.
            done(ProposalResult(Verdict.QUEUE_FULL if self._running else Verdict.UNKNOWN))
            return
        self._stirred = True
        self._proposals[index] = _Proposal(engine.term, len(command), done)
        self._proposal_bytes += len(command)

    def in_flight(self) -> tuple[int, int]:
        """See ReplicatedLog."""
        return len(self._proposals), self._proposal_bytes

    # -- lease and handover

    def lease_held(self) -> bool:
        """See ReplicatedLog."""
        return self.lease_until_ns() > self._clock.monotonic_ns()

    def lease_until_ns(self) -> int:
        """See ReplicatedLog."""
        if self._engine.state != LEADER or not self._running:
            return 0
        return self._lease.until_ns(self._others, self._clock.monotonic_ns())

    def transfer(self, target_id: str | None, done: Callable[[str | None], None]) -> None:
        """See ReplicatedLog."""
        engine = self._engine
        if engine.state != LEADER:
            done("this node is not the master")
            return
        candidates = [p for p in self._others if self._peer(p).connected]
        if target_id is not None and target_id not in candidates:
            done(f"{target_id} is not a connected member")
            return
        if not candidates:
            done("no other member is connected")
            return
        self._stirred = True
        target = target_id or max(candidates, key=lambda peer: (engine.match_index(peer), peer))
        if not self._handover.begin(target, engine.term, self._clock.monotonic_ns(), done):
            done("a handover is under way")
            return
        self._next_sync_ns = 0

    def _drive_handover(self, now_ns: int) -> None:
        engine = self._engine
        target = self._handover.target
        if target is None:
            return
        caught_up = (
            engine.match_index(target) == self._journal.last_index
            and engine.applied_index == self._journal.last_index
            and not self._proposals
            and self._listener.handover_ready(target)
        )
        send = self._handover.step(
            now_ns, leading=engine.state == LEADER, term=engine.term, leader_id=engine.leader_id, caught_up=caught_up
        )
        if self._lease.given_up and not self._handover.lease_given_up and engine.state == LEADER:
            # Nobody took over in time, but the request to may still be on its way: leading on in this term could
            # make two masters. Stand down, and let an election decide.
            engine.step_down()
            return
        self._lease.given_up = self._handover.lease_given_up
        if send:
            engine.send_timeout_now(target)

    # -- members, checkpoints, status

    def set_members(self, members: Sequence[Member]) -> None:
        """See ReplicatedLog."""
        self._members = tuple(members)
        self._voters = tuple(sorted(m.node_id for m in members))
        self._others = tuple(v for v in self._voters if v != self._node_id)
        self._stirred = True
        self._engine.set_voters(self._voters)
        if self._running:
            self._announce_members()
        if self._node_id not in self._voters and self._engine.state == LEADER:
            self._engine.step_down()

    def _announce_members(self) -> None:
        self._network.set_peers({m.node_id: m.peer_address for m in self._members if m.node_id != self._node_id})

    def members(self) -> Sequence[Member]:
        """See ReplicatedLog."""
        return self._members

    def entries_after(self, index: int) -> int:
        """See ReplicatedLog."""
        return self._journal.bytes_after(max(index, self._journal.base_index))

    def checkpointed(self, index: int, term: int) -> None:
        """See ReplicatedLog. A tail below the checkpoint stays for slaves that are only a little behind."""
        journal = self._journal
        low, high = journal.base_index, index
        covered = journal.bytes_after(index)
        while low < high:
            middle = (low + high) // 2
            if journal.bytes_after(middle) - covered <= self._config.journal_tail_bytes_max:
                high = middle
            else:
                low = middle + 1
        self._stirred = True
        if low > journal.base_index:
            self._guarded(lambda: journal.compact(low, journal.term_at(low)))

    def _known_master(self, now_ns: int) -> str | None:
        """The leader of this term, unless it has been silent for longer than an election takes to begin."""
        silent_ns = now_ns - self._leader_heard_ns
        if self._engine.state != LEADER and silent_ns > self._config.election_timeout_ms_max * NS_PER_MS:
            return None
        return self._engine.leader_id

    def status(self) -> LogStatus:
        """See ReplicatedLog."""
        engine = self._engine
        now_ns = self._clock.monotonic_ns()
        if engine.state == LEADER:
            role = Role.MASTER
        elif self._node_id not in self._voters:
            role = Role.LEARNER
        else:
            role = Role.CANDIDATE if engine.state == CANDIDATE else Role.SLAVE
        peers = {
            peer_id: PeerProgress(
                connected=peer.connected,
                match_index=engine.match_index(peer_id) if role is Role.MASTER else 0,
                sync_age_ms=(now_ns - peer.synced_ns) // NS_PER_MS if peer.synced_ns else 0,
                clock_offset_ms=peer.clock_offset_ms,
                clock_error_ms=peer.clock_error_ms,
            )
            for peer_id, peer in sorted(self._peers.items())
            if peer_id in self._others or peer.connected
        }
        return LogStatus(
            role=role,
            term=engine.term,
            master_id=self._known_master(now_ns),
            first_index=self._journal.first_index,
            last_index=self._journal.last_index,
            commit_index=engine.commit_index,
            applied_index=engine.applied_index,
            lease_held=self.lease_held(),
            peers=peers,
            halted=self._halted,
            caught_up=self._caught_up,
        )
