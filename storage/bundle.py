"""Bundles: finished chunks of several hours in one file, built outside a cluster, which ingests it as it is.

Owns the layout (docs/FORMATS.md): a header, a table with a row for each chunk, then the log, the index and the heads of
all chunks. Values that only the ingest decides count from 0 in each chunk (global index, log offset), or are rows of
a list that the ingest brings (topics). The index holds packed units (packed_units.py), and the heads list the ticks of
a chunk: four bytes a message instead of a hundred, because every byte goes to every node. Bundles of version 1 are
still read; their index and heads are exactly as a merge writes them to the files of a segment.

A bundle is named by the SHA-256 of its bytes and never changes. In each chunk units and records lie in the order of
the due times: the place of a unit is its index.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from tickwheel.storage.disk import Disk, DiskError, File
from tickwheel.storage.errors import UnknownVersionError
from tickwheel.storage.packed_heads import chunk_directories, is_directory, read_directory
from tickwheel.storage.packed_units import ROW_BYTES_MAX, Column, PackedIndex, index_bytes, pack
from tickwheel.storage.segment import ROW_BYTES, Chunk, Readable, Segment
from tickwheel.storage.unit import HOUR_MS, NO_INDEX, ONE_TAG

DIRECTORY = "bulk"
"""Directory in which a node keeps bundles, incoming ones included."""
SUFFIX = ".bundle"
FORMAT_VERSION = 2
UNITS_MAX = 1 << 18
"""Units of one bundle: a node may have to read them all at once if all are late."""
LOG_BYTES_MAX = 64 << 20
"""Bytes of all records of one bundle. A builder ends a bundle before it exceeds this."""
FILE_BYTES_MAX = 128 << 20
"""Bytes of a bundle's file; more than the other limits allow together."""
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
        ("row_bytes", "<u4"),  # of a packed unit, the same in all chunks; 0: units are not packed (version 1)
    ]
)
Table = NDArray[np.void]


class BadBundleError(Exception):
    """The bytes are not a valid bundle; the text says why."""


def bundle_path(name: str) -> str:
    """Path of a bundle; `name` is the SHA-256 of its bytes in hexadecimal."""
    return f"{DIRECTORY}/{name}{SUFFIX}"


