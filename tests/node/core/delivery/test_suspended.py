"""A consumer whose lease ran out is reported once, and gets nothing while it is suspended."""

from __future__ import annotations

import pytest

from tests.node.core.delivery.test_retries import admin
from tests.node.core.trio import Client, World
from tickwheel.node.core.delivery.consumers import ConsumerHandle
from tickwheel.node.failure import RequestError
from tickwheel.proto import admin_pb2, consumer_pb2

LEASE_MS = 1_000
RETRIED_MS = 15_000
"""Until a lease has run out and the retry has come."""
ONE_BY_ONE = [10 + 20 * place for place in range(20)]
"""Delays in milliseconds: each message is handed out by itself, to the consumers in turn."""


class Stopped:
    """A consumer beside those of a `Client`: it settles nothing, and is suspended when a lease of it runs out."""

    def __init__(self, world: World, credits: int) -> None:
        self.batches: list[consumer_pb2.DeliverBatch] = []
        self.reports = 0
        master = world.master()
        assert master is not None and master.host is not None
        request = consumer_pb2.OpenConsumer(group="g", topics=["t"], credits=credits, lease_ms=LEASE_MS)
        core, opened = master.host.core, list[object]()
        opening = core.parts.consumers.open(request, self.batches.append, lambda failure: None, "", self._ran_out)
        core.serving.start(opening, opened.append)
        master.wake()
        world.run_until(lambda: bool(opened))
        [session] = opened
        assert isinstance(session, ConsumerHandle)
        self.session = session
        self.wake = master.wake

    def _ran_out(self) -> None:
        self.reports += 1
        self.session.suspend()

    @property
    def got(self) -> int:
        return sum(len(batch.ids) // 8 for batch in self.batches)


def grouped(broadcasting: bool = False) -> tuple[World, Client]:
    """A cluster, and a consumer that settles what it gets."""
    world = World(1)
    admin(world, create_topic=admin_pb2.CreateTopicRequest(name="t"))
    admin(world, create_group=admin_pb2.CreateGroupRequest(name="g", topics=["t"], broadcasting=broadcasting))
    world.elect()
    client = Client(world)
    client.consume(lease_ms=LEASE_MS)
    world.run(100)
    return world, client


def test_retries_go_to_consumers_that_are_not_suspended() -> None:
    """The one whose leases ran out gets nothing more, however many credits it has, until it is resumed."""
    world, client = grouped()
    stopped = Stopped(world, credits=100)
    client.schedule(ONE_BY_ONE)
    world.run(500)
    held = stopped.got
    assert held and len(client.got) == 20 - held
    world.run(RETRIED_MS)
    assert stopped.reports == 1 and stopped.got == held, "it got a retry"
    assert len(client.got) == 20 and not client.lost()
    client.schedule(ONE_BY_ONE)
    world.run(RETRIED_MS)
    assert stopped.got == held and len(client.got) == 40
    assert not stopped.session.credit(5), "it takes nothing yet"
    assert stopped.session.resume()
    stopped.wake()
    client.schedule(ONE_BY_ONE)
    world.run(500)
    assert stopped.got > held
    world.run(RETRIED_MS)
    assert stopped.reports == 2 and len(client.got) == 60


def test_credits_of_a_suspended_consumer_count_towards_the_limit() -> None:
    """They are all there when it is resumed."""
    world, _ = grouped()
    stopped = Stopped(world, credits=999_999)
    stopped.session.suspend()
    assert not stopped.session.credit(1)
    with pytest.raises(RequestError):
        stopped.session.credit(1)
    assert stopped.session.resume()
    assert stopped.session.session.credits == 1_000_000


def test_settled_and_given_back_messages_are_no_sign() -> None:
    """Only a lease that ran out with open messages is reported: leases of settled ones end as well."""
    world, client = grouped()
    assert client.session is not None
    client.session.close()
    stopped = Stopped(world, credits=100)
    client.schedule([10] * 10)
    world.run(500)
    session = stopped.session
    for batch in stopped.batches:
        settle = consumer_pb2.SettleBatch(
            group="g", topic=batch.topic, outcome=consumer_pb2.ACK,
            ids=batch.ids, attempts=batch.attempts, positions=batch.positions, epoch=batch.epoch,
        )  # fmt: skip
        client._settle(session, settle)
    world.run(3_000)
    assert stopped.got == 10 and not stopped.reports


def test_a_consumer_of_a_broadcasting_group_misses_nothing_while_it_is_suspended() -> None:
    """What it had when its lease ran out counts as answered; what comes later waits for it."""
    world, client = grouped(broadcasting=True)
    stopped = Stopped(world, credits=100)
    client.schedule([10] * 5)
    world.run(3_000)
    assert stopped.got == 5 and stopped.reports == 1
    client.schedule([10] * 5)
    world.run(3_000)
    assert stopped.got == 5 and len(client.got) == 10
    assert stopped.session.resume()
    stopped.wake()
    world.run(500)
    assert stopped.got == 10
