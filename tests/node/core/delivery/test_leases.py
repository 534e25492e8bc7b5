"""P5 through changes of master: who holds what is known to whoever leads next, be it the one that led before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.node.core.delivery.test_fifo import Ordered
from tests.node.core.delivery.test_retries import Picky, admin
from tests.node.core.trio import Client, Node, World, digests
from tickwheel.node.core.config import CoreConfig, DeliveryOrder
from tickwheel.node.core.delivery import known_leases
from tickwheel.node.core.delivery.heard_leases import POSITION_MAX, HeardLeases
from tickwheel.node.core.delivery.leases import Lease, LeaseTable
from tickwheel.node.core.delivery.sync_files import LEASES_BYTES_MAX, LEASES_PATH, pack_leases, read_leases
from tickwheel.node.failure import not_master
from tickwheel.proto import admin_pb2, consumer_pb2
from tickwheel.proto.peer_pb2 import LeaseRange, PeerFrame, Sync
from tickwheel.storage.whole_file import write_whole

CUT_MS = 365
"""Longer than the master's lease, shorter than most elections: it is often elected again."""


def elected_again(world: World, master: Node) -> None:
    """Make a master lose its mastership and win the next election itself."""
    assert master.host is not None
    for _ in range(20):
        term = master.host.core.term
        world.cut_off(master.name)
        world.run(CUT_MS)
        world.heal()
        world.run(50)
        world.run_until(lambda: world.master() is not None)
        if world.master() is master and master.host.core.term > term:
            return
        again: list[object] = []
        other = world.master()
        assert other is not None and other.host is not None
        other.host.core.parts.mastership.start_transfer(master.name, again.append)
        world.run_until(lambda: world.master() is master)
        return
    raise AssertionError("it was never elected again")


@pytest.mark.parametrize("order", list(DeliveryOrder))
def test_a_master_that_is_elected_again_remembers_what_it_gave_out(order: DeliveryOrder) -> None:
    """It had told the slaves, and nobody tells it: what consumers hold comes again when their leases are over, and
    then as the second attempt."""
    world = World(1, config=replace(CoreConfig(), delivery_order=order))
    client = Client(world)
    client.settle = False
    master = world.elect()
    assert master.host is not None
    client.consume(lease_ms=20_000)
    client.schedule([100] * 50)
    world.run(1_000)
    assert len(client.got) == 50
    for _ in range(3):
        term = master.host.core.term
        elected_again(world, master)
        assert master.host.core.term > term
        world.run(1_000)
    assert not client.repeated()
    client.schedule([100] * 10)
    world.run(1_000)
    assert len(client.got) == 60, "what nobody holds is delivered"
    world.run(40_000)
    assert {tuple(attempt for _, attempt, _ in seen) for seen in client.got.values()} == {(1, 2)}
    assert len(digests(world)) == 1


def test_a_master_that_is_elected_again_keeps_held_message_groups_blocked() -> None:
    """FIFO: neither what is held nor what is behind it comes before it is settled or its lease is over."""
    world = World(2)
    admin(world, create_topic=admin_pb2.CreateTopicRequest(name="t", fifo=True))
    admin(world, create_group=admin_pb2.CreateGroupRequest(name="g", topics=["t"]))
    client = Ordered(world, lambda record, attempt: None)
    master = world.elect()
    client.consume(lease_ms=8_000)
    client.schedule_of(["a", "a", "b"])
    world.run(500)
    assert client.by_group() == {"a": [(0, 1)], "b": [(2, 1)]}
    elected_again(world, master)
    client.schedule_of(["c"])
    world.run(3_000)
    assert client.by_group() == {"a": [(0, 1)], "b": [(2, 1)], "c": [(3, 1)]}


