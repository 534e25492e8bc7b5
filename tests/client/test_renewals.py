"""Leases of what is held are renewed; what a consumer has to say about its deliveries is logged."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest

from tests.client import fake_node
from tests.client.fake_node import FakeNode
from tickwheel.client import AsyncClient, Client, RequestRefused
from tickwheel.client.delivery import DeliveredBatch, Delivery, columns_of
from tickwheel.client.held import HeldDeliveries
from tickwheel.client.timing import REAL
from tickwheel.proto import consumer_pb2

SOON_S = 30.0
LEASE_S = 0.3


class Clock:
    """Passes as the machine's, but for the time in which this process gets no processor: no lease ends by that."""

    def __init__(self) -> None:
        self._read_s = time.monotonic()
        self._now_s = 0.0
        self._reading = threading.Lock()

    def __call__(self) -> float:
        """Seconds. Nodes read it a hundred times a second for each stream."""
        with self._reading:
            before_s, self._read_s = self._read_s, time.monotonic()
            self._now_s += min(self._read_s - before_s, LEASE_S / 10)
            return self._now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """By which nodes and clients measure leases. Nodes give leases that a handler easily outlives."""
    clock = Clock()
    monkeypatch.setattr(fake_node, "LEASE_S", LEASE_S)
    monkeypatch.setattr(fake_node, "time", SimpleNamespace(monotonic=clock, time_ns=time.time_ns))
    monkeypatch.setattr(REAL, "monotonic_s", clock)
    return clock


async def until(nodes: list[FakeNode], condition: Callable[[], bool]) -> None:
    """Wait until something holds that a request to a node brings about."""
    async with asyncio.timeout(SOON_S):
        while True:
            changed = nodes[0].state.changed
            if condition():
                return
            await changed.wait()


async def test_a_handler_that_outlives_its_lease_runs_once(nodes: list[FakeNode], clock: Clock) -> None:
    """The message stays its own until it returns: one attempt, and the acknowledgement counts."""
    attempts: list[int] = []

    async def handler(delivery: Delivery) -> None:
        attempts.append(delivery.attempt)
        await until(nodes, lambda: len(nodes[0].extends) >= 8)  # more than two leases long

    async with AsyncClient(nodes[0].address) as client:
        await client.schedule("t", b"x", delay_ms=0)
        async with client.consumer("g", "t", messages_max=1, credits=1) as consumer:
            began_s = clock()
            await asyncio.wait_for(consumer.run(handler), SOON_S)
            assert clock() - began_s > 2 * LEASE_S
            assert consumer.renewed >= 7 and consumer.stale == 0
    assert attempts == [1]
    assert list(nodes[0].state.settled.values()) == [consumer_pb2.ACK]


