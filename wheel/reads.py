"""Questions about messages: by id, by range of due times, and as of a pinned moment.

`Reads` owns nothing and changes nothing. An answer is a job on inputs captured here; only `check_rows` reads files on
the core's thread. What lies in a buffer is read when the job is made. `run` of a job reads only segments, and joins
neighbouring rows and records into few reads. A job that has nothing left to read is `done` and need not be run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tickwheel.storage.disk import DiskError
from tickwheel.wheel.holdings import Holdings
from tickwheel.wheel.jobs import HourChunks
from tickwheel.wheel.marks import Marks
from tickwheel.wheel.queries import HOURS_MAX, CountJob, ScanJob, Schedule, Wanted
from tickwheel.wheel.units import (
    HOUR_MS,
    LACKING,
    UNIT,
    CursorKey,
    Ids,
    Units,
    hour_and_index,
    hours_of,
    ids_of,
    indexes_of,
    picked,
)
from tickwheel.wheel.window import Window


class Reads:
    def __init__(self, holdings: Holdings, marks: Marks, window: Window, slot_ms: int) -> None:
        self._holdings = holdings
        self._marks = marks
        self._window = window
        self._slot_ms = slot_ms

    def records(self, units: Units) -> RecordsJob:
        """A job that fetches the records of units; records of removed hours are missing."""
        return RecordsJob(units, self._holdings)

    def lookup(self, ids: Ids, *, following: bool = True) -> LookupJob:
        """A job that finds units by id. `following`: follow moves; otherwise find the units of these very ids."""
        resolved = ids
        if following:
            resolved, _ = self._marks.moves.resolve_many(ids, np.zeros(len(ids), np.int64))
        found = np.zeros(len(ids), np.bool_)
        cancelled = np.zeros(len(ids), np.bool_)
        for hour, rows in by_hour(hours_of(resolved)):
            indexes = resolved[rows].astype(np.uint32)  # the lower half
            if hour >= self._holdings.removed_below:
                found[rows] = indexes < self._holdings.hours.units(hour)
            cancelled[rows] = self._marks.which(hour, indexes)
        return LookupJob(ids, resolved, found, cancelled, self._holdings)

    def check_rows(self, ids: Ids) -> None:
        """Read the index rows of these very ids on this thread; ids in buffers need none. Raises CorruptSegmentError if
        a row is lost."""
        for hour, rows in by_hour(hours_of(ids)):
            if hour < self._holdings.removed_below:
                continue
            indexes = indexes_of(ids[rows])
            in_files = (indexes < self._holdings.hours.units(hour)) & self._holdings.lies_in_files(hour, indexes)
            if in_files.any():
                self.lookup(ids[rows[in_files]], following=False).run()

    def scan(
        self,
        due_min: int,
        due_max: int,
        start: CursorKey | None,
        limit: int,
        wanted: Wanted | None = None,
        surplus: int = 0,
    ) -> ScanJob:
        """A job that finds pending units with due_min <= due_ms < due_max from `start` on, in dispatch order; at most
        `limit` and a `surplus` (see ScanJob), or as many as one job may examine."""
        if start is not None:
            due_min = max(due_min, start.due_ms)
        return ScanJob(self._schedule(due_min, due_max), start, limit, wanted or Wanted(), surplus)

    def count(self, due_min: int, due_max: int, bucket_ms: int, wanted: Wanted | None = None) -> CountJob:
        """A job that counts pending units by bucket, as many as one job may examine."""
        return CountJob(self._schedule(due_min, due_max), bucket_ms, wanted or Wanted())

    def _schedule(self, due_min: int, due_max: int) -> Schedule:
        cursor, holdings = self._window.cursor, self._holdings
        due_min = max(due_min, cursor.due_ms)
        hours = holdings.hours.used(due_min // HOUR_MS, -(-due_max // HOUR_MS)).tolist()
        end_ms = hours[HOURS_MAX] * HOUR_MS if len(hours) > HOURS_MAX else None
        hours = hours[:HOURS_MAX]
        return Schedule(
            slot_ms=self._slot_ms,
            due_min=due_min,
            due_max=due_max,
            cursor=cursor,
            hours=[holdings.open_hour(hour) for hour in hours],
            hours_end_ms=end_ms,
            blocks=holdings.blocks(),
            marks=self._marks.copy(hours),
            units={hour: holdings.hours.units(hour) for hour in hours},
        )

    def pin(self, due_min: int, due_max: int) -> Pinned:
        """Pin the units pending now with due_min <= due_ms < due_max, for `scan_pinned` at any later time."""
        cursor, table = self._window.cursor, self._holdings.hours
        due_min = max(due_min, cursor.due_ms)
        hours = table.used(due_min // HOUR_MS, -(-due_max // HOUR_MS))
        bounds = table.next_index[hours - table.base]
        return Pinned(cursor, hours, bounds, self._marks.copy(hours.tolist()))

    def scan_pinned(
        self,
        pinned: Pinned,
        hours: range,
        start: CursorKey | None,
        due_min: int,
        due_max: int,
        limit: int,
        wanted: Wanted | None = None,
    ) -> ScanJob:
        """A job that finds units of a pin in some hours from `start` on, as many as one job may examine. It may find
        later ones too: filter by `Pinned.known`."""
        due_min = max(due_min, pinned.cursor.due_ms, hours.start * HOUR_MS, 0 if start is None else start.due_ms)
        held = pinned.within(due_min // HOUR_MS, hours.stop).tolist()
        schedule = Schedule(
            slot_ms=self._slot_ms,
            due_min=due_min,
            due_max=min(due_max, hours.stop * HOUR_MS),
            cursor=pinned.cursor,
            hours=[self._holdings.open_hour(hour) for hour in held[:HOURS_MAX]],
            hours_end_ms=held[HOURS_MAX] * HOUR_MS if len(held) > HOURS_MAX else None,
            blocks=self._holdings.blocks(),
            marks=pinned.marks,
            units={},
        )
        return ScanJob(schedule, start, limit, wanted or Wanted())


READ_GAP_BYTES = 16 << 10
"""Records with a smaller gap between them are fetched by one read."""
READ_BYTES_MAX = 1 << 20
ROW_GAP = 64
PLACE_GAP = 1024


def _near(sorted_positions: NDArray[np.int64], gap: int) -> Iterator[tuple[int, int]]:
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
        hour, index = hour_and_index(id)
        super().__init__(f"message {hour}-{index} was copied here from a record that could not be read")


class _HoursJob:
    """Reads what is left to read from the files of hours, one hour after the other."""

    def __init__(self) -> None:
        self._left: list[tuple[HourChunks, NDArray[np.int64]]] = []
        """With the rows of the result that lie there."""

    @property
    def done(self) -> bool:
        return not self._left

    def run(self) -> None:
        for hour, rows in self._left:
            try:
                self._read(hour, rows)
            finally:
                hour.close()
        self._left = []

    def _read(self, hour: HourChunks, rows: NDArray[np.int64]) -> None:
        raise NotImplementedError


class RecordsJob(_HoursJob):
    """Fetches the records (meta and payload) of units. Result: `records`, one bytes object for each unit, in their
    order.

    `missing`: some units are of hours that were removed before the job was made; `records` is then shorter. `run`
    raises DiskError if a record cannot be read.
    """

    kind = "records"

    def __init__(self, units: Units, holdings: Holdings) -> None:
        super().__init__()
        self._units = units
        self.missing = False
        self._result: list[bytes | None] = [None] * len(units)
        ids = ids_of(units)
        hours = hours_of(ids)
        lacking = np.flatnonzero(units["flags"] & LACKING)
        self._lacking = LackingRecordError(int(ids[lacking[0]])) if len(lacking) else None
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
            if len(rows) == len(ids) and hit.all():  # nearly always, since messages are read when they are dispatched
                self._result[:] = buffer.records_of(self._units, found)
                return
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
        return super().done and self._lacking is None

    @property
    def records(self) -> list[bytes]:
        return [record for record in self._result if record is not None]

    def run(self) -> None:
        if self._lacking is not None:
            raise self._lacking
        super().run()

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


class LookupJob(_HoursJob):
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
        super().__init__()
        self.ids = ids
        self.resolved = resolved
        """The newest id of each message."""
        self.found = found
        """True for each message that exists (its hour was not removed); `units` is valid there."""
        self.cancelled = cancelled
        self.units: Units = np.zeros(len(ids), dtype=UNIT)
        wanted = np.flatnonzero(found)
        hours = hours_of(resolved[wanted])
        for hour, at in by_hour(hours):
            rows = wanted[at]
            in_segment = holdings.lies_in_files(hour, indexes_of(resolved[rows]))
            if in_segment.any():
                self._left.append((holdings.open_hour(hour), rows[in_segment]))
            rows = rows[~in_segment]
            for buffer in holdings.buffers():
                extents = buffer.find(resolved[rows])
                hit = extents >= 0
                self.units[rows[hit]] = buffer.units_of(resolved[rows[hit]], extents[hit])
                rows = rows[~hit]

    @property
    def moved(self) -> NDArray[np.bool_]:
        moved: NDArray[np.bool_] = self.ids != self.resolved
        return moved

    def _read(self, hour: HourChunks, rows: NDArray[np.int64]) -> None:
        index = indexes_of(self.resolved[rows])
        order = np.argsort(index, kind="stable")
        rows, index = rows[order], index[order]
        for chunk in hour.chunks():
            low, high = np.searchsorted(index, (chunk.first_index, chunk.first_index + chunk.count))
            if high == low:
                continue
            segment = hour.segment(chunk.seq)
            part = index[low:high]
            at = np.empty(len(part), dtype=np.int64)
            for a, b in _near(part, PLACE_GAP):
                places = segment.places(chunk, int(part[a]), int(part[b - 1]) + 1)
                at[a:b] = places[part[a:b] - part[a]]
            order = np.argsort(at, kind="stable")
            at = at[order]
            for a, b in _near(at, ROW_GAP):
                read = hour.units(chunk, int(at[a]), int(at[b - 1] - at[a]) + 1)
                self.units[rows[low:high][order[a:b]]] = read[at[a:b] - at[a]]
            if not np.array_equal(self.units["index"][rows[low:high]], part):
                raise segment.corrupt_places(chunk)


@dataclass(frozen=True, slots=True)
class Pinned:
    """The messages pending after one entry of the log, to be read later and in parts. Made by `Reads.pin`.

    Units never change their place, and new ones are only appended. So a bound for each hour, the cursor and the marks
    of that moment tell which of the present units were pending then. No file is held open, and only the marks are
    copied. Messages that retention removes with their hour are lost to the reader, who is told so.
    """

    cursor: CursorKey
    hours: NDArray[np.int64]
    """Hours of the requested range that had units, rising."""
    bounds: NDArray[np.int64]
    """Number of units of each hour: units with an index below existed."""
    marks: Mapping[int, NDArray[np.uint32]]
    """Hour -> indexes of cancelled and moved units."""

    def within(self, hour: int, hour_end: int) -> NDArray[np.int64]:
        """The elements of `hours` from `hour` to before `hour_end`."""
        return self.hours[np.searchsorted(self.hours, hour) : np.searchsorted(self.hours, hour_end)]

    def known(self, units: Units) -> Units:
        """The given units that existed at the pin. All must lie in `hours`."""
        if not len(units):
            return units
        known = units["index"] < self.bounds[np.searchsorted(self.hours, units["due_ms"] // HOUR_MS)]
        return units if known.all() else picked(units, known)
