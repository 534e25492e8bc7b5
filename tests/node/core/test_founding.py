"""A cluster is founded once, by all of its founders; a node with a new disk counts for nothing before.

The links of the trio let everybody in: what keeps two nodes from founding anew is the founding itself, not a refusal.
"""

from __future__ import annotations

import random

import pytest

from tests.node.core.trio import Client, Node, World
from tickwheel.node.core.founding import PATH, ClusterFounding
from tickwheel.node.core.host import NodeHost
from tickwheel.node.core.watch.status import node_vitals
from tickwheel.proto import admin_pb2
from tickwheel.proto.peer_pb2 import Founding
from tickwheel.storage.simulated import PowerLost, SimulatedDisk

PATIENCE_MS = 20_000
"""Many elections."""


def host_of(world: World, name: str) -> NodeHost:
    host = world.nodes[name].host
    assert host is not None, world.nodes[name].fatal
    return host


def record_of(node: Node) -> Founding | None:
    """What its core has recorded."""
    return node.host.core.parts.founding._record if node.host is not None else None


def acknowledged(world: World, client: Client) -> None:
    client.schedule([60_000] * 10)
    world.run_until(lambda: len(client.acked) == 10)


def forget_founding(world: World) -> None:
    """Leave the directories as a version before the record left them."""
    for node in world.nodes.values():
        if node.disk.exists(PATH):
            node.disk.remove(PATH)
            node.disk.fsync_dir("")


def test_a_first_start_takes_no_longer_and_knows_all_disks_at_once() -> None:
    """Three new nodes agree before the pause ends after which they vote; the first command names their disks."""
    world = World()
    world.run_until(lambda: all(host_of(world, name).core.parts.founding.may_vote for name in "abc"), 50)
    world.elect()
    assert world.now_ns < 2_000_000_000
    world.run_until(lambda: all(host_of(world, name).core.state.created for name in "abc"), 200)
    for name in "abc":
        assert [m.disk_uuid for m in host_of(world, name).core.state.members()] == ["disk-a", "disk-b", "disk-c"]


def test_two_of_three_founders_found_nothing_and_say_whom_they_wait_for() -> None:
    """The third may be the one that has everything."""
    world = World()
    world.nodes["c"].kill()
    world.nodes["c"].wipe()  # it never ran
    world.run(PATIENCE_MS)
    assert world.master() is None
    status = node_vitals(host_of(world, "a").core)
    assert status.state == admin_pb2.NODE_ALONE
    assert "not heard from c" in status.state_reason
    assert host_of(world, "a").core.log.status().term == 0, "it stood for election"
    world.nodes["c"].start()
    world.elect()


@pytest.mark.parametrize("recorded", [True, False], ids=["this version", "directories of an earlier version"])
def test_one_that_was_away_from_the_first_moment_and_one_with_an_empty_disk_found_nothing(recorded: bool) -> None:
    """c never saw the cluster's log, b lost its disk, and a, which has everything, is down: they wait for it."""
    world = World()
    world.run_until(lambda: all(host_of(world, name).core.parts.founding.may_vote for name in "abc"), 50)
    world.cut_off("c")
    world.nodes["c"].kill()
    client = Client(world)
    world.elect()
    acknowledged(world, client)
    for name in "ab":
        world.nodes[name].kill()
    world.cut.clear()
    if not recorded:
        forget_founding(world)
    world.nodes["b"].wipe()
    world.nodes["b"].start()
    world.nodes["c"].start()
    world.run(PATIENCE_MS)
    assert world.master() is None
    assert not any(host_of(world, name).core.state.created for name in "bc")
    assert "c belongs to the cluster already" in host_of(world, "b").core.parts.founding.reason
    world.nodes["a"].start()
    master = world.elect()
    assert master is not world.nodes["b"]
    client.consume()
    world.run_until(lambda: not client.lost(), 90_000)
    assert not host_of(world, "b").core.parts.founding.may_vote, "its log names another disk"


