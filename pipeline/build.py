"""Builds bundles from a frame's rows on Spark: any number of messages, ready for a cluster to take over.

There are two stages of tasks. The first reads the frame's rows once, as Arrow batches, and writes sorted runs into
OUT/_runs. The driver then knows how much is due in each hour, and gives each task of the second stage neighbouring
hours; no hour goes to two tasks. These tasks read their hours from the runs and write bundles. So the rows are
distributed by files and numpy: Spark's own shuffle and sort would cost several times as much.

The driver publishes the results of the attempts that count, then removes everything else. So attempts that failed, ran
twice or were cancelled leave nothing that counts. All machines must reach the folder.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from tickwheel.pipeline.bundling import (
    BUNDLES,
    REJECTED,
    RESULT,
    RUN_BYTES,
    RUN_RESULT,
    STEP_BYTES,
    Bundler,
    Spreader,
    steps,
)
from tickwheel.pipeline.inputs import read_parquet
from tickwheel.pipeline.manifest import FILE_NAME, BuiltBundle, Manifest, write_manifest
from tickwheel.pipeline.parquet_pieces import find
from tickwheel.pipeline.places import PlaceError, local_folder
from tickwheel.pipeline.runs import DIRECTORY as RUNS
from tickwheel.pipeline.runs import Hours, Run
from tickwheel.pipeline.sink_rejected import RejectedFile, discard, one_of, publish
from tickwheel.pipeline.sink_rows import RowLimits, check_schema, told
from tickwheel.pipeline.spark_errors import raising
from tickwheel.storage.bundle import CHUNKS_MAX, LOG_BYTES_MAX, UNITS_MAX
from tickwheel.storage.plain_file import ASIDE_SUFFIX
from tickwheel.storage.unit import HOUR_MS

DUE_MS_MAX = 4_102_444_800_000
"""The year 2100."""
PAYLOAD_BYTES_MAX = 4 << 20
TASKS_MAX = 1_024
TASKS_A_CORE = 4
"""Most tasks for each core in the second stage: enough that all cores finish at about the same time, and few enough
that a task can write one bundle to disk while it makes the next."""

Work = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
Spread = Callable[[Work], DataFrame]
"""Runs work on all rows, wherever they are."""


class BuildError(Exception):
    """The build has failed and left nothing that counts; the text says why."""


@dataclass(frozen=True, slots=True)
class BuildConfig:
    """The settings of a build."""

    topic: str = ""
    """Topic of all rows, for frames without that column."""

    slot_ms: int = 1_000
    """Width of a tick of the cluster that will take the load: 1000, 500, 200 or 100."""

    on_rejected: str = "write"
    """Rows that cannot be messages: `write` them with reasons to OUT/_rejected, or `fail` the build."""

    tasks: int = 8
    """Least number of tasks that share the hours, if there are enough hours."""

    bundle_messages_max: int = UNITS_MAX
    """Messages of one bundle; a cluster takes one over at a time."""

    payload_bytes_max: int = PAYLOAD_BYTES_MAX
    """The cluster's configured bound."""

    def __post_init__(self) -> None:
        checks = (
            ("slot_ms", self.slot_ms, self.slot_ms in (1_000, 500, 200, 100), "one of 1000, 500, 200, 100"),
            ("on_rejected", self.on_rejected, self.on_rejected in ("write", "fail"), "write or fail"),
            ("tasks", self.tasks, 1 <= self.tasks <= TASKS_MAX, f"1 to {TASKS_MAX}"),
            ("bundle_messages_max", self.bundle_messages_max, 1 <= self.bundle_messages_max <= UNITS_MAX,
             f"1 to {UNITS_MAX}"),
            ("payload_bytes_max", self.payload_bytes_max, 1 <= self.payload_bytes_max <= PAYLOAD_BYTES_MAX,
             f"1 to {PAYLOAD_BYTES_MAX}"),
        )  # fmt: skip
        for name, value, good, allowed in checks:
            if not good:
                raise BuildError(f"{name}: {value}: {allowed}")


@dataclass(frozen=True, slots=True)
class Share:
    """The hours for one task, and the amount that they hold."""

    hour_from: int
    hour_until: int
    rows: int
    bytes: int


