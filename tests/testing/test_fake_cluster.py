"""The cluster in memory behaves as a real one, and time passes only when a test says so."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from tickwheel.client import (
    AsyncClient,
    CancelOutcome,
    Client,
    ClusterUnavailable,
    Dead,
    Delivery,
    ExponentialBackoff,
    Grant,
    Handler,
    MessageState,
    NodeRole,
    NodeStatus,
    NotFound,
    PermissionRefused,
    RequestRefused,
    RescheduleOutcome,
    RetryPolicy,
    Right,
    SyncWorker,
    Worker,
)
from tickwheel.client.sync_client import SyncDelivery
from tickwheel.proto import admin_pb2, scheduler_pb2
from tickwheel.proto.admin_pb2_grpc import AdminStub
from tickwheel.proto.common_pb2 import Message
from tickwheel.proto.scheduler_pb2_grpc import SchedulerStub
from tickwheel.testing import FakeCluster, SyncFakeCluster

START = datetime(2030, 3, 1, 12, tzinfo=UTC)


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    """A fresh one."""
    async with FakeCluster(start=START) as made:
        yield made


async def test_time_stands_still_until_it_is_moved(cluster: FakeCluster) -> None:
    """A message due in three days comes at its millisecond, not one earlier, whatever time the test itself takes."""
    seen: list[datetime] = []

    async def handler(delivery: Delivery) -> None:
        assert delivery.due == cluster.clock.now
        seen.append(cluster.clock.now)

    receipt = await cluster.client.schedule("mails", "hello", delay=timedelta(days=3))
    assert receipt.due == START + timedelta(days=3)
    async with cluster.running(Worker(cluster.client, "g", {"mails": handler})):
        await cluster.clock.advance(days=2, hours=23, minutes=59, seconds=59, milliseconds=999)
        await asyncio.sleep(0.02)
        assert not seen and cluster.clock.now == START + timedelta(days=3, milliseconds=-1)
        await cluster.clock.advance(milliseconds=1)
        assert seen == [START + timedelta(days=3)]


async def test_what_is_due_happens_in_order_each_at_its_moment(cluster: FakeCluster) -> None:
    """One step of an hour over many messages, and over those that handlers schedule meanwhile."""
    seen: list[tuple[str, datetime]] = []

    async def first(delivery: Delivery) -> None:
        seen.append((delivery.payload.decode(), cluster.clock.now))
        await cluster.client.schedule("second", delivery.payload, delay=timedelta(minutes=5))

    async def second(delivery: Delivery) -> None:
        seen.append((delivery.payload.decode() + " again", cluster.clock.now))

    for minutes in (20, 10, 58):
        await cluster.client.schedule("first", str(minutes), delay=timedelta(minutes=minutes))
    async with cluster.running(Worker(cluster.client, "g", {"first": first, "second": second})):
        await cluster.clock.advance(hours=1)
        wanted = [("10", 10), ("10 again", 15), ("20", 20), ("20 again", 25), ("58", 58)]
        assert seen == [(text, START + timedelta(minutes=minutes)) for text, minutes in wanted]
        await cluster.clock.advance_to(START + timedelta(hours=2))
    assert seen[-1] == ("58 again", START + timedelta(minutes=63))
    assert cluster.clock.now == START + timedelta(hours=2)


async def test_what_is_due_when_it_is_scheduled_comes_with_the_next_advance(cluster: FakeCluster) -> None:
    """However often at one moment, and what handlers schedule for now too; for the rest the clock stands still."""
    seen: list[int] = []

    async def handler(delivery: Delivery) -> None:
        number = int(delivery.payload)
        seen.append(number)
        if number < 5:
            await cluster.client.schedule("steps", str(number + 1), delay=timedelta(0))

    for number in range(3):
        await cluster.client.schedule("t", str(number), at=cluster.clock.now)
        assert [delivery.payload for delivery in await cluster.take("t")] == [b"%d" % number]
    assert cluster.clock.now == START + timedelta(milliseconds=2)
    await cluster.client.schedule("steps", "1", delay=timedelta(minutes=1))
    async with cluster.running(Worker(cluster.client, "g", {"steps": handler})):
        await cluster.clock.advance(minutes=1)
        assert seen == [1, 2, 3, 4, 5]
    assert cluster.clock.now == START + timedelta(minutes=1, milliseconds=6)
    await cluster.client.schedule("t", "next", delay=timedelta(milliseconds=1))
    assert await cluster.take("t") == []


async def test_time_does_not_go_back(cluster: FakeCluster) -> None:
    """The field is named; a time without a zone is no moment."""
    for wrong in (timedelta(seconds=-1), timedelta(days=-1, seconds=1)):
        with pytest.raises(RequestRefused) as caught:
            await cluster.clock.advance(wrong)
        assert caught.value.field == "by"
    for at in (START - timedelta(seconds=1), datetime(2031, 1, 1)):
        with pytest.raises(RequestRefused) as caught:
            await cluster.clock.advance_to(at)
        assert caught.value.field == "at"
    with pytest.raises(RequestRefused) as caught:
        FakeCluster(start=datetime(2031, 1, 1))
    assert caught.value.field == "start"


async def test_a_lease_ends_if_nobody_renews_it(cluster: FakeCluster) -> None:
    """What a consumer holds and does not settle comes again under the same id, to the same consumer too."""
    receipt = await cluster.client.schedule("t", "x", delay=timedelta(0))
    consumer = cluster.client.consumer("g", "t", lease=timedelta(seconds=30), hold_max=timedelta(0), credits=1)
    async with consumer:
        coming = aiter(consumer)
        first = await anext(coming)
        again = asyncio.ensure_future(anext(coming))
        await cluster.clock.advance(seconds=29, milliseconds=999)
        assert not again.done()
        await cluster.clock.advance(seconds=30)
        second = await again
        assert (first.id, first.attempt) == (receipt.id, 1) and (second.id, second.attempt) == (receipt.id, 2)
        assert (await first.ack()).stale == 1
        assert (await second.ack()).settled == 1


async def test_the_client_renews_what_is_held(cluster: FakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    """As long as `hold_max`: five minutes with leases of 30 seconds are one attempt, and its end counts."""
    await cluster.client.schedule("t", "x", delay=timedelta(0))
    async with cluster.client.consumer("g", "t", lease=timedelta(seconds=30)) as consumer:
        held = await anext(aiter(consumer))
        await cluster.clock.advance(minutes=5)
        assert consumer.renewed >= 9
        assert (await held.ack()).settled == 1 and consumer.stale == 0
        await cluster.clock.advance(days=10)  # nothing is held: there is nothing to renew
        assert consumer.renewed < 40


async def test_retries_and_dead_letters(cluster: FakeCluster) -> None:
    """By the policy of the group, at its exact pauses; a replayed letter starts over."""
    backoff = ExponentialBackoff(initial=timedelta(seconds=1), factor=3, maximum=timedelta(minutes=1), jitter=0)
    await cluster.client.admin.create_topic("t")
    await cluster.client.admin.create_group("g", ["t"], retry=RetryPolicy(backoff=backoff, attempts_max=4))
    tries: list[tuple[int, timedelta]] = []

    async def handler(delivery: Delivery) -> None:
        tries.append((delivery.attempt, cluster.clock.now - START))
        raise RuntimeError("a bug")

    await cluster.client.schedule("t", "x", delay=timedelta(0))
    async with cluster.running(Worker(cluster.client, "g", {"t": handler})):
        await cluster.clock.advance(hours=1)
        assert tries == [(attempt, timedelta(seconds=after)) for attempt, after in ((1, 0), (2, 1), (3, 4), (4, 13))]
        [letter] = [letter async for letter in cluster.client.dead.list("g")]
        assert letter.attempts == 4 and "a bug" in letter.error and letter.died_at == START + timedelta(seconds=13)
        await cluster.client.dead.replay("g")
        await cluster.clock.advance()
    assert tries[4:] == [(1, timedelta(hours=1))]


async def test_cancel_and_reschedule_are_definite(cluster: FakeCluster) -> None:
    """What is cancelled never comes; what is moved comes once, later, under its first id."""
    client = cluster.client
    gone = await client.schedule("t", "gone", delay=timedelta(minutes=1))
    moved = await client.schedule("t", "moved", delay=timedelta(minutes=1))
    sent = await client.schedule("t", "sent", delay=timedelta(minutes=1))
    assert await client.cancel(gone.id) is CancelOutcome.CANCELLED
    result = await client.reschedule(moved.id, at=START + timedelta(hours=1))
    assert result.outcome is RescheduleOutcome.RESCHEDULED
    assert [message.payload async for message in client.list_pending("t", content=True)] == [b"sent", b"moved"]
    await cluster.clock.advance(minutes=1)
    assert [delivery.id for delivery in await cluster.take("t")] == [sent.id]
    assert await client.cancel(sent.id) is CancelOutcome.ALREADY_DISPATCHED
    assert (await client.get(gone.id)).state is MessageState.CANCELLED
    await cluster.clock.advance(hours=1)
    assert [delivery.payload for delivery in await cluster.take("t")] == [b"moved"]
    assert not await cluster.take("t")
    with pytest.raises(NotFound):
        await client.get("0-498804-77")


async def test_a_repeat_of_a_producer_is_one_message(cluster: FakeCluster) -> None:
    """The node knows its sequence, as any node does."""
    stub = SchedulerStub(cluster.client.cluster.channel(cluster.address))
    request = scheduler_pb2.ScheduleRequest(
        message=Message(topic="t", payload=b"x", delay_ms=0), producer_id="p", sequence=1
    )
    first, second = [await stub.Schedule(request) for _ in range(2)]
    assert first.id == second.id
    await cluster.clock.advance()
    assert len(await cluster.take("t")) == 1


async def test_a_call_can_be_awaited_again(cluster: FakeCluster) -> None:
    """As with a real node's channel."""
    call = AdminStub(cluster.client.cluster.channel(cluster.address)).GetStatus(admin_pb2.GetStatusRequest())
    first = await call
    assert await call == first


