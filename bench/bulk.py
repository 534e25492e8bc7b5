"""The case of the benchmark about bulk load: building on Spark, bringing bundles to three nodes, taking them over."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from tickwheel.bench.figures import Figure
from tickwheel.bench.load import Consumed, consuming, now_ms, schedule_columns, spread
from tickwheel.bench.served import DRAIN_S, cluster, cost_figures, costing, delivery_figures, digests_equal
from tickwheel.client import AsyncClient
from tickwheel.pipeline.load import load
from tickwheel.pipeline.schedules import ScheduleConfig, write_schedule

QUICK_MESSAGES, MESSAGES = 200_000, 10_000_000
LIVE_RATE = 2_000.0
"""Messages a second that are scheduled and delivered beside the load."""


async def _build(source: Path, out: Path) -> float:
    """Build `out`; returns messages a second, without the start of Spark. Runs in a process of its own, because gRPC
    does not survive Spark's forks."""
    arguments = ("-m", "tickwheel.node.cli.main", "pipeline", "build", str(source), str(out))
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    text = (await process.communicate())[0].decode()
    if process.returncode:
        raise RuntimeError(f"the build ended with {process.returncode}: {text}")
    found = re.search(r"([\d,]+) messages/s", text)
    assert found is not None, text
    return float(found.group(1).replace(",", ""))


async def t14(quick: bool) -> list[Figure]:
    """Messages of 100 bytes are loaded; beside them others are scheduled and delivered."""
    count = QUICK_MESSAGES if quick else MESSAGES
    with TemporaryDirectory(prefix="tickwheel-bench-") as directory:
        source, out = Path(directory) / "in.parquet", Path(directory) / "out"
        config = ScheduleConfig(rows=count, start_ms=now_ms() + 3_600_000, span_days=60, median_days=2)
        await asyncio.to_thread(write_schedule, config, source)
        build_rate = await _build(source, out)
        consumed = Consumed()
        async with cluster() as (nodes, client), consuming(client, consumed):
            stop = asyncio.Event()
            async with costing(nodes, client) as cost:
                live = asyncio.create_task(schedule_columns(client, 0, 100, spread(300, 1_000), LIVE_RATE, 100, stop))
                await asyncio.sleep(2)
                before = len(consumed.late_ms)
                async with AsyncClient(nodes.addresses) as loading:
                    done = await load(out, loading)
                during = np.concatenate(consumed.late_ms[before:] or [np.zeros(1, np.int64)])
                stop.set()
                scheduled = await live
                await consumed.drained(scheduled.messages, DRAIN_S)
            counted = await client.admin.master_status()
            equal = await digests_equal(nodes)
    return [
        Figure("build_rate", build_rate, "msg/s", ">= 800,000"),
        Figure("load_time", done.seconds, "s", "" if quick else "<= 30"),
        Figure("load_rate", count / done.seconds, "msg/s"),
        *delivery_figures(consumed, consumed.lost(scheduled), "2,000/s beside it"),
        # The bulk load takes part of the processor time, so only the elections say something about these messages.
        *(one for one in cost_figures(cost, 1, "2,000/s beside it") if one.name == "elections"),
        Figure("lateness_p99_while_loading", float(np.percentile(during, 99)), "ms"),
        Figure("lateness_max_while_loading", float(during.max()), "ms", "<= 1,000"),
        Figure("loaded_pending", float(counted.pending), "msg", f"{count:,}"),
        Figure("digests_equal", float(equal), "", "1"),
    ]
