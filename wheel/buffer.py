"""The arrival buffer: units and records that have been applied but not yet merged into hour files.

Owns immutable blocks of units sorted by (due_ms, index), and the records as they came. A unit is found
by due time in `blocks`, each of which is searched; small blocks are joined geometrically, so that there
are few. It is found by id in the extents (`EXTENT`): one row for each contiguous piece of an hour that an
append brought. The buffer numbers its units from 0 as they came; an extent names the number of its first unit, and each
block has the rows of its units by number. Once frozen a buffer never changes again, and any thread may read it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tickwheel.wheel.units import HOUR_MS, UNIT, UNIT_BYTES, CursorKey, Ids, Units, join_units, picked, spans

BLOCK_UNITS_MIN = 8192
"""Blocks with fewer units are joined with their neighbours."""

APPEND_BYTES_OVERHEAD = 512
"""Memory that an append costs beside its bytes. It is counted, so that many tiny appends fill the buffer too."""

EXTENT = np.dtype(
    [
        ("id", "<u8"),  # of its first unit
        ("offset", "<i8"),  # log offset of its first record
        ("bytes", "<i8"),  # of its records
        ("at", "<i8"),  # of its first record in the append's records
        ("count", "<u4"),  # units
        ("number", "<u4"),  # of its first unit
        ("append", "<u4"),
    ]
)


Rows = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Block:
    """Units sorted by (due_ms, index); `due_ms` is their contiguous copy, for searching."""

    due_ms: NDArray[np.int64]
    units: Units

    def between(self, due_min: int, due_max: int) -> Block | None:
        """Units with due_min <= due_ms < due_max; None if there are none."""
        low, high = self.due_ms.searchsorted((due_min, due_max))
        return Block(self.due_ms[low:high], self.units[low:high]) if high > low else None

    def first_due_from(self, due_min: int) -> int | None:
        """Due time of the first unit not due before due_min."""
        at = int(self.due_ms.searchsorted(due_min))
        return int(self.due_ms[at]) if at < len(self.due_ms) else None


def join_blocks(blocks: list[Block]) -> Block:
    """Join blocks in the order they were appended: units of equal due times keep that order."""
    return blocks[0] if len(blocks) == 1 else _joined(blocks)[0]


def _joined(blocks: list[Block]) -> tuple[Block, NDArray[np.int64]]:
    """Blocks as one; and for each of its rows, the row among those of the blocks one after the other."""
    due = np.concatenate([block.due_ms for block in blocks])
    order = np.argsort(due, kind="stable")
    return Block(due[order], picked(join_units([block.units for block in blocks]), order)), order


def _inverse(order: NDArray[np.int64]) -> Rows:
    rows = np.empty(len(order), dtype=np.uint32)
    rows[order] = np.arange(len(order), dtype=np.uint32)
    return rows


def ordered_block(blocks: list[Block]) -> Block:
    """Join blocks even if a later one has lower indexes than an earlier one."""
    joined = join_blocks(blocks)
    units = joined.units
    falls = np.diff(units["index"].astype(np.int64)) < 0
    if not (falls & (np.diff(joined.due_ms) == 0)).any():
        return joined
    order = np.lexsort((units["index"], joined.due_ms))
    return Block(joined.due_ms[order], picked(units, order))


def cut_at(block: Block, key: CursorKey) -> int:
    """Number of a block's units below a key."""
    low = int(block.due_ms.searchsorted(key.due_ms))
    high = int(block.due_ms.searchsorted(key.due_ms + 1)) if key.index else low
    if high > low:
        index = block.units["index"]
        if index[high - 1] < key.index:
            return high
        if index[low] < key.index:  # only the block that the key cuts is searched
            low += int(np.searchsorted(np.ascontiguousarray(index[low:high]), key.index))
    return low