def build(frame: DataFrame, folder: str | Path, config: BuildConfig | None = None) -> Manifest:
    """Write the bundles of a frame's rows into a new folder.

    Columns: `payload` (binary or string), `due_ms` (bigint, milliseconds since 1970) or `due_at` (timestamp), and as
    wanted `topic`, `key`, `tags` (array of string), `properties` (map of string to string), `message_group`. Raises
    SchemaError, naming the column, and BuildError.
    """
    with raising(BuildError):
        return _built_of_frame(frame, folder, config or BuildConfig())


def _built_of_frame(frame: DataFrame, folder: str | Path, config: BuildConfig) -> Manifest:
    check_schema(frame.schema, config.topic)
    kind = from_arrow_schema(RUN_RESULT)
    return _built(frame.sparkSession, folder, config, lambda work: frame.mapInArrow(work, kind))


def build_parquet(spark: SparkSession, source: str, folder: str | Path, config: BuildConfig | None = None) -> Manifest:
    """Like `build`, from a Parquet file or folder, and several times as fast: its rows never pass through Spark.

    All machines must reach the source, a path or a URI. Spark reads it instead if Arrow cannot (parquet_pieces.py).
    Raises InputError besides what `build` raises.
    """
    with raising(BuildError, source):
        return _built_of_parquet(spark, source, folder, config or BuildConfig())


