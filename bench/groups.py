"""The cases of the benchmark about what consumer groups ask for: retries, filters, message groups in order."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray

from tickwheel.bench.figures import Figure
from tickwheel.bench.load import BATCH, PAYLOAD_BYTES, now_ms
from tickwheel.bench.served import cluster
from tickwheel.client import AsyncClient
from tickwheel.proto import common_pb2

TAGS = 100
END_S = 120


async def _schedule(
    client: AsyncClient, topic: str, count: int, due_ms: int, metas: list[bytes] | None = None
) -> NDArray[np.uint64]:
    """Messages that are all due at one time, the n-th with the (n mod len)-th meta; their ids in order."""
    receipts = []
    async with client.producer() as producer:
        for first in range(0, count, BATCH):
            rows = min(BATCH, count - first)
            chosen = [metas[(first + row) % len(metas)] for row in range(rows)] if metas else []
            receipts.append(
                await producer.schedule_columns(
                    topic,
                    np.full(rows, due_ms),
                    np.full(rows, PAYLOAD_BYTES),
                    bytes(PAYLOAD_BYTES * rows),
                    meta_sizes=[len(meta) for meta in chosen] if metas else None,
                    metas=b"".join(chosen),
                )
            )
        return np.concatenate([(await receipt).ids for receipt in receipts])


async def t11(quick: bool) -> list[Figure]:
    """Each of many messages is nacked once, comes again a second later through the wheel, and is acknowledged then."""
    count, pause = (4_000 if quick else 40_000), timedelta(seconds=1)
    late: list[NDArray[np.int64]] = []
    wrong = retried = acked = 0
    async with cluster() as (_, client):
        await _schedule(client, "retries", count, now_ms() + 2_000 + count // 40)
        began = 0.0
        async with client.consumer("retries", ["retries"], credits=20_000) as consumer, asyncio.timeout(END_S):
            receipts = []
            async for batch in consumer.batches():
                began = began or time.perf_counter()
                again = int((batch.attempts == 2).sum())
                wrong += int((batch.attempts > 2).sum())
                if again:
                    late.append((now_ms() - batch.due_ms)[batch.attempts == 2])
                if again in (0, len(batch)):
                    receipts.append(batch.ack() if again else batch.nack(delay=pause))
                else:
                    receipts += [row.ack() if row.attempt == 2 else row.nack(delay=pause) for row in batch]
                retried += len(batch) - again
                acked += again
                if acked == count:
                    break
            await asyncio.gather(*receipts)
            took_s = time.perf_counter() - began - pause.total_seconds()
    lateness = np.concatenate(late)
    return [
        Figure("retried_rate", count / took_s, "msg/s"),
        Figure("retry_lateness_p50", float(np.percentile(lateness, 50)), "ms"),
        Figure("retry_lateness_p99", float(np.percentile(lateness, 99)), "ms"),
        Figure("retry_early", float((lateness < 0).sum()), "msg", "0"),
        Figure("tries_beyond_two", float(wrong + retried - count), "msg", "0"),
    ]


async def t12(quick: bool) -> list[Figure]:
    """A group takes one tag of a hundred: how fast are the others passed, if it is there, and if it comes late?"""
    count = 20_000 if quick else 500_000
    metas = [common_pb2.MessageMeta(tags=[f"tag-{number}"]).SerializeToString() for number in range(TAGS)]
    figures = []
    async with cluster() as (_, client):
        # A group that is there when messages become ready, one that comes when they have been: both from the first on.
        for group, early in (("there", True), ("late", False)):
            due_ms = now_ms() + 2_000 + count // 40 if early else 0
            consumer = client.consumer(group, ["filters"], filter="tag-7", credits=20_000)
            if early:
                await client.admin.create_topic("filters")
                await client.admin.create_group(group, ["filters"], filter="tag-7")
                await _schedule(client, "filters", count, due_ms, metas)
            began = time.perf_counter()
            seen = 0
            async with consumer, asyncio.timeout(END_S):
                receipts = []
                async for batch in consumer.batches():
                    seen += len(batch)
                    receipts.append(batch.ack())
                    if seen >= count // TAGS:
                        break
                await asyncio.gather(*receipts)
                until = now_ms() / 1_000 - due_ms / 1_000 if early else time.perf_counter() - began
                figures += [
                    Figure(f"passed_rate_{group}", count / until, "msg/s"),
                    Figure(f"not_wanted_{group}", float(consumer.skipped), "msg"),
                ]
    return figures


async def t13(quick: bool) -> list[Figure]:
    """A thousand message groups in order, one of each in flight at a time: rate, and whether each is in order."""
    groups, each = (200, 5) if quick else (1_000, 30)
    count = groups * each
    metas = [common_pb2.MessageMeta(message_group=f"g{n}").SerializeToString() for n in range(groups)]
    async with cluster() as (_, client):
        await client.admin.create_topic("fifo", fifo=True)
        ids = await _schedule(client, "fifo", count, now_ms() + 2_000, metas)
        group_of = {int(id64): place % groups for place, id64 in enumerate(ids)}
        last = np.zeros(groups, np.uint64)
        out_of_order = seen = 0
        began = 0.0
        receipts = []
        async with client.consumer("fifo", ["fifo"], credits=20_000) as consumer, asyncio.timeout(END_S):
            async for batch in consumer.batches():
                began = began or time.perf_counter()
                for id64 in batch.ids.tolist():
                    group = group_of[id64]
                    out_of_order += id64 <= last[group]
                    last[group] = id64
                receipts.append(batch.ack())
                seen += len(batch)
                if seen >= count:
                    break
            await asyncio.gather(*receipts)
            took_s = time.perf_counter() - began
    return [Figure("in_order_rate", count / took_s, "msg/s"), Figure("out_of_order", float(out_of_order), "msg", "0")]
