"""Promises of the core on three simulated nodes: loss of the master, handover, leases, catching up."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.node.core.trio import Client, World, digests
from tickwheel.node.core.checkpoint import JOURNAL_DIRECTORY
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.schedule.dispatcher import Phase
from tickwheel.node.core.watch.status import node_status
from tickwheel.node.state.schema import LOG_LEVEL
from tickwheel.proto import admin_pb2, consumer_pb2
from tickwheel.replication.entries import REGULAR
from tickwheel.replication.journal import Journal
from tickwheel.replication.raft import RaftLog
from tickwheel.storage.disk import DiskFullError


def load(world: World, client: Client, seconds: float, delays: tuple[int, int] = (50, 3_000)) -> None:
    """Schedule ten messages every 20 ms for a while. Several are due in the same tick, for ticks are what costs."""
    period_ms = 20
    offset_ms = world.rng.randrange(period_ms)
    for _ in range(int(seconds * 1_000 / period_ms)):
        client.schedule([world.rng.randrange(*delays, period_ms) + offset_ms for _ in range(10)])
        world.run(period_ms)


def test_a_master_whose_first_command_finds_the_disk_full_stands_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """P10: proposed again at once, and refused at once by a log that leads no more, it would hold the loop for ever."""
    world = World()
    append, propose = Journal.append, RaftLog.propose
    proposed: Counter[int] = Counter()
    refused: list[int] = []

    def full(journal: Journal, index: int, term: int, command: bytes) -> None:
        if command[:1] == REGULAR and not refused:
            refused.append(index)
            raise DiskFullError("no room")
        append(journal, index, term, command)

    def counted(log: RaftLog, *asked: Any) -> None:
        proposed[world.now_ns] += 1
        assert proposed[world.now_ns] < 20, "it goes round and round"
        propose(log, *asked)

    monkeypatch.setattr(Journal, "append", full)
    monkeypatch.setattr(RaftLog, "propose", counted)
    master = world.elect()
    assert refused and master.host is not None
    client = Client(world)
    client.schedule([50])
    client.consume()
    world.run(1_000)
    assert len(client.got) == 1 and not any(node.fatal for node in world.nodes.values())


@pytest.mark.parametrize("seed", range(2))
def test_killed_master_loses_nothing(seed: int) -> None:
    """P1, P3, P4, P8: the master dies with its unsynced data under load; all is delivered, in time, by the next."""
    world = World(seed)
    client = Client(world)
    master = world.elect()
    client.consume()
    load(world, client, 3)
    killed_ms = world.now_ms
    master.kill()
    world.run_until(lambda: world.master() is not None, 2_000)
    assert world.now_ms - killed_ms < 1_000
    load(world, client, 2)
    master.start()
    load(world, client, 1)
    world.run(6_000)
    assert len(client.acked) > 2_500
    assert not client.lost()
    assert not client.early()
    assert len(digests(world)) == 1


def test_all_nodes_killed_at_once_lose_nothing() -> None:
    """P1: power fails everywhere; what was acknowledged comes back from the journals."""
    world = World(5)
    client = Client(world)
    world.elect()
    load(world, client, 2, (5_000, 20_000))
    for node in world.nodes.values():
        node.kill()
    world.run(500)
    for node in world.nodes.values():
        node.start()
    world.elect()
    client.consume()
    world.run(25_000)
    assert len(client.acked) >= 900
    assert not client.lost()
    assert not client.early()
    assert len(digests(world)) == 1


def test_a_master_says_that_it_serves_only_when_it_does() -> None:
    """Elected, it refuses requests until its first command is applied, and its time may be put back then: who looks at
    its status must not take it for a master that serves before."""
    world = World(3)
    first = world.elect()
    first.kill()
    heirs = [node.host.core for node in world.nodes.values() if node.host is not None]
    states = []
    while world.master() is None:
        world.run(0.5)
        states += [node_status(core).state for core in heirs if core.parts.mastership.elected and not core.leading]
    assert set(states) == {admin_pb2.NODE_ALIGNING}
    master = world.elect().host
    assert master is not None
    world.run_until(lambda: node_status(master.core).state == admin_pb2.NODE_SERVING, 1_000)


def test_a_new_master_knows_what_a_member_reads_that_is_away() -> None:
    """In a rolling upgrade a master writes nothing new before all members read it. The next master, which has not heard
    the third member yet or cannot, goes on writing it: else its entries would mean less than those before."""
    world = World(3)
    master = world.elect()
    assert master.host is not None
    world.run(300)
    assert master.host.core.parts._all_understand(LOG_LEVEL)
    away = next(node for node in world.nodes.values() if node is not master)
    away.kill()
    answers: list[object] = []
    master.host.core.parts.mastership.start_transfer(None, answers.append)
    world.run_until(lambda: bool(answers) and world.master() not in (None, master))
    following = world.elect()
    assert following.host is not None and following is not away
    assert following.host.core.parts._all_understand(LOG_LEVEL)


def test_planned_handover_repeats_nothing() -> None:
    """A handover under load: another node leads within 200 ms, nothing is lost and nothing comes twice."""
    world = World(2)
    client = Client(world)
    master = world.elect()
    client.consume()
    load(world, client, 2)
    answers: list[object] = []
    assert master.host is not None
    master.host.core.parts.mastership.start_transfer(None, answers.append)
    master.wake()
    began_ms = world.now_ms
    world.run_until(lambda: bool(answers))
    world.run_until(lambda: world.master() not in (None, master))
    assert answers == [None]
    assert world.now_ms - began_ms < 200
    load(world, client, 2)
    following = world.master()
    assert following is not None and following.host is not None
    assert following.host.core.parts.dispatcher.phase is Phase.RUNNING, (
        "a steady load must not keep it aligning for ever"
    )
    world.run(5_000)
    assert not client.lost()
    assert not client.repeated()


def held_by_a_slow_consumer(sync: bool) -> int:
    """Deliver 50 messages to a consumer that keeps them, kill the master; how many come again within the lease."""
    world = World(3)
    for node in world.nodes.values():
        assert node.host is not None
        node.host.core.parts.sync.enabled = sync
    client = Client(world)
    client.settle = False
    master = world.elect()
    client.consume(lease_ms=20_000)
    client.schedule([100] * 50)
    world.run(1_000)
    assert len(client.got) == 50
    master.kill()
    world.elect()
    world.run(3_000)
    again = len(client.repeated())
    world.run(36_000)
    assert len(client.repeated()) == 50, "after the lease and the pause of level 3 all of them come again"
    return again


def test_held_lease_is_not_delivered_again() -> None:
    """P5: the new master knows from the 50 ms sync who holds what; without the sync it repeats all of it."""
    assert held_by_a_slow_consumer(sync=True) == 0
    assert held_by_a_slow_consumer(sync=False) == 50


def test_a_nack_before_the_failover_comes_again_after_it() -> None:
    """P1: the next master has heard of the lease, and its state says that a retry waits: it is delivered in time."""
    world = World(8)
    client = Client(world)
    master = world.elect()
    client.outcome, client.gives_credit = consumer_pb2.RETRY, False
    client.consume(credits=20, lease_ms=5_000)
    client.schedule([100] * 20)
    world.run(1_000)
    assert len(client.got) == 20 and not client.repeated()
    client.outcome, client.gives_credit = consumer_pb2.ACK, True
    master.kill()
    world.elect()
    client.consume()
    world.run(12_000)
    assert len(client.repeated()) == 20, "nobody holds them any more"
    world.run(20_000)
    assert all(len(seen) == 2 for seen in client.got.values())


def test_isolated_master_stops_delivering() -> None:
    """P7: a master without a majority delivers nothing once its lease is over, and acknowledges nothing."""
    world = World(4)
    client = Client(world)
    master = world.elect()
    client.consume()
    client.schedule([i * 20 for i in range(200)])
    world.run(1_000)
    world.cut_off(master.name)
    host = master.host
    assert host is not None
    world.run(world.config.lease_ms + 60)
    delivered = host.core.parts.counts.deliveries.delivered
    world.run(2_000)
    assert host.core.parts.counts.deliveries.delivered == delivered
    assert not host.core.leading
    assert world.master() is not None
    world.heal()
    world.run(6_000)
    assert not client.lost()
    assert len(digests(world)) == 1


def test_expired_lease_returns_the_message() -> None:
    """A consumer that keeps what it got: after the lease and a pause it comes again, with the next attempt."""
    world = World(7)
    client = Client(world)
    client.settle = False
    world.elect()
    client.consume(lease_ms=500)
    client.schedule([10])
    world.run(12_000)
    ((_, first, _), (_, second, _), *_rest) = next(iter(client.got.values()))
    assert (first, second) == (1, 2)


@pytest.mark.parametrize("failure", ["fsync", "write"])
def test_a_journal_that_fails_under_load_loses_nothing(failure: str) -> None:
    """The master hands over and ends, and the power fails on all nodes a moment later: what was acknowledged is there,
    though the next master acknowledged it by what the failed one had sent."""
    world = World(8)
    client = Client(world)
    master = world.elect()
    client.consume()
    load(world, client, 1)
    fail = master.disk.fail_fsync if failure == "fsync" else master.disk.fail_write
    fail(1, lambda path: path.startswith(JOURNAL_DIRECTORY))
    load(world, client, 1)
    assert "Input/output error" in master.fatal
    for node in world.nodes.values():
        node.kill()
    for node in world.nodes.values():
        node.start()
    world.elect()
    load(world, client, 1)
    world.run(8_000)
    assert not client.lost() and not client.early()


def test_the_synced_pair_survives_a_restart() -> None:
    """P6: a node that comes back shows the tick of about a second before it died, though it has heard nothing yet."""
    world = World(11)
    client = Client(world)
    master = world.elect()
    client.consume()
    load(world, client, 3)
    slave = next(node for node in world.nodes.values() if node is not master)
    assert slave.host is not None and master.host is not None
    tick_before = master.host.core.wheel.window.tick
    for node in world.nodes.values():
        node.kill()
    slave.start()
    assert slave.host is not None
    heard = slave.host.core.parts.sync.heard
    assert heard.term > 0 and heard.at_ns == 0
    assert tick_before - 2 <= heard.tick <= tick_before
    assert slave.host.core.recovering
    status = node_status(slave.host.core)
    assert status.synced_tick == heard.tick and status.tick <= heard.tick


def test_a_damaged_synced_pair_is_ignored() -> None:
    """It is soft: a node starts without it."""
    world = World(12)
    client = Client(world)
    world.elect()
    client.consume()
    load(world, client, 2)
    node = next(iter(world.nodes.values()))
    node.kill()
    file = node.disk.open("synced", create=True)
    file.truncate(0)
    file.append(b"no such thing")
    file.close()
    node.start()
    assert node.host is not None and not node.fatal
    assert node.host.core.parts.sync.heard.tick == 0


@pytest.mark.parametrize("seed", (21, 23))
def test_power_losses_under_load_lose_nothing(seed: int) -> None:
    """Power fails on all nodes at once, twice a seed, at moments of the dice, with random pages written back and
    checkpoints and merges under way: all that was acknowledged is delivered, on time or later, digests equal."""
    config = replace(CoreConfig(), checkpoint_period_ms=400, checkpoint_log_bytes=1 << 16, buffer_bytes_max=1 << 16)
    world = World(seed, config=config)
    client = Client(world)
    world.elect()
    client.consume(lease_ms=1_000)
    for _ in range(2):
        load(world, client, 1, (50, 6_000))
        world.run(world.rng.randrange(700))
        for node in world.nodes.values():
            node.kill()
        world.run(world.rng.randrange(300))
        for node in world.nodes.values():
            node.start()
        client.closed = True  # its connection broke with the node; it opens a new one
        world.elect()
    world.run(12_000)
    assert len(client.acked) > 300
    assert not client.lost()
    assert not client.early()
    assert len(digests(world)) == 1
