"""The case of the benchmark about the Spark sink: rows from Parquet, exactly once, beside a client's columns.

Run as a program it is the Spark process of that case: `python -m tickwheel.bench.sink IN.parquet ENDPOINTS` writes the
rows and prints how many seconds that took, without the start of Spark.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tickwheel.bench.figures import Figure
from tickwheel.bench.load import BATCH, DAY_MS, HOUR_MS, PAYLOAD_BYTES, TOPIC, now_ms, schedule_columns, spread
from tickwheel.bench.served import cluster, digests_equal

QUICK_MESSAGES, MESSAGES = 40_000, 3_000_000
WARM_UP_ROWS = 2_000
"""Written first, as a job of its own, so that the workers have started."""


async def _write(source: Path, addresses: list[str]) -> float:
    """The seconds that the writing process reports. It is a process of its own, because gRPC does not survive Spark's
    forks."""
    arguments = ("-m", "tickwheel.bench.sink", str(source), ",".join(addresses))
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    text = (await process.communicate())[0].decode()
    if process.returncode:
        raise RuntimeError(f"the writing process ended with {process.returncode}: {text}")
    return float(text)


async def t15(quick: bool) -> list[Figure]:
    """Rows from Parquet through the Spark sink, exactly once; before it columns of a client, as in T1."""
    from tickwheel.pipeline.schedules import ScheduleConfig, write_schedule

    count = QUICK_MESSAGES if quick else MESSAGES
    async with cluster() as (_, client):
        columns = await schedule_columns(client, 2.0 if quick else 15.0, BATCH, spread(HOUR_MS, DAY_MS))
    with TemporaryDirectory(prefix="tickwheel-bench-") as directory:
        source = Path(directory) / "in.parquet"
        config = ScheduleConfig(
            rows=count,
            start_ms=now_ms() + 3_600_000,
            topics=(TOPIC,),
            payload_bytes=PAYLOAD_BYTES,
            span_days=1,
            median_days=0.5,
        )
        await asyncio.to_thread(write_schedule, config, source)
        async with cluster() as (nodes, client):
            seconds = await _write(source, nodes.addresses)
            pending = (await client.admin.master_status()).pending
            equal = await digests_equal(nodes)
    return [
        Figure("columns_rate", columns.rate, "msg/s"),
        Figure("sink_rate", count / seconds, "msg/s"),
        Figure("sink_of_columns", count / seconds / columns.rate, "", "" if quick else ">= 0.5"),
        Figure("written_pending", float(pending), "msg", f"{count + WARM_UP_ROWS:,}"),
        Figure("digests_equal", float(equal), "", "1"),
    ]


def main(source: str, addresses: str) -> None:
    """Write, and print the seconds."""
    from pyspark.sql import DataFrame

    from tickwheel.pipeline.session import SessionConfig, build_session

    def write(rows: DataFrame) -> None:
        rows.drop("key").write.format("tickwheel").option("addresses", addresses).mode("append").save()

    spark = build_session(SessionConfig(quick=True))
    rows = spark.read.parquet(source)
    write(rows.limit(WARM_UP_ROWS))
    began = time.perf_counter()
    write(rows)
    print(time.perf_counter() - began)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
