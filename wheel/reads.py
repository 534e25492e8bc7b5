"""Reads of the wheel: records and units by id, pending units in a range of times, usage.

A layer of the wheel (engine.py). Reads are jobs on inputs captured here; only `fetch` and `check_rows` read files on
the core's thread. Changes nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tickwheel.storage.disk import DiskError
from tickwheel.wheel.holdings import Holdings
from tickwheel.wheel.jobs import HourChunks
from tickwheel.wheel.mending import SurveyJob, damaged_hour
from tickwheel.wheel.pinned import Pinned
from tickwheel.wheel.queries import HOURS_MAX as QUERY_HOURS_MAX
from tickwheel.wheel.queries import CountJob, ScanJob, Schedule, Wanted
from tickwheel.wheel.reading import LookupJob, RecordsJob, by_hour
from tickwheel.wheel.units import HOUR_MS, LACKING, CursorKey, Ids, Units
from tickwheel.wheel.usage import UsageJob


class Reads(Holdings):
    def records(self, units: Units) -> RecordsJob:
        """A job that fetches the records of units; records of removed hours are missing."""
        return RecordsJob(units, self._removed_below, self._buffers(), self._lies_in_files, self._open_hour)

    def gone(self, ids: Ids) -> NDArray[np.bool_]:
        """True for each id whose hour has been removed."""
        found: NDArray[np.bool_] = ids >> np.uint64(32) < np.uint64(self._removed_below)
        return found

    def removed(self, ids: Ids) -> bool:
        """Whether the hour of any of these ids has been removed."""
        return bool(self.gone(ids).any())

    def lookup(self, ids: Ids, *, following: bool = True) -> LookupJob:
        """A job that finds units by id. `following`: follow moves; otherwise find the units of these very ids."""
        resolved = ids
        if following and len(self._marks.moves):
            resolved = np.array([self._marks.moves.resolve(id)[0] for id in ids.tolist()], dtype=np.uint64)
        found = np.zeros(len(ids), np.bool_)
        cancelled = np.zeros(len(ids), np.bool_)
        for hour, rows in by_hour((resolved >> np.uint64(32)).astype(np.int64)):
            indexes = resolved[rows].astype(np.uint32)  # the lower half
            if hour >= self._removed_below:
                found[rows] = indexes < self._hours.units(hour)
            cancelled[rows] = self._marks.which(hour, indexes)
        return LookupJob(ids, resolved, found, cancelled, self._buffers(), self._lies_in_files, self._open_hour)

    def check_rows(self, ids: Ids) -> None:
        """Read the index rows of these very ids on this thread; ids in buffers need none. Raises CorruptSegmentError if
        a row is lost."""
        for hour, rows in by_hour((ids >> np.uint64(32)).astype(np.int64)):
            if hour < self._removed_below:
                continue
            indexes = (ids[rows] & np.uint64(0xFFFF_FFFF)).astype(np.int64)
            in_files = (indexes < self._hours.units(hour)) & self._lies_in_files(hour, indexes)
            if in_files.any():
                self.lookup(ids[rows[in_files]], following=False).run()

    def fetch(self, ids: Ids, bytes_max: int) -> tuple[Units, list[bytes]]:
        """Units and records of existing messages, read at once on this thread: the first ones up to `bytes_max` (at
        least one). The result follows from the log alone, wherever the messages lie. If the disk cannot read a record,
        zeros of the same size take its place, and the unit has the flag LACKING."""
        lookup = self.lookup(ids)
        lookup.run()
        if not lookup.found.all():
            raise AssertionError(f"messages {ids[~lookup.found][:3].tolist()} were to be copied and are not there")
        ends = np.cumsum(lookup.units["size"], dtype=np.int64)
        units = lookup.units[: max(1, int(np.searchsorted(ends, bytes_max, "right")))]
        records = self.records(units)
        try:
            records.run()
        except DiskError:
            return units, [self._record_or_zeros(units[row : row + 1]) for row in range(len(units))]
        return units, records.records

    def _record_or_zeros(self, unit: Units) -> bytes:
        job = self.records(unit)
        try:
            job.run()
        except DiskError:
            unit["flags"] |= LACKING
            return bytes(int(unit["size"][0]))
        return job.records[0]

    def scan(
        self, due_min: int, due_max: int, start: CursorKey | None, limit: int, wanted: Wanted | None = None
    ) -> ScanJob:
        """A job that finds pending units with due_min <= due_ms < due_max from `start` on, in dispatch order; see
        ScanJob."""
        if start is not None:
            due_min = max(due_min, start.due_ms)
        return ScanJob(self._schedule(due_min, due_max), start, limit, wanted or Wanted())

    def count(self, due_min: int, due_max: int, bucket_ms: int, wanted: Wanted | None = None) -> CountJob:
        """A job that counts pending units by bucket; see CountJob."""
        return CountJob(self._schedule(due_min, due_max), bucket_ms, wanted or Wanted())

    def pin(self, due_min: int, due_max: int) -> Pinned:
        """Pin the units pending now with due_min <= due_ms < due_max, for `scan_pinned` at any later time."""
        due_min = max(due_min, self.cursor.due_ms)
        hours = self._hours.used(due_min // HOUR_MS, -(-due_max // HOUR_MS))
        bounds = self._hours.next_index[hours - self._hours.base]
        return Pinned(self.cursor, hours, bounds, self._marks.copy(hours.tolist()))

    def scan_pinned(
        self, pinned: Pinned, hour: int, start: CursorKey | None, due_min: int, due_max: int, limit: int
    ) -> ScanJob:
        """A job that finds one hour's units of a pin from `start` on. It may find later ones too: filter by
        `Pinned.known`."""
        due_min = max(due_min, pinned.cursor.due_ms, hour * HOUR_MS, 0 if start is None else start.due_ms)
        schedule = Schedule(
            slot_ms=self._slot_ms,
            due_min=due_min,
            due_max=min(due_max, (hour + 1) * HOUR_MS),
            cursor=pinned.cursor,
            hours=[self._open_hour(hour)] if pinned.bound(hour) else [],
            hours_end_ms=None,
            blocks=[block for buffer in self._buffers() for block in buffer.snapshot()],
            marks=pinned.marks,
        )
        return ScanJob(schedule, start, limit)

    def _schedule(self, due_min: int, due_max: int) -> Schedule:
        due_min = max(due_min, self.cursor.due_ms)
        hours = self._hours.used(due_min // HOUR_MS, -(-due_max // HOUR_MS)).tolist()
        end_ms = hours[QUERY_HOURS_MAX] * HOUR_MS if len(hours) > QUERY_HOURS_MAX else None
        hours = hours[:QUERY_HOURS_MAX]
        return Schedule(
            slot_ms=self._slot_ms,
            due_min=due_min,
            due_max=due_max,
            cursor=self.cursor,
            hours=[self._open_hour(hour) for hour in hours],
            hours_end_ms=end_ms,
            blocks=[block for buffer in self._buffers() for block in buffer.snapshot()],
            marks=self._marks.copy(hours),
        )

    def survey(self, hour: int) -> SurveyJob:
        """A job that finds unreadable rows of an hour's own index."""
        return SurveyJob(self._open_hour(hour))

    def opened(self, hour: int) -> HourChunks:
        """The files of an hour, for a job that mends rows."""
        return self._open_hour(hour)

    def damaged_hour(self, error: BaseException) -> int | None:
        """The hour whose own index an error concerns; None: it concerns something else."""
        return damaged_hour(self._directory, error)

    def usage(self, hours: list[int]) -> UsageJob:
        """A job that measures the bytes of hours on disk, by topic."""
        return UsageJob([self._open_hour(hour) for hour in hours])

    def resolve(self, id: int) -> int:
        """Id of the newest unit of a message."""
        return self._marks.moves.resolve(int(id))[0]
