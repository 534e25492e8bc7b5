"""How many messages stand at once, and their cancels and moves, decided with arrays.

The same rules as `Wheel.standing` and `Wheel.cancel`. Called by the wheel only, when a command is applied.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tickwheel.wheel.holdings import Holdings
from tickwheel.wheel.marks import Marks
from tickwheel.wheel.units import HOUR_MS, CursorKey, Ids, hours_of, indexes_of

DONE, MARKED, DISPATCHED, UNKNOWN = range(4)
"""Outcomes, in this order: pending, or just marked by `mark`; cancelled or moved before; too late; no such message."""

Outcomes = NDArray[np.uint8]


class Standing(NamedTuple):
    """How messages stand: the newest id of each, its due time, and its outcome; DONE: it is pending."""

    ids: Ids
    due_ms: NDArray[np.int64]
    outcomes: Outcomes


def look(
    ids: Ids, due_ms: NDArray[np.int64], marks: Marks, holdings: Holdings, cursor: CursorKey
) -> tuple[Standing, NDArray[np.int64]]:
    """How messages stand; and their rows, sorted by newest id (rows with the same id keep their order). Takes a few
    steps for each hour that has marks, and array work for all others."""
    newest, due_ms = marks.moves.resolve_many(ids, due_ms)
    hour = hours_of(newest)
    index = indexes_of(newest)
    order = np.argsort(newest, kind="stable")
    outcomes = np.zeros(len(ids), dtype=np.uint8)
    outcomes[(due_ms < cursor.due_ms) | ((due_ms == cursor.due_ms) & (index < cursor.index))] = DISPATCHED
    outcomes[due_ms // HOUR_MS != hour] = UNKNOWN
    outcomes[order[marks.which_of(newest[order])]] = MARKED
    outcomes[(hour < holdings.removed_below) | (index >= holdings.hours.units_of_each(hour))] = UNKNOWN
    return Standing(newest, due_ms, outcomes), order


def mark(
    ids: Ids, due_ms: NDArray[np.int64], marks: Marks, holdings: Holdings, cursor: CursorKey
) -> tuple[Ids, Outcomes]:
    """Mark the pending messages; returns the newest id of each message and its outcome."""
    (newest, _, outcomes), order = look(ids, due_ms, marks, holdings, cursor)
    pending = order[outcomes[order] == DONE]
    rising = newest[pending]
    again = np.zeros(len(pending), dtype=np.bool_)
    again[1:] = rising[1:] == rising[:-1]
    outcomes[pending[again]] = MARKED
    marks.add_many(rising[~again])
    return newest, outcomes


def cut_records(records: bytes, sizes: NDArray[np.uint32], keep: NDArray[np.bool_]) -> bytes:
    """The records of the kept rows. Those that lie side by side are cut in one piece."""
    ends = np.cumsum(sizes, dtype=np.int64)
    starts = ends - sizes
    edges = np.flatnonzero(np.diff(keep, prepend=False, append=False))
    first, last = starts[edges[::2]].tolist(), ends[edges[1::2] - 1].tolist()
    view = memoryview(records)
    return b"".join([view[low:high] for low, high in zip(first, last, strict=True)])
