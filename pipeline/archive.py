"""The archive: what groups are done with, as Parquet by day, each message once for each group however often it is run.

A folder `day=YYYY-MM-DD/` for each day of first due times. What is added is what the cluster still keeps: a message
goes with its hour, once all groups of its topic have settled the hour, or when retention is over. So the archive is to
be run as often as hours go. It tells rows that it has by (group, kind, id, died_ms), looking at the days of the new
rows alone; one run at a time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tickwheel.pipeline import settled
from tickwheel.pipeline.options import Connection
from tickwheel.pipeline.places import spark_folder

SCHEMA = f"{settled.SCHEMA}, archived_ms bigint, day date"
KEY = ["group", "kind", "id"]
"""And `died_ms`: a message that was replayed may die again."""


class ArchiveError(ValueError):
    """An archive cannot be read; the text says why."""


@dataclass(frozen=True, slots=True)
class Archived:
    """What a run added for one group, and what it found that was there."""

    group: str
    settled: int
    dead: int
    known: int
    how: dict[str, int]
    """What was added, by how it ended; `unknown` if the node cannot tell."""
    applied_index: int


def read_archive(spark: SparkSession, folder: str | Path) -> DataFrame:
    """SCHEMA, of a path or of a URI that Spark reads. Raises ArchiveError if there is none."""
    place = spark_folder(folder)
    if not _there(spark, f"{place}/day=*"):
        raise ArchiveError(f"{folder}: there is no archive (folders day=YYYY-MM-DD)")
    return _read(spark, place)


def _read(spark: SparkSession, place: str) -> DataFrame:
    return spark.read.schema(SCHEMA).parquet(place)


def _there(spark: SparkSession, pattern: str, *, make: bool = False) -> bool:
    """Whether anything fits; `make`: it is a folder that is to be made. Raises ArchiveError."""
    jvm = spark._jvm
    assert jvm is not None
    try:
        path = jvm.org.apache.hadoop.fs.Path(pattern)
        system = path.getFileSystem(spark._jsc.hadoopConfiguration())
        if make:
            return bool(system.mkdirs(path))
        return bool(system.globStatus(path))
    except (Py4JJavaError, PySparkException) as error:
        why = str(error.java_exception if isinstance(error, Py4JJavaError) else error).splitlines()[0]
        text = f"{pattern}: it must be a path, or a URI of a file system that Spark has; Spark says: {why}"
        raise ArchiveError(text) from None


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
    that does not exist, ClusterUnavailable, LettersGoingError, ArchiveError for a place that Spark cannot write to.
    """
    place = spark_folder(folder)
    _there(spark, place, make=True)
    if not groups:
        with connection.open() as client:
            groups = [group.name for group in client.wait(client.asynchronous.admin.groups())]
    return [_add(spark, place, connection, group, from_ms, to_ms) for group in groups]


def _add(spark: SparkSession, place: str, connection: Connection, group: str, from_ms: int, to_ms: int) -> Archived:
    # The last delivery of a message is not before its first.
    done = settled.done_with(spark, connection, group, from_ms).where(F.col("due_ms") >= from_ms)
    if to_ms:
        done = done.where(F.col("due_ms") < to_ms)
    done = (
        done.dropDuplicates([*KEY, "died_ms"])
        .withColumn("archived_ms", F.lit(time.time_ns() // 1_000_000))
        .withColumn("day", F.date_from_unix_date(F.expr("cast(due_ms div 86400000 AS int)")))
        .persist(StorageLevel.DISK_ONLY)
    )
    try:
        found = done.groupBy("day").agg(F.count("*").alias("rows"), F.max("applied_index").alias("index")).collect()
        days = [row["day"] for row in found]
        known = _read(spark, place).where(F.col("day").isin(days) & (F.col("group") == group))
        known = known.select(*KEY, F.col("died_ms").alias("known_died_ms"))
        same = [done[name] == known[name] for name in KEY]
        same.append(done["died_ms"].eqNullSafe(known["known_died_ms"]))
        new = done.join(known, same, "left_anti").persist(StorageLevel.DISK_ONLY)
        try:
            counts = {(row["kind"], row["how"]): row["count"] for row in new.groupBy("kind", "how").count().collect()}
            if counts:
                new.repartition("day").write.partitionBy("day").mode("append").parquet(place)
        finally:
            new.unpersist()
    finally:
        done.unpersist()
    added = sum(counts.values())
    dead = sum(count for (kind, _), count in counts.items() if kind == settled.DEAD)
    return Archived(
        group,
        added - dead,
        dead,
        sum(row["rows"] for row in found) - added,
        {how or "unknown": count for (_, how), count in counts.items()},
        max((row["index"] for row in found), default=0),
    )
