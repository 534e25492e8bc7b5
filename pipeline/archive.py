"""The archive: messages that groups have settled and dead letters, as Parquet by day, each once for each group.

There is a folder `day=YYYY-MM-DD/` for each day of first due times. A run adds the messages that the cluster still
keeps. The cluster removes a message with its hour, once all groups of its topic have settled the hour or retention is
over. So the archive must run as often as hours are removed. From the mark that it keeps for each group
(archive_marks.py), it reports how many messages it was too late for. A repeat adds nothing twice: rows are identified
by (group, kind, id, died_ms), within the days of the new rows. Of several runs of a group at a time one adds its rows,
and the others are refused (archive_place.py).
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tickwheel.pipeline import settled
from tickwheel.pipeline.archive_marks import Mark, missing, progress_of
from tickwheel.pipeline.archive_place import MARKS, ArchiveError, ArchivePlace
from tickwheel.pipeline.options import Connection
from tickwheel.pipeline.spark_errors import raising

SCHEMA = f"{settled.SCHEMA}, archived_ms bigint, day date"
KEY = ["group", "kind", "id"]
"""The key of a row, together with `died_ms`: a replayed message may become a dead letter again."""


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Archived:
    """The result of a run for one group: rows added, and rows that existed already."""

    group: str
    settled: int
    dead: int
    known: int
    how: dict[str, int]
    """Rows added, by the end of the message; `unknown` if the node cannot tell."""
    applied_index: int
    missing: dict[str, int]
    """By topic, an upper bound of the group's messages that the nodes removed before any run could read them. They are
    not in the archive and can no longer be read."""


def read_archive(spark: SparkSession, folder: str | Path) -> DataFrame:
    """The rows of an archive, with SCHEMA, from a path or a URI that Spark reads. Raises ArchiveError without one."""
    place = ArchivePlace(spark, folder)
    if not place.has_days():
        raise ArchiveError(f"{folder}: there is no archive (folders day=YYYY-MM-DD)")
    return _read(spark, place)


def _read(spark: SparkSession, place: ArchivePlace) -> DataFrame:
    return spark.read.schema(SCHEMA).parquet(place.uri)


def archive(
    spark: SparkSession,
    folder: str | Path,
    connection: Connection,
    groups: Sequence[str] = (),
    *,
    from_ms: int = 0,
    to_ms: int = 0,
) -> list[Archived]:
    """Add the settled messages and dead letters of groups; by default of all groups, and what killed runs left of
    groups that were deleted since.

    `from_ms` (inclusive), `to_ms` (exclusive): only messages first due in this span; 0: no limit. The results count the
    messages for which the run came too late, and a warning is logged. A run with limits leaves the marks alone. Raises
    RequestRefused for a group that does not exist, ClusterUnavailable, LettersGoingError, and ArchiveError if Spark
    fails, for a place that it cannot write to or a file in it that it cannot read, or if another run has archived the
    group meanwhile. Groups before it are archived then.
    """
    place = ArchivePlace(spark, folder)
    place.make()
    of_all = not groups
    if of_all:
        with connection.open() as client:
            groups = [group.name for group in client.admin.groups()]
    added = [_add(spark, place, connection, group, from_ms, to_ms) for group in groups]
    if of_all:
        for gone in set(place.groups()) - set(groups):  # deleted; its last run may have been killed
            _tidy(place, gone)
    return added


def _add(
    spark: SparkSession, place: ArchivePlace, connection: Connection, group: str, from_ms: int, to_ms: int
) -> Archived:
    number, last = _last_mark(place, group)
    _finish(place, group, last)
    # The last delivery of a message is never before its first.
    reading = settled.done_with(spark, connection, group, from_ms)
    run = uuid.uuid4().hex
    try:
        with raising(ArchiveError, place.uri):
            written = _stage_new(spark, place, place.staging(group, run), group, reading.frame, from_ms, to_ms)
        place.harden(group, run)
    except BaseException:
        with suppress(ArchiveError):  # the first error counts
            place.drop(group, run)
        raise
    gone = _missing(reading, last)
    progress = last.topics if from_ms or to_ms else progress_of(reading.pin)
    try:
        recorded = place.record(group, number, Mark(progress, run if written.added else "").text())
    except ArchiveError:
        with suppress(ArchiveError):  # the first error counts
            if place.newest(group)[0] == number:  # on a full disk repeats must not fill it further
                place.drop(group, run)
        raise
    if not recorded:
        place.drop(group, run)
        raise ArchiveError(
            f"{place.uri}: another run has archived group {group} meanwhile, so this one has added nothing of it, and "
            "nothing is lost. Run one at a time; if in doubt run it again, it adds what is missing"
        )
    if written.added:
        place.publish(group, run)
    place.clean(group)
    for name, count in gone.items():
        log.warning(
            "group %s: up to %d messages of topic %s were removed before they could be archived; run it every hour",
            group,
            count,
            name,
        )
    added = sum(written.added.values())
    dead = sum(count for (kind, _), count in written.added.items() if kind == settled.DEAD)
    return Archived(
        group,
        added - dead,
        dead,
        written.rows - added,
        {how or "unknown": count for (_, how), count in written.added.items()},
        written.applied_index,
        gone,
    )


def _finish(place: ArchivePlace, group: str, last: Mark) -> None:
    """Move the rows of the last run of a group to their days, if it was killed before it had moved all."""
    if last.staged:
        place.publish(group, last.staged)


def _tidy(place: ArchivePlace, gone: str) -> None:
    """Move the rows that the last run of a deleted group has recorded, and remove those of runs that were killed before
    they recorded theirs."""
    number, last = _last_mark(place, gone)
    _finish(place, gone, last)
    if place.left(gone) and place.record(gone, number, Mark(last.topics).text()):
        place.clean(gone)


def _last_mark(place: ArchivePlace, group: str) -> tuple[int, Mark]:
    """The newest record and its number. Raises ArchiveError if it cannot be read."""
    number, text = place.newest(group)
    try:
        return number, Mark.parsed(text) if text or number else Mark()
    except ValueError as error:
        raise ArchiveError(
            f"{place.uri}/{MARKS}/{group}/{number}.json: the newest record cannot be read ({error}). If you remove it, "
            "the next run goes on from the one before it, or counts everything removed so far as missed"
        ) from None


@dataclass(frozen=True, slots=True)
class _Written:
    """What `_stage_new` found and staged."""

    rows: int
    """Rows that were read, added ones and known ones."""
    added: dict[tuple[str, str | None], int]
    """Rows added, by kind and how."""
    applied_index: int
    """That of the rows; 0: there was none."""


def _stage_new(
    spark: SparkSession, place: ArchivePlace, staging: str, group: str, frame: DataFrame, from_ms: int, to_ms: int
) -> _Written:
    """Write the rows of a frame that the archive does not have yet to a folder."""
    done = frame.where(F.col("due_ms") >= from_ms)
    if to_ms:
        done = done.where(F.col("due_ms") < to_ms)
    done = (
        done.dropDuplicates([*KEY, "died_ms"])
        .withColumn("archived_ms", F.lit(time.time_ns() // 1_000_000))
        .withColumn("day", F.date_from_unix_date(F.expr("cast(due_ms div 86400000 AS int)")))
        .persist(StorageLevel.DISK_ONLY)
    )
    try:
        days = done.groupBy("day").agg(F.count("*").alias("rows"), F.max("applied_index").alias("index")).collect()
        known = _read(spark, place).where(F.col("day").isin([row["day"] for row in days]) & (F.col("group") == group))
        known = known.select(*KEY, F.col("died_ms").alias("known_died_ms"))
        same = [done[name] == known[name] for name in KEY]
        same.append(done["died_ms"].eqNullSafe(known["known_died_ms"]))
        new = done.join(known, same, "left_anti").persist(StorageLevel.DISK_ONLY)
        try:
            added = {(row["kind"], row["how"]): row["count"] for row in new.groupBy("kind", "how").count().collect()}
            if added:
                new.repartition("day").write.partitionBy("day").parquet(staging)
        finally:
            new.unpersist()
    finally:
        done.unpersist()
    return _Written(sum(row["rows"] for row in days), added, max((row["index"] for row in days), default=0))


def _missing(reading: settled.Done, last: Mark) -> dict[str, int]:
    """`Archived.missing`; call it when the frame has been computed."""
    counts = {
        topic.name: missing(topic, last, [(f, e) for of, f, e in reading.passed_over if of == topic.topic_id])
        for topic in reading.pin.topics
    }
    return {name: count for name, count in sorted(counts.items()) if count}
