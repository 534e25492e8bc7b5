"""Cancels and moves of many messages at once, decided with arrays.

The same rules as `Wheel.cancel`, for a chunk of a sweep. Called by the wheel only, when a command is applied.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tickwheel.wheel.holdings import Holdings
from tickwheel.wheel.marks import Marks
from tickwheel.wheel.units import HOUR_MS, CursorKey, Ids

DONE, MARKED, DISPATCHED, UNKNOWN = range(4)
"""Outcomes: cancelled or moved now; was cancelled or moved before; too late; no such message."""

Outcomes = NDArray[np.uint8]


def mark(
    ids: Ids, due_ms: NDArray[np.int64], marks: Marks, holdings: Holdings, cursor: CursorKey
) -> tuple[Ids, Outcomes]:
    """Mark the pending messages; returns the newest id of each message and its outcome."""
    newest, due_ms = marks.moves.resolve_many(ids, due_ms)
    hour = (newest >> np.uint64(32)).astype(np.int64)
    index = (newest & np.uint64(0xFFFF_FFFF)).astype(np.uint32)
    outcomes = np.zeros(len(ids), dtype=np.uint8)
    late = (due_ms < cursor.due_ms) | ((due_ms == cursor.due_ms) & (index.astype(np.int64) < cursor.index))
    outcomes[late] = DISPATCHED
    outcomes[due_ms // HOUR_MS != hour] = UNKNOWN
    order = np.argsort(newest, kind="stable")
    sorted_hours = hour[order]
    starts = np.flatnonzero(np.diff(sorted_hours, prepend=-1))
    for rows in np.split(order, starts[1:]) if len(order) else []:
        of_hour = int(hour[rows[0]])
        if of_hour < holdings.removed_below:
            outcomes[rows] = UNKNOWN
            continue
        indexes = index[rows]
        outcomes[rows[marks.which(of_hour, indexes)]] = MARKED
        outcomes[rows[indexes >= holdings.hours.units(of_hour)]] = UNKNOWN
        rows = rows[outcomes[rows] == DONE]
        indexes = index[rows]
        again = np.zeros(len(rows), dtype=np.bool_)
        again[1:] = indexes[1:] == indexes[:-1]
        outcomes[rows[again]] = MARKED
        marks.add_many(of_hour, indexes[~again])
    return newest, outcomes


def cut_records(records: bytes, sizes: NDArray[np.uint32], keep: NDArray[np.bool_]) -> bytes:
    """The records of the kept rows."""
    ends = np.cumsum(sizes, dtype=np.int64)
    starts = ends - sizes
    return b"".join([records[low:high] for low, high in zip(starts[keep].tolist(), ends[keep].tolist(), strict=True)])
