"""Units that were dispatched a moment ago, kept in memory so that delivering them needs no index read."""

from __future__ import annotations

from collections import deque

import numpy as np

from tickwheel.node.core.leases import Positions
from tickwheel.wheel.units import Units, join_units

UNITS_MAX = 200_000
"""Per topic: 19 MB of units at most."""


class RecentUnits:
    """The newest dispatched units of one topic, by position in its ready queue."""

    def __init__(self) -> None:
        self._chunks: deque[tuple[int, Units]] = deque()
        self._count = 0

    def add(self, first_position: int, units: Units) -> None:
        """Units that entered the ready queue, from `first_position` on."""
        self._chunks.append((first_position, units))
        self._count += len(units)
        while self._count > UNITS_MAX and len(self._chunks) > 1:
            self._count -= len(self._chunks.popleft()[1])

    def find(self, positions: Positions) -> Units | None:
        """The units at these rising positions if all are held, else None."""
        if not self._chunks or not len(positions) or int(positions[0]) < self._chunks[0][0]:
            return None
        first, last = int(positions[0]), int(positions[-1])
        newest_first, newest = self._chunks[-1]
        if last >= newest_first + len(newest):
            return None
        parts: list[Units] = []
        start = 0
        for chunk_first, chunk in self._chunks:
            end = chunk_first + len(chunk)
            if end <= first:
                continue
            if chunk_first > last:
                break
            parts.append(chunk)
            if len(parts) == 1:
                start = chunk_first
        joined = join_units(parts)
        found = joined[(positions - np.uint64(start)).astype(np.int64)]
        assert len(found) == len(positions)
        return found

    def clear(self) -> None:
        """Mastership is gone."""
        self._chunks.clear()
        self._count = 0
