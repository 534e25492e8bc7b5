"""The cases of the benchmark that run against three node processes on this machine. Each returns its figures."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import numpy as np
from numpy.typing import NDArray

from tickwheel.bench.figures import Figure, timeline
from tickwheel.bench.load import (
    BATCH,
    CALLERS,
    DAY_MS,
    HOUR_MS,
    Consumed,
    call_unary,
    consuming,
    now_ms,
    schedule_columns,
    spread,
)
from tickwheel.bench.served import (
    DRAIN_S,
    TIMELINES,
    call_figures,
    cluster,
    cost_figures,
    costing,
    delivery_figures,
    digests_equal,
    through_figures,
)
from tickwheel.chaos.live.cluster import ChaosCluster, anonymous_bytes
from tickwheel.chaos.live.losses import Kind, measure
from tickwheel.chaos.live.network import Spoiling
from tickwheel.client import AsyncClient
from tickwheel.proto import admin_pb2
from tickwheel.proto.admin_pb2_grpc import AdminStub


def disk_rate(directory: Path, seconds: float) -> float:
    """Bytes a second that this disk takes in pieces of 1 MiB, with an fdatasync after each."""
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
    """Schedule columns of 4,096, due over 24 h and over 60 days, for 20 s and for 60 s. T20 has rows."""
    figures = []
    seconds = 2.0 if quick else 20.0
    loads = (
        ("24 h", DAY_MS, seconds, "250,000"),
        ("60 days", 60 * DAY_MS, seconds, "0.7 of 24 h"),
        ("24 h, a minute", DAY_MS, 3 * seconds, "150,000"),
    )
    for load, width_ms, lasts_s, target in loads:
        async with cluster() as (nodes, client):
            async with costing(nodes, client) as cost:
                result = await schedule_columns(client, lasts_s, BATCH, spread(HOUR_MS, width_ms))
            figures.append(Figure("rate", result.rate, "msg/s", target, load))
            figures += cost_figures(cost, result.messages, load)
    with TemporaryDirectory(prefix="tickwheel-bench-") as directory:
        # Each message is written twice (journal, hour files) on each of three nodes.
        own = disk_rate(Path(directory), 2.0) / (256 * 2 * 3)
    figures.append(Figure("disk_alone", own, "msg/s"))
    return figures


async def t2(quick: bool) -> list[Figure]:
    """Unary schedule by 64 callers of one client, and by 64 clients of this process. `make bench-peers` has Go's."""
    figures = []
    loads = ((f"{CALLERS} callers of one client", 1, "30,000"), (f"{CALLERS} clients", CALLERS, "6,000"))
    for load, count, target in loads:
        async with cluster() as (nodes, client), contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(AsyncClient(nodes.addresses)) for _ in range(count)]
            # Each connects, and learns the master.
            await asyncio.gather(*(one.schedule("bench", b"first", delay_ms=HOUR_MS) for one in clients))
            async with costing(nodes, client) as cost:
                result = await call_unary(clients, 1.0 if quick else 10.0, spread(HOUR_MS, DAY_MS))
            figures += call_figures(result, cost, load, {"rate": target, "call_p99": "20"})
    return figures


async def _end_to_end(
    rate: float, batch: int, seconds: float, due_ms: tuple[int, int], targets: Mapping[str, str]
) -> list[Figure]:
    consumed = Consumed()
    async with cluster() as (nodes, client), consuming(client, consumed):
        async with costing(nodes, client) as cost:
            result = await schedule_columns(client, seconds, batch, spread(*due_ms), rate)
            await consumed.drained(result.messages, DRAIN_S)
        equal = await digests_equal(nodes)
    return [
        *through_figures(result, consumed, cost, targets=targets),
        Figure("settled", consumed.settled, "msg"),
        Figure("digests_equal", float(equal), "", "1"),
    ]


async def t3(quick: bool) -> list[Figure]:
    """End to end at 80,000/s: scheduled 2 to 5 s ahead, delivered, settled; the nodes' digests compared at the end."""
    targets = {"rate": "80,000", "lateness_p99": "100", "repeats": "0"}
    return await _end_to_end(80_000.0, BATCH, 4.0 if quick else 60.0, (2_000, 3_000), targets)


async def t4(quick: bool) -> list[Figure]:
    """Lateness at 5,000/s, due times at random milliseconds."""
    targets = {"lateness_p50": "2", "lateness_p99": "8", "lateness_p99_9": "20", "nodes_cpu": "0.12 with load"}
    return await _end_to_end(5_000.0, 250, 2.0 if quick else 30.0, (1_000, 2_000), targets)


async def t16(quick: bool) -> list[Figure]:
    """Ten minutes at 5,000/s without a fault: nobody is elected for nothing, nothing comes twice."""
    return await _end_to_end(5_000.0, 250, 4.0 if quick else 600.0, (1_000, 2_000), {"repeats": "0"})


