"""The cold tier under what kills its jobs: processes that die in the middle, two jobs at once, another master."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from tests.pipeline.cold_job import PART_ROWS, PARTS_WRITTEN
from tests.pipeline.running import RunningCluster
from tests.pipeline.test_cold import examined, frozen, promoted
from tickwheel.client import Delivery
from tickwheel.pipeline.cold_freeze import FreezeConfig
from tickwheel.pipeline.cold_store import ColdStore

ROWS = 400
TOPIC, GROUP = "killed", "mourners"
AHEAD_MS = 4_000
"""When the first message is due, from when the rows are made; and moved ones, from then."""
SPREAD_MS = 3_000
CLOCK_MS = 5
"""By which the cluster's clock may be off this machine's."""


class Job:
    """A process of cold_job.py, started at once."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.pipeline.cold_job", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    def hear(self, word: str) -> None:
        """Wait for what it says."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == word

    def go(self) -> None:
        """Let it begin, once it is ready."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL, and wait until its Java and its workers are gone too: they hold its output open."""
        self.process.kill()
        self.process.communicate()
        assert self.process.returncode == -9


@pytest.fixture
def jobs(spark: SparkSession, cluster: RunningCluster, tmp_path: Path) -> Iterator[tuple[Job, Job]]:
    """One that freezes `in` into `cold`, one that promotes it; both start their Spark at the same time."""
    pair = (
        Job("freeze", str(tmp_path / "in"), str(tmp_path / "cold"), "frozen"),
        Job("promote", str(tmp_path / "cold"), cluster.addresses),
    )
    yield pair
    for job in pair:
        job.process.kill()
        job.process.wait()


def test_jobs_that_are_killed_lose_and_repeat_nothing(
    spark: SparkSession, cluster: RunningCluster, tmp_path: Path, jobs: tuple[Job, Job]
) -> None:
    """SIGKILL of `freeze` and of `promote` in the middle, each then run again, while clients cancel and move: every
    message that was not cancelled comes once, none before its time, those that became late at once, and counted."""
    client, folder = cluster.client, tmp_path / "cold"
    freezing, promoting = jobs
    settings = cluster.wait(client.admin.settings())
    cluster.wait(client.admin.update_settings(cold_lead=timedelta(0), cold_warn=timedelta(0)))
    cluster.wait(client.admin.create_group(GROUP, [TOPIC]))
    freezing.hear("ready")
    first_ms = time.time_ns() // 1_000_000 + AHEAD_MS
    rows = spark.range(0, ROWS, 1, 2).select(
        f.lit(TOPIC).alias("topic"),
        (f.lit(first_ms) + f.col("id") * 7_919 % SPREAD_MS).alias("due_ms"),
        f.concat(f.lit("row-"), f.col("id").cast("string")).alias("payload"),
        f.concat(f.lit("key-"), f.col("id").cast("string")).alias("key"),
    )
    rows.write.parquet(str(tmp_path / "in"))
    due_ms = {row.payload: row.due_ms for row in rows.collect()}

    # The job began long ago: whatever the machine is busy with, all rows are cold. What is late by then comes at once.
    assert ColdStore(folder).plan("frozen", 1) == 1
    freezing.go()
    freezing.hear("middle")
    while len(list(folder.glob("day=*/[!.]*"))) < PARTS_WRITTEN:
        assert freezing.process.poll() is None
        time.sleep(0.005)
    freezing.kill()
    assert not (folder / "_jobs" / "frozen" / "manifest.json").exists()
    config = FreezeConfig(horizon_days=0, tasks=2, part_rows_max=PART_ROWS)
    manifest, ids = frozen(cluster, spark.read.parquet(str(tmp_path / "in")), folder, "frozen", config)
    written = {str(path.relative_to(folder)) for path in folder.glob("day=*/*")}
    assert written == {part.path for part in manifest.parts}, "what the killed attempt left is gone"
    assert spark.read.parquet(str(folder)).count() + manifest.near == ROWS and len(set(ids.values())) == manifest.rows

    def numbers(first: int, step: int) -> list[int]:
        return [number for number in range(first, ROWS, step) if f"key-{number}" in ids]

    cancelled = numbers(0, 20)
    later_ms = time.time_ns() // 1_000_000 + AHEAD_MS
    moved = {f"row-{number}": later_ms + number for number in numbers(1, 40)}
    for number in cancelled:
        assert cluster.wait(client.cancel(ids[f"key-{number}"])) == "CANCELLED"
    for payload, at_ms in moved.items():
        outcome, _ = cluster.wait(client.reschedule(ids[payload.replace("row", "key")], due_ms=at_ms))
        assert outcome == "RESCHEDULED"

    promoting.hear("ready")
    promoting.go()
    promoting.hear("middle")
    promoting.kill()
    waiting = cluster.wait(client.admin.master_status()).cold
    assert 0 < waiting.parts < len(manifest.parts)
    cancelled += [n for n in numbers(2, 20) if cluster.wait(client.cancel(ids[f"key-{n}"])) == "CANCELLED"]
    again = promoted(spark, cluster, folder, days=30)
    assert not again.problems and 0 < again.parts <= waiting.parts
    assert promoted(spark, cluster, folder, days=30).messages == 0
    status = cluster.wait(client.admin.master_status()).cold
    assert (status.parts, status.moved) == (0, 0) and not examined(cluster, folder).bad

    expected = {f"row-{n}" for n in range(ROWS) if f"key-{n}" in ids and n not in cancelled}
    got: list[tuple[str, int]] = []

    async def consume() -> None:
        async with client.consumer(GROUP) as consumer:
            async for delivery in consumer:
                got.append((delivery.payload.decode(), _now_ms(delivery)))
                delivery.ack()
                if len(got) == len(expected):
                    break
            await consumer.drain()

    cluster.wait(consume())
    assert Counter(payload for payload, _ in got) == Counter(expected)
    early = [payload for payload, at_ms in got if at_ms + CLOCK_MS < moved.get(payload, due_ms[payload])]
    assert not early
    # Nothing else can come.
    assert cluster.messages(TOPIC) == []
    assert [g.backlog for g in cluster.wait(client.admin.groups()) if g.name == GROUP] == [0]
    cluster.check_agreement()
    assert settings.cold_lead is not None and settings.cold_warn is not None
    cluster.wait(client.admin.update_settings(cold_lead=settings.cold_lead, cold_warn=settings.cold_warn))


def _now_ms(delivery: Delivery) -> int:
    return time.time_ns() // 1_000_000
