"""Reads by id and by unit: jobs that find units and fetch records.

What lies in a buffer is read when the job is made, on the core's thread. `run` reads only segments, and joins
neighbouring rows and records into few reads. A job that has nothing left to read is `done` and need not be run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tickwheel.storage.disk import DiskError
from tickwheel.wheel.holdings import Holdings
from tickwheel.wheel.jobs import HourChunks
from tickwheel.wheel.units import LACKING, UNIT, Ids, Units, ids_of, picked

READ_GAP_BYTES = 16 << 10
"""Records with a smaller gap between them are fetched by one read."""
READ_BYTES_MAX = 1 << 20
ROW_GAP = 64
PLACE_GAP = 1024


def spans(sorted_positions: NDArray[np.int64], gap: int) -> Iterator[tuple[int, int]]:
    """(low, high) slices of positions whose neighbours are at most `gap` apart."""
    edges = np.flatnonzero(np.diff(sorted_positions) > gap) + 1
    bounds = [0, *edges.tolist(), len(sorted_positions)]
    yield from itertools.pairwise(bounds)


def by_hour(hours: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Each hour and the places in `hours` that have it."""
    if len(hours) and (hours == hours[0]).all():
        yield int(hours[0]), np.arange(len(hours))
        return
    for hour in np.unique(hours).tolist():
        yield hour, np.flatnonzero(hours == hour)


class LackingRecordError(DiskError):
    """This node has never had the record: when it copied the message, it could not read the original."""

    def __init__(self, id: int) -> None:
        super().__init__(f"message {id >> 32}-{id & 0xFFFF_FFFF} was copied here from a record that could not be read")


class RecordsJob:
    """Fetches the records (meta and payload) of units. Result: `records`, one bytes object for each unit, in their
    order.

    `missing`: some units are of hours that were removed before the job was made; `records` is then shorter. `run`
    raises DiskError if a record cannot be read.
    """

    kind = "records"

    def __init__(self, units: Units, holdings: Holdings) -> None:
        self._units = units
        self.missing = False
        self._result: list[bytes | None] = [None] * len(units)
        ids = ids_of(units)
        hours = (ids >> np.uint64(32)).astype(np.int64)
        lacking = np.flatnonzero(units["flags"] & LACKING)
        self._lacking = LackingRecordError(int(ids[lacking[0]])) if len(lacking) else None
        self._left: list[tuple[HourChunks, NDArray[np.int64]]] = []
        for hour, rows in by_hour(hours):
            if hour < holdings.removed_below:
                self.missing = True
                continue
            in_segment = holdings.lies_in_files(hour, units["index"][rows].astype(np.int64))
            if in_segment.any():
                self._left.append((holdings.open_hour(hour), rows[in_segment]))
            self._from_buffers(holdings, ids, rows[~in_segment])

    def _from_buffers(self, holdings: Holdings, ids: Ids, rows: NDArray[np.int64]) -> None:
        for buffer in holdings.buffers():
            if not len(rows):
                return
            found = buffer.find(ids[rows])
            hit = found >= 0
            hits = rows[hit]
            for row, record in zip(
                hits.tolist(), buffer.records_of(picked(self._units, hits), found[hit]), strict=True
            ):
                self._result[row] = record
            rows = rows[~hit]
        if len(rows):
            raise AssertionError(f"units {ids[rows[:3]].tolist()} are neither merged nor buffered")

    @property
    def done(self) -> bool:
        return not self._left and self._lacking is None

    @property
    def records(self) -> list[bytes]:
        return [record for record in self._result if record is not None]

    def run(self) -> None:
        if self._lacking is not None:
            raise self._lacking
        for hour, rows in self._left:
            try:
                self._read(hour, rows)
            finally:
                hour.close()
        self._left = []

    def _read(self, hour: HourChunks, rows: NDArray[np.int64]) -> None:
        offsets = self._units["offset"][rows].astype(np.int64)
        order = np.argsort(offsets, kind="stable")
        rows, offsets = rows[order], offsets[order]
        ends = offsets + self._units["size"][rows]
        chunks = hour.chunks()
        chunk_of = np.searchsorted([chunk.log_start for chunk in chunks], offsets, side="right") - 1
        apart = (np.diff(chunk_of) != 0) | (offsets[1:] - ends[:-1] > READ_GAP_BYTES)
        bounds = [0, *(np.flatnonzero(apart) + 1).tolist(), len(rows)]
        for low, high in itertools.pairwise(bounds):
            chunk = chunks[int(chunk_of[low])]
            while low < high:
                begin = int(offsets[low])
                stop = low + max(1, int(ends[low:high].searchsorted(begin + READ_BYTES_MAX, side="right")))
                data = hour.segment(chunk.seq).read_log(chunk, begin, int(ends[stop - 1]) - begin)
                for row, first, end in zip(
                    rows[low:stop].tolist(),
                    (offsets[low:stop] - begin).tolist(),
                    (ends[low:stop] - begin).tolist(),
                    strict=True,
                ):
                    self._result[row] = data[first:end]
                low = stop


