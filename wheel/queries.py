"""Queries over pending messages: pages in dispatch order, counts by bucket of time, and the space of each topic.

A query is a job over a `Schedule` captured on the core's thread; it reads segments in a worker and never the wheel
itself. Each job does a bounded amount of work (units examined, hours opened) and tells where the next one continues. So
a query over everything is many small jobs and never delays the reads of deliveries for long. Selection by hashes and
masks may return too much, never too little: a caller that wants a tag or key checks the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tickwheel.wheel.buffer import Block, cut_at, join_blocks, ordered_block
from tickwheel.wheel.jobs import HourChunks
from tickwheel.wheel.units import HOUR_MS, UNIT, UNIT_BYTES, CursorKey, Units, join_units, picked

WINDOW_UNITS_FIRST = 4_096
"""Units that a scan reads at first; then four times as many each time."""
WINDOW_UNITS_MAX = 131_072
"""Units that a scan reads at most at once: 12 MiB, or more if a single tick has more."""
HOURS_MAX = 256
"""Hours that one job reads: each needs three open files."""
EXAMINED_MAX = 65_536
"""Units that one job examines, roughly: it ends after the window that reaches this. Some 10 ms of a worker."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A selection of units by their own columns; all conditions must hold."""

    topic_id: int | None = None
    tag_mask: int = 0
    """Every bit of it must be set in the unit's mask; 0: any tags."""
    key_hash: int = 0
    """0: any key."""
    with_key: bool = False
    """Only units that have a key."""
    stamped_ms_max: int | None = None
    """Only units whose command was stamped at this time or earlier."""
    retries: bool = True
    """Whether retries, which go to one group, count too."""
    target_group: int = 0
    """Only retries for this group; 0: all units."""

    @property
    def everything(self) -> bool:
        """Whether the selection has no condition."""
        return self == _ALL

    def of(self, units: Units) -> Units:
        """The selected units, in their order."""
        keep = self._rows(units)
        return units if keep is None else picked(units, keep)

    def ranked(self, units: Units) -> tuple[Units, NDArray[np.int64], int]:
        """The selected units, the rank of each, and the number of all units. A rank is the number of units up to and
        including this one, selected or not. Units that came after `stamped_ms_max` do not count: a sweep would count
        again what it has moved."""
        keep = self._rows(units)
        if self.stamped_ms_max is None or not len(units):
            numbers, count = np.arange(1, len(units) + 1), len(units)
        else:
            numbers = np.cumsum(units["scheduled_ms"] <= self.stamped_ms_max)
            count = int(numbers[-1])
        return (units, numbers, count) if keep is None else (picked(units, keep), numbers[keep], count)

    def _rows(self, units: Units) -> NDArray[np.bool_] | None:
        """True for each selected unit; None: all are."""
        if self.everything or not len(units):
            return None
        keep = np.ones(len(units), dtype=np.bool_)
        if self.topic_id is not None:
            keep &= units["topic_id"] == self.topic_id
        if self.tag_mask:
            mask = np.uint64(self.tag_mask)
            keep &= (units["tag_mask"] & mask) == mask
        if self.key_hash:
            keep &= units["key_hash"] == np.uint64(self.key_hash)
        if self.with_key:
            keep &= units["key_hash"] != 0
        if self.stamped_ms_max is not None:
            keep &= units["scheduled_ms"] <= self.stamped_ms_max
        if self.target_group:
            keep &= units["target_group"] == self.target_group
        if not self.retries:
            keep &= units["target_group"] == 0
        return None if keep.all() else keep


_ALL = Wanted()