def test_one_whose_log_ends_before_disks_were_recorded_gets_no_vote_from_an_empty_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An earlier version founded: c has the first entry, which names no disks. b, with a new one, is no help."""
    monkeypatch.setattr(ClusterFounding, "disk_of", lambda self, node_id: "")
    world = World()
    world.elect()
    world.run_until(lambda: host_of(world, "c").core.state.created, 500)
    assert not any(m.disk_uuid for m in host_of(world, "c").core.state.members())
    world.cut_off("c")
    world.nodes["c"].kill()
    client = Client(world)
    world.elect()
    acknowledged(world, client)
    for name in "ab":
        world.nodes[name].kill()
    world.cut.clear()
    forget_founding(world)
    world.nodes["b"].wipe()
    world.nodes["b"].start()
    world.nodes["c"].start()
    world.run(PATIENCE_MS)
    assert world.master() is None
    world.nodes["a"].start()
    world.elect()
    client.consume()
    world.run_until(lambda: not client.lost(), 90_000)


def test_a_new_disk_votes_once_the_log_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cluster whose log never named the disk of b, the new one is recorded, and counts once b has read that."""
    monkeypatch.setattr(ClusterFounding, "disk_of", lambda self, node_id: "")
    world = World()
    world.elect()
    world.nodes["b"].kill()
    world.elect()
    for node in world.nodes.values():
        if node.host is not None:
            node.host.core.parts.members._disks.pop("b", None)
    forget_founding(world)
    world.nodes["b"].wipe()
    world.nodes["b"].start()
    master = world.elect()
    assert master.host is not None
    world.run(200)
    assert not host_of(world, "b").core.parts.founding.may_vote
    master.host.core.parts.members.refuses("b", "disk-b'")  # its hello
    world.run_until(lambda: host_of(world, "b").core.parts.founding.may_vote, 5_000)
    own = next(m for m in host_of(world, "b").core.state.members() if m.node_id == "b")
    assert own.disk_uuid == "disk-b'"


def test_a_cluster_of_one_founds_itself() -> None:
    """There is nobody to ask."""
    world = World(names="a")
    node = world.nodes["a"]
    node.kill()
    node.disk = type(node.disk)(random.Random(0))
    node.start()
    world.elect()


@pytest.mark.parametrize("seed", range(12))
def test_whatever_dies_or_is_wiped_during_the_founding_no_two_foundings_differ(seed: int) -> None:
    """Nodes are killed, wiped and started at any moment of the first start. Whoever votes does so by one founding."""
    rng = random.Random(seed)
    world = World(seed)
    foundings: set[bytes] = set()
    voted: dict[str, str] = {}
    for _ in range(60):
        world.run(rng.choice([0.3, 0.7, 1.1, 3.0, 250.0]))
        node = world.nodes[rng.choice("abc")]
        if node.host is None:
            node.start()
        elif rng.random() < 0.7:
            node.kill()
            if node.name != "c" and rng.random() < 0.3:  # three new disks are a new cluster
                node.wipe()
        for other in world.nodes.values():
            record = record_of(other)
            if record is not None and record.founded:
                foundings.add(b"".join(founder.SerializeToString() for founder in record.founders))
                voted.setdefault(other.name, other.disk_uuid)
                assert voted[other.name] == other.disk_uuid, "a second disk of a founder votes"
    assert len(foundings) <= 1


@pytest.mark.parametrize("steps", [0, 5, 10, 15, 20, 25, 30])
def test_a_first_start_that_loses_power_is_repeated(steps: int) -> None:
    """After so many changes of its disk: the founder comes back, and the cluster is founded and serves."""
    world = World(seed=steps)
    node = world.nodes["a"]
    node.kill()
    node.disk = SimulatedDisk(random.Random(steps))
    node.disk.lose_power_after(steps)
    with pytest.raises(PowerLost):
        node.start()
    node.kill()
    node.start()
    client = Client(world)
    world.elect()
    client.consume()
    client.schedule([500] * 3)
    world.run_until(lambda: len(client.acked) == 3)
    world.run(2_000)
    assert len(client.got) == 3 and not any(other.fatal for other in world.nodes.values())
