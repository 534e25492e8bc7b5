"""Units that were dispatched a moment ago, kept in memory so that delivering them needs no index read."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from tickwheel.node.core.delivery.leases import Positions
from tickwheel.wheel.units import Units, join_units, picked

UNITS_MAX = 100_000
"""Units of one topic that are kept at least; at most twice as many, 19 MB."""


class RecentUnits:
    """The newest dispatched units of one topic, by position in its ready queue."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._chunks: list[Units] = []
        self._count = 0

    def add(self, first_position: int, units: Units) -> None:
        """Add units that entered the ready queue, from `first_position` on."""
        self._firsts.append(first_position)
        self._chunks.append(units)
        self._count += len(units)
        if self._count > 2 * UNITS_MAX:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        place = 0
        while self._count > UNITS_MAX and place < len(self._chunks) - 1:
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
        low, high = bisect_right(self._firsts, first) - 1, bisect_right(self._firsts, last)
        places = (positions - np.uint64(self._firsts[low])).astype(np.int64)
        return picked(join_units(self._chunks[low:high]), places)

    def clear(self) -> None:
        self._firsts.clear()
        self._chunks.clear()
        self._count = 0
