"""Positions of a ready queue that are for one group alone: its retries and replayed dead letters.

Owns, for each such position, the group, the id under which the message was first scheduled, how often it was delivered
before, and whether it was a dead letter. Rows lie in files (a Sequence), so that their number costs no memory. Rows
around a position are found by bisection, through a few cached blocks.

Invariants: positions rise; a position without a row is for every group. Topics without retries never look further than
`last_position`. Called by the ready queue.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.state.sequence import Sequence
from tickwheel.wheel.units import REPLAYED, Ids, Units

TARGET = np.dtype([("position", "<u8"), ("origin", "<u8"), ("group", "<u4"), ("attempts", "<u2"), ("replayed", "<u2")])
Rows = NDArray[Any]
"""Array of TARGET."""

CACHE_ROWS = 128
"""Rows of a cached piece."""
CACHE_PIECES_MAX = 256
"""Cached pieces: 800 kB."""
APART = 4_096
"""Of positions further apart than this, what lies between them is not read from files."""
_NONE: Rows = np.zeros(0, TARGET)


def origins_of(units: Units) -> Ids:
    """The ids under which units were first scheduled; 0: a unit's own id."""
    origins: Ids = units["origin_hour"].astype(np.uint64) << np.uint64(32) | units["origin_index"]
    return origins


class Targets:
    def __init__(self, rows: Sequence) -> None:
        self.rows = rows
        self._cache: dict[int, Rows] = {}
        self.last_position = int(rows.read(rows.count - 1, 1)["position"][0]) if rows.count > rows.first else -1

    def append(self, positions: NDArray[np.int64], units: Units) -> None:
        """Append units that entered the queue at these rising positions, each with a target."""
        rows = np.empty(len(units), TARGET)
        rows["position"], rows["origin"] = positions, origins_of(units)
        rows["group"], rows["attempts"] = units["target_group"], units["attempts"]
        rows["replayed"] = units["flags"] & REPLAYED != 0
        self.rows.append(rows)
        self.last_position = int(positions[-1])

    def between(self, first: int, last: int) -> Rows:
        """Rows of positions in [first, last)."""
        if self.last_position < first or first >= last:
            return _NONE
        low = self._bound(first)
        high = self.rows.count if last > self.last_position else self._bound(last)
        found: Rows = self.rows.read(low, high - low) if high > low else _NONE
        return found

    def newest(self, limit: int) -> Rows:
        """The last `limit` rows."""
        count = min(limit, self.rows.count - self.rows.first)
        found: Rows = self.rows.read(self.rows.count - count, count) if count else _NONE
        return found

    def of(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], Rows]:
        """(places in `positions` that have a row, in any order; those rows)."""
        none = np.zeros(0, np.int64)
        if not len(positions) or self.last_position < int(positions.min()):
            return none, _NONE
        rows = self._around(positions)
        if not len(rows):
            return none, _NONE
        at = np.minimum(np.searchsorted(rows["position"], positions.astype(np.uint64)), len(rows) - 1)
        hits = np.flatnonzero(rows["position"][at] == positions.astype(np.uint64))
        return hits, rows[at[hits]]

    def _around(self, positions: NDArray[np.int64]) -> Rows:
        """Rows of all these positions, and of some between them."""
        first, last = int(positions.min()), int(positions.max())
        if last - first <= APART or self._bound(first) >= self.rows.held()[0]:
            return self.between(first, last + 1)
        rising = np.sort(positions)
        ends = np.append(np.flatnonzero(rising[1:] - rising[:-1] > APART), len(rising) - 1)
        firsts = np.append(0, ends[:-1] + 1)
        runs = zip(rising[firsts].tolist(), rising[ends].tolist(), strict=True)
        return np.concatenate([self.between(first, last + 1) for first, last in runs])

    def drop_below(self, position: int) -> None:
        """Drop the rows of positions below."""
        if self.rows.count > self.rows.first:
            self.rows.drop_below(self._bound(position) if position <= self.last_position else self.rows.count)
            self._cache.clear()
            if self.rows.first == self.rows.count:
                self.last_position = -1

    def _bound(self, position: int) -> int:
        """Number of the first row at or behind a position."""
        held, rows = self.rows.held()
        # Nearly always among the newest rows, which are in memory.
        if len(rows) and int(rows["position"][0]) < position:
            return held + bisect_left(rows["position"], position)
        low, high = self.rows.first, held
        while low < high:
            middle = (low + high) // 2
            if self._position(middle) < position:
                low = middle + 1
            else:
                high = middle
        return low

    def _position(self, number: int) -> int:
        piece, inside = divmod(number, CACHE_ROWS)
        first = max(piece * CACHE_ROWS, self.rows.first)
        rows = self._cache.get(piece)
        if rows is None:
            rows = self.rows.read(first, (piece + 1) * CACHE_ROWS - first)
            if len(rows) == (piece + 1) * CACHE_ROWS - first:
                if len(self._cache) >= CACHE_PIECES_MAX:
                    self._cache.clear()
                self._cache[piece] = rows.copy()
        return int(rows["position"][piece * CACHE_ROWS + inside - first])
