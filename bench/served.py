"""Three nodes for a case; the cost of a load on them, and its figures."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from tickwheel.bench.figures import Figure, Timeline, timeline
from tickwheel.bench.load import Consumed, Scheduled
from tickwheel.bench.processor import machine_s, processor_s, switched
from tickwheel.client import AsyncClient
from tickwheel.node.local_cluster import LocalCluster

DRAIN_S = 60.0

TIMELINES: list[Timeline] = []
"""Deliveries over time in the last run of a case, one for each load."""


@contextlib.asynccontextmanager
async def cluster(parent: Path | None = None) -> AsyncIterator[tuple[LocalCluster, AsyncClient]]:
    """Three nodes on this machine and a client. Their data lies in a new directory in `parent`, or in the system's
    temporary directory."""
    with TemporaryDirectory(prefix="tickwheel-bench-", dir=parent) as directory:
        async with LocalCluster(Path(directory), 3) as nodes, nodes.client() as client:
            yield nodes, client
            # An orderly stop would spend minutes on a checkpoint of all that was scheduled, in a directory to be
            # removed.
            await asyncio.gather(*(nodes.kill_node(node) for node in nodes.nodes))


async def digests_equal(nodes: LocalCluster) -> bool:
    """Whether all nodes end at the same applied index with the same digest."""
    for _ in range(100):
        digests = [await nodes.client().admin.digest(node.client_address) for node in nodes.nodes]
        if len({(digest.applied_index, digest.digest) for digest in digests}) == 1:
            return True
        await asyncio.sleep(0.1)
    return False


@dataclass(slots=True)
class Cost:
    """What a load cost from its begin to its end."""

    seconds: float = 0.0
    nodes_s: list[float] = field(default_factory=list)
    """Processor time of each node."""
    node_switches: list[int] = field(default_factory=list)
    load_s: float = 0.0
    """Processor time of this process: generator and consumers."""
    others_s: float = 0.0
    """Processor time of everything else on the machine."""
    elections: int = 0
    """Terms that began."""


@contextlib.asynccontextmanager
async def costing(nodes: LocalCluster, client: AsyncClient) -> AsyncIterator[Cost]:
    """The cost of what happens inside. The `Cost` is filled in at the end."""
    cost = Cost()
    pids = [node.pid for node in nodes.nodes if node.pid is not None]

    def read() -> tuple[float, float, float, list[float], list[int]]:
        return (
            time.perf_counter(),
            time.process_time(),
            machine_s(),
            [processor_s([pid]) for pid in pids],
            [switched([pid]) for pid in pids],
        )

    term = (await client.admin.master_status()).term
    began_s, load_s, machine, nodes_s, switches = read()
    yield cost
    ended = read()
    cost.seconds, cost.load_s = ended[0] - began_s, ended[1] - load_s
    cost.nodes_s = [after - before for before, after in zip(nodes_s, ended[3], strict=True)]
    cost.node_switches = [after - before for before, after in zip(switches, ended[4], strict=True)]
    cost.others_s = max(0.0, ended[2] - machine - cost.load_s - sum(cost.nodes_s))
    cost.elections = (await client.admin.master_status()).term - term


def cost_figures(cost: Cost, messages: int, load: str = "", targets: Mapping[str, str] | None = None) -> list[Figure]:
    """Elections, and processor time for a thousand messages."""
    targets = {"elections": "0", **(targets or {})}
    values = {
        "elections": (cost.elections, ""),
        "nodes_cpu": (sum(cost.nodes_s) / max(1, messages) * 1_000, "s"),
        "load_cpu": (cost.load_s / max(1, messages) * 1_000, "s"),
    }
    figures = [Figure(name, float(value), unit, targets.get(name, ""), load) for name, (value, unit) in values.items()]
    return [*figures, Figure("others_cores", cost.others_s / cost.seconds, "cores", load=load)]


def call_figures(
    scheduled: Scheduled, cost: Cost, load: str = "", targets: Mapping[str, str] | None = None
) -> list[Figure]:
    """Rate, cost and duration of calls that schedule one message each."""
    targets = targets or {}
    p50, p99 = np.percentile(scheduled.call_ms, (50, 99))
    return [
        Figure("rate", scheduled.rate, "call/s", targets.get("rate", ""), load),
        *cost_figures(cost, scheduled.messages, load),
        Figure("call_p50", float(p50), "ms", load=load),
        Figure("call_p99", float(p99), "ms", targets.get("call_p99", ""), load),
        Figure("failed", scheduled.failed, "call", "0", load),
    ]


def delivery_figures(
    consumed: Consumed, lost: int, load: str = "", targets: Mapping[str, str] | None = None
) -> list[Figure]:
    """Rate and lateness; how many messages came early, came again, or never came."""
    targets = {"early": "0", "lost": "0", **(targets or {})}
    late = consumed.lateness()
    p50, p99, p99_9 = np.percentile(late, (50, 99, 99.9)) if len(late) else (np.nan, np.nan, np.nan)
    values = {
        "rate": (consumed.rate(), "msg/s"),
        "lateness_p50": (p50, "ms"),
        "lateness_p99": (p99, "ms"),
        "lateness_p99_9": (p99_9, "ms"),
        "early": ((late < 0).sum(), "msg"),
        "repeats": (consumed.repeats(), "msg"),
        "lost": (lost, "msg"),
    }
    return [Figure(name, float(value), unit, targets.get(name, ""), load) for name, (value, unit) in values.items()]


def through_figures(
    scheduled: Scheduled, consumed: Consumed, cost: Cost, load: str = "", targets: Mapping[str, str] | None = None
) -> list[Figure]:
    """The figures of messages that were scheduled, delivered and settled. Keeps their deliveries for the plot."""
    TIMELINES.append(timeline(load, consumed.late_ms, consumed.arrivals_s, consumed.elections()))
    return [
        *delivery_figures(consumed, consumed.lost(scheduled), load, targets),
        *cost_figures(cost, scheduled.messages, load, targets),
    ]
