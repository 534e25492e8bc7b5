"""Event files: events of messages on one node, as columns by batch; bounded, and not fsynced.

Owns the bytes of `<directory>/<seq>.events` (docs/FORMATS.md), their writer and their reader. A node writes them for
`tickwheel trace`; audits read them without knowing node/. They are a record for people, not a source of truth: after a
crash the last moment is missing, and the oldest files are removed at the bound.

Invariants: a record is written whole and carries its CRC32C; a second writer never appends to a file; a record with a
wrong checksum ends the file for the reader, never the reading.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from tickwheel.storage.disk import Disk, DiskError, File

FORMAT_VERSION = 1
FILE_BYTES = 16 << 20
"""A file that has grown to this is followed by a new one."""
TEXT_BYTES_MAX = 0xFFFF
TOPICS_A_RECORD = 256
"""Topics in one record; their names fit into its texts."""
SUFFIX = ".events"

_MAGIC = b"TWEV"
_HEADER = struct.Struct("<4sBBBBIIqqQQHHI")
"""Magic, version, kind, columns, detail, count, body bytes, at_ms, stamped_ms, term, log index, text bytes, reserved,
CRC32C of the header up to here, text and body."""
_CRC = struct.Struct("<I")
_FACTS = struct.Struct("<4sBBBBIIqqQQHH")
"""The header without its CRC."""
_COLUMN = struct.Struct("<BxxxxxxxQq")
"""Width in bytes of the offsets that follow (0: none; each value is the previous one plus the step), base, step."""

_WIDTHS = np.array([1, 2, 4, 8])
_SPANS_MAX = np.array([(1 << 8 * width) - 1 for width in (1, 2, 4)], np.uint64)
"""The largest offsets of all widths but the last."""
_DTYPES = {width: np.dtype(f"<u{width}") for width in _WIDTHS.tolist()}
_MODULUS = 1 << 64
SMALL_MAX = 48
"""Rows of a record that a search decodes without a look: less would not save the time that the look takes."""


class EventKind(enum.IntEnum):
    """Kind of a record, with its columns in their order."""

    SCHEDULED = 1
    """id, due_ms, topic_id: proposed at stamped_ms, applied here (so committed) at at_ms. Texts: `id=name` of each."""
    DISPATCHED = 2
    """id, unit: entered the ready queue. Texts: topic. `unit` is the id of the unit that left the wheel: for a retry,
    and after a move, not the id of the message."""
    DELIVERED = 3
    """id, due_ms, attempt: handed to a consumer. Texts: topic, group, name of the consumer."""
    SETTLED = 4
    """unit, attempt: `detail` is the SettleKind of log.proto. Texts: topic, group, reason. The unit's DISPATCHED record
    says which message it is; attempts count from 1 for each unit."""
    CANCELLED = 5
    """id"""
    MOVED = 6
    """id, new_id, due_ms"""
    LEADS = 7
    """No columns. This node became master of `term`. Texts: its id."""
    LOST = 8
    """No columns. `count` records of this node were left out: they came too fast to be written, or a write failed."""
    LOADED = 9
    """hour, first_index, units, clamp_ms of each chunk of an ingested bundle, in the order of its rows.
    Texts: the bundle's name, its topics. loaded_events.py makes SCHEDULED records of it."""
    GROUP = 10
    """due_ms, one row for each topic: `detail` is the GroupChange. Texts: group, its filter, topics. Of the messages
    dispatched before this entry, the group gets those due from this time on. 0: all that are kept; FROM_NOW_MS:
    none."""


class GroupChange(enum.IntEnum):
    """Kind of a GROUP record; these decide which messages a group must get."""

    SUBSCRIBED = 1
    """For topics that the group already has, nothing changes."""
    RESET = 2
    FILTERED = 3
    """Has no start: the start stays as it is."""
    DELETED = 4
    """Without a group: the topics were deleted."""
    REMOVED = 5
    """Without group and topic: messages due before this time are no longer kept."""
    BROADCASTING = 6
    """Every consumer of the group gets every message; an absent consumer misses some."""


