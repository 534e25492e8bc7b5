"""How producers and consumers end: every waiting caller is told, nothing goes on behind their backs."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from tests.client.fake_node import LEASE_S, FakeNode
from tickwheel.client import AsyncClient, ClusterUnavailable, OutcomeUnknown, RequestRefused, TickwheelError
from tickwheel.client.backoff import Backoff

SOON_S = 10.0
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
    """Never more in hand than credits, also when a lease is extended beyond its first end."""
    monkeypatch.setattr("tickwheel.client.hand.LEASE_MARGIN_S", 0.5 - LEASE_S)
    async with AsyncClient(nodes[0].address) as client:
        for _ in range(2):
            await client.schedule("t", b"x", delay_ms=0)
        consumer = client.consumer("g", "t", credits=1)
        batches = consumer.batches()
        batch = await anext(batches)
        assert await batch.extend(timedelta(seconds=60)) == 1
        following = asyncio.ensure_future(anext(batches))
        done, _ = await asyncio.wait({following}, timeout=2.5)  # the writer looks for ended leases every second
        assert not done
        await batch.ack()
        assert len(await asyncio.wait_for(following, SOON_S)) == 1


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
