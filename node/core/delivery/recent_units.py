"""The newest dispatched units, so that delivering them needs no index read. Soft state of one mastership."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque

import numpy as np

from tickwheel.node.state.subscription import Positions
from tickwheel.wheel.units import Units, join_units, picked

RECENT_UNITS_MAX = 200_000
"""Units of all topics together that are kept, 19 MB. Beside them up to a sixteenth of that, and one chunk: what one
dispatch brought of one topic."""


class RecentUnits:
    """Those of one topic, by position in its ready queue."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._chunks: list[Units] = []

    def add(self, first_position: int, units: Units) -> None:
        """Add a chunk that entered the ready queue, from `first_position` on."""
        self._firsts.append(first_position)
        self._chunks.append(units)

    def drop(self, chunks: int) -> None:
        """Drop the oldest so many chunks."""
        del self._firsts[:chunks], self._chunks[:chunks]

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


class Recent:
    """Those of all topics. The oldest go first, whatever their topic: a bound for each topic would be none for many."""

    def __init__(self) -> None:
        self._topics: dict[int, RecentUnits] = {}
        self._order: deque[tuple[RecentUnits, int]] = deque()
        """Topic and units of each chunk that is kept, the oldest first."""
        self._count = 0

    def of(self, topic_id: int) -> RecentUnits:
        """Those of one topic, also of what comes later, until `clear`."""
        recent = self._topics.get(topic_id)
        if recent is None:
            recent = self._topics[topic_id] = RecentUnits()
        return recent

    def add(self, topic_id: int, first_position: int, units: Units) -> None:
        """Units of a topic entered its ready queue, from `first_position` on."""
        recent, count = self._topics.get(topic_id) or self.of(topic_id), len(units)
        recent.add(first_position, units)
        self._order.append((recent, count))
        self._count += count
        if self._count > RECENT_UNITS_MAX + RECENT_UNITS_MAX // 16:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        chunks = Counter[RecentUnits]()
        while self._count > RECENT_UNITS_MAX and len(self._order) > 1:
            recent, count = self._order.popleft()
            self._count -= count
            chunks[recent] += 1
        for recent, dropped in chunks.items():
            recent.drop(dropped)

    def clear(self) -> None:
        """Forget all."""
        self._topics.clear()
        self._order.clear()
        self._count = 0
