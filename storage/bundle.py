"""Bundles: finished chunks of several hours in one file, built outside a cluster and taken over by it as they are.

Owns the layout (docs/FORMATS.md): a header, a table with a row for each chunk, then the log, the index and the heads of
all chunks, each part exactly as a merge writes it to the three files of a segment. What only the taking over decides
counts from 0 in each chunk (global index, log offset) or names a row of a list that comes with it (topics).

A bundle is named by the SHA-256 of its bytes and never changes. In each chunk the units lie in the order of their due
times, and so do their records: the place of a unit is its index.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from tickwheel.storage.disk import Buffer, Disk, DiskError, File
from tickwheel.storage.errors import UnknownVersionError
from tickwheel.storage.segment import (
    LOG_BLOCK_BYTES,
    ROW_BYTES,
    Chunk,
    Readable,
    Segment,
    chunk_heads,
    row_checksums,
)
from tickwheel.storage.unit import HOUR_MS, NO_INDEX, ONE_TAG, UNIT

DIRECTORY = "bulk"
"""Where a node keeps bundles, those of which it has only a part included."""
SUFFIX = ".bundle"
FORMAT_VERSION = 1
UNITS_MAX = 1 << 18
"""Of one bundle: what a node reads at most when all of them are late."""
LOG_BYTES_MAX = 64 << 20
"""Of all records of one bundle. A builder ends a bundle before it passes it."""
FILE_BYTES_MAX = 128 << 20
"""Above what the other limits allow together."""
CHUNKS_MAX = 16_384
TOPICS_MAX = 65_536
NAME_CHARS = 64

_MAGIC = b"TWBUNDLE"
_HEADER = struct.Struct("<8sIIIIQQQII")
# magic version slot_ms chunks topics units log_bytes heads_bytes crc(table) crc(header)
HEADER_BYTES = _HEADER.size

TABLE = np.dtype(
    [
        ("hour", "<u4"),
        ("units", "<u4"),
        ("log_bytes", "<u8"),
        ("heads_bytes", "<u4"),
        ("reserved", "<u4"),
    ]
)
Table = NDArray[np.void]


class BadBundleError(Exception):
    """What claims to be a bundle is none; the text says what is wrong with it."""


def bundle_path(name: str) -> str:
    """Where a node keeps a bundle; `name` is the SHA-256 of its bytes in hexadecimal."""
    return f"{DIRECTORY}/{name}{SUFFIX}"


def is_name(name: str) -> bool:
    """Whether it can be the name of a bundle."""
    return len(name) == NAME_CHARS and not set(name) - set("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a bundle lie, from its table."""

    slot_ms: int
    topics: int
    table: Table

    @property
    def units(self) -> int:
        """Of all chunks."""
        return int(self.table["units"].sum(dtype=np.int64))

    @property
    def log_at(self) -> int:
        """First byte of the log."""
        return HEADER_BYTES + len(self.table) * TABLE.itemsize

    @property
    def index_at(self) -> int:
        """First byte of the index."""
        return self.log_at + int(self.table["log_bytes"].sum(dtype=np.int64))

    @property
    def heads_at(self) -> int:
        """First byte of the heads."""
        return self.index_at + self.units * ROW_BYTES

    @property
    def bytes(self) -> int:
        """Of the whole file."""
        return self.heads_at + int(self.table["heads_bytes"].sum(dtype=np.int64))


def problem_of_table(table: Table, topics: int) -> str:
    """Why a table cannot be that of a bundle; empty if it can."""
    if not 1 <= len(table) <= CHUNKS_MAX:
        return f"it has {len(table)} chunks, allowed are 1 to {CHUNKS_MAX}"
    if not 1 <= topics <= TOPICS_MAX:
        return f"it has {topics} topics, allowed are 1 to {TOPICS_MAX}"
    if not table["units"].all() or int(table["units"].sum(dtype=np.int64)) > UNITS_MAX:
        return f"it has a chunk without units, or more than {UNITS_MAX} units"
    if int(table["log_bytes"].max()) > LOG_BYTES_MAX or int(table["log_bytes"].sum(dtype=np.int64)) > LOG_BYTES_MAX:
        return f"its log is longer than {LOG_BYTES_MAX} bytes"
    hours = table["hour"].astype(np.int64)
    if (np.diff(hours) <= 0).any():
        return "its hours do not rise"
    return ""