def test_what_a_broadcasting_group_holds_is_nobody_elses() -> None:
    """A new mastership starts its consumers afresh: no lease of an earlier one holds a message back."""
    world = World(3)
    admin(world, create_topic=admin_pb2.CreateTopicRequest(name="t"))
    admin(world, create_group=admin_pb2.CreateGroupRequest(name="g", topics=["t"], broadcasting=True))
    client = Picky(world, lambda record, attempt: None)
    master = world.elect()
    client.consume(lease_ms=20_000)
    world.run(100)
    client.schedule([50] * 5)
    world.run(500)
    assert len(client.got) == 5 and master.host is not None
    assert master.host.core.parts.delivery.leases.in_flight == 5
    slaves = [node.host.core.parts.delivery for node in world.nodes.values() if node is not master and node.host]
    assert len(slaves) == 2 and not any(slave.leases.heard for slave in slaves), "nobody can use them"
    elected_again(world, master)
    world.run(1_000)
    assert all(len(seen) >= 2 for seen in client.got.values())
    assert all(lease.session_id for lease in master.host.core.parts.delivery.leases.table.open_leases())


def test_a_reset_ends_the_leases_of_an_earlier_mastership() -> None:
    """The group begins anew: what was held before is delivered again at once."""
    world = World(4)
    client = Client(world)
    client.settle = False
    master = world.elect()
    client.consume(lease_ms=20_000)
    client.schedule([100] * 5)
    world.run(500)
    elected_again(world, master)
    world.run(500)
    assert len(client.got) == 5 and not client.repeated()
    admin(world, reset_group=admin_pb2.ResetGroupRequest(name="g", start_from=consumer_pb2.EARLIEST))
    world.run(500)
    assert len(client.repeated()) == 5


@pytest.mark.parametrize("refused", [False, True])
def test_a_reset_overtakes_the_return_of_a_lease(monkeypatch: pytest.MonkeyPatch, *, refused: bool) -> None:
    """Nobody has looked at the channel since this mastership began. The return of the earlier epoch has no effect, or
    is refused: its message comes all the same."""
    world = World(4)
    client = Client(world)
    client.settle = False
    master = world.elect()
    client.consume(lease_ms=500)
    client.schedule([50])
    world.run(300)
    assert len(client.got) == 1 and master.host is not None
    delivery = master.host.core.parts.delivery
    returns: list[Any] = []
    monkeypatch.setattr(delivery.settlements, "expire", lambda *given: returns.append(given))
    world.run_until(lambda: bool(returns))
    delivery.channels._by_key.clear()
    admin(world, reset_group=admin_pb2.ResetGroupRequest(name="g", start_from=consumer_pb2.EARLIEST))
    world.run(100)
    monkeypatch.undo()
    reply = returns[0][-1]
    if refused:
        reply.fail(not_master(None, None))
    else:
        delivery.settlements.expire(*returns[0])
    world.run(1_000)
    assert [attempt for _, attempt, *_ in next(iter(client.got.values()))][:2] == [1, 1]