def is_name(name: str) -> bool:
    """Whether the text has the form of a bundle's name."""
    return len(name) == NAME_CHARS and not set(name) - set("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of a bundle's parts, computed from its table."""

    slot_ms: int
    topics: int
    table: Table

    @property
    def units(self) -> int:
        """Number of units."""
        return int(self.table["units"].sum(dtype=np.int64))

    @property
    def row_bytes(self) -> int:
        """Bytes of a packed unit; 0: units are not packed."""
        return int(self.table["row_bytes"][0])

    @property
    def log_at(self) -> int:
        """Offset of the log."""
        return HEADER_BYTES + len(self.table) * TABLE.itemsize

    @property
    def index_at(self) -> int:
        """Offset of the index."""
        return self.log_at + int(self.table["log_bytes"].sum(dtype=np.int64))

    @property
    def heads_at(self) -> int:
        """Offset of the heads."""
        packed = self.row_bytes
        return self.index_at + (index_bytes(self.units, packed) if packed else self.units * ROW_BYTES)

    @property
    def bytes(self) -> int:
        """Bytes of the whole file."""
        return self.heads_at + int(self.table["heads_bytes"].sum(dtype=np.int64))


def problem_of_table(table: Table, topics: int) -> str:
    """What is wrong with the table of a bundle; empty: nothing."""
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
    row_bytes = table["row_bytes"]
    if (row_bytes != row_bytes[0]).any() or int(row_bytes[0]) > ROW_BYTES_MAX:
        return f"its packed units have more than {ROW_BYTES_MAX} bytes, or another size in each chunk"
    return ""


def build(
    columns: Mapping[str, Column] | NDArray[np.void], records: bytes, *, slot_ms: int, topics: int
) -> list[bytes]:
    """The pieces of a bundle, to be written one after the other.

    `columns`: of units (UNIT) sorted by due_requested_ms. Used are due_requested_ms, size, meta_size, topic_id (below
    `topics`), tag_hash, tag_mask, flags and key_hash; an absent column counts as 0. `records`: meta and payload of each
    unit, in that order. Raises BadBundleError if a limit is exceeded.
    """
    due = np.ascontiguousarray(columns["due_requested_ms"], np.int64)
    count = len(due)
    sizes = columns["size"].astype(np.int64)
    ends = np.cumsum(sizes)
    if not 1 <= count <= UNITS_MAX:
        raise BadBundleError(f"it has {count} units, allowed are 1 to {UNITS_MAX}")
    if int(ends[-1]) != len(records) or (np.diff(due) < 0).any():
        raise BadBundleError("the units are not sorted by due time, or their records have other lengths")
    ticks = due // slot_ms
    run_starts = np.flatnonzero(np.diff(ticks, prepend=-1))
    run_ticks = ticks[run_starts]
    run_hours = run_ticks // (HOUR_MS // slot_ms)
    edges = np.flatnonzero(np.diff(run_hours, prepend=-1, append=-1))
    starts = np.append(run_starts, count)[edges]
    log_starts = np.append(0, ends)[starts]
    in_tick = due - np.repeat(run_ticks * slot_ms, np.diff(run_starts, append=count))
    index = pack(columns, in_tick, ends - sizes, slot_ms)

    table = np.zeros(len(edges) - 1, TABLE)
    table["hour"] = run_hours[edges[:-1]]
    table["units"] = np.diff(starts)
    table["log_bytes"] = np.diff(log_starts)
    table["row_bytes"] = len(index[1]) // count
    heads = chunk_directories(
        table, edges, (run_ticks % (HOUR_MS // slot_ms)).astype(np.uint32), np.diff(run_starts, append=count), records
    )
    table["heads_bytes"] = list(map(len, heads))
    problem = problem_of_table(table, topics)
    if problem:
        raise BadBundleError(problem)
    body = table.tobytes()
    header = _HEADER.pack(
        _MAGIC,
        FORMAT_VERSION,
        slot_ms,
        len(table),
        topics,
        count,
        len(records),
        sum(map(len, heads)),
        google_crc32c.value(body),
        0,
    )
    header = header[:-4] + google_crc32c.value(header[:-4]).to_bytes(4, "little")
    return [header + body, records, *index, b"".join(heads)]


def read_layout(file: Readable, size: int) -> Layout:
    """Read and check header and table of a bundle of `size` bytes. Raises BadBundleError, UnknownVersionError."""
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
    if (version > 1) != bool(layout.row_bytes):
        raise BadBundleError(f"{file.path}: its units are not of version {version}, as its header is")
    sums = (layout.units, layout.index_at - layout.log_at, layout.bytes - layout.heads_at)
    if sums != (units, log_bytes, heads_bytes) or layout.bytes != size:
        raise BadBundleError(f"{file.path}: by its table it has {layout.bytes} bytes, but it has {size}")
    return layout


class _Part:
    """A range of a file, readable like a file."""

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
        self._index: PackedIndex | None = None

    def _reader(self, suffix: str) -> Readable:
        file = self._files.get("")
        if file is None:
            file = self._files[""] = self._disk.open(bundle_path(self._name))
        return _Part(file, self._starts[suffix])

    @property
    def index(self) -> PackedIndex:
        """The packed units."""
        if self._index is None:
            self._index = PackedIndex(self._reader("index"))
        return self._index

    def close(self) -> None:
        super().close()
        self._index = None

    def chunk_at(self, at: int, first_row: int, log_at: int) -> Chunk:
        file = self._reader("heads")
        if not is_directory(file, at):
            return super().chunk_at(at, first_row, log_at)
        return read_directory(file, at, self.seq, first_row, log_at)

    def heads_end(self, chunk: Chunk) -> int:
        return chunk.places_at if chunk.built is not None else super().heads_end(chunk)

    def units_of(self, chunk: Chunk, first: int, count: int) -> NDArray[np.void]:
        if chunk.built is None:
            return super().units_of(chunk, first, count)
        return self.index.units_of(chunk.built, chunk.first_row, chunk.log_at, first, count)

    def places(self, chunk: Chunk, index_min: int, index_max: int) -> NDArray[np.uint32]:
        if chunk.built is None:
            return super().places(chunk, index_min, index_max)
        return np.arange(index_min - chunk.first_index, index_max - chunk.first_index, dtype=np.uint32)


def segment_of(disk: Disk, name: str, layout: Layout, seq: int = 0) -> BundleSegment:
    """Open a bundle whose layout is known."""
    return BundleSegment(disk, name, seq, log_at=layout.log_at, index_at=layout.index_at, heads_at=layout.heads_at)


def chunks_of(segment: Segment, layout: Layout) -> Iterator[tuple[int, Chunk, int]]:
    """(hour, chunk, offset of its heads) for each row of the table. Raises CorruptSegmentError."""
    at = row = log_at = 0
    for hour, units, log_bytes, heads_bytes in layout.table[["hour", "units", "log_bytes", "heads_bytes"]].tolist():
        yield hour, segment.chunk_at(at, row, log_at), at
        at, row, log_at = at + heads_bytes, row + units, log_at + log_bytes


def check(disk: Disk, name: str) -> Layout:
    """Check everything in a bundle that a node relies on; for a worker thread. Raises BadBundleError, DiskError."""
    path = bundle_path(name)
    file = disk.open(path)
    try:
        layout = read_layout(file, file.size())
    finally:
        file.close()
    segment = segment_of(disk, name, layout)
    try:
        if layout.row_bytes:
            index = segment.index
            said = (layout.slot_ms, layout.units, layout.row_bytes)
            if said != (index.slot_ms, index.units, index.row_bytes):
                raise BadBundleError(f"{path}: its index and its table differ")
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
    end = segment.heads_end(chunk)
    units = segment.units_of(chunk, 0, chunk.count)
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


def name_of(pieces: Iterable[bytes]) -> str:
    """The name of the bundle that these pieces make."""
    sha = hashlib.sha256()
    for piece in pieces:
        sha.update(piece)
    return sha.hexdigest()
