"""Finds ids in a column that is in no order. Takes little longer for thousands of ids than for one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tickwheel.wheel.units import Ids

Places = NDArray[np.int64]

_LOW_BITS = np.uint64(0xFFFF)


def find_ids(column: Ids, wanted: Ids) -> tuple[Places, Places]:
    """(places in the column that have a wanted id, rising; for each of them the place in `wanted`). `wanted` rises, and
    has each id once."""
    if len(wanted) == 1:
        places = np.flatnonzero(column == wanted[0])
        return places, np.zeros(len(places), np.int64)
    # Nearly all others differ in the low bits already.
    low = np.zeros(1 << 16, np.bool_)
    low[wanted & _LOW_BITS] = True
    places = np.flatnonzero(low[column & _LOW_BITS])
    if not len(places):
        return places, places
    near = column[places]
    at = np.minimum(wanted.searchsorted(near), len(wanted) - 1)
    hits = wanted[at] == near
    return places[hits], at[hits]
