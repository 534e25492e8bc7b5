"""The hour table: a few numbers for each hour, in dense arrays, whatever the number of messages.

Owns per hour: the next global index and log offset (given at apply), and the lengths of the hour's own
segment, as far as it has been merged. Hours without a message read 0. `next_index` and `next_offset` are
logical state. The merged lengths differ from node to node, and are in no digest.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tickwheel.storage.segment import ROW_BYTES, SegmentLengths

HOURS_SPAN_MAX = 1 << 20
"""Span from the first to the last used hour: 119 years. Memory is touched only where hours are used."""

HOURS_A_LOOK = 256
"""Hours searched at a time: numpy would release the interpreter to other threads for arrays of 500 and more."""

_COLUMNS = ("next_index", "next_offset", "rows", "log_bytes", "heads_bytes")


class HourTable:
    """Dense columns keyed by hour - base."""

    next_index: NDArray[np.int64]
    next_offset: NDArray[np.int64]
    rows: NDArray[np.int64]  # merged units
    log_bytes: NDArray[np.int64]
    heads_bytes: NDArray[np.int64]

    def __init__(self) -> None:
        self.base = 0
        self._low = 0  # used range, so that growing copies only that
        self._high = 0
        for column in _COLUMNS:
            setattr(self, column, np.zeros(0, dtype=np.int64))

    def cover(self, hour_min: int, hour_max: int) -> None:
        """Extend the arrays to cover hour_min to hour_max, both included. Raises ValueError beyond HOURS_SPAN_MAX."""
        size = len(self.next_index)
        if self._high > self._low:
            low, high = min(self._low, hour_min), max(self._high, hour_max + 1)
        else:
            low, high = hour_min, hour_max + 1
        if low < self.base or high > self.base + size:
            if high - low > HOURS_SPAN_MAX:
                raise ValueError(f"hours {low} to {high}: the table spans at most {HOURS_SPAN_MAX} hours")
            new_base = low if low < self.base or size == 0 else self.base
            new_size = max(high - new_base, min(2 * size, HOURS_SPAN_MAX), 64)
            for column in _COLUMNS:
                grown = np.zeros(new_size, dtype=np.int64)
                old = getattr(self, column)
                grown[self._low - new_base : self._high - new_base] = old[
                    self._low - self.base : self._high - self.base
                ]
                setattr(self, column, grown)
            self.base = new_base
            if self._low == self._high:
                self._low = self._high = low
        self._low, self._high = low, high

    def fits(self, hour_min: int, hour_max: int) -> bool:
        """Whether `cover` could extend the arrays to these hours."""
        if self._high <= self._low:
            return hour_max + 1 - hour_min <= HOURS_SPAN_MAX
        return max(self._high, hour_max + 1) - min(self._low, hour_min) <= HOURS_SPAN_MAX

    def has(self, hour: int) -> bool:
        return self._low <= hour < self._high

    def units(self, hour: int) -> int:
        """Next global index of an hour: the number of units ever appended to it."""
        return int(self.next_index[hour - self.base]) if self.has(hour) else 0

    def units_of_each(self, hours: NDArray[np.int64]) -> NDArray[np.int64]:
        """`units` of each of these hours."""
        counts = np.zeros(len(hours), dtype=np.int64)
        known = np.flatnonzero((hours >= self._low) & (hours < self._high))
        counts[known] = self.next_index[hours[known] - self.base]
        return counts

    def has_merged(self, hour: int) -> bool:
        """Whether anything of the hour has been merged to its files."""
        return self._low <= hour < self._high and bool(self.rows[hour - self.base])

    def merged(self, hour: int) -> SegmentLengths:
        if not self.has(hour):
            return SegmentLengths()
        at = hour - self.base
        return SegmentLengths(int(self.rows[at]), int(self.log_bytes[at]), int(self.heads_bytes[at]))

    @property
    def merged_bytes(self) -> int:
        """Bytes of all segments, as far as they have been merged."""
        used = slice(self._low - self.base, self._high - self.base)
        columns = (self.log_bytes[used], self.rows[used] * ROW_BYTES, self.heads_bytes[used])
        return sum(int(column.sum()) for column in columns)

    def set_merged(self, hour: int, lengths: SegmentLengths) -> None:
        at = hour - self.base
        self.rows[at] = lengths.rows
        self.log_bytes[at] = lengths.log_bytes
        self.heads_bytes[at] = lengths.heads_bytes

    def used(self, hour_min: int = 0, hour_max: int | None = None) -> NDArray[np.int64]:
        """Hours with units, rising, from `hour_min` to below `hour_max`."""
        low = max(self._low, hour_min)
        high = self._high if hour_max is None else min(self._high, hour_max)
        if high <= low:
            return np.zeros(0, dtype=np.int64)
        return np.flatnonzero(self.next_index[low - self.base : high - self.base]) + low

    def next_used(self, hour_min: int) -> int | None:
        """First hour from hour_min on that has units."""
        low = max(self._low, hour_min)
        while low < self._high:
            high = min(low + HOURS_A_LOOK, self._high)
            # Asked with every tick. Not `argmax`: it releases the interpreter, however short the array is.
            used = self.next_index[low - self.base : high - self.base].nonzero()[0]
            if len(used):
                return low + int(used[0])
            low = high
        return None

    def forget(self, below: int) -> list[int]:
        """Clear the hours before `below`; returns those that had units."""
        gone = [int(hour) for hour in self.used(0, below)]
        for column in _COLUMNS:
            getattr(self, column)[: max(0, below - self.base)] = 0
        self._low = min(max(self._low, below), self._high)
        return gone

    def dump(self) -> NDArray[np.int64]:
        """int64[n, 6]: hour and the five columns of each used hour."""
        hours = self.used()
        return np.column_stack([hours, *(getattr(self, column)[hours - self.base] for column in _COLUMNS)]).astype(
            np.int64
        )

    def load(self, rows: NDArray[np.int64]) -> None:
        """Fill an empty table with what `dump` returned."""
        if len(rows):
            self.cover(int(rows[0, 0]), int(rows[-1, 0]))
            for number, column in enumerate(_COLUMNS):
                getattr(self, column)[rows[:, 0] - self.base] = rows[:, number + 1]