def build(units: NDArray[np.void], records: Buffer, *, slot_ms: int, topics: int) -> list[bytes]:
    """The pieces of a bundle, to be written one after the other.

    `units`: sorted by due_requested_ms; size, meta_size, topic_id (a number below `topics`), tag_hash, tag_mask, flags,
    key_hash and due_requested_ms count, everything else is filled in here, in place. `records`: meta and payload of
    each, in that order. Raises BadBundleError if they are too many.
    """
    count = len(units)
    due = np.ascontiguousarray(units["due_requested_ms"])
    sizes = units["size"].astype(np.int64)
    ends = np.cumsum(sizes)
    if count and (int(ends[-1]) != len(records) or (np.diff(due) < 0).any()):
        raise BadBundleError("the units are not sorted by due time, or their records have other lengths")
    hours = due // HOUR_MS
    starts = np.flatnonzero(np.diff(hours, prepend=-1))
    counts = np.diff(starts, append=count)
    rows = np.arange(count, dtype=np.int64)
    index = rows - np.repeat(starts, counts)
    log_starts = ends[starts] - sizes[starts]
    ticks = due // slot_ms
    run_starts = np.flatnonzero(np.diff(ticks, prepend=-1))
    run_counts = np.diff(run_starts, append=count)
    in_run = rows - np.repeat(run_starts, run_counts)
    units["due_ms"] = due
    units["index"] = index
    units["offset"] = ends - sizes - np.repeat(log_starts, counts)
    units["local_index"] = units["run_index"] = in_run
    units["previous_index"] = np.where(in_run > 0, index - 1, NO_INDEX)
    raw = np.ascontiguousarray(units).view(np.uint8).reshape(-1, ROW_BYTES)
    raw.reshape(-1).view(UNIT)["crc"] = row_checksums(raw)

    table = np.zeros(len(starts), TABLE)
    table["hour"] = hours[starts]
    table["units"] = counts
    table["log_bytes"] = np.diff(log_starts, append=len(records))
    view = memoryview(records)
    run_edges = np.searchsorted(run_starts, np.append(starts, count))
    hour_ticks = (ticks[run_starts] % (HOUR_MS // slot_ms)).astype(np.uint32)
    heads: list[bytes] = []
    for number, (at, size, units_here) in enumerate(
        zip(log_starts.tolist(), table["log_bytes"].tolist(), counts.tolist(), strict=True)
    ):
        crcs = [
            google_crc32c.value(bytes(view[low : min(low + LOG_BLOCK_BYTES, at + size)]))
            for low in range(at, at + size, LOG_BLOCK_BYTES)
        ]
        runs = slice(int(run_edges[number]), int(run_edges[number + 1]))
        parts = chunk_heads(
            0,
            hour_ticks[runs],
            run_counts[runs].astype(np.uint32),
            0,
            size,
            np.array(crcs, dtype=np.uint32),
            np.arange(units_here, dtype=np.uint32),
        )
        table["heads_bytes"][number] = sum(map(len, parts))
        heads += parts
    problem = problem_of_table(table, topics)
    if problem:
        raise BadBundleError(problem)
    heads_bytes = int(table["heads_bytes"].sum(dtype=np.int64))
    body = table.tobytes()
    header = _HEADER.pack(
        _MAGIC,
        FORMAT_VERSION,
        slot_ms,
        len(table),
        topics,
        count,
        len(records),
        heads_bytes,
        google_crc32c.value(body),
        0,
    )
    header = header[:-4] + google_crc32c.value(header[:-4]).to_bytes(4, "little")
    return [header, body, bytes(records), raw.tobytes(), *heads]


def read_layout(file: Readable, size: int) -> Layout:
    """Header and table of a bundle of `size` bytes. Raises BadBundleError, UnknownVersionError."""
    header = file.read_at(0, HEADER_BYTES)
    if len(header) < HEADER_BYTES or google_crc32c.value(header[:-4]) != int.from_bytes(header[-4:], "little"):
        raise BadBundleError(f"{file.path}: its header fails its check")
    magic, version, slot_ms, chunks, topics, units, log_bytes, heads_bytes, table_crc, _ = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise BadBundleError(f"{file.path}: it does not begin as a bundle does")
    if version > FORMAT_VERSION:
        raise UnknownVersionError(file.path, version, FORMAT_VERSION)
    if not 1 <= chunks <= CHUNKS_MAX:
        raise BadBundleError(f"{file.path}: it has {chunks} chunks, allowed are 1 to {CHUNKS_MAX}")
    body = file.read_at(HEADER_BYTES, chunks * TABLE.itemsize)
    if len(body) < chunks * TABLE.itemsize or google_crc32c.value(body) != table_crc:
        raise BadBundleError(f"{file.path}: its table fails its check")
    layout = Layout(slot_ms, topics, np.frombuffer(body, TABLE))
    problem = problem_of_table(layout.table, topics)
    if problem:
        raise BadBundleError(f"{file.path}: {problem}")
    sums = (layout.units, layout.index_at - layout.log_at, layout.bytes - layout.heads_at)
    if sums != (units, log_bytes, heads_bytes) or layout.bytes != size:
        raise BadBundleError(f"{file.path}: its table speaks of {layout.bytes} bytes, it has {size}")
    return layout


class _Part:
    """A stretch of a file, read as if it were one."""

    def __init__(self, file: File, at: int) -> None:
        self._file = file
        self._at = at

    @property
    def path(self) -> str:
        return self._file.path

    def read_at(self, offset: int, size: int) -> bytes:
        return self._file.read_at(self._at + offset, size)


class BundleSegment(Segment):
    """The log, the index and the heads of a bundle, read like a segment's. One user at a time; close when done."""

    def __init__(self, disk: Disk, name: str, seq: int, *, log_at: int, index_at: int, heads_at: int) -> None:
        super().__init__(disk, DIRECTORY, seq)
        self._name = name
        self._starts = {"log": log_at, "index": index_at, "heads": heads_at}

    def _reader(self, suffix: str) -> Readable:
        file = self._files.get("")
        if file is None:
            file = self._files[""] = self._disk.open(bundle_path(self._name))
        return _Part(file, self._starts[suffix])


def segment_of(disk: Disk, name: str, layout: Layout, seq: int = 0) -> BundleSegment:
    """A bundle's parts, from its layout."""
    return BundleSegment(disk, name, seq, log_at=layout.log_at, index_at=layout.index_at, heads_at=layout.heads_at)


def chunks_of(segment: Segment, layout: Layout) -> Iterator[tuple[int, Chunk, int]]:
    """Hour, chunk and first byte of its heads, for each row of the table. Raises CorruptSegmentError."""
    at = row = log_at = 0
    for hour, units, log_bytes, heads_bytes in layout.table[["hour", "units", "log_bytes", "heads_bytes"]].tolist():
        yield hour, segment.chunk_at(at, row, log_at), at
        at, row, log_at = at + heads_bytes, row + units, log_at + log_bytes


def check(disk: Disk, name: str) -> Layout:
    """Check all that a node relies on in a bundle; for a worker thread. Raises BadBundleError, DiskError kinds."""
    path = bundle_path(name)
    file = disk.open(path)
    try:
        layout = read_layout(file, file.size())
    finally:
        file.close()
    segment = segment_of(disk, name, layout)
    try:
        for row, (hour, chunk, begin) in zip(layout.table, chunks_of(segment, layout), strict=True):
            _check_chunk(path, segment, layout, row, hour, chunk, begin)
    except (DiskError, OverflowError) as error:
        raise BadBundleError(str(error)) from error
    finally:
        segment.close()
    return layout


def _check_chunk(
    path: str, segment: Segment, layout: Layout, row: np.void, hour: int, chunk: Chunk, begin: int
) -> None:
    end = chunk.places_at + 4 * chunk.count
    units = segment.rows(chunk.first_row, chunk.count).reshape(-1).view(UNIT)
    count = len(units)
    due, sizes = units["due_ms"], units["size"].astype(np.int64)
    index = np.arange(count, dtype=np.int64)
    ticks = (due - hour * HOUR_MS) // layout.slot_ms
    run_starts = np.flatnonzero(np.diff(ticks, prepend=-1))
    in_run = index - np.repeat(run_starts, np.diff(run_starts, append=count))
    sound = {
        "its chunk and its table differ": chunk.count == row["units"]
        and chunk.log_bytes == row["log_bytes"]
        and end - begin == row["heads_bytes"]
        and chunk.first_index == 0
        and chunk.log_start == 0,
        "a unit is not of its hour, or not in order": bool((due // HOUR_MS == hour).all() and (np.diff(due) >= 0).all())
        and bool((due == units["due_requested_ms"]).all()),
        "indexes or offsets are not in order": bool((units["index"] == index).all())
        and bool((units["offset"] == np.cumsum(sizes) - sizes).all())
        and int(sizes.sum()) == chunk.log_bytes,
        "a chain is wrong": bool((units["local_index"] == in_run).all())
        and bool((units["previous_index"] == np.where(in_run > 0, index - 1, NO_INDEX)).all()),
        "its heads are wrong": np.array_equal(chunk.ticks, ticks[run_starts])
        and np.array_equal(chunk.starts, np.append(run_starts, count))
        and np.array_equal(segment.places(chunk, 0, count), index),
        "a record is shorter than its meta": bool((units["meta_size"] <= sizes).all()),
        "a unit names a topic that is not in the list": bool((units["topic_id"] < layout.topics).all()),
        "a unit is not a first attempt for all groups": not any(
            units[name].any() for name in ("target_group", "attempts", "origin_hour", "origin_index")
        ),
        "a unit has flags that are not known": not (units["flags"] & ~np.uint8(ONE_TAG)).any(),
    }
    for text, is_so in sound.items():
        if not is_so:
            raise BadBundleError(f"{path}: hour {hour}: {text}")
    for at in range(0, chunk.log_bytes, 1 << 20):
        segment.read_log(chunk, at, min(1 << 20, chunk.log_bytes - at))


def name_of(pieces: list[bytes]) -> str:
    """The name that a bundle of these pieces has."""
    sha = hashlib.sha256()
    for piece in pieces:
        sha.update(piece)
    return sha.hexdigest()
