"""Questions about what is pending: pages in delivery order, and counts by bucket of time.

Jobs over a `Schedule` captured on the loop; they read segments in a worker and never the wheel itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tickwheel.wheel.buffer import Block, join_blocks
from tickwheel.wheel.jobs import HourChunks
from tickwheel.wheel.slots import cut_at
from tickwheel.wheel.units import HOUR_MS, UNIT, CursorKey, Units, join_units

SCAN_TICKS_FIRST = 4
"""A scan reads so many ticks at first, then ever more, until its page is full."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What was pending in a range of due times at one moment; immutable."""

    slot_ms: int
    due_min: int
    due_max: int
    cursor: CursorKey
    hours: list[HourChunks]
    blocks: list[Block]
    marks: Mapping[int, NDArray[np.uint32]]
    """Cancelled and moved indexes by hour."""

    def close(self) -> None:
        """Let the files go."""
        for hour in self.hours:
            hour.close()

    def between(self, hour: HourChunks, low_ms: int, high_ms: int) -> Block | None:
        """Pending units of one hour with low_ms <= due_ms < high_ms, in dispatch order."""
        begin_ms = hour.hour * HOUR_MS
        slot_ms = self.slot_ms
        found: list[Block] = []
        for block in hour.blocks((low_ms - begin_ms) // slot_ms, -(-(high_ms - begin_ms) // slot_ms)):
            part = block.between(low_ms, high_ms)
            if part is not None:
                found.append(part)
        found += [part for block in self.blocks if (part := block.between(low_ms, high_ms)) is not None]
        if not found:
            return None
        joined = join_blocks(found)
        cut = cut_at(joined, self.cursor)
        due, units = joined.due_ms[cut:], joined.units[cut:]
        marked = self.marks.get(hour.hour)
        if marked is not None and len(units):
            live = ~np.isin(units["index"], marked)
            due, units = due[live], units[live]
        return Block(due, units) if len(units) else None


class ScanJob:
    """One page of pending units, in dispatch order: `units` after `run`."""

    kind = "scan"

    def __init__(self, schedule: Schedule, after: CursorKey | None, limit: int, topic_id: int | None) -> None:
        self._schedule = schedule
        self._after = after
        self._limit = limit
        self._topic_id = topic_id
        self.units: Units = np.zeros(0, dtype=UNIT)
        self.done = False

    def run(self) -> None:
        """Read until the page is full."""
        parts: list[Units] = []
        missing = self._limit
        try:
            for units in self._windows():
                parts.append(units[:missing])
                missing -= len(parts[-1])
                if missing <= 0:
                    break
        finally:
            self._schedule.close()
        if parts:
            self.units = join_units(parts)
        self.done = True

    def _windows(self) -> Iterator[Units]:
        schedule = self._schedule
        first_ms = schedule.due_min if self._after is None else max(schedule.due_min, self._after.due_ms)
        for hour in schedule.hours:
            low_ms = max(first_ms, hour.hour * HOUR_MS)
            end_ms = min(schedule.due_max, (hour.hour + 1) * HOUR_MS)
            step_ms = SCAN_TICKS_FIRST * schedule.slot_ms
            while low_ms < end_ms:
                high_ms = min(end_ms, (low_ms // schedule.slot_ms) * schedule.slot_ms + step_ms)
                block = schedule.between(hour, low_ms, high_ms)
                if block is not None:
                    units = block.units
                    if self._after is not None:
                        cut = cut_at(block, CursorKey(self._after.due_ms, self._after.index + 1))
                        units = units[cut:]
                    if self._topic_id is not None:
                        units = units[units["topic_id"] == self._topic_id]
                    if len(units):
                        yield units
                low_ms = high_ms
                step_ms *= 4


class CountJob:
    """Pending units by bucket: `buckets` after `run`, (start_ms, count) rising, only those that are not empty."""

    kind = "count"

    def __init__(self, schedule: Schedule, bucket_ms: int, topic_id: int | None) -> None:
        self._schedule = schedule
        self._bucket_ms = bucket_ms
        self._topic_id = topic_id
        self.buckets: list[tuple[int, int]] = []
        self.done = False

    def run(self) -> None:
        """Count hour by hour; a whole hour without cancelled units is counted from its directory alone."""
        counts: dict[int, int] = {}
        schedule = self._schedule
        try:
            for hour in schedule.hours:
                low_ms = max(schedule.due_min, hour.hour * HOUR_MS)
                high_ms = min(schedule.due_max, (hour.hour + 1) * HOUR_MS)
                for start_ms, count in self._hour(hour, low_ms, high_ms):
                    counts[start_ms] = counts.get(start_ms, 0) + count
        finally:
            schedule.close()
        self.buckets = sorted((start_ms, count) for start_ms, count in counts.items() if count)
        self.done = True

    def _hour(self, hour: HourChunks, low_ms: int, high_ms: int) -> Iterator[tuple[int, int]]:
        schedule = self._schedule
        bucket_ms = self._bucket_ms
        whole = (
            self._topic_id is None
            and hour.hour not in schedule.marks
            and low_ms % schedule.slot_ms == 0
            and high_ms % schedule.slot_ms == 0
            and schedule.cursor.due_ms <= low_ms
            and not (schedule.cursor.due_ms == low_ms and schedule.cursor.index)
        )
        if not whole:
            block = schedule.between(hour, low_ms, high_ms)
            if block is not None:
                due = block.due_ms
                if self._topic_id is not None:
                    due = due[block.units["topic_id"] == self._topic_id]
                yield from _by_bucket(due, np.ones(len(due), np.int64), bucket_ms)
            return
        ticks_low = (low_ms - hour.hour * HOUR_MS) // schedule.slot_ms
        ticks_high = (high_ms - hour.hour * HOUR_MS) // schedule.slot_ms
        for chunk in hour.chunks():
            a, b = np.searchsorted(chunk.ticks, (ticks_low, ticks_high))
            due = hour.hour * HOUR_MS + chunk.ticks[a:b].astype(np.int64) * schedule.slot_ms
            yield from _by_bucket(due, np.diff(chunk.starts[a : b + 1]).astype(np.int64), bucket_ms)
        for block in schedule.blocks:
            part = block.between(low_ms, high_ms)
            if part is not None:
                yield from _by_bucket(part.due_ms, np.ones(len(part.due_ms), np.int64), bucket_ms)


def _by_bucket(due: NDArray[np.int64], counts: NDArray[np.int64], bucket_ms: int) -> Iterator[tuple[int, int]]:
    if not len(due):
        return
    starts, places = np.unique(due // bucket_ms, return_inverse=True)
    sums = np.bincount(places, weights=counts)
    for start, count in zip(starts.tolist(), sums.tolist(), strict=True):
        yield start * bucket_ms, int(count)
