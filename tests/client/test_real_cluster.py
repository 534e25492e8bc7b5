"""The client against three real processes whose master hangs: its connections stay open and nothing answers."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

from tickwheel.client import AsyncClient
from tickwheel.node.local_cluster import LocalCluster

COUNT = 2_000


async def test_streams_leave_a_master_that_hangs(tmp_path: Path) -> None:
    """SIGSTOP of the master under a producer and a consumer: both go on at the new one, nothing is lost."""
    async with LocalCluster(tmp_path, 3) as cluster:
        client = cluster.client()
        master = await cluster.master()
        seen: dict[str, int] = {}
        all_seen = asyncio.Event()

        async def consume() -> None:
            async with client.consumer("g", "t") as consumer:
                async for batch in consumer.batches():
                    for delivery in batch:
                        seen[delivery.payload.decode()] = delivery.attempt
                    batch.ack()
                    if len(seen) == COUNT:
                        all_seen.set()

        consuming = asyncio.ensure_future(consume())
        async with client.producer(batch_messages_max=20, linger_ms=1) as producer:
            futures = []
            for number in range(COUNT):
                due_ms = time.time_ns() // 1_000_000 + 100
                futures.append(await producer.send("t", str(number), due_ms=due_ms))
                if number == COUNT // 2:
                    await futures[0]
                    cluster.signal_node(master, signal.SIGSTOP)
                if number % 20 == 0:
                    await asyncio.sleep(0.005)
            started = time.monotonic()
            receipts = await asyncio.gather(*futures)
            assert time.monotonic() - started < 20
        assert len({receipt.id for receipt in receipts}) == COUNT
        await asyncio.wait_for(all_seen.wait(), 60)
        cluster.signal_node(master, signal.SIGCONT)
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)
        await cluster.wait_ready()
    assert set(seen) == {str(number) for number in range(COUNT)}


async def test_who_named_one_node_survives_its_loss(tmp_path: Path) -> None:
    """A client that was given the master's address alone learns of the other nodes, and goes on when it is killed."""
    async with LocalCluster(tmp_path, 3) as cluster:
        master = await cluster.master()
        async with AsyncClient(master.client_address, timeout_s=60.0) as client:
            await client.schedule("t", b"x", delay_ms=3_600_000)
            await cluster.kill_node(master)
            await client.schedule("t", b"y", delay_ms=3_600_000)
            assert len([message async for message in client.list_pending("t")]) == 2
