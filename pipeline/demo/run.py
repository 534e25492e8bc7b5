"""Runs the demonstration: Spark, three nodes, and every kind of bulk work once, on the year of flights.

Owns the order of events, the processes that it starts, and the folder that it leaves behind: reports and the build,
without the nodes' data. Spark is started before the first channel is opened, because its launch forks. Spark works in
the calling thread, which must be the main one; asynchronous work runs on a loop between Spark's jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import NoReturn

import numpy as np
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from rich.console import Console
from rich.text import Text

from tickwheel.client import Consumer
from tickwheel.node.local_cluster import LocalCluster, undisturbed
from tickwheel.pipeline import audit as judging
from tickwheel.pipeline import forecast as looking
from tickwheel.pipeline.build import BuildConfig, build
from tickwheel.pipeline.demo.flights import reminders, shift_ms, squeezed
from tickwheel.pipeline.event_export import export_events
from tickwheel.pipeline.load import load
from tickwheel.pipeline.session import SAFE_PATH, SessionConfig, build_session

DAY_TOPIC = "one-day"
GROUP = "travellers"
CAPACITY = 10.0
"""Messages a second above which the forecast calls a second hot: departures are planned to the minute."""
WAIT_S_MAX = 60.0
"""How long a missing reminder is waited for after the last due time: longer than a lease."""
LISTED = 5


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """The settings of the demo."""

    out: Path
    """New folder for what it makes."""
    days: int = 365
    """How many days of the year."""
    seconds: float = 20.0
    """One day is squeezed into this."""
    ahead_s: float = 15.0
    """How long after it is scheduled the squeezed day begins. Both writes end before that."""
    master: str = "local[*]"


@dataclass(slots=True)
class _Delivered:
    """The messages that the consumer got, by payload."""

    times: Counter[bytes] = field(default_factory=Counter)
    late_ms: list[float] = field(default_factory=list)


class PipelineDemo:
    """One run."""

    def __init__(self, config: DemoConfig, console: Console) -> None:
        self._config = config
        self._console = console
        self._runner = asyncio.Runner()
        self._step = 0
        self._began = 0.0
        self._paths: list[Path] = []

    def run(self) -> bool:
        """The whole demonstration. Returns whether all went as it must. Stops all that it started, whatever happens."""
        out = self._config.out
        started = time.monotonic()
        cluster = LocalCluster(out / "nodes", 3, cluster_id="pipeline-demo")
        spark: SparkSession | None = None
        ours = SparkSession.getActiveSession() is None
        with _ended_by_signals():
            try:
                self._say_step("Spark and a cluster of three nodes")
                for node in cluster.nodes:
                    cluster.start_node(node)  # they come up while Spark does
                config = SessionConfig(self._config.master, "tickwheel demo", driver_memory="2g", settings=SAFE_PATH)
                spark = build_session(config)
                _handle_signals()  # Spark has installed a handler of its own
                master = self._runner.run(self._start(cluster))
                self._say(f"Spark {spark.version} on {spark.sparkContext.master}; {master} is master")
                good = self._bulk(spark, cluster)
                good &= self._day(spark, cluster)
            finally:
                with undisturbed():  # a second Ctrl-C must not leave processes behind
                    self._runner.run(cluster.stop())
                    self._runner.close()
                    if spark is not None and ours:
                        spark.stop()
                    cluster.discard()
                    with contextlib.suppress(OSError):
                        (out / "nodes").rmdir()  # it stays if somebody has put something there
        self._console.print(Text.assemble(("\nReports", "bold"), f" after {time.monotonic() - started:.0f} s"))
        for path in self._paths:
            self._say(str(path))
        return good

    async def _start(self, cluster: LocalCluster) -> str:
        await cluster.start()
        return (await cluster.master()).node_id

    # -- what is said

    def _say_step(self, title: str) -> None:
        self._step += 1
        self._began = time.monotonic()
        self._console.print(f"\n{self._step}  {title}", style="bold", soft_wrap=True)

    def _say(self, text: str, *, timed: bool = False) -> None:
        took = f" in {time.monotonic() - self._began:.1f} s" if timed else ""
        for line in f"{text}{took}".splitlines():
            self._console.print(f"   {line}", soft_wrap=True)

    # -- the year, in bulk

    def _bulk(self, spark: SparkSession, cluster: LocalCluster) -> bool:
        out, config = self._config.out, self._config
        self._say_step("The flights of 2013 from New York as reminders, moved by whole weeks to what is to come")
        year = out / "reminders.parquet"
        reminders(spark, out, shift_ms(datetime.now(UTC)), config.days).write.parquet(str(year))
        (out / "flights.csv").unlink()
        frame = spark.read.parquet(str(year))
        count, first, last = frame.agg(F.count("*"), F.min("due_ms"), F.max("due_ms")).collect()[0]
        self._say(f"{count:,} reminders, {_day(first)} to {_day(last)}, half an hour before each departure", timed=True)

        self._say_step("Built as finished hours, and loaded into the running cluster")
        made = build(frame, out / "build", BuildConfig(tasks=8))
        self._say(
            f"built: {made.units:,} messages in {len(made.bundles)} bundles, {made.bytes / 1e6:.0f} MB", timed=True
        )
        self._began = time.monotonic()
        taken = self._runner.run(load(out / "build", cluster.client()))
        self._say(f"loaded: {taken.taken_units:,} messages taken over by all nodes", timed=True)

        self._say_step("What is pending, read from a slave")
        pending = (
            spark.read.format("tickwheel").option("addresses", ",".join(cluster.addresses)).option("content", "false")
        )
        rows = pending.load().groupBy("topic").agg(F.count("*"), F.max("applied_index")).orderBy("topic").collect()
        found = sum(row[1] for row in rows)
        for topic, messages, _ in rows:
            self._say(f"{topic:<16}{messages:>10,}")
        self._say(f"{found:,} in all, as of entry {rows[0][2] if rows else 0:,} of the log", timed=True)
        self._say("first of them:")
        for line in self._runner.run(self._first(cluster)):
            self._say(f"  {line}")

        self._say_step(f"Forecast of two months, if the cluster delivered {CAPACITY:.0f} messages a second")
        looked = looking.ForecastConfig(first - first % looking.HOUR_MS, looking.DAYS_MAX, CAPACITY)
        due = pending.option("due_ms_min", looked.start_ms).option("due_ms_max", looked.end_ms).load()
        ahead = looking.forecast(due, looked)
        self._say(looking.tables(ahead))
        self._paths += looking.plots(ahead, out / "forecast")
        return bool(made.units == count == taken.taken_units == found and not made.rejected)

    async def _first(self, cluster: LocalCluster) -> list[str]:
        lines = []
        async for message in cluster.client().list_pending(content=True, page_size=LISTED):
            due = datetime.fromtimestamp(message.due_ms / 1_000, UTC)
            flight = json.loads(message.payload or b"{}")
            lines.append(f"{due:%a %d %b %Y %H:%M} UTC  {flight['flight']:<7}{flight['origin']}-{flight['dest']}")
            if len(lines) == LISTED:
                break
        return lines

    # -- one day, through the sink

    def _day(self, spark: SparkSession, cluster: LocalCluster) -> bool:
        out = self._config.out
        frame = spark.read.parquet(str(out / "reminders.parquet"))
        of_day = F.expr("due_ms div 86400000")
        busiest, _ = frame.groupBy(of_day.alias("day")).count().orderBy(F.desc("count"), "day").collect()[0]
        day = frame.where(of_day == busiest)
        span_ms = round(self._config.seconds * 1_000)
        self._say_step(f"The busiest day, {_day(busiest * 86_400_000)}, squeezed into {span_ms / 1_000:g} s")
        start_ms = _now_ms() + round(self._config.ahead_s * 1_000)
        rows = squeezed(day, DAY_TOPIC, start_ms, span_ms).cache()
        expected = rows.count()
        for text in ("scheduled by the sink, exactly once:", "the same job once more, which must add nothing:"):
            self._began = time.monotonic()
            self._write(rows, cluster)
            self._say(f"{text} {expected:,} rows", timed=True)
        got = self._runner.run(self._deliver(cluster, expected, (start_ms + span_ms) / 1_000 + WAIT_S_MAX))
        late = np.array(got.late_ms or [0.0])
        self._say(f"delivered: {len(got.times):,}, of which {sum(n > 1 for n in got.times.values())} more than once")
        self._say(f"lateness: p50 {np.percentile(late, 50):.0f} ms, p99 {np.percentile(late, 99):.0f} ms")

        self._say_step("Audit of what the nodes noted")
        self._runner.run(cluster.stop())
        export_events({node.node_id: node.directory / "data" for node in cluster.nodes}, out / "events")
        events = spark.read.parquet(str(out / "events"))
        # Of the year nothing is due yet; the loaded messages are judged as they become due.
        found = judging.audit(events, judging.AuditConfig(_now_ms()))
        self._say(judging.report(found, out / "audit"))
        self._paths.append(out / "audit" / "audit.html")
        faults = sum(frame.count() for frame in (found.lost, found.early, found.duplicated))
        return not faults and len(got.times) == expected and max(got.times.values()) == 1 and late.min() >= 0

    def _write(self, rows: DataFrame, cluster: LocalCluster) -> None:
        writer = rows.write.format("tickwheel").option("addresses", ",".join(cluster.addresses))
        writer.option("job_id", "the-busiest-day").option("bad_rows", "fail").mode("append").save()

    async def _deliver(self, cluster: LocalCluster, expected: int, until_s: float) -> _Delivered:
        got = _Delivered()
        async with cluster.client().consumer(GROUP, DAY_TOPIC) as consumer:
            with suppress(TimeoutError):  # the caller reports what is missing
                async with asyncio.timeout(until_s - time.time()):
                    await self._take(consumer, got, expected)
        return got

    async def _take(self, consumer: Consumer, got: _Delivered, expected: int) -> None:
        async for batch in consumer.batches():
            got.late_ms += (_now_ms() - batch.due_ms).tolist()
            got.times.update(delivery.payload for delivery in batch)
            batch.ack()
            if len(got.times) >= expected:
                await consumer.drain()
                return


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _day(at_ms: int) -> str:
    return f"{datetime.fromtimestamp(at_ms / 1_000, UTC):%a %d %b %Y}"


# -- ended by Ctrl-C or a SIGTERM, with nothing left behind


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _handle_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGINT and SIGTERM raise KeyboardInterrupt; afterwards they are what they were."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    _handle_signals()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