FROM_NOW_MS = 1 << 62


COLUMNS: Mapping[EventKind, tuple[str, ...]] = {
    EventKind.SCHEDULED: ("id", "due_ms", "topic_id"),
    EventKind.DISPATCHED: ("id", "unit"),
    EventKind.DELIVERED: ("id", "due_ms", "attempt"),
    EventKind.SETTLED: ("unit", "attempt"),
    EventKind.CANCELLED: ("id",),
    EventKind.MOVED: ("id", "new_id", "due_ms"),
    EventKind.LEADS: (),
    EventKind.LOST: (),
    EventKind.LOADED: ("hour", "first_index", "units", "clamp_ms"),
    EventKind.GROUP: ("due_ms",),
}

_LAYOUTS: Mapping[int, tuple[EventKind, tuple[str, ...]]] = {
    **{kind: (kind, names) for kind, names in COLUMNS.items()},
    11: (EventKind.DISPATCHED, (*COLUMNS[EventKind.DISPATCHED], "topic")),
    12: (EventKind.DELIVERED, (*COLUMNS[EventKind.DELIVERED], "topic")),
    13: (EventKind.SETTLED, (*COLUMNS[EventKind.SETTLED], "topic")),
}
"""Kind and columns by the number in the header. 11 to 13 are several records that are alike but for their topic: the
topics follow the other texts, and a last column has the place of each row's topic among them."""
_OF_TOPICS = {kind: number for number, (kind, _) in _LAYOUTS.items() if number not in COLUMNS}
_OTHER_TEXTS = {EventKind.DISPATCHED: 0, EventKind.DELIVERED: 2, EventKind.SETTLED: 2}
"""Texts beside the topic, which is the first in a record of its own."""

Column = NDArray[np.uint64]


class EventRecords(NamedTuple):
    """Records to be written one behind the other, of one kind and one moment; the facts are those of `EventRecord`.
    Columns are uint64, and hold the rows of all records in their order. Those of several topics that are alike
    otherwise are written together, without those that have no rows."""

    kind: EventKind
    at_ms: int
    stamped_ms: int = 0
    term: int = 0
    log_index: int = 0
    parts: Sequence[tuple[int, int, Sequence[str]]] = ()
    """Detail, count and texts of each record."""
    columns: Mapping[str, Column] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class EventRecord:
    """One batch of events, as it is read. Columns are uint64[count]; due times are never negative."""

    kind: EventKind
    at_ms: int
    """Cluster time on the node that wrote the record."""
    stamped_ms: int = 0
    """Stamp of the master's proposal; 0: does not apply."""
    term: int = 0
    log_index: int = 0
    detail: int = 0
    count: int = 0
    texts: Sequence[str] = ()
    columns: Mapping[str, Column] = field(default_factory=dict)


# -- bytes


ENCODED_TOGETHER = 8_192
"""Values from which on what follows is encoded by itself: arrays of more would leave the processor's cache."""


