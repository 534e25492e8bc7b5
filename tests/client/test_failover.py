"""What the client promises while masters come and go: nothing twice, nothing lost, in order."""

from __future__ import annotations

import asyncio
import time
from collections import deque

import grpc
import numpy as np
import pytest

from tests.client.fake_node import FakeNode, Refusal
from tickwheel.client import (
    AsyncClient,
    ClusterUnavailable,
    Delivery,
    LimitReached,
    OutcomeUnknown,
    RequestRefused,
    TickwheelError,
)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def test_master_is_found_from_any_node(nodes: list[FakeNode]) -> None:
    """A client that knows only a slave schedules at the master."""
    async with AsyncClient(nodes[2].address) as client:
        receipt = await client.schedule("t", b"x", delay_ms=5)
        assert receipt.id.startswith("0-")
        nodes[1].lead()
        await client.schedule("t", b"y", delay_ms=5)
    assert len(nodes[0].state.order) == 2


async def test_lost_answers_of_unary_schedules_do_not_schedule_twice(nodes: list[FakeNode]) -> None:
    """The repeat of a schedule whose answer was lost gets the id of the first."""
    nodes[0].drop_answers = 3
    async with AsyncClient(nodes[0].address) as client:
        receipts = await asyncio.gather(*(client.schedule("t", b"x", delay_ms=60_000) for _ in range(8)))
    assert len({receipt.id for receipt in receipts}) == 8
    assert len(nodes[0].state.order) == 8
    assert nodes[0].state.repeats == 3


async def test_no_master_is_cluster_unavailable(nodes: list[FakeNode]) -> None:
    """Without a master the call ends at its deadline, and says that nothing was done."""
    nodes[0].state.master = None
    async with AsyncClient([node.address for node in nodes], timeout_s=0.3) as client:
        with pytest.raises(ClusterUnavailable):
            await client.schedule("t", b"x", delay_ms=5)


@pytest.mark.parametrize(("reason", "error"), [("RECOVERING", ClusterUnavailable), ("DISK_FULL", LimitReached)])
async def test_why_a_master_does_not_do_it_yet_is_said(
    nodes: list[FakeNode], reason: str, error: type[TickwheelError]
) -> None:
    """Also if no node shows itself as master from then on, until the time is over; and which nodes are away."""
    unavailable = grpc.StatusCode.UNAVAILABLE

    class Last(deque[Refusal | None]):
        def popleft(self) -> Refusal | None:
            nodes[0].state.master = None
            return super().popleft()

    nodes[0].refusals = Last([Refusal(unavailable, reason, "not yet", field="members", retry_after_ms="20")])
    await nodes[2].stop()
    async with AsyncClient([node.address for node in nodes], timeout_s=2.0) as client:
        with pytest.raises(error, match=rf"^not yet \({nodes[2].address}: connection refused[^;]*\)$") as caught:
            await client.schedule("t", b"x", delay_ms=60_000)
    assert caught.value.reason == reason and caught.value.metadata["field"] == "members"


async def test_outcome_unknown_when_all_answers_are_lost(nodes: list[FakeNode]) -> None:
    """A schedule that was carried out but never answered says so, and the next one is not mixed up with it."""
    async with AsyncClient(nodes[0].address) as client:
        await client.schedule("t", b"before", delay_ms=60_000)  # connected
        nodes[0].drop_answers = 1_000
        with pytest.raises(OutcomeUnknown):
            await client.schedule("t", b"x", delay_ms=60_000, timeout_s=0.5)
        nodes[0].drop_answers = 0
        await client.schedule("t", b"y", delay_ms=60_000)
    assert len(nodes[0].state.order) == 3


async def test_producer_survives_lost_answers_and_a_new_master_in_order(nodes: list[FakeNode]) -> None:
    """Batches without an answer go again with their sequences, in order: each message once."""
    async with AsyncClient([node.address for node in nodes]) as client, client.producer() as producer:
        futures = []
        for number in range(60):
            sizes = np.full(10, 4, np.uint32)
            payloads = b"".join(f"{number:02}{row:02}".encode() for row in range(10))
            futures.append(await producer.schedule_columns("t", np.full(10, now_ms() + 60_000), sizes, payloads))
            if number in (10, 20):
                nodes[0].drop_answers = 1
                await asyncio.sleep(0.01)
            if number == 40:
                await asyncio.wait(futures[:5])
                nodes[1].lead()
                await nodes[0].stop()
        receipts = await asyncio.gather(*futures)
    state = nodes[1].state
    assert [len(receipt) for receipt in receipts] == [10] * 60
    payloads_seen = [state.messages[id64][0].payload for id64 in state.order]
    assert payloads_seen == [f"{number:02}{row:02}".encode() for number in range(60) for row in range(10)]


async def test_a_refused_batch_fails_alone(nodes: list[FakeNode]) -> None:
    """The batches behind a refused one are answered with a gap, numbered anew and accepted."""
    async with AsyncClient(nodes[0].address) as client, client.producer() as producer:
        futures = []
        for number in range(20):
            topic = ".wrong" if number in (0, 7) else "t"
            futures.append(await producer.schedule_columns(topic, [now_ms()], [1], b"%c" % (65 + number)))
        results = await asyncio.gather(*futures, return_exceptions=True)
    refused = [number for number, result in enumerate(results) if isinstance(result, RequestRefused)]
    assert refused == [0, 7]
    state = nodes[0].state
    payloads = b"".join(state.messages[id64][0].payload for id64 in state.order)
    assert payloads == b"BCDEFGIJKLMNOPQRST"


