"""The engine: the only file that relies on the internals of pysyncobj, of one version that was read and tested.

Owns a `SyncObj` without threads, sockets, files or pickle, and without a clock or random numbers of its own. The host
(raft.py) gives it those, and carries all messages, as dicts. pysyncobj_globals.py replaces the module globals through
which pysyncobj reaches the world. `JournalView` is the journal as pysyncobj sees it, and `AppendFeed` sends entries
in its place.

Invariants:
- Every call into pysyncobj happens within `with entered(engine)`.
- The term is never above what is on stable storage.
- The commit index never falls, and on a master never passes its own durable entries.
- The master's next index of a peer moves back only by an answer to what was sent last.
- The order of peers depends on their ids alone, never on hashing of strings.

Only raft.py and tests use this.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, overload

from pysyncobj import SyncObj, SyncObjConf
from pysyncobj.node import Node
from pysyncobj.transport import Transport
from pysyncobj.version import VERSION

from tickwheel.replication.config import RaftConfig
from tickwheel.replication.entries import VOTERS
from tickwheel.replication.guards import Guards
from tickwheel.replication.journal import Entry, Journal
from tickwheel.replication.log import ApplyLaterError
from tickwheel.replication.ports import NS_PER_MS, Clock, Random
from tickwheel.replication.pysyncobj_globals import entered, install
from tickwheel.storage.disk import DiskError, DiskFullError
from tickwheel.storage.errors import is_damage

VERSION_KNOWN = "0.3.17"

FOLLOWER, CANDIDATE, LEADER = 0, 1, 2

Message = dict[str, Any]


class WrongLibraryError(RuntimeError):
    """Another pysyncobj is installed than the one whose internals are known."""


class EnginePeers(Protocol):
    """The engine's way to the peers; conversation.py implements it."""

    def outbound(self, peer_id: str, message: Message) -> bool:
        """Send a message of pysyncobj to a peer; False if it could not be queued."""
        ...

    def send_entries(
        self, peer_id: str, commit_index: int, previous: tuple[int, int] | None, entries: Sequence[Entry]
    ) -> bool:
        """Send entries to a slave, or none as a heartbeat; False if they could not be queued. `previous`: (index, term)
        of the entry before them; None: the journal no longer holds what the slave needs."""
        ...

    def may_campaign(self) -> bool:
        """Whether to raise the term now that the election timeout has passed."""
        ...


class EngineHost(Protocol):
    """The other callbacks of the engine; raft.py implements them."""

    def may_apply(self) -> bool:
        """Whether to go on applying what is committed."""
        ...

    def apply_entry(self, index: int, term: int, command: bytes) -> object: ...

    def damaged(self, error: DiskError) -> None:
        """Entries cannot be read from the journal: those are neither sent nor applied."""
        ...

    def applied(self, index: int, term: int, value: object) -> None: ...

    def became_leader(self) -> None: ...

    def voters_written(self, index: int, entry: bytes) -> None:
        """An entry that lists the voters was written to the journal."""
        ...

    def entries_cut(self, index: int) -> None:
        """The journal was cut and now ends before entry `index`."""
        ...


def require_known_version(version: str = VERSION) -> None:
    """Refuse any other pysyncobj: the guards hold for the internals of one version."""
    if version != VERSION_KNOWN:
        raise WrongLibraryError(f"pysyncobj {VERSION_KNOWN} is needed, {version} is installed")


class PeerNode(Node):  # type: ignore[misc]
    """A peer with a hash that is the same in every process, and so with the same place in sets."""

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self._place = zlib.crc32(id.encode())

    def __hash__(self) -> int:
        return self._place


class _NoDumps:
    """Replaces pysyncobj's serializer: writes, sends and loads no dumps."""

    def checkSerializing(self) -> tuple[int, None]:
        return 0, None

    def getTransmissionData(self, _peer: object) -> None:
        return None

    def setTransmissionData(self, _data: object) -> bool:
        return False

    def cancelTransmisstion(self, _peer: object) -> None: ...