@pytest.mark.parametrize("late", [False, True])
def test_two_losses_of_the_master_repeat_nothing_that_was_delivered_ahead(
    monkeypatch: pytest.MonkeyPatch, *, late: bool
) -> None:
    """Push-first: what was delivered ahead of a lost dispatch is known by its id alone. The second master tells of it
    before it has dispatched it, and the third one was not there when it was delivered. `late`: so many leases come
    before it that the turn to take it over does not come."""
    if late:
        monkeypatch.setattr(HeardLeases, "take_some", lambda self, leases_max: HeardLeases())
    world = World(6, config=replace(CoreConfig(), delivery_order=DeliveryOrder.PUSH_FIRST, dispatch_ahead_ms=0))
    client = Client(world)
    client.settle = False
    first = world.elect()
    second, third = (node for node in world.nodes.values() if node is not first)
    client.consume(lease_ms=30_000)
    world.run(200)
    third.kill()
    client.schedule([500] * 40)
    world.run(450)
    assert first.host is not None and second.host is not None
    # The slave hears the syncs and no entry: the dispatch is lost with the master.
    receive = second.host.receive
    second.host.receive = lambda peer_id, frame: (  # type: ignore[method-assign]
        not frame.HasField("append_entries") and receive(peer_id, frame)
    )
    world.run(160)
    assert len(client.got) == 40
    first.kill()
    client.closed = True
    del second.host.receive
    third.start()
    second.host.core.parts.dispatcher.tick = lambda now: None  # type: ignore[method-assign]
    world.run_until(lambda: world.master() is second)
    inherited = second.host.core.parts.delivery.leases.inherited
    assert inherited.left if late else list(inherited.unplaced()), "the dispatch was not lost"
    world.run(200)
    second.kill()
    client.closed = True
    first.start()
    first.host.core.parts.delivery.leases.heard = HeardLeases()
    last = [node.host.core.parts for node in (first, third) if node.host is not None]
    for parts in last:
        parts.dispatcher.tick = lambda now: None  # type: ignore[method-assign]
    world.run_until(lambda: any(len(parts.delivery.sessions) for parts in last))
    for parts in last:
        del parts.dispatcher.tick
    world.run(2_000)
    assert not client.repeated()
    world.run(60_000)
    assert not client.lost()
    assert {tuple(attempt for _, attempt, _ in seen) for seen in client.got.values()} == {(1, 2)}


def test_a_lease_of_an_earlier_term_stays_with_who_heard_of_it() -> None:
    """The next master may not have heard of it; the one after that may be a slave that had."""
    world = World(5)
    master = world.elect()
    slave = next(node for node in world.nodes.values() if node is not master)
    assert slave.host is not None
    core = slave.host.core
    lease = LeaseRange(group_id=1, topic_id=1, first_position=0, count=5, until_ms=world.now_ms + 60_000)
    core.parts.sync.incoming("b", PeerFrame(term=core.term, sync=Sync(number=10_000, leases=[lease])))
    core.parts.sync.incoming("b", PeerFrame(term=core.term + 1, sync=Sync(number=1, complete=True)))
    assert core.parts.delivery.leases.heard.of_channel((lease.group_id, lease.topic_id)) == [lease]


def all_lose_power(world: World, client: Client) -> None:
    for node in world.nodes.values():
        node.kill()
    client.closed = True
    for node in world.nodes.values():
        node.start()
    world.elect()


def test_leases_outlive_a_loss_of_all_nodes() -> None:
    """What is out longer than two seconds is known after it, to the end of its lease and no longer."""
    world = World(7)
    client = Client(world)
    client.settle = False
    world.elect()
    client.consume(lease_ms=20_000)
    client.schedule([100] * 50)
    world.run(3_000)
    assert len(client.got) == 50
    all_lose_power(world, client)
    world.run(3_000)
    assert not client.repeated()
    client.schedule([100] * 5)
    world.run(1_000)
    assert len(client.got) == 55
    world.run(45_000)
    assert {tuple(attempt for _, attempt, _ in seen) for seen in client.got.values()} == {(1, 2)}
    assert len(digests(world)) == 1


def test_a_lease_on_disk_is_no_longer_than_any_lease() -> None:
    """However far ahead the clock was that it was given out by."""
    world = World(8, config=replace(CoreConfig(), lease_max_ms=5_000, lease_default_ms=1_000))
    client = Client(world)
    client.settle = False
    world.elect()
    client.consume(lease_ms=5_000)
    client.schedule([100])
    world.run(2_000)
    ahead = LeaseRange(group_id=1, topic_id=1, count=1, until_ms=world.now_ms + 10**12)
    for node in world.nodes.values():
        node.kill()
        write_whole(node.disk, LEASES_PATH, pack_leases([[ahead]]))
    all_lose_power(world, client)
    world.run(4_000)
    assert not client.repeated()
    world.run(20_000)
    assert client.repeated()


