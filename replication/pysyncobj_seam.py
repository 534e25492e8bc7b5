"""The one file that knows pysyncobj's internals, of the one version it was read and tested with.

Owns the engine: a `SyncObj` without threads, sockets, files, pickle, or clock and randomness of its
own. It gets them from its host (raft.py), through which all messages go as dicts. What pysyncobj
reaches through module names (monotonicTime, random, createJournal, createPoller, pickle) is replaced
by names that ask for the engine entered at the moment; outside of any engine they are the stock ones.
So several nodes with clocks of their own live in one process.

Invariants:
- Every entry into pysyncobj goes through `_entered(engine)`.
- The term is never above what is on stable storage.
- The commit index never falls, and on a master never passes its own durable entries.
- The master's next index of a peer moves back only by an answer to what was sent last.
- The order of peers depends on their ids alone, never on hashing of strings.

Only raft.py and tests use this.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pysyncobj.serializer
import pysyncobj.syncobj
from pysyncobj import SyncObj, SyncObjConf
from pysyncobj.node import Node
from pysyncobj.transport import Transport
from pysyncobj.version import VERSION

from tickwheel.replication.config import RaftConfig
from tickwheel.replication.guards import Guards
from tickwheel.replication.journal_view import Journal, JournalView
from tickwheel.replication.log import ApplyLaterError
from tickwheel.replication.ports import Clock, Random
from tickwheel.replication.voters import VOTERS
from tickwheel.storage.disk import DiskFullError

VERSION_KNOWN = "0.3.17"
NS_PER_MS = 1_000_000

REGULAR = b"\x00"
NO_OP = b"\x01"

FOLLOWER, CANDIDATE, LEADER = 0, 1, 2

Message = dict[str, Any]


class UnknownVersionError(RuntimeError):
    """Another pysyncobj is installed than the one whose internals are known."""


class PickleRefusedError(RuntimeError):
    """Something inside a node wanted to pickle or unpickle."""


class EngineHost(Protocol):
    """What the engine asks of raft.py."""

    def outbound(self, peer_id: str, message: Message) -> bool:
        """Send; False if it could not be queued."""
        ...

    def may_campaign(self) -> bool:
        """Whether to raise the term now that the election timeout has passed."""
        ...

    def may_apply(self) -> bool:
        """Whether to go on applying what is committed."""
        ...

    def apply_entry(self, index: int, term: int, command: bytes) -> object: ...

    def applied(self, index: int, term: int, value: object) -> None: ...

    def became_leader(self) -> None: ...

    def voters_written(self, index: int, entry: bytes) -> None:
        """An entry that names the voters is in the journal now."""
        ...

    def entries_cut(self, index: int) -> None:
        """The journal ends before this entry now."""
        ...


def require_known_version(version: str = VERSION) -> None:
    """Refuse any other pysyncobj: the guards hold for the internals of one version."""
    if version != VERSION_KNOWN:
        raise UnknownVersionError(f"pysyncobj {VERSION_KNOWN} is needed, {version} is installed")


class PeerNode(Node):  # type: ignore[misc]
    """A peer whose place in a set is the same in every process."""

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self._place = zlib.crc32(id.encode())

    def __hash__(self) -> int:
        return self._place


_stack: list[Engine] = []


class _entered:
    """`with _entered(engine)`; a class, since generators as context managers take four times as long."""

    __slots__ = ("_engine",)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        _stack.append(self._engine)

    def __exit__(self, *_: object) -> None:
        _stack.pop()


class _NoPoller:
    def subscribe(self, *_: object) -> None: ...
    def unsubscribe(self, *_: object) -> None: ...
    def poll(self, _timeout: float) -> None: ...


class _NoDumps:
    """In the place of pysyncobj's serializer: there are no dumps."""

    def checkSerializing(self) -> tuple[int, None]:
        return 0, None

    def getTransmissionData(self, _peer: object) -> None:
        return None

    def setTransmissionData(self, _data: object) -> bool:
        return False

    def cancelTransmisstion(self, _peer: object) -> None: ...


class _RandomHere:
    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def random(self) -> float:
        return _stack[-1].random.random() if _stack else self._stock.random()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