def _built_of_parquet(spark: SparkSession, source: str, folder: str | Path, config: BuildConfig) -> Manifest:
    found = find(source if "://" in source else str(Path(source).absolute()), RUN_BYTES)
    if found is None:
        return _built_of_frame(read_parquet(spark, source), folder, config)
    check_schema(found.schema, config.topic)
    pieces = found

    def spread(work: Work) -> DataFrame:
        def run(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return work(
                batch for group in numbers for number in group.column(0).to_pylist() for batch in pieces.read(number)
            )

        count = len(pieces.pieces)
        return spark.range(0, count, 1, max(1, count)).mapInArrow(run, from_arrow_schema(RUN_RESULT))

    return _built(spark, folder, config, spread)


def _built(spark: SparkSession, folder: str | Path, config: BuildConfig, spread: Spread) -> Manifest:
    try:
        target = local_folder(folder, "OUT")
    except PlaceError as error:
        raise BuildError(str(error)) from None
    _claim(target)
    try:
        (target / BUNDLES).mkdir(exist_ok=True)
        return _stages(spark, target, config, spread)
    except BaseException:
        with suppress(OSError):
            (target / FILE_NAME).unlink(missing_ok=True)  # first: it makes the others count
        for name in (BUNDLES, REJECTED):
            shutil.rmtree(target / name, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(target / RUNS, ignore_errors=True)


def _claim(target: Path) -> None:
    """Make the folder of the runs, which only one build can. Raises BuildError if the target holds anything else."""
    text = f"{target}: it is not empty; name a new folder for each build"
    try:
        target.mkdir(parents=True, exist_ok=True)
        found = {path.name for path in target.iterdir()}
        if {FILE_NAME, BUNDLES} <= found <= {FILE_NAME, RUNS, BUNDLES, REJECTED}:
            shutil.rmtree(target / RUNS, ignore_errors=True)  # of a build that was killed just after its end
            raise BuildError(f"{target}: it is not empty: it holds a finished build; name a new folder for another one")
        if RUNS in found and found <= {RUNS, BUNDLES, REJECTED, FILE_NAME + ASIDE_SUFFIX}:
            raise BuildError(
                f"{target}: it is not empty: a build into it is still at work, or was killed; if so, remove the folder"
            )
        if found:
            raise BuildError(text)
        (target / RUNS).mkdir()
    except FileExistsError:  # another build has begun in between
        raise BuildError(text) from None
    if {path.name for path in target.iterdir()} != {RUNS}:  # it has even ended
        (target / RUNS).rmdir()
        raise BuildError(text)


def _stages(spark: SparkSession, target: Path, config: BuildConfig, spread: Spread) -> Manifest:
    job = uuid.uuid4().hex
    runs = spread(_spread(str(target), job, config)).collect()
    rejected_files = [row["rejected_file"] for row in runs if row["rejected_file"]]
    rejected = sum(row["rejected_rows"] for row in runs)
    folder_rejected = str(target / REJECTED)
    if rejected and config.on_rejected == "fail":
        one = told(one_of(folder_rejected, rejected_files[0]))
        discard(folder_rejected, rejected_files)
        raise BuildError(
            f"{rejected} rows cannot be messages, one of them: {one}; on_rejected=write writes all with their reasons"
        )
    runs = sorted((row for row in runs if row["name"]), key=lambda row: (row["partition"], row["number"]))
    hours = Hours.sum([_hours(row) for row in runs])
    shares = shares_of(hours, config)
    rows = []
    if shares:
        count = min(len(shares), TASKS_A_CORE * spark.sparkContext.defaultParallelism)
        tasks = spark.range(0, len(shares), 1, max(1, count))
        task = _bundle(str(target), job, config, [row["name"] for row in runs], shares)
        rows = tasks.mapInArrow(task, from_arrow_schema(RESULT)).collect()
    built = [BuiltBundle(**row.asDict()) for row in rows]
    built.sort(key=lambda bundle: (bundle.hour_min, bundle.hour_max, bundle.name))
    publish(folder_rejected, rejected_files)
    _clean(target, {bundle.path(target).name for bundle in built})
    manifest = Manifest(config.slot_ms, sum(bundle.units for bundle in built), rejected, built)
    write_manifest(target, manifest)
    return manifest


def _hours(row: Row) -> Hours:
    hours, rows, size = (np.frombuffer(row[name], np.int64) for name in ("hours", "rows", "bytes"))
    return Hours(hours, rows, size)


def shares_of(hours: Hours, config: BuildConfig) -> list[Share]:
    """Neighbouring hours for each task: as much as one bundle holds, or a single hour that exceeds a bundle."""
    rows_max = min(config.bundle_messages_max, max(1, -(-int(hours.rows.sum()) // config.tasks)))
    shares: list[Share] = []
    hour_from = rows = size = count = 0
    columns = (hours.hours.tolist(), hours.rows.tolist(), hours.bytes.tolist())
    for hour, more_rows, more_bytes in zip(*columns, strict=True):
        if count and (rows + more_rows > rows_max or size + more_bytes > LOG_BYTES_MAX or count == CHUNKS_MAX):
            shares.append(Share(hour_from, hour, rows, size))
            count = rows = size = 0
        hour_from = hour_from if count else hour
        count, rows, size = count + 1, rows + more_rows, size + more_bytes
    if count:
        shares.append(Share(hour_from, int(hours.hours[-1]) + 1, rows, size))
    return shares


def _clean(target: Path, wanted: set[str]) -> None:
    """Remove the files of attempts that do not count."""
    for path in (target / BUNDLES).iterdir():
        if path.name not in wanted:
            path.unlink(missing_ok=True)
    (target / FILE_NAME).unlink(missing_ok=True)


def _spread(folder: str, job: str, config: BuildConfig) -> Work:
    """The work of the first stage, which runs in the workers."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context: Any = TaskContext.get()
        attempt = f"{job}-{context.partitionId()}-{context.taskAttemptId()}"
        limits = RowLimits(1, config.payload_bytes_max, DUE_MS_MAX)
        spreader = Spreader(Path(folder), context.partitionId(), attempt, topic=config.topic, limits=limits)
        refused = RejectedFile(str(Path(folder) / REJECTED), f"{attempt}.parquet")

        def tell() -> None:
            if spreader.rejected:
                refused.write(spreader.rejected)
                spreader.rejected.clear()

        with refused:
            for batch in batches:
                yield from spreader.take(batch)
                tell()
            yield from spreader.rest()
            tell()
        if refused.rows:
            row = dict.fromkeys(RUN_RESULT.names)
            row |= {"name": "", "rejected_rows": refused.rows, "rejected_file": refused.file}
            yield pa.RecordBatch.from_pylist([row], RUN_RESULT)

    return run


def _bundle(folder: str, job: str, config: BuildConfig, names: list[str], shares: list[Share]) -> Work:
    """The work of the second stage, which runs in the workers: each row of its frame is the number of a share."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context: Any = TaskContext.get()
        attempt = f"{job}-{context.partitionId()}-{context.taskAttemptId()}"
        runs = [Run(Path(folder) / RUNS / name) for name in names]
        bundler = Bundler(Path(folder), attempt, slot_ms=config.slot_ms, units_max=config.bundle_messages_max)
        for batch in batches:
            for number in batch.column(0).to_pylist():
                share = shares[number]
                rows_max = max(1, min(UNITS_MAX, STEP_BYTES * share.rows // max(1, share.bytes)))
                for rows in steps(runs, share.hour_from * HOUR_MS, share.hour_until * HOUR_MS, rows_max):
                    yield from bundler.take(rows)
                yield from bundler.cut()
        yield from bundler.rest()

    return run
