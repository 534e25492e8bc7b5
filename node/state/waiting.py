"""Messages of a group that wait in the wheel for their next attempt, so that a request about a message can show it.

Owns one row for each appended retry, until it is found dispatched. Rows are in the order of the log. Dispatched ones
(their key lies below the cursor) are dropped when the number of rows has doubled since the last time. At most ROWS_MAX:
beyond it the oldest rows are forgotten, and their messages merely appear as dispatched.

Nothing else depends on it. It is replicated state all the same: equal on all nodes, in checkpoint and digest.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.state.id_search import find_ids
from tickwheel.wheel.units import CursorKey, Ids

WAITING = np.dtype([("origin", "<u8"), ("id", "<u8"), ("due_ms", "<i8"), ("topic_id", "<u4"), ("attempts", "<u4")])
"""A row; `attempts`: deliveries so far."""
ROWS_LEAST = 256
ROWS_MAX = 1 << 20
Rows = NDArray[Any]


class WaitingRetries:
    def __init__(self, content: bytes = b"", limit: int = 0) -> None:
        self._count = len(content) // WAITING.itemsize
        self._limit = limit or ROWS_LEAST
        """Number of rows at which dispatched ones are dropped next."""
        self._rows: Rows = np.zeros(max(ROWS_LEAST, self._count), WAITING)
        self._rows[: self._count] = np.frombuffer(content, WAITING)

    def add(self, rows: Rows, cursor: CursorKey) -> None:
        """Add rows of retries that were appended to the wheel."""
        needed = self._count + len(rows)
        if needed > len(self._rows):
            grown = np.zeros(2 * needed, WAITING)
            grown[: self._count] = self._rows[: self._count]
            self._rows = grown
        self._rows[self._count : needed] = rows
        self._count = needed
        if needed >= self._limit:
            kept = self._waiting(cursor)[-ROWS_MAX // 2 :]
            self._rows = np.zeros(max(ROWS_LEAST, 2 * len(kept)), WAITING)
            self._rows[: len(kept)] = kept
            self._count = len(kept)
            self._limit = max(ROWS_LEAST, 2 * len(kept))

    def forget_topic(self, topic_id: int) -> None:
        """Drop the rows of a deleted topic."""
        if not self._count:
            return
        kept = self._rows[: self._count]
        kept = kept[kept["topic_id"] != topic_id]
        self._rows[: len(kept)] = kept
        self._count = len(kept)

    def of(self, origin: int, cursor: CursorKey) -> tuple[int, int, int] | None:
        """(id, due_ms, deliveries so far) of the retry that a message waits for; None: it waits for none."""
        rows = self._rows[: self._count]
        rows = rows[rows["origin"] == np.uint64(origin)]
        if not len(rows):
            return None
        row = rows[-1]
        if not _is_waiting(rows[-1:], cursor)[0]:
            return None
        return int(row["id"]), int(row["due_ms"]), int(row["attempts"])

    def waits(self, origins: Ids, cursor: CursorKey) -> NDArray[np.bool_]:
        """Which messages wait for a retry. `origins` rise, each once."""
        rows = self._rows[: self._count]
        places, of = find_ids(rows["origin"], origins)
        newest = np.full(len(origins), -1, np.int64)
        np.maximum.at(newest, of, places)
        found = newest >= 0
        found[found] = _is_waiting(rows[newest[found]], cursor)
        return found

    @property
    def used(self) -> bool:
        """Whether there are rows; without rows no retry waits."""
        return self._count > 0

    def newest(self, limit: int, cursor: CursorKey) -> Ids:
        """First ids of messages whose retry waits, among the last `limit` rows."""
        rows = self._rows[max(0, self._count - limit) : self._count]
        found: Ids = rows["origin"][_is_waiting(rows, cursor)]
        return found

    def count(self, cursor: CursorKey) -> int:
        """Number of waiting retries."""
        return len(self._waiting(cursor))

    def _waiting(self, cursor: CursorKey) -> Rows:
        rows = self._rows[: self._count]
        return rows[_is_waiting(rows, cursor)]

    def content(self) -> tuple[bytes, int]:
        """Values for the constructor."""
        return self._rows[: self._count].tobytes(), self._limit

    @property
    def size(self) -> int:
        """Bytes of all rows."""
        return self._count * WAITING.itemsize

    def digest(self) -> bytes:
        """Digest of the whole content."""
        content, limit = self.content()
        return hashlib.sha256(struct.pack("<Q", limit) + content).digest()


def _is_waiting(rows: Rows, cursor: CursorKey) -> NDArray[np.bool_]:
    index: Ids = rows["id"] & np.uint64(0xFFFF_FFFF)
    waiting: NDArray[np.bool_] = (rows["due_ms"] > cursor.due_ms) | (
        (rows["due_ms"] == cursor.due_ms) & (index >= np.uint64(cursor.index))
    )
    return waiting
