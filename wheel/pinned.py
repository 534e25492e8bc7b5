"""The messages pending after one entry of the log, to be read later and in parts.

Units never change their place, and new ones are only appended. So a bound for each hour, the cursor and the marks of
that moment tell which of the present units were pending then. No file is held open, and only the marks are copied.
Messages that retention removes with their hour are lost to the reader, who is told so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tickwheel.wheel.units import HOUR_MS, CursorKey, Units, picked


@dataclass(frozen=True, slots=True)
class Pinned:
    """Made by `Reads.pin`."""

    cursor: CursorKey
    hours: NDArray[np.int64]
    """Hours of the requested range that had units, rising."""
    bounds: NDArray[np.int64]
    """Number of units of each hour: units with an index below existed."""
    marks: Mapping[int, NDArray[np.uint32]]
    """Hour -> indexes of cancelled and moved units."""

    def within(self, hour: int, hour_end: int) -> NDArray[np.int64]:
        """Those of `hours` from `hour` to before `hour_end`."""
        return self.hours[np.searchsorted(self.hours, hour) : np.searchsorted(self.hours, hour_end)]

    def known(self, units: Units) -> Units:
        """Those of the given units that existed at the pin. All must be of `hours`."""
        if not len(units):
            return units
        known = units["index"] < self.bounds[np.searchsorted(self.hours, units["due_ms"] // HOUR_MS)]
        return units if known.all() else picked(units, known)
