"""The hour wheel: where every unit lies, in hour files, in bundles, or in the two arrival buffers.

Owns the numbers of each hour (`HourTable`), the arrival buffers, the chunks in bundles, and the chunk directories that
are known. Gives a new unit its index and its offset.

Invariants:
- A unit lies in exactly one place until its hour is removed: a segment of its hour (merged), a bundle, the frozen
  buffer, or the active buffer.
- A known directory is complete: it lists all chunks of the hour's files, by rising first index.

Knows no cursor and no marks, and reads no file: `open_hour` gives a job what it needs for that.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tickwheel.storage.bundle import Layout
from tickwheel.storage.disk import Disk
from tickwheel.storage.segment import ROW_BYTES, Chunk, SegmentLengths
from tickwheel.wheel.buffer import Block, Buffer
from tickwheel.wheel.bundles import Bundles, TakenChunks
from tickwheel.wheel.checkpoint import RunContent
from tickwheel.wheel.jobs import HourChunks
from tickwheel.wheel.units import HOUR_MS, Ids, Units, hours_of, spans, starts_of


class Holdings:
    """The attributes are for others to read; only this class changes them."""

    def __init__(self, disk: Disk, directory: str, slot_ms: int) -> None:
        self._disk = disk
        self._directory = directory
        self._slot_ms = slot_ms
        self.hours = HourTable()
        self.bundles = Bundles()
        self.active = Buffer()
        """Takes the arrivals."""
        self.frozen: Buffer | None = None
        """Is being merged."""
        self.removed_below = 0
        """Hours below it have been removed."""
        self._directories: dict[int, list[Chunk]] = {}
        self._first_due: tuple[int, int | None] | None = None
        """The last question to `first_due_ms` and its answer: a master asks with every tick. Arrivals keep the answer
        up to date; any other change of the holdings drops it."""

    def restore(self, content: RunContent, removed_below: int) -> None:
        """Fill empty holdings with what a checkpoint holds."""
        self._first_due = None
        self.removed_below = removed_below
        self.hours.load(content.hours)
        self.bundles.load(content.bundles)
        self.active.restore(content.units, content.extents, content.records)

    # -- units come, move to files, and go

    def append(self, due: NDArray[np.int64], units: Units, records: bytes | memoryview) -> Ids:
        """Put units into the active buffer under the next indexes and offsets of their hours. Returns their ids.

        `due`: their due times, rising. Fills due_ms, index and offset of the units in place.
        """
        hours, count = self.hours, len(units)
        if int(due[0]) // HOUR_MS == int(due[-1]) // HOUR_MS:
            return self._append_to_hour(int(due[0]) // HOUR_MS, due, units, records)
        hour = due // HOUR_MS
        starts = starts_of(hour)
        used = hour[starts]
        hours.cover(int(used[0]), int(used[-1]))
        at_hour = used - hours.base
        counts = spans(starts, count)
        ends = np.cumsum(units["size"], dtype=np.int64)
        places = ends - units["size"]
        at = places[starts]
        index = np.arange(count, dtype=np.int64) + (hours.next_index[at_hour] - starts).repeat(counts)
        units["due_ms"] = due
        units["index"] = index
        units["offset"] = places + (hours.next_offset[at_hour] - at).repeat(counts)
        hours.next_index[at_hour] += counts
        hours.next_offset[at_hour] += spans(at, int(ends[-1]))
        ids: Ids = (hour.astype(np.uint64) << np.uint64(32)) | index.astype(np.uint64)
        self.active.add(due, units, ids, bytes(records), starts, at)
        self._note_first_due(due)
        return ids

    def _append_to_hour(self, hour: int, due: NDArray[np.int64], units: Units, records: bytes | memoryview) -> Ids:
        """`append` for units of a single hour, as in most batches."""
        hours, count = self.hours, len(units)
        hours.cover(hour, hour)
        at_hour = hour - hours.base
        first, offset = int(hours.next_index[at_hour]), int(hours.next_offset[at_hour])
        index = np.arange(first, first + count, dtype=np.int64)
        ends = np.cumsum(units["size"], dtype=np.int64)
        units["due_ms"] = due
        units["index"] = index
        units["offset"] = ends - units["size"] + offset
        hours.next_index[at_hour] = first + count
        hours.next_offset[at_hour] = offset + int(ends[-1])
        ids: Ids = np.uint64(hour << 32) | index.astype(np.uint64)
        start = np.zeros(1, np.int64)
        self.active.add(due, units, ids, bytes(records), start, start)
        self._note_first_due(due)
        return ids

    def ingest(
        self, name: str, layout: Layout, *, clamp_ms: int, stamped_ms: int, topic_ids: tuple[int, ...]
    ) -> TakenChunks:
        """Give a bundle's units the next indexes and offsets of their hours. Units of hours before the hour of
        `clamp_ms` go into that hour. Neither reads nor writes the bundle."""
        self._first_due = None
        table = layout.table
        target = np.maximum(table["hour"].astype(np.int64), clamp_ms // HOUR_MS)
        units, log_bytes = table["units"].astype(np.int64), table["log_bytes"].astype(np.int64)
        starts = np.flatnonzero(np.diff(target, prepend=-1))
        used = target[starts]
        hours = self.hours
        hours.cover(int(used[0]), int(used[-1]))
        at_hour = used - hours.base
        counts = np.diff(starts, append=len(target))
        before_units, before_bytes = np.cumsum(units) - units, np.cumsum(log_bytes) - log_bytes
        first = before_units + np.repeat(hours.next_index[at_hour] - before_units[starts], counts)
        offsets = before_bytes + np.repeat(hours.next_offset[at_hour] - before_bytes[starts], counts)
        hours.next_index[at_hour] += np.add.reduceat(units, starts)
        hours.next_offset[at_hour] += np.add.reduceat(log_bytes, starts)
        for hour in used.tolist():
            self._directories.pop(hour, None)
        return self.bundles.take(
            name,
            layout,
            target,
            first,
            offsets,
            clamp_ms=clamp_ms,
            stamped_ms=stamped_ms,
            topic_ids=topic_ids,
        )

    def freeze(self) -> Buffer:
        """The buffer to merge. From now on arrivals go into another one."""
        if self.frozen is None:
            self.frozen, self.active = self.active, Buffer()
        return self.frozen

    def take_merged(self, results: Iterable[tuple[int, SegmentLengths, Chunk]], near_max: int) -> None:
        """The frozen buffer now lies in files. `results`: hour, new lengths and chunk for each part of it. The
        directory of an hour that had no files becomes known, unless the hour lies after `near_max`."""
        self._first_due = None
        self.frozen = None
        for hour, lengths, chunk in results:
            if hour < self.removed_below:
                continue
            first = not self.hours.has_merged(hour)
            self.hours.set_merged(hour, lengths)
            if hour in self._directories:
                insort(self._directories[hour], chunk, key=lambda known: known.first_index)
            elif first and not self.bundles.has(hour) and hour <= near_max:
                self._directories[hour] = [chunk]

    def remove(self, below: int) -> tuple[list[int], list[str]]:
        """Forget the hours before `below`. Returns those that had units, and the names of bundles without a chunk
        left."""
        self._first_due = None
        self.removed_below = below
        self.forget_directories(below)
        return self.hours.forget(below), self.bundles.forget(below)

    # -- where a unit lies

    def removed(self, ids: Ids) -> NDArray[np.bool_]:
        """True for each id whose hour has been removed."""
        found: NDArray[np.bool_] = hours_of(ids) < self.removed_below
        return found

    def in_files(self, hour: int) -> bool:
        """Whether files hold some of an hour's units."""
        return self.bundles.has(hour) or self.hours.has_merged(hour)

    def lies_in_files(self, hour: int, index: NDArray[np.int64]) -> NDArray[np.bool_]:
        """True for each index of an hour that lies in files: in a bundle, or merged."""
        inside, below = self.bundles.inside(hour, index)
        return inside | (index - below < self.hours.merged(hour).rows)

    def buffers(self) -> list[Buffer]:
        """The buffers, the older first."""
        return [self.active] if self.frozen is None else [self.frozen, self.active]

    def blocks(self) -> list[Block]:
        """The blocks of the buffers as they are now, the older first."""
        return [block for buffer in self.buffers() for block in buffer.blocks]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of unmerged arrivals in memory."""
        return self.active.bytes + (0 if self.frozen is None else self.frozen.bytes)

    def open_hour(self, hour: int) -> HourChunks:
        """The files of an hour as they are now, for a job to read."""
        return HourChunks(
            self._disk, self._directory, hour, self.hours.merged(hour), self._directories.get(hour), self.bundles
        )

    def open_taken(self, taken: TakenChunks) -> HourChunks:
        """Chunks of one hour that lie in bundles, without the rest of the hour."""
        return HourChunks(
            self._disk, self._directory, int(taken["hour"][0]), SegmentLengths(), None, self.bundles, taken
        )

    def first_due_ms(self, from_ms: int) -> int | None:
        """Lower bound of the first due time from `from_ms` on; None: there is no unit. It is `from_ms` itself if the
        directory that could say more is not known."""
        known = self._first_due
        if known is None or known[0] != from_ms:
            known = self._first_due = from_ms, self._find_first_due(from_ms)
        return known[1]

    def _note_first_due(self, due: NDArray[np.int64]) -> None:
        """Units with these rising due times have come."""
        known = self._first_due
        if known is None or due[-1] < known[0]:
            return
        from_ms, earlier = known
        due_ms = int(due[int(due.searchsorted(from_ms))])
        hour = due_ms // HOUR_MS
        bound = due_ms if hour == from_ms // HOUR_MS else hour * HOUR_MS
        self._first_due = from_ms, bound if earlier is None else min(earlier, bound)

    def _find_first_due(self, from_ms: int) -> int | None:
        hour = self.hours.next_used(from_ms // HOUR_MS)
        if hour is None:
            return None
        if hour * HOUR_MS > from_ms:
            return hour * HOUR_MS
        bounds = [due for block in self.blocks() if (due := block.first_due_from(from_ms)) is not None]
        if self.in_files(hour):
            chunks = self._directories.get(hour)
            if chunks is None:
                return from_ms
            tick = (from_ms - hour * HOUR_MS) // self._slot_ms
            for chunk in chunks:
                at = int(np.searchsorted(chunk.ticks, tick))
                if at < len(chunk.ticks):
                    bounds.append(max(from_ms, hour * HOUR_MS + int(chunk.ticks[at]) * self._slot_ms))
        later = self.hours.next_used(hour + 1)
        if later is not None:
            bounds.append(later * HOUR_MS)
        return min(bounds, default=None)

    # -- directories

    def without_directory(self, first: int, last: int) -> list[int]:
        """Hours from `first` to `last`, both included, that have files and no known directory."""
        return [hour for hour in range(first, last + 1) if hour not in self._directories and self.in_files(hour)]

    def take_directory(self, hour: HourChunks) -> None:
        """Make known the directory that a job has read. Ignores one that is out of date."""
        if (
            hour.lengths == self.hours.merged(hour.hour)
            and hour.taken == len(self.bundles.of(hour.hour))
            and hour.hour >= self.removed_below
        ):
            self._first_due = None
            self._directories[hour.hour] = list(hour.chunks())

    def forget_directories(self, below: int) -> None:
        """Drop the directories of hours before `below`."""
        self._first_due = None
        for hour in [hour for hour in self._directories if hour < below]:
            del self._directories[hour]


HOURS_SPAN_MAX = 1 << 20
"""Span from the first to the last used hour: 119 years. Memory is touched only where hours are used."""

HOURS_A_LOOK = 256
"""Hours searched at a time: numpy would release the interpreter to other threads for arrays of 500 and more."""

_COLUMNS = ("next_index", "next_offset", "rows", "log_bytes", "heads_bytes")


class HourTable:
    """The hour table: a few numbers for each hour, in dense arrays keyed by hour - base.

    Owns per hour: the next global index and log offset (given at apply), and the lengths of the hour's own segment, as
    far as it has been merged. Hours without a message read 0. `next_index` and `next_offset` are logical state. The
    merged lengths differ from node to node, and are in no digest.
    """

    next_index: NDArray[np.int64]
    next_offset: NDArray[np.int64]
    rows: NDArray[np.int64]  # merged units
    log_bytes: NDArray[np.int64]
    heads_bytes: NDArray[np.int64]

    def __init__(self) -> None:
        self.base = 0
        self._low = 0  # used range, so that growing copies only that
        self._high = 0
        for column in _COLUMNS:
            setattr(self, column, np.zeros(0, dtype=np.int64))

    def cover(self, hour_min: int, hour_max: int) -> None:
        """Extend the arrays to cover hour_min to hour_max, both included. Raises ValueError beyond HOURS_SPAN_MAX."""
        size = len(self.next_index)
        if self._high > self._low:
            low, high = min(self._low, hour_min), max(self._high, hour_max + 1)
        else:
            low, high = hour_min, hour_max + 1
        if low < self.base or high > self.base + size:
            if high - low > HOURS_SPAN_MAX:
                raise ValueError(f"hours {low} to {high}: the table spans at most {HOURS_SPAN_MAX} hours")
            new_base = low if low < self.base or size == 0 else self.base
            new_size = max(high - new_base, min(2 * size, HOURS_SPAN_MAX), 64)
            for column in _COLUMNS:
                grown = np.zeros(new_size, dtype=np.int64)
                old = getattr(self, column)
                grown[self._low - new_base : self._high - new_base] = old[
                    self._low - self.base : self._high - self.base
                ]
                setattr(self, column, grown)
            self.base = new_base
            if self._low == self._high:
                self._low = self._high = low
        self._low, self._high = low, high

    def fits(self, hour_min: int, hour_max: int) -> bool:
        """Whether `cover` could extend the arrays to these hours."""
        if self._high <= self._low:
            return hour_max + 1 - hour_min <= HOURS_SPAN_MAX
        return max(self._high, hour_max + 1) - min(self._low, hour_min) <= HOURS_SPAN_MAX

    def units(self, hour: int) -> int:
        """Next global index of an hour: the number of units ever appended to it."""
        return int(self.next_index[hour - self.base]) if self._low <= hour < self._high else 0

    def units_of_each(self, hours: NDArray[np.int64]) -> NDArray[np.int64]:
        """`units` of each of these hours."""
        counts = np.zeros(len(hours), dtype=np.int64)
        known = np.flatnonzero((hours >= self._low) & (hours < self._high))
        counts[known] = self.next_index[hours[known] - self.base]
        return counts

    def has_merged(self, hour: int) -> bool:
        """Whether anything of the hour has been merged to its files."""
        return self._low <= hour < self._high and bool(self.rows[hour - self.base])

    def merged(self, hour: int) -> SegmentLengths:
        if not self.has_merged(hour):
            return SegmentLengths()
        at = hour - self.base
        return SegmentLengths(int(self.rows[at]), int(self.log_bytes[at]), int(self.heads_bytes[at]))

    @property
    def merged_bytes(self) -> int:
        """Bytes of all segments, as far as they have been merged."""
        used = slice(self._low - self.base, self._high - self.base)
        columns = (self.log_bytes[used], self.rows[used] * ROW_BYTES, self.heads_bytes[used])
        return sum(int(column.sum()) for column in columns)

    def set_merged(self, hour: int, lengths: SegmentLengths) -> None:
        at = hour - self.base
        self.rows[at] = lengths.rows
        self.log_bytes[at] = lengths.log_bytes
        self.heads_bytes[at] = lengths.heads_bytes

    def used(self, hour_min: int = 0, hour_max: int | None = None) -> NDArray[np.int64]:
        """Hours with units, rising, from `hour_min` to below `hour_max`."""
        low = max(self._low, hour_min)
        high = self._high if hour_max is None else min(self._high, hour_max)
        if high <= low:
            return np.zeros(0, dtype=np.int64)
        return np.flatnonzero(self.next_index[low - self.base : high - self.base]) + low

    def next_used(self, hour_min: int) -> int | None:
        """First hour from hour_min on that has units."""
        low = max(self._low, hour_min)
        while low < self._high:
            high = min(low + HOURS_A_LOOK, self._high)
            # Asked with every tick. Not `argmax`: it releases the interpreter, however short the array is.
            used = self.next_index[low - self.base : high - self.base].nonzero()[0]
            if len(used):
                return low + int(used[0])
            low = high
        return None

    def forget(self, below: int) -> list[int]:
        """Clear the hours before `below`; returns those that had units."""
        gone = [int(hour) for hour in self.used(0, below)]
        for column in _COLUMNS:
            getattr(self, column)[: max(0, below - self.base)] = 0
        self._low = min(max(self._low, below), self._high)
        return gone

    def dump(self) -> NDArray[np.int64]:
        """int64[n, 6]: hour and the five columns of each used hour."""
        hours = self.used()
        return np.column_stack([hours, *(getattr(self, column)[hours - self.base] for column in _COLUMNS)]).astype(
            np.int64
        )

    def load(self, rows: NDArray[np.int64]) -> None:
        """Fill an empty table with what `dump` returned."""
        if len(rows):
            self.cover(int(rows[0, 0]), int(rows[-1, 0]))
            for number, column in enumerate(_COLUMNS):
                getattr(self, column)[rows[:, 0] - self.base] = rows[:, number + 1]
