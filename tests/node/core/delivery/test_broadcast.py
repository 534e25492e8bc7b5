"""Broadcasting groups on three simulated nodes: everybody gets everything, nothing is retried."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tests.node.core.delivery.test_retries import ACK, Judge, Picky, admin, attempts_of, settlement
from tests.node.core.trio import World, digests
from tickwheel.node.core.delivery import broadcast, delivery
from tickwheel.node.core.delivery.broadcast import ANSWERED_KEPT, Reader
from tickwheel.node.core.world import Now
from tickwheel.node.state.subscription import Subscription
from tickwheel.proto import admin_pb2, consumer_pb2


def cluster(seed: int, *judges: Judge) -> tuple[World, list[Picky]]:
    """A broadcasting group with some consumers."""
    world = World(seed)
    admin(world, create_topic=admin_pb2.CreateTopicRequest(name="t"))
    admin(world, create_group=admin_pb2.CreateGroupRequest(name="g", topics=["t"], broadcasting=True))
    return world, [Picky(world, judge) for judge in judges]


def place(world: World) -> Subscription:
    """The group's place, on the master."""
    master = world.elect()
    assert master.host is not None
    found = master.host.core.state.subscription(1, 1)
    assert found is not None
    return found


def test_everybody_gets_everything_once_whatever_he_answers() -> None:
    """A nack and a dead letter count as answers: nothing comes again, nothing is buried, the floor moves."""
    world, clients = cluster(
        1,
        lambda record, attempt: ACK,
        lambda record, attempt: settlement(consumer_pb2.RETRY),
        lambda record, attempt: settlement(consumer_pb2.DEAD),
    )
    for client in clients:
        client.consume()
    world.run(100)
    clients[0].schedule([50] * 30)
    world.run(12_000)
    for client in clients:
        assert attempts_of(client) == {b"m%d" % n: [1] for n in range(30)}
        assert all(receipt.settled == 1 for receipt in client.receipts)
    assert place(world).floor == 30
    master = world.elect()
    assert master.host is not None and master.host.core.state.dead_letters_kept() == 0
    assert len(digests(world)) == 1


def test_the_floor_waits_for_everybody_who_is_there() -> None:
    """One consumer keeps silent: the floor waits until its lease is over; when it has left, nobody waits for it."""
    world, (quick, silent) = cluster(2, lambda record, attempt: ACK, lambda record, attempt: None)
    quick.consume()
    silent.consume(lease_ms=2_000)
    world.run(100)
    quick.schedule([50] * 5)
    world.run(1_000)
    assert len(quick.got) == len(silent.got) == 5 and place(world).floor == 0
    world.run(2_000)
    assert place(world).floor == 5, "its lease is over"
    quick.schedule([50] * 5)
    world.run(500)
    assert place(world).floor == 5
    assert silent.session is not None
    silent.session.close()
    world.elect().wake()
    world.run(500)
    assert place(world).floor == 10
    assert all(attempts == [1] for client in (quick, silent) for attempts in attempts_of(client).values())
    assert len(digests(world)) == 1


def test_who_waits_for_the_window_goes_on_when_the_floor_moves() -> None:
    """Nothing else may happen by then: no message becomes due, nobody gives credit."""
    world, (quick, silent) = cluster(6, lambda record, attempt: ACK, lambda record, attempt: None)
    quick.consume()
    silent.consume(lease_ms=2_000)
    world.run(100)
    for node in world.nodes.values():
        assert node.host is not None
        subscription = node.host.core.state.subscription(1, 1)
        assert subscription is not None
        subscription.window_messages_max = 10
    quick.schedule([50] * 30)
    world.run(1_000)
    assert len(quick.got) == len(silent.got) == 10 and place(world).floor == 0
    world.run(8_000)
    assert len(quick.got) == len(silent.got) == 30 and place(world).floor == 30


