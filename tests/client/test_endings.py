"""How producers and consumers end: every waiting caller is told, nothing goes on behind their backs."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis.strategies import integers, lists, tuples

from tests.client.fake_node import LEASE_S, FakeNode, FakeState
from tickwheel.client import AsyncClient, ClusterUnavailable, OutcomeUnknown, RequestRefused, TickwheelError
from tickwheel.client.backoff import Backoff, Deadline
from tickwheel.client.consumer import Consumer
from tickwheel.client.delivery import DeliveredBatch, Delivery, SettleReceipt, columns_of
from tickwheel.client.errors import Fault
from tickwheel.client.held import HeldDeliveries
from tickwheel.client.requests import is_read
from tickwheel.client.timing import REAL
from tickwheel.client.tries import TryFailedError
from tickwheel.proto import (
    access_pb2,
    admin_pb2,
    bulk_pb2,
    cold_pb2,
    consumer_pb2,
    dead_pb2,
    scheduler_pb2,
    schedules_pb2,
    snapshot_pb2,
    staging_pb2,
)

SERVICES = [
    service
    for module in (
        *(access_pb2, admin_pb2, bulk_pb2, cold_pb2, consumer_pb2, dead_pb2),
        *(scheduler_pb2, schedules_pb2, snapshot_pb2, staging_pb2),
    )
    for service in module.DESCRIPTOR.services_by_name.values()
]
SOON_S = 30.0
STREAMS = {"BatchStream._run", "Consumer._run"}


async def test_settling_after_the_end_is_answered(nodes: list[FakeNode]) -> None:
    """Batches that were fetched before the consumer ended can be settled no more, and say so instead of waiting."""
    async with AsyncClient(nodes[0].address) as client:
        for _ in range(3):
            await client.schedule("t", b"x", delay_ms=0)
        consumer = client.consumer("g", "t", batch_messages_max=1, unavailable_s_max=0.3)
        batches = consumer.batches()
        held = [await anext(batches) for _ in range(3)]
        nodes[0].state.master = None
        nodes[0].state.poke()
        with pytest.raises(ClusterUnavailable):
            await asyncio.wait_for(anext(batches), SOON_S)
        with pytest.raises(OutcomeUnknown):
            await asyncio.wait_for(held[0].ack(), SOON_S)
        with pytest.raises(OutcomeUnknown):
            await asyncio.wait_for(held[1].delivery(0).ack(), SOON_S)
        with pytest.raises(OutcomeUnknown):
            await asyncio.wait_for(held[2].extend(timedelta(seconds=1)), SOON_S)


async def test_the_end_is_told_to_everybody_and_again(nodes: list[FakeNode]) -> None:
    """Each loop over a consumer ends with it, those that begin later at once: none waits for what cannot come."""

    async def iterate(consumer: Consumer) -> None:
        async for _ in consumer:
            pass

    async with AsyncClient(nodes[0].address) as client:
        consumer = client.consumer("g", "t")
        loops = [asyncio.ensure_future(iterate(consumer)) for _ in range(3)]
        await asyncio.sleep(0)
        await consumer.close()
        await asyncio.wait_for(asyncio.gather(*loops), SOON_S)
        await asyncio.wait_for(iterate(consumer), SOON_S)

        await client.schedule("u", b"x", delay_ms=0)
        async with client.consumer("g", "u", messages_max=1) as consumer:
            await asyncio.wait_for(iterate(consumer), SOON_S)
            await asyncio.wait_for(iterate(consumer), SOON_S)
            assert [batch async for batch in consumer.batches()] == []

        nodes[0].state.master = None
        nodes[0].state.poke()
        client.cluster.forget(nodes[0].address)
        consumer = client.consumer("g", "t", unavailable_s_max=0.3)
        for _ in range(2):
            with pytest.raises(ClusterUnavailable):
                await asyncio.wait_for(iterate(consumer), SOON_S)


async def test_a_close_that_is_cancelled_is_one(nodes: list[FakeNode]) -> None:
    """Wherever the cancellation meets it: a loop that waits for deliveries ends."""

    async def iterate(consumer: Consumer, came: asyncio.Event) -> None:
        async for delivery in consumer:
            await delivery.ack()
            came.set()

    async with AsyncClient(nodes[0].address) as client:
        await client.schedule("t", b"x", delay_ms=0)
        for passes in range(6):
            consumer, came = client.consumer(f"g{passes}", "t"), asyncio.Event()
            looping = asyncio.ensure_future(iterate(consumer, came))
            await asyncio.wait_for(came.wait(), SOON_S)
            closing = asyncio.ensure_future(consumer.close())
            for _ in range(passes):
                await asyncio.sleep(0)
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
            await asyncio.wait_for(consumer.close(), SOON_S)
            await asyncio.wait_for(looping, SOON_S)


async def test_what_was_not_taken_comes_to_the_next_loop(nodes: list[FakeNode]) -> None:
    """However the one before ended: nothing of its batch stays held until its lease is over, an hour later."""
    async with AsyncClient(nodes[0].address) as client:
        async with client.producer() as producer:
            await producer.schedule_many("t", [(1, b"%d" % number) for number in range(9)])
        async with client.consumer("g", "t") as consumer, asyncio.timeout(SOON_S):
            seen = [(await anext(aiter(consumer))).payload]
            async for delivery in consumer:
                seen.append(delivery.payload)
                break
            began, busy = asyncio.Event(), asyncio.Event()

            async def handler(delivery: Delivery) -> None:
                seen.append(delivery.payload)
                began.set()
                await busy.wait()

            running = asyncio.ensure_future(consumer.run(handler, concurrency=1))
            await began.wait()
            for _ in range(3):
                await asyncio.sleep(0)  # it has taken the next one and waits for the handler
            running.cancel()
            busy.set()
            await asyncio.gather(running, return_exceptions=True)
            async for delivery in consumer:
                seen.append(delivery.payload)
                if len(seen) == 9:
                    break
            coming = aiter(consumer)
            for _ in range(2):
                with pytest.raises(TimeoutError):  # and not StopAsyncIteration: it has not ended
                    await asyncio.wait_for(anext(coming), 0.01)
    assert sorted(seen) == [b"%d" % number for number in range(9)]


@pytest.mark.parametrize("timeout_s", [0, -1.0, math.nan, "1", None, True])
async def test_a_deadline_is_a_time_to_come(timeout_s: Any) -> None:
    """Anything else is refused where it is given."""
    with pytest.raises(RequestRefused, match="timeout_s"):
        AsyncClient("127.0.0.1:1", timeout_s=timeout_s)


async def test_no_deadline_is_one_that_is_far_away(nodes: list[FakeNode]) -> None:
    """gRPC cannot count to it, and would not send the call."""
    async with AsyncClient(nodes[0].address, timeout_s=math.inf) as client, asyncio.timeout(SOON_S):
        await client.schedule("t", b"x", delay_ms=60_000)
        assert [message async for message in client.list_pending("t")]
        await client.admin.know_all()


async def test_a_read_without_an_answer_has_no_outcome(nodes: list[FakeNode]) -> None:
    """It changes nothing: its caller may repeat it. Of any other call nobody knows whether it was carried out."""

    async def silent(channel: grpc.aio.Channel, try_s: float) -> None:
        await asyncio.sleep(try_s + 0.01)
        raise TryFailedError(Fault("DEADLINE_EXCEEDED", "no answer"))

    async with AsyncClient(nodes[0].address) as client:
        await client.cluster.master(Deadline(SOON_S))
        with pytest.raises(ClusterUnavailable, match="it can be repeated") as caught:
            await client.cluster.call(silent, 0.1, reads=True)
        assert caught.value.reason == "DEADLINE_EXCEEDED"
        await client.cluster.master(Deadline(SOON_S))
        with pytest.raises(OutcomeUnknown):
            await client.cluster.call(silent, 0.1)


async def test_a_call_without_an_answer_names_the_node(nodes: list[FakeNode]) -> None:
    """It said `Deadline Exceeded` alone."""

    nothing = grpc.aio.Metadata()

    async def expires(_: grpc.aio.Channel, try_s: float) -> None:
        await asyncio.sleep(try_s)
        raise grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, nothing, nothing, "Deadline Exceeded", "")

    async with AsyncClient(nodes[0].address) as client:
        await client.cluster.master(Deadline(SOON_S))
        with pytest.raises(OutcomeUnknown, match=f"{nodes[0].address} did not answer within 0.1 s"):
            await client.cluster.call(expires, 0.1)


def test_reads_are_known_by_their_requests() -> None:
    """Every method that the audit log notes, and every other one that changes something, is none."""
    reads = {
        method.full_name
        for service in SERVICES
        for method in service.methods
        if is_read(GetMessageClass(method.input_type)())
    }
    names = {name.removeprefix("tickwheel.v1.") for name in reads}
    assert {"Scheduler.Get", "Scheduler.ListPending", "Schedules.Get", "Schedules.Preview", "Access.WhoAmI"} <= names
    changes = ("Set", "Add", "Remove", "Create", "Delete", "Update", "Schedule", "Cancel", "Pause", "Settle", "Pull")
    assert not [name for name in names if name.partition(".")[2].startswith(changes)]


async def test_cancelled_streams_end(nodes: list[FakeNode]) -> None:
    """A loop that cancels all tasks at its end (Ctrl-C without a close) is not kept waiting by open streams."""
    client = AsyncClient(nodes[0].address)
    producer, consumer = client.producer(), client.consumer("g", "t")
    await producer.schedule("t", b"x", delay_ms=0)
    await anext(consumer.batches())
    # The fake nodes' tasks run on this loop too and are none of this test's business.
    tasks = {task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__qualname__", "") in STREAMS}
    assert len(tasks) == len(STREAMS)
    for task in tasks:
        task.cancel()
    _, waiting = await asyncio.wait(tasks, timeout=SOON_S)
    await client.close()
    assert not waiting


async def test_a_caller_that_waits_for_room_learns_of_the_close(nodes: list[FakeNode]) -> None:
    """A producer that is closed sends nothing for those who were still waiting."""
    nodes[0].drop_answers = 1_000
    async with AsyncClient(nodes[0].address) as client:
        producer = client.producer(buffer_bytes_max=300)
        first = await producer.send("t", b"x" * 200, delay_ms=60_000)
        waiting = asyncio.ensure_future(producer.send("t", b"y" * 200, delay_ms=60_000))
        await asyncio.sleep(0)
        await producer.abandon()
        with pytest.raises(TickwheelError, match="closed"):
            await asyncio.wait_for(waiting, SOON_S)
        with pytest.raises(OutcomeUnknown):
            await first
        assert producer.bytes_under_way == 0


async def test_an_extended_lease_keeps_its_credits(nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more held than credits, also when a lease is extended beyond its first end."""
    held_s = 0.0
    monkeypatch.setattr(REAL, "monotonic_s", lambda: time.monotonic() + held_s)
    async with AsyncClient(nodes[0].address) as client:
        for _ in range(2):
            await client.schedule("t", b"x", delay_ms=0)
        consumer = client.consumer("g", "t", credits=1)
        batches = consumer.batches()
        batch = await anext(batches)
        assert await batch.extend(timedelta(seconds=10 * LEASE_S)) == 1
        held_s = 2 * LEASE_S
        consumer._held.expire()
        assert batch.unsettled == 1
        following = asyncio.ensure_future(anext(batches))
        await client.schedule("t", b"x", delay_ms=0)  # an exchange with the node
        assert not following.done()
        await batch.ack()
        assert len(await asyncio.wait_for(following, SOON_S)) == 1


