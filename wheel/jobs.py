"""Background work of the wheel: what a worker thread runs beside the loop.

A job captures immutable inputs when it is made (on the loop), does its reads and writes in `run`
(any thread) on files nobody else writes, and is handed back with `Wheel.finish` (on the loop), or with
`Wheel.abandon` if `run` raised. Jobs open their own files and close them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tickwheel.storage.disk import Buffer as Bytes
from tickwheel.storage.disk import Disk
from tickwheel.storage.segment import Chunk, Segment, SegmentLengths, row_checksums
from tickwheel.wheel.buffer import Block, Buffer
from tickwheel.wheel.units import HOUR_MS, NO_INDEX, UNIT, UNIT_BYTES, Units, join_units

OPEN_HOURS_MAX = 80
"""Hours whose three files a merge keeps open between its runs: 240 descriptors."""


class Job(Protocol):
    """One piece of background work."""

    kind: str

    def run(self) -> None:
        """The blocking part, for a worker thread. Raises DiskError; then `Wheel.abandon` the job."""
        ...


def hour_directory(directory: str, hour: int) -> str:
    return f"{directory}/hours/{hour}"


def bytes_of(units: Units) -> NDArray[np.uint8]:
    """uint8[n, 96] of units, writable if they are."""
    return np.ascontiguousarray(units).view(np.uint8).reshape(-1, UNIT_BYTES)


def units_from(rows: NDArray[np.uint8]) -> Units:
    units: Units = rows.reshape(-1).view(UNIT)
    return units


class MergeJob:
    """Writes a frozen buffer into the hour files: per hour one chunk, appended to three files."""

    kind = "merge"

    def __init__(
        self,
        disk: Disk,
        directory: str,
        slot_ms: int,
        frozen: Buffer,
        merged: Callable[[int], SegmentLengths],
        open_segments: dict[int, Segment],
        removed_below: int,
    ) -> None:
        """Units of hours below `removed_below` are not written: their files are gone or going."""
        self._disk = disk
        self._directory = directory
        self._slot_ms = slot_ms
        self.frozen = frozen
        self._blocks = frozen.snapshot()
        self._extents = frozen.extents()
        self._extents = self._extents[self._extents["id"] >> np.uint64(32) >= np.uint64(removed_below)]
        self._due_min = removed_below * HOUR_MS
        self.hours: list[int] = np.unique(self._extents["id"] >> np.uint64(32)).astype(np.int64).tolist()
        self._merged = {hour: merged(hour) for hour in self.hours}
        self._open = open_segments
        self.results: list[tuple[int, SegmentLengths, Chunk]] = []

    def run(self) -> None:
        if not self.hours:
            return
        due = np.concatenate([block.due_ms for block in self._blocks])
        order = np.argsort(due, kind="stable")
        order = order[int(np.searchsorted(due[order], self._due_min)) :]
        due = due[order]
        units: Units = join_units([block.units for block in self._blocks])[order]
        hours = np.array(self.hours, dtype=np.int64)
        edges = due.searchsorted(np.append(hours * HOUR_MS, (hours[-1] + 1) * HOUR_MS))
        counts = np.diff(edges)
        rows = np.arange(len(units), dtype=np.int64)

        # Runs: the units of one tick of one hour are contiguous; each is a chain of its own here.
        tick = due // self._slot_ms
        run_starts = np.flatnonzero(np.diff(tick, prepend=-1))
        run_counts = np.diff(run_starts, append=len(units))
        in_run = (rows - np.repeat(run_starts, run_counts)).astype(np.uint32)
        units["run_index"] = in_run
        self._chain(units, tick, in_run)
        raw = bytes_of(units)
        units["crc"] = row_checksums(raw)

        # place[i]: row in the hour's chunk of the i-th index of the chunk.
        first_index = np.array([self._merged[hour].rows for hour in self.hours], dtype=np.int64)
        base = np.repeat(edges[:-1], counts)
        places = np.empty(len(units), dtype=np.uint32)
        places[base + units["index"] - np.repeat(first_index, counts)] = rows - base

        ticks_per_hour = HOUR_MS // self._slot_ms
        run_ticks = (tick[run_starts] % ticks_per_hour).astype(np.uint32)
        run_edges = run_starts.searchsorted(edges)
        extent_edges = np.searchsorted(
            self._extents["id"] >> np.uint64(32), np.append(hours, hours[-1] + 1).astype(np.uint64)
        )
        for number, hour in enumerate(self.hours):
            low, high = int(edges[number]), int(edges[number + 1])
            run_low, run_high = int(run_edges[number]), int(run_edges[number + 1])
            extents = self._extents[extent_edges[number] : extent_edges[number + 1]]
            lengths, chunk = self._segment(hour).append_chunk(
                self._merged[hour],
                self._merged[hour].rows,
                int(extents["offset"][0]),
                run_ticks[run_low:run_high],
                run_counts[run_low:run_high].astype(np.uint32),
                raw[low:high],
                places[low:high],
                self._records(extents),
            )
            self.results.append((hour, lengths, chunk))

    def _chain(self, units: Units, tick: NDArray[np.int64], in_run: NDArray[np.uint32]) -> None:
        """local_index and previous_index: the units of a tick in index order, each naming the one before it."""
        order = (
            np.lexsort((units["index"], tick))
            if np.any(np.diff(units["index"].astype(np.int64))[in_run[1:] > 0] < 0)
            else None
        )
        index = units["index"] if order is None else units["index"][order]
        previous = np.empty(len(units), dtype=np.uint32)
        previous[0] = NO_INDEX
        previous[1:] = index[:-1]
        previous[in_run == 0] = NO_INDEX
        if order is None:
            units["local_index"] = in_run
            units["previous_index"] = previous
        else:
            units["local_index"][order] = in_run
            units["previous_index"][order] = previous

    def _records(self, extents: Units) -> Iterable[Bytes]:
        records = self.frozen.records
        for append, at, size in zip(
            extents["append"].tolist(), extents["at"].tolist(), extents["bytes"].tolist(), strict=True
        ):
            blob = records[append]
            yield blob if size == len(blob) else memoryview(blob)[at : at + size]

    def _segment(self, hour: int) -> Segment:
        segment = self._open.pop(hour, None)
        if segment is None:
            while len(self._open) >= OPEN_HOURS_MAX:
                self._open.pop(next(iter(self._open))).close()
            segment = Segment(self._disk, hour_directory(self._directory, hour), 0)
        self._open[hour] = segment
        return segment


class HourChunks:
    """The chunks of one hour as far as they were merged when captured; read from disk if not known."""

    def __init__(
        self, disk: Disk, directory: str, hour: int, lengths: SegmentLengths, chunks: Sequence[Chunk] | None
    ) -> None:
        self._disk = disk
        self._directory = hour_directory(directory, hour)
        self.hour = hour
        self.lengths = lengths
        self._chunks = None if chunks is None else tuple(chunks)
        self._segments: dict[int, Segment] = {}

    def chunks(self) -> Sequence[Chunk]:
        if self._chunks is None:
            self._chunks = tuple(self.segment(0).chunks(self.lengths.heads_bytes)) if self.lengths.heads_bytes else ()
        return self._chunks

    def segment(self, seq: int) -> Segment:
        segment = self._segments.get(seq)
        if segment is None:
            segment = self._segments[seq] = Segment(self._disk, self._directory, seq)
        return segment

    def close(self) -> None:
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()

    def blocks(self, tick_min: int, tick_max: int) -> list[Block]:
        """Units of a range of ticks of the hour: one contiguous read a chunk."""
        found: list[Block] = []
        for chunk in self.chunks():
            low, high = chunk.rows_between(tick_min, tick_max)
            if high > low:
                units = units_from(self.segment(chunk.seq).rows(chunk.first_row + low, high - low))
                found.append(Block(np.ascontiguousarray(units["due_ms"]), units))
        return found

    def count(self, tick_min: int, tick_max: int) -> int:
        total = 0
        for chunk in self.chunks():
            low, high = chunk.rows_between(tick_min, tick_max)
            total += high - low
        return total


class MapJob:
    """Reads the directories of hours that come near."""

    kind = "map"

    def __init__(self, hours: list[HourChunks]) -> None:
        self.hours = hours

    def run(self) -> None:
        try:
            for hour in self.hours:
                hour.chunks()
        finally:
            for hour in self.hours:
                hour.close()


class LoadJob:
    """Reads the units of a window of due times from segments and buffers."""

    kind = "load"

    def __init__(
        self, slot_ms: int, due_min: int, due_max: int, hours: list[HourChunks], blocks: Sequence[Block]
    ) -> None:
        self._slot_ms = slot_ms
        self.due_min = due_min
        self.due_max = due_max
        self.hours = hours
        self._blocks = blocks
        self.found: list[Block] = []
        self.arrivals: list[Block] = []
        """What came for this window since it was captured; kept by the wheel."""

    def run(self) -> None:
        ticks_per_hour = HOUR_MS // self._slot_ms
        first, last = self.due_min // self._slot_ms, self.due_max // self._slot_ms
        try:
            for hour in self.hours:
                begin = hour.hour * ticks_per_hour
                self.found += hour.blocks(max(first - begin, 0), min(last - begin, ticks_per_hour))
        finally:
            for hour in self.hours:
                hour.close()
        for block in self._blocks:
            part = block.between(self.due_min, self.due_max)
            if part is not None:
                self.found.append(part)
