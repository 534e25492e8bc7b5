"""The ready queue of a topic: ids in the order they were dispatched; a position is a place in it.

Owns the topic's ids, a sparse index (first position of each tick that had messages), and which
positions are meant for one group alone (retries).

Invariants:
- Positions rise with due time: dispatch goes by (due_ms, index) and late arrivals are clamped.
- `first_retained` never falls; what lies below has been removed with its hours.

Called by the state machine; `read`, `gather` and `count` also by subscriptions.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.state.sequence import Sequence
from tickwheel.storage.disk import Disk
from tickwheel.wheel.units import HOUR_MS, Ids, Units, ids_of

IDS = np.dtype("<u8")
TICKS = np.dtype([("tick", "<i8"), ("position", "<u8")])
NO_TICK = -1 << 62


class ReadyLog:
    """See the module."""

    def __init__(self, ids: Sequence, ticks: Sequence, slot_ms: int) -> None:
        self.ids = ids
        self.ticks = ticks
        self._slot_ms = slot_ms
        self.last_tick = NO_TICK
        self.first_retained = 0
        self.target_positions: NDArray[np.int64] = np.zeros(0, np.int64)
        self.target_groups: NDArray[np.uint32] = np.zeros(0, np.uint32)

    @property
    def count(self) -> int:
        """Messages that have entered it so far: the next position."""
        return self.ids.count

    def append(self, units: Units) -> tuple[int, bool]:
        """Dispatched units in order; returns the first position and whether some are for one group only."""
        first = self.ids.append(ids_of(units))
        ticks = units["due_ms"] // self._slot_ms
        starts = np.flatnonzero(np.diff(ticks, prepend=self.last_tick))
        if len(starts):
            rows = np.empty(len(starts), TICKS)
            rows["tick"] = ticks[starts]
            rows["position"] = starts + first
            self.ticks.append(rows)
            self.last_tick = int(ticks[-1])
        targeted = np.flatnonzero(units["target_group"])
        if not len(targeted):
            return first, False
        self.target_positions = np.concatenate((self.target_positions, targeted + first))
        self.target_groups = np.concatenate((self.target_groups, units["target_group"][targeted]))
        return first, True

    def read(self, first: int, count: int) -> Ids:
        """Ids at `first` to `first + count - 1`."""
        return self.ids.read(first, count)

    def gather(self, positions: NDArray[np.int64]) -> Ids:
        """Ids at these positions, all below `count`."""
        return self.ids.gather(positions)

    def foreign(self, group_id: int, first: int, last: int) -> NDArray[np.int64]:
        """Positions in [first, last) that are meant for another group, rising."""
        if not len(self.target_positions):
            return self.target_positions
        start, end = np.searchsorted(self.target_positions, (first, last))
        part = self.target_positions[start:end]
        others: NDArray[np.int64] = part[self.target_groups[start:end] != group_id]
        return others

    def position_of_due(self, due_ms: int) -> int:
        """First position that may be due at or after `due_ms`: that of its tick's start."""
        tick = due_ms // self._slot_ms
        low, high = 0, self.ticks.count
        while low < high:
            middle = (low + high) // 2
            if int(self.ticks.read(middle, 1)["tick"][0]) < tick:
                low = middle + 1
            else:
                high = middle
        found = int(self.ticks.read(low, 1)["position"][0]) if low < self.ticks.count else self.count
        return max(found, self.first_retained)

    def hour_of(self, position: int) -> int | None:
        """Hour of the message at a position; None if there is none (yet)."""
        if position >= self.count:
            return None
        return int(self.ids.read(position, 1)[0]) >> 32

    def remove_hours(self, hour_min_kept: int) -> int:
        """Messages of hours below are gone; returns the first position retained."""
        self.first_retained = max(self.first_retained, self.position_of_due(hour_min_kept * HOUR_MS))
        keep = self.target_positions >= self.first_retained
        self.target_positions, self.target_groups = self.target_positions[keep], self.target_groups[keep]
        return self.first_retained

    def digest_into(self, sha: hashlib._Hash) -> None:
        """Everything that counts."""
        ids, ticks = self.ids, self.ticks
        sha.update(struct.pack("<QIQIQ", ids.count, ids.crc, ticks.count, ticks.crc, self.first_retained))
        sha.update(self.target_positions.astype("<u8").tobytes() + self.target_groups.astype("<u4").tobytes())


def new_ready_log(disk: Disk, directory: str, topic_id: int, slot_ms: int) -> ReadyLog:
    """The empty queue of a new topic; files left from a time after the last checkpoint are emptied."""
    return ReadyLog(
        Sequence(disk, ids_path(directory, topic_id), IDS),
        Sequence(disk, ticks_path(directory, topic_id), TICKS),
        slot_ms,
    )


def ids_path(directory: str, topic_id: int) -> str:
    """File of a topic's ids."""
    return f"{directory}/ready/{topic_id}"


def ticks_path(directory: str, topic_id: int) -> str:
    """File of a topic's ticks."""
    return f"{directory}/ready/{topic_id}.ticks"
