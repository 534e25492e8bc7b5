"""Marks of single messages of the cold tier: cancelled, moved to another time, or loaded after a move.

Owns, for each part, a sorted array of marks with a small dictionary of recent ones beside it. Logical state. A message
has at most one mark; most have none. node/state/cold.py, the only caller, decides what a mark means for the part's
loading.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.state.cold_parts import cold_id

MARKED = np.dtype([("row", "<u4"), ("kind", "u1"), ("due_ms", "<i8"), ("loaded_id", "<u8")])
"""A mark; 21 bytes."""
CANCELLED, MOVED, LOADED = 1, 2, 3
"""Kinds of marks: never to be delivered; due at `due_ms` and not loaded; moved, then loaded as `loaded_id`."""

_RECENT_MAX = 512
NEVER_MS = (1 << 63) - 1

MarkRows = NDArray[np.void]
_NONE: MarkRows = np.zeros(0, MARKED)


class Mark(NamedTuple):
    """The mark of one message."""

    kind: int
    due_ms: int = 0
    """The due time now; 0: the message was cancelled at its original time."""
    loaded_id: int = 0


class ColdMarks:
    def __init__(self) -> None:
        self._sorted: dict[int, MarkRows] = {}
        self._rows: dict[int, NDArray[np.uint32]] = {}  # of each, contiguous for searching
        self._recent: dict[int, dict[int, Mark | None]] = {}
        self._counts = [0, 0, 0, 0]
        self._least_ms: dict[int, int] = {}
        """Part -> first due time of its moved, waiting messages; only for parts that are not in `_unknown`."""
        self._unknown: set[int] = set()

    def __len__(self) -> int:
        return sum(self._counts)

    def count(self, kind: int) -> int:
        """Number of marks of a kind."""
        return self._counts[kind]

    def get(self, part: int, row: int) -> Mark | None:
        """The mark of one message."""
        recent = self._recent.get(part)
        if recent is not None and row in recent:
            return recent[row]
        rows = self._rows.get(part)
        if rows is None:
            return None
        at = int(rows.searchsorted(np.uint32(row)))
        if at == len(rows) or int(rows[at]) != row:
            return None
        found = self._sorted[part]
        return Mark(int(found["kind"][at]), int(found["due_ms"][at]), int(found["loaded_id"][at]))

    def put(self, part: int, row: int, mark: Mark | None) -> None:
        """Set the mark of one message; None removes it."""
        before = self.get(part, row)
        if before is not None:
            self._counts[before.kind] -= 1
        if mark is not None:
            self._counts[mark.kind] += 1
        recent = self._recent.setdefault(part, {})
        recent[row] = mark
        self._unknown.add(part)
        if len(recent) >= _RECENT_MAX:
            self.of(part)

    def of(self, part: int) -> MarkRows:
        """All marks of a part by rising row; the array never changes."""
        found = self._sorted.get(part, _NONE)
        recent = self._recent.pop(part, None)
        if recent:
            kept = found[~np.isin(found["row"], np.fromiter(recent, np.uint32, len(recent)))]
            fresh = [(row, *mark) for row, mark in recent.items() if mark is not None]
            found = np.concatenate([kept, np.array(fresh, MARKED)])
            found = found[np.argsort(found["row"], kind="stable")]
            self._set(part, found)
        return found

    def _set(self, part: int, rows: MarkRows) -> None:
        self._unknown.add(part)
        if len(rows):
            self._sorted[part] = rows
            self._rows[part] = np.ascontiguousarray(rows["row"])
        else:
            self._sorted.pop(part, None)
            self._rows.pop(part, None)

    def keep(self, part: int, kept: NDArray[np.bool_]) -> None:
        """Keep these of the marks that `of` returned; drop the others."""
        rows = self.of(part)
        for kind in (CANCELLED, MOVED, LOADED):
            self._counts[kind] -= int(np.count_nonzero(rows["kind"][~kept] == kind))
        self._set(part, rows[kept])

    def parts(self) -> list[int]:
        """Parts that have marks, rising."""
        for part in list(self._recent):
            self.of(part)
        return sorted(self._sorted)

    def _least_of(self, part: int) -> int:
        if part in self._unknown:
            self._unknown.discard(part)
            rows = self.of(part)
            self._unknown.discard(part)
            waiting = rows["due_ms"][rows["kind"] == MOVED]
            if len(waiting):
                self._least_ms[part] = int(waiting.min())
            else:
                self._least_ms.pop(part, None)
        return self._least_ms.get(part, NEVER_MS)

    def next_moved_ms(self) -> int:
        """First due time of moved messages that are not loaded; NEVER_MS if there are none."""
        for part in list(self._unknown):
            self._least_of(part)
        return min(self._least_ms.values(), default=NEVER_MS)

    def moved(self, after: int, due_below_ms: int, most: int) -> tuple[list[int], list[int], bool]:
        """Moved, waiting messages with ids above `after` that are due before a time, at most `most`: (ids, due times,
        whether there are more)."""
        ids: list[int] = []
        due: list[int] = []
        for part in self.parts():
            if cold_id(part + 1, 0) <= after or self._least_of(part) >= due_below_ms:
                continue
            rows = self.of(part)
            wanted = (rows["kind"] == MOVED) & (rows["due_ms"] < due_below_ms)
            base = cold_id(part, 0)
            if base <= after:
                wanted &= rows["row"] > after - base
            rows = rows[wanted]
            room = most - len(ids)
            ids += [base + row for row in rows["row"][:room].tolist()]
            due += rows["due_ms"][:room].tolist()
            if len(rows) > room:
                return ids, due, True
        return ids, due, False

    def moved_of(self, part: int) -> int:
        """Moved, waiting messages of a part."""
        if self._least_of(part) == NEVER_MS:
            return 0
        return int(np.count_nonzero(self.of(part)["kind"] == MOVED))

    # -- checkpoints

    def capture(self) -> Iterator[tuple[int, MarkRows]]:
        """All marks by rising part; the arrays never change."""
        return ((part, self._sorted[part]) for part in self.parts())

    def load(self, part: int, rows: MarkRows) -> None:
        """Load the marks of one part from a checkpoint."""
        self._set(part, rows)
        for kind in (CANCELLED, MOVED, LOADED):
            self._counts[kind] += int(np.count_nonzero(rows["kind"] == kind))