@pytest.mark.parametrize("content", [b"no such thing", b""])
def test_a_damaged_file_of_leases_costs_a_repeat(content: bytes) -> None:
    """Nothing else: the node starts, and its next file is whole."""
    world = World(9)
    client = Client(world)
    client.settle = False
    world.elect()
    client.consume(lease_ms=20_000)
    client.schedule([100] * 5)
    world.run(3_000)
    for node in world.nodes.values():
        node.kill()
        file = node.disk.open(LEASES_PATH, create=True)
        file.truncate(0)
        file.append(content)
        file.fsync()
        file.close()
    all_lose_power(world, client)
    world.run(3_000)
    assert len(client.repeated()) == 5
    assert not any(node.fatal for node in world.nodes.values())
    assert all(len(read_leases(node.disk)) == 1 for node in world.nodes.values())


def test_the_file_of_leases_is_bounded() -> None:
    """The longest of them count."""
    many = [LeaseRange(group_id=1, topic_id=1, first_position=n, count=1, until_ms=10**12 - n) for n in range(80_000)]
    content = pack_leases([many])
    kept = Sync.FromString(content).leases
    assert LEASES_BYTES_MAX * 0.7 < len(content) <= LEASES_BYTES_MAX
    assert kept[0] == many[0] and len(kept) > 25_000


def test_an_idle_file_of_leases_is_not_written_again() -> None:
    """Nothing is given out and nothing ends: the disk is left alone."""
    world = World(10)
    client = Client(world)
    client.settle = False
    master = world.elect()
    client.consume(lease_ms=60_000)
    client.schedule([100] * 5)
    world.run(3_000)
    written: list[str] = []
    rename = master.disk.rename

    def noting(source: str, target: str) -> None:
        written.append(target)
        rename(source, target)

    master.disk.rename = noting  # type: ignore[method-assign]
    world.run(5_000)
    assert LEASES_PATH not in written


def test_a_lease_that_was_renewed_often_counts_once() -> None:
    """In status, and when its consumer leaves: each message is given back by one command."""
    table = LeaseTable()
    positions, attempts = np.arange(4, dtype=np.uint64), np.ones(4, np.uint32)
    table.give(Lease((1, 1), positions, attempts, 1_000, 5))
    for until_ms in (1_300, 1_600):
        table.extend(Lease((1, 1), positions[1:3], attempts[1:3], until_ms, 5))
    assert table.out() == table.out_by_group()[1] == 4 and table.out_by_group()[2] == 0
    ended = list(table.close_session(5))
    assert sorted(p for lease in ended for p in lease.positions.tolist()) == [0, 1, 2, 3]
    assert table.out() == 0 and not list(table.expire(5_000))


def test_ranges_that_make_no_sense_hold_nothing() -> None:
    """They may come from a peer or a damaged file: no array as long as they say, no error."""
    heard = HeardLeases()
    good = LeaseRange(group_id=1, topic_id=1, first_position=3, count=2, until_ms=100)
    odd = [
        LeaseRange(group_id=1, topic_id=1, first_position=3, count=0, until_ms=100),
        LeaseRange(group_id=1, topic_id=1, first_position=3, count=0xFFFFFFFF, until_ms=100),
        LeaseRange(group_id=1, topic_id=1, first_position=POSITION_MAX, count=1, until_ms=100),
        LeaseRange(group_id=1, topic_id=1, first_position=3, count=2, attempts=b"x", until_ms=100),
        LeaseRange(group_id=1, topic_id=1, first_position=3, count=2, ids=b"x", until_ms=100),
    ]
    heard.hear([*odd, good])
    assert heard.size() == 1
    assert [lease.positions.tolist() for lease in heard.held(0, {(1, 1): 0}.get)] == [[3, 4]]


def test_what_is_told_again_takes_no_more_room() -> None:
    """A slave whose connection breaks often is told everything each time."""
    heard = HeardLeases()
    placed = [LeaseRange(group_id=1, topic_id=1, first_position=10 * n, count=2, until_ms=100 + n) for n in range(20)]
    ahead = [LeaseRange(group_id=1, topic_id=1, first_position=500, count=1, until_ms=100, ids=b"12345678")]
    for _ in range(50):
        heard.hear([*placed, *ahead])
    assert heard.size() == 21


