"""The case of the benchmark about unique keys and recurring schedules."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np

from tickwheel.bench.figures import Figure
from tickwheel.bench.load import DAY_MS, HOUR_MS, Consumed, Metas, call_unary, consuming, schedule_columns, spread
from tickwheel.bench.served import DRAIN_S, call_figures, cluster, costing, through_figures
from tickwheel.client import AsyncClient
from tickwheel.proto.common_pb2 import MessageMeta

CALLS_S, QUICK_CALLS_S = 60.0, 0.5
"""Long enough for one full minute, at which the schedules fire."""
RATE, STREAM_S, QUICK_STREAM_S = 5_000.0, 30.0, 1.0
BATCH = 250
SCHEDULES, QUICK_SCHEDULES = 10_000, 20
PUTS_AT_ONCE = 200
PLAIN, KEYED, BESIDE = "plain", "unique keys", "10,000 schedules a minute"


def metas(keyed: bool) -> Metas:
    """Metas for one batch after another: each message has a unique key, or a search key of the same length."""
    numbers = itertools.count()

    def of(count: int) -> tuple[np.ndarray, bytes]:
        texts = [f"order-{next(numbers):09}" for _ in range(count)]
        made = [MessageMeta(unique_key=text) if keyed else MessageMeta(key=text) for text in texts]
        serialized = [meta.SerializeToString() for meta in made]
        return np.array([len(meta) for meta in serialized], np.uint32), b"".join(serialized)

    return of


async def _put_schedules(client: AsyncClient, count: int) -> None:
    gate = asyncio.Semaphore(PUTS_AT_ONCE)

    async def put(number: int) -> None:
        async with gate:
            await client.schedules.put(f"bench-{number}", "runs", bytes(100), cron="* * * * *")

    await asyncio.gather(*(put(number) for number in range(count)))


async def _calls(load: str, quick: bool) -> list[Figure]:
    """As T2, by one client."""
    async with cluster() as (nodes, client):
        if load == BESIDE:
            await _put_schedules(client, QUICK_SCHEDULES if quick else SCHEDULES)
        seconds, due = QUICK_CALLS_S if quick else CALLS_S, spread(HOUR_MS, DAY_MS)
        async with costing(nodes, client) as cost:
            result = await call_unary([client], seconds, due, unique_keys=load == KEYED)
    return call_figures(result, cost, f"calls, {load}")


async def _stream(load: str, quick: bool) -> list[Figure]:
    """As T4, with metas."""
    consumed, name = Consumed(), f"5,000/s, {load}"
    async with cluster() as (nodes, client), consuming(client, consumed):
        if load == BESIDE:
            await _put_schedules(client, QUICK_SCHEDULES if quick else SCHEDULES)
        seconds, due = QUICK_STREAM_S if quick else STREAM_S, spread(1_000, 2_000)
        async with costing(nodes, client) as cost:
            made = metas(load == KEYED)
            result = await schedule_columns(client, seconds, BATCH, due, RATE, metas=made)
            await consumed.drained(result.messages, DRAIN_S)
    return through_figures(result, consumed, cost, name)


async def t21(quick: bool) -> list[Figure]:
    """T2 by one client for a minute, and T4: plain, with a unique key a message, beside 10,000 schedules a minute."""
    figures: list[Figure] = []
    for load in (PLAIN, KEYED, BESIDE):
        figures += await _calls(load, quick)
        figures += await _stream(load, quick)
    return figures
