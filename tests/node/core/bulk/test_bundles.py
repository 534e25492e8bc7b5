"""What becomes of bundles after they were taken over: checkpoints, removal, damage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import google_crc32c
import numpy as np
import pytest

from tests.node.core import trio
from tests.node.core.loading import Loader, begin, bundle_of, check, name_of, settle_down, start
from tests.node.core.trio import Client, Node, World
from tickwheel.node.core.bulk import bundle_store
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.promise import UNHEARD, Reply
from tickwheel.node.failure import Failure
from tickwheel.storage import bundle
from tickwheel.wheel.units import HOUR_MS


def test_a_checkpoint_carries_bundles(world: World) -> None:
    """A node that copies a checkpoint gets the bundles with it, keeps those it had, and reads them."""
    now_ms = world.now_ms
    one, wanted = bundle_of([now_ms + 20_000 + n for n in range(500)], "a")
    two, more = bundle_of([now_ms + 21_000 + n for n in range(500)], "b")
    master = world.elect()
    slave = next(node for node in world.nodes.values() if node is not master)
    Loader(world, [one], "first").load()
    slave.kill()
    Loader(world, [two], "second").load()
    client = Client(world)
    assert master.host is not None
    checkpointer = master.host.core.checkpointer
    for _ in range(40):
        client.schedule([25_000] * 200)
        world.run(50)
    before = checkpointer.written
    checkpointer.request(Reply.either(checkpointer.copied))
    world.run_until(lambda: checkpointer.written > before)
    slave.start()
    world.run(3_000)
    settle_down(world)
    assert slave.host is not None
    if not slave.host.installs:
        slave.host._checkpoint_needed(master.name)
        world.run_until(lambda: slave.host is not None and slave.host.installs > 0)
    for data in (one, two):
        assert slave.host.core.parts.bulk.store.held(name_of(data))
    for name in ("first", "second"):
        assert slave.host.core.parts.bulk.load(name).units == 500
    assert slave.disk.exists(bundle.bundle_path(name_of(one)))
    client.consume()
    world.run(25_000)
    check(client, wanted | more)


def test_bundles_that_nobody_claims_go(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that failed leaves nothing behind for long; what was taken over stays."""
    monkeypatch.setattr(bundle_store, "UNCLAIMED_MS", 4_000)
    monkeypatch.setattr(bundle_store, "PART_IDLE_MS", 3_000)
    monkeypatch.setattr(bundle_store, "CHECK_PERIOD_MS", 500)
    left, _ = bundle_of([world.now_ms + 10 * HOUR_MS], "left")
    kept, _ = bundle_of([world.now_ms + 10 * HOUR_MS], "kept")
    Loader(world, [kept]).load()
    Loader(world, [left], "other").send_all()
    part = Loader(world, [left + b"more"], "part")
    node = world.elect()
    assert node.host is not None
    store = node.host.core.parts.bulk.store
    part_name = "0" * 64
    node.host.core.parts.bulk.take(part_name, 9_000, 0, left[:100], google_crc32c.value(left[:100]), UNHEARD)
    world.run(100)
    assert part.datas and node.disk.exists(f"bulk/{part_name}.part")
    world.run(40_000)
    for other in world.nodes.values():
        assert other.disk.list("bulk") == [f"{name_of(kept)}.bundle"]
    assert store.counts.removed == 1


def gone_by(monkeypatch: pytest.MonkeyPatch, *, checkpoint_period_ms: int) -> tuple[World, Client, Node, Loader, int]:
    """A world whose hour ends soon, a bundle of that hour loaded while one slave is down, delivered and removed."""
    monkeypatch.setattr(trio, "EPOCH_MS", 500_000 * HOUR_MS - 12_000)
    monkeypatch.setattr(bundle_store, "UNCLAIMED_MS", 3_000)
    monkeypatch.setattr(bundle_store, "CHECK_PERIOD_MS", 500)
    config = replace(
        CoreConfig(),
        segment_bytes=1 << 20,
        retention_period_ms=500,
        hours_kept=0,
        checkpoint_period_ms=checkpoint_period_ms,
    )
    world = World(config=config)
    begin(world)
    master = world.elect()
    slave = next(node for node in world.nodes.values() if node is not master)
    slave.kill()
    client = Client(world)
    client.consume()
    data, wanted = bundle_of([world.now_ms + 1_000 + n for n in range(50)])
    loader = Loader(world, [data])
    loader.load()
    for _ in range(3):
        client.schedule([6_000])
        world.run(8_000)
    check(client, wanted)
    assert master.host is not None and master.host.core.wheel.bundle_chunks == 0
    return world, client, slave, loader, len(wanted)


