"""A consumer whose process is stopped, with its connection open: others get its messages after one lease."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE
from datetime import timedelta
from pathlib import Path

from tickwheel.client import AsyncClient, ExponentialBackoff, RetryPolicy
from tickwheel.node.local_cluster import LocalCluster

LEASE = timedelta(seconds=2)
RETRY = timedelta(milliseconds=100)
SOON_S = 30.0
"""The transport would notice after 80 s."""
COUNT = 60
CONSUMER = f"""
import asyncio, sys
from datetime import timedelta
from tickwheel.client import AsyncClient

async def consume(client):
    async with client.consumer("g", "t", lease=timedelta(seconds={LEASE.total_seconds()})) as consumer:
        async for delivery in consumer:
            await delivery.ack()
            print(delivery.payload.decode(), flush=True)

async def main():
    async with AsyncClient(sys.argv[1]) as client:
        await asyncio.gather(*(consume(client) for _ in range(3)))

asyncio.run(main())
"""
"""Three consumers on one connection."""


async def test_messages_of_a_stopped_process_reach_others_after_one_lease(tmp_path: Path) -> None:
    """None is retried there, at any of its consumers. Once it goes on it gets messages again."""
    seen: dict[str, int] = {}
    complete = asyncio.Event()

    async def consume(client: AsyncClient) -> None:
        async with client.consumer("g", "t", lease=LEASE) as consumer:
            async for delivery in consumer:
                seen[delivery.payload.decode()] = delivery.attempt
                await delivery.ack()
                if len(seen) == COUNT:
                    complete.set()

    async with LocalCluster(tmp_path, 1) as cluster, AsyncClient(cluster.addresses) as client, asyncio.timeout(SOON_S):
        await client.admin.create_topic("t")
        backoff = ExponentialBackoff(initial=RETRY, factor=1, maximum=RETRY)
        await client.admin.create_group("g", ["t"], retry=RetryPolicy(backoff=backoff))
        other = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CONSUMER, ",".join(cluster.addresses), stdout=PIPE
        )
        assert other.stdout is not None
        try:
            await client.schedule("t", "open", delay_ms=0)
            assert await other.stdout.readline() == b"open\n"
            consuming = asyncio.create_task(consume(client))
            other.send_signal(signal.SIGSTOP)
            for number in range(COUNT):
                await client.schedule("t", str(number), delay_ms=0)
            await complete.wait()
            assert max(seen.values()) == 2, "a retry went to the process that is stopped"
            consuming.cancel()
            other.send_signal(signal.SIGCONT)
            await client.schedule("t", "again", delay_ms=0)
            while await other.stdout.readline() != b"again\n":
                pass
        finally:
            other.kill()
            await other.wait()
