"""Packed units: the columns of a bundle's units in as few bytes as they need.

Owns the layout of a bundle's index (docs/FORMATS.md). Of the 96 bytes of a unit, a bundle keeps only the fields that do
not follow from others. Place and chains follow from the row, the tick of a due time from the chunk's directory, and
offsets from the sizes. A column has a base, and for each row the difference to it in 0, 1, 2, 4 or 8 bytes; with 0
bytes all rows have the base.

Rows lie in blocks of BLOCK_ROWS. For each block the directory has the CRC32C and the start of its rows' records, so
rows can be read without those before them. A wrong checksum is reported, and such rows are never returned.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from tickwheel.storage.segment import CorruptSegmentError, Readable, Ticks
from tickwheel.storage.unit import HOUR_MS, NO_INDEX, UNIT

Column = NDArray[Any]

DUE_IN_TICK = "due_in_tick_ms"
KEPT = ("size", "meta_size", "topic_id", "tag_hash", "tag_mask", "key_hash", "flags")
"""Columns that are kept with a unit's values."""
COLUMNS = (DUE_IN_TICK, *KEPT)
"""All kept columns: the due time counts from the start of its tick."""
BLOCK_ROWS = 1_024
ROW_BYTES_MAX = 8 * len(COLUMNS)

BLOCK = np.dtype([("crc", "<u4"), ("log_offset", "<u4")])
_WIDTHS = (0, 1, 2, 4, 8)
_HEAD = struct.Struct(f"<4sII{len(COLUMNS)}B{len(COLUMNS)}QI")  # magic slot_ms units widths bases crc(head, directory)
_MAGIC = b"TWPU"


