"""The two kinds of tasks of a build: rows become runs (`Spreader`), and runs become bundles (`Bundler`).

All work is on arrays. Files are written under the name of the attempt, and bundles are then renamed by their content.
An attempt that does not count leaves, at most, files that no manifest names.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tickwheel.pipeline.hashes import key_hashes, tag_hashes
from tickwheel.pipeline.runs import DIRECTORY as RUNS
from tickwheel.pipeline.runs import Hours, Rows, Run, joined, write_run
from tickwheel.pipeline.sink_rows import RowGatherer, RowLimits
from tickwheel.storage import bundle
from tickwheel.storage.plain_file import unfinished
from tickwheel.storage.unit import HOUR_MS, ONE_TAG

BUNDLES = "bundles"
REJECTED = "_rejected"
RUN_BYTES = 64 << 20
"""Bytes of record batches in one run."""
STEP_BYTES = 64 << 20
"""Approximate bytes of records read from runs at a time."""

FSYNCING_MAX = 1
"""Bundles of a task that are being fsynced while it makes the next one."""

RUN_RESULT = pa.schema(
    [
        ("partition", pa.int64()),
        ("number", pa.int64()),
        ("name", pa.string()),
        ("hours", pa.binary()),
        ("rows", pa.binary()),
        ("bytes", pa.binary()),
        ("rejected_rows", pa.int64()),
        ("rejected_file", pa.string()),
    ]
)
"""A task's report to the driver on each run. The last report, with an empty name, is about the rows that it
rejected."""

RESULT = pa.schema(
    [
        ("name", pa.string()),
        ("bytes", pa.int64()),
        ("units", pa.int64()),
        ("hour_min", pa.int64()),
        ("hour_max", pa.int64()),
        ("crc32c", pa.int64()),
        ("topics", pa.list_(pa.string())),
    ]
)
"""A task's report to the driver on each bundle."""


