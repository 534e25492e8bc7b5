"""Which ids were moved, and what names the message now.

Owns a table of (id, newest id, due time) as few sorted arrays, so that a million moves are 24 MB and a look-up a few
binary searches. An id is moved once: whoever moves a message again moves its newest id. Logical state; kept until the
hours of both ids are removed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tickwheel.wheel.units import Ids

MOVED = np.dtype([("id", "<u8"), ("new_id", "<u8"), ("new_due_ms", "<i8")])
_RECENT_MAX = 512

Rows = NDArray[np.void]


class Moves:
    """One per wheel."""

    def __init__(self) -> None:
        self._recent: dict[int, tuple[int, int]] = {}
        self._runs: list[Rows] = []  # each sorted by id, each larger than the next

    def __len__(self) -> int:
        return len(self._recent) + sum(map(len, self._runs))

    def add(self, id: int, new_id: int, new_due_ms: int) -> None:
        """One message was moved."""
        self._recent[id] = (new_id, new_due_ms)
        if len(self._recent) >= _RECENT_MAX:
            self._fold()

    def add_many(self, ids: Ids, new_ids: Ids, new_due_ms: NDArray[np.int64]) -> None:
        """Several were."""
        rows = np.empty(len(ids), dtype=MOVED)
        rows["id"], rows["new_id"], rows["new_due_ms"] = ids, new_ids, new_due_ms
        self._take(_sorted(rows))

    def _fold(self) -> None:
        rows = np.array([(id, *target) for id, target in sorted(self._recent.items())], dtype=MOVED)
        self._recent = {}
        self._take(rows)

    def _take(self, run: Rows) -> None:
        while self._runs and len(self._runs[-1]) <= 2 * len(run):
            run = _sorted(np.concatenate([self._runs.pop(), run]))
        if len(run):
            self._runs.append(run)

    def _get(self, id: int) -> tuple[int, int] | None:
        found = self._recent.get(id)
        if found is not None:
            return found
        for run in self._runs:
            at = int(run["id"].searchsorted(np.uint64(id)))
            if at < len(run) and int(run["id"][at]) == id:
                return int(run["new_id"][at]), int(run["new_due_ms"][at])
        return None

    def resolve(self, id: int) -> tuple[int, int | None]:
        """Newest id of a message and, if it was ever moved, its due time."""
        due_ms: int | None = None
        while (target := self._get(id)) is not None:
            id, due_ms = target
        return id, due_ms

    def resolve_many(self, ids: Ids, due_ms: NDArray[np.int64]) -> tuple[Ids, NDArray[np.int64]]:
        """Newest ids, and their due times: those given for what was never moved."""
        if not len(self) or not len(ids):
            return ids, due_ms
        if self._recent:
            self._fold()
        ids, due_ms = ids.copy(), due_ms.copy()
        open_rows = np.arange(len(ids))
        while len(open_rows):
            moved = np.zeros(len(open_rows), dtype=np.bool_)
            wanted = ids[open_rows]
            for run in self._runs:
                at = np.minimum(run["id"].searchsorted(wanted), len(run) - 1)
                hit = (run["id"][at] == wanted) & ~moved
                rows = open_rows[hit]
                ids[rows] = run["new_id"][at[hit]]
                due_ms[rows] = run["new_due_ms"][at[hit]]
                moved |= hit
            open_rows = open_rows[moved]
        return ids, due_ms

    def forget(self, below: int) -> None:
        """Hours below are gone: drop what names only them."""
        rows = self.dump()
        if not len(rows):
            return
        newest, _ = self.resolve_many(rows["id"].copy(), rows["new_due_ms"].copy())
        limit = np.uint64(below)
        gone = (rows["id"] >> np.uint64(32) < limit) & (newest >> np.uint64(32) < limit)
        if gone.any():
            self.load(rows[~gone])

    def dump(self) -> Rows:
        """All, sorted by id."""
        if self._recent:
            self._fold()
        return _sorted(np.concatenate(self._runs)) if self._runs else np.zeros(0, dtype=MOVED)

    def load(self, rows: Rows) -> None:
        """Instead of what it holds: what `dump` gave."""
        self._recent, self._runs = {}, [rows] if len(rows) else []


def _sorted(rows: Rows) -> Rows:
    keys = np.ascontiguousarray(rows["id"])
    return rows if (keys[1:] > keys[:-1]).all() else rows[np.argsort(keys, kind="stable")]
