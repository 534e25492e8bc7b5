"""Bulk load into three nodes that lose power, or the network, at any moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from tests.node.core.loading import Loader, begin, bundle_of, settle_down, start
from tests.node.core.trio import MS, Client, World
from tickwheel.node.core.config import CoreConfig
from tickwheel.proto import bulk_pb2


def _random_loads(seed: int, harm: Callable[[World, Random], None]) -> None:
    rng = Random(seed)
    world = World(seed, config=replace(CoreConfig(), segment_bytes=1 << 20, buffer_bytes_max=40_000))
    begin(world)
    client = Client(world)
    client.consume()
    wanted: dict[bytes, int] = {}
    datas = []
    for number in range(4):
        due = [world.now_ms + rng.choice([500, 2_000, 6_000, 20_000]) + rng.randrange(0, 900, 20) for _ in range(200)]
        data, brings = bundle_of(due, f"l{number}-")
        datas.append(data)
        wanted |= brings
    loader = Loader(world, datas)
    for _ in range(8):
        world.at(world.now_ns + rng.randrange(4_000) * MS, lambda: harm(world, rng))
        world.at(world.now_ns + rng.randrange(9_000) * MS, lambda: client.schedule([rng.randrange(8_000)] * 3))
    for place in range(len(datas)):
        answer: object = None
        while not isinstance(answer, bulk_pb2.LoadState):
            world.run_until(lambda: world.master() is not None, 20_000)
            for name in "abc":
                if world.nodes[name].host is not None:
                    loader.send(world.nodes[name], datas[place])
            answers = loader.ask(place)
            world.run(rng.choice([1, 3, 10, 40, 100]))
            answer = answers[0] if answers else None
    world.run(15_000)
    for node in world.nodes.values():
        if node.host is None:
            node.start()
    world.run(10_000)
    settle_down(world)
    assert client.got.keys() >= wanted.keys() and not client.lost()
    for record, seen in client.got.items():
        due_ms = wanted.get(record) or client.acked.get(record) or 0
        assert all(when >= due_ms for when, _, _ in seen)
    once = [record for record in wanted if len(client.got[record]) == 1]
    assert len(once) >= len(wanted) // 2, "most come once; those out with consumers at a failover may come again"
    for node in world.nodes.values():
        assert node.host is not None
        assert node.host.core.parts.bulk.load("job").units == len(wanted)
        assert node.host.core.wheel.pending == 0


@pytest.mark.parametrize("seed", range(2))
def test_power_is_lost_anywhere(seed: int) -> None:
    """Nodes lose power while bundles come in, while they are taken over and after: each counts once, on every node."""

    def harm(world: World, rng: Random) -> None:
        up = [node for node in world.nodes.values() if node.host is not None]
        if len(up) < 3:
            return
        victim = rng.choice(up)
        victim.kill()
        world.at(world.now_ns + rng.choice([5, 300, 3_000]) * MS, lambda: start(victim))

    _random_loads(seed, harm)


@pytest.mark.parametrize("seed", range(2))
def test_the_master_is_cut_off(seed: int) -> None:
    """A master that cannot reach the others takes nothing over; what its client repeats elsewhere counts once."""

    def harm(world: World, rng: Random) -> None:
        master = world.master()
        if master is not None and not world.cut:
            world.cut_off(master.name)
            world.at(world.now_ns + 2_500 * MS, world.heal)

    _random_loads(seed, harm)


def harmed_by_power_loss(seed: int, without: str) -> bool:
    """All nodes lose power just after a taking over; whether what it brought is gone then."""
    world = World(seed)
    for node in world.nodes.values():
        node.disk.ignore_fsync(lambda path: without == "the file" and path.startswith("bulk/"))
        node.disk.ignore_fsync_dir(lambda path: without == "its directory" and path in ("bulk", ""))
    begin(world)
    data, wanted = bundle_of([world.now_ms + 3_000 + n for n in range(300)])
    Loader(world, [data]).load()
    for node in world.nodes.values():
        node.kill()
    for node in world.nodes.values():
        node.start()
    client = Client(world)
    client.consume()
    world.run(5_000)
    return any(node.fatal for node in world.nodes.values()) or client.got.keys() != wanted.keys()


def test_what_is_held_outlives_the_power_of_all_nodes() -> None:
    """Before a node says that it holds a bundle, that is so for good."""
    assert not any(harmed_by_power_loss(seed, "") for seed in range(4))


@pytest.mark.parametrize("without", ["the file", "its directory"])
def test_each_sync_of_a_bundle_is_needed(without: str) -> None:
    """Left out, bundles that were taken over are gone from all nodes at once."""
    assert any(harmed_by_power_loss(seed, without) for seed in range(20))