async def _all_dispatched(address: str) -> float:
    """Wait until this node has nothing pending. Returns when it said so, in seconds since the epoch."""
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
    async with cluster() as (nodes, client), consuming(client, consumed):
        target_ms = now_ms() // 1_000 * 1_000 + (8_000 if quick else 20_000)

        def due(rng: np.random.Generator, _: int, size: int) -> NDArray[np.int64]:
            return target_ms + rng.integers(0, 1_000, size)

        async with costing(nodes, client) as cost:
            result = await schedule_columns(
                client, 0.0, BATCH, due, stop=asyncio.Event(), messages_max=-(-count // BATCH) * BATCH
            )
            master = await nodes.master()
            dispatched_s = await _all_dispatched(master.client_address) - target_ms / 1_000
            await consumed.drained(result.messages, 2 * DRAIN_S)
        took_s = (now_ms() - target_ms) / 1_000
    return [
        Figure("messages", result.messages, "msg"),
        Figure("dispatched_after", dispatched_s, "s", "2 (1 after the second's end)"),
        Figure("settled_after", took_s, "s", "2"),
        *through_figures(result, consumed, cost),
    ]


async def _losses(kind: Kind, quick: bool, figure: str, targets: tuple[str, str]) -> list[Figure]:
    """Lose the master under 5,000/s, again and again; `tickwheel chaos failover` measures the same."""
    with TemporaryDirectory(prefix="tickwheel-bench-") as directory:
        losses = await measure(Path(directory), kind, 1 if quick else 20, 5_000.0)
    load = kind.value
    seen = Consumed(
        late_ms=[batch.late_ms for batch in losses.batches],
        ids=[batch.ids for batch in losses.batches],
        arrivals_s=[batch.at_s for batch in losses.batches],
        terms=[batch.term for batch in losses.batches],
    )
    marks = [(at_s, "handed over" if kind is Kind.HANDOVER else "master lost") for at_s in losses.struck_s]
    TIMELINES.append(timeline(load, seen.late_ms, seen.arrivals_s, [*marks, *seen.elections()]))
    seconds = losses.values(figure) / 1_000
    steps = ("detection_ms", "election_ms", "alignment_ms", "delivery_ms")
    repeats = {"repeats": "0"} if kind is Kind.HANDOVER else {}
    return [
        Figure("p50", float(np.median(seconds)), "s", targets[0], load),
        Figure("p90", float(np.percentile(seconds, 90)), "s", load=load),
        Figure("max", float(seconds.max()), "s", targets[1], load),
        *(Figure(f"{step}_p50", float(np.median(losses.values(step))), "ms", load=load) for step in steps),
        *delivery_figures(seen, losses.lost, load, repeats),
        Figure("elections", losses.unasked_elections, "", "0 unasked", load),
        Figure("rounds", len(losses.losses), "", load=load),
    ]


async def t6(quick: bool) -> list[Figure]:
    """Loss of the master at 5,000/s: SIGKILL, SIGSTOP, packets dropped; until the first delivery by the new one."""
    figures = [await _losses(kind, quick, "total_ms", ("0.45", "1.0")) for kind in (Kind.KILL, Kind.STOP, Kind.DROP)]
    return [figure for part in figures for figure in part]


async def t7(quick: bool) -> list[Figure]:
    """Planned handovers at 5,000/s; the longest time without a delivery after each."""
    return await _losses(Kind.HANDOVER, quick, "silence_ms", ("", "0.2"))


async def t8(quick: bool) -> list[Figure]:
    """One million, then ten million pending messages of 100 bytes: memory, schedule rate, restart, failover."""
    unit = 100_000 if quick else 1_000_000
    async with cluster() as (nodes, client):

        async def grow(count: int) -> float:
            stop = asyncio.Event()
            due = spread(2 * HOUR_MS, DAY_MS)
            result = await schedule_columns(client, 0.0, BATCH, due, stop=stop, messages_max=count, payload_bytes=100)
            return result.rate

        def memory() -> float:
            return max(anonymous_bytes(node.pid) or 0 for node in nodes.nodes if node.pid is not None) / (1 << 20)

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
    """Messages a second, from the first to the last delivery, if so many are due at once and frames between nodes take
    2 ms each way."""
    consumed = Consumed()
    with TemporaryDirectory(prefix="tickwheel-bench-") as directory:
        nodes = ChaosCluster(Path(directory), 3, seed=1, config={"dispatch": config}, knobs=False)
        async with nodes, nodes.client() as client:
            nodes.network.spoil(list(nodes.network.ways.values()), Spoiling(delay_ms=2.0))
            due_ms = now_ms() + 1_500 + messages // 80  # when all of them are scheduled
            async with consuming(client, consumed):
                await schedule_columns(
                    client,
                    0.0,
                    min(BATCH, messages // 4),
                    lambda _rng, _now, count: np.full(count, due_ms, np.int64),
                    stop=asyncio.Event(),
                    messages_max=messages,
                )
                await consumed.drained(messages, 2 * DRAIN_S)
    return messages / (consumed.arrivals_s[-1] - consumed.arrivals_s[0])


async def t9(quick: bool) -> list[Figure]:
    """Dispatch pipelined against one at a time, with 2 ms between nodes each way: messages due at once are drained."""
    small: dict[str, object] = {"messages_max": 32}
    count = 200 if quick else 20_000
    one_at_a_time = await _drain_rate({**small, "in_flight_max": 1}, count)
    pipelined = await _drain_rate(small, count)
    return [
        Figure("one_at_a_time_32", one_at_a_time, "msg/s"),
        Figure("pipelined_32", pipelined, "msg/s"),
        Figure("gain_32", pipelined / one_at_a_time, "x", "3"),
        Figure("one_at_a_time_default", await _drain_rate({"in_flight_max": 1}, 10 * count), "msg/s"),
        Figure("pipelined_default", await _drain_rate({}, 10 * count), "msg/s"),
    ]