async def test_many_messages(cluster: FakeCluster) -> None:
    """Columns over a stream; each message is taken once."""
    async with cluster.client.producer() as producer:
        due_ms = np.full(10_000, cluster.clock.now_ms + 60_000)
        payloads = [b"%d" % number for number in range(10_000)]
        sent = await producer.schedule_columns("t", due_ms, list(map(len, payloads)), b"".join(payloads))
        await sent
    assert (await cluster.client.count_pending("t")).total == 10_000
    await cluster.clock.advance(minutes=1)
    taken = await cluster.take("t")
    assert sorted(int(delivery.payload) for delivery in taken) == list(range(10_000))
    assert (await cluster.client.count_pending("t")).total == 0


async def test_handlers_are_waited_for(cluster: FakeCluster) -> None:
    """Time does not pass while one waits for something real; what it does afterwards is seen by the test."""
    seen: list[datetime] = []

    async def slow(delivery: Delivery) -> None:
        await asyncio.to_thread(time.sleep, 0.05)
        seen.append(cluster.clock.now)

    def in_thread(delivery: Delivery) -> None:
        time.sleep(0.05)
        seen.append(cluster.clock.now)

    for topic in ("slow", "in_thread"):
        await cluster.client.schedule(topic, "x", delay=timedelta(seconds=1))
    async with cluster.running(Worker(cluster.client, "g", {"slow": slow, "in_thread": in_thread})):
        await cluster.clock.advance(days=1)
        assert seen == [START + timedelta(seconds=1)] * 2
    await cluster.client.schedule("slow", "x", delay=timedelta(seconds=1))
    async with cluster.client.consumer("h", "slow") as consumer:
        running = asyncio.ensure_future(consumer.run(slow))
        await cluster.clock.advance(days=1)
        assert seen[2:] == [START + timedelta(days=1), START + timedelta(days=1, seconds=1)]
        running.cancel()