def _encode_columns(columns: Sequence[Column], counts: Sequence[int]) -> list[bytes]:
    """For each record of each column its part of the record's body. `counts`: how many values each has. Array functions
    take all of them at once, since most have few values."""
    if counts.count(1) == len(counts):
        return [_COLUMN.pack(0, value, 0) for column in columns for value in column.tolist()]
    values = np.concatenate(columns)
    lengths = np.array(counts)
    begins = lengths.cumsum() - lengths
    filled = lengths.nonzero()[0]
    widths, bases, steps = np.zeros((3, len(counts)), np.int64)
    offsets: dict[int, bytes] = {}
    if len(filled):
        rows, starts = lengths[filled], begins[filled]
        signed = values.view(np.int64)
        between = np.zeros(len(values), np.int64)
        np.subtract(signed[1:], signed[:-1], out=between[1:])
        step = np.where(rows > 1, between[np.minimum(starts + 1, len(values) - 1)], 0)
        between[starts] = step
        even = np.logical_and.reduceat(between == step.repeat(rows), starts)
        low = np.minimum.reduceat(values, starts)
        span = np.maximum.reduceat(values, starts) - low
        widths[filled] = width = np.where(even, 0, _WIDTHS[_SPANS_MAX.searchsorted(span)])
        bases[filled] = np.where(even, values[starts], low).view(np.int64)
        steps[filled] = np.where(even, step, 0)
        above = values - low.repeat(rows)
        offsets = {each: above.astype(_DTYPES[each]).tobytes() for each in set(width.tolist()) if each}
    heads = zip(widths.tolist(), bases.view(np.uint64).tolist(), steps.tolist(), begins.tolist(), counts, strict=True)
    return [
        _COLUMN.pack(width, base, step) + (offsets[width][width * begin : width * (begin + count)] if width else b"")
        for width, base, step, begin, count in heads
    ]


def _decode_column(body: bytes, at: int, count: int) -> tuple[Column, int]:
    width, base, step = _COLUMN.unpack_from(body, at)
    at += _COLUMN.size
    if width == 0:
        run = np.arange(count, dtype=np.int64) * step
        return run.view(np.uint64) + np.uint64(base), at
    offsets = np.frombuffer(body, f"<u{width}", count, at)
    return offsets.astype(np.uint64) + np.uint64(base), at + width * count


def _together(batch: EventRecords) -> Iterator[tuple[int, EventRecords]]:
    """The records of a batch as they are written, each with its number for the header."""
    if batch.kind not in _OF_TOPICS or len(batch.parts) == 1:
        yield batch.kind, batch
        return
    row = 0
    for (detail, others), alike in groupby(batch.parts, lambda part: (part[0], tuple(part[2][1:]))):
        parts = list(alike)
        for at in range(0, len(parts), TOPICS_A_RECORD):
            some = parts[at : at + TOPICS_A_RECORD]
            counts = [count for _, count, _ in some]
            first, row = row, row + sum(counts)
            columns = {name: values[first:row] for name, values in batch.columns.items()}
            if len(some) == 1:
                yield batch.kind, batch._replace(parts=some, columns=columns)
                continue
            columns["topic"] = np.arange(len(some), dtype=np.uint64).repeat(counts)
            texts = (*others, *(texts[0] for _, _, texts in some))
            yield _OF_TOPICS[batch.kind], batch._replace(parts=[(detail, row - first, texts)], columns=columns)


def encode(batches: Sequence[EventRecords]) -> bytes:
    """The bytes of records in their order."""
    written = [each for batch in batches for each in _together(batch)]
    encoded: list[bytes] = []
    """Of each batch: the parts of its first column, a part for each record, then those of the second, and so on."""
    columns: list[Column] = []
    counts: list[int] = []
    values = 0
    for number, batch in written:
        rows = [count for _, count, _ in batch.parts]
        for name in _LAYOUTS[number][1]:
            columns.append(batch.columns[name])
            counts += rows
            values += len(columns[-1])
        if values >= ENCODED_TOGETHER:
            encoded += _encode_columns(columns, counts)
            columns, counts, values = [], [], 0
    encoded += _encode_columns(columns, counts)
    pieces: list[bytes] = []
    at = 0
    for number, (_, at_ms, stamped_ms, term, log_index, parts, _) in written:
        names = _LAYOUTS[number][1]
        end = at + len(names) * len(parts)
        for place, (detail, count, texts) in enumerate(parts):
            text, body = "\0".join(texts).encode()[:TEXT_BYTES_MAX], b"".join(encoded[at + place : end : len(parts)])
            facts = _FACTS.pack(
                _MAGIC,
                FORMAT_VERSION,
                number,
                len(names),
                detail,
                count,
                len(body),
                at_ms,
                stamped_ms,
                term,
                log_index,
                len(text),
                0,
            )
            content = text + body
            pieces += (facts, _CRC.pack(google_crc32c.value(facts + content)), content)
        at = end
    return b"".join(pieces)


