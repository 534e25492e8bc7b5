"""The ready queue of a topic: ids in the order they were dispatched; a position is a place in it.

Owns the topic's ids, a sparse index (first position of each tick that had messages, and of each hour), and
which positions are meant for one group alone (retries; targets.py).

Invariants:
- Positions rise with due time: dispatch goes by (due_ms, index) and late arrivals are clamped.
- `first_retained` never falls; what lies below has been removed with its hours and is not read again.

Called by the state machine; `read`, `gather` and `count` also by subscriptions.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left, bisect_right
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.state.sequence import Sequence
from tickwheel.node.state.targets import TARGET, Targets
from tickwheel.storage.disk import Disk
from tickwheel.wheel.units import HOUR_MS, Ids, Units, find_ids, ids_of, picked, starts_of

IDS = np.dtype("<u8")
TICKS = np.dtype([("tick", "<i8"), ("position", "<u8")])
NO_TICK = -1 << 62
SEARCHED = 1 << 18
"""Positions read together by a search: two megabytes."""
_NONE: NDArray[np.int64] = np.zeros(0, np.int64)


class Arrival(NamedTuple):
    """Units of one topic that a dispatch brings, in order, with their ids and the first and last due time."""

    topic_id: int
    units: Units
    ids: Ids | int
    """A plain number for a single unit."""
    first_due_ms: int
    last_due_ms: int


def by_topic(units: Units) -> list[Arrival]:
    """The units of a dispatch, at least one, topic by topic. Computes the columns of all topics in one pass."""
    topics = units["topic_id"]
    if (topics != topics[0]).any():
        units = picked(units, topics.argsort(kind="stable"))
        topics = units["topic_id"]
    ids, due_ms, starts = ids_of(units), units["due_ms"], starts_of(topics)
    firsts = starts.tolist()
    lasts = [*firsts[1:], len(units)]
    columns = topics[starts], ids[starts], due_ms[starts], due_ms[np.array(lasts) - 1]
    return [
        Arrival(topic_id, units[first:last], ids[first:last] if last - first > 1 else id, first_due_ms, last_due_ms)
        for first, last, topic_id, id, first_due_ms, last_due_ms in zip(
            firsts, lasts, *(column.tolist() for column in columns), strict=True
        )
    ]


class ReadyLog:
    def __init__(self, ids: Sequence, ticks: Sequence, targets: Targets, slot_ms: int) -> None:
        self.ids = ids
        self.ticks = ticks
        self.targets = targets
        self.slot_ms = slot_ms
        self.last_tick = NO_TICK
        self._last_from = 0
        """Position of the first message of the last tick."""
        self.first_retained = 0
        self._hours: list[int] = []
        """Retained hours that had messages, rising, each with its first position and its first row of `ticks`."""
        self._hour_positions: list[int] = []
        self._hour_ticks: list[int] = []
        self._hour_dispatched: list[int] = []
        """For each of these hours the hour in which its last message was dispatched: much later, if a message was
        already due when it was scheduled."""

    @property
    def count(self) -> int:
        """Messages that ever entered the queue: the next position."""
        return self.ids.count

    def append(self, arrival: Arrival, stamped_ms: int, *, targeted: bool) -> tuple[int, bool]:
        """Append units dispatched at `stamped_ms`; returns the first position and whether some are for one group only.
        `targeted`: some may be."""
        _, units, ids, first_due_ms, last_due_ms = arrival
        first_tick, last_tick = first_due_ms // self.slot_ms, last_due_ms // self.slot_ms
        if first_tick != last_tick:
            self._note_ticks(units["due_ms"] // self.slot_ms)
        elif first_tick != self.last_tick:
            self._note_tick(first_tick)
        first_hour, stamped_hour = first_due_ms // HOUR_MS, stamped_ms // HOUR_MS
        if not self._hours or first_hour != self._hours[-1] or self._hour_dispatched[-1] < stamped_hour:
            self._note_dispatch(first_hour, stamped_hour)
        first = self.ids.append_one(ids) if isinstance(ids, int) else self.ids.append(ids)
        rows = np.flatnonzero(units["target_group"]) if targeted else _NONE
        if not len(rows):
            return first, False
        self.targets.append(rows + first, picked(units, rows))
        return first, True

    def _note_tick(self, tick: int) -> None:
        """`_note_ticks` for units of a single tick, not the tick of the units before: arrays of one element would cost
        ten times as much, for each topic of a dispatch."""
        hour = tick * self.slot_ms // HOUR_MS
        if hour != self.last_tick * self.slot_ms // HOUR_MS:
            self._hours.append(hour)
            self._hour_positions.append(self.ids.count)
            self._hour_ticks.append(self.ticks.count)
            self._hour_dispatched.append(hour)
        self.ticks.append_one((tick, self.ids.count))
        self.last_tick, self._last_from = tick, self.ids.count

    def _note_ticks(self, ticks: NDArray[np.int64]) -> None:
        starts = np.flatnonzero(np.diff(ticks, prepend=self.last_tick))
        rows = np.empty(len(starts), TICKS)
        rows["tick"] = ticks[starts]
        rows["position"] = starts + self.ids.count
        hours = rows["tick"] * self.slot_ms // HOUR_MS
        last_hour = self.last_tick * self.slot_ms // HOUR_MS
        for place in np.flatnonzero(np.diff(hours, prepend=last_hour)).tolist():
            self._hours.append(int(hours[place]))
            self._hour_positions.append(int(rows["position"][place]))
            self._hour_ticks.append(self.ticks.count + place)
            self._hour_dispatched.append(int(hours[place]))
        self.ticks.append(rows)
        self.last_tick, self._last_from = int(ticks[-1]), int(rows["position"][-1])

    def _note_dispatch(self, first_hour: int, stamped_hour: int) -> None:
        """Note that messages of the hours from the first one on were dispatched."""
        place = len(self._hours) - 1
        while place >= 0 and self._hours[place] >= first_hour:
            if self._hour_dispatched[place] < stamped_hour:
                self._hour_dispatched[place] = stamped_hour
            place -= 1

    def read(self, first: int, count: int) -> Ids:
        """Ids at positions `first` to `first + count - 1`."""
        return self.ids.read(first, count)

    def gather(self, positions: NDArray[np.int64]) -> Ids:
        """Ids at these positions, which must be below `count` and not below `first_retained`."""
        return self.ids.gather(positions)

    def foreign(self, group_id: int, first: int, last: int) -> NDArray[np.int64]:
        """Positions in [first, last) that are meant for another group, rising; not to be written to."""
        if self.targets.last_position < first:
            return _NONE
        rows = self.targets.between(first, last)
        others: NDArray[np.int64] = rows["position"][rows["group"] != group_id].astype(np.int64)
        return others

    def search(self, first: int, end: int, wanted: Ids) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(positions in [first, end) that have a wanted id, rising; for each of them the place in `wanted`). `wanted`
        rises, and has each id once."""
        found = [(_NONE, _NONE)]
        for at in range(first, end, SEARCHED):
            places, rows = find_ids(self.read(at, min(SEARCHED, end - at)), wanted)
            found.append((places + at, rows))
        positions, rows = (np.concatenate(column) for column in zip(*found, strict=True))
        return positions, rows

    def position_of_due(self, due_ms: int) -> int:
        """First retained position that may be due at or after `due_ms`: that of its tick's start."""
        tick = due_ms // self.slot_ms
        place = bisect_left(self._hours, due_ms // HOUR_MS)
        if place == len(self._hours):
            return self.count
        low = self._hour_ticks[place]
        high = self._hour_ticks[place + 1] if place + 1 < len(self._hours) else self.ticks.count
        while low < high:
            middle = (low + high) // 2
            if int(self.ticks.read(middle, 1)["tick"][0]) < tick:
                low = middle + 1
            else:
                high = middle
        return int(self.ticks.read(low, 1)["position"][0]) if low < self.ticks.count else self.count

    def end_of_due(self, due_ms: int) -> int:
        """First position behind the tick of `due_ms`."""
        return self.position_of_due((due_ms // self.slot_ms + 1) * self.slot_ms)

    def first_of_hour(self, hour_min: int) -> int:
        """First position of a message of this hour or a later one."""
        place = bisect_left(self._hours, hour_min)
        return self._hour_positions[place] if place < len(self._hours) else self.count

    @property
    def oldest_hour(self) -> int | None:
        """The first retained hour that had messages."""
        return self._hours[0] if self._hours else None

    def first_hour_dispatched_since(self, hour: int) -> int | None:
        """First retained hour of which a message was dispatched in `hour` or later."""
        found = (kept for kept, last in zip(self._hours, self._hour_dispatched, strict=True) if last >= hour)
        return next(found, None)

    def hour_of(self, position: int) -> int | None:
        """Hour of the message at a retained position; None if there is none (yet)."""
        if position >= self.count:
            return None
        return self._hours[bisect_right(self._hour_positions, position) - 1]

    def due_tick_ms(self, position: int) -> int | None:
        """Due time of the message at a retained position, rounded down to its tick; None if there is none (yet)."""
        if position >= self.count:
            return None
        if position >= self._last_from:  # nearly always, where consumers keep up
            return self.last_tick * self.slot_ms
        place = bisect_right(self._hour_positions, position) - 1
        low = self._hour_ticks[place]
        high = self._hour_ticks[place + 1] if place + 1 < len(self._hours) else self.ticks.count
        ticks = self.ticks.read(low, high - low)
        row = ticks["position"].searchsorted(np.uint64(position), side="right") - 1  # an int would copy the column
        return int(ticks["tick"][row]) * self.slot_ms

    def remove_hours(self, hour_min_kept: int) -> None:
        """Drop the messages of hours below."""
        self.first_retained = self.first_of_hour(hour_min_kept)
        place = bisect_left(self._hours, hour_min_kept)
        tick_row = self._hour_ticks[place] if place < len(self._hours) else self.ticks.count
        del self._hours[:place], self._hour_positions[:place], self._hour_ticks[:place], self._hour_dispatched[:place]
        self.ids.drop_below(self.first_retained)
        self.ticks.drop_below(tick_row)
        self.targets.drop_below(self.first_retained)

    def sequences(self) -> list[Sequence]:
        """The lists in files."""
        return [self.ids, self.ticks, self.targets.rows]

    def hours_bytes(self) -> bytes:
        """int64[n, 3]: hour, its first position, its first row of ticks."""
        rows = np.array([self._hours, self._hour_positions, self._hour_ticks], "<i8").T
        return rows.tobytes()

    def dispatched_bytes(self) -> bytes:
        """int64[n]: for each of these hours, the one in which its last message was dispatched."""
        return np.array(self._hour_dispatched, "<i8").tobytes()

    def restore_hours(self, data: bytes, dispatched: bytes) -> None:
        """Restore what `hours_bytes` and `dispatched_bytes` returned."""
        rows = np.frombuffer(data, "<i8").reshape(-1, 3)
        self._hours, self._hour_positions, self._hour_ticks = (rows[:, column].tolist() for column in range(3))
        self._hour_dispatched = np.frombuffer(dispatched, "<i8").tolist() if dispatched else list(self._hours)
        kept = self.ticks.count > self.ticks.first
        self._last_from = int(self.ticks.read(self.ticks.count - 1, 1)["position"][0]) if kept else self.count

    def digest_into(self, sha: hashlib._Hash) -> None:
        """Add the logical content to a digest."""
        ids, ticks = self.ids, self.ticks
        sha.update(struct.pack("<QIQIQQ", ids.count, ids.crc, ticks.count, ticks.crc, self.first_retained, ticks.first))
        targets = self.targets.rows
        sha.update(struct.pack("<QIQ", targets.count, targets.crc, targets.first))
        sha.update(self.dispatched_bytes())


def new_ready_log(disk: Disk, directory: str, topic_id: int, slot_ms: int) -> ReadyLog:
    """The empty queue of a new topic."""
    return ReadyLog(
        Sequence(disk, ids_path(directory, topic_id), IDS),
        Sequence(disk, ticks_path(directory, topic_id), TICKS),
        Targets(Sequence(disk, targets_path(directory, topic_id), TARGET)),
        slot_ms,
    )


def ids_path(directory: str, topic_id: int) -> str:
    """Common prefix of a topic's files of ids."""
    return f"{directory}/ready/{topic_id}.ids"


def targets_path(directory: str, topic_id: int) -> str:
    """Common prefix of a topic's files of targets."""
    return f"{directory}/ready/{topic_id}.targets"


def ticks_path(directory: str, topic_id: int) -> str:
    """Common prefix of a topic's files of ticks."""
    return f"{directory}/ready/{topic_id}.ticks"
