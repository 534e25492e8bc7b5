"""The archive: what groups are done with, as Parquet by day, each message once for each group however often it is run.

A folder `day=YYYY-MM-DD/` for each day of first due times. What is added is what the cluster still keeps: a message
goes with its hour, once all groups of its topic have settled the hour, or when retention is over. So the archive is to
be run as often as hours go. It tells rows that it has by (group, kind, id), looking at the days of the new rows alone;
one run at a time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tickwheel.pipeline import settled
from tickwheel.pipeline.options import Connection

SCHEMA = f"{settled.SCHEMA}, archived_ms bigint, day date"
KEY = ["group", "kind", "id"]


class ArchiveError(ValueError):
    """An archive cannot be read; the text says why."""


@dataclass(frozen=True, slots=True)
class Archived:
    """What a run added for one group, and what it found that was there."""

    group: str
    settled: int
    dead: int
    known: int
    applied_index: int


def read_archive(spark: SparkSession, folder: str | Path) -> DataFrame:
    """SCHEMA. Raises ArchiveError if there is none."""
    path = Path(folder)
    if not path.is_dir() or not any(path.glob("day=*")):
        raise ArchiveError(f"{path}: there is no archive (folders day=YYYY-MM-DD)")
    return _read(spark, path)


def _read(spark: SparkSession, path: Path) -> DataFrame:
    return spark.read.schema(SCHEMA).parquet(str(path.absolute()))


def archive(
    spark: SparkSession,
    folder: str | Path,
    connection: Connection,
    groups: Sequence[str] = (),
    *,
    from_ms: int = 0,
    to_ms: int = 0,
) -> list[Archived]:
    """Add what groups are done with; `groups`: which, by default all.

    `from_ms`, `to_ms`: only messages due first at or after, and before; 0: no limit. Raises RequestRefused for a group
    that does not exist, ClusterUnavailable.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if not groups:
        with connection.open() as client:
            groups = [group.name for group in client.wait(client.asynchronous.admin.groups())]
    return [_add(spark, path, connection, group, from_ms, to_ms) for group in groups]


def _add(spark: SparkSession, path: Path, connection: Connection, group: str, from_ms: int, to_ms: int) -> Archived:
    # The last delivery of a message is not before its first.
    done = settled.done_with(spark, connection, group, from_ms).where(F.col("due_ms") >= from_ms)
    if to_ms:
        done = done.where(F.col("due_ms") < to_ms)
    done = (
        done.dropDuplicates(KEY)  # a message may have died twice
        .withColumn("archived_ms", F.lit(time.time_ns() // 1_000_000))
        .withColumn("day", F.date_from_unix_date(F.expr("cast(due_ms div 86400000 AS int)")))
        .persist(StorageLevel.DISK_ONLY)
    )
    try:
        found = done.groupBy("day").agg(F.count("*").alias("rows"), F.max("applied_index").alias("index")).collect()
        days = [row["day"] for row in found]
        known = _read(spark, path).where(F.col("day").isin(days) & (F.col("group") == group)).select(*KEY)
        new = done.join(known, KEY, "left_anti").persist(StorageLevel.DISK_ONLY)
        try:
            kinds = {row["kind"]: row["count"] for row in new.groupBy("kind").count().collect()}
            if kinds:
                new.repartition("day").write.partitionBy("day").mode("append").parquet(str(path.absolute()))
        finally:
            new.unpersist()
    finally:
        done.unpersist()
    added = sum(kinds.values())
    return Archived(
        group,
        kinds.get(settled.SETTLED, 0),
        kinds.get(settled.DEAD, 0),
        sum(row["rows"] for row in found) - added,
        max((row["index"] for row in found), default=0),
    )
