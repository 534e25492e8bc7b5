"""Freezing: writes rows that are due beyond the horizon as parts of a cold tier, on Spark, and gives them ids.

Python workers take the rows of each due day, sort them and write parts that fit a bundle. The driver publishes the
parts of the attempts that count (pipeline/cold_store.py), then registers them with the cluster: only then are the rows
messages. A repeated job continues where it was: written parts are not written again, and the cluster gives the same
numbers. The boundary between near and far is fixed when the job begins.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from tickwheel.client import AsyncClient
from tickwheel.client.cold import FIRST_DAY, ColdJob, NewColdPart
from tickwheel.client.moments import moment_of
from tickwheel.pipeline.build import DUE_MS_MAX, PAYLOAD_BYTES_MAX, TASKS_MAX
from tickwheel.pipeline.cold_store import (
    DAY_MS,
    NEAR,
    REJECTED,
    ColdError,
    ColdFile,
    ColdJobManifest,
    ColdStore,
    day_folder,
    write_file,
    write_ids,
)
from tickwheel.pipeline.inputs import files_below
from tickwheel.pipeline.meta_column import META_COLUMNS
from tickwheel.pipeline.places import PlaceError, local_folder
from tickwheel.pipeline.sink_rejected import RejectedFile
from tickwheel.pipeline.sink_rows import RowGatherer, RowLimits, check_schema
from tickwheel.pipeline.spark_errors import raising
from tickwheel.storage import bundle

HORIZON_DAYS = 30.0
PARTS_MAX = 4_096
"""Parts of one job; the cluster's bound."""
RECORD_BYTES_MAX = bundle.LOG_BYTES_MAX
COLD_HOUR = 1 << 31
_PLACE = "_place"

_RESULT = pa.schema(
    [
        ("path", pa.string()),
        ("day", pa.int64()),
        ("rows", pa.int64()),
        ("due_min_ms", pa.int64()),
        ("due_max_ms", pa.int64()),
        ("bytes", pa.int64()),
        ("sha256", pa.string()),
        ("topics", pa.list_(pa.string())),
        ("near_rows", pa.int64()),
        ("near_file", pa.string()),
        ("rejected_rows", pa.int64()),
        ("rejected_file", pa.string()),
    ]
)
"""A task's report to the driver: on each part, and at last on the rows that did not become cold ones."""
_EMPTY = {pa.int64(): 0, pa.string(): ""}
_NO_ROW: dict[str, Any] = {field.name: _EMPTY.get(field.type, []) for field in _RESULT}


@dataclass(frozen=True, slots=True)
class FreezeConfig:
    """The settings of a freeze."""

    topic: str = ""
    """Topic of all rows, for frames without that column."""

    horizon_days: float = HORIZON_DAYS
    """Rows due sooner are near: they are written to COLD/_near/<job>, for an ordinary load."""

    tasks: int = 0
    """Number of tasks that share the days; 0: Spark decides by the number of rows, since each task costs a fraction of
    a second."""

    part_rows_max: int = bundle.UNITS_MAX
    """Rows of one part; a cluster takes one over at a time."""

    def __post_init__(self) -> None:
        checks = (
            ("horizon_days", self.horizon_days, 0 <= self.horizon_days <= 3_650, "0 to 3650"),
            ("tasks", self.tasks, 0 <= self.tasks <= TASKS_MAX, f"0 to {TASKS_MAX}"),
            ("part_rows_max", self.part_rows_max, 1 <= self.part_rows_max <= bundle.UNITS_MAX,
             f"1 to {bundle.UNITS_MAX}"),
        )  # fmt: skip
        for name, value, good, allowed in checks:
            if not good:
                raise ColdError(f"{name}: {value}: {allowed}")


def content_job_id(source: str | Path, topic: str = "") -> str:
    """A job id that follows from the content of a Parquet file or folder: the bytes of all files that count
    (inputs.py), and the columns that folder names stand for. Raises ColdError if there is no file, and InputError."""
    try:
        path = local_folder(source, "IN.parquet")
    except PlaceError:
        raise ColdError(f"{source}: give --job-id: only a local file names the job by its content") from None
    files = [path] if path.is_file() else files_below(path) if path.is_dir() else []
    if not files:
        raise ColdError(f"{source}: there is no Parquet file; give --job-id if only Spark can read it")
    sha = hashlib.sha256(topic.encode())
    for file in files:
        for folder in file.relative_to(path).parent.parts if file != path else ():
            if "=" in folder:
                sha.update(f"{folder}/".encode())
        with file.open("rb") as opened:
            sha.update(hashlib.file_digest(opened, "sha256").digest())
    return f"cold-{sha.hexdigest()[:24]}"


def write_parts(
    frame: DataFrame, folder: str | Path, job_id: str, config: FreezeConfig | None = None
) -> ColdJobManifest:
    """Write a frame's far rows as parts, unless this job has. Columns are those of `build`.

    Raises SchemaError, naming the column, and ColdError.
    """
    config = config or FreezeConfig()
    store = ColdStore(folder)
    store.take_back(job_id)
    known = store.manifest(job_id)
    if known is not None:
        return store.finish(known)
    check_schema(frame.schema, config.topic)
    try:
        with raising(ColdError):
            written = _written(frame, store, job_id, config)
    except ColdError:
        known = store.manifest(job_id)
        if known is None:
            raise
        return store.finish(known)  # another run of the job was first, and removed what this one was writing
    return store.finish(written)


