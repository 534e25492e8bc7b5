"""Questions about messages: by id, by range of due times, and as of a pinned moment.

Owns nothing and changes nothing. An answer is a job on inputs captured here; only `check_rows` reads files on the
core's thread.
"""

from __future__ import annotations

import numpy as np

from tickwheel.wheel.holdings import Holdings
from tickwheel.wheel.marks import Marks
from tickwheel.wheel.pinned import Pinned
from tickwheel.wheel.queries import HOURS_MAX as QUERY_HOURS_MAX
from tickwheel.wheel.queries import CountJob, ScanJob, Schedule, Wanted
from tickwheel.wheel.reading import LookupJob, RecordsJob, by_hour
from tickwheel.wheel.units import HOUR_MS, CursorKey, Ids, Units
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
        for hour, rows in by_hour((resolved >> np.uint64(32)).astype(np.int64)):
            indexes = resolved[rows].astype(np.uint32)  # the lower half
            if hour >= self._holdings.removed_below:
                found[rows] = indexes < self._holdings.hours.units(hour)
            cancelled[rows] = self._marks.which(hour, indexes)
        return LookupJob(ids, resolved, found, cancelled, self._holdings)

    def check_rows(self, ids: Ids) -> None:
        """Read the index rows of these very ids on this thread; ids in buffers need none. Raises CorruptSegmentError if
        a row is lost."""
        for hour, rows in by_hour((ids >> np.uint64(32)).astype(np.int64)):
            if hour < self._holdings.removed_below:
                continue
            indexes = (ids[rows] & np.uint64(0xFFFF_FFFF)).astype(np.int64)
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
        end_ms = hours[QUERY_HOURS_MAX] * HOUR_MS if len(hours) > QUERY_HOURS_MAX else None
        hours = hours[:QUERY_HOURS_MAX]
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
            hours=[self._holdings.open_hour(hour) for hour in held[:QUERY_HOURS_MAX]],
            hours_end_ms=held[QUERY_HOURS_MAX] * HOUR_MS if len(held) > QUERY_HOURS_MAX else None,
            blocks=self._holdings.blocks(),
            marks=pinned.marks,
            units={},
        )
        return ScanJob(schedule, start, limit, wanted or Wanted())
