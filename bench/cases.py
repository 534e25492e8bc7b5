"""The cases of the benchmark that run against three node processes on this machine. Each returns its figures."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from tickwheel.bench.load import Consumed, consume, now_ms, schedule_columns, schedule_rows
from tickwheel.chaos.live.cluster import ChaosCluster
from tickwheel.chaos.live.losses import Kind, measure
from tickwheel.chaos.live.network import Spoiling
from tickwheel.client import AsyncClient
from tickwheel.node.local_cluster import LocalCluster
from tickwheel.proto import admin_pb2
from tickwheel.proto.admin_pb2_grpc import AdminStub

DAY_MS = 86_400_000
BATCH = 4_096


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number."""

    name: str
    value: float
    unit: str
    target: str = ""


Line = tuple[list[float], list[float]]
"""Times in seconds and values: a line of a plot."""

LINES: dict[str, Line] = {}
"""Series of the last run of a case, by the name of the line."""


@contextlib.asynccontextmanager
async def cluster() -> AsyncIterator[tuple[LocalCluster, AsyncClient]]:
    """Three nodes on this machine and a client."""
    with TemporaryDirectory(prefix="tickwheel-bench-") as directory:
        async with LocalCluster(Path(directory), 3) as nodes, nodes.client() as client:
            yield nodes, client
            # An orderly stop writes a checkpoint of all that was scheduled: minutes, for a directory that goes away.
            await asyncio.gather(*(nodes.kill_node(node) for node in nodes.nodes))


def spread(first_ms: int, width_ms: int) -> Callable[[np.random.Generator, int, int], NDArray[np.int64]]:
    """Due times evenly at random from `first_ms` ahead on."""
    return lambda rng, now, count: now + first_ms + rng.integers(0, width_ms, count)


def disk_rate(directory: Path, seconds: float) -> float:
    """Bytes a second that this disk takes in pieces of 1 MiB with an fdatasync behind each."""
    piece, total = bytes(1 << 20), 0
    path = directory / "disk-rate"
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
    try:
        began = time.perf_counter()
        while (elapsed := time.perf_counter() - began) < seconds:
            os.write(descriptor, piece)
            os.fdatasync(descriptor)
            total += len(piece)
    finally:
        os.close(descriptor)
        path.unlink()
    return total / elapsed


async def t1(quick: bool) -> list[Figure]:
    """Schedule rows of 1,000 and columns of 4,096, due over 24 h and over 60 days, for 20 s and for 60 s."""
    figures = []
    seconds = 2.0 if quick else 20.0
    async with cluster() as (nodes, _):
        master = await nodes.master()
        rows = await schedule_rows(master.client_address, seconds, 1_000, 3_600_000, DAY_MS)
        figures.append(Figure("rows_24h", rows.rate, "msg/s", "150,000"))
    columns = (
        ("columns_24h", DAY_MS, seconds, "250,000"),
        ("columns_60d", 60 * DAY_MS, seconds, "0.7 of 24 h"),
        ("columns_24h_60s", DAY_MS, 3 * seconds, "150,000"),
    )
    for name, width_ms, lasts_s, target in columns:
        async with cluster() as (_, client):
            result = await schedule_columns(client, lasts_s, BATCH, spread(3_600_000, width_ms))
            figures.append(Figure(name, result.rate, "msg/s", target))
    with TemporaryDirectory(prefix="tickwheel-bench-") as directory:
        # Each message is written twice (journal, hour files) on each of three nodes.
        own = disk_rate(Path(directory), 2.0) / (256 * 2 * 3)
    figures.append(Figure("disk_alone", own, "msg/s"))
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


async def digests_equal(nodes: LocalCluster) -> bool:
    """Whether all nodes end at the same applied index with the same digest."""
    for _ in range(100):
        digests = [await nodes.client().admin.digest(node.client_address) for node in nodes.nodes]
        if len({(digest.applied_index, digest.digest) for digest in digests}) == 1:
            return True
        await asyncio.sleep(0.1)
    return False


def plot_lines(consumed: Consumed) -> None:
    """Lateness and rate of deliveries over time, by quarter seconds."""
    times = np.array(consumed.arrivals_s) - consumed.arrivals_s[0]
    at = (times * 4).astype(int)
    p50, p99, rates = [], [], []
    ticks = sorted(set(at.tolist()))
    for tick in ticks:
        late = np.concatenate([consumed.late_ms[place] for place in np.flatnonzero(at == tick)])
        p50.append(float(np.percentile(late, 50)))
        p99.append(float(np.percentile(late, 99)))
        rates.append(4.0 * len(late))
    seconds = [tick / 4 for tick in ticks]
    LINES.update(
        {"lateness p50, ms": (seconds, p50), "lateness p99, ms": (seconds, p99), "messages/s": (seconds, rates)}
    )


@dataclass(frozen=True, slots=True)
class _Through:
    """Outcome of messages that were scheduled, delivered and settled."""

    settled_rate: float
    consumed: Consumed
    digests_equal: bool
    elections: int
    """Terms that began meanwhile."""


