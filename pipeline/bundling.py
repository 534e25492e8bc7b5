"""From sorted Arrow record batches to bundles: what one task of a build does with its rows.

Array work throughout but for keys, tags and properties, which are serialized row by row. Files are written aside under
the name of the attempt and renamed to the name of their content, so that attempts that lost leave at most files that
no manifest names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tickwheel.pipeline.hashes import key_hashes, tag_hashes
from tickwheel.pipeline.sink_rows import META_COLUMNS, RowGatherer, RowLimits
from tickwheel.storage import bundle
from tickwheel.storage.unit import HOUR_MS, ONE_TAG, UNIT

BUNDLES = "bundles"
REJECTED = "_rejected"

RESULT = pa.schema(
    [
        ("attempt", pa.string()),
        ("name", pa.string()),
        ("bytes", pa.int64()),
        ("units", pa.int64()),
        ("hour_min", pa.int64()),
        ("hour_max", pa.int64()),
        ("crc32c", pa.int64()),
        ("topics", pa.list_(pa.string())),
        ("rejected_rows", pa.int64()),
        ("rejected_file", pa.string()),
    ]
)
"""What a task tells the driver of each bundle; and at its end, with an empty name, of the rows it rejected."""


@dataclass(slots=True)
class _Gathered:
    units: list[NDArray[np.void]] = field(default_factory=list)
    records: list[bytes] = field(default_factory=list)
    count: int = 0
    bytes: int = 0
    hours: int = 0
    """Hours, each part counted on its own: an upper bound."""


class Bundler:
    """Takes rows in the order of their due times, writes bundles. One per task."""

    def __init__(
        self, folder: Path, attempt: str, *, topic: str, slot_ms: int, limits: RowLimits, units_max: int
    ) -> None:
        self._folder = folder / BUNDLES
        self._attempt = attempt
        self._slot_ms = slot_ms
        self._units_max = min(units_max, bundle.UNITS_MAX)
        self._topic = topic
        self._rows = RowGatherer(topic, limits)
        self._topics: dict[str, int] = {}
        self._now = _Gathered()
        self._number = 0

    def take(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Add rows; a result for each bundle that is written. Then `rejected` has those that cannot be messages."""
        good = self._rows.good_rows(_with_hashes(batch))
        if not good.num_rows:
            return
        units, records = self._units(good)
        ends = np.cumsum(units["size"], dtype=np.int64)
        hours = units["due_requested_ms"] // HOUR_MS
        changes = np.cumsum(np.diff(hours, prepend=hours[0] - 1) != 0)
        at = 0
        while at < len(units):
            now = self._now
            before_bytes, before_hours = (int(ends[at - 1]), int(changes[at - 1])) if at else (0, 0)
            end = min(
                len(units),
                at + self._units_max - now.count,
                int(np.searchsorted(ends, before_bytes + bundle.LOG_BYTES_MAX - now.bytes, side="right")),
                int(np.searchsorted(changes, before_hours + bundle.CHUNKS_MAX - now.hours, side="right")),
            )
            if end > at:
                low, high = before_bytes, int(ends[end - 1])
                now.units.append(units[at:end])
                now.records.append(records[low:high])
                now.count += end - at
                now.bytes += high - low
                now.hours += int(changes[end - 1]) - before_hours + 1
                at = end
            if at < len(units):
                yield self.write()

    @property
    def rejected(self) -> list[pa.RecordBatch]:
        """Rows that cannot be messages; whoever takes them empties the list."""
        return self._rows.rejected

    @property
    def waiting(self) -> int:
        """Rows that are in no bundle yet."""
        return self._now.count

    def _units(self, good: pa.RecordBatch) -> tuple[NDArray[np.void], bytes]:
        names = good.schema.names
        units = np.zeros(good.num_rows, UNIT)
        units["due_requested_ms"] = good.column("due_ms").to_numpy(zero_copy_only=False)
        payload = good.column("payload").cast(pa.binary())
        if "meta" in names:
            meta = good.column("meta").cast(pa.binary())
            units["meta_size"] = pc.binary_length(meta).to_numpy(zero_copy_only=False)
            payload = pc.binary_join_element_wise(meta, payload, b"")
            for column, name in (("key_hash", "key_hash"), ("tag_hash", "tag_hash"), ("tag_mask", "tag_mask")):
                if column in names:
                    units[name] = good.column(column).to_numpy(zero_copy_only=False)
            if "one_tag" in names:
                units["flags"] = np.where(good.column("one_tag").to_numpy(zero_copy_only=False), ONE_TAG, 0)
        units["size"] = pc.binary_length(payload).to_numpy(zero_copy_only=False)
        if "topic" in names:
            coded = good.column("topic").dictionary_encode()
            places = np.array([self._place(name) for name in coded.dictionary.to_pylist()], np.uint32)
            units["topic_id"] = places[coded.indices.to_numpy(zero_copy_only=False)]
        else:
            units["topic_id"] = self._place(self._topic)
        return units, _content(payload)

    def _place(self, topic: str) -> int:
        """Of a topic in the list of this task."""
        if topic not in self._topics and len(self._topics) >= bundle.TOPICS_MAX:
            raise bundle.BadBundleError(f"more than {bundle.TOPICS_MAX} topics")
        return self._topics.setdefault(topic, len(self._topics))

    def write(self) -> pa.RecordBatch:
        """What has gathered becomes a bundle."""
        now, self._now = self._now, _Gathered()
        units = np.concatenate(now.units)
        topics = list(self._topics)
        used = np.unique(units["topic_id"])
        units["topic_id"] = np.searchsorted(used, units["topic_id"])
        pieces = bundle.build(units, b"".join(now.records), slot_ms=self._slot_ms, topics=len(used))
        name = bundle.name_of(pieces)
        crc = 0
        aside = self._folder / f"{self._attempt}-{self._number}.tmp"
        self._number += 1
        with aside.open("wb") as file:
            for piece in pieces:
                file.write(piece)
                crc = google_crc32c.extend(crc, piece)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self._folder / f"{name}{bundle.SUFFIX}")
        return pa.RecordBatch.from_pylist(
            [
                {
                    "attempt": self._attempt,
                    "name": name,
                    "bytes": sum(map(len, pieces)),
                    "units": now.count,
                    "hour_min": int(units["due_ms"][0]) // HOUR_MS,
                    "hour_max": int(units["due_ms"][-1]) // HOUR_MS,
                    "crc32c": crc,
                    "topics": [topics[place] for place in used.tolist()],
                    "rejected_rows": 0,
                    "rejected_file": "",
                }
            ],
            RESULT,
        )


def _with_hashes(batch: pa.RecordBatch) -> pa.RecordBatch:
    names = batch.schema.names
    if "key" in names:
        batch = batch.append_column("key_hash", pa.array(key_hashes(batch.column("key"))))
    if "tags" in names:
        hashes, masks, one = tag_hashes(batch.column("tags"))
        batch = batch.append_column("tag_hash", pa.array(hashes)).append_column("tag_mask", pa.array(masks))
        batch = batch.append_column("one_tag", pa.array(one))
    if not set(META_COLUMNS) & set(names):
        return batch
    return batch


def _content(column: pa.Array) -> bytes:
    """All values one behind the other; no nulls."""
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    data = column.buffers()[2]
    low, high = int(offsets[0]), int(offsets[-1])
    return b"" if data is None else bytes(data.slice(low, high - low).to_pybytes())