async def test_limits_slow_the_producer_down(nodes: list[FakeNode]) -> None:
    """LIMIT_REACHED is waited out; order and number stay."""
    nodes[0].limit_answers = 3
    async with AsyncClient(nodes[0].address) as client, client.producer(batch_messages_max=2) as producer:
        futures = [await producer.send("t", f"{n}", due_ms=now_ms() + 60_000) for n in range(20)]
        receipts = await asyncio.gather(*futures)
    assert len({receipt.id for receipt in receipts}) == 20
    state = nodes[0].state
    assert [state.messages[id64][0].payload for id64 in state.order] == [f"{n}".encode() for n in range(20)]


async def test_back_pressure_bounds_what_is_under_way(nodes: list[FakeNode]) -> None:
    """At the bound `send` waits; nothing grows beyond it."""
    async with AsyncClient(nodes[0].address) as client, client.producer(buffer_bytes_max=4_000) as producer:
        for _ in range(200):
            await producer.send("t", b"x" * 100, delay_ms=60_000)
            assert producer.bytes_under_way <= 4_000
    assert len(nodes[0].state.order) == 200


async def test_consumer_follows_the_master_and_repeats_settlements(nodes: list[FakeNode]) -> None:
    """Acknowledgements whose receipts were lost are repeated at the new master; everything is settled."""
    async with AsyncClient([node.address for node in nodes]) as client:
        async with client.producer() as producer:
            for number in range(50):
                await producer.send("t", f"{number}", due_ms=now_ms(), key="k", tags=["a"], headers={"h": "v"})
        seen: list[str] = []
        async with client.consumer("g", "t", batch_messages_max=5, credits=10) as consumer:
            async for delivery in consumer:
                assert (delivery.key, delivery.tags, delivery.headers) == ("k", ["a"], {"h": "v"})
                if len(seen) == 20:
                    nodes[0].drop_answers = 1
                if len(seen) == 30:
                    nodes[2].lead()
                await delivery.ack()
                seen.append(delivery.payload.decode())
                if len(nodes[0].state.settled) == 50:
                    break
    assert set(seen) == {str(number) for number in range(50)}
    assert len(nodes[0].state.settled) == 50


async def test_a_master_that_is_found_again_keeps_its_streams(nodes: list[FakeNode]) -> None:
    """One call that a busy master did not answer ends no stream there: what a consumer holds does not come again."""
    async with AsyncClient(nodes[0].address) as client:
        await client.schedule("t", b"x", delay_ms=0)
        async with client.consumer("g", "t") as consumer, client.producer() as producer:
            delivery = await anext(aiter(consumer))
            await (await producer.send("t", b"y", delay_ms=60_000))
            nodes[0].refusals.append(Refusal(grpc.StatusCode.UNAVAILABLE, "NO_MASTER", "busy"))
            await client.schedule("t", b"z", delay_ms=60_000)
            receipt = await delivery.ack()
            await (await producer.send("t", b"y", delay_ms=60_000))
            assert (receipt.settled, receipt.stale) == (1, 0)
            assert consumer.reconnects == producer.reconnects == 0


async def test_batches_are_settled_whole(nodes: list[FakeNode]) -> None:
    """The fast path: one settlement a batch, credits come back by themselves."""
    async with AsyncClient(nodes[0].address) as client:
        async with client.producer() as producer:
            await producer.schedule_columns("t", np.full(500, now_ms()), np.full(500, 3), b"abc" * 500)
        total = 0
        async with client.consumer("g", "t", credits=64, batch_messages_max=32) as consumer:
            async for batch in consumer.batches():
                assert batch.payload(0) == b"abc"
                total += len(batch)
                batch.ack()
                if total == 500:
                    break
    assert total == len(nodes[0].state.settled) == 500


async def test_handler_that_raises_gets_the_message_again(nodes: list[FakeNode]) -> None:
    """`run` acknowledges what returns and nacks what raises."""
    tries: dict[str, int] = {}
    done = asyncio.Event()

    async def handle(delivery: Delivery) -> None:
        tries[delivery.id] = tries.get(delivery.id, 0) + 1
        if delivery.attempt == 1:
            raise ValueError("not yet")
        if len(tries) == 10 and sum(tries.values()) == 20:
            done.set()

    async with AsyncClient(nodes[0].address) as client:
        for number in range(10):
            await client.schedule("t", f"{number}", delay_ms=0)
        consumer = client.consumer("g", "t")
        running = asyncio.ensure_future(consumer.run(handle, concurrency=3))
        await asyncio.wait_for(done.wait(), 20)
        await consumer.close()
        await running
    assert set(tries.values()) == {2}


@pytest.mark.parametrize("way", ["call", "producer", "consumer"])
async def test_a_node_whose_disk_is_full_is_left_for_the_one_that_leads(nodes: list[FakeNode], way: str) -> None:
    """It refuses, and another one leads: the refusal is not the caller's."""
    full, other = nodes[:2]
    refused = 0

    def refusal() -> Refusal:
        nonlocal refused
        refused += 1
        other.lead()
        return Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "DISK_FULL", "the disk is full")

    async with AsyncClient([node.address for node in nodes]) as client, asyncio.timeout(60):
        await client.schedule("t", b"before", delay_ms=0)
        full._refusal = refusal  # type: ignore[method-assign]
        if way == "call":
            await client.schedule("t", b"x", delay_ms=0)
        elif way == "producer":
            async with client.producer() as producer:
                await producer.schedule("t", b"x", delay_ms=0)
        else:
            async with client.consumer("g", "t") as consumer:
                assert (await anext(aiter(consumer))).payload == b"before"
    assert refused == 1
    assert len(other.state.order) == (1 if way == "consumer" else 2)