class LookupJob:
    """Finds units by id, following moves. Results by row of the requested ids, complete after `run`."""

    kind = "lookup"

    def __init__(
        self,
        ids: Ids,
        resolved: Ids,
        found: NDArray[np.bool_],
        cancelled: NDArray[np.bool_],
        holdings: Holdings,
    ) -> None:
        self.ids = ids
        self.resolved = resolved
        """The newest id of each message."""
        self.found = found
        """True for each message that exists (its hour was not removed); `units` is valid there."""
        self.cancelled = cancelled
        self.units: Units = np.zeros(len(ids), dtype=UNIT)
        self._left: list[tuple[HourChunks, NDArray[np.int64]]] = []
        wanted = np.flatnonzero(found)
        hours = (resolved[wanted] >> np.uint64(32)).astype(np.int64)
        for hour, at in by_hour(hours):
            rows = wanted[at]
            in_segment = holdings.lies_in_files(hour, (resolved[rows] & np.uint64(0xFFFF_FFFF)).astype(np.int64))
            if in_segment.any():
                self._left.append((holdings.open_hour(hour), rows[in_segment]))
            rows = rows[~in_segment]
            for buffer in holdings.buffers():
                extents = buffer.find(resolved[rows])
                hit = extents >= 0
                self.units[rows[hit]] = buffer.units_of(resolved[rows[hit]], extents[hit])
                rows = rows[~hit]

    @property
    def done(self) -> bool:
        return not self._left

    @property
    def moved(self) -> NDArray[np.bool_]:
        moved: NDArray[np.bool_] = self.ids != self.resolved
        return moved

    def run(self) -> None:
        for hour, rows in self._left:
            try:
                self._read(hour, rows)
            finally:
                hour.close()
        self._left = []

    def _read(self, hour: HourChunks, rows: NDArray[np.int64]) -> None:
        index = (self.resolved[rows] & np.uint64(0xFFFF_FFFF)).astype(np.int64)
        order = np.argsort(index, kind="stable")
        rows, index = rows[order], index[order]
        for chunk in hour.chunks():
            low, high = np.searchsorted(index, (chunk.first_index, chunk.first_index + chunk.count))
            if high == low:
                continue
            segment = hour.segment(chunk.seq)
            part = index[low:high]
            at = np.empty(len(part), dtype=np.int64)
            for a, b in spans(part, PLACE_GAP):
                places = segment.places(chunk, int(part[a]), int(part[b - 1]) + 1)
                at[a:b] = places[part[a:b] - part[a]]
            order = np.argsort(at, kind="stable")
            at = at[order]
            for a, b in spans(at, ROW_GAP):
                read = hour.units(chunk, int(at[a]), int(at[b - 1] - at[a]) + 1)
                self.units[rows[low:high][order[a:b]]] = read[at[a:b] - at[a]]
            if not np.array_equal(self.units["index"][rows[low:high]], part):
                raise segment.corrupt_places(chunk)
