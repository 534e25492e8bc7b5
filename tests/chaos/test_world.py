"""Time, network, workers and machines of the simulation, driven by a process that only counts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tickwheel.chaos.sim.history import History
from tickwheel.chaos.sim.network import Fabric
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.world import MS, SECOND, World
from tickwheel.proto.peer_pb2 import PeerFrame

PERIOD_NS = 50 * MS


class Greeter:
    """Greets its peers every 50 ms with a number and remembers what it hears."""

    def __init__(self, machine: Machine, names: tuple[str, ...]) -> None:
        self.machine = machine
        self.peers = {name: f"{name}.invalid:1" for name in names if name != machine.name}
        self.number = 0
        self.next_ns = 0
        self.heard: dict[str, list[int]] = {name: [] for name in self.peers}
        self.up: set[str] = set()
        self.works = 0

    def start(self) -> None:
        self.machine.network.set_peers(self.peers)

    def tick(self, *, woken: bool) -> int:
        now_ns = self.machine.clock.monotonic_ns()
        if now_ns >= self.next_ns:
            self.next_ns = now_ns + PERIOD_NS
            self.number += 1
            for peer in self.peers:
                frame = PeerFrame(sequence=self.number)
                frame.sync.number = self.number
                self.machine.network.send(peer, frame)
            self.machine.executor.submit(partial(self._work, 1), self._worked)
        return self.next_ns

    def _work(self, result: int) -> int:
        return result

    def _worked(self, result: int | None, error: BaseException | None) -> None:
        assert error is None and result == 1
        self.works += 1

    def receive(self, peer_id: str, frame: PeerFrame) -> bool:
        self.heard[peer_id].append(frame.sequence)
        return True

    def peer_connected(self, peer_id: str) -> None:
        self.up.add(peer_id)

    def peer_disconnected(self, peer_id: str) -> None:
        self.up.discard(peer_id)

    def stop(self) -> None: ...

    def refuses(self, peer_id: str) -> None:
        return None

    def observe(self) -> None: ...


class Cluster:
    """Three machines that greet each other."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.fabric = Fabric[Machine](self.world)
        self.names = ("n1", "n2", "n3")
        self.machines: dict[str, Machine] = {}
        history = History(self.world)
        for name in self.names:
            machine = Machine(self.world, self.fabric, history, name, lambda m: Greeter(m, self.names))
            self.fabric.add(machine)
            self.machines[name] = machine
        for machine in self.machines.values():
            machine.start()

    def greeter(self, name: str) -> Greeter:
        process = self.machines[name].process
        assert isinstance(process, Greeter)
        return process

    def run(self, seconds: float) -> None:
        self.world.run_until(self.world.now_ns + int(seconds * SECOND))


def in_order(numbers: list[int]) -> bool:
    return numbers == sorted(set(numbers))


def test_everybody_hears_everybody_in_order() -> None:
    """Without faults nothing is lost once connections are up, and nothing overtakes."""
    cluster = Cluster(1)
    cluster.run(10)
    for name in cluster.names:
        for numbers in cluster.greeter(name).heard.values():
            assert in_order(numbers) and len(numbers) > 190
        assert cluster.greeter(name).works > 190


def test_same_seed_same_run() -> None:
    """Equal seeds give equal digests, different ones do not."""

    def digest(seed: int) -> str:
        cluster = Cluster(seed)
        cluster.run(3)
        return cluster.world.digest()

    assert digest(1) == digest(1)
    assert digest(1) != digest(2)


def test_a_reset_loses_what_is_in_flight_and_dials_again() -> None:
    """Frames are lost with their connection; the next connection carries on."""
    cluster = Cluster(2)
    cluster.run(1)
    link = cluster.fabric.links["n1", "n2"]
    for _ in range(5):
        link.send(PeerFrame(sequence=999_999).SerializeToString())
    link.reset()
    assert link.lost >= 5
    cluster.run(2)
    heard = cluster.greeter("n2").heard["n1"]
    assert 999_999 not in heard and in_order(heard)
    assert "n2" in cluster.greeter("n1").up


def test_a_blocked_link_holds_back_in_order() -> None:
    """A short block delays frames, in one direction only; a long one breaks the connection."""
    cluster = Cluster(3)
    cluster.run(1)
    link = cluster.fabric.links["n1", "n2"]
    link.block()
    before = len(cluster.greeter("n1").heard["n2"])
    cluster.run(0.25)
    assert link.up and link.held_back >= 4
    assert len(cluster.greeter("n1").heard["n2"]) > before
    link.unblock()
    cluster.run(0.25)
    assert in_order(cluster.greeter("n2").heard["n1"])
    link.block()
    cluster.run(10)
    assert not link.up and "n2" not in cluster.greeter("n1").up


def test_a_frozen_machine_wakes_to_a_full_inbox() -> None:
    """Nothing runs in a pause; what arrived meanwhile is there at the wake."""
    cluster = Cluster(4)
    cluster.run(1)
    machine = cluster.machines["n1"]
    machine.freeze()
    turns, number = machine.turns, cluster.greeter("n1").number
    cluster.run(2)
    assert machine.turns == turns and machine.waiting > 60
    machine.thaw()
    cluster.run(0.5)
    assert machine.waiting == 0 and cluster.greeter("n1").number > number
    assert in_order(cluster.greeter("n1").heard["n2"])


def test_a_killed_machine_starts_anew() -> None:
    """Nothing of one boot reaches the next; its peers notice and dial again."""
    cluster = Cluster(5)
    cluster.run(1)
    machine = cluster.machines["n1"]
    machine.kill()
    assert machine.process is None
    cluster.run(0.5)
    assert "n1" not in cluster.greeter("n2").up
    machine.start()
    cluster.run(2)
    assert machine.boot == 2 and "n1" in cluster.greeter("n2").up
    assert cluster.greeter("n1").number < 50


def test_a_crash_forgets_what_was_not_synced() -> None:
    """Power loss goes to the disk; a kill does not."""
    cluster = Cluster(6)
    machine = cluster.machines["n1"]

    def write(synced: bool) -> None:
        file = machine.disk.open("f", create=True)
        file.append(b"x" * 100_000)
        if synced:
            file.fsync()
            machine.disk.fsync_dir("")

    write(synced=True)
    write(synced=False)
    machine.kill()
    assert machine.disk.size("f") == 200_000
    machine.start()
    machine.lose_power()
    counters = machine.disk.counters()
    assert counters.pages_lost + counters.pages_written_back > 0
    assert machine.disk.open("f").read_at(0, 100_000) == b"x" * 100_000


def test_replays_are_delivered_twice() -> None:
    """A replaying connection hands over frames again."""
    cluster = Cluster(7)
    cluster.run(1)
    link = cluster.fabric.links["n1", "n2"]
    link.replay_rate = 0.5
    cluster.run(2)
    assert link.replayed > 5
    assert not in_order(cluster.greeter("n2").heard["n1"])


def test_streams_are_independent() -> None:
    """A number drawn from one stream changes no other."""
    world, other = World(9), World(9)
    world.stream("a").random()
    assert world.stream("b").random() == other.stream("b").random()


def test_agenda_keeps_order_of_equal_times() -> None:
    """First in, first out at one moment."""
    world = World(1)
    seen: list[int] = []
    take: Callable[[int], None] = seen.append
    for number in range(5):
        world.at(10, take, number)
    world.run_until(10)
    assert seen == [0, 1, 2, 3, 4]
