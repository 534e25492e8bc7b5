"""The cases of the benchmark that run against three node processes on this machine. Each returns its figures."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tickwheel.bench.load import Consumed, consume, now_ms, schedule_columns
from tickwheel.client import AsyncClient
from tickwheel.node.local_cluster import LocalCluster

DAY_MS = 86_400_000
BATCH = 4_096


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number."""

    name: str
    value: float
    unit: str
    target: str = ""


@contextlib.asynccontextmanager
async def cluster() -> AsyncIterator[tuple[LocalCluster, AsyncClient]]:
    """Three nodes on this machine and a client."""
    with TemporaryDirectory(prefix="tickwheel-bench-") as directory:
        async with LocalCluster(Path(directory), 3) as nodes, nodes.client() as client:
            yield nodes, client


def spread(first_ms: int, width_ms: int) -> Callable[[np.random.Generator, int, int], NDArray[np.int64]]:
    """Due times evenly at random from `first_ms` ahead on."""
    return lambda rng, now, count: now + first_ms + rng.integers(0, width_ms, count)


async def t1(quick: bool) -> list[Figure]:
    """Schedule as columns of 4,096, due times over 24 h, then over 60 days."""
    figures = []
    seconds = 2.0 if quick else 20.0
    for name, width_ms in (("schedule_rate_24h", DAY_MS), ("schedule_rate_60d", 60 * DAY_MS)):
        async with cluster() as (_, client):
            result = await schedule_columns(client, seconds, BATCH, spread(3_600_000, width_ms))
            figures.append(Figure(name, result.rate, "msg/s", "250,000" if width_ms == DAY_MS else "0.7 of 24 h"))
    return figures


async def t2(quick: bool) -> list[Figure]:
    """Unary schedule by 64 callers."""
    seconds = 2.0 if quick else 10.0
    took_ms: list[float] = []
    async with cluster() as (_, client):
        began = time.perf_counter()

        async def caller() -> None:
            while time.perf_counter() - began < seconds:
                at = time.perf_counter()
                await client.schedule("bench", bytes(256), delay_ms=3_600_000)
                took_ms.append((time.perf_counter() - at) * 1_000)

        await asyncio.gather(*(caller() for _ in range(64)))
        elapsed = time.perf_counter() - began
    return [
        Figure("unary_rate", len(took_ms) / elapsed, "call/s", "5,000"),
        Figure("unary_p99", float(np.percentile(took_ms, 99)), "ms", "20"),
    ]


async def _end_to_end(rate: float, batch: int, seconds: float, due_ms: tuple[int, int]) -> tuple[float, Consumed, int]:
    consumed = Consumed()
    async with cluster() as (_, client):
        task = asyncio.create_task(consume(client, consumed))
        began = time.perf_counter()
        result = await schedule_columns(client, seconds, batch, spread(*due_ms), rate)
        async with asyncio.timeout(60):
            while consumed.settled < result.messages:
                await asyncio.sleep(0.05)
        settled_rate = consumed.settled / (consumed.last_settled_s - began - due_ms[0] / 1_000)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return settled_rate, consumed, result.messages


def _lateness(consumed: Consumed, prefix: str = "lateness") -> list[Figure]:
    late = consumed.lateness()
    named = (("p50", 50), ("p99", 99), ("p99_9", 99.9))
    figures = [Figure(f"{prefix}_{name}", float(np.percentile(late, q)), "ms") for name, q in named]
    return [
        *figures,
        Figure("early", float((late < 0).sum()), "msg", "0"),
        Figure("repeats", consumed.repeats(), "msg"),
    ]


async def t3(quick: bool) -> list[Figure]:
    """End to end: scheduled 2 to 5 s ahead as fast as it goes, delivered, settled."""
    rate, consumed, _ = await _end_to_end(0.0, BATCH, 4.0 if quick else 30.0, (2_000, 3_000))
    return [Figure("settled_rate", rate, "msg/s", "80,000"), *_lateness(consumed)]


async def t4(quick: bool) -> list[Figure]:
    """Lateness at 5,000/s, due times at random milliseconds."""
    _, consumed, _ = await _end_to_end(5_000.0, 250, 4.0 if quick else 30.0, (1_000, 2_000))
    return _lateness(consumed)


async def t5(quick: bool) -> list[Figure]:
    """Many messages due in the same second: time from that second's end to the last settlement."""
    count = 50_000 if quick else 500_000
    consumed = Consumed()
    async with cluster() as (_, client):
        task = asyncio.create_task(consume(client, consumed))
        target_ms = now_ms() // 1_000 * 1_000 + (8_000 if quick else 20_000)
        batches = -(-count // BATCH)
        sent = 0

        def due(rng: np.random.Generator, _: int, size: int) -> NDArray[np.int64]:
            nonlocal sent
            sent += 1
            return target_ms + rng.integers(0, 1_000, size)

        while sent < batches:
            await schedule_columns(client, 0.05, BATCH, due)
        total = sent * BATCH
        async with asyncio.timeout(120):
            while consumed.settled < total:
                await asyncio.sleep(0.05)
        took_s = (now_ms() - target_ms) / 1_000
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return [Figure("messages", total, "msg"), Figure("settled_after", took_s, "s", "7"), *_lateness(consumed)]


async def _losses(rounds: int, act: Callable[[LocalCluster, AsyncClient], Awaitable[None]]) -> list[Figure]:
    """Do something to the master under 5,000/s, again and again; the longest silence of each round."""
    consumed = Consumed()
    silences: list[float] = []
    async with cluster() as (nodes, client):
        task = asyncio.create_task(consume(client, consumed))
        load = asyncio.create_task(schedule_columns(client, 6.0 * rounds + 2.0, 250, spread(300, 500), 5_000.0))
        await asyncio.sleep(2)
        for _ in range(rounds):
            at_s = time.perf_counter()
            await act(nodes, client)
            await asyncio.sleep(5)
            times = [at_s, *(t for t in consumed.arrivals_s if t > at_s)]
            silences.append(float(np.diff(times).max()))
            await nodes.wait_ready()
        result = await load
        async with asyncio.timeout(60):
            while len(np.unique(np.concatenate(consumed.ids))) < result.messages:
                await asyncio.sleep(0.1)
        unique = len(np.unique(np.concatenate(consumed.ids)))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    late = consumed.lateness()
    return [
        Figure("silence_p50", float(np.median(silences)), "s"),
        Figure("silence_max", max(silences), "s"),
        Figure("lost", result.messages - unique, "msg", "0"),
        Figure("repeats", consumed.repeats(), "msg"),
        Figure("early", float((late < 0).sum()), "msg", "0"),
        Figure("rounds", rounds, "losses"),
    ]


async def t6(quick: bool) -> list[Figure]:
    """SIGKILL of the master at 5,000/s; the longest time without a delivery after it."""

    async def kill(nodes: LocalCluster, _: AsyncClient) -> None:
        master = await nodes.master()
        assert master is not None
        await nodes.kill_node(master)
        nodes.start_node(master)

    return await _losses(1 if quick else 10, kill)


async def t7(quick: bool) -> list[Figure]:
    """Planned handovers at 5,000/s; the longest time without a delivery after each."""

    async def hand_over(_: LocalCluster, client: AsyncClient) -> None:
        await client.admin.transfer()

    return await _losses(1 if quick else 10, hand_over)


CASES: dict[str, Callable[[bool], Coroutine[Any, Any, list[Figure]]]] = {
    "T1": t1,
    "T2": t2,
    "T3": t3,
    "T4": t4,
    "T5": t5,
    "T6": t6,
    "T7": t7,
}
