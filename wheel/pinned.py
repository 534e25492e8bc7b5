"""The messages pending after one entry of the log, to be read later and in parts.

Units never change their place and are only appended. So a bound for each hour, the cursor and the marks of that moment
tell which of the later units were pending then. No file is held open, and only the marks are copied. Messages that
retention removes with their hour are lost to the reader, who is told so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tickwheel.wheel.units import CursorKey, Units, picked


@dataclass(frozen=True, slots=True)
class Pinned:
    """Made by `Wheel.pin`."""

    cursor: CursorKey
    hours: NDArray[np.int64]
    """Hours of the requested range that had units, rising."""
    bounds: NDArray[np.int64]
    """Number of units of each hour: units with an index below existed."""
    marks: Mapping[int, NDArray[np.uint32]]
    """Hour -> indexes of cancelled and moved units."""

    def bound(self, hour: int) -> int:
        """Number of units that an hour had; 0 if it is not among `hours`."""
        at = int(np.searchsorted(self.hours, hour))
        return int(self.bounds[at]) if at < len(self.hours) and int(self.hours[at]) == hour else 0

    def known(self, hour: int, units: Units) -> Units:
        """The given units of one hour that existed at the pin."""
        known = units["index"] < self.bound(hour)
        return units if known.all() else picked(units, known)