@pytest.mark.usefixtures("clock")
async def test_what_waits_in_the_client_keeps_its_lease(nodes: list[FakeNode]) -> None:
    """Also of deliveries that nobody has taken from the iterator yet; one request renews several batches of a topic."""
    async with AsyncClient(nodes[0].address) as client:
        for _ in range(4):
            await client.schedule("t", b"x", delay_ms=0)
        async with client.consumer("g", "t", batch_messages_max=1) as consumer:
            await until(nodes, lambda: len(nodes[0].extends) >= 6)
            assert max(len(extend.ids) // 8 for extend in nodes[0].extends) > 1
            got = []
            async for delivery in consumer:
                got.append(delivery)
                await delivery.ack()
                if len(got) == 4:
                    break
        assert [delivery.attempt for delivery in got] == [1] * 4


@pytest.mark.usefixtures("clock")
async def test_the_next_master_is_asked_to_renew(nodes: list[FakeNode]) -> None:
    """A handler that runs through a change of master keeps its message there."""
    async with AsyncClient([node.address for node in nodes]) as client:
        await client.schedule("t", b"x", delay_ms=0)
        async with client.consumer("g", "t", credits=1) as consumer:
            delivery = await anext(aiter(consumer))
            await until(nodes, lambda: bool(nodes[0].extends))
            nodes[1].lead(knows_leases=True)
            await until(nodes, lambda: len(nodes[1].extends) >= 6)
            receipt = await delivery.ack()
            assert (receipt.settled, receipt.stale) == (1, 0)
    assert set(nodes[0].state.attempts.values()) == {1}


@pytest.mark.usefixtures("clock")
async def test_renewing_ends_after_the_longest_hold(nodes: list[FakeNode], caplog: pytest.LogCaptureFixture) -> None:
    """Who forgets a message has it for so long; then it comes again, and that is logged."""
    async with AsyncClient(nodes[0].address) as client:
        await client.schedule("t", b"x", delay_ms=0)
        async with client.consumer("g", "t", hold_max=timedelta(seconds=1)) as consumer:
            deliveries = aiter(consumer)
            first = await anext(deliveries)
            again = await asyncio.wait_for(anext(deliveries), SOON_S)
            assert (first.attempt, again.attempt) == (1, 2) and consumer.renewed >= 3
            assert "held by group g for too long" in caplog.text and first.id in caplog.text
            late = await first.ack()
            assert late.stale == 1 and consumer.stale == 1
            assert "1 of 1 settlements (ACK) of group g, topic t came too late" in caplog.text


@pytest.mark.usefixtures("clock")
async def test_a_lease_that_was_extended_is_renewed_by_its_own_length(nodes: list[FakeNode]) -> None:
    """A shorter renewal would take from it."""
    async with AsyncClient(nodes[0].address) as client:
        await client.schedule("t", b"x", delay_ms=0)
        async with client.consumer("g", "t", credits=1) as consumer:
            delivery = await anext(aiter(consumer))
            assert await delivery.extend(timedelta(seconds=1))
            asked = len(nodes[0].extends)
            await until(nodes, lambda: len(nodes[0].extends) > asked)
            assert nodes[0].extends[-1].lease_ms == 1_000


@pytest.mark.usefixtures("clock")
async def test_renewing_can_be_switched_off(nodes: list[FakeNode]) -> None:
    """`hold_max` of 0: a lease that runs out is over."""
    async with AsyncClient(nodes[0].address) as client:
        await client.schedule("t", b"x", delay_ms=0)
        async with client.consumer("g", "t", hold_max=timedelta(0)) as consumer:
            deliveries = aiter(consumer)
            attempts = [(await asyncio.wait_for(anext(deliveries), SOON_S)).attempt for _ in range(3)]
        assert attempts == [1, 2, 3] and not nodes[0].extends
        with pytest.raises(RequestRefused, match="hold_max"):
            client.consumer("g", "t", hold_max=timedelta(seconds=-1))


@pytest.mark.usefixtures("clock")
async def test_a_blocking_consumer_renews_too(nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread works, the client's loop renews."""
    monkeypatch.setattr(fake_node, "LEASE_S", 2.0)  # one of the two loops may be kept waiting alone
    working, attempts = threading.Event(), []

    def consume() -> None:
        with Client(nodes[0].address) as client:
            client.schedule("t", b"x", delay_ms=0)
            with client.consumer("g", "t") as consumer:
                delivery = consumer.next(SOON_S)
                assert delivery is not None
                attempts.append(delivery.attempt)
                assert working.wait(SOON_S)
                delivery.ack()

    thread = asyncio.ensure_future(asyncio.to_thread(consume))
    await until(nodes, lambda: len(nodes[0].extends) >= 4)
    working.set()
    await thread
    assert attempts == [1] and set(nodes[0].state.attempts.values()) == {1}
    assert list(nodes[0].state.settled.values()) == [consumer_pb2.ACK]


async def test_an_exception_of_a_handler_is_logged(nodes: list[FakeNode], caplog: pytest.LogCaptureFixture) -> None:
    """With its traceback, the message and the attempt: without that a wrong handler looks like a slow cluster."""

    async def handler(delivery: Delivery) -> None:
        if delivery.attempt == 1:
            raise ZeroDivisionError("no such order")

    async with AsyncClient(nodes[0].address) as client:
        receipt = await client.schedule("t", b"x", delay_ms=0)
        async with client.consumer("g", "t", messages_max=2, credits=1) as consumer:
            await asyncio.wait_for(consumer.run(handler), SOON_S)
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.name.startswith("tickwheel.client")
    assert f"message {receipt.id} of topic t, attempt 1" in record.getMessage()
    assert record.exc_info is not None and record.exc_info[0] is ZeroDivisionError


def test_only_what_is_held_is_renewed() -> None:
    """Rows that were settled are not, nor what was delivered just now, nor a batch whose renewal is under way."""
    now = [100.0]
    holder = HeldDeliveries(10, lambda credits: None, hold_s=100.0, now_s=lambda: now[0])
    (columns,) = columns_of(consumer_pb2.DeliverBatch(ids=bytes(8 * 3)))
    old, new = (DeliveredBatch(columns, None) for _ in range(2))  # type: ignore[arg-type]
    holder.take([old], 30.0)
    now[0] = 109.0
    holder.take([new], 30.0)
    assert not holder.to_renew()
    now[0] = 111.0
    assert old.leave(np.array([1, 1])) == 1 and old.leave(np.array([1])) == 0
    (held,) = holder.to_renew()
    assert held.batch is old and held.batch.held_rows().tolist() == [0, 2]
    held.asked = True
    assert not holder.to_renew()
    held.asked = False
    holder.renewed([held], now[0], 30.0)
    now[0] = 120.0
    assert [held.batch for held in holder.to_renew()] == [new]
    now[0] = 211.0
    assert all(held.left_alone for held in holder.to_renew()) and not holder.to_renew()