class Buffer:
    """Append-only until frozen; then immutable."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.records: list[bytes] = []
        self._rows: list[Rows] = []
        """Of each block: the rows of its units by their numbers."""
        self._first_numbers: list[int] = []
        """Of each block."""
        self.bytes = 0
        self.units = 0
        self._first_hour, self._last_hour = 0, -1
        self._extents = np.zeros(0, dtype=EXTENT)  # sorted by id
        self._recent: list[Units] = []

    def add(
        self,
        due_ms: NDArray[np.int64],
        units: Units,
        ids: Ids,
        records: bytes,
        starts: NDArray[np.int64],
        at: NDArray[np.int64],
    ) -> None:
        """Add an applied batch: sorted units with their ids. `starts`: first row of each hour; `at`: where each hour's
        records begin in `records`."""
        self._join_small(Block(due_ms, units))
        extents = np.zeros(len(starts), dtype=EXTENT)
        extents["id"] = ids[starts]
        extents["offset"] = units["offset"][starts]
        extents["at"] = at
        extents["bytes"] = spans(at, len(records))
        extents["number"] = starts + self.units
        extents["count"] = spans(starts, len(units))
        extents["append"] = len(self.records)
        first, last = int(ids[0]) >> 32, int(ids[-1]) >> 32
        if self._last_hour < self._first_hour:
            self._first_hour, self._last_hour = first, last
        else:
            self._first_hour, self._last_hour = min(self._first_hour, first), max(self._last_hour, last)
        self._recent.append(extents)
        self.records.append(records)
        self.units += len(units)
        self.bytes += (
            len(records) + len(units) * (UNIT_BYTES + 8) + len(extents) * EXTENT.itemsize + APPEND_BYTES_OVERHEAD
        )

    @property
    def hours(self) -> int:
        """Number of hours from the first to the last that an append touched."""
        return self._last_hour - self._first_hour + 1

    def _join_small(self, block: Block) -> None:
        size = len(block.units)
        self.blocks.append(block)
        self._rows.append(np.arange(size, dtype=np.uint32))
        self._first_numbers.append(self.units)
        first = len(self.blocks) - 1
        while first > 0 and len(self.blocks[first - 1].units) < min(2 * size, BLOCK_UNITS_MIN):
            first -= 1
            size += len(self.blocks[first].units)
        if first < len(self.blocks) - 1:
            numbers = self._first_numbers[first:]
            among = [rows + (at - numbers[0]) for rows, at in zip(self._rows[first:], numbers, strict=True)]
            joined, order = _joined(self.blocks[first:])
            self.blocks[first:] = [joined]
            self._rows[first:] = [_inverse(order)[np.concatenate(among)]]
            del self._first_numbers[first + 1 :]

    def restore(self, units: Units, extents: Units, records: bytes) -> None:
        """Fill an empty buffer from a run file: units in (hour, index) order, one extent an hour."""
        if not len(units):
            return
        due = np.ascontiguousarray(units["due_ms"])
        order = np.argsort(due, kind="stable")
        self.blocks = [Block(due[order], picked(units, order))]
        self._rows, self._first_numbers = [_inverse(order)], [0]
        self.records = [records]
        self._extents = extents
        self._first_hour, self._last_hour = int(due[order[0]]) // HOUR_MS, int(due[order[-1]]) // HOUR_MS
        self.units = len(units)
        self.bytes = len(records) + len(units) * (UNIT_BYTES + 8)

    def extents(self) -> Units:
        """All extents sorted by id."""
        if self._recent:
            self._extents = _sorted(join_units([self._extents, *self._recent]))
            self._recent = []
        return self._extents

    def snapshot(self) -> tuple[Block, ...]:
        """The blocks as they are now."""
        return tuple(self.blocks)

    def find(self, ids: Ids) -> NDArray[np.int64]:
        """Row in `extents()` of each id, -1 where the buffer does not hold it."""
        extents = self.extents()
        keys = np.ascontiguousarray(extents["id"])
        at = np.searchsorted(keys, ids, side="right").astype(np.int64) - 1
        inside = at >= 0
        inside[inside] = ids[inside] - keys[at[inside]] < extents["count"][at[inside]]
        return np.where(inside, at, -1)

    def units_of(self, ids: Ids, found: NDArray[np.int64]) -> Units:
        """Units of ids; `found`: their extents, from `find`."""
        extents = picked(self.extents(), found)
        numbers = (extents["number"] + (ids - extents["id"])).astype(np.int64)
        units = np.empty(len(ids), dtype=UNIT)
        at = np.searchsorted(self._first_numbers, numbers, side="right") - 1
        for place in np.unique(at).tolist():
            some = at == place
            units[some] = self.blocks[place].units[self._rows[place][numbers[some] - self._first_numbers[place]]]
        return units

    def records_of(self, units: Units, found: NDArray[np.int64]) -> list[bytes]:
        """Copies of the records of units; `found`: their extents, from `find`."""
        extents = picked(self.extents(), found)
        begin = extents["at"] + (units["offset"].astype(np.int64) - extents["offset"])
        end = begin + units["size"]
        records = self.records
        return [
            records[append][low:high]
            for append, low, high in zip(extents["append"].tolist(), begin.tolist(), end.tolist(), strict=True)
        ]


def _sorted(extents: Units) -> Units:
    return picked(extents, np.argsort(extents["id"], kind="stable"))