def blocks_of(units: int) -> int:
    """Number of blocks for this number of rows."""
    return -(-units // BLOCK_ROWS)


def index_bytes(units: int, row_bytes: int) -> int:
    """Bytes of the whole index: head, directory, rows."""
    return _HEAD.size + blocks_of(units) * BLOCK.itemsize + units * row_bytes


def width_of(value_max: int) -> int:
    """Bytes per value for numbers up to `value_max`: 0, 1, 2, 4 or 8."""
    return next(width for width in _WIDTHS if value_max >> (8 * width) == 0)


@dataclass(frozen=True, slots=True)
class _Packing:
    """The columns' widths and bases, from the head."""

    slot_ms: int
    widths: tuple[int, ...]
    bases: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype[np.void]:
        """Type of a row: the columns that vary."""
        kept = [(name, f"<u{width}") for name, width in zip(COLUMNS, self.widths, strict=True) if width]
        return np.dtype(kept)

    def column(self, rows: NDArray[np.void], name: str) -> NDArray[np.uint64] | np.uint64:
        """Values of a column in some rows; a single value if it is the same in all."""
        place = COLUMNS.index(name)
        base = np.uint64(self.bases[place])
        return rows[name].astype(np.uint64) + base if self.widths[place] else base


def pack(columns: Mapping[str, Column] | Column, due_in_tick: Column, log_offsets: Column, slot_ms: int) -> list[bytes]:
    """The index of units: head with directory, then rows. `columns`: those of KEPT that are not 0 in all units.

    `log_offsets`: start of each unit's record in the bundle's log.
    """
    count = len(due_in_tick)
    known = set(columns.dtype.names or ()) if isinstance(columns, np.ndarray) else set(columns)
    widths, bases, above = [], [], {}
    for name in COLUMNS:
        if name != DUE_IN_TICK and name not in known:
            widths.append(0)
            bases.append(0)
            continue
        column: Column = due_in_tick if name == DUE_IN_TICK else columns[name]
        low = int(column.min())
        # A row has at least one byte: the number of empty rows would say nothing.
        width = max(int(name == DUE_IN_TICK), width_of(int(column.max()) - low))
        widths.append(width)
        bases.append(low)
        if width:
            above[name] = column - column.dtype.type(low) if low else column
    packing = _Packing(slot_ms, tuple(widths), tuple(bases))
    rows = np.empty(count, packing.dtype)
    for name, column in above.items():
        rows[name] = column
    content = rows.tobytes()
    row_bytes = packing.dtype.itemsize
    directory = np.zeros(blocks_of(count), BLOCK)
    directory["log_offset"] = log_offsets[::BLOCK_ROWS]
    step = BLOCK_ROWS * row_bytes
    directory["crc"] = [google_crc32c.value(content[at : at + step]) for at in range(0, len(content), step)]
    head = _HEAD.pack(_MAGIC, slot_ms, count, *packing.widths, *packing.bases, 0)[:-4]
    crc = google_crc32c.extend(google_crc32c.value(head), directory.tobytes())
    return [head + crc.to_bytes(4, "little") + directory.tobytes(), content]


class PackedIndex:
    """The index of a bundle, open for reading."""

    def __init__(self, file: Readable) -> None:
        """`file` begins at the index. Raises CorruptSegmentError."""
        self._file = file
        head = file.read_at(0, _HEAD.size)
        if len(head) < _HEAD.size or head[:4] != _MAGIC:
            raise CorruptSegmentError(file.path, 0, "the index does not begin as one of packed units")
        _, slot_ms, self.units, *rest, crc = _HEAD.unpack(head)
        self._rows_at = _HEAD.size + blocks_of(self.units) * BLOCK.itemsize
        directory = file.read_at(_HEAD.size, self._rows_at - _HEAD.size)
        if google_crc32c.extend(google_crc32c.value(head[:-4]), directory) != crc:
            raise CorruptSegmentError(file.path, 0, "the head of the index does not match its CRC")
        self._directory = np.frombuffer(directory, BLOCK)
        self._packing = _Packing(slot_ms, tuple(rest[: len(COLUMNS)]), tuple(rest[len(COLUMNS) :]))
        if not set(self._packing.widths) <= set(_WIDTHS):
            raise CorruptSegmentError(file.path, 0, f"columns of {self._packing.widths} bytes are not known")
        self._dtype = self._packing.dtype

    @property
    def slot_ms(self) -> int:
        """Width of a tick."""
        return self._packing.slot_ms

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self._dtype.itemsize

    def units_of(self, ticks: Ticks, first_row: int, log_at: int, first: int, count: int) -> NDArray[np.void]:
        """Units of a chunk from its row `first` on, as UNIT; the units' own checksums are not filled in.

        `first_row`, `log_at`: start of the chunk among the rows and in the log. Raises CorruptSegmentError.
        """
        rows, offsets = self._read(first_row + first, count)
        if len(rows) != count:
            raise CorruptSegmentError(self._file.path, 0, f"a chunk has more units than the index, {self.units},")
        packing = self._packing
        units = np.zeros(count, UNIT)
        for name in KEPT:
            units[name] = packing.column(rows, name)
        place = np.arange(first, first + count, dtype=np.int64)
        run = np.searchsorted(ticks.starts, place, side="right") - 1
        in_run = place - ticks.starts[run]
        due = ticks.hour * HOUR_MS + ticks.ticks[run].astype(np.int64) * packing.slot_ms
        due += packing.column(rows, DUE_IN_TICK).astype(np.int64)
        units["due_ms"] = units["due_requested_ms"] = due
        units["index"] = place
        units["offset"] = offsets - log_at
        units["local_index"] = units["run_index"] = in_run
        units["previous_index"] = np.where(in_run > 0, place - 1, NO_INDEX)
        return units

    def _read(self, first_row: int, count: int) -> tuple[NDArray[np.void], NDArray[np.int64]]:
        """Checked rows, and the starts of their records in the bundle's log."""
        row_bytes = self.row_bytes
        low, high = first_row // BLOCK_ROWS, blocks_of(first_row + count)
        begin = low * BLOCK_ROWS
        wanted = min(high * BLOCK_ROWS, self.units) - begin
        at = self._rows_at + begin * row_bytes
        data = self._file.read_at(at, wanted * row_bytes)
        if len(data) != wanted * row_bytes:
            raise CorruptSegmentError(self._file.path, at, "the index ends early")
        step = BLOCK_ROWS * row_bytes
        directory = self._directory[low:high]
        for number, crc in enumerate(directory["crc"].tolist()):
            if google_crc32c.value(data[number * step : (number + 1) * step]) != crc:
                raise CorruptSegmentError(
                    self._file.path, at + number * step, "a block of units does not match its CRC"
                )
        rows = np.frombuffer(data, self._dtype)
        sizes = self._packing.column(rows, "size")
        inside = np.zeros((len(directory), BLOCK_ROWS), np.int64)
        inside.reshape(-1)[: len(rows)] = sizes
        sums = np.cumsum(inside, axis=1) - inside
        offsets = (sums + directory["log_offset"].astype(np.int64)[:, None]).reshape(-1)
        part = slice(first_row - begin, first_row - begin + count)
        return rows[part], offsets[part]
