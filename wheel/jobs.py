"""Background work of the wheel: jobs for a worker thread.

A job is made on the loop, and captures immutable inputs then. Any thread may call its `run`, which reads, and writes
files that nobody else writes. Back on the loop it is handed to `Wheel.finish`, or to `Wheel.abandon` if `run` raised.
Jobs open and close their own files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tickwheel.storage.bundle import BundleSegment
from tickwheel.storage.disk import Buffer as Bytes
from tickwheel.storage.disk import Disk
from tickwheel.storage.segment import Chunk, Segment, SegmentLengths, row_checksums
from tickwheel.wheel.buffer import Block, Buffer, join_blocks, ordered_block
from tickwheel.wheel.bundles import Bundles, TakenChunks
from tickwheel.wheel.units import HOUR_MS, NO_INDEX, UNIT, UNIT_BYTES, Units, hours_of, join_units, picked

OPEN_HOURS_MAX = 80
"""Hours whose three files a merge keeps open from run to run: 240 descriptors."""


class Job(Protocol):
    """One piece of background work."""

    kind: str

    def run(self) -> None:
        """The blocking part, for a worker thread. After a DiskError give the job to `Wheel.abandon`."""
        ...


def hour_directory(directory: str, hour: int) -> str:
    return f"{directory}/hours/{hour}"


def bytes_of(units: Units) -> NDArray[np.uint8]:
    """Units as uint8[n, 96]; writable if the units are."""
    return np.ascontiguousarray(units).view(np.uint8).reshape(-1, UNIT_BYTES)


def units_from(rows: NDArray[np.uint8]) -> Units:
    units: Units = rows.reshape(-1).view(UNIT)
    return units


class MergeJob:
    """Writes a frozen buffer into the hour files: a chunk for each contiguous range of ids, appended to the three files
    of its hour. An hour has one range, or more if bundles were ingested in between."""

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
        self._extents = picked(self._extents, hours_of(self._extents["id"]) >= removed_below)
        self._due_min = removed_below * HOUR_MS
        self.hours: list[int] = np.unique(hours_of(self._extents["id"])).tolist()
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
        units: Units = picked(join_units([block.units for block in self._blocks]), order)
        firsts, first_extents = self._pieces()
        hours = firsts >> 32
        due, units, edges = self._by_piece(due, units, hours, firsts)
        counts = np.diff(edges)
        rows = np.arange(len(units), dtype=np.int64)

        # Runs: the units of one tick of one piece lie side by side; each run is a chain of its own.
        tick = due // self._slot_ms
        begins = np.diff(tick, prepend=-1) != 0
        begins[edges[:-1]] = True
        run_starts = np.flatnonzero(begins)
        run_counts = np.diff(run_starts, append=len(units))
        in_run = (rows - np.repeat(run_starts, run_counts)).astype(np.uint32)
        units["run_index"] = in_run
        self._chain(units, np.cumsum(begins), in_run)
        raw = bytes_of(units)
        units["crc"] = row_checksums(raw)

        # place[i]: row in the chunk of the i-th index of the chunk.
        first_index = firsts & 0xFFFF_FFFF
        base = np.repeat(edges[:-1], counts)
        places = np.empty(len(units), dtype=np.uint32)
        places[base + units["index"] - np.repeat(first_index, counts)] = rows - base

        ticks_per_hour = HOUR_MS // self._slot_ms
        run_ticks = (tick[run_starts] % ticks_per_hour).astype(np.uint32)
        run_edges = run_starts.searchsorted(edges)
        for number, (hour, first) in enumerate(zip(hours.tolist(), first_index.tolist(), strict=True)):
            low, high = int(edges[number]), int(edges[number + 1])
            run_low, run_high = int(run_edges[number]), int(run_edges[number + 1])
            extents = self._extents[first_extents[number] : first_extents[number + 1]]
            lengths, chunk = self._segment(hour).append_chunk(
                self._merged[hour],
                first,
                int(extents["offset"][0]),
                run_ticks[run_low:run_high],
                run_counts[run_low:run_high].astype(np.uint32),
                raw[low:high],
                places[low:high],
                self._records(extents),
            )
            self._merged[hour] = lengths
            self.results.append((hour, lengths, chunk))

    def _pieces(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First id of each contiguous range of ids of an hour; and where the range's extents begin, with the end of the
        last.

        An hour has several ranges only if a bundle was ingested in between, which owns the indexes between them.
        """
        ids = self._extents["id"].astype(np.int64)
        ends = ids + self._extents["count"]
        begins = np.append(True, ids[1:] != ends[:-1])
        starts = np.flatnonzero(begins)
        return ids[starts], np.append(starts, len(ids))

    def _by_piece(
        self, due: NDArray[np.int64], units: Units, hours: NDArray[np.int64], firsts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], Units, NDArray[np.int64]]:
        """Due times and units grouped by piece, and the edges of the pieces."""
        all_hours = np.array(self.hours, dtype=np.int64)
        edges = due.searchsorted(np.append(all_hours * HOUR_MS, (all_hours[-1] + 1) * HOUR_MS))
        if len(hours) == len(all_hours):
            return due, units, edges
        ids = (due // HOUR_MS << 32) | units["index"]
        piece = np.searchsorted(firsts, ids, side="right") - 1
        order = np.argsort(piece, kind="stable")
        return due[order], picked(units, order), np.searchsorted(piece[order], np.arange(len(firsts) + 1))

    def _chain(self, units: Units, run: NDArray[np.int64], in_run: NDArray[np.uint32]) -> None:
        """Fill local_index and previous_index: the units of a run in index order, each pointing to the one before."""
        order = (
            np.lexsort((units["index"], run))
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
    """The chunks of one hour, merged and ingested, as they were when it was made. A directory that is not known is read
    from disk."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        hour: int,
        lengths: SegmentLengths,
        chunks: Sequence[Chunk] | None,
        bundles: Bundles,
        taken: TakenChunks | None = None,
    ) -> None:
        """`taken`: chunks in bundles; None: all of the hour."""
        self._disk = disk
        self._directory = hour_directory(directory, hour)
        self.hour = hour
        self.lengths = lengths
        self._taken = bundles.of(hour) if taken is None else taken
        self._overlays = bundles.overlays_of(self._taken) if len(self._taken) else {}
        self._chunks = None if chunks is None else tuple(chunks)
        self._segments: dict[int, Segment] = {}

    @property
    def taken(self) -> int:
        """Number of chunks in bundles."""
        return len(self._taken)

    def chunks(self) -> Sequence[Chunk]:
        """Chunks by rising first index, which is the order of their records too. `seq` is 0, or the number of a
        bundle."""
        if self._chunks is None:
            own = self.segment(0).chunks(self.lengths.heads_bytes) if self.lengths.heads_bytes else []
            for row in self._taken:
                overlay = self._overlays[int(row["bundle"])]
                own.append(overlay.chunk(self._bundle(overlay.number), row))
            self._chunks = tuple(sorted(own, key=lambda chunk: chunk.first_index))
        return self._chunks

    def _bundle(self, number: int) -> BundleSegment:
        segment = self._segments.get(number)
        if segment is None:
            segment = self._segments[number] = self._overlays[number].segment(self._disk)
        assert isinstance(segment, BundleSegment)
        return segment

    def segment(self, seq: int) -> Segment:
        """The segment or bundle that holds a chunk."""
        if seq:
            return self._bundle(seq)
        segment = self._segments.get(0)
        if segment is None:
            segment = self._segments[0] = Segment(self._disk, self._directory, 0)
        return segment

    def units(self, chunk: Chunk, first: int, count: int) -> Units:
        """Checked units of some rows of a chunk."""
        units = self.segment(chunk.seq).units_of(chunk, first, count)
        overlay = self._overlays.get(chunk.seq)
        return units if overlay is None else overlay.units(units, chunk)

    def close(self) -> None:
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()

    def blocks(self, tick_min: int, tick_max: int) -> list[Block]:
        """Units of a range of ticks of the hour; one contiguous read for each chunk."""
        found: list[Block] = []
        for chunk in self.chunks():
            low, high = chunk.rows_between(tick_min, tick_max)
            if high > low:
                units = self.units(chunk, low, high - low)
                found.append(Block(np.ascontiguousarray(units["due_ms"]), units))
        return found

    def count(self, tick_min: int, tick_max: int) -> int:
        total = 0
        for chunk in self.chunks():
            low, high = chunk.rows_between(tick_min, tick_max)
            total += high - low
        return total


class MapJob:
    """Reads the directories of hours that will be needed soon."""

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
        """Arrivals for this window since the job was made; the wheel adds them."""

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
        if self.found and any(hour.taken for hour in self.hours):
            # Units of bundles may have higher indexes than units in the buffers.
            self.found = [ordered_block(self.found)]


class AbsorbJob:
    """Reads the units of an ingested bundle for the ticks that are loaded or being loaded."""

    kind = "absorb"

    def __init__(self, slot_ms: int, due_max: int, hours: list[HourChunks]) -> None:
        """`hours`: with the new chunks only."""
        self._slot_ms = slot_ms
        self.due_max = due_max
        self.hours = hours
        self.found: list[Block] = []
        """One sorted block for each hour that has units."""

    def run(self) -> None:
        ticks_per_hour = HOUR_MS // self._slot_ms
        last = -(-self.due_max // self._slot_ms)
        for hour in self.hours:
            try:
                blocks = hour.blocks(0, min(last - hour.hour * ticks_per_hour, ticks_per_hour))
            finally:
                hour.close()
            if blocks:
                self.found.append(join_blocks(blocks))