def test_nobody_waits_for_answers_about_what_a_filter_settled_meanwhile() -> None:
    """Its lease is forgotten, as all that it names is settled: its end would not tell that nobody answers."""
    world, (quick, silent) = cluster(5, lambda record, attempt: ACK, lambda record, attempt: None)
    quick.consume()
    silent.consume(lease_ms=3_000)
    world.run(100)
    quick.schedule([50] * 5)
    world.run(500)
    assert len(quick.got) == len(silent.got) == 5 and place(world).floor == 0
    admin(world, set_group_filter=admin_pb2.SetGroupFilterRequest(name="g", filter="red"))
    world.run(5_000)
    assert place(world).floor == 5
    admin(world, set_group_filter=admin_pb2.SetGroupFilterRequest(name="g", filter="*"))
    silent.judge = lambda record, attempt: ACK
    quick.schedule([50] * 5)
    world.run(1_000)
    assert len(silent.got) == 10 and place(world).floor == 10


def test_what_not_all_had_answered_comes_again_after_a_failover() -> None:
    """P1: nobody misses anything through a loss of the master; messages wait while nobody is there."""
    world, (one, two) = cluster(3, lambda record, attempt: ACK, lambda record, attempt: None)
    one.schedule([50] * 10)
    world.run(500)
    assert place(world).floor == 0
    one.consume()
    two.consume(lease_ms=30_000)
    world.run(500)
    assert len(one.got) == len(two.got) == 10
    two.judge = lambda record, attempt: ACK
    master = world.elect()
    master.kill()
    world.elect()
    master.start()
    one.schedule([50] * 10)
    world.run(2_000)
    assert len(one.got) == len(two.got) == 20
    assert all(len(two.got[b"m%d" % n]) == 2 for n in range(10)), "it had not answered for these"
    assert place(world).floor == 20
    world.run(500)
    assert len(digests(world)) == 1


def test_a_tick_serves_some_of_many_consumers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message goes to all of them: no tick hands out more than its share, nor looks at all consumers. Their
    answers look at one another about once for each place of the floor."""
    monkeypatch.setattr(delivery, "READERS_HANDED_MAX", 25)
    monkeypatch.setattr(delivery, "SLICE_READERS_MAX", 10)
    world, clients = cluster(4, *[lambda record, attempt: ACK] * 60)
    for client in clients:
        client.consume()
    world.run(100)
    handed: list[int] = []
    looks = advances = 0
    tick, looked_at, advance = delivery.Delivery.tick, Reader.place, broadcast.Broadcasts._advance

    def ticked(self: delivery.Delivery, now: Now) -> None:
        before = sum(len(client.got) for client in clients)
        tick(self, now)
        handed.append(sum(len(client.got) for client in clients) - before)

    def placed(self: Reader) -> int:
        nonlocal looks
        looks += 1
        return looked_at(self)

    def advanced(self: broadcast.Broadcasts, key: tuple[int, int]) -> None:
        nonlocal advances
        advances += 1
        advance(self, key)

    monkeypatch.setattr(delivery.Delivery, "tick", ticked)
    monkeypatch.setattr(Reader, "place", placed)
    monkeypatch.setattr(broadcast.Broadcasts, "_advance", advanced)
    clients[0].schedule([50] * 40)
    world.run_until(lambda: all(len(client.got) == 40 for client in clients))
    world.run(200)
    assert max(handed) == 25 and sum(handed) == 40 * 60
    assert place(world).floor == 40
    assert advances >= 40 * 60, "each answer asks"
    assert looks < 2 * advances, "not 60 for each"
    assert all(attempts == [1] for client in clients for attempts in attempts_of(client).values())


def test_a_consumer_that_holds_one_message_does_not_pile_up_the_others() -> None:
    """What was answered behind it is forgotten, and the floor waits for it alone."""

    class Unsent:
        first_unsent = 1 << 40
        subscription = SimpleNamespace(floor=0)

    reader = Reader(None, Unsent())  # type: ignore[arg-type]
    for first in range(0, 100_000, 1_000):
        reader.give(np.arange(first, first + 1_000, dtype=np.uint64))
        reader.answered(np.arange(max(1, first), first + 1_000, dtype=np.uint64))
        assert reader.place() == 0
    assert len(reader._lowest) <= 2 * ANSWERED_KEPT
    reader.answered(np.zeros(1, np.uint64))
    assert reader.place() == 1 << 40