class _Header(NamedTuple):
    """Of a complete and correct record: what its header says, and where its parts lie."""

    kind: int
    columns: int
    detail: int
    rows: int
    at_ms: int
    stamped_ms: int
    term: int
    log_index: int
    text_at: int
    body_at: int
    end: int


def _header_at(data: bytes, at: int) -> _Header | None:
    """None: there is no complete and correct record at this offset."""
    text_at = at + _HEADER.size
    if text_at > len(data):
        return None
    magic, version, kind, columns, detail, count, body_bytes, at_ms, stamped_ms, term, index, text_bytes, _, crc = (
        _HEADER.unpack_from(data, at)
    )
    body_at = text_at + text_bytes
    end = body_at + body_bytes
    if magic != _MAGIC or version > FORMAT_VERSION or end > len(data):
        return None
    if google_crc32c.value(data[at : text_at - 4] + data[text_at:end]) != crc:
        return None
    return _Header(kind, columns, detail, count, at_ms, stamped_ms, term, index, text_at, body_at, end)


def decode(data: bytes, at: int) -> tuple[list[EventRecord], int] | None:
    """The records at offset `at`, and the offset of the next; None: there is no complete and correct record."""
    header = _header_at(data, at)
    return None if header is None else (_records(data, header), header.end)


def _records(data: bytes, header: _Header, ids: Sequence[int] | None = None) -> list[EventRecord]:
    """What was written together: one record for each topic, with `ids` only those that name one of them."""
    if header.kind not in _LAYOUTS:
        return [EventRecord(EventKind.LOST, header.at_ms)]  # of a kind that a later version added: passed over
    kind, names = _LAYOUTS[header.kind]
    values: dict[str, Column] = {}
    place = header.body_at
    for name in names[: header.columns]:
        values[name], place = _decode_column(data, place, header.rows)
    text = data[header.text_at : header.body_at].decode(errors="replace")
    texts = text.split("\0") if text else []
    facts = kind, header.at_ms, header.stamped_ms, header.term, header.log_index, header.detail
    if header.kind in COLUMNS:
        return [EventRecord(*facts, header.rows, texts, values)]
    topics, wanted = values.pop("topic"), None
    if ids is not None:
        named = np.array(ids, np.uint64)
        rows = np.logical_or.reduce([np.isin(values[name], named) for name in values if name in NAMING])
        wanted = set(topics[rows].tolist())
    others = texts[: _OTHER_TEXTS[kind]]
    cuts = [0, *((topics[1:] != topics[:-1]).nonzero()[0] + 1).tolist(), len(topics)]
    return [
        EventRecord(
            *facts,
            last - first,
            [*texts[len(others) + topic : len(others) + topic + 1], *others],
            {name: column[first:last] for name, column in values.items()},
        )
        for first, last, topic in zip(cuts, cuts[1:], topics[cuts[:-1]].tolist(), strict=False)
        if wanted is None or topic in wanted
    ]


# -- files


def paths(disk: Disk, directory: str) -> list[str]:
    """Event files, oldest first."""
    names = [name for name in disk.list(directory) if name.endswith(SUFFIX) and name[: -len(SUFFIX)].isdecimal()]
    return [f"{directory}/{name}" for name in sorted(names, key=lambda name: int(name[: -len(SUFFIX)]))]


def read_events(disk: Disk, path: str) -> Iterator[EventRecord]:
    """Records of one file in order, up to its end or to a torn or damaged record. Empty if the file is gone."""
    data, at = content(disk, path), 0
    while (found := decode(data, at)) is not None:
        records, at = found
        yield from records


