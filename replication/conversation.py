"""The exchange of frames with peers: translates between frames and pysyncobj's messages, and guards both directions.

Owns the peers and their connections, and the envelope of every frame. The guards stand between the two sides:
`judge.judge` checks entries, fences drop stale answers, a question precedes each election, each vote counts once, and
acknowledgements wait for the disk.

Invariants:
- A frame has no effect if it comes from another cluster, an earlier start or an earlier connection, or twice.
- Nothing is acknowledged before it is on this node's stable storage.
- Once the journal has failed this node takes in only what a handover needs: no term, no entry, no question for a vote.

Only raft.py creates one, and sets `engine` before the first call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tickwheel.proto.peer_pb2 import (
    AppendEntries,
    AppendResult,
    CheckpointNeeded,
    PeerFrame,
    Ping,
    Pong,
    RequestVote,
    TimeoutNow,
    Vote,
)
from tickwheel.replication.campaign import Campaign, Lateness, Next
from tickwheel.replication.config import RaftConfig
from tickwheel.replication.entries import Voters
from tickwheel.replication.frames import Envelope
from tickwheel.replication.guards import Guards
from tickwheel.replication.handover import Handover
from tickwheel.replication.journal import Entry, Journal
from tickwheel.replication.judge import ImpossibleMessageError, check_readable, judge
from tickwheel.replication.lease import Lease
from tickwheel.replication.log import LogListener
from tickwheel.replication.plausible import ImplausibleFrameError, check_echo, check_frame
from tickwheel.replication.ports import NS_PER_MS, Clock, Network, Random
from tickwheel.replication.pysyncobj_seam import CANDIDATE, FOLLOWER, LEADER, Engine, Message
from tickwheel.replication.stable_storage import StableStorage

BESIDE = frozenset(
    {"clock_ask", "clock_answer", "bundle_ask", "bundle_piece", "record_ask", "record_answer", "founding"}
)
"""Frames outside the log, for `beside_in`. A higher term in them is obeyed like in any other frame."""
CLOCK = frozenset({"clock_ask", "clock_answer"})
"""Those among them about the time: what they change there the node sees by itself."""
NEVER_NS = 1 << 63


@dataclass(slots=True)
class Peer:
    """State of one peer. Times are monotonic_ns of this node, 0 for never."""

    connected: bool = False
    connection_id: int = 0
    last_heard_ns: int = 0
    rewound_ns: int = 0
    checkpoint_told_ns: int = 0
    sync_answered_ns: int = 0


class Conversation:
    """One node's exchange with all its peers; implements EnginePeers (pysyncobj_seam.py). Methods named `_on_*` take
    one kind of frame."""

    engine: Engine

    def __init__(
        self,
        config: RaftConfig,
        guards: Guards,
        clock: Clock,
        network: Network,
        random: Random,
        listener: LogListener,
        journal: Journal,
        envelope: Envelope,
        *,
        voters: Voters,
        lease: Lease,
        handover: Handover,
        storage: StableStorage,
        caught_up: CaughtUp,
        joining: bool,
    ) -> None:
        self._config = config
        self._guards = guards
        self._clock = clock
        self._network = network
        self._random = random
        self._listener = listener
        self._journal = journal
        self._envelope = envelope
        self._voters = voters
        self._lease = lease
        self._handover = handover
        self._storage = storage
        self._caught_up = caught_up
        self._joining = joining
        self._owed = Acknowledgement(config.answer_within_ms * NS_PER_MS)
        self._campaign = Campaign(config.campaign_round_ms * NS_PER_MS)
        self._lateness = Lateness(config, config.election_timeout_ms_min)
        """Of the master's frames."""
        self._answers_lateness = Lateness(config, config.fallback_ms)
        """As master: of the answers of a majority."""
        self._answering: tuple[str, int, int] | None = None
        """The append_entries being handled: (sender, its `sent_ns`, connection id)."""
        self._transfer_term = 0
        self._next_sync_ns = 1
        self.running = False
        """Whether this node takes part in the log: else nothing is sent, and no frame has an effect."""
        self.peers: dict[str, Peer] = {}
        self.master_heard_ns = 0
        self._master_left = False
        """The connection to the master has broken since it was last heard."""
        self._lease_over_ns = 0
        """How long after `master_heard_ns` the lease of that master is over for certain."""
        self.heard_commit_index = 0
        """The highest commit index that a peer has reported: entries up to it are committed."""
        self.started_ns = 0
        self.succeeded_by: tuple[int, str] | None = None
        """Term and id of the master that followed this node after its journal had failed: a term that this node cannot
        store, so it does not join it."""

    # -- connections

    def peer(self, peer_id: str) -> Peer:
        """The state of this peer, created at its first use."""
        peer = self.peers.get(peer_id)
        if peer is None:
            peer = self.peers[peer_id] = Peer()
        return peer

    def connected(self, peer_id: str) -> None:
        """A new connection is up: frames and answers of an earlier one no longer count."""
        peer = self.peer(peer_id)
        if peer.connected:
            self.disconnected(peer_id)
        peer.connected = True
        peer.connection_id = self._random.getrandbits(63) | 1
        peer.rewound_ns = 0
        self.engine.connected(peer_id)

    def disconnected(self, peer_id: str) -> None:
        """Idempotent."""
        peer = self.peer(peer_id)
        if not peer.connected:
            return
        peer.connected = False
        self.engine.disconnected(peer_id)
        self._owed.hung_up(peer_id)
        if self.engine.state != LEADER and self.engine.leader_id == peer_id and self._guards.votes_sticky:
            self._master_left = True
            self.engine.advance_election(self.master_heard_ns + self._lease_over_ns)

    def send(self, peer_id: str, frame: PeerFrame, *, connection_id: int | None = None) -> bool:
        """Send a frame; False if it could not be queued. `connection_id`: of the connection that it answers."""
        peer = self.peer(peer_id)
        if not (self.running and peer.connected):
            return False
        if connection_id is None:
            connection_id = peer.connection_id
        return self._network.send(peer_id, self._envelope.seal(frame, peer_id, self.engine.term, connection_id))

    # -- roles and time

    def leads(self) -> None:
        """This node has become master."""
        self._campaign.end()
        self._owed.forget()
        self.sync_now()
        for peer in self.peers.values():
            peer.rewound_ns = 0

    def term_changed(self) -> None:
        """Drop the acknowledgement that is owed to the master of an earlier term."""
        self._owed.keep(self.engine.term)

    def halted(self) -> None:
        """The disk is full or has failed: nothing will be acknowledged."""
        self._owed.forget()

    def wanted_ns(self) -> int:
        """The monotonic_ns at which an answer or a sync is due; NEVER_NS for none."""
        until_ns = self._owed.wanted_ns() or NEVER_NS
        return min(until_ns, self._next_sync_ns) if self.engine.state == LEADER else until_ns

    def round_over_ns(self) -> int:
        """The monotonic_ns at which the current round of pre-vote questions ends; 0 if there is none."""
        return self._campaign.wanted_ns()

    def known_master(self, now_ns: int) -> str | None:
        """The leader of this term; None if it has been silent for `election_timeout_ms_max`."""
        silent_ns = now_ns - self.master_heard_ns
        if self.engine.state != LEADER and silent_ns > self._config.election_timeout_ms_max * NS_PER_MS:
            return None
        return self.engine.leader_id

    # -- acknowledgements

    def entries_durable(self) -> None:
        """An fsync of the journal has ended: send the acknowledgement that waited for it."""
        self._owed.keep(self.engine.term)
        self._say(self._owed.entries_durable(self._journal.durable_index, self._clock.monotonic_ns()))

    def answer_overdue(self, now_ns: int) -> None:
        """Answer a master that waits for a slow disk, so that it does not take this node for dead."""
        self._owed.keep(self.engine.term)
        self._say(self._owed.overdue(self._journal.durable_index, now_ns))

    def _say(self, answer: Answer | None) -> None:
        if answer is not None:
            frame = PeerFrame(append_result=answer.result)
            self.send(answer.leader_id, frame, connection_id=answer.connection_id)

    # -- what pysyncobj wants to say

    def outbound(self, peer_id: str, message: Message) -> bool:
        """As `EnginePeers.outbound`."""
        kind = message["type"]
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
            return self.send(peer_id, PeerFrame(request_vote=body))
        if kind == "response_vote":
            return self.send(peer_id, PeerFrame(vote=Vote(granted=True)))
        if kind == "timeout_now":
            return self.send(peer_id, PeerFrame(timeout_now=TimeoutNow()))
        raise AssertionError(f"pysyncobj wants to send {kind}, which has no place here")

    def send_entries(
        self, peer_id: str, commit_index: int, previous: tuple[int, int] | None, entries: Sequence[Entry]
    ) -> bool:
        """As `EnginePeers.send_entries`."""
        now_ns = self._clock.monotonic_ns()
        frame = PeerFrame()
        append = frame.append_entries  # filled in place: a megabyte is copied once
        append.commit_index, append.sent_ns, append.lease_ms = commit_index, now_ns, self._config.lease_ms
        if previous is not None:
            append.previous_index, append.previous_term = previous
            for index, term, command in entries:
                append.entries.add(command=command, index=index, term=term)
        else:
            peer = self.peer(peer_id)
            if now_ns - peer.checkpoint_told_ns >= self._config.checkpoint_hint_ms * NS_PER_MS:
                peer.checkpoint_told_ns = now_ns
                hint = CheckpointNeeded(applied_index=self._journal.base_index, applied_term=self._journal.base_term)
                self.send(peer_id, PeerFrame(checkpoint_needed=hint))
        return self.send(peer_id, frame)

    def _answer(self, peer_id: str, next_index: int, success: bool, reset: bool) -> bool:
        """Answer the append_entries being handled. A success waits until the entries are durable."""
        answering = self._answering
        echo_ns = answering[1] if answering is not None and answering[0] == peer_id else 0
        connection_id = answering[2] if answering is not None else 0
        durable = self._journal.durable_index
        if success and self._guards.durable_before_acknowledged and next_index > durable + 1:
            # The fsync begins at once and is usually quick. Only if it is slow is a sign of life sent first.
            now_ns = self._clock.monotonic_ns()
            if self._owed.owe(peer_id, self.engine.term, connection_id, next_index, echo_ns, now_ns):
                return True
            success, next_index = False, durable + 1
        result = AppendResult(next_index=next_index, success=success, reset=reset, echo_sent_ns=echo_ns)
        if reset:
            result.last_log_index = self._journal.last_index
        return self.send(peer_id, PeerFrame(append_result=result), connection_id=connection_id)

    def keeps_from_campaigning(self, now_ns: int) -> bool:
        """Whether this node must not stand for election, as its disk or its log is."""
        return self._storage.keeps_from_campaigning(now_ns) or self._lacks_committed(self._journal.last_index)

    def _lacks_committed(self, last_index: int) -> bool:
        """Whether a log that ends there lacks entries of which this node has heard that they are committed. A majority
        has them, so nobody is elected without them, unless disks of that majority have lost them since."""
        return last_index < self.heard_commit_index

    def may_campaign(self) -> bool:
        """Whether to raise the term: only once a majority has said that it would vote. Sends that question if due."""
        now_ns = self._clock.monotonic_ns()
        if not (self._voters.counts and self._listener.may_vote()):
            return False
        if self.keeps_from_campaigning(now_ns):
            return False
        others = self._voters.others
        following = self._campaign.next(others, now_ns)
        if following is Next.ASK:
            ping = Ping(
                sent_ns=now_ns,
                last_log_index=self._journal.last_index,
                last_log_term=self._journal.last_term,
                commit_index=self.engine.commit_index,
            )
            for peer_id in others:
                self.send(peer_id, PeerFrame(ping=ping))
        return following is Next.CAMPAIGN

    # -- what peers say

    def take(self, peer_id: str, frame: PeerFrame) -> bool:
        """Act on a frame. False: it has no effect or repeats what is known, so no tick is needed for it, unless it
        changed the role. Raises ImplausibleFrameError for numbers that cannot be true."""
        engine = self.engine
        check_frame(frame, engine.term)
        if self._envelope.refuses(peer_id, frame):
            return False
        self.peer(peer_id).last_heard_ns = self._clock.monotonic_ns()
        kind = frame.WhichOneof("body")
        if self._storage.failed:
            if frame.term > engine.term and kind in ("append_entries", "sync"):
                self.succeeded_by = frame.term, peer_id
            elif kind == "append_result":
                self._on_append_result(peer_id, frame)
            elif kind == "sync_reply":
                self._on_sync_reply(peer_id, frame)
            return True
        if kind == "request_vote":
            self._on_request_vote(peer_id, frame)
            return True
        if kind == "pong":
            self._on_pong(peer_id, frame)
        obeyed = peer_id in self._voters.ids or self._joining
        if frame.term > engine.term and self._guards.higher_term_obeyed and obeyed:
            # A vote request with an empty log: the engine adopts the term and grants no vote.
            engine.deliver(
                peer_id, {"type": "request_vote", "term": frame.term, "last_log_index": -1, "last_log_term": -1}
            )
        if kind == "append_entries":
            return self._on_append(peer_id, frame)
        if kind == "append_result":
            return self._on_append_result(peer_id, frame)
        if kind == "vote":
            self._on_vote(peer_id, frame)
        elif kind == "ping":
            self._on_ping(peer_id, frame)
        elif kind == "timeout_now":
            self._on_timeout_now(peer_id, frame)
        elif kind == "sync":
            self._on_sync(peer_id, frame)
            return False
        elif kind == "sync_reply":
            self._on_sync_reply(peer_id, frame)
            return self._handover.target is not None
        elif kind == "checkpoint_needed" and frame.term == engine.term and engine.leader_id == peer_id:
            self._listener.checkpoint_needed(peer_id, frame.checkpoint_needed.applied_index)
        elif kind in BESIDE:
            answer = self._listener.beside_in(peer_id, frame)
            if answer is not None:
                self.send(peer_id, answer)
            return kind not in CLOCK
        return True

    def _on_append(self, peer_id: str, frame: PeerFrame) -> bool:
        engine = self.engine
        append = frame.append_entries
        if frame.term < engine.term:
            # The envelope of the answer tells the sender our term.
            self.send(
                peer_id,
                PeerFrame(append_result=AppendResult(echo_sent_ns=append.sent_ns)),
                connection_id=frame.connection_id,
            )
            return False
        self._hears_committed(append.commit_index)
        if self._storage.halted:
            self._hears_master(append, self._clock.monotonic_ns())
            engine.deliver(peer_id, {"type": "append_entries", "term": frame.term, "commit_index": engine.commit_index})
            return True
        if engine.state == LEADER and frame.term == engine.term:
            raise ImpossibleMessageError(f"{peer_id} leads term {frame.term}, and so do we")
        now_ns = self._clock.monotonic_ns()
        if frame.term == engine.term and engine.leader_id == peer_id:
            self._lateness.note(now_ns - self.master_heard_ns, now_ns)
        self._hears_master(append, now_ns)
        self._campaign.end()
        self._caught_up.heard(frame.term, append.commit_index)
        if engine.term == frame.term:
            self._caught_up.look(engine.term, engine.applied_index, leads=False)
        commit_index = engine.commit_index
        self._owed.keep(frame.term, peer_id)
        self._answering = (peer_id, append.sent_ns, frame.connection_id)
        try:
            if self._repeats(peer_id, frame):
                engine.master_lives(self._lateness.added_ns(now_ns))
                self._answer(peer_id, append.previous_index + 1, success=True, reset=False)
            else:
                self._take_append(peer_id, frame)
        finally:
            self._answering = None
        self._storage.fsync()
        return bool(append.entries) or engine.commit_index != commit_index

    def _repeats(self, peer_id: str, frame: PeerFrame) -> bool:
        """Whether an append_entries says what this slave knows: its master, the end of its log, what is committed."""
        engine, journal, append = self.engine, self._journal, frame.append_entries
        return (
            not append.entries
            and append.HasField("previous_index")
            and append.previous_index == journal.last_index
            and append.previous_term == journal.last_term
            and append.commit_index == engine.commit_index
            and frame.term == engine.term
            and engine.leader_id == peer_id
            and engine.state == FOLLOWER
        )

    def _take_append(self, peer_id: str, frame: PeerFrame) -> None:
        engine, append = self.engine, frame.append_entries
        judgement = judge(frame.term, append, self._journal, engine.commit_index, self._guards)
        if judgement.hand_on is not None:
            check_readable(judgement.hand_on.get("entries", ()), self._listener.problem_of)
            engine.deliver(peer_id, judgement.hand_on)
            engine.prolong_election(self._lateness.added_ns(self.master_heard_ns))
        if judgement.next_index:
            self._answer(peer_id, judgement.next_index, judgement.success, judgement.reset)
        elif not append.HasField("previous_index"):
            # The master no longer holds our next entry. Tell it where we stand: a checkpoint may have moved us on.
            self._answer(peer_id, engine.commit_index + 1, success=False, reset=True)

    def _hears_committed(self, commit_index: int) -> None:
        self.heard_commit_index = max(self.heard_commit_index, commit_index)

    def _hears_master(self, append: AppendEntries, now_ns: int) -> None:
        self.master_heard_ns, self._master_left = now_ns, False
        self._lease_over_ns = self._config.lease_over_ms(append.lease_ms) * NS_PER_MS

    def _on_append_result(self, peer_id: str, frame: PeerFrame) -> bool:
        engine = self.engine
        peer = self.peer(peer_id)
        result = frame.append_result
        if engine.state != LEADER:
            return False
        fenced = self._guards.answers_fenced
        if fenced and (frame.term != engine.term or frame.connection_id != peer.connection_id):
            return False
        now_ns = self._clock.monotonic_ns()
        check_echo(result.echo_sent_ns, now_ns)
        if result.success and result.next_index > self._journal.last_index + 1:
            raise ImplausibleFrameError(
                f"it acknowledges up to {result.next_index - 1}, the log ends at {self._journal.last_index}"
            )
        acknowledged = engine.match_index(peer_id)
        if result.HasField("last_log_index") and result.last_log_index < acknowledged:
            engine.forget_match(peer_id)
            self._listener.forgot(peer_id, result.last_log_index, acknowledged)
        leased = self._lease.until_ns(self._voters.others, now_ns) > now_ns
        if peer_id in self._voters.ids:
            self._lease.note(peer_id, result.echo_sent_ns if self._guards.lease_from_sending else now_ns)
        self.paused(engine.silence_ns(), now_ns)
        rewinds = result.reset and result.echo_sent_ns > peer.rewound_ns
        if rewinds:
            peer.rewound_ns = now_ns
        news = engine.deliver_answer(
            peer_id,
            {
                "type": "next_node_idx",
                "next_node_idx": result.next_index,
                "reset": result.reset,
                "success": result.success,
            },
            rewinds=rewinds,
        )
        return news or not leased

    def paused(self, gap_ns: int, now_ns: int) -> None:
        """As master: a majority was silent for so long, or this node stood still."""
        self._answers_lateness.note(gap_ns, now_ns)
        self.engine.wait_for_answers(self._answers_lateness.added_ns(now_ns))

    # -- elections

    def _would_refuse(self, now_ns: int) -> bool:
        """Whether this node would refuse a vote: it knows a live master, has just started, or may not vote."""
        timeout_ns = self._config.election_timeout_ms_min * NS_PER_MS
        if self.engine.state == LEADER:
            return self._lease.until_ns(self._voters.others, now_ns) > now_ns
        if not self._listener.may_vote():
            return True
        # Even a master that only lost its connections has no lease any more after that.
        sticky_ns = self._lease_over_ns if self._master_left else timeout_ns
        if self._guards.votes_sticky and self.master_heard_ns and now_ns - self.master_heard_ns < sticky_ns:
            return True
        alone = self._voters.counts and not self._voters.others
        return self._guards.starts_silent and not alone and now_ns - self.started_ns < timeout_ns

    def _on_request_vote(self, peer_id: str, frame: PeerFrame) -> None:
        # Neither side needs to be a voter by this node's log: the entry that makes it one may not have arrived here.
        # The candidate's own log decides which votes it counts.
        if self._storage.halted or not self._listener.may_vote():
            return
        request = frame.request_vote
        if not request.transfer and self._would_refuse(self._clock.monotonic_ns()):
            return
        last_index, last_term = request.last_log_index, request.last_log_term
        if self._lacks_committed(last_index):
            last_index = last_term = -1  # the engine adopts the term and grants no vote
        self.engine.deliver(
            peer_id,
            {
                "type": "request_vote",
                "term": frame.term,
                "last_log_index": last_index,
                "last_log_term": last_term,
            },
        )

    def _on_vote(self, peer_id: str, frame: PeerFrame) -> None:
        engine = self.engine
        if engine.state != CANDIDATE or frame.term != engine.term or not frame.vote.granted:
            return
        if self._guards.votes_counted_once and not (
            peer_id in self._voters.ids and self._campaign.is_new(peer_id, engine.term)
        ):
            return
        engine.deliver(peer_id, {"type": "response_vote", "term": frame.term})

    def _on_ping(self, peer_id: str, frame: PeerFrame) -> None:
        now_ns = self._clock.monotonic_ns()
        ping = frame.ping
        self._hears_committed(ping.commit_index)
        refuses = self._would_refuse(now_ns) or bool(self._storage.halted)
        if ping.HasField("last_log_index") and self._lacks_committed(ping.last_log_index):
            refuses = True
        if not refuses and ping.HasField("last_log_index"):
            own = (-self._journal.last_term, -self._journal.last_index, self.engine.node_id)
            if own < (-ping.last_log_term, -ping.last_log_index, peer_id):
                refuses = self._campaign.insists(now_ns)
            elif self._campaign.gives_way(now_ns):
                self.engine.postpone_election(now_ns + self._config.campaign_round_ms * NS_PER_MS)
        pong = Pong(
            echo_sent_ns=ping.sent_ns,
            clock_ms=self._clock.wall_ms(),
            hears_master=refuses,
            last_log_index=self._journal.last_index,
            last_log_term=self._journal.last_term,
            commit_index=self.engine.commit_index,
        )
        self.send(peer_id, PeerFrame(pong=pong))

    def _on_pong(self, peer_id: str, frame: PeerFrame) -> None:
        pong = frame.pong
        if pong.echo_sent_ns > self._clock.monotonic_ns():
            return  # asked before this machine's last boot
        self._hears_committed(pong.commit_index)
        behind = (pong.last_log_term, pong.last_log_index) <= (self._journal.last_term, self._journal.last_index)
        self._campaign.answered(peer_id, pong.echo_sent_ns, behind and not pong.hears_master)

    def _on_timeout_now(self, peer_id: str, frame: PeerFrame) -> None:
        engine = self.engine
        if frame.term != engine.term or engine.leader_id != peer_id or self._storage.halted:
            return
        if not self._listener.may_vote():
            return
        if self._journal.durable_index < self._journal.last_index:
            return
        self._transfer_term = engine.term + 1
        engine.deliver(peer_id, {"type": "timeout_now", "term": frame.term})

    # -- the 50 ms sync

    def sync_now(self) -> None:
        """Send the next sync with the next tick instead of at the end of the period."""
        self._next_sync_ns = 1

    def sync_due(self, now_ns: int) -> bool:
        """Whether `send_sync` would send one now."""
        return now_ns >= self._next_sync_ns

    def send_sync(self, now_ns: int) -> None:
        """Master only: send a sync to every connected peer, once every `append_period_ms`."""
        if not self.sync_due(now_ns):
            return
        self._next_sync_ns = now_ns + self._config.append_period_ms * NS_PER_MS
        for peer_id in sorted(self.peers):
            if self.peers[peer_id].connected:
                frame = self._listener.sync_out(peer_id)
                if frame is not None:
                    frame.sync.sent_ns = now_ns
                    if not self.send(peer_id, frame):
                        self._listener.sync_unsent(peer_id)

    def _on_sync(self, peer_id: str, frame: PeerFrame) -> None:
        engine = self.engine
        # Only the master of a term sends syncs in it. After a start this may be the first that is heard of that master,
        # and it has all leases: the next one would go on where this one ended.
        if frame.term != engine.term or engine.leader_id not in (None, peer_id) or engine.state == LEADER:
            return
        reply = self._listener.sync_in(peer_id, frame)
        if reply is not None:
            self.send(peer_id, reply, connection_id=frame.connection_id)

    def _on_sync_reply(self, peer_id: str, frame: PeerFrame) -> None:
        engine = self.engine
        peer = self.peer(peer_id)
        if engine.state != LEADER or frame.term != engine.term or frame.connection_id != peer.connection_id:
            return
        now_ns = self._clock.monotonic_ns()
        check_echo(frame.sync_reply.echo_sent_ns, now_ns)
        peer.sync_answered_ns = now_ns
        self._listener.sync_reply_in(peer_id, frame)
        if self._handover.parks_proposals:
            self.sync_now()


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that must be sent now."""

    leader_id: str
    connection_id: int
    result: AppendResult


@dataclass(slots=True)
class _Owed:
    leader_id: str
    term: int
    connection_id: int
    next_index: int
    echo_sent_ns: int
    silent_since_ns: int
    """Since when the master has had no answer because of this one."""


class Acknowledgement:
    """The acknowledgement that a slave owes its master until the acknowledged entries are on its disk.

    At most one is owed: a later one covers the earlier. While a slow disk delays it, the master gets an unsuccessful
    answer in between, so that it keeps its lease. This class decides what to send, and sends nothing.
    """

    def __init__(self, answer_within_ns: int) -> None:
        self._answer_within_ns = answer_within_ns
        self._owed: _Owed | None = None

    def owe(
        self, leader_id: str, term: int, connection_id: int, next_index: int, echo_sent_ns: int, now_ns: int
    ) -> bool:
        """Owe a success up to `next_index` until the disk has it. False: the master has waited too long, answer now."""
        silent_since_ns = now_ns if self._owed is None else self._owed.silent_since_ns
        overdue = now_ns - silent_since_ns >= self._answer_within_ns
        if overdue:
            silent_since_ns = now_ns
        self._owed = _Owed(leader_id, term, connection_id, next_index, echo_sent_ns, silent_since_ns)
        return not overdue

    def entries_durable(self, durable_index: int, now_ns: int) -> Answer | None:
        """Entries up to `durable_index` are durable: the success that may be sent now, if one is owed."""
        owed = self._owed
        if owed is None:
            return None
        if durable_index + 1 >= owed.next_index:
            self._owed = None
        owed.silent_since_ns = now_ns
        next_index = min(owed.next_index, durable_index + 1)
        result = AppendResult(next_index=next_index, success=True, echo_sent_ns=owed.echo_sent_ns)
        return Answer(owed.leader_id, owed.connection_id, result)

    def overdue(self, durable_index: int, now_ns: int) -> Answer | None:
        """The unsuccessful answer for a master that has waited too long: it says how far the log is durable."""
        owed = self._owed
        if owed is None or now_ns - owed.silent_since_ns < self._answer_within_ns:
            return None
        owed.silent_since_ns = now_ns
        result = AppendResult(next_index=durable_index + 1, echo_sent_ns=owed.echo_sent_ns)
        return Answer(owed.leader_id, owed.connection_id, result)

    def wanted_ns(self) -> int:
        """When `overdue` will return an answer; 0 for never."""
        return 0 if self._owed is None else self._owed.silent_since_ns + self._answer_within_ns

    def forget(self) -> None:
        """Drop the owed answer."""
        self._owed = None

    def keep(self, term: int, leader_id: str | None = None) -> None:
        """Drop the owed answer unless it is for this term and this master (None: any master)."""
        owed = self._owed
        if owed is not None and (owed.term != term or leader_id not in (None, owed.leader_id)):
            self._owed = None

    def hung_up(self, peer_id: str) -> None:
        """Drop the answer owed to this peer: its connection has ended."""
        if self._owed is not None and self._owed.leader_id == peer_id:
            self._owed = None


class CaughtUp:
    """Whether a node has, since its start, applied everything that it had applied before it stopped.

    What it had applied was committed. So the commit index of a master covers that, once an entry of the master's own
    term is committed too. Until then the node's cursor may be behind one that it has shown to clients before. `done`
    turns true once and stays true.
    """

    def __init__(self, applied_term: int) -> None:
        self._applied_term = applied_term
        self._first_heard: tuple[int, int] = (-1, 0)
        """(term, the commit index in the first append_entries of that term)."""
        self.done = False

    def heard(self, frame_term: int, commit_index: int) -> None:
        """The master of term `frame_term` has reported its commit index."""
        if not self.done and self._first_heard[0] != frame_term:
            self._first_heard = (frame_term, commit_index)

    def applied(self, entry_term: int) -> None:
        """An entry of term `entry_term` was applied."""
        self._applied_term = entry_term

    def look(self, term: int, applied_index: int, *, leads: bool) -> None:
        """Update `done`. It needs an applied entry of the current `term`, and all that its master first reported."""
        if not self.done:
            heard_term, commit_index = self._first_heard
            heard = heard_term == term and applied_index >= commit_index
            self.done = self._applied_term == term and (leads or heard)
