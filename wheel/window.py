"""The cursor, and the ticks loaded ahead of it.

Owns the cursor, the second wheel (slots.py), and the jobs that load units and chunk directories near the cursor.

Invariants:
- The cursor never moves back.
- Every unit from the cursor on that is due before `SecondWheel.until_ms` is in the second wheel, marked or not. No unit
  below the cursor is.
"""

from __future__ import annotations

import numpy as np

from tickwheel.wheel.buffer import Block
from tickwheel.wheel.holdings import Holdings
from tickwheel.wheel.jobs import LoadJob, MapJob
from tickwheel.wheel.slots import SecondWheel, cut_at
from tickwheel.wheel.units import HOUR_MS, UNIT, CursorKey, Units, join_units

HOURS_AHEAD = 2
"""Chunk directories are kept for so many hours on either side of the cursor's. Those ahead are read in advance; older
ones are dropped."""
LOAD_UNITS_MAX = 500_000
"""Units that one load aims at; a single tick may have more."""
LOADED_UNITS_MAX = 2_000_000
"""With this many units loaded (192 MB), no further tick is loaded ahead."""


class Window:
    def __init__(self, holdings: Holdings, slot_ms: int, preload_ms: int, cursor: CursorKey, local_index: int) -> None:
        self._holdings = holdings
        self._slot_ms = slot_ms
        self._preload_ms = preload_ms
        self.cursor = cursor
        self.local_index = local_index
        """How many units of its tick the cursor has passed, in dispatch order."""
        self._second = SecondWheel(slot_ms, self.tick * slot_ms)
        self.loading: LoadJob | None = None
        self._mapping: MapJob | None = None

    @property
    def tick(self) -> int:
        """Tick of the cursor."""
        return self.cursor.due_ms // self._slot_ms

    @property
    def loaded_units(self) -> int:
        """Units in the second wheel."""
        return self._second.units

    @property
    def end_ms(self) -> int:
        """End of the ticks that are loaded or being loaded."""
        return self._second.until_ms if self.loading is None else self.loading.due_max

    @property
    def hour_max(self) -> int:
        """Last hour whose chunk directory is kept in memory."""
        return self.cursor.due_ms // HOUR_MS + HOURS_AHEAD

    # -- units in, units out

    def insert(self, block: Block) -> None:
        """Take arrivals: those for ticks that are loaded, or being loaded, go straight in."""
        until_ms = self._second.until_ms
        first_due_ms = int(block.due_ms[0])
        if first_due_ms < until_ms:
            near = block.between(first_due_ms, until_ms)
            if near is not None:
                self._second.insert(near)
        loading = self.loading
        if loading is not None:
            part = block.between(loading.due_min, loading.due_max)
            if part is not None:
                loading.arrivals.append(part)

    def advance(self, to: CursorKey) -> Units:
        """Move the cursor ahead to `to`. Returns the units that it passes, marked ones included, in order. Units that
        are not loaded yet are loaded on this thread. Raises DiskError."""
        taken: list[Block] = []
        while self._second.until_ms <= to.due_ms:
            taken += self._second.take(to)
            self._load_now(to.due_ms + 1)
        taken += self._second.take(to)
        same_tick = to.due_ms // self._slot_ms == self.tick
        self.cursor = to
        if not same_tick:
            self.local_index = 0
        units = _joined(taken)
        if len(units):
            self.local_index += int(np.count_nonzero(units["due_ms"] >= self.tick * self._slot_ms))
        return units

    def plan(self, until_ms: int, units_max: int, after: CursorKey | None) -> CursorKey | None:
        """The key just after the loaded units due up to `until_ms`, at most `units_max` of them from `after` on; None:
        there are none."""
        start = self.cursor if after is None else max(after, self.cursor)
        second = self._second
        limit_ms = min(until_ms, second.until_ms - 1)
        below = second.count_below(start) if start > self.cursor else 0
        key, count = second.key_after(limit_ms, below + units_max)
        if key is None or count <= below:
            return None
        if count - below >= units_max:
            return key
        whole = CursorKey(limit_ms + 1, 0)
        return whole if whole > start else None

    def peek(self, start: CursorKey, to: CursorKey) -> Units | None:
        """The units from `start` to `to`, marked ones included, in order; None: some of them are not loaded."""
        return None if self._second.until_ms <= to.due_ms else _joined(self._second.peek(start, to))

    def next_due_ms(self, after: CursorKey | None = None) -> int | None:
        """Lower bound of the due time of the next unit from `after` on, exact if that unit is loaded; None: there is
        none."""
        due_ms = self._second.next_due_ms(after)
        return due_ms if due_ms is not None else self._holdings.first_due_ms(self._second.until_ms)

    # -- directories of hours near the cursor

    def wanted_map(self) -> MapJob | None:
        """The job that reads missing directories; None: none is missing, or one is under way."""
        if self._mapping is not None:
            return None
        first = self.cursor.due_ms // HOUR_MS
        missing = self._holdings.without_directory(first, self.hour_max)
        if not missing:
            return None
        self._holdings.forget_directories(first - HOURS_AHEAD)
        self._mapping = MapJob([self._holdings.open_hour(hour) for hour in missing])
        return self._mapping

    def finish_map(self, job: MapJob) -> None:
        """Keep what the job has read."""
        self._mapping = None
        for hour in job.hours:
            self._holdings.take_directory(hour)

    # -- loads

    def wanted_load(self, now_ms: int) -> LoadJob | None:
        """The job that loads the next stretch; None: enough is loaded, or one is under way."""
        second = self._second
        if self.loading is not None or second.units >= LOADED_UNITS_MAX:
            return None
        if second.until_ms > now_ms + self._preload_ms - self._slot_ms:
            return None
        wanted_ms = (now_ms + self._preload_ms) // self._slot_ms * self._slot_ms + self._slot_ms
        begin_ms, end_ms = self._next_stretch(wanted_ms)
        if begin_ms >= end_ms:
            second.until_ms = end_ms
            return None
        second.until_ms = begin_ms
        self.loading = self._load_job(begin_ms, end_ms)
        return self.loading

    def finish_load(self, job: LoadJob) -> None:
        """Take the loaded units. Ignores a job that `load_to` or `advance` has superseded."""
        if job is self.loading:
            self.loading = None
            self._take_loaded(job)

    def abandon(self, job: LoadJob | MapJob) -> None:
        """The job failed; it will be wanted again."""
        if job is self._mapping:
            self._mapping = None
        elif job is self.loading:
            self.loading = None

    def needed(self, job: LoadJob | MapJob) -> bool:
        """Whether a job under way still matters."""
        if isinstance(job, LoadJob):
            return job is self.loading
        return all(hour.hour >= self._holdings.removed_below for hour in job.hours)

    def load_to(self, due_ms: int) -> None:
        """Load on this thread everything that a dispatch up to `due_ms` passes. Raises DiskError."""
        while self._second.until_ms <= due_ms:
            self._load_now(due_ms + 1)

    def _next_stretch(self, wanted_ms: int) -> tuple[int, int]:
        """(begin_ms, end_ms) of the next stretch to load, at most up to `wanted_ms`. It begins where the next unit may
        be, and would hold at most LOAD_UNITS_MAX units if the hour's units were spread evenly."""
        slot_ms = self._slot_ms
        begin_ms = self._holdings.first_due_ms(self._second.until_ms)
        if begin_ms is None or begin_ms >= wanted_ms:
            return wanted_ms, wanted_ms
        begin_ms = max(begin_ms // slot_ms * slot_ms, self._second.until_ms)
        hour = begin_ms // HOUR_MS
        end_ms = min(wanted_ms, (hour + 1) * HOUR_MS)
        units = self._holdings.hours.units(hour)
        if units > LOAD_UNITS_MAX:
            step_ms = max(slot_ms, HOUR_MS * LOAD_UNITS_MAX // units // slot_ms * slot_ms)
            end_ms = min(end_ms, begin_ms + step_ms)
        return begin_ms, end_ms

    def _load_job(self, begin_ms: int, end_ms: int) -> LoadJob:
        holdings = self._holdings
        hours = holdings.hours.used(begin_ms // HOUR_MS, -(-end_ms // HOUR_MS)).tolist()
        merged = [holdings.open_hour(hour) for hour in hours if holdings.in_files(hour)]
        # Buffers are captured now, as slices; later arrivals go to the job's `arrivals`.
        blocks = [part for block in holdings.blocks() if (part := block.between(begin_ms, end_ms)) is not None]
        return LoadJob(self._slot_ms, begin_ms, end_ms, merged, blocks)

    def _load_now(self, wanted_ms: int) -> None:
        """Load one more stretch on this thread, for a dispatch."""
        self.loading = None  # a job under way is superseded; `finish_load` ignores it
        slot_ms = self._slot_ms
        begin_ms, end_ms = self._next_stretch(-(-wanted_ms // slot_ms) * slot_ms)
        if begin_ms < end_ms:
            job = self._load_job(begin_ms, end_ms)
            job.run()
            self._take_loaded(job)
        else:
            self._second.until_ms = end_ms

    def _take_loaded(self, job: LoadJob) -> None:
        self._second.until_ms = job.due_max
        for block in [*job.found, *job.arrivals]:
            kept = self._not_passed(block)
            if kept is not None:
                self._second.insert(kept)

    def _not_passed(self, block: Block) -> Block | None:
        """The block without units that the cursor passed while it was read."""
        cut = cut_at(block, self.cursor)
        if cut == len(block.due_ms):
            return None
        return Block(block.due_ms[cut:], block.units[cut:]) if cut else block


def _joined(blocks: list[Block]) -> Units:
    return join_units([block.units for block in blocks]) if blocks else np.zeros(0, dtype=UNIT)