def test_a_bundle_stays_until_a_checkpoint_covers_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hours are removed, but a replay would take it over again: without it every node would wait for the others."""
    world, _, slave, loader, units = gone_by(monkeypatch, checkpoint_period_ms=10_000_000)
    path = bundle.bundle_path(name_of(loader.datas[0]))
    for node in world.nodes.values():
        assert node is slave or node.disk.exists(path)
        node.kill()
    for node in world.nodes.values():
        node.start()
    world.run(3_000)
    settle_down(world)
    for node in world.nodes.values():
        assert node.host is not None and node.host.core.parts.bulk.load("job").units == units
        assert not node.host.installs
        done: list[object] = []
        node.host.core.checkpointer.request(Reply.either(done.append))
        node.wake()
        world.run_until(lambda done=done: bool(done))  # type: ignore[misc]
    world.run(8_000)
    assert not any(node.disk.exists(path) for node in world.nodes.values()), "a checkpoint covers its end"
    assert not any(node.fatal for node in world.nodes.values())


def test_a_slave_copies_a_checkpoint_when_nobody_has_the_bundle_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes back after the bundle's hours were removed everywhere, and the log still names it."""
    world, client, slave, loader, units = gone_by(monkeypatch, checkpoint_period_ms=2_000)
    path = bundle.bundle_path(name_of(loader.datas[0]))
    world.run_until(lambda: not any(node.disk.exists(path) for node in world.nodes.values()), 20_000)
    slave.start()
    world.run(6_000)
    settle_down(world)
    assert slave.host is not None and slave.host.installs == 1
    assert slave.host.core.parts.bulk.load("job").units == units and not slave.host.core.parts.bulk.waiting
    client.schedule([500])
    world.run(3_000)
    assert not client.lost()
    assert not any(node.fatal for node in world.nodes.values())


@pytest.mark.parametrize("lost", [False, True], ids=["all are up", "the earlier master is lost"])
def test_a_master_makes_way_if_nobody_has_the_bundle_any_more(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """P10: a node comes back after the bundle's hours were removed everywhere, gets all of the log that names it, and
    leads before anybody has told it that the bundle is gone. It led on and on, and could apply nothing. Now another
    leads while it copies a checkpoint."""
    world, client, late, loader, units = gone_by(monkeypatch, checkpoint_period_ms=2_000)
    path = bundle.bundle_path(name_of(loader.datas[0]))
    world.run_until(lambda: not any(node.disk.exists(path) for node in world.nodes.values()), 20_000)
    master = world.elect()
    assert master.host is not None
    last_index = master.host.core.log.status().last_index
    late.start()
    host = late.host
    assert host is not None
    world.run_until(lambda: bool(host.core.parts.bulk.waiting) and host.core.log.status().last_index == last_index)
    handed: list[Failure | None] = []
    # A handover would not choose it; an election may.
    master.host.core.listener.handover_ready = lambda peer_id: True  # type: ignore[method-assign]
    master.host.core.parts.mastership.start_transfer(late.name, handed.append)
    master.wake()
    world.run_until(lambda: host.core.parts.mastership.elected)
    assert host.core.parts.bulk.waiting and not host.installs
    if lost:
        master.kill()
    for node in world.nodes.values():
        node.holds_checkpoints = True
    world.run_until(lambda: world.master() not in (None, late))
    for node in world.nodes.values():
        node.release()
    world.run_until(lambda: host.installs == 1)
    start(master)
    settle_down(world)
    assert handed == [None]
    assert host.core.parts.bulk.load("job").units == units and not host.core.parts.bulk.waiting
    client.schedule([500])
    world.run(3_000)
    assert not client.lost()
    assert not any(node.fatal for node in world.nodes.values())


def test_a_bundle_that_rots_on_a_slave_stops_that_node_alone(world: World) -> None:
    """After it was accepted its bytes change: the node names the file and stops, the others deliver everything."""
    client = Client(world)
    client.consume()
    master = world.elect()
    slave = next(node for node in world.nodes.values() if node is not master)
    data, wanted = bundle_of([world.now_ms + 3_000 + n for n in range(300)])
    loader = Loader(world, [data])
    loader.send_all()
    layout = bundle.Layout(1_000, 1, np.frombuffer(data, bundle.TABLE, 1, bundle.HEADER_BYTES))
    slave.disk.flip(bundle.bundle_path(name_of(data)), layout.index_at + 5)
    loader.take_over(0)
    world.run(6_000)
    check(client, wanted)
    assert slave.host is None and name_of(data) in slave.fatal
    slave.fatal = ""


def test_a_checkpoint_waits_for_what_a_node_lacks(world: World) -> None:
    """While the bundle is being fetched there is nothing whole to write; then the checkpoint is, and names it."""
    master = world.elect()
    slave = next(node for node in world.nodes.values() if node is not master)
    slave.kill()
    data, _ = bundle_of([world.now_ms + 30_000 + n * 7_000 for n in range(3_000)])
    Loader(world, [data]).load()
    slave.start()
    assert slave.host is not None
    core = slave.host.core
    for _ in range(400):
        world.run(1)
        if core.parts.bulk.waiting:
            break
    done: list[Any] = []
    core.checkpointer.request(Reply.either(done.append))
    slave.wake()
    assert core.wheel.ingestion.absorbing and not done
    world.run_until(lambda: bool(done))
    assert not core.wheel.ingestion.absorbing and bundle.bundle_path(name_of(data)) in {file.path for file in done[0]}
    core.checkpointer.copied(done[0])
    settle_down(world)
