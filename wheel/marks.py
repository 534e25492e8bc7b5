"""Marks of cancelled and moved units.

Owns, per hour, the global indexes that are marked, and for moved units their current id and due time. Both are logical
state. They stay until their hours are removed, so that a repeated cancel gets the same answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tickwheel.wheel.units import HOUR_MS, Ids, Units, hours_of, starts_of

_RECENT_MAX = 512
_FEW_UNITS = 16
"""Up to this many units are looked up one by one: that costs less than the start of the array functions."""


@dataclass(frozen=True, slots=True)
class MarksCapture:
    """Marks and moves at one moment. Any thread may build the arrays."""

    marked: list[tuple[int, NDArray[np.uint32]]]
    runs: list[NDArray[np.void]]

    def ids(self) -> Iterator[Ids]:
        """uint64 ids of all marked units, sorted, in one array for each hour."""
        return (indexes.astype(np.uint64) | np.uint64(hour << 32) for hour, indexes in self.marked)

    def arrays(self) -> tuple[Ids, NDArray[np.void]]:
        """uint64 ids of all marked units, sorted, and all moves sorted by id."""
        parts = list(self.ids())
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint64), join_runs(self.runs)


def _by_hour(ids: Ids) -> tuple[NDArray[np.uint32], Iterator[tuple[int, int, int]]]:
    """The indexes of ids; and (hour, first row, end row) of each hour."""
    if not len(ids):
        return np.zeros(0, dtype=np.uint32), iter(())
    hours = hours_of(ids)
    starts = starts_of(hours)
    bounds = [*starts.tolist(), len(ids)]
    return ids.astype(np.uint32), zip(hours[starts].tolist(), bounds[:-1], bounds[1:], strict=True)


class Marks:
    """Sets of marked indexes: sorted arrays with a small set of recent ones beside each."""

    def __init__(self) -> None:
        self._sorted: dict[int, NDArray[np.uint32]] = {}
        self._recent: dict[int, set[int]] = {}
        self.moves = Moves()
        self.count = 0

    def has(self, hour: int, index: int) -> bool:
        if index in self._recent.get(hour, ()):
            return True
        marked = self._sorted.get(hour)
        if marked is None:
            return False
        at = int(marked.searchsorted(index))
        return at < len(marked) and int(marked[at]) == index

    def add(self, hour: int, index: int) -> None:
        recent = self._recent.setdefault(hour, set())
        recent.add(index)
        self.count += 1
        if len(recent) >= _RECENT_MAX:
            self._fold(hour)

    def _fold(self, hour: int) -> NDArray[np.uint32]:
        marked = self._sorted.get(hour, np.zeros(0, dtype=np.uint32))
        recent = self._recent.pop(hour, None)
        if recent:
            fresh = np.sort(np.fromiter(recent, dtype=np.uint32, count=len(recent)))
            marked = self._sorted[hour] = np.insert(marked, marked.searchsorted(fresh), fresh)
        return marked

    def add_many(self, ids: Ids) -> None:
        """Mark units, none of which is marked yet. Those of an hour lie side by side, by rising index. Takes a few
        steps for each hour and none for each unit."""
        indexes, hours = _by_hour(ids)
        listed = indexes.tolist()
        for hour, low, high in hours:
            recent = self._recent.get(hour)
            if recent is None and hour not in self._sorted:
                self._sorted[hour] = indexes[low:high].copy()
            elif high - low <= _FEW_UNITS:
                recent = self._recent.setdefault(hour, set())
                recent.update(listed[low:high])
                if len(recent) >= _RECENT_MAX:
                    self._fold(hour)
            else:
                marked = self._fold(hour)
                self._sorted[hour] = np.insert(marked, marked.searchsorted(indexes[low:high]), indexes[low:high])
        self.count += len(ids)

    def which_of(self, ids: Ids) -> NDArray[np.bool_]:
        """True for each marked unit; those of an hour must lie side by side."""
        found = np.zeros(len(ids), dtype=np.bool_)
        if not self.count:
            return found
        indexes, hours = _by_hour(ids)
        listed = indexes.tolist()
        for hour, low, high in hours:
            if hour not in self._sorted and hour not in self._recent:
                continue
            if high - low > _FEW_UNITS:
                found[low:high] = self.which(hour, indexes[low:high])
                continue
            for row in range(low, high):
                if self.has(hour, listed[row]):
                    found[row] = True
        return found

    def which(self, hour: int, indexes: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """True for each marked unit of an hour."""
        if hour not in self._sorted and hour not in self._recent:
            return np.zeros(len(indexes), dtype=np.bool_)
        if len(indexes) <= _FEW_UNITS:
            return np.fromiter((self.has(hour, index) for index in indexes.tolist()), np.bool_, len(indexes))
        marked = self._fold(hour)
        at = np.minimum(marked.searchsorted(indexes), len(marked) - 1)
        found: NDArray[np.bool_] = marked[at] == indexes
        return found

    def marked(self, units: Units) -> NDArray[np.bool_]:
        """True for each marked unit; the units must be in the order of their hours. Costs array work for each hour with
        marks."""
        out = np.zeros(len(units), dtype=np.bool_)
        if not len(units) or not self.count:
            return out
        if len(units) <= _FEW_UNITS:
            keys = zip((units["due_ms"] // HOUR_MS).tolist(), units["index"].tolist(), strict=True)
            return np.fromiter((self.has(hour, index) for hour, index in keys), np.bool_, len(units))
        hours = units["due_ms"] // HOUR_MS
        first = int(hours[0])
        for hour in [first] if (hours == first).all() else np.unique(hours).tolist():
            if hour in self._sorted or hour in self._recent:
                out |= (hours == hour) & np.isin(units["index"], self._fold(hour))
        return out

    def copy(self, hours: list[int]) -> dict[int, NDArray[np.uint32]]:
        """Hour -> marked indexes, for the given hours that have any; the arrays never change."""
        if not self.count:
            return {}
        return {hour: self._fold(hour) for hour in hours if hour in self._sorted or hour in self._recent}

    def forget(self, below: int) -> None:
        """Hours before `below` are gone: drop their marks, and the moves whose old and newest ids are both gone."""
        for hour in [hour for hour in {*self._sorted, *self._recent} if hour < below]:
            self.count -= len(self._fold(hour))
            self._sorted.pop(hour, None)
        self.moves.forget(below)

    def capture(self) -> MarksCapture:
        """All marks and moves as they are now; cheap, however many there are."""
        hours = sorted({*self._sorted, *self._recent})
        return MarksCapture([(hour, self._fold(hour)) for hour in hours], self.moves.capture())

    def dump(self) -> tuple[Ids, NDArray[np.void]]:
        """uint64 ids of all marked units, sorted, and all moves sorted by id."""
        return self.capture().arrays()

    def load(self, ids: Ids, moved: NDArray[np.void]) -> None:
        hours = hours_of(ids)
        starts = np.flatnonzero(np.diff(hours, prepend=-1))
        for part in np.split(ids, starts[1:]) if len(ids) else []:
            self._sorted[int(part[0]) >> 32] = part.astype(np.uint32)
        self.count = len(ids)
        self.moves.load(moved)


MOVED = np.dtype([("id", "<u8"), ("new_id", "<u8"), ("new_due_ms", "<i8")])
_RAW = np.dtype((np.void, MOVED.itemsize))
RUN_ROWS_MAX = 65_536
"""Runs are joined up to this size, which bounds the time of one join. Larger runs stay apart."""

Rows = NDArray[np.void]


class Moves:
    """Moved ids, and the ids that name their messages now.

    Owns a table of (id, newest id, due time) as a few sorted arrays, so that a million moves take 24 MB and a look-up
    takes a few binary searches. An id is moved once: moving a message again moves its newest id. Logical state; kept
    until the hours of both ids are removed.
    """

    def __init__(self) -> None:
        self._recent: dict[int, tuple[int, int]] = {}
        self._runs: list[Rows] = []  # each sorted by id
        self._keys: list[Ids] = []  # the ids of each run, contiguous for searching

    def __len__(self) -> int:
        return len(self._recent) + sum(map(len, self._runs))

    def add(self, id: int, new_id: int, new_due_ms: int) -> None:
        """Record the move of one message."""
        self._recent[id] = (new_id, new_due_ms)
        if len(self._recent) >= _RECENT_MAX:
            self._fold()

    def add_many(self, ids: Ids, new_ids: Ids, new_due_ms: NDArray[np.int64]) -> None:
        """Record the moves of several messages."""
        rows = np.empty(len(ids), dtype=MOVED)
        rows["id"], rows["new_id"], rows["new_due_ms"] = ids, new_ids, new_due_ms
        self._take(_sorted(rows))

    def _fold(self) -> None:
        rows = np.array([(id, *target) for id, target in sorted(self._recent.items())], dtype=MOVED)
        self._recent = {}
        self._take(rows)

    def _take(self, run: Rows) -> None:
        while self._runs and len(self._runs[-1]) <= min(2 * len(run), RUN_ROWS_MAX - len(run)):
            self._keys.pop()
            run = join_runs([self._runs.pop(), run])
        self._push(run)

    def _push(self, run: Rows) -> None:
        if len(run):
            self._runs.append(run)
            self._keys.append(np.ascontiguousarray(run["id"]))

    def _get(self, id: int) -> tuple[int, int] | None:
        found = self._recent.get(id)
        if found is not None:
            return found
        for run, keys in zip(self._runs, self._keys, strict=True):
            at = int(keys.searchsorted(np.uint64(id)))
            if at < len(run) and int(keys[at]) == id:
                return int(run["new_id"][at]), int(run["new_due_ms"][at])
        return None

    def resolve(self, id: int) -> tuple[int, int | None]:
        """The newest id of a message, and its due time if it was ever moved, else None."""
        due_ms: int | None = None
        while (target := self._get(id)) is not None:
            id, due_ms = target
        return id, due_ms

    def resolve_many(self, ids: Ids, due_ms: NDArray[np.int64]) -> tuple[Ids, NDArray[np.int64]]:
        """Newest ids and their due times; messages that were never moved keep those given."""
        if not len(self) or not len(ids):
            return ids, due_ms
        if self._recent:
            self._fold()
        ids, due_ms = ids.copy(), due_ms.copy()
        open_rows = np.arange(len(ids))
        while len(open_rows):
            moved = np.zeros(len(open_rows), dtype=np.bool_)
            wanted = ids[open_rows]
            for run, keys in zip(self._runs, self._keys, strict=True):
                at = np.minimum(keys.searchsorted(wanted), len(run) - 1)
                hit = (keys[at] == wanted) & ~moved
                if not hit.any():
                    continue
                rows = open_rows[hit]
                ids[rows] = run["new_id"][at[hit]]
                due_ms[rows] = run["new_due_ms"][at[hit]]
                moved |= hit
            open_rows = open_rows[moved]
        return ids, due_ms

    def forget(self, below: int) -> None:
        """Hours before `below` are gone: drop the rows whose two ids are both in them."""
        rows = self.dump()
        if not len(rows):
            return
        newest, _ = self.resolve_many(rows["id"].copy(), rows["new_due_ms"].copy())
        gone = (hours_of(rows["id"]) < below) & (hours_of(newest) < below)
        if gone.any():
            self.load(rows[~gone])

    def capture(self) -> list[Rows]:
        """All moves as runs that never change; any thread may join them with `join_runs`."""
        if self._recent:
            self._fold()
        return list(self._runs)

    def dump(self) -> Rows:
        """All moves sorted by id."""
        return join_runs(self.capture())

    def load(self, rows: Rows) -> None:
        """Replace the content by what `dump` returned."""
        self._recent, self._runs, self._keys = {}, [], []
        self._push(rows)


def join_runs(runs: Sequence[Rows]) -> Rows:
    """Join runs into one. Copies plain bytes: numpy is slow to find that the fields are equal."""
    if not runs:
        return np.zeros(0, dtype=MOVED)
    raw = np.concatenate([np.ascontiguousarray(run).view(_RAW) for run in runs])
    return _sorted(raw.view(MOVED))


def _sorted(rows: Rows) -> Rows:
    keys = np.ascontiguousarray(rows["id"])
    if (keys[1:] > keys[:-1]).all():
        return rows
    ordered: Rows = rows.view(_RAW)[np.argsort(keys, kind="stable")].view(MOVED)
    return ordered