def test_a_flood_of_one_group_leaves_the_others_their_place_in_the_file() -> None:
    """Its leases end last, and are more than fit."""
    flood = [LeaseRange(group_id=1, topic_id=1, first_position=n, count=1, until_ms=10**13 - n) for n in range(80_000)]
    others = [[LeaseRange(group_id=g, topic_id=1, first_position=n, until_ms=5) for n in range(20)] for g in (2, 3)]
    kept = Sync.FromString(pack_leases([flood, *others])).leases
    assert [sum(r.group_id == g for r in kept) for g in (2, 3)] == [20, 20]
    assert len(kept) > 20_000


def test_a_master_notes_leases_of_every_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_leases, "LEASES_WRITTEN_MAX", 100)
    assert known_leases.shares([20, 30]) == [20, 30]
    assert known_leases.shares([1_000, 10, 500]) == [45, 10, 45]
    assert known_leases.shares([]) == []


def test_leases_that_a_slow_disk_kept_waiting_are_written_when_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that takes longer than a second: the next one begins when it ends, not up to a second later."""
    world = World(9)
    client = Client(world)
    client.settle = False
    master = world.elect()
    assert master.host is not None
    file = master.host.core.parts.lease_file
    client.consume(lease_ms=20_000)
    submit, held = file._executor.submit, list[Callable[[], None]]()
    with monkeypatch.context() as slow:
        slow.setattr(file, "_executor", SimpleNamespace(submit=lambda *work: held.append(partial(submit, *work))))
        client.schedule([100])
        world.run_until(lambda: bool(held), 3_000)
        client.schedule([100])
        world.run_until(lambda: len(client.got) == 2)
        world.run(1_200)
    assert not read_leases(master.disk) and len(held) == 1
    held[0]()
    world.run(200)
    assert sum(r.count for r in read_leases(master.disk)) == 2


def test_a_look_at_a_channel_leaves_the_fresh_leases_of_others_alone() -> None:
    """Over ten thousand topics nearly each message makes a channel, which looks for its leases: each of these looks
    entered all leases given since the last into the lists."""
    table = LeaseTable()
    one, other = (Lease((1, topic_id), np.zeros(1, np.uint64), np.ones(1, np.uint32), 9_000, 5) for topic_id in (1, 2))
    table.give(one)
    assert table.of_channel((1, 2)) == [] and list(table._fresh) == [one]
    table.give(other)
    assert table.of_channel((1, 1)) == [one] and table.of_channel((1, 2)) == [other]
    settled = Lease((1, 3), np.zeros(1, np.uint64), np.ones(1, np.uint32), 9_000, 5)
    table.give(settled)
    list(table.forget_settled(lambda channel: int(channel == (1, 3))))
    assert not table._fresh_channels and table.of_channel((1, 3)) == []
    assert table.out_by_group() == {1: 2}


def test_the_first_sync_that_a_slave_hears_after_its_start_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come before anything else that names the master. It has all leases, and the next one goes on where it
    ended."""
    world = World(1)
    client = Client(world)
    client.settle = False
    master = world.elect()
    slave = next(node for node in world.nodes.values() if node is not master)
    client.consume()
    world.run(100)
    slave.kill()
    client.schedule([100] * 3)
    world.run_until(lambda: len(client.got) == 3)
    send = master.send

    def only_syncs(peer_id: str, frame: PeerFrame) -> bool:
        return (peer_id == slave.name and frame.WhichOneof("body") != "sync") or send(peer_id, frame)

    monkeypatch.setattr(master, "send", only_syncs)
    slave.start()
    assert slave.host is not None
    leases = slave.host.core.parts.delivery.leases.heard
    world.run_until(lambda: sum(len(one.positions) for one in leases.held(world.now_ms, lambda key: 0)) == 3, 250)