Offsets = NDArray[np.uint32]
BLOCK_ROWS = 1 << 16
BLOCK_RECORDS = 1 << 10
"""A block of records ends at either."""
SPANS_MIN = 16
ROWS_A_SPAN = 16
READ_BYTES = 1 << 20
"""Records that lie side by side are read together, up to this."""
NAMING = ("id", "new_id", "unit")
"""Columns that name messages."""


def _no_offsets() -> Offsets:
    return np.zeros(0, np.uint32)


def _no_ids() -> Column:
    return np.zeros(0, np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where the records of one file are, and which ids each may hold. Immutable.

    A record is known by its lowest and highest id: 24 bytes a record. That does not rule out a record whose messages
    are due in many hours. But in each hour ids rise as messages arrive, so consecutive records (a block) cover a narrow
    span of each hour. A block is known by these spans, 20 bytes each. It has at most as many spans as records, or one
    for ROWS_A_SPAN ids. If it has ids of more hours than that, a span covers several hours.
    """

    end: int = 0
    """Behind the last complete record."""
    first_ms: int = 0
    """Time of the first record; 0: there is none."""
    lost: int = 0
    """Records that the writer left out."""
    begins: Offsets = field(default_factory=_no_offsets)
    ends: Offsets = field(default_factory=_no_offsets)
    """Of the records that name messages, rising."""
    low: Column = field(default_factory=_no_ids)
    high: Column = field(default_factory=_no_ids)
    """For each a lower and an upper bound of its ids; of a record of a bundle, of all ids."""
    blocks: Offsets = field(default_factory=_no_offsets)
    """Place of the first record of each block in `begins`."""
    span_blocks: Offsets = field(default_factory=_no_offsets)
    span_low: Column = field(default_factory=_no_ids)
    span_high: Column = field(default_factory=_no_ids)
    """For each span its block, and its lowest and highest id."""

    def of(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """Begin and end of the records that may hold one of the ids, rising."""
        hit = np.zeros(len(self.blocks), np.bool_)
        for number in ids:
            inside = (self.span_low <= np.uint64(number)) & (self.span_high >= np.uint64(number))
            hit[self.span_blocks[inside]] = True
        ends = np.append(self.blocks[1:], np.uint32(len(self.begins)))
        found: list[tuple[int, int]] = []
        for block in np.flatnonzero(hit).tolist():
            rows = slice(int(self.blocks[block]), int(ends[block]))
            low, high = self.low[rows], self.high[rows]
            may = np.zeros(len(low), np.bool_)
            for number in ids:
                may |= (low <= np.uint64(number)) & (high >= np.uint64(number))
            found += zip(self.begins[rows][may].tolist(), self.ends[rows][may].tolist(), strict=True)
        return found


class _Growing:
    """What one search adds to the known places of a file, block by block."""

    def __init__(self, known: Places) -> None:
        self._known = known
        self._records: list[tuple[int, int, int, int]] = []
        self._blocks: list[int] = []
        self._first = 0
        self._ids: list[Column] = []
        self._rows = 0
        self._spans: list[tuple[Offsets, Column, Column]] = []

    def add_any(self, begin: int, end: int) -> None:
        """A record that may name any message: a block of its own."""
        self._close()
        self._records.append((begin, end, 0, _MODULUS - 1))
        self._put_block(np.zeros(1, np.uint64), np.full(1, _MODULUS - 1, np.uint64))

    def add(self, begin: int, end: int, ids: Sequence[Column]) -> None:
        """A record that names these messages."""
        low, high = min(int(part.min()) for part in ids), max(int(part.max()) for part in ids)
        self._records.append((begin, end, low, high))
        self._ids += ids
        self._rows += sum(map(len, ids))
        if self._rows >= BLOCK_ROWS or len(self._records) - self._first >= BLOCK_RECORDS:
            self._close()

    def _close(self) -> None:
        records = len(self._records) - self._first
        if not records:
            return
        self._put_block(*_spans(np.concatenate(self._ids), max(SPANS_MIN, records, self._rows // ROWS_A_SPAN)))

    def _put_block(self, low: Column, high: Column) -> None:
        number = len(self._known.blocks) + len(self._blocks)
        self._spans.append((np.full(len(low), number, np.uint32), low, high))
        self._blocks.append(len(self._known.begins) + self._first)
        self._first, self._ids, self._rows = len(self._records), [], 0

    def done(self, end: int, first_ms: int, lost: int) -> Places:
        """The places with what was added."""
        self._close()
        known = self._known
        begins, ends, low, high = list(zip(*self._records, strict=True)) or [(), (), (), ()]
        return Places(
            end,
            first_ms,
            lost,
            np.concatenate([known.begins, np.array(begins, np.uint32)]),
            np.concatenate([known.ends, np.array(ends, np.uint32)]),
            np.concatenate([known.low, np.array(low, np.uint64)]),
            np.concatenate([known.high, np.array(high, np.uint64)]),
            np.concatenate([known.blocks, np.array(self._blocks, np.uint32)]),
            np.concatenate([known.span_blocks, *(blocks for blocks, _, _ in self._spans)]),
            np.concatenate([known.span_low, *(low for _, low, _ in self._spans)]),
            np.concatenate([known.span_high, *(high for _, _, high in self._spans)]),
        )


def _spans(ids: Column, count_max: int) -> tuple[Column, Column]:
    """The lowest and the highest of the ids of each hour, or of each few hours if there were more than `count_max`."""
    first, last, bits = int(ids.min()), int(ids.max()), 32
    while (last >> bits) - (first >> bits) >= count_max:
        bits += 1
    count = (last >> bits) - (first >> bits) + 1
    hours = ((ids >> np.uint64(bits)) - np.uint64(first >> bits)).astype(np.intp)
    low, high = np.full(count, _MODULUS - 1, np.uint64), np.zeros(count, np.uint64)
    np.minimum.at(low, hours, ids)
    np.maximum.at(high, hours, ids)
    used = low <= high
    return low[used], high[used]


def locate(disk: Disk, path: str, known: Places) -> Places:
    """The records of a file, of which those up to `known.end` are known already. As far as `read_events` reads it."""
    data = content(disk, path, known.end)
    growing = _Growing(known)
    at, first_ms, lost = 0, known.first_ms, known.lost
    while (header := _header_at(data, at)) is not None:
        first_ms = first_ms or header.at_ms
        begin, end = known.end + at, known.end + header.end
        if header.kind == EventKind.LOST:
            lost += header.rows
        elif header.kind == EventKind.LOADED:
            growing.add_any(begin, end)
        elif header.kind in _LAYOUTS and header.rows and (ids := list(_naming(data, header))):
            growing.add(begin, end, ids)
        at = header.end
    return growing.done(known.end + at, first_ms, lost) if at else known


def _naming(data: bytes, header: _Header) -> Iterator[Column]:
    """The columns of a record that name messages, without those that repeat the previous one."""
    seen = b""
    at = header.body_at
    for name in _LAYOUTS[header.kind][1][: header.columns]:
        if name in NAMING:
            values, end = _decode_column(data, at, header.rows)
            stored = data[at:end]
            if stored != seen:
                yield values
            seen = stored
        else:
            end = at + _COLUMN.size + _COLUMN.unpack_from(data, at)[0] * header.rows
        at = end


def holding(disk: Disk, path: str, places: Places, ids: Sequence[int]) -> Iterator[EventRecord]:
    """The records of a file that may hold one of the ids: all that do, and a few others. Only these are read and
    decoded. Nothing if the file is gone."""
    found = places.of(ids)
    if not found:
        return
    try:
        file = disk.open(path)
    except DiskError:
        return
    try:
        yield from _holding(file, found, ids)
    except DiskError:
        return
    finally:
        file.close()


def _holding(file: File, found: Sequence[tuple[int, int]], ids: Sequence[int]) -> Iterator[EventRecord]:
    row = 0
    while row < len(found):
        first, last = row, row + 1
        while (
            last < len(found)
            and found[last][0] == found[last - 1][1]
            and found[last][1] - found[first][0] <= READ_BYTES
        ):
            last += 1
        begin, end = found[first][0], found[last - 1][1]
        data = file.read_at(begin, end - begin)
        if len(data) < end - begin:
            return
        for at, _ in found[first:last]:
            header = _header_at(data, at - begin)  # None: damaged since it was located
            if header is not None and _may_hold(data, header, ids):
                yield from _records(data, header, ids)
        row = last


def _may_hold(data: bytes, header: _Header, ids: Sequence[int]) -> bool:
    if header.kind == EventKind.LOADED or header.rows <= SMALL_MAX:
        return True
    at = header.body_at
    for name in _LAYOUTS[header.kind][1][: header.columns]:
        width, base, _ = _COLUMN.unpack_from(data, at)
        at += _COLUMN.size
        if name in NAMING:
            if width == 0:
                return True
            offsets = np.frombuffer(data, _DTYPES[width], header.rows, at)
            for number in ids:
                if 0 <= number - base < 1 << 8 * width and np.count_nonzero(offsets == number - base):
                    return True
        at += width * header.rows
    return False


def newest_index(disk: Disk, directory: str) -> int:
    """Index of the last log entry in the files; 0: none. Reads from the newest file on, without columns."""
    for path in reversed(paths(disk, directory)):
        newest = _newest_index(content(disk, path))
        if newest:
            return newest
    return 0


def content(disk: Disk, path: str, begin: int = 0) -> bytes:
    """The bytes of a file from offset `begin` on; none if it is gone or cannot be read."""
    try:
        file = disk.open(path)
        try:
            return file.read_at(begin, max(0, file.size() - begin))
        finally:
            file.close()
    except DiskError:
        return b""


def _newest_index(data: bytes) -> int:
    at = newest = 0
    while (header := _header_at(data, at)) is not None:
        newest, at = max(newest, header.log_index), header.end
    return newest


class EventWriter:
    """Appends records and keeps the files bounded. Called by workers, one call after the other."""

    def __init__(self, disk: Disk, directory: str, bytes_max: int) -> None:
        """Existing files stay, and count towards `bytes_max`."""
        self._disk = disk
        self._directory = directory
        self._bytes_max = bytes_max
        self._file: File | None = None
        self._path = ""
        self._file_bytes = 0
        self._sizes: dict[str, int] | None = None
        self._next = 0

    def append(self, batches: Sequence[EventRecords]) -> int:
        """Write records; returns the number of bytes. Raises DiskError; records written before stay readable."""
        data = encode(batches)
        if self._file is None or self._file_bytes + len(data) > min(FILE_BYTES, max(1, self._bytes_max // 4)):
            self._begin_file()
        assert self._file is not None and self._sizes is not None
        self._file.append(data)
        self._file_bytes += len(data)
        self._sizes[self._path] = self._file_bytes
        self._remove_old()
        return len(data)

    def _begin_file(self) -> None:
        self.close()
        if self._sizes is None:
            found = paths(self._disk, self._directory)
            self._sizes = {path: self._disk.size(path) for path in found}
            self._next = 1 + max((int(path.rpartition("/")[2][: -len(SUFFIX)]) for path in found), default=0)
        self._path = f"{self._directory}/{self._next}{SUFFIX}"
        self._file = self._disk.open(self._path, create=True)
        self._next += 1
        self._file_bytes = 0

    def _remove_old(self) -> None:
        sizes = self._sizes
        assert sizes is not None
        while len(sizes) > 1 and sum(sizes.values()) > self._bytes_max:
            oldest = next(iter(sizes))
            self._disk.remove(oldest)
            del sizes[oldest]

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None