def _written(frame: DataFrame, store: ColdStore, job_id: str, config: FreezeConfig) -> ColdJobManifest:
    """The parts of the attempts that count; nothing names them yet."""
    boundary_ms = store.plan(job_id, int(time.time() * 1_000 + config.horizon_days * DAY_MS))
    due_ms = F.col("due_ms") if "due_ms" in frame.columns else F.ceil(F.unix_micros("due_at") / 1_000)
    day = F.coalesce(F.floor(due_ms / DAY_MS), F.lit(0))
    spread = _spread(frame, day, config.tasks)
    order = "due_ms" if "due_ms" in frame.columns else "due_at"
    task = _task(str(store.folder), job_id, boundary_ms, config)
    rows = spread.sortWithinPartitions(order).mapInArrow(task, from_arrow_schema(_RESULT)).collect()
    names = ("path", "day", "rows", "due_min_ms", "due_max_ms", "bytes", "sha256", "topics")
    parts = [ColdFile(**{name: row[name] for name in names}) for row in rows if row["path"]]
    parts.sort(key=lambda part: (part.due_min_ms, part.due_max_ms, part.sha256))
    if len(parts) > PARTS_MAX:
        raise ColdError(f"{len(parts)} parts, at most {PARTS_MAX}: freeze the rows as several jobs")
    return ColdJobManifest(
        job_id,
        boundary_ms,
        sum(part.rows for part in parts),
        sum(row["near_rows"] for row in rows),
        sum(row["rejected_rows"] for row in rows),
        [row["near_file"] for row in rows if row["near_file"]],
        [row["rejected_file"] for row in rows if row["rejected_file"]],
        parts,
    )


def _spread(frame: DataFrame, day: Column, tasks: int) -> DataFrame:
    """Put all rows of a day into one task. If Spark chooses the number itself, it merges small neighbours."""
    if not tasks:
        return frame.repartition(day)
    return frame.repartitionById(tasks, F.pmod(day, F.lit(tasks)).cast("int"))


async def register(client: AsyncClient, folder: str | Path, manifest: ColdJobManifest) -> ColdJob | None:
    """Have the cluster take the parts of a job as messages, and write down their ids; None: it has no part.

    Raises ColdError, TickwheelError kinds.
    """
    store = ColdStore(folder)
    status = await client.admin.master_status()
    store.belong_to(status.cluster_id)
    if not manifest.parts:
        return None
    first = store.first_part(manifest.job_id)
    if first is None:
        store.take_back(manifest.job_id)
        if store.manifest(manifest.job_id) is None:
            raise ColdError(f"job {manifest.job_id}: its files have been removed; freeze its rows again")
        for topic in sorted({topic for part in manifest.parts for topic in part.topics}):
            await client.admin.create_topic(topic)
        parts = [
            NewColdPart(
                day=FIRST_DAY + timedelta(days=part.day),
                rows=part.rows,
                due_first=moment_of(part.due_min_ms),
                due_last=moment_of(part.due_max_ms),
                sha256=bytes.fromhex(part.sha256),
            )
            for part in manifest.parts
        ]
        job = await client.cold.register(manifest.job_id, manifest.sha256, parts)
        store.registered(manifest.job_id, job.first_part)
    else:
        _, last = await client.cold.parts(waiting_only=True)
        if last < first + len(manifest.parts) - 1:
            text = f"its parts begin at {first}, the cluster knows none above {last}; was it restored from a backup?"
            raise ColdError(f"job {manifest.job_id}: {text} Freeze the rows into a new folder")
        job = ColdJob(job_id=manifest.job_id, first_part=first, parts=len(manifest.parts), repeated=True)
    group = status.wheel_group
    write_ids(store, manifest, job.first_part, lambda part: f"{group}-{COLD_HOUR + part}-")
    return job


def _beside(folder: str | Path, kind: str, job_id: str) -> str:
    return str(Path(folder) / (NEAR if kind == "near" else REJECTED) / job_id)


# -- in the workers