class _PickleHere:
    """Refuses inside an engine; elsewhere in the process pysyncobj may do as it likes."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def __getattr__(self, name: str) -> Any:
        if _stack and _stack[-1].guards.pickle_refused:
            raise PickleRefusedError(f"pickle.{name} inside a node")
        return getattr(self._stock, name)


def _install() -> None:
    """Put our names into pysyncobj's modules, once per process."""
    module = pysyncobj.syncobj
    if isinstance(module.pickle, _PickleHere):
        return
    clock, journal, poller = module.monotonicTime, module.createJournal, module.createPoller
    module.monotonicTime = lambda: _stack[-1].now_s() if _stack else clock()
    module.createJournal = lambda path: _stack[-1].view if _stack else journal(path)
    module.createPoller = lambda kind: _NoPoller() if _stack else poller(kind)
    module.random = _RandomHere(module.random)
    module.pickle = _PickleHere(module.pickle)
    pysyncobj.serializer.pickle = _PickleHere(pysyncobj.serializer.pickle)


class _HostTransport(Transport):  # type: ignore[misc]
    """Hands what pysyncobj sends to the host."""

    def __init__(self, engine: Engine, self_node: Node, other_nodes: object) -> None:
        super().__init__(engine, self_node, other_nodes)
        self._engine = engine

    ready = True

    def tryGetReady(self) -> None: ...

    def send(self, node: Node, message: Message) -> bool:
        return self._engine.host.outbound(node.id, message)

    def addNode(self, node: Node) -> None: ...
    def dropNode(self, node: Node) -> None: ...
    def destroy(self) -> None: ...


@dataclass(slots=True)
class _Flight:
    """What is under way to one peer: (last index, bytes) of each message with entries."""

    messages: deque[tuple[int, int]] = field(default_factory=deque)
    bytes: int = 0
    commit_told: int = 0
    told_ns: int = 0

    def sent(self, last_index: int, size: int) -> None:
        self.messages.append((last_index, size))
        self.bytes += size

    def acknowledged(self, index: int) -> None:
        while self.messages and self.messages[0][0] <= index:
            self.bytes -= self.messages.popleft()[1]

    def clear(self) -> None:
        self.messages.clear()
        self.bytes = 0