@dataclass(frozen=True, slots=True)
class Schedule:
    """The pending units of a range of due times at one moment; immutable."""

    slot_ms: int
    due_min: int
    due_max: int
    cursor: CursorKey
    hours: list[HourChunks]
    """The hours of the range, at most HOURS_MAX."""
    hours_end_ms: int | None
    """Start of the first hour that was left out; None: none was."""
    blocks: list[Block]
    marks: Mapping[int, NDArray[np.uint32]]
    """Hour -> indexes of cancelled and moved units."""
    units: Mapping[int, int]
    """Hour -> its units, marked ones included."""

    def close(self) -> None:
        """Close the files."""
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
        joined = ordered_block(found) if hour.taken else join_blocks(found)
        cut = cut_at(joined, self.cursor)
        due, units = joined.due_ms[cut:], joined.units[cut:]
        marked = self.marks.get(hour.hour)
        if marked is not None and len(units):
            index = np.ascontiguousarray(units["index"])
            live = marked[np.minimum(marked.searchsorted(index), len(marked) - 1)] != index
            due, units = due[live], picked(units, live)
        return Block(due, units) if len(units) else None

    def tick_counts(self, hour: HourChunks) -> NDArray[np.int64]:
        """Units of each tick of the hour, passed and marked ones included: from directories and buffers alone."""
        counts = np.zeros(HOUR_MS // self.slot_ms, dtype=np.int64)
        for chunk in hour.chunks():
            counts[chunk.ticks] += np.diff(chunk.starts).astype(np.int64)
        begin_ms = hour.hour * HOUR_MS
        for block in self.blocks:
            part = block.between(begin_ms, begin_ms + HOUR_MS)
            if part is not None:
                counts += np.bincount((part.due_ms - begin_ms) // self.slot_ms, minlength=len(counts))
        return counts

    def windows(self, hour: HourChunks, first_ms: int, units_first: int) -> Iterator[tuple[int, int, int]]:
        """(low_ms, high_ms, rough number of units): windows that cover the hour's units from `first_ms` on. Ticks
        without units are skipped."""
        begin_ms, slot_ms = hour.hour * HOUR_MS, self.slot_ms
        low_ms = max(first_ms, self.due_min, begin_ms)
        end_ms = min(self.due_max, begin_ms + HOUR_MS)
        if low_ms >= end_ms:
            return
        below = np.cumsum(self.tick_counts(hour))
        tick, ticks_end = (low_ms - begin_ms) // slot_ms, -(-(end_ms - begin_ms) // slot_ms)
        last = int(below[ticks_end - 1])
        units_max = units_first
        passed = int(below[tick - 1]) if tick else 0
        while passed < last:
            tick = int(below.searchsorted(passed, side="right"))
            after = max(tick + 1, int(below.searchsorted(passed + units_max, side="right")))
            after = min(after, ticks_end)
            count = int(below[after - 1]) - passed
            yield max(low_ms, begin_ms + tick * slot_ms), min(end_ms, begin_ms + after * slot_ms), count
            passed += count
            units_max = min(units_max * 4, WINDOW_UNITS_MAX)


class ScanJob:
    """Finds pending units in dispatch order. After `run`: `units`, and where to go on (`next_key`; None: no more)."""

    kind = "scan"

    def __init__(
        self, schedule: Schedule, start: CursorKey | None, limit: int, wanted: Wanted = _ALL, surplus: int = 0
    ) -> None:
        """Finds at most `limit` units from `start` on, inclusive; and up to `surplus` more, if it has read them anyway.

        A job reads a tick as a whole, however many units that has. So a caller that takes a full tick in many steps
        asks for a surplus; a job for each step would make the work quadratic.
        """
        self._schedule = schedule
        self._start = start
        self._limit = limit
        self._wanted = wanted
        self._surplus = surplus
        self._examined = 0
        """Units read, about: what the job costs."""
        self.units: Units = np.zeros(0, dtype=UNIT)
        self.ranks: NDArray[np.int64] = np.zeros(0, np.int64)
        """The rank of each of `units` (see `Wanted.ranked`) among the pending units from `start` on."""
        self.passed = 0
        """Pending units from `start` up to `next_key`, counted as for `ranks`."""
        self.next_key: CursorKey | None = None
        self.done = False

    def run(self) -> None:
        """Read until enough units are found or examined."""
        parts: list[Units] = []
        ranks: list[NDArray[np.int64]] = []
        missing = self._limit
        try:
            for units, high_ms in self._windows():
                wanted, numbers, count = self._wanted.ranked(units)
                if len(wanted) >= missing:
                    taken = missing + self._surplus
                    # A copy, because a surplus is kept for long and a window has up to some megabytes.
                    parts.append(wanted[:taken].copy() if self._surplus else wanted[:taken])
                    ranks.append(self.passed + numbers[:taken])
                    self.passed = int(ranks[-1][-1])
                    last = parts[-1][-1]
                    self.next_key = CursorKey(int(last["due_ms"]), int(last["index"]) + 1)
                    break
                missing -= len(wanted)
                if len(wanted):
                    parts.append(wanted)
                    ranks.append(self.passed + numbers)
                self.passed += count
                if self._examined >= EXAMINED_MAX:
                    self.next_key = CursorKey(high_ms, 0)
                    break
            else:
                end_ms = self._schedule.hours_end_ms
                self.next_key = None if end_ms is None else CursorKey(end_ms, 0)
        finally:
            self._schedule.close()
        if parts:
            self.units = join_units(parts)
            self.ranks = np.concatenate(ranks)
        self.done = True

    def _windows(self) -> Iterator[tuple[Units, int]]:
        schedule, start = self._schedule, self._start
        first_ms = schedule.due_min if start is None else start.due_ms
        units_first = min(max(WINDOW_UNITS_FIRST, self._limit), WINDOW_UNITS_MAX)
        for hour in schedule.hours:
            for low_ms, high_ms, count in schedule.windows(hour, first_ms, units_first):
                self._examined += count
                units_first = min(units_first * 4, WINDOW_UNITS_MAX)
                block = schedule.between(hour, low_ms, high_ms)
                if block is not None:
                    cut = 0 if start is None else cut_at(block, start)
                    yield block.units[cut:], high_ms


class CountJob:
    """Counts pending units by bucket. After `run`: `buckets` of (start_ms, count), rising and not empty, and where to
    go on (`next_ms`; None: no more)."""

    kind = "count"

    def __init__(self, schedule: Schedule, bucket_ms: int, wanted: Wanted = _ALL) -> None:
        self._schedule = schedule
        self._bucket_ms = bucket_ms
        self._wanted = wanted
        self.buckets: list[tuple[int, int]] = []
        self.next_ms: int | None = None
        self.examined = 0
        """Units examined, roughly; without those of hours counted by their directory."""
        self.done = False

    def run(self) -> None:
        """Count hour by hour, and read units only where no number suffices. If all units of an hour are wanted, in one
        bucket, the numbers of its units and marks suffice. If all are wanted and none has a mark, its directory
        suffices for whole ticks."""
        counts: dict[int, int] = {}
        schedule = self._schedule
        try:
            for start_ms, count in self._counts():
                counts[start_ms] = counts.get(start_ms, 0) + count
        finally:
            schedule.close()
        self.buckets = sorted((start_ms, count) for start_ms, count in counts.items() if count)
        self.done = True

    def _counts(self) -> Iterator[tuple[int, int]]:
        schedule, slot_ms = self._schedule, self._schedule.slot_ms
        for hour in schedule.hours:
            begin_ms = hour.hour * HOUR_MS
            low_ms, high_ms = max(schedule.due_min, begin_ms), min(schedule.due_max, begin_ms + HOUR_MS)
            ahead = self._wanted.everything and schedule.cursor.due_ms < begin_ms
            if ahead and self._bucket_ms == high_ms - low_ms == HOUR_MS:
                marked = schedule.marks.get(hour.hour)
                yield begin_ms, schedule.units[hour.hour] - (0 if marked is None else len(marked))
                continue
            # Whole ticks after the cursor's are counted without reading units if every unit is wanted.
            whole_ms = max(-(-low_ms // slot_ms) * slot_ms, (schedule.cursor.due_ms // slot_ms + 1) * slot_ms)
            whole_end_ms = high_ms // slot_ms * slot_ms
            stretches = [(low_ms, high_ms)]
            if self._wanted.everything and hour.hour not in schedule.marks and whole_ms < whole_end_ms:
                yield from self._by_directory(hour, whole_ms, whole_end_ms)
                stretches = [(low_ms, whole_ms), (whole_end_ms, high_ms)]
            for first_ms, end_ms in stretches:
                for window_low_ms, window_high_ms, count in schedule.windows(hour, first_ms, WINDOW_UNITS_MAX):
                    if window_low_ms >= end_ms:
                        break
                    self.examined += count
                    block = schedule.between(hour, window_low_ms, min(window_high_ms, end_ms))
                    if block is not None:
                        due = self._wanted.of(block.units)["due_ms"].astype(np.int64)
                        yield from _by_bucket(due, np.ones(len(due), np.int64), self._bucket_ms)
                    if self.examined >= EXAMINED_MAX and len(stretches) == 1:
                        self.next_ms = window_high_ms
                        return
        self.next_ms = schedule.hours_end_ms

    def _by_directory(self, hour: HourChunks, low_ms: int, high_ms: int) -> Iterator[tuple[int, int]]:
        """(start_ms, count) of whole ticks, from the directory: no unit of them is passed or marked."""
        begin_ms, slot_ms = hour.hour * HOUR_MS, self._schedule.slot_ms
        counts = self._schedule.tick_counts(hour)
        ticks = np.flatnonzero(counts)
        low, high = ticks.searchsorted(((low_ms - begin_ms) // slot_ms, (high_ms - begin_ms) // slot_ms))
        ticks = ticks[low:high]
        yield from _by_bucket(begin_ms + ticks * slot_ms, counts[ticks], self._bucket_ms)


def _by_bucket(due: NDArray[np.int64], counts: NDArray[np.int64], bucket_ms: int) -> Iterator[tuple[int, int]]:
    if not len(due):
        return
    starts, places = np.unique(due // bucket_ms, return_inverse=True)
    sums = np.bincount(places, weights=counts)
    for start, count in zip(starts.tolist(), sums.tolist(), strict=True):
        yield start * bucket_ms, int(count)


USAGE_UNITS_MAX = 1_000_000
"""Units that one job reads, about 100 MB of index; its last hour may exceed it."""
TICKS_OF_AN_HOUR = 36_000
"""Ticks of an hour at the narrowest slot."""


class UsageJob:
    """How much of the hour files each topic takes: reads indexes, never payloads.

    It ends after USAGE_UNITS_MAX units, at the end of an hour.

    After `run`: `topics` (topic id -> messages, bytes of their records and units), and `next_hour` (where the next
    job continues; None: nothing is left)."""

    kind = "usage"

    def __init__(self, hours: Sequence[HourChunks]) -> None:
        self._hours = hours
        self.topics: dict[int, tuple[int, int]] = {}
        self.next_hour: int | None = None
        self.done = False

    def run(self) -> None:
        """Read hour by hour, a chunk at a time."""
        read = 0
        try:
            for hour in self._hours:
                if read >= USAGE_UNITS_MAX:
                    self.next_hour = hour.hour
                    break
                for block in hour.blocks(0, TICKS_OF_AN_HOUR):
                    read += len(block.units)
                    self._add(block.units["topic_id"], block.units["size"])
        finally:
            for hour in self._hours:
                hour.close()
        self.done = True

    def _add(self, topic_ids: np.ndarray, sizes: np.ndarray) -> None:
        ids, places = np.unique(topic_ids, return_inverse=True)
        counts = np.bincount(places)
        weights = np.bincount(places, weights=sizes.astype(np.float64))
        for topic_id, count, weight in zip(ids.tolist(), counts.tolist(), weights.tolist(), strict=True):
            messages, size = self.topics.get(topic_id, (0, 0))
            self.topics[topic_id] = messages + count, size + int(weight) + count * UNIT_BYTES