class PartWriter:
    """Takes rows in the order of their due times and writes parts; used by one task."""

    def __init__(self, folder: Path, job_id: str, attempt: str, topic: str, rows_max: int) -> None:
        self._folder = folder
        self._job_id = job_id
        self._attempt = attempt
        self._topic = topic
        self._rows_max = rows_max
        self._rows = RowGatherer(topic, RowLimits(1, PAYLOAD_BYTES_MAX, DUE_MS_MAX))
        self._tables: list[pa.Table] = []
        self._count = self._bytes = self._number = 0
        self._day = -1

    @property
    def rejected(self) -> list[pa.RecordBatch]:
        """Rows that cannot be messages; the caller empties the list when it takes them."""
        return self._rows.rejected

    def take(self, batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
        """Add rows; a description of each part that is written."""
        place = pa.array(np.arange(batch.num_rows, dtype=np.int64))
        good = self._rows.good_rows(batch.append_column(_PLACE, place))
        if not good.num_rows:
            return
        sizes = pc.binary_length(good.column("payload")).to_numpy(zero_copy_only=False).astype(np.int64)
        if "meta" in good.schema.names:
            sizes = sizes + pc.binary_length(good.column("meta")).to_numpy(zero_copy_only=False)
        due = good.column("due_ms").to_numpy(zero_copy_only=False)
        table = _as_kept(pa.Table.from_batches([batch]).take(good.column(_PLACE)), good.column("due_ms"), self._topic)
        ends = np.cumsum(sizes)
        days = due // DAY_MS
        at = 0
        while at < len(due):
            if int(days[at]) != self._day and self._count:
                yield self.write()
            self._day = int(days[at])
            before = int(ends[at - 1]) if at else 0
            end = min(
                int(np.searchsorted(days, self._day, side="right")),
                at + self._rows_max - self._count,
                int(np.searchsorted(ends, before + RECORD_BYTES_MAX - self._bytes, side="right")),
            )
            if end > at:
                self._tables.append(table.slice(at, end - at))
                self._count += end - at
                self._bytes += int(ends[end - 1]) - before
                at = end
            if at < len(due):
                yield self.write()

    def rest(self) -> Iterator[dict[str, Any]]:
        """Write the last rows as parts."""
        if self._count:
            yield self.write()

    def write(self) -> dict[str, Any]:
        """Write the collected rows as a part; returns its description."""
        table = pa.concat_tables(self._tables)
        self._tables, self._count, self._bytes = [], 0, 0
        out = pa.BufferOutputStream()
        pq.write_table(table, out, compression="zstd")
        data = out.getvalue().to_pybytes()
        sha = hashlib.sha256(data).hexdigest()
        path = f"{day_folder(self._day)}/{self._job_id}-{sha[:16]}.parquet"
        self._number += 1
        write_file(self._folder / path, data, aside=f"{self._job_id}@{self._attempt}-{self._number}")
        due = table.column("due_ms").to_numpy()
        return {
            **_NO_ROW,
            "path": path,
            "day": self._day,
            "rows": table.num_rows,
            "due_min_ms": int(due[0]),
            "due_max_ms": int(due[-1]),
            "bytes": len(data),
            "sha256": sha,
            "topics": sorted(pc.unique(table.column("topic")).to_pylist()),
        }


def _as_kept(table: pa.Table, due_ms: pa.Array, topic: str) -> pa.Table:
    """The columns of a part: topic, due_ms, payload as bytes, and the META_COLUMNS that the table has."""
    count = table.num_rows
    columns = {
        "topic": table.column("topic") if "topic" in table.column_names else pa.array([topic] * count, pa.string()),
        "due_ms": due_ms,
        "payload": table.column("payload").cast(pa.binary()),
    }
    columns |= {name: table.column(name) for name in META_COLUMNS if name in table.column_names}
    return pa.table(columns)


def _task(
    folder: str, job_id: str, boundary_ms: int, config: FreezeConfig
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context: Any = TaskContext.get()
        attempt = f"{uuid.uuid4().hex}-{context.partitionId()}-{context.taskAttemptId()}"
        writer = PartWriter(Path(folder), job_id, attempt, config.topic, config.part_rows_max)
        near = RejectedFile(_beside(folder, "near", job_id), f"{attempt}.parquet")
        refused = RejectedFile(_beside(folder, "rejected", job_id), f"{attempt}.parquet")
        with near, refused:
            for batch in batches:
                is_near = _near(batch, boundary_ms)
                if pc.any(is_near).as_py():
                    near.write([batch.filter(is_near)])
                    batch = batch.filter(pc.invert(is_near))
                for part in writer.take(batch) if batch.num_rows else ():
                    yield pa.RecordBatch.from_pylist([part], _RESULT)
                if writer.rejected:
                    refused.write(writer.rejected)
                    writer.rejected.clear()
            for part in writer.rest():
                yield pa.RecordBatch.from_pylist([part], _RESULT)
        row = {
            **_NO_ROW,
            "near_file": near.file,
            "near_rows": near.rows,
            "rejected_file": refused.file,
            "rejected_rows": refused.rows,
        }
        if near.rows or refused.rows:
            yield pa.RecordBatch.from_pylist([row], _RESULT)

    return run


def _near(batch: pa.RecordBatch, boundary_ms: int) -> pa.Array:
    """Marks rows due before the boundary. Rows without a valid due time are not near; they are rejected later."""
    if "due_ms" in batch.schema.names:
        due = batch.column("due_ms").cast(pa.int64())
        low, high = pa.scalar(0, pa.int64()), pa.scalar(boundary_ms, pa.int64())
    else:
        due = batch.column("due_at").cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        low, high = pa.scalar(0, pa.int64()), pa.scalar((boundary_ms - 1) * 1_000 + 1, pa.int64())
    return pc.fill_null(pc.and_(pc.greater_equal(due, low), pc.less(due, high)), False)