class Spreader:
    """Takes rows in any order and writes runs; used by one task of the first stage."""

    def __init__(self, folder: Path, partition: int, attempt: str, *, topic: str, limits: RowLimits) -> None:
        self._folder = folder / RUNS
        self._partition = partition
        self._attempt = attempt
        self._topic = topic
        self._good = RowGatherer(topic, limits)
        self._held: list[pa.RecordBatch] = []
        self._bytes = 0
        self._number = 0

    @property
    def rejected(self) -> list[pa.RecordBatch]:
        """Rows that cannot be messages; the caller empties the list when it takes them."""
        return self._good.rejected

    def take(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Add rows; a result for each run that is written."""
        self._held.append(batch)
        self._bytes += batch.nbytes
        if self._bytes >= RUN_BYTES:
            yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Write the collected rows as a run."""
        if not self._held:
            return
        held, self._held, self._bytes = self._held, [], 0
        for batch in pa.Table.from_batches(held).combine_chunks().to_batches():
            good = self._good.good_rows(with_hashes(batch))
            if good.num_rows:
                yield self._write(encoded(good, self._topic).sorted())

    def _write(self, rows: Rows) -> pa.RecordBatch:
        name = f"{self._attempt}-{self._number}.run"
        write_run(self._folder / name, rows)
        hours = Hours.of(rows)
        row = {
            "partition": self._partition,
            "number": self._number,
            "name": name,
            "hours": hours.hours.tobytes(),
            "rows": hours.rows.tobytes(),
            "bytes": hours.bytes.tobytes(),
            "rejected_rows": 0,
            "rejected_file": "",
        }
        self._number += 1
        return pa.RecordBatch.from_pylist([row], RUN_RESULT)


def encoded(good: pa.RecordBatch, topic: str) -> Rows:
    """Columns and records of rows that are messages. `topic`: for those without the column."""
    names = good.schema.names
    payload = good.column("payload").cast(pa.large_binary())
    columns: dict[str, NDArray[np.void]] = {}
    columns["due_requested_ms"] = good.column("due_ms").to_numpy(zero_copy_only=False)
    if "meta" in names:
        meta = good.column("meta").cast(pa.large_binary())
        columns["meta_size"] = pc.binary_length(meta).to_numpy(zero_copy_only=False).astype(np.uint32)
        payload = pc.binary_join_element_wise(meta, payload, pa.scalar(b"", pa.large_binary()))
    for name in ("key_hash", "tag_hash", "tag_mask"):
        if name in names:
            columns[name] = good.column(name).to_numpy(zero_copy_only=False)
    if "one_tag" in names:
        one = good.column("one_tag").to_numpy(zero_copy_only=False)
        columns["flags"] = np.where(one, ONE_TAG, 0).astype(np.uint8)
    columns["size"] = pc.binary_length(payload).to_numpy(zero_copy_only=False).astype(np.uint32)
    if "topic" not in names:
        columns["topic_id"] = np.zeros(good.num_rows, np.uint32)
        return Rows(columns, payload, [topic])
    coded = good.column("topic").dictionary_encode()
    columns["topic_id"] = coded.indices.to_numpy(zero_copy_only=False).astype(np.uint32)
    return Rows(columns, payload, coded.dictionary.to_pylist())


def steps(runs: Sequence[Run], due_min: int, due_max: int, rows_max: int) -> Iterator[Rows]:
    """The rows of all runs in a range of due times, sorted, at most `rows_max` at a time."""
    at = [run.place(due_min) for run in runs]
    ends = [run.place(due_max) for run in runs]
    while at != ends:
        if sum(ends) - sum(at) <= rows_max:
            upto = ends
        else:
            due = np.concatenate([run.due_ms(low, high) for run, low, high in zip(runs, at, ends, strict=True)])
            last = int(np.partition(due, rows_max)[rows_max])
            upto = [max(low, run.place(last)) for run, low in zip(runs, at, strict=True)]
            if upto == at:
                # One millisecond has more rows than fit: take as many, in their order.
                room = rows_max
                for number, (run, low) in enumerate(zip(runs, at, strict=True)):
                    upto[number] = min(low + room, run.place(last + 1), ends[number])
                    upto[number] = max(low, upto[number])
                    room -= upto[number] - low
        parts = [run.rows(low, high) for run, low, high in zip(runs, at, upto, strict=True) if high > low]
        yield joined(parts).sorted()
        at = upto


@dataclass(slots=True)
class _Gathered:
    parts: list[Rows] = field(default_factory=list)
    count: int = 0
    bytes: int = 0
    hours: int = 0
    """Upper bound of the number of hours: those of each part, added up."""


class Bundler:
    """Takes rows in the order of their due times and writes bundles; used by one task of the second stage.

    While one bundle is being fsynced the next one is made. All are durable once `rest` has ended.
    """

    def __init__(self, folder: Path, attempt: str, *, slot_ms: int, units_max: int) -> None:
        self._folder = folder / BUNDLES
        self._attempt = attempt
        self._slot_ms = slot_ms
        self._units_max = min(units_max, bundle.UNITS_MAX)
        self._now = _Gathered()
        self._number = 0
        self._disk = ThreadPoolExecutor(1, "bundles")
        self._fsyncing: deque[Future[pa.RecordBatch]] = deque()

    def take(self, rows: Rows) -> Iterator[pa.RecordBatch]:
        """Add sorted rows; a result for each bundle that is finished."""
        ends = np.cumsum(rows.columns["size"], dtype=np.int64)
        hours = rows.due_ms // HOUR_MS
        changes = np.cumsum(np.diff(hours, prepend=hours[0] - 1) != 0)
        at, count = 0, len(hours)
        while at < count:
            now = self._now
            before_bytes, before_hours = (int(ends[at - 1]), int(changes[at - 1])) if at else (0, 0)
            end = min(
                count,
                at + self._units_max - now.count,
                int(np.searchsorted(ends, before_bytes + bundle.LOG_BYTES_MAX - now.bytes, side="right")),
                int(np.searchsorted(changes, before_hours + bundle.CHUNKS_MAX - now.hours, side="right")),
            )
            if end > at:
                now.parts.append(rows.part(at, end))
                now.count += end - at
                now.bytes += int(ends[end - 1]) - before_bytes
                now.hours += int(changes[end - 1]) - before_hours + 1
                at = end
            if at < count:
                yield from self.cut()

    def cut(self) -> Iterator[pa.RecordBatch]:
        """Write the collected rows as a bundle; rows due earlier may follow."""
        if self._now.count:
            self._write()
        while len(self._fsyncing) > FSYNCING_MAX:
            yield self._fsyncing.popleft().result()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Write the last rows as a bundle, and finish all bundles."""
        with self._disk:
            yield from self.cut()
            while self._fsyncing:
                yield self._fsyncing.popleft().result()

    def _write(self) -> None:
        now, self._now = self._now, _Gathered()
        rows = joined(now.parts)
        columns, topics = rows.columns, rows.topics
        is_used = np.bincount(columns["topic_id"], minlength=len(topics)) > 0
        if not is_used.all():
            columns = columns | {"topic_id": (np.cumsum(is_used) - 1)[columns["topic_id"]]}
            topics = [topic for topic, used in zip(topics, is_used.tolist(), strict=True) if used]
        pieces = bundle.build(columns, bytes(rows.content()), slot_ms=self._slot_ms, topics=len(topics))
        name = bundle.name_of(pieces)
        crc = 0
        aside = self._folder / f"{self._attempt}-{self._number}.tmp"
        self._number += 1
        with unfinished(aside), aside.open("wb") as file:
            for piece in pieces:
                file.write(piece)
                crc = google_crc32c.extend(crc, piece)
        due = rows.due_ms
        row = {
            "name": name,
            "bytes": sum(map(len, pieces)),
            "units": now.count,
            "hour_min": int(due[0]) // HOUR_MS,
            "hour_max": int(due[-1]) // HOUR_MS,
            "crc32c": crc,
            "topics": topics,
        }
        result = pa.RecordBatch.from_pylist([row], RESULT)
        self._fsyncing.append(self._disk.submit(_finish, aside, self._folder / f"{name}{bundle.SUFFIX}", result))


def _finish(aside: Path, path: Path, result: pa.RecordBatch) -> pa.RecordBatch:
    """Sync a written bundle, then give it its name."""
    with unfinished(aside):
        with aside.open("rb+") as file:
            os.fsync(file.fileno())
        aside.replace(path)
    return result


def with_hashes(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with hashes of keys and tags, for filters and searches by key."""
    names = batch.schema.names
    if "key" in names and batch.column("key").null_count < batch.num_rows:
        batch = batch.append_column("key_hash", pa.array(key_hashes(batch.column("key"))))
    if "tags" in names and batch.column("tags").null_count < batch.num_rows:
        hashes, masks, one = tag_hashes(batch.column("tags"))
        batch = batch.append_column("tag_hash", pa.array(hashes)).append_column("tag_mask", pa.array(masks))
        batch = batch.append_column("one_tag", pa.array(one))
    return batch
