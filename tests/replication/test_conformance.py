"""One suite for every implementation of the replicated log: in memory, and pysyncobj behind its guards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from random import Random

import pytest

from tests.replication.lone import MS, STEP_MS, HandClock, HandExecutor, Listener
from tests.replication.memory_log import MemoryCluster, MemoryLog
from tickwheel.proto.peer_pb2 import PeerFrame
from tickwheel.replication.config import RaftConfig
from tickwheel.replication.journal import Journal
from tickwheel.replication.log import Member, ProposalOutcome, ProposalResult, ReplicatedLog, Role
from tickwheel.replication.raft import RaftLog
from tickwheel.storage.simulated import SimulatedDisk

NAMES = ("a", "b", "c")
MEMBERS = [Member(name, f"{name}:1", f"{name}:2") for name in NAMES]
PROPOSALS_MAX = 8


class Cluster(ABC):
    """Three logs of one implementation, and how to drive them."""

    def __init__(self) -> None:
        self.logs: dict[str, ReplicatedLog] = {}
        self.listeners: dict[str, Listener] = {}

    @abstractmethod
    def start(self, name: str) -> None:
        """Start a log, new or again."""

    @abstractmethod
    def run(self) -> None:
        """Let a short while pass."""

    def stop(self, name: str) -> None:
        """Stop a log."""
        self.logs.pop(name).stop()

    def until(self, condition: Callable[[], bool]) -> None:
        """Run until it holds."""
        for _ in range(2_000):
            if condition():
                return
            self.run()
        raise AssertionError("never came about")

    def master(self) -> str:
        """Who leads, once somebody does and has applied its first entry."""
        found: list[str] = []

        def led() -> bool:
            found[:] = [name for name, log in self.logs.items() if leads(log)]
            return bool(found)

        self.until(led)
        return found[0]

    def propose(self, name: str, *commands: bytes) -> list[ProposalResult]:
        """Propose; the list fills with outcomes."""
        outcomes: list[ProposalResult] = []
        for command in commands:
            self.logs[name].propose(command, outcomes.append)
        return outcomes


def leads(log: ReplicatedLog) -> bool:
    """Whether a log is master, may act, and has applied all it has."""
    status = log.status()
    return status.role is Role.MASTER and log.lease_held() and status.applied_index == status.last_index


class InMemory(Cluster):
    """MemoryLog; the first that is up leads."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = MemoryCluster(MEMBERS)
        for name in NAMES:
            self.start(name)

    def start(self, name: str) -> None:
        listener = self.listeners[name] = Listener()
        log = self.logs[name] = MemoryLog(self.shared, name, listener, proposals_max=PROPOSALS_MAX)
        log.start()

    def run(self) -> None:
        if self.shared.master_id is None and self.shared.has_majority:
            self.shared.elect(min(m.node_id for m in self.shared.members if m.node_id in self.logs))
        for log in self.logs.values():
            log.tick()


class Wire:
    """The Network of one real log: frames arrive with the next step, as bytes."""

    def __init__(self, cluster: OverRaft, name: str) -> None:
        self._cluster = cluster
        self._name = name

    def send(self, peer_id: str, frame: PeerFrame) -> bool:
        self._cluster.under_way.append((self._name, peer_id, frame.SerializeToString()))
        return peer_id in self._cluster.logs

    def set_peers(self, addresses: dict[str, str]) -> None:
        """All are connected as long as they are up."""


class OverRaft(Cluster):
    """RaftLog on simulated disks and one clock."""

    def __init__(self) -> None:
        super().__init__()
        self.config = RaftConfig(proposals_max=PROPOSALS_MAX)
        self.clock = HandClock()
        self.under_way: list[tuple[str, str, bytes]] = []
        self.disks = {name: SimulatedDisk(Random(name)) for name in NAMES}
        self.executors: dict[str, HandExecutor] = {}
        self.boots = 0
        for name in NAMES:
            self.start(name)

    def start(self, name: str) -> None:
        listener = self.listeners[name] = Listener()
        executor = self.executors[name] = HandExecutor()
        self.boots += 1
        journal = Journal.open(self.disks[name], "journal", segment_bytes=1 << 20)
        log = RaftLog(
            self.config, name, "suite", self.clock, executor, Wire(self, name), Random(f"{name}/{self.boots}"),
            listener, journal, MEMBERS, (0, 0),
        )  # fmt: skip
        self.logs[name] = log
        log.start()
        for other, peer in self.logs.items():
            if other != name:
                log.peer_connected(other)
                peer.peer_connected(name)

    def stop(self, name: str) -> None:
        super().stop(name)
        for peer in self.logs.values():
            peer.peer_disconnected(name)

    def run(self) -> None:
        self.clock.now_ns += STEP_MS * MS
        arriving, self.under_way = self.under_way, []
        for sender, receiver, data in arriving:
            if receiver in self.logs and sender in self.logs:
                self.logs[receiver].receive(sender, PeerFrame.FromString(data))
        for name, log in list(self.logs.items()):
            log.tick()
            self.executors[name].run()