class Engine(SyncObj):  # type: ignore[misc]
    """One node of pysyncobj, driven from outside."""

    def __init__(
        self,
        host: EngineHost,
        node_id: str,
        voters: Sequence[str],
        config: RaftConfig,
        journal: Journal,
        applied_index: int,
        clock: Clock,
        random: Random,
        guards: Guards,
    ) -> None:
        require_known_version()
        _install()
        self.host = host
        self.clock = clock
        self.random = random
        self.guards = guards
        self._config = config
        self._journal = journal
        self._ready = False
        self._ticked = False
        self._skips = guards.proposals_local and guards.dumps_refused
        """pysyncobj has no work of its own in a tick: nothing queued, nothing to dump."""
        self._commit = 0
        self._flights: dict[str, _Flight] = {}
        self._nodes: dict[str, PeerNode] = {}
        self._followers_now: list[Node] | None = None
        """Sorted; None after any change of members or connections."""
        self.view = JournalView(
            journal,
            entries_max=config.batch_entries_max,
            bytes_max=config.batch_bytes_max,
            bounded=guards.slices_bounded,
            listener=self,
        )
        conf = SyncObjConf(
            autoTick=False,
            appendEntriesPeriod=config.append_period_ms / 1000,
            raftMinTimeout=config.election_timeout_ms_min / 1000,
            raftMaxTimeout=config.election_timeout_ms_max / 1000,
            leaderFallbackTimeout=config.fallback_ms / 1000,
            connectionTimeout=max(3.5, config.election_timeout_ms_max / 1000),
            appendEntriesBatchSizeBytes=1 << 40,  # never cut: see `_send_to`
            logCompactionMinEntries=1 << 62,
            logCompactionMinTime=1 << 62,
            dynamicMembershipChange=False,
            useFork=False,
        )
        # pysyncobj looks at every attribute, our properties too, before it has set this one.
        self._SyncObj__newAppendEntriesTime = 0.0
        with _entered(self):
            super().__init__(
                PeerNode(node_id),
                [PeerNode(peer) for peer in sorted(voters) if peer != node_id],
                conf,
                nodeClass=PeerNode,
                transportClass=_HostTransport,
            )
        if guards.dumps_refused:
            self._SyncObj__serializer = _NoDumps()
        self._SyncObj__raftLastApplied = applied_index
        self._ready = True
        self._SyncObj__raftCommitIndex = max(self._commit, applied_index, journal.base_index)

    # -- what pysyncobj asks ---------------------------------------------------------------------

    def now_s(self) -> float:
        return self.clock.monotonic_ns() / 1e9

    @property
    def _SyncObj__raftCommitIndex(self) -> int:
        return self._commit

    @_SyncObj__raftCommitIndex.setter
    def _SyncObj__raftCommitIndex(self, index: int) -> None:
        if self._ready and self.guards.own_durability_counts and self.state == LEADER and index > self._commit:
            index = min(index, self._journal.durable_index)
            # An entry of an earlier term commits only below one of this term.
            if index <= self._commit or self._journal.term_at(index) != self.term:
                return
        self._commit = index

    def _SyncObj__connectedToAnyone(self) -> bool:
        if self._SyncObj__transferInProgress or not self.guards.campaign_asked_first:
            return bool(super()._SyncObj__connectedToAnyone())
        return self.host.may_campaign()

    def _SyncObj__setCurrentTerm(self, term: int, voted_for: str | None) -> None:
        # Stable storage first: on a full disk pysyncobj would go on in a term that a restart forgets.
        try:
            self.view.setCurrentTerm(term, voted_for)
        except DiskFullError:
            if self.state == CANDIDATE:
                self._SyncObj__setState(FOLLOWER)
            raise
        super()._SyncObj__setCurrentTerm(term, voted_for)

    def _checkCommandsToApply(self) -> None:
        # pysyncobj's own queue would forward, or append in a later term, what was queued in an earlier one.
        if not self.guards.proposals_local:
            super()._checkCommandsToApply()

    def _SyncObj__applyLogEntries(self) -> bool:
        started_ns, count = self.clock.monotonic_ns(), 0
        sliced = self.guards.apply_sliced
        while self.applied_index < self._commit and self.host.may_apply():
            rows = self.view.rows(
                self.applied_index + 1, min(self._config.apply_batch_entries, self._commit - self.applied_index)
            )
            for command, index, term in rows:
                try:
                    value = self.host.apply_entry(index, term, command)
                except ApplyLaterError:
                    return False
                self._SyncObj__raftLastApplied = index
                self.host.applied(index, term, value)
                count += 1
                if not self.host.may_apply():
                    return False
                spent_ns = self.clock.monotonic_ns() - started_ns
                if sliced and (
                    spent_ns >= self._config.apply_slice_ms * NS_PER_MS or count >= self._config.apply_entries_max
                ):
                    return False
        return False

    def _SyncObj__tryLogCompaction(self) -> None:
        if not self.guards.dumps_refused:
            super()._SyncObj__tryLogCompaction()

    def _SyncObj__onBecomeLeader(self) -> None:
        for flight in self._flights.values():
            flight.clear()
            flight.commit_told = 0
        self.host.became_leader()
        super()._SyncObj__onBecomeLeader()

    def _SyncObj__sendAppendEntries(self) -> None:
        self._SyncObj__newAppendEntriesTime = self.now_s() + self._config.append_period_ms / 1000
        for peer in self._followers():
            self._send_to(peer, heartbeat=True)

    def written(self, index: int, entry: bytes) -> None:
        """See ViewListener."""
        if entry[:1] == VOTERS:
            self.host.voters_written(index, entry)

    def before_cut(self, index: int) -> None:
        """See ViewListener."""
        if index <= max(self.applied_index, self._commit) and self.guards.known_entries_stripped:
            raise AssertionError(f"entry {index} would be truncated, but {self._commit} is committed")

    def cut(self, index: int) -> None:
        """See ViewListener."""
        self.host.entries_cut(index)

    # -- sending entries -------------------------------------------------------------------------

    def _followers(self) -> list[Node]:
        if self._followers_now is None:
            self._followers_now = self._connected_followers()
        return self._followers_now

    def _connected_followers(self) -> list[Node]:
        connected = self._SyncObj__connectedNodes
        peers = self._SyncObj__otherNodes | self._SyncObj__readonlyNodes
        return sorted((peer for peer in peers if peer in connected), key=lambda peer: str(peer.id))

    def _flight(self, peer_id: str) -> _Flight:
        flight = self._flights.get(peer_id)
        if flight is None:
            flight = self._flights[peer_id] = _Flight()
        return flight

    def _send_to(self, peer: Node, *, heartbeat: bool) -> None:
        journal, flight = self._journal, self._flight(peer.id)
        following = self._SyncObj__raftNextIndex
        if following[peer] <= journal.base_index:
            if heartbeat and self.host.outbound(
                peer.id, {"type": "append_entries", "term": self.term, "commit_index": self._commit, "serialized": None}
            ):
                flight.told_ns = self.clock.monotonic_ns()
            return
        while following[peer] <= journal.last_index and self._has_room(flight):
            first = following[peer]
            rows = self.view.rows(first, journal.last_index - first + 1)
            if not self._send_rows(peer, first, rows):
                return
            heartbeat = False
            following[peer] = rows[-1][1] + 1
            flight.sent(rows[-1][1], sum(len(row[0]) for row in rows))
        if heartbeat:
            self._send_rows(peer, following[peer], [])

    def _has_room(self, flight: _Flight) -> bool:
        return flight.bytes < self._config.window_bytes_max and len(flight.messages) < self._config.window_messages_max

    def _send_rows(self, peer: Node, first: int, rows: list[tuple[bytes, int, int]]) -> bool:
        message = {
            "type": "append_entries",
            "term": self.term,
            "commit_index": self._commit,
            "entries": rows,
            "prevLogIdx": first - 1,
            "prevLogTerm": self._journal.term_at(first - 1),
        }
        sent = self.host.outbound(peer.id, message)
        if sent:
            flight = self._flight(peer.id)
            flight.commit_told, flight.told_ns = self._commit, self.clock.monotonic_ns()
        return sent

    # -- what raft.py asks -----------------------------------------------------------------------

    def run_due(self) -> None:
        """One tick of pysyncobj: elections, commit, apply, heartbeats."""
        if self._nothing_due():
            return
        with _entered(self):
            self._onTick(0.0)
        self._ticked = True

    def _nothing_due(self) -> bool:
        """Whether a tick would find nothing to commit or apply, and no time over: most are like that.

        How long answers have been missing is looked at with each heartbeat.
        """
        if self._commit > self.applied_index or not self._skips or not self._ticked:
            return False
        if self.state == LEADER:
            return self._commit == self._journal.last_index and self.now_s() <= self._SyncObj__newAppendEntriesTime
        return bool(self.now_s() <= self._SyncObj__raftElectionDeadline)

    def deliver(self, peer_id: str, message: Message) -> None:
        """A message that passed the guard."""
        with _entered(self):
            self._SyncObj__onMessageReceived(self._node(peer_id), message)

    def deliver_answer(self, peer_id: str, message: Message, *, rewinds: bool) -> None:
        """A slave's answer: never moves the next index back unless `rewinds`."""
        peer = self._node(peer_id)
        following = self._SyncObj__raftNextIndex
        if self.state != LEADER or peer not in following:
            return
        before = following[peer]
        self.deliver(peer_id, message)
        if peer not in following:
            return
        flight = self._flight(peer_id)
        if rewinds and message["reset"]:
            flight.clear()
        elif self.guards.resets_fenced:
            following[peer] = max(before, following[peer])
        flight.acknowledged(self._SyncObj__raftMatchIndex[peer])

    def append(self, entry: bytes) -> int:
        """Append as master; returns the index. Raises what the journal raises."""
        index = self._journal.last_index + 1
        self.view.add(entry, index, self.term)
        return index

    def send_new(self, notice_ns: int) -> int:
        """Send what slaves lack; tell a risen commit index. Returns when a notice is due, or 0."""
        now_ns, due_ns = self.clock.monotonic_ns(), 0
        with _entered(self):
            for peer in self._followers():
                flight = self._flight(peer.id)
                self._send_to(peer, heartbeat=False)
                if flight.commit_told < self._commit:
                    if now_ns - flight.told_ns >= notice_ns:
                        self._send_to(peer, heartbeat=True)
                    else:
                        due_ns = min(due_ns or 1 << 63, flight.told_ns + notice_ns)
        return due_ns

    def connected(self, peer_id: str) -> None:
        """The peer answers: elections and entries may count on it."""
        peer = self._node(peer_id)
        self._flight(peer_id).clear()
        self._followers_now = None
        with _entered(self):
            if peer in self._SyncObj__otherNodes:
                self._SyncObj__onNodeConnected(peer)
            else:
                self._SyncObj__onReadonlyNodeConnected(peer)
                self._SyncObj__lastResponseTime[peer] = self.now_s()

    def disconnected(self, peer_id: str) -> None:
        peer = self._node(peer_id)
        self._flight(peer_id).clear()
        self._followers_now = None
        with _entered(self):
            if peer in self._SyncObj__readonlyNodes:
                self._SyncObj__onReadonlyNodeDisconnected(peer)
            else:
                self._SyncObj__onNodeDisconnected(peer)

    def set_voters(self, voters: Sequence[str]) -> None:
        """The members that count, from the log."""
        self._followers_now = None
        wanted = {PeerNode(peer) for peer in voters if peer != self.node_id}
        others, learners = self._SyncObj__otherNodes, self._SyncObj__readonlyNodes
        for peer in sorted(others - wanted, key=str):
            others.discard(peer)
            if peer in self._SyncObj__connectedNodes:
                learners.add(peer)
        for peer in sorted(wanted - others, key=str):
            learners.discard(peer)
            others.add(peer)
            self._SyncObj__raftNextIndex.setdefault(peer, self._journal.last_index + 1)
            self._SyncObj__raftMatchIndex.setdefault(peer, 0)
            self._SyncObj__lastResponseTime[peer] = self.now_s()

    def step_down(self) -> None:
        """Stop leading in this term; the peers elect by their own timers."""
        with _entered(self):
            self._SyncObj__setState(FOLLOWER)
            self._SyncObj__raftLeader = None
            self._SyncObj__raftElectionDeadline = self.now_s() + self._config.election_timeout_ms_max / 1000

    def postpone_election(self, until_ns: int) -> None:
        """After a stall: what has arrived meanwhile is read first."""
        if not self._SyncObj__transferInProgress:
            self._SyncObj__raftElectionDeadline = max(self._SyncObj__raftElectionDeadline, until_ns / 1e9)

    def send_timeout_now(self, peer_id: str) -> None:
        with _entered(self):
            self.transferLeadership(self._node(peer_id))

    def _node(self, peer_id: str) -> PeerNode:
        node = self._nodes.get(peer_id)
        if node is None:
            node = self._nodes[peer_id] = PeerNode(peer_id)
        return node

    @property
    def node_id(self) -> str:
        return str(self._SyncObj__selfNode.id)

    @property
    def state(self) -> int:
        return int(self._SyncObj__raftState)

    @property
    def term(self) -> int:
        return int(self._SyncObj__raftCurrentTerm)

    @property
    def leader_id(self) -> str | None:
        leader = self._SyncObj__raftLeader
        return None if leader is None else str(leader.id)

    @property
    def commit_index(self) -> int:
        return self._commit

    @property
    def applied_index(self) -> int:
        return int(self._SyncObj__raftLastApplied)

    @property
    def election_deadline_ns(self) -> int:
        return int(self._SyncObj__raftElectionDeadline * 1e9)

    @property
    def heartbeat_due_ns(self) -> int:
        return int(self._SyncObj__newAppendEntriesTime * 1e9)

    def match_index(self, peer_id: str) -> int:
        return int(self._SyncObj__raftMatchIndex.get(self._node(peer_id), 0))

    def learners(self) -> list[str]:
        return sorted(str(peer.id) for peer in self._SyncObj__readonlyNodes)