async def _end_to_end(rate: float, batch: int, seconds: float, due_ms: tuple[int, int]) -> _Through:
    consumed = Consumed()
    async with cluster() as (nodes, client):
        task = asyncio.create_task(consume(client, consumed))
        first_term = (await client.admin.master_status()).term
        began = time.perf_counter()
        result = await schedule_columns(client, seconds, batch, spread(*due_ms), rate)
        async with asyncio.timeout(60):
            while consumed.settled < result.messages:
                await asyncio.sleep(0.05)
        elections = (await client.admin.master_status()).term - first_term
        equal = await digests_equal(nodes)
        settled_rate = consumed.settled / (consumed.last_settled_s - began - due_ms[0] / 1_000)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    plot_lines(consumed)
    return _Through(settled_rate, consumed, equal, elections)


def _lateness(consumed: Consumed, targets: tuple[str, str, str] = ("", "", "")) -> list[Figure]:
    late = consumed.lateness()
    named = (("p50", 50), ("p99", 99), ("p99_9", 99.9))
    figures = [
        Figure(f"lateness_{name}", float(np.percentile(late, q)), "ms", target)
        for (name, q), target in zip(named, targets, strict=True)
    ]
    return [
        *figures,
        Figure("early", float((late < 0).sum()), "msg", "0"),
        Figure("repeats", consumed.repeats(), "msg"),
    ]


def _calm(through: _Through) -> list[Figure]:
    """A load that no loss of a node may disturb."""
    return [
        Figure("elections", through.elections, "", "0"),
        Figure("digests_equal", float(through.digests_equal), "", "1"),
    ]


async def t3(quick: bool) -> list[Figure]:
    """End to end at 80,000/s: scheduled 2 to 5 s ahead, delivered, settled; the nodes' digests compared at the end."""
    through = await _end_to_end(80_000.0, BATCH, 4.0 if quick else 60.0, (2_000, 3_000))
    return [
        Figure("settled_rate", through.settled_rate, "msg/s", "80,000"),
        *_lateness(through.consumed, ("", "25", "")),
        *_calm(through),
    ]


async def t4(quick: bool) -> list[Figure]:
    """Lateness at 5,000/s, due times at random milliseconds."""
    through = await _end_to_end(5_000.0, 250, 4.0 if quick else 30.0, (1_000, 2_000))
    return _lateness(through.consumed, ("2", "5", "20"))


async def t16(quick: bool) -> list[Figure]:
    """Ten minutes at 5,000/s without a fault: nobody is elected for nothing, nothing comes twice."""
    through = await _end_to_end(5_000.0, 250, 4.0 if quick else 600.0, (1_000, 2_000))
    return [
        Figure("settled", through.consumed.settled, "msg"),
        *_lateness(through.consumed),
        *_calm(through),
    ]


async def _all_dispatched(address: str) -> float:
    """Wait until this node has nothing pending any more; the time that it said so, in seconds since the epoch."""
    async with grpc.aio.insecure_channel(address) as channel:
        statuses = AdminStub(channel).WatchStatus(admin_pb2.WatchStatusRequest(interval_ms=50))
        async for status in statuses:
            if status.pending == 0:
                return time.time()
    raise ConnectionError(f"{address} ended its status before all was dispatched")


async def t5(quick: bool) -> list[Figure]:
    """Many messages due in the same second: time from that second's start to the last dispatch and settlement."""
    count = 50_000 if quick else 500_000
    consumed = Consumed()
    async with cluster() as (nodes, client):
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
        master = await nodes.master()
        dispatched_s = await _all_dispatched(master.client_address) - target_ms / 1_000
        async with asyncio.timeout(120):
            while consumed.settled < total:
                await asyncio.sleep(0.05)
        took_s = (now_ms() - target_ms) / 1_000
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return [
        Figure("messages", total, "msg"),
        Figure("dispatched_after", dispatched_s, "s", "2 (1 after the second's end)"),
        Figure("settled_after", took_s, "s", "7"),
        *_lateness(consumed),
    ]


async def _losses(kind: Kind, quick: bool, figure: str, targets: tuple[str, str]) -> list[Figure]:
    """Lose the master under 5,000/s, again and again; `tickwheel chaos failover` measures the same."""
    with TemporaryDirectory(prefix="tickwheel-bench-") as directory:
        losses = await measure(Path(directory), kind, 1 if quick else 20, 5_000.0)
    plot_lines(Consumed(late_ms=losses.late_ms, arrivals_s=losses.arrivals_s))
    name, seconds = kind.value, losses.values(figure) / 1_000
    steps = ("detection_ms", "election_ms", "alignment_ms", "delivery_ms")
    return [
        Figure(f"{name}_p50", float(np.median(seconds)), "s", targets[0]),
        Figure(f"{name}_p99", float(np.percentile(seconds, 99)), "s"),
        Figure(f"{name}_max", float(seconds.max()), "s", targets[1]),
        *(Figure(f"{name}_{step}_p50", float(np.median(losses.values(step))), "ms") for step in steps),
        Figure(f"{name}_lost", losses.lost, "msg", "0"),
        Figure(f"{name}_repeats", sum(losses.duplicates.values()), "msg", "0" if kind is Kind.HANDOVER else ""),
        Figure(f"{name}_early", losses.early, "msg", "0"),
        Figure(f"{name}_unasked_elections", losses.unasked_elections, "", "0"),
        Figure(f"{name}_rounds", len(losses.losses), ""),
    ]