@pytest.fixture(params=[InMemory, OverRaft], ids=["memory", "pysyncobj"])
def cluster(request: pytest.FixtureRequest) -> Cluster:
    """A cluster of each implementation."""
    made: Cluster = request.param()
    return made


def commands(cluster: Cluster, name: str) -> list[bytes]:
    """Commands applied at a node since its start, without the entries of elections."""
    return [command for _, _, command in cluster.listeners[name].applied if command]


def test_committed_means_applied_with_its_result(cluster: Cluster) -> None:
    """`done` gets index and result of apply, once, after apply has run on this node."""
    master = cluster.master()
    outcomes = cluster.propose(master, b"one", b"two")
    cluster.until(lambda: len(outcomes) == 2)
    assert [outcome.outcome for outcome in outcomes] == [ProposalOutcome.COMMITTED] * 2
    assert [outcome.value for outcome in outcomes] == [b"result of one", b"result of two"]
    assert outcomes[1].index == outcomes[0].index + 1
    assert (outcomes[0].index, b"one") in [(index, command) for index, _, command in cluster.listeners[master].applied]


def test_all_nodes_apply_the_same_in_order_without_gaps(cluster: Cluster) -> None:
    """Index by index, the same term and command everywhere."""
    master = cluster.master()
    wanted = [b"%d" % number for number in range(30)]
    for command in wanted:
        outcomes = cluster.propose(master, command)
        cluster.until(lambda outcomes=outcomes: bool(outcomes))  # type: ignore[misc]
    cluster.until(lambda: all(commands(cluster, name) == wanted for name in NAMES))
    applied = [listener.applied for listener in cluster.listeners.values()]
    assert applied[0] == applied[1] == applied[2]
    assert [index for index, _, _ in applied[0]] == list(range(1, len(applied[0]) + 1))


def test_one_master_a_term_and_it_is_told(cluster: Cluster) -> None:
    """Every node hears who leads; the master hears that it does; nobody else holds a lease."""
    master = cluster.master()
    cluster.until(lambda: all(log.status().master_id == master for log in cluster.logs.values()))
    assert [name for name, log in cluster.logs.items() if log.lease_held()] == [master]
    assert cluster.listeners[master].roles[-1].role is Role.MASTER
    terms: dict[int, set[str]] = {}
    for name, listener in cluster.listeners.items():
        for status in listener.roles:
            if status.role is Role.MASTER:
                terms.setdefault(status.term, set()).add(name)
    assert all(len(masters) == 1 for masters in terms.values())


def test_a_slave_takes_no_proposal(cluster: Cluster) -> None:
    """NOT_MASTER at once, and the command is never applied anywhere."""
    master = cluster.master()
    slave = next(name for name in NAMES if name != master)
    assert [outcome.outcome for outcome in cluster.propose(slave, b"no")] == [ProposalOutcome.NOT_MASTER]
    outcomes = cluster.propose(master, b"yes")
    cluster.until(lambda: bool(outcomes))
    cluster.run()
    assert all(b"no" not in commands(cluster, name) for name in NAMES)


def test_at_the_limit_the_queue_is_full(cluster: Cluster) -> None:
    """More than the limit of proposals in flight are refused, not kept; those taken commit."""
    master = cluster.master()
    outcomes = cluster.propose(master, *[b"%d" % number for number in range(PROPOSALS_MAX + 3)])
    assert [outcome.outcome for outcome in outcomes] == [ProposalOutcome.QUEUE_FULL] * 3
    assert cluster.logs[master].in_flight() == (PROPOSALS_MAX, PROPOSALS_MAX)
    cluster.until(lambda: len(outcomes) == PROPOSALS_MAX + 3)
    assert all(outcome.outcome is ProposalOutcome.COMMITTED for outcome in outcomes[3:])
    assert cluster.logs[master].in_flight() == (0, 0)


def test_a_command_that_no_peer_could_be_sent_is_refused(cluster: Cluster) -> None:
    """TOO_LARGE, nothing appended, the log goes on."""
    master = cluster.master()
    assert [outcome.outcome for outcome in cluster.propose(master, bytes((48 << 20) + 1))] == [
        ProposalOutcome.TOO_LARGE
    ]
    outcomes = cluster.propose(master, b"next")
    cluster.until(lambda: bool(outcomes))
    assert outcomes[0].outcome is ProposalOutcome.COMMITTED


def test_proposals_under_way_end_unknown_when_the_master_stops(cluster: Cluster) -> None:
    """Each `done` is called once; what was committed all the same is applied by the others."""
    master = cluster.master()
    outcomes = cluster.propose(master, b"in doubt")
    cluster.stop(master)
    assert [outcome.outcome for outcome in outcomes] == [ProposalOutcome.UNKNOWN]
    after = cluster.propose(cluster.master(), b"after")
    cluster.until(lambda: bool(after))
    assert [outcome.outcome for outcome in outcomes] == [ProposalOutcome.UNKNOWN]


