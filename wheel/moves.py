"""Moved ids, and the ids that name their messages now.

Owns a table of (id, newest id, due time) as a few sorted arrays, so that a million moves take 24 MB and a look-up takes
a few binary searches. An id is moved once: moving a message again moves its newest id. Logical state; kept until the
hours of both ids are removed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tickwheel.wheel.units import Ids

MOVED = np.dtype([("id", "<u8"), ("new_id", "<u8"), ("new_due_ms", "<i8")])
_RAW = np.dtype((np.void, MOVED.itemsize))
_RECENT_MAX = 512
RUN_ROWS_MAX = 65_536
"""Runs are joined up to this size, which bounds the time of one join. Larger runs stay apart."""

Rows = NDArray[np.void]


class Moves:
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
        limit = np.uint64(below)
        gone = (rows["id"] >> np.uint64(32) < limit) & (newest >> np.uint64(32) < limit)
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
