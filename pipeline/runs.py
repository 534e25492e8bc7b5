"""Runs: files between the two stages of a build, with rows that are checked, encoded and sorted by due time.

A task of the first stage writes its rows as runs. A task of the second stage reads a range of hours from all runs. A
file holds the columns one after the other, each as a plain array, so a range of hours takes a few reads. One attempt
writes a file, which is named after it. Only files reported to the driver are read, and all are removed when the build
ends, even if it fails.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tickwheel.storage.plain_file import naming, unfinished
from tickwheel.storage.unit import HOUR_MS, UNIT

DIRECTORY = "_runs"
Column = NDArray[Any]
_HEADER_BYTES = 8


@dataclass(frozen=True, slots=True)
class Rows:
    """Encoded rows. `columns`: those of UNIT, without offsets and constants; `records`: meta and payload."""

    columns: dict[str, Column]
    records: pa.Array
    """large_binary."""
    topics: list[str]
    """The topics; the column `topic_id` holds places in this list."""

    @property
    def due_ms(self) -> NDArray[np.int64]:
        return self.columns["due_requested_ms"]

    def sorted(self) -> Rows:
        """The rows sorted by due time; rows of equal times keep their order."""
        due = self.due_ms
        if (due[1:] >= due[:-1]).all():
            return self
        order = np.argsort(due, kind="stable")
        columns = {name: column[order] for name, column in self.columns.items()}
        return Rows(columns, self.records.take(pa.array(order)), self.topics)

    def part(self, low: int, high: int) -> Rows:
        """The rows from `low` to before `high`, without a copy."""
        columns = {name: column[low:high] for name, column in self.columns.items()}
        return Rows(columns, self.records.slice(low, high - low), self.topics)

    def content(self) -> memoryview:
        """All records, one after the other."""
        _, offsets, data = self.records.buffers()
        at = np.frombuffer(offsets, np.int64)[self.records.offset : self.records.offset + len(self.records) + 1]
        return memoryview(b"" if data is None else data.slice(int(at[0]), int(at[-1] - at[0])))


def joined(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    topics: dict[str, int] = {}
    columns: dict[str, list[Column]] = {}
    names = sorted({name for part in parts for name in part.columns})
    for part in parts:
        places = np.array([topics.setdefault(name, len(topics)) for name in part.topics], np.uint32)
        for name in names:
            column = part.columns.get(name)
            if column is None:
                column = np.zeros(len(part.records), UNIT[name])
            columns.setdefault(name, []).append(places[column] if name == "topic_id" else column)
    return Rows(
        {name: np.concatenate(found) for name, found in columns.items()},
        pa.concat_arrays([part.records for part in parts]),
        list(topics),
    )


@dataclass(frozen=True, slots=True)
class Hours:
    """The amount due in each hour."""

    hours: NDArray[np.int64]
    rows: NDArray[np.int64]
    bytes: NDArray[np.int64]

    @staticmethod
    def of(rows: Rows) -> Hours:
        """The amounts of sorted rows."""
        hours = rows.due_ms // HOUR_MS
        starts = np.flatnonzero(np.diff(hours, prepend=-1))
        sizes = rows.columns["size"].astype(np.int64)
        return Hours(hours[starts], np.diff(starts, append=len(hours)), np.add.reduceat(sizes, starts))

    @staticmethod
    def sum(parts: Sequence[Hours]) -> Hours:
        """The amounts of all parts together."""
        if not parts:
            none = np.zeros(0, np.int64)
            return Hours(none, none, none)
        hours, where = np.unique(np.concatenate([part.hours for part in parts]), return_inverse=True)
        rows, size = np.zeros(len(hours), np.int64), np.zeros(len(hours), np.int64)
        np.add.at(rows, where, np.concatenate([part.rows for part in parts]))
        np.add.at(size, where, np.concatenate([part.bytes for part in parts]))
        return Hours(hours, rows, size)


def write_run(path: Path, rows: Rows) -> None:
    """Write sorted rows, without a sync: an unfinished build does not count."""
    ends = np.cumsum(rows.columns["size"], dtype=np.int64)
    columns = {"due_requested_ms": rows.due_ms, "end": ends, **rows.columns}
    facts: dict[str, Any] = {
        "rows": len(ends),
        "columns": [[name, column.dtype.str] for name, column in columns.items()],
        "topics": rows.topics,
    }
    header = json.dumps(facts).encode()
    with unfinished(path), path.open("wb") as file:
        file.write(len(header).to_bytes(_HEADER_BYTES, "little") + header)
        for column in columns.values():
            file.write(np.ascontiguousarray(column).data)
        file.write(rows.content())


class Run:
    """One file, open for reading."""

    def __init__(self, path: Path) -> None:
        with naming(path), path.open("rb") as file:
            header = file.read(int.from_bytes(file.read(_HEADER_BYTES), "little"))
            at = file.tell()
        facts = json.loads(header)
        self._path = path
        self._topics: list[str] = facts["topics"]
        self._columns: dict[str, Column] = {}
        for name, dtype in facts["columns"]:
            self._columns[name] = np.memmap(path, np.dtype(dtype), "r", at, (facts["rows"],))
            at += self._columns[name].nbytes
        self._records_at = at

    def due_ms(self, low: int, high: int) -> NDArray[np.int64]:
        """Due times of some rows."""
        return np.array(self._columns["due_requested_ms"][low:high])

    def place(self, due_ms: int) -> int:
        """The place of the first row that is not due before `due_ms`."""
        return int(np.searchsorted(self._columns["due_requested_ms"], due_ms))

    def rows(self, low: int, high: int) -> Rows:
        """The rows from `low` to before `high`, which must be greater."""
        ends = np.array(self._columns["end"][low:high])
        first = int(ends[0]) - int(self._columns["size"][low])
        with naming(self._path), self._path.open("rb") as file:
            file.seek(self._records_at + first)
            data = file.read(int(ends[-1]) - first)
        offsets = np.append(0, ends - first)
        records = pa.Array.from_buffers(
            pa.large_binary(), high - low, [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        )
        columns = {name: np.array(column[low:high]) for name, column in self._columns.items() if name != "end"}
        return Rows(columns, records, self._topics)
