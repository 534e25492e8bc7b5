"""Building bundles of a frame's rows on Spark: any number of messages, ready to be taken over by a cluster.

No hour is split between tasks: rows are spread by their hour, sorted by due time and written by `Bundler` in Python
workers, as Arrow batches. The driver publishes what the attempts that counted tell it, then removes everything else;
so attempts that failed, ran twice or were cancelled leave nothing that counts. All machines must reach the folder.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, LongType, StringType, StructField, StructType

from tickwheel.pipeline.bundling import BUNDLES, REJECTED, RESULT, Bundler
from tickwheel.pipeline.manifest import FILE_NAME, BuiltBundle, Manifest, write_manifest
from tickwheel.pipeline.sink_rejected import RejectedFile, discard, publish
from tickwheel.pipeline.sink_rows import RowLimits, check_schema
from tickwheel.storage.bundle import UNITS_MAX
from tickwheel.storage.unit import HOUR_MS

DUE_MS_MAX = 4_102_444_800_000
"""The year 2100."""
PAYLOAD_BYTES_MAX = 4 << 20
TASKS_MAX = 1_024

_RESULT_TYPE = StructType(
    [
        StructField(
            f.name,
            ArrayType(StringType())
            if pa.types.is_list(f.type)
            else StringType()
            if pa.types.is_string(f.type)
            else LongType(),
        )
        for f in RESULT
    ]
)


class BuildError(Exception):
    """The build was given up; nothing of it counts. The text says why."""


@dataclass(frozen=True, slots=True)
class BuildConfig:
    """How to build."""

    topic: str = ""
    """Topic of all rows, for frames without that column."""

    slot_ms: int = 1_000
    """Width of a tick of the cluster that will take the load: 1000, 500, 200 or 100."""

    on_rejected: str = "write"
    """Rows that cannot be messages: `write` them with reasons to OUT/_rejected, or `fail` the build."""

    tasks: int = 24
    """Into how many tasks the hours are spread."""

    bundle_messages_max: int = UNITS_MAX
    """Messages of one bundle; a cluster takes one over at a time."""

    payload_bytes_max: int = PAYLOAD_BYTES_MAX
    """What the cluster takes, as it is set up."""

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


def build(frame: DataFrame, folder: str | Path, config: BuildConfig | None = None) -> Manifest:
    """Write the bundles of a frame's rows into a new folder.

    Columns: `payload` (binary or string), `due_ms` (bigint, milliseconds since 1970) or `due_at` (timestamp), and as
    wanted `topic`, `key`, `tags` (array of string), `properties` (map of string to string). Raises SchemaError, naming
    the column, and BuildError.
    """
    config = config or BuildConfig()
    check_schema(frame.schema, config.topic)
    target = Path(folder).absolute()
    if target.exists() and any(target.iterdir()):
        raise BuildError(f"{target}: it is not empty; name a new folder for each build")
    (target / BUNDLES).mkdir(parents=True, exist_ok=True)
    due_ms = F.col("due_ms") if "due_ms" in frame.columns else F.ceil(F.unix_micros("due_at") / 1_000)
    hour = F.coalesce(F.floor(due_ms / HOUR_MS), F.lit(0))
    spread = frame.repartitionById(config.tasks, F.pmod(hour, F.lit(config.tasks)).cast("int"))
    order = "due_ms" if "due_ms" in frame.columns else "due_at"
    written = spread.sortWithinPartitions(order).mapInArrow(_task(str(target), uuid.uuid4().hex, config), _RESULT_TYPE)
    rows = written.collect()
    rejected_files = [row["rejected_file"] for row in rows if row["rejected_file"]]
    rejected = sum(row["rejected_rows"] for row in rows)
    folder_rejected = str(target / REJECTED)
    if rejected and config.on_rejected == "fail":
        discard(folder_rejected, rejected_files)
        _clean(target, set())
        raise BuildError(f"{rejected} rows cannot be messages; on_rejected=write writes them with their reasons")
    names = ("name", "bytes", "units", "hour_min", "hour_max", "crc32c", "topics")
    built = [BuiltBundle(**{name: row[name] for name in names}) for row in rows if row["name"]]
    built.sort(key=lambda bundle: (bundle.hour_min, bundle.hour_max, bundle.name))
    publish(folder_rejected, rejected_files)
    _clean(target, {bundle.path(target).name for bundle in built})
    manifest = Manifest(config.slot_ms, sum(bundle.units for bundle in built), rejected, built)
    write_manifest(target, manifest)
    return manifest


def _clean(target: Path, wanted: set[str]) -> None:
    """Remove what attempts that do not count left behind."""
    for path in (target / BUNDLES).iterdir():
        if path.name not in wanted:
            path.unlink(missing_ok=True)
    (target / FILE_NAME).unlink(missing_ok=True)


def _task(folder: str, job: str, config: BuildConfig) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What runs in the workers."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context: Any = TaskContext.get()
        attempt = f"{job}-{context.partitionId()}-{context.taskAttemptId()}"
        limits = RowLimits(1, config.payload_bytes_max, DUE_MS_MAX)
        bundler = Bundler(
            Path(folder),
            attempt,
            topic=config.topic,
            slot_ms=config.slot_ms,
            limits=limits,
            units_max=config.bundle_messages_max,
        )
        refused = RejectedFile(str(Path(folder) / REJECTED), f"{attempt}.parquet")
        for batch in batches:
            yield from bundler.take(batch)
            if bundler.rejected:
                refused.write(bundler.rejected)
                bundler.rejected.clear()
        if bundler.waiting:
            yield bundler.write()
        name = refused.close()
        if refused.rows:
            row = dict.fromkeys(RESULT.names)
            row |= {"attempt": attempt, "name": "", "rejected_rows": refused.rows, "rejected_file": name}
            yield pa.RecordBatch.from_pylist([row], RESULT)

    return run