async def test_a_handler_may_wait_for_the_test(cluster: FakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    """Then time passes on, and its time-out counts by the clock of the cluster."""
    may_end = asyncio.Event()
    tries: list[int] = []

    async def handler(delivery: Delivery) -> None:
        tries.append(delivery.attempt)
        await may_end.wait()

    await cluster.client.schedule("t", "x", delay=timedelta(0))
    limited = Handler(handler, timeout=timedelta(minutes=5))
    async with cluster.running(Worker(cluster.client, "g", {"t": limited})) as worker:
        await cluster.clock.advance(minutes=4, wait_s=0)
        assert tries == [1] and worker.running == 1
        await cluster.clock.advance(minutes=1, wait_s=0)
        assert worker.running == 0
        may_end.set()
        await cluster.clock.advance(minutes=5)
        assert tries == [1, 2] and worker.metrics.topic("t").timed_out == 1


async def test_a_handler_that_hangs_does_not_stop_time(cluster: FakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    """It is given up after `wait_s`, once, with a warning."""

    async def handler(delivery: Delivery) -> None:
        await asyncio.Event().wait()

    await cluster.client.schedule("t", "x", delay=timedelta(0))
    async with cluster.running(Worker(cluster.client, "g", {"t": handler}, drain_max=timedelta(0))):
        with caplog.at_level(logging.WARNING, "tickwheel.testing"):
            await cluster.clock.advance(minutes=1, wait_s=0.05)
            await cluster.clock.advance(minutes=1, wait_s=60)
    assert len([record for record in caplog.records if record.name == "tickwheel.testing"]) == 1


async def test_refusals_are_those_of_a_node(cluster: FakeCluster) -> None:
    """Requests pass the same door: bad names, and rights once they are on."""
    with pytest.raises(RequestRefused) as caught:
        await cluster.client.schedule("", "x", delay=timedelta(0))
    assert caught.value.field == "topic"
    await cluster.client.admin.update_settings(payload_bytes_max=3)
    with pytest.raises(RequestRefused):
        await cluster.client.schedule("t", "long", delay=timedelta(0))
    every = tuple(right for right in Right if right is not Right.UNKNOWN)
    await cluster.client.access.set_role("all", [Grant(every, topics=("*",), groups=("*",))])
    await cluster.client.access.set_user("ann", roles=["all"])
    token = await cluster.client.access.create_token("ann")
    await cluster.client.admin.update_settings(rights=True)
    with pytest.raises(PermissionRefused):
        await cluster.client.schedule("t", "x", delay=timedelta(0))
    async with AsyncClient(cluster.address, token=token.secret) as ann:
        await ann.schedule("t", "x", delay=timedelta(0))


async def test_every_kind_of_call(cluster: FakeCluster) -> None:
    """A stream of answers: a backup is whole. Status and trace answer too."""
    receipt = await cluster.client.schedule("t", "x", delay=timedelta(0))
    await cluster.clock.advance()
    chunks = [chunk async for chunk in cluster.client.admin.backup(cluster.address)]
    assert chunks
    [status] = (await cluster.client.admin.statuses()).values()
    assert isinstance(status, NodeStatus) and status.role is NodeRole.MASTER
    assert await cluster.client.admin.trace([receipt.id])


async def test_two_changes_of_settings_do_not_undo_each_other(cluster: FakeCluster) -> None:
    """Each client names what it changes, and gets all settings; a bound of the node is a refusal with the field."""
    admin = cluster.client.admin
    async with AsyncClient(cluster.address) as other:
        before = await admin.settings()
        await asyncio.gather(
            admin.update_settings(attempts_max=3), other.admin.update_settings(retention=timedelta(days=2))
        )
        expected = dataclasses.replace(before, attempts_max=3, retention=timedelta(days=2))
        assert await admin.settings() == await other.admin.settings() == await admin.update_settings() == expected
    with pytest.raises(RequestRefused) as refused:
        await admin.update_settings(retention=timedelta(seconds=1))
    assert refused.value.field == "retention_ms"


async def test_two_clusters_are_apart() -> None:
    """Each with its own clock and messages."""
    async with FakeCluster(start=START) as one, FakeCluster(start=START) as other:
        await one.client.schedule("t", "x", delay=timedelta(hours=1))
        await one.clock.advance(hours=1)
        assert other.clock.now == START
        assert len(await one.take("t")) == 1
        assert [message async for message in other.client.list_pending()] == []


async def test_a_closed_cluster_answers_nobody() -> None:
    """A client of it gets the error of a cluster that is away, soon, as does a call under way."""
    cluster = FakeCluster()
    async with AsyncClient(cluster.address) as client:
        await client.schedule("t", "x", delay=timedelta(0))
        consumer = client.consumer("g", "t", unavailable_s_max=0.1)
        async with consumer:
            await anext(aiter(consumer))
            cluster.close()
            cluster.close()
            with pytest.raises(ClusterUnavailable):
                await client.schedule("t", "x", delay=timedelta(0), timeout_s=0.2)


async def test_clients_of_several_loops(cluster: FakeCluster) -> None:
    """A blocking client in a thread beside the test's own: what one schedules the other takes."""

    def blocking() -> None:
        with Client(cluster.address) as client:
            client.schedule("t", "from a thread", delay=timedelta(minutes=1))

    await asyncio.to_thread(blocking)
    await cluster.clock.advance(minutes=1)
    assert [delivery.payload for delivery in await cluster.take("t")] == [b"from a thread"]


def test_without_a_loop() -> None:
    """The blocking client, a worker with handlers in threads, and the same clock."""
    seen: list[tuple[str, datetime, str]] = []
    cluster: SyncFakeCluster

    def handler(delivery: SyncDelivery) -> None:
        seen.append((delivery.payload.decode(), cluster.clock.now, threading.current_thread().name))
        if delivery.attempt == 1:
            raise RuntimeError("once")

    with SyncFakeCluster(start=START) as made:
        cluster = made
        cluster.client.schedule("t", "x", delay=timedelta(days=1))
        worker = SyncWorker(cluster.client, "g", {"t": handler}, on_error={ZeroDivisionError: Dead("never")})
        with cluster.running(worker):
            cluster.clock.advance(days=1)
            assert [(text, at) for text, at, _ in seen] == [("x", START + timedelta(days=1))]
            cluster.clock.advance_to(START + timedelta(days=1, seconds=10))
            assert [at for _, at, _ in seen] == [START + timedelta(days=1, seconds=after) for after in (0, 10)]
            assert all(name.startswith("tickwheel-g") for _, _, name in seen)
        assert [delivery.payload for delivery in cluster.take("t")] == [b"x"]
        assert cluster.take("t") == []
