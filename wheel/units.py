"""Units as the wheel handles them: arrays of `UNIT` (storage/unit.py has the layout), their ids, and the cursor's key.

Ids of units are `hour << 32 | global index` in one uint64 (`ids_of`, `hours_of`, `indexes_of`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tickwheel.storage.unit import HOUR_MS, LACKING, NO_INDEX, ONE_TAG, REPLAYED, UNIT, UNIT_BYTES

__all__ = [
    "HOUR_MS",
    "LACKING",
    "NO_INDEX",
    "ONE_TAG",
    "REPLAYED",
    "UNIT",
    "UNIT_BYTES",
    "CursorKey",
    "Ids",
    "Units",
    "find_ids",
    "hour_and_index",
    "hours_of",
    "ids_of",
    "indexes_of",
    "join_units",
    "picked",
    "spans",
    "starts_of",
]

Units = NDArray[np.void]
Ids = NDArray[np.uint64]

_LOW_BITS = np.uint64(0xFFFF)
_INDEX_BITS = np.uint64(0xFFFF_FFFF)
_HOUR_SHIFT = np.uint64(32)


class CursorKey(NamedTuple):
    """Key of the next unit to dispatch: units with (due_ms, index) below it are dispatched."""

    due_ms: int
    index: int  # type: ignore[assignment]  # the same word as everywhere else; nobody needs tuple.index


def ids_of(units: Units) -> Ids:
    """Ids of units: hour << 32 | global index."""
    hours = (units["due_ms"] // HOUR_MS).astype(np.uint64)
    ids: Ids = (hours << _HOUR_SHIFT) | units["index"]
    return ids


def hours_of(ids: Ids) -> NDArray[np.int64]:
    """The hour of each id."""
    return (ids >> _HOUR_SHIFT).astype(np.int64)


def indexes_of(ids: Ids) -> NDArray[np.int64]:
    """The global index of each id."""
    return (ids & _INDEX_BITS).astype(np.int64)


def hour_and_index(id: int) -> tuple[int, int]:
    """Both parts of one id."""
    return id >> 32, id & 0xFFFF_FFFF


def join_units(parts: Sequence[Units]) -> Units:
    """Concatenation of rows with the same fields, at least one array. Copies plain bytes: numpy would take 24 us an
    array to find that the fields are equal, and then copy field by field."""
    if len(parts) == 1:
        return parts[0]
    joined: Units = np.frombuffer(bytearray().join([part.tobytes() for part in parts]), parts[0].dtype)
    return joined


def picked(rows: Units, which: NDArray[np.bool_] | NDArray[np.integer]) -> Units:
    """`rows[which]` for rows with fields, by a mask or by numbers. Plain indexing copies such a row field by field, in
    300 ns; this copies its bytes, in 10 ns."""
    found: Units = rows.compress(which) if which.dtype == np.bool_ else rows.take(which)
    return found


def starts_of(keys: NDArray[np.integer]) -> NDArray[np.int64]:
    """Numbers of the rows whose key differs from the row before, and of row 0. There must be at least one key."""
    ends = (keys[1:] != keys[:-1]).nonzero()[0]
    starts = np.zeros(len(ends) + 1, np.int64)
    np.add(ends, 1, out=starts[1:])
    return starts


def spans(starts: NDArray[np.int64], end: int) -> NDArray[np.int64]:
    """Distance from each start to the next, and from the last to `end`. There must be at least one start. `np.diff`
    with `append` takes four times as long for a few."""
    found = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=found[:-1])
    found[-1] = end - starts[-1]
    return found


def find_ids(column: Ids, wanted: Ids) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(places in the column that have a wanted id, rising; for each of them the place in `wanted`). The column is in no
    order; `wanted` rises, and has each id once. Takes little longer for thousands of ids than for one."""
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