async def t6(quick: bool) -> list[Figure]:
    """Loss of the master at 5,000/s: SIGKILL, SIGSTOP, packets dropped; until the first delivery by the new one."""
    figures = [await _losses(kind, quick, "total_ms", ("0.7", "1.5")) for kind in (Kind.KILL, Kind.STOP, Kind.DROP)]
    return [figure for part in figures for figure in part]


async def t7(quick: bool) -> list[Figure]:
    """Planned handovers at 5,000/s; the longest time without a delivery after each."""
    return await _losses(Kind.HANDOVER, quick, "silence_ms", ("", "0.2"))


def private_bytes(pid: int) -> int:
    """RssAnon of a process."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise ValueError(f"process {pid} says nothing of RssAnon")


async def t8(quick: bool) -> list[Figure]:
    """One million, then ten million pending messages of 100 bytes: memory, schedule rate, restart, failover."""
    unit = 100_000 if quick else 1_000_000
    async with cluster() as (nodes, client):

        async def grow(count: int) -> float:
            stop = asyncio.Event()
            due = spread(2 * 3_600_000, DAY_MS)
            result = await schedule_columns(client, 0.0, BATCH, due, stop=stop, messages_max=count, payload_bytes=100)
            return result.rate

        def memory() -> float:
            return max(private_bytes(node.pid) for node in nodes.nodes if node.pid is not None) / (1 << 20)

        empty_rate = await grow(unit)
        await asyncio.sleep(2)
        small = memory()
        await grow(8 * unit)
        full_rate = await grow(unit)
        await asyncio.sleep(2)
        large = memory()
        master = await nodes.master()
        slave = next(node for node in nodes.nodes if node is not master)
        await nodes.stop_node(slave)
        began = time.perf_counter()
        nodes.start_node(slave)
        await nodes.wait_ready()
        ready_s = time.perf_counter() - began
        pending = (await client.admin.master_status()).pending
        began = time.perf_counter()
        await nodes.kill_node(master)
        await client.schedule("bench", b"the first one of the new master", delay_ms=3_600_000)
        failover_s = time.perf_counter() - began
    return [
        Figure("pending", pending, "msg"),
        Figure("memory_small", small, "MiB"),
        Figure("memory_large", large, "MiB"),
        Figure("memory_growth", large - small, "MiB", "50"),
        Figure("rate_empty", empty_rate, "msg/s"),
        Figure("rate_full", full_rate, "msg/s", "0.9 of empty"),
        Figure("restart_to_ready", ready_s, "s", "3"),
        Figure("kill_to_first_schedule", failover_s, "s", "1.5"),
    ]


async def _drain_rate(config: Mapping[str, object], messages: int) -> float:
    """Messages a second from the first to the last of so many that are due at once, 2 ms between nodes each way."""
    consumed = Consumed()
    with TemporaryDirectory(prefix="tickwheel-bench-") as directory:
        nodes = ChaosCluster(Path(directory), 3, seed=1, config={"dispatch": config}, knobs=False)
        async with nodes, nodes.client() as client:
            nodes.network.spoil(list(nodes.network.ways.values()), Spoiling(delay_ms=2.0))
            task = asyncio.create_task(consume(client, consumed))
            due_ms = now_ms() + 1_500 + messages // 80  # when all of them are scheduled
            await schedule_columns(
                client,
                0.0,
                min(BATCH, messages // 4),
                lambda _rng, _now, count: np.full(count, due_ms, np.int64),
                stop=asyncio.Event(),
                messages_max=messages,
            )
            async with asyncio.timeout(120):
                while sum(map(len, consumed.ids)) < messages:
                    await asyncio.sleep(0.05)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    return messages / (consumed.arrivals_s[-1] - consumed.arrivals_s[0])


async def t9(quick: bool) -> list[Figure]:
    """Dispatch pipelined against one at a time, with 2 ms between nodes each way: messages due at once are drained."""
    small: dict[str, object] = {"messages_max": 32}
    count = 500 if quick else 20_000
    one_at_a_time = await _drain_rate({**small, "in_flight_max": 1}, count)
    pipelined = await _drain_rate(small, count)
    return [
        Figure("one_at_a_time_32", one_at_a_time, "msg/s"),
        Figure("pipelined_32", pipelined, "msg/s"),
        Figure("gain_32", pipelined / one_at_a_time, "x", "3"),
        Figure("one_at_a_time_default", await _drain_rate({"in_flight_max": 1}, 10 * count), "msg/s"),
        Figure("pipelined_default", await _drain_rate({}, 10 * count), "msg/s"),
    ]


CASES: dict[str, Callable[[bool], Coroutine[Any, Any, list[Figure]]]] = {
    "T1": t1,
    "T2": t2,
    "T3": t3,
    "T4": t4,
    "T5": t5,
    "T6": t6,
    "T7": t7,
    "T8": t8,
    "T9": t9,
}
