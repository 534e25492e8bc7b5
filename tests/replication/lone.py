"""One real replicated log among peers that the test plays: every frame, sync and millisecond is the test's.

The log runs on a simulated disk, a clock that moves when told, an executor whose works wait until they are
run. So each gap of pysyncobj can be walked into on purpose, in a few steps and always the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from tickwheel.proto.peer_pb2 import AppendEntries, AppendResult, Entry, PeerFrame, Pong, RequestVote, Vote
from tickwheel.replication.config import RaftConfig
from tickwheel.replication.frames import Envelope
from tickwheel.replication.guards import Guards
from tickwheel.replication.journal import Journal
from tickwheel.replication.log import LogStatus, Member, ProposalOutcome, ProposalResult, Role
from tickwheel.replication.pysyncobj_seam import Engine
from tickwheel.replication.raft import RaftLog
from tickwheel.storage.disk import DiskError
from tickwheel.storage.simulated import SimulatedDisk

CLUSTER = "lone"
MS = 1_000_000
STEP_MS = 5
START_NS = 1_000_000 * MS


class HandClock:
    """Moves when told."""

    def __init__(self) -> None:
        self.now_ns = START_NS

    def monotonic_ns(self) -> int:
        return self.now_ns

    def wall_ms(self) -> int:
        return 1_900_000_000_000 + self.now_ns // MS


class HandExecutor:
    """Works wait until the test runs them."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]] = []

    def submit(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        self.waiting.append((work, done))

    def run(self) -> None:
        """All that waits, and what comes of it."""
        while self.waiting:
            work, done = self.waiting.pop(0)
            done(work(), None)


class Peer:
    """What the test says in a peer's name."""

    def __init__(self, lone: Lone, name: str, boot_id: int) -> None:
        self._lone = lone
        self.name = name
        self.envelope = Envelope(CLUSTER, name, boot_id, 0, "")
        self.connection_id = 7
        self.lease_ms = lone.config.lease_ms
        """What this peer tells as master; 0, as in the version before: nothing."""

    def send(self, frame: PeerFrame, term: int, connection_id: int | None = None) -> bool:
        """A frame of this peer arrives. Returns whether it wants a tick."""
        connection_id = self.connection_id if connection_id is None else connection_id
        return self._lone.log.receive(self.name, self.envelope.seal(frame, self._lone.name, term, connection_id))

    def append(
        self, term: int, previous: tuple[int, int], entries: Sequence[tuple[int, int, bytes]], commit: int = 0
    ) -> bool:
        """append_entries behind `previous` (index, term); entries are (index, term, command)."""
        body = AppendEntries(
            commit_index=commit,
            previous_index=previous[0],
            previous_term=previous[1],
            entries=[Entry(index=index, term=of, command=command) for index, of, command in entries],
            sent_ns=self._lone.clock.now_ns,
            lease_ms=self.lease_ms,
        )
        return self.send(PeerFrame(append_entries=body), term)

    def heartbeat(self, term: int, commit: int) -> None:
        """append_entries that verifies nothing."""
        body = AppendEntries(commit_index=commit, sent_ns=self._lone.clock.now_ns, lease_ms=self.lease_ms)
        self.send(PeerFrame(append_entries=body), term)

    def answer(
        self,
        term: int,
        next_index: int,
        *,
        success: bool = True,
        reset: bool = False,
        echo_ns: int | None = None,
        last_index: int | None = None,
    ) -> bool:
        """append_result on the connection by which the log last spoke to this peer."""
        echo_ns = self._lone.clock.now_ns if echo_ns is None else echo_ns
        result = AppendResult(
            next_index=next_index, success=success, reset=reset, echo_sent_ns=echo_ns, last_log_index=last_index
        )
        return self.send(PeerFrame(append_result=result), term, self._lone.connection_of(self.name))

    def ask_for_vote(self, term: int, last: tuple[int, int] = (1_000, 1_000), *, transfer: bool = False) -> None:
        """request_vote with the end of the peer's log as (index, term)."""
        body = RequestVote(last_log_index=last[0], last_log_term=last[1], transfer=transfer)
        self.send(PeerFrame(request_vote=body), term)

    def vote(self, term: int) -> None:
        """A granted vote."""
        self.send(PeerFrame(vote=Vote(granted=True)), term)


class Listener:
    """A LogListener that remembers what one log said since its last start."""

    def __init__(self) -> None:
        self.applied: list[tuple[int, int, bytes]] = []
        self.roles: list[LogStatus] = []
        self.problems: list[str] = []
        self.forgotten: list[tuple[str, int, int]] = []
        self.ready = True
        self.room = True

    def apply(self, index: int, term: int, command: bytes) -> object:
        self.applied.append((index, term, command))
        return b"result of " + command

    def problem_of(self, entry: bytes, start: int) -> str:
        return ""

    def role_changed(self, status: LogStatus) -> None:
        self.roles.append(status)

    def sync_out(self, peer_id: str) -> PeerFrame | None:
        return None

    def sync_unsent(self, peer_id: str) -> None:
        """Nothing is told again."""

    def sync_in(self, peer_id: str, frame: PeerFrame) -> PeerFrame | None:
        return None

    def sync_reply_in(self, peer_id: str, frame: PeerFrame) -> None:
        """Nothing waits for it."""

    def beside_in(self, peer_id: str, frame: PeerFrame) -> PeerFrame | None:
        """Nothing is sent beside the log."""
        return None

    def may_vote(self) -> bool:
        """See LogListener."""
        return True

    def may_apply(self) -> bool:
        """See LogListener."""
        return self.room

    def handover_ready(self, peer_id: str) -> bool:
        return self.ready

    def checkpoint_needed(self, peer_id: str, applied_index: int) -> None:
        """No checkpoint is taken."""

    def forgot(self, peer_id: str, last_index: int, acknowledged_index: int) -> None:
        self.forgotten.append((peer_id, last_index, acknowledged_index))

    def damaged(self, error: DiskError) -> None:
        self.problems.append(str(error))

    def fatal(self, reason: str) -> None:
        self.problems.append(reason)


class Lone(Listener):
    """The log under test; its listener, whose applied state is the list of commands."""

    def __init__(
        self,
        guards: Guards | None = None,
        *,
        others: Sequence[str] = ("b", "c"),
        members: Sequence[str] | None = None,
        config: RaftConfig | None = None,
        disk: SimulatedDisk | None = None,
    ) -> None:
        super().__init__()
        self.name = "a"
        self.guards = guards or Guards()
        self.config = config or RaftConfig()
        self.clock = HandClock()
        self.executor = HandExecutor()
        self.disk = disk or SimulatedDisk(Random(1))
        self.others = tuple(others)
        self._members = (self.name, *others) if members is None else tuple(members)
        self.sent: list[tuple[str, PeerFrame]] = []
        self._connections: dict[str, int] = {}
        self.apply_takes_ns = 0
        self.apply_raises: Exception | None = None
        self.syncs = 0
        self.unreadable: dict[bytes, str] = {}
        """Commands that this node could not apply, and why."""
        self.peers = {name: Peer(self, name, 100 + number) for number, name in enumerate(others)}
        self.log = self._made()
        self.log.start()
        for name in self.others:
            self.log.peer_connected(name)

    def _made(self) -> RaftLog:
        self.journal = Journal.open(self.disk, "journal", segment_bytes=1 << 20)
        return RaftLog(
            self.config,
            self.name,
            CLUSTER,
            self.clock,
            self.executor,
            self,
            Random(5),
            self,
            self.journal,
            [Member(name, f"{name}:1", f"{name}:2") for name in self._members],
            (0, 0),
            joining=not self._members,
            guards=self.guards,
        )

    def restart(self) -> None:
        """The same disk, a new log on it."""
        self.log.stop()
        self.journal.close()
        self.log = self._made()
        self.log.start()

    @property
    def engine(self) -> Engine:
        """The pysyncobj inside."""
        return self.log.engine

    # -- Network

    def send(self, peer_id: str, frame: PeerFrame) -> bool:
        copy = PeerFrame()
        copy.CopyFrom(frame)
        self.sent.append((peer_id, copy))
        return True

    def set_peers(self, addresses: dict[str, str]) -> None:
        """The test plays them."""

    def connection_of(self, peer_id: str) -> int:
        """Connection id of the newest frame to a peer."""
        for peer, frame in reversed(self.sent):
            if peer == peer_id:
                return frame.connection_id
        return self._connections.get(peer_id, 0)

    def sent_of(self, kind: str, peer_id: str | None = None) -> list[PeerFrame]:
        """Frames of a kind that were sent, oldest first."""
        return [f for peer, f in self.sent if f.WhichOneof("body") == kind and peer_id in (None, peer)]

    # -- LogListener

    def apply(self, index: int, term: int, command: bytes) -> object:
        if self.apply_raises is not None:
            raise self.apply_raises
        self.clock.now_ns += self.apply_takes_ns
        self.applied.append((index, term, command))
        return len(self.applied)

    def problem_of(self, entry: bytes, start: int) -> str:
        """See LogListener."""
        return self.unreadable.get(entry[start:], "")

    def sync_out(self, peer_id: str) -> PeerFrame | None:
        self.syncs += 1
        frame = PeerFrame()
        frame.sync.number = self.syncs
        return frame

    def sync_in(self, peer_id: str, frame: PeerFrame) -> PeerFrame | None:
        answer = PeerFrame()
        answer.sync_reply.number = frame.sync.number
        return answer

    # -- driving

    def run(self, ms: int, *, disk: bool = True) -> None:
        """Let time pass with ticks on the way; `disk`: works run as they come."""
        for _ in range(0, ms, STEP_MS):
            self.clock.now_ns += STEP_MS * MS
            self.log.tick()
            if disk:
                self.executor.run()

    @property
    def term(self) -> int:
        return self.log.status().term

    def lead(self) -> int:
        """Win an election with the votes of all peers; its no-op is committed and applied. Returns the term."""
        for _ in range(1_000):
            self.run(STEP_MS)
            for peer_id, frame in self.drain():
                peer = self.peers[peer_id]
                kind = frame.WhichOneof("body")
                if kind == "ping":
                    peer.send(PeerFrame(pong=Pong(echo_sent_ns=frame.ping.sent_ns)), frame.term)
                elif kind == "request_vote":
                    peer.vote(frame.term)
                elif kind == "append_entries":
                    end = frame.append_entries
                    peer.connection_id = frame.connection_id
                    result = AppendResult(
                        next_index=end.previous_index + len(end.entries) + 1, success=True, echo_sent_ns=end.sent_ns
                    )
                    peer.send(PeerFrame(append_result=result), frame.term)
            status = self.log.status()
            if status.role is Role.MASTER and status.applied_index == status.last_index > 0:
                self.run(STEP_MS)
                return status.term
        raise AssertionError("never elected")

    def drain(self) -> list[tuple[str, PeerFrame]]:
        """Frames sent since the last drain."""
        sent, self.sent = self.sent, []
        self._connections.update({peer: frame.connection_id for peer, frame in sent})
        return sent

    def propose(self, command: bytes) -> list[ProposalResult]:
        """Propose and tick; the list gets the outcome."""
        outcome: list[ProposalResult] = []
        self.log.propose(command, outcome.append)
        self.log.tick()
        return outcome

    def follow(self, leader: str, term: int, count: int, commit: int = 0) -> None:
        """Be the slave of a master who has sent `count` entries of its term, all on this node's disk."""
        entries = [(index, term, b"\x00" + b"%d" % index) for index in range(1, count + 1)]
        self.peers[leader].append(term, (0, 0), entries, commit)
        self.run(STEP_MS)


def committed(outcome: list[ProposalResult]) -> bool:
    """Whether a proposal was answered COMMITTED."""
    return bool(outcome) and outcome[0].outcome is ProposalOutcome.COMMITTED
