"""What was pending after one entry of the log, to be read later and in parts.

Units never change their place and are only ever appended, so a bound for each hour, the cursor and the marks of that
moment say which of the units that are there later were pending then. No file is held, nothing is copied but the marks.
What goes is what retention removes with its hour: a reader that is overtaken by it is told so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tickwheel.wheel.units import CursorKey, Units


@dataclass(frozen=True, slots=True)
class Pinned:
    """See the module; made by `Wheel.pin`."""

    cursor: CursorKey
    hours: NDArray[np.int64]
    """Hours that had units, rising, of the range that was asked for."""
    bounds: NDArray[np.int64]
    """How many units each had: those with an index below were there."""
    marks: Mapping[int, NDArray[np.uint32]]
    """Cancelled and moved ones by hour."""

    def bound(self, hour: int) -> int:
        """How many units an hour had; 0 if it is none of them."""
        at = int(np.searchsorted(self.hours, hour))
        return int(self.bounds[at]) if at < len(self.hours) and int(self.hours[at]) == hour else 0

    def known(self, hour: int, units: Units) -> Units:
        """Of one hour's units those that were there."""
        known = units["index"] < self.bound(hour)
        return units if known.all() else units[known]
