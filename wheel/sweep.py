"""Where many messages stand, and cancels and moves of them at once, decided with arrays.

The same rules as `Wheel.standing` and `Wheel.cancel`. Called by the wheel only, when a command is applied.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tickwheel.wheel.holdings import Holdings
from tickwheel.wheel.marks import Marks
from tickwheel.wheel.units import HOUR_MS, CursorKey, Ids

DONE, MARKED, DISPATCHED, UNKNOWN = range(4)
"""Outcomes: pending, and cancelled or moved by `mark`; was cancelled or moved before; too late; no such message."""

Outcomes = NDArray[np.uint8]


class Standing(NamedTuple):
    """How messages stand: the newest id of each, its due time, and its outcome; DONE: it is pending."""

    ids: Ids
    due_ms: NDArray[np.int64]
    outcomes: Outcomes


def look(
    ids: Ids, due_ms: NDArray[np.int64], marks: Marks, holdings: Holdings, cursor: CursorKey
) -> tuple[Standing, list[NDArray[np.int64]]]:
    """How messages stand, and the rows of the pending ones: for each hour an array, by rising id."""
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
    pending: list[NDArray[np.int64]] = []
    for rows in np.split(order, starts[1:]) if len(order) else []:
        of_hour = int(hour[rows[0]])
        if of_hour < holdings.removed_below:
            outcomes[rows] = UNKNOWN
            continue
        indexes = index[rows]
        outcomes[rows[marks.which(of_hour, indexes)]] = MARKED
        outcomes[rows[indexes >= holdings.hours.units(of_hour)]] = UNKNOWN
        pending.append(rows[outcomes[rows] == DONE])
    return Standing(newest, due_ms, outcomes), pending


def mark(
    ids: Ids, due_ms: NDArray[np.int64], marks: Marks, holdings: Holdings, cursor: CursorKey
) -> tuple[Ids, Outcomes]:
    """Mark the pending messages; returns the newest id of each message and its outcome."""
    (newest, _, outcomes), pending = look(ids, due_ms, marks, holdings, cursor)
    for rows in pending:
        if not len(rows):
            continue
        indexes = (newest[rows] & np.uint64(0xFFFF_FFFF)).astype(np.uint32)
        again = np.zeros(len(rows), dtype=np.bool_)
        again[1:] = indexes[1:] == indexes[:-1]
        outcomes[rows[again]] = MARKED
        marks.add_many(int(newest[rows[0]]) >> 32, indexes[~again])
    return newest, outcomes


def cut_records(records: bytes, sizes: NDArray[np.uint32], keep: NDArray[np.bool_]) -> bytes:
    """The records of the kept rows. Those that lie side by side are cut in one piece."""
    ends = np.cumsum(sizes, dtype=np.int64)
    starts = ends - sizes
    edges = np.flatnonzero(np.diff(keep, prepend=False, append=False))
    first, last = starts[edges[::2]].tolist(), ends[edges[1::2] - 1].tolist()
    view = memoryview(records)
    return b"".join([view[low:high] for low, high in zip(first, last, strict=True)])
