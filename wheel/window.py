"""The ticks loaded ahead of the cursor: decides which stretch to load next, and adds arrivals to it.

A layer of the wheel (engine.py): owns the second wheel, and the jobs that fill it and the directories of hours near by.

Invariant: every pending unit due before `SecondWheel.until_ms` is in the second wheel.
"""

from __future__ import annotations

import numpy as np

from tickwheel.storage.disk import Disk
from tickwheel.wheel.buffer import Block
from tickwheel.wheel.holdings import WheelConfig
from tickwheel.wheel.jobs import LoadJob, MapJob
from tickwheel.wheel.reads import Reads
from tickwheel.wheel.slots import SecondWheel, cut_at
from tickwheel.wheel.units import HOUR_MS, CursorKey

HOURS_AHEAD = 2
"""Hours on either side of the cursor's whose chunk directories are kept in memory: those ahead are read, older ones
dropped."""
LOAD_UNITS_MAX = 500_000
"""Units that one load brings; more only if a single tick has more."""
LOADED_UNITS_MAX = 2_000_000
"""Above this number of loaded units nothing more is loaded ahead (192 MB)."""


class Window(Reads):
    def __init__(self, disk: Disk, directory: str, config: WheelConfig, state: bytes = b"") -> None:
        super().__init__(disk, directory, config, state)
        self._second = SecondWheel(self._slot_ms, self.tick * self._slot_ms)
        self._loading: LoadJob | None = None
        self._mapping: MapJob | None = None

    @property
    def loaded_units(self) -> int:
        """Units in the second wheel."""
        return self._second.units

    def _take_near(self, block: Block) -> None:
        """Put arrivals for ticks that are loaded, or being loaded, straight in."""
        until_ms = self._second.until_ms
        first_due_ms = int(block.due_ms[0])
        if first_due_ms < until_ms:
            near = block.between(first_due_ms, until_ms)
            if near is not None:
                self._second.insert(near)
        loading = self._loading
        if loading is not None:
            part = block.between(loading.due_min, loading.due_max)
            if part is not None:
                loading.arrivals.append(part)

    def next_due_ms(self, after: CursorKey | None = None) -> int | None:
        """Lower bound of the due time of the next unit behind `after`, exact if it is loaded; None: no unit is
        pending."""
        due_ms = self._second.next_due_ms(after)
        if due_ms is not None:
            return due_ms
        return self._next_unloaded_ms(self._second.until_ms)

    def _next_unloaded_ms(self, from_ms: int) -> int | None:
        """Lower bound of the first unloaded due time from `from_ms` on."""
        hour = self._hours.next_used(from_ms // HOUR_MS)
        if hour is None:
            return None
        if hour * HOUR_MS > from_ms:
            return hour * HOUR_MS
        bounds = [
            due
            for buffer in self._buffers()
            for block in buffer.blocks
            if (due := block.first_due_from(from_ms)) is not None
        ]
        chunks = self._chunks.get(hour)
        if self._in_files(hour):
            if chunks is None:
                return from_ms
            tick = (from_ms - hour * HOUR_MS) // self._slot_ms
            for chunk in chunks:
                at = int(np.searchsorted(chunk.ticks, tick))
                if at < len(chunk.ticks):
                    bounds.append(max(from_ms, hour * HOUR_MS + int(chunk.ticks[at]) * self._slot_ms))
        later = self._hours.next_used(hour + 1)
        if later is not None:
            bounds.append(later * HOUR_MS)
        return min(bounds, default=None)

    def _wanted_map(self) -> MapJob | None:
        if self._mapping is not None:
            return None
        first = self.cursor.due_ms // HOUR_MS
        missing = [
            hour for hour in range(first, first + HOURS_AHEAD + 1) if hour not in self._chunks and self._in_files(hour)
        ]
        if not missing:
            return None
        for hour in [hour for hour in self._chunks if hour < first - HOURS_AHEAD]:
            del self._chunks[hour]
        self._mapping = MapJob([self._open_hour(hour) for hour in missing])
        return self._mapping

    def _finish_map(self, job: MapJob) -> None:
        self._mapping = None
        for hour in job.hours:
            if (
                hour.lengths == self._hours.merged(hour.hour)
                and hour.taken == len(self._bundles.of(hour.hour))
                and hour.hour >= self._removed_below
            ):
                self._chunks[hour.hour] = list(hour.chunks())

    def _wanted_load(self, now_ms: int) -> LoadJob | None:
        second = self._second
        preload_ms = self._config.preload_ms
        if self._loading is not None or second.units >= LOADED_UNITS_MAX:
            return None
        if second.until_ms > now_ms + preload_ms - self._slot_ms:
            return None
        wanted_ms = (now_ms + preload_ms) // self._slot_ms * self._slot_ms + self._slot_ms
        begin_ms, end_ms = self._next_window(wanted_ms)
        if begin_ms >= end_ms:
            second.until_ms = end_ms
            return None
        second.until_ms = begin_ms
        self._loading = self._load_job(begin_ms, end_ms)
        return self._loading

    def _next_window(self, wanted_ms: int) -> tuple[int, int]:
        """(begin_ms, end_ms) of the next stretch to load. It begins where the next unit may be, and would hold at most
        LOAD_UNITS_MAX units if the hour's units were spread evenly."""
        slot_ms = self._slot_ms
        begin_ms = self._next_unloaded_ms(self._second.until_ms)
        if begin_ms is None or begin_ms >= wanted_ms:
            return wanted_ms, wanted_ms
        begin_ms = max(begin_ms // slot_ms * slot_ms, self._second.until_ms)
        hour = begin_ms // HOUR_MS
        end_ms = min(wanted_ms, (hour + 1) * HOUR_MS)
        units = self._hours.units(hour)
        if units > LOAD_UNITS_MAX:
            step_ms = max(slot_ms, HOUR_MS * LOAD_UNITS_MAX // units // slot_ms * slot_ms)
            end_ms = min(end_ms, begin_ms + step_ms)
        return begin_ms, end_ms

    def _load_job(self, begin_ms: int, end_ms: int) -> LoadJob:
        hours = self._hours.used(begin_ms // HOUR_MS, -(-end_ms // HOUR_MS)).tolist()
        merged = [self._open_hour(hour) for hour in hours if self._in_files(hour)]
        # Buffers are captured now, as slices; later arrivals go to the job's `arrivals`.
        blocks = [
            part
            for buffer in self._buffers()
            for block in buffer.blocks
            if (part := block.between(begin_ms, end_ms)) is not None
        ]
        return LoadJob(self._slot_ms, begin_ms, end_ms, merged, blocks)

    def load_to(self, due_ms: int) -> None:
        """Load on this thread everything that a dispatch up to `due_ms` passes. Raises DiskError."""
        while self._second.until_ms <= due_ms:
            self._load_now(due_ms + 1)

    def _load_now(self, wanted_ms: int) -> None:
        """Load one more stretch on this thread, for a dispatch."""
        self._loading = None  # a job under way is superseded; `finish` ignores it
        slot_ms = self._slot_ms
        begin_ms, end_ms = self._next_window(-(-wanted_ms // slot_ms) * slot_ms)
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