def test_a_listener_without_room_gets_nothing_until_it_has(cluster: Cluster) -> None:
    """Committed entries wait in the log, on this node alone; then they come, in order."""
    master = cluster.master()
    slave = next(name for name in NAMES if name != master)
    cluster.listeners[slave].room = False
    outcomes = cluster.propose(master, b"one")
    cluster.until(lambda: bool(outcomes))
    for _ in range(50):
        cluster.run()
    assert commands(cluster, slave) == []
    cluster.listeners[slave].room = True
    cluster.until(lambda: commands(cluster, slave) == [b"one"])


def test_a_restarted_node_applies_everything_once_again(cluster: Cluster) -> None:
    """From its applied index on, in order: what it missed too."""
    master = cluster.master()
    slave = next(name for name in NAMES if name != master)
    before = cluster.propose(master, b"before")
    cluster.until(lambda: bool(before))
    cluster.stop(slave)
    missed = cluster.propose(master, b"missed")
    cluster.until(lambda: bool(missed))
    cluster.start(slave)
    cluster.until(lambda: commands(cluster, slave) == [b"before", b"missed"])


def test_a_handover_parks_proposals_and_ends_with_another_master(cluster: Cluster) -> None:
    """The target leads a later term, the old master holds no lease, the asker hears None once."""
    master = cluster.master()
    target = next(name for name in NAMES if name != master)
    ended: list[str | None] = []
    cluster.logs[master].transfer(target, ended.append)
    assert [outcome.outcome for outcome in cluster.propose(master, b"parked")] == [ProposalOutcome.QUEUE_FULL]
    cluster.until(lambda: bool(ended))
    assert ended == [None]
    assert cluster.master() == target
    assert not cluster.logs[master].lease_held()


def test_a_handover_waits_until_the_target_has_heard_all(cluster: Cluster) -> None:
    """As long as the listener says that the target lacks something beside the log, nobody else leads."""
    master = cluster.master()
    cluster.listeners[master].ready = False
    ended: list[str | None] = []
    cluster.logs[master].transfer(None, ended.append)
    for _ in range(20):
        cluster.run()
    assert not ended
    assert cluster.logs[master].lease_held()
    cluster.listeners[master].ready = True
    cluster.until(lambda: bool(ended))
    assert ended == [None]


def test_a_handover_to_nobody_is_refused_with_a_reason(cluster: Cluster) -> None:
    """An unknown target, and a node that does not lead; the master goes on."""
    master = cluster.master()
    slave = next(name for name in NAMES if name != master)
    problems: list[str | None] = []
    cluster.logs[master].transfer("nobody", problems.append)
    cluster.logs[slave].transfer(None, problems.append)
    assert problems == ["nobody is not a connected member that counts", "this node is not the master"]
    outcomes = cluster.propose(master, b"on")
    cluster.until(lambda: bool(outcomes))
    assert outcomes[0].outcome is ProposalOutcome.COMMITTED


def test_a_master_that_steps_down_leads_no_more(cluster: Cluster) -> None:
    """At once, and says so; what it had not applied is in doubt. A slave has nothing to step down from."""
    master = cluster.master()
    slave = next(name for name in NAMES if name != master)
    cluster.logs[slave].step_down()
    assert cluster.logs[master].status().role is Role.MASTER
    outcomes = cluster.propose(master, b"on its way")
    cluster.logs[master].step_down()
    assert cluster.logs[master].status().role is not Role.MASTER and not cluster.logs[master].lease_held()
    outcomes += cluster.propose(master, b"late")
    assert [outcome.outcome for outcome in outcomes] == [ProposalOutcome.UNKNOWN, ProposalOutcome.NOT_MASTER]


def test_a_handover_under_way_is_answered_when_the_node_stops(cluster: Cluster) -> None:
    """Whoever asked for it does not wait for ever."""
    master = cluster.master()
    cluster.listeners[master].ready = False
    ended: list[str | None] = []
    cluster.logs[master].transfer(None, ended.append)
    cluster.stop(master)
    assert ended == ["this node stops"]


def test_a_removed_master_leads_no_more(cluster: Cluster) -> None:
    """Members as applied from the log: who is not among them neither leads nor counts."""
    master = cluster.master()
    rest = [member for member in MEMBERS if member.node_id != master]
    for log in cluster.logs.values():
        log.set_members(rest)
    cluster.run()
    assert cluster.logs[master].status().role is Role.LEARNER
    assert [member.node_id for member in cluster.logs[master].members()] == [member.node_id for member in rest]
    cluster.until(lambda: any(leads(log) for name, log in cluster.logs.items() if name != master))


def test_stop_is_idempotent_and_silent(cluster: Cluster) -> None:
    """A log that has stopped applies, sends and says nothing."""
    master = cluster.master()
    log, listener = cluster.logs[master], cluster.listeners[master]
    cluster.stop(master)
    log.stop()
    before = (len(listener.applied), len(listener.roles))
    log.tick()
    assert (len(listener.applied), len(listener.roles)) == before
    assert not log.lease_held()
    assert not listener.problems