class _HostTransport(Transport):  # type: ignore[misc]
    """Passes the messages of pysyncobj to the peers."""

    def __init__(self, engine: Engine, self_node: Node, other_nodes: object) -> None:
        super().__init__(engine, self_node, other_nodes)
        self._engine = engine

    ready = True

    def tryGetReady(self) -> None: ...

    def send(self, node: Node, message: Message) -> bool:
        return self._engine.peers.outbound(node.id, message)

    def addNode(self, node: Node) -> None: ...
    def dropNode(self, node: Node) -> None: ...
    def destroy(self) -> None: ...


class Engine(SyncObj):  # type: ignore[misc]
    """One node of pysyncobj, driven by the calls of raft.py."""

    def __init__(
        self,
        host: EngineHost,
        peers: EnginePeers,
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
        install()
        self.host, self.peers = host, peers
        self.clock = clock
        self.random = random
        self.guards = guards
        self._config = config
        self._journal = journal
        self._ready = False
        self._ticked = False
        self._skips = guards.proposals_local and guards.dumps_refused
        """Whether ticks may be skipped: pysyncobj has no queue and no dumps to work on by itself."""
        self._commit = 0
        self._postponed_s = 0.0
        """Until when `postpone_election` has put off elections."""
        self._nodes: dict[str, PeerNode] = {}
        """One object for each id: pysyncobj's dictionaries then find a peer without comparing names."""
        self._followers_now: list[Node] | None = None
        """Sorted; None after any change of members or connections."""
        self.view = JournalView(
            journal,
            entries_max=config.batch_entries_max,
            bytes_max=config.batch_bytes_max,
            bounded=guards.slices_bounded,
            check_cut=self._check_cut,
            host=host,
        )
        self._feed = AppendFeed(config, journal, self.view, clock, peers, host.damaged)
        conf = SyncObjConf(
            autoTick=False,
            appendEntriesPeriod=config.append_period_ms / 1000,
            raftMinTimeout=config.election_timeout_ms_min / 1000,
            raftMaxTimeout=config.election_timeout_ms_max / 1000,
            leaderFallbackTimeout=config.fallback_ms / 1000,
            connectionTimeout=max(3.5, config.election_timeout_ms_max / 1000),
            appendEntriesBatchSizeBytes=1 << 40,  # never cut: see AppendFeed
            logCompactionMinEntries=1 << 62,
            logCompactionMinTime=1 << 62,
            dynamicMembershipChange=False,
            useFork=False,
        )
        # pysyncobj looks at every attribute, our properties too, before it has set this one.
        self._SyncObj__newAppendEntriesTime = 0.0
        with entered(self):
            super().__init__(
                self._node(node_id),
                [self._node(peer) for peer in sorted(voters) if peer != node_id],
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
        return self.peers.may_campaign()

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
            count_max = min(self._config.apply_batch_entries, self._commit - self.applied_index)
            try:
                rows = self.view.rows(self.applied_index + 1, count_max)
            except DiskError as error:
                if not is_damage(error):
                    raise
                self.host.damaged(error)
                return False
            for index, term, command in rows:
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
        self._feed.begin_mastership()
        self.host.became_leader()
        super()._SyncObj__onBecomeLeader()

    def _SyncObj__sendAppendEntries(self) -> None:
        self._SyncObj__newAppendEntriesTime = self.now_s() + self._config.append_period_ms / 1000
        following = self._SyncObj__raftNextIndex
        for peer in self._followers():
            following[peer] = self._feed.send(peer.id, following[peer], self._commit, heartbeat=True)

    def _check_cut(self, index: int) -> None:
        if index <= max(self.applied_index, self._commit) and self.guards.known_entries_stripped:
            raise AssertionError(f"entry {index} would be truncated, but {self._commit} is committed")

    def _followers(self) -> list[Node]:
        if self._followers_now is None:
            peers = (self._SyncObj__otherNodes | self._SyncObj__readonlyNodes) & self._SyncObj__connectedNodes
            self._followers_now = sorted(peers, key=lambda peer: str(peer.id))
        return self._followers_now

    # -- what raft.py asks -----------------------------------------------------------------------

    def run_due(self) -> None:
        """One tick of pysyncobj: elections, commit, apply, heartbeats."""
        if self._nothing_due():
            return
        with entered(self):
            if self.state == LEADER:
                self._excuse_unasked()
            self._onTick(0.0)
        self._ticked = True

    def _excuse_unasked(self) -> None:
        """A slave that has answered all that it was asked is not silent, however long this node stood still since."""
        now_s = self.now_s()
        for peer in self._SyncObj__otherNodes & self._SyncObj__connectedNodes:
            if not self._feed.asked(peer.id):
                self._SyncObj__lastResponseTime[peer] = now_s

    def silence_ns(self) -> int:
        """As master: for how long fewer than a majority have answered, at most; 0 if it is alone."""
        others = self._SyncObj__otherNodes
        if not others:
            return 0
        heard_s = sorted([self._SyncObj__lastResponseTime[peer] for peer in others], reverse=True)
        return int((self.now_s() - heard_s[(len(others) + 1) // 2 - 1]) * 1e9)

    def wait_for_answers(self, added_ns: int) -> None:
        """As master: step down only `added_ns` after `fallback_ms` without answers of a majority."""
        self._SyncObj__conf.leaderFallbackTimeout = self._config.fallback_ms / 1000 + added_ns / 1e9

    def _nothing_due(self) -> bool:
        """Whether a tick would find nothing to commit or apply, and no timer that has run out, like most ticks.

        The check for missing answers (`fallback_ms`) comes with each heartbeat, so it is not skipped.
        """
        if self._commit > self.applied_index or not self._skips or not self._ticked:
            return False
        if self.state == LEADER:
            return self._commit == self._journal.last_index and self.now_s() <= self._SyncObj__newAppendEntriesTime
        return bool(self.now_s() <= self._SyncObj__raftElectionDeadline)

    def heartbeat_now(self) -> None:
        """As master: send a heartbeat with the next `run_due`, which is due earlier than it would be."""
        self._SyncObj__newAppendEntriesTime = 0.0

    def deliver(self, peer_id: str, message: Message) -> None:
        """Give pysyncobj a message that passed the guard."""
        with entered(self):
            self._SyncObj__onMessageReceived(self._node(peer_id), message)

    def deliver_answer(self, peer_id: str, message: Message, *, rewinds: bool) -> bool:
        """Give pysyncobj a slave's answer. The slave's next index moves back only if `rewinds`. Returns whether the
        answer said anything new."""
        peer = self._node(peer_id)
        following, matching = self._SyncObj__raftNextIndex, self._SyncObj__raftMatchIndex
        if self.state != LEADER or peer not in following:
            return False
        self._feed.answered(peer_id)
        before, matched = following[peer], matching[peer]
        if not message["reset"] and message["next_node_idx"] - 1 <= matched:
            self._SyncObj__lastResponseTime[peer] = self.now_s()  # all that pysyncobj would note
            self._feed.acknowledged(peer_id, matched)
            return False
        self.deliver(peer_id, message)
        if peer not in following:
            return True
        if rewinds and message["reset"]:
            self._feed.restart(peer_id)
        elif self.guards.resets_fenced:
            following[peer] = max(before, following[peer])
        self._feed.acknowledged(peer_id, matching[peer])
        return bool(rewinds or following[peer] != before or matching[peer] != matched)

    def append(self, entry: bytes) -> int:
        """Append an entry as master; returns its index. Raises the errors of `Journal.append`."""
        index = self._journal.last_index + 1
        self.view.add(entry, index, self.term)
        return index

    def send_new(self, notice_ns: int) -> int:
        """Send missing entries to the slaves, and notices of a higher commit index that are due.

        Returns the monotonic_ns of the next notice; 0 for none.
        """
        now_ns, due_ns = self.clock.monotonic_ns(), 0
        following, feed = self._SyncObj__raftNextIndex, self._feed
        with entered(self):
            for peer in self._followers():
                following[peer] = feed.send(peer.id, following[peer], self._commit, heartbeat=False)
                tell_ns = feed.notice_due_ns(peer.id, self._commit, notice_ns)
                if tell_ns is None:
                    continue
                if tell_ns > now_ns:
                    due_ns = min(due_ns or tell_ns, tell_ns)
                else:
                    following[peer] = feed.send(peer.id, following[peer], self._commit, heartbeat=True)
        return due_ns

    def connected(self, peer_id: str) -> None:
        """A connection to the peer is up: elections and entries may rely on it."""
        peer = self._node(peer_id)
        self._feed.restart(peer_id)
        self._followers_now = None
        with entered(self):
            if peer in self._SyncObj__otherNodes:
                self._SyncObj__onNodeConnected(peer)
            else:
                self._SyncObj__onReadonlyNodeConnected(peer)
                self._SyncObj__lastResponseTime[peer] = self.now_s()

    def disconnected(self, peer_id: str) -> None:
        peer = self._node(peer_id)
        self._feed.restart(peer_id)
        self._followers_now = None
        with entered(self):
            if peer in self._SyncObj__readonlyNodes:
                self._SyncObj__onReadonlyNodeDisconnected(peer)
            else:
                self._SyncObj__onNodeDisconnected(peer)

    def set_voters(self, voters: Sequence[str]) -> None:
        """Set the voters, as the log lists them. A connected peer that is no voter still gets the log, as a learner."""
        self._followers_now = None
        wanted = {self._node(peer) for peer in voters if peer != self.node_id}
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
        """Stop leading in this term. The peers elect a master when their timers run out."""
        with entered(self):
            self._SyncObj__setState(FOLLOWER)
            self._SyncObj__raftLeader = None
            self._SyncObj__raftElectionDeadline = self.now_s() + self._config.election_timeout_ms_max / 1000

    def postpone_election(self, until_ns: int) -> None:
        """Begin no election before `until_ns`: after a stall, frames that have arrived are read first."""
        if not self._SyncObj__transferInProgress:
            self._postponed_s = max(self._postponed_s, until_ns / 1e9)
            self._SyncObj__raftElectionDeadline = max(self._SyncObj__raftElectionDeadline, until_ns / 1e9)

    def advance_election(self, from_ns: int) -> None:
        """Stand for election from `from_ns`, unless that is due earlier. What was postponed stays postponed."""
        from_s = max(from_ns / 1e9, self._postponed_s)
        self._SyncObj__raftElectionDeadline = min(self._SyncObj__raftElectionDeadline, from_s)

    def master_lives(self, added_ns: int) -> None:
        """A heartbeat of the known master says nothing new: set the election timeout anew, longer by `added_ns`. What
        pysyncobj does with such a message, and no more."""
        if not self._SyncObj__transferInProgress:
            with entered(self):
                self._SyncObj__raftElectionDeadline = self.now_s() + self._SyncObj__generateRaftTimeout()
        self.prolong_election(added_ns)

    def prolong_election(self, added_ns: int) -> None:
        """A heartbeat has just set the election timeout: add to it."""
        if not self._SyncObj__transferInProgress:
            self._SyncObj__raftElectionDeadline += added_ns / 1e9

    def send_timeout_now(self, peer_id: str) -> None:
        with entered(self):
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
        state: int = self._SyncObj__raftState
        return state

    @property
    def term(self) -> int:
        term: int = self._SyncObj__raftCurrentTerm
        return term

    @property
    def leader_id(self) -> str | None:
        leader = self._SyncObj__raftLeader
        return None if leader is None else str(leader.id)

    @property
    def commit_index(self) -> int:
        return self._commit

    @property
    def applied_index(self) -> int:
        index: int = self._SyncObj__raftLastApplied
        return index

    @property
    def election_deadline_ns(self) -> int:
        return int(self._SyncObj__raftElectionDeadline * 1e9)

    @property
    def heartbeat_due_ns(self) -> int:
        return int(self._SyncObj__newAppendEntriesTime * 1e9)

    def match_index(self, peer_id: str) -> int:
        return int(self._SyncObj__raftMatchIndex.get(self._node(peer_id), 0))

    def forget_match(self, peer_id: str) -> None:
        """A peer has lost entries that it acknowledged: none counts until it acknowledges again."""
        self._SyncObj__raftMatchIndex[self._node(peer_id)] = 0

    def learners(self) -> list[str]:
        return sorted(str(peer.id) for peer in self._SyncObj__readonlyNodes)


Row = tuple[bytes, int, int]

BASE_COMMAND = b"\x01"
"""A no-op of pysyncobj, in place of the base's command."""


class JournalView:
    """The journal with the methods that pysyncobj calls: a list of (command, index, term) that starts at the base. The
    host hears of voters that are written, and of every cut.

    Position 0 is not a stored entry but the journal's base, the last entry that a checkpoint covers (0, 0 in a new
    log). pysyncobj never sends the first entry, so that fits, and a rebuilt node can start from any index. Each read is
    bounded, however long the log.

    Invariants: term and vote are durable when `setCurrentTerm` returns. To read the last entry's index and term does
    not load its command.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        entries_max: int,
        bytes_max: int,
        bounded: bool,
        check_cut: Callable[[int], None],
        host: EngineHost,
    ) -> None:
        """`check_cut` raises if the entries from an index on must not be cut."""
        self._journal = journal
        self._entries_max = entries_max if bounded else 1 << 62
        self._bytes_max = bytes_max if bounded else 1 << 62
        self.check_cut = check_cut
        self._host = host

    def __len__(self) -> int:
        return self._journal.last_index - self._journal.base_index + 1

    @overload
    def __getitem__(self, position: int) -> Row: ...
    @overload
    def __getitem__(self, position: slice) -> list[Row]: ...

    def __getitem__(self, position: int | slice) -> Row | list[Row]:
        journal = self._journal
        if isinstance(position, int):
            if position == -1:
                return b"", journal.last_index, journal.last_term
            if position == 0:
                return BASE_COMMAND, journal.base_index, journal.base_term
            length = len(self)
            if not -length <= position < length:
                raise IndexError(position)
            index, term, command = journal.entry(journal.base_index + position % length)
            return command, index, term
        start, stop, step = position.indices(len(self))
        if step != 1:
            raise ValueError(f"a slice of the log has step 1, not {step}")
        rows: list[Row] = []
        if start == 0 < stop:
            rows.append((BASE_COMMAND, journal.base_index, journal.base_term))
            start = 1
        if start < stop:
            found = self.rows(journal.base_index + start, stop - start)
            rows.extend((command, index, term) for index, term, command in found)
        if len(rows) == 1 < stop - start:
            # One large entry has filled the bounds. The slice must still show that another follows: from that
            # pysyncobj knows that it has to cut before it appends.
            index, term, command = journal.entry(rows[0][1] + 1)
            rows.append((command, index, term))
        return rows

    def rows(self, first: int, count_max: int) -> list[Entry]:
        """Entries from index `first` on, bounded in number and bytes, but at least one if it exists."""
        return self._journal.slice(first, min(count_max, self._entries_max), self._bytes_max)

    def add(self, command: bytes, index: int, term: int) -> None:
        self._journal.append(index, term, command)
        if command[:1] == VOTERS:
            self._host.voters_written(index, command)

    def clear(self) -> None:
        raise AssertionError("pysyncobj wants to clear the journal, which only a checkpoint may")

    def deleteEntriesFrom(self, position: int) -> None:
        index = self._journal.base_index + position
        self.check_cut(index)
        self._journal.truncate_from(index)
        self._host.entries_cut(index)

    def deleteEntriesTo(self, position: int) -> None:
        raise AssertionError("pysyncobj wants to compact the journal, which only a checkpoint may")

    def setRaftCommitIndex(self, index: int) -> None:
        self._journal.note_commit(index)

    def getRaftCommitIndex(self) -> int:
        return min(self._journal.commit_hint, self._journal.durable_index)

    def setCurrentTerm(self, term: int, voted_for: str | None = None) -> None:
        self._journal.set_hard_state(term, voted_for or "")

    def getCurrentTerm(self) -> int:
        return self._journal.term

    def getVotedForNodeId(self) -> str | None:
        return self._journal.voted_for or None

    def onOneSecondTimer(self) -> None:
        """No effect: durability never depends on a timer here."""

    def _destroy(self) -> None:
        """No effect: the node closes its journal."""


@dataclass(slots=True)
class _Flight:
    """The messages under way to one peer: (last index, bytes) of each one with entries."""

    messages: deque[tuple[int, int]] = field(default_factory=deque)
    bytes: int = 0
    commit_told: int = 0
    told_ns: int = 0
    asked: bool = False
    """A message was sent since the peer's last answer."""

    def sent(self, last_index: int, size: int) -> None:
        self.messages.append((last_index, size))
        self.bytes += size

    def acknowledged(self, index: int) -> None:
        while self.messages and self.messages[0][0] <= index:
            self.bytes -= self.messages.popleft()[1]

    def clear(self) -> None:
        self.messages.clear()
        self.bytes = 0


class AppendFeed:
    """The master's feed of entries to its slaves.

    Owns, for each peer, the unacknowledged messages with entries, and which commit index it was told of and when.
    pysyncobj keeps the index of a peer's next entry: `send` takes it and returns the new one.

    Invariants:
    - No entry is sent twice on one connection, unless the peer asked for it (`restart`).
    - Bytes and messages under way to a peer are bounded. Each message is bounded too (by the view), but has at least
      one entry.
    - A peer that needs entries the journal no longer holds gets heartbeats only: it needs a checkpoint. So does one
      that needs entries which cannot be read: `damaged` hears of it, and another node must lead.
    """

    def __init__(
        self,
        config: RaftConfig,
        journal: Journal,
        view: JournalView,
        clock: Clock,
        peers: EnginePeers,
        damaged: Callable[[DiskError], None],
    ) -> None:
        self._config = config
        self._journal = journal
        self._view = view
        self._clock = clock
        self._peers = peers
        self._damaged = damaged
        self._flights: dict[str, _Flight] = {}

    def begin_mastership(self) -> None:
        """This node has become master: in this term nothing is under way and no peer knows a commit index."""
        for flight in self._flights.values():
            flight.clear()
            flight.commit_told = 0
            flight.asked = False

    def asked(self, peer_id: str) -> bool:
        """Whether a peer owes an answer: it was sent a message since its last one, on whatever connection."""
        return self._flight(peer_id).asked

    def answered(self, peer_id: str) -> None:
        """A peer has answered."""
        self._flight(peer_id).asked = False

    def restart(self, peer_id: str) -> None:
        """Forget the messages under way to a peer: its connection is gone or new, or it asks for other entries."""
        self._flight(peer_id).clear()

    def acknowledged(self, peer_id: str, index: int) -> None:
        """A peer has acknowledged all entries up to `index`."""
        self._flight(peer_id).acknowledged(index)

    def send(self, peer_id: str, following: int, commit: int, *, heartbeat: bool) -> int:
        """Send entries from `following` on while the window has room. Returns the index after the last one sent.

        `heartbeat`: if no entry can be sent, send a message without entries.
        """
        config, journal, flight = self._config, self._journal, self._flight(peer_id)
        if following <= journal.base_index:
            if heartbeat and self._peers.send_entries(peer_id, commit, None, ()):
                flight.told_ns, flight.asked = self._clock.monotonic_ns(), True
            return following
        while (
            following <= journal.last_index
            and flight.bytes < config.window_bytes_max
            and len(flight.messages) < config.window_messages_max
        ):
            try:
                entries = self._view.rows(following, journal.last_index - following + 1)
            except DiskError as error:
                if not is_damage(error):
                    raise
                self._damaged(error)
                break
            if not self._send(peer_id, flight, following, entries, commit):
                return following
            heartbeat = False
            last = entries[-1][0]
            flight.sent(last, sum([len(command) for _, _, command in entries]))
            following = last + 1
        if heartbeat:
            self._send(peer_id, flight, following, (), commit)
        return following

    def notice_due_ns(self, peer_id: str, commit: int, notice_ns: int) -> int | None:
        """When to tell a peer of this commit index: `notice_ns` after the last message to it; None if it knows."""
        flight = self._flight(peer_id)
        return flight.told_ns + notice_ns if flight.commit_told < commit else None

    def _flight(self, peer_id: str) -> _Flight:
        flight = self._flights.get(peer_id)
        if flight is None:
            flight = self._flights[peer_id] = _Flight()
        return flight

    def _send(self, peer_id: str, flight: _Flight, first: int, entries: Sequence[Entry], commit: int) -> bool:
        sent = self._peers.send_entries(peer_id, commit, (first - 1, self._journal.term_at(first - 1)), entries)
        if sent:
            flight.commit_told, flight.told_ns, flight.asked = commit, self._clock.monotonic_ns(), True
        return sent