async def test_a_consumer_that_wants_one_takes_no_second(nodes: list[FakeNode]) -> None:
    """Its message comes again the moment it is handed back: to the next consumer, with not one attempt used up."""
    async with AsyncClient(nodes[0].address) as client:
        await client.schedule("t", b"x", delay_ms=0)
        for attempt in range(1, 6):
            consumer = client.consumer("g", "t", messages_max=1)
            got = [delivery async for delivery in consumer]
            assert [delivery.attempt for delivery in got] == [attempt]
            got[0].nack()
            await consumer.close()


async def test_handlers_of_the_last_messages_are_waited_for(
    nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run` returns after `messages_max`, and after the handlers."""
    monkeypatch.setattr("tickwheel.client.consumer.CLOSE_S", 0.0)
    done: list[str] = []

    async def handler(delivery: Delivery) -> None:
        await asyncio.sleep(0.05)
        done.append(delivery.id)

    async with AsyncClient(nodes[0].address) as client:
        for _ in range(3):
            await client.schedule("t", b"x", delay_ms=0)
        async with client.consumer("g", "t", credits=2, messages_max=3) as consumer:
            await asyncio.wait_for(consumer.run(handler), SOON_S)
    assert len(done) == 3


async def test_what_the_last_handlers_could_not_settle_is_told(nodes: list[FakeNode]) -> None:
    """All have come, so nobody waits for deliveries any more when the cluster is gone: `run` raises all the same."""

    async def handler(delivery: Delivery) -> None:
        nodes[0].state.master = None
        nodes[0].state.poke()

    async with AsyncClient(nodes[0].address) as client:
        await client.schedule("t", b"x", delay_ms=0)
        async with client.consumer("g", "t", messages_max=1, unavailable_s_max=0.3) as consumer:
            with pytest.raises(OutcomeUnknown):
                await asyncio.wait_for(consumer.run(handler), SOON_S)


@given(
    credits=integers(1, 50),
    messages_max=integers(1, 50),
    steps=lists(tuples(integers(1, 20), integers(0, 20), integers(0, 3)), max_size=30),
)
def test_credits_never_pass_what_is_still_wanted(
    credits: int, messages_max: int, steps: list[tuple[int, int, int]]
) -> None:
    """Whatever comes, is skipped, and however often the stream is replaced; and all that is wanted is asked for."""
    granted = taken = 0

    def give(count: int) -> None:
        nonlocal granted
        granted += count
        assert count > 0
        assert granted <= min(credits, messages_max - taken)

    def open_stream() -> None:
        nonlocal granted
        granted = holder.opening()
        assert granted <= min(credits, messages_max - taken)
        holder.opened()

    resting: list[Callable[[], None]] = []
    holder = HeldDeliveries(credits, give, messages_max, later=lambda _, call: resting.append(call))
    open_stream()
    for sent, skipped, anew in [*steps, *[(credits, 0, 1)] * messages_max]:
        sent = min(sent, granted)
        skipped = min(skipped, sent)
        granted -= sent
        taken += sent - skipped
        holder.came(sent, skipped)
        (columns,) = columns_of(consumer_pb2.DeliverBatch(ids=bytes(8 * (sent - skipped))))
        batch = DeliveredBatch(columns, None)  # type: ignore[arg-type]
        holder.take([batch], 30.0)
        holder.give_back(skipped)
        if not anew:
            open_stream()
        holder.give_back(batch.leave(None))
        assert len(resting) <= 1
        while resting:
            resting.pop()()
        assert granted == min(credits, messages_max - taken), "nothing is held"
        assert holder.full == (taken == messages_max)
    assert taken == messages_max


async def test_an_unknown_start_is_refused(nodes: list[FakeNode]) -> None:
    """The caller's mistake is a RequestRefused that names the field, like all others."""
    async with AsyncClient(nodes[0].address) as client:
        with pytest.raises(RequestRefused) as caught:
            client.consumer("g", "t", start_from="yesterday")
    assert caught.value.field == "start_from"


def test_only_the_first_hint_is_followed_without_a_pause() -> None:
    """Two nodes that each name the other as master are not asked in a tight loop."""
    backoff = Backoff()
    assert not backoff.follows("")
    assert backoff.follows("n2:1")
    assert not backoff.follows("n1:1")
    backoff.reset()
    assert backoff.follows("n2:1")


@pytest.mark.parametrize(
    ("settle", "field"),
    [
        (lambda batch: batch.nack(level=-1), "delay_level"),
        (lambda batch: batch.delivery(0).nack(level="5"), "delay_level"),
        (lambda batch: batch.extend(timedelta(days=60)), "lease_ms"),
    ],
)
async def test_a_wrong_argument_of_a_settlement_is_told_and_not_repeated(
    nodes: list[FakeNode], settle: Callable[[DeliveredBatch], Awaitable[object]], field: str
) -> None:
    """Its caller hears of it. The consumer goes on, also on its next stream, which repeats what has no receipt."""
    async with AsyncClient(nodes[0].address) as client, asyncio.timeout(SOON_S):
        await client.schedule("t", b"x", delay_ms=0)
        async with client.consumer("g", "t", batch_messages_max=1) as consumer:
            batches = consumer.batches()
            batch = await anext(batches)
            with pytest.raises(RequestRefused, match=field):
                await settle(batch)
            await consumer.drain()
            nodes[1].lead()
            assert (await anext(batches)).payloads() == [b"x"]


async def test_a_wait_for_an_acknowledgement_that_is_cancelled_ends_alone(nodes: list[FakeNode]) -> None:
    """Acknowledgements of one moment share a receipt: the others still get it, and the cancelled one counts, too."""

    async def acknowledge(delivery: Delivery) -> SettleReceipt:
        return await delivery.ack()

    async with AsyncClient(nodes[0].address) as client, asyncio.timeout(SOON_S):
        for _ in range(3):
            await client.schedule("t", b"x", delay_ms=0)
        async with client.consumer("g", "t") as consumer:
            deliveries = aiter(consumer)
            held = [await anext(deliveries) for _ in range(3)]
            first, *others = [asyncio.ensure_future(acknowledge(delivery)) for delivery in held]
            await asyncio.sleep(0)  # all of them wait
            first.cancel()
            assert [(await other).settled for other in others] == [3, 3]
            assert first.cancelled() and len(nodes[0].state.settled) == 3


class Garbled(FakeNode):
    """Its streams answer what no node answers."""

    columns = b"odd"
    """Of ids; eight bytes stand for one."""

    async def Consume(self, requests: AsyncIterator[Any], context: Any) -> None:
        """As of the service."""
        await anext(requests)
        await context.write(consumer_pb2.ConsumeResponse(opened=consumer_pb2.Opened(term=1, lease_ms=1_000)))
        await context.write(consumer_pb2.ConsumeResponse(deliver=consumer_pb2.DeliverBatch(ids=self.columns)))
        await asyncio.Event().wait()

    async def ScheduleStream(self, batches: AsyncIterator[Any], context: Any) -> None:
        """As of the service."""
        async for batch in batches:
            await context.write(scheduler_pb2.BatchReceipt(sequence=batch.sequence, ids=self.columns))


@pytest.mark.parametrize("columns", [b"odd", bytes(24)], ids=["no column", "too many rows"])
async def test_answers_that_make_no_sense_are_told_to_whoever_waits(columns: bytes) -> None:
    """The stream ends by them, and its errors would be seen by nobody."""
    node = Garbled(FakeState(), "n1")
    node.columns = columns
    await node.start()
    node.lead()
    try:
        async with AsyncClient(node.address) as client, asyncio.timeout(SOON_S):
            producer = client.producer()
            receipts = [await producer.send("t", b"x", delay_ms=0) for _ in range(2)]
            for receipt in receipts:
                with pytest.raises(TickwheelError, match="ValueError"):
                    await receipt
            await producer.close()
            if columns == b"odd":
                with pytest.raises(TickwheelError, match="ValueError"):
                    await anext(aiter(client.consumer("g", "t")))
    finally:
        await node.stop()
