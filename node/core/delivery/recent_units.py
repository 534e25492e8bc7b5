"""The newest dispatched units of each topic: soft state of one mastership."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from tickwheel.node.state.subscription import Positions
from tickwheel.wheel.units import Units, join_units, picked

RECENT_UNITS_MAX = 100_000
"""Units of one topic that are kept at least; at most twice as many, 19 MB."""


class RecentUnits:
    """The newest dispatched units of one topic, by position in its ready queue: kept in memory, so that delivering them
    needs no index read."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._chunks: list[Units] = []
        self._count = 0

    def add(self, first_position: int, units: Units) -> None:
        """Add units that entered the ready queue, from `first_position` on."""
        self._firsts.append(first_position)
        self._chunks.append(units)
        self._count += len(units)
        if self._count > 2 * RECENT_UNITS_MAX:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        place = 0
        while self._count > RECENT_UNITS_MAX and place < len(self._chunks) - 1:
            self._count -= len(self._chunks[place])
            place += 1
        del self._firsts[:place], self._chunks[:place]

    def find(self, positions: Positions) -> Units | None:
        """The units at these rising positions if all are held, else None."""
        if not self._chunks or not len(positions):
            return None
        first, last = int(positions[0]), int(positions[-1])
        if first < self._firsts[0] or last >= self._firsts[-1] + len(self._chunks[-1]):
            return None
        units, base = self._chunks[-1], self._firsts[-1]
        if first < base:
            low, high = bisect_right(self._firsts, first) - 1, bisect_right(self._firsts, last)
            units, base = join_units(self._chunks[low:high]), self._firsts[low]
        if last - first == len(positions) - 1:
            return units[first - base : last - base + 1]
        return picked(units, (positions - np.uint64(base)).astype(np.int64))

    def clear(self) -> None:
        self._firsts.clear()
        self._chunks.clear()
        self._count = 0
