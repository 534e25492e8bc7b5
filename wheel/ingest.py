"""Takeover of bundles that were built outside: their units get indexes, and soon-due units are read first.

A layer of the wheel (engine.py).

Invariant: after a takeover nothing else is applied until the bundle's units for the loaded ticks have been read
(`absorbing`). That needs the bundle's file; the takeover itself does not.
"""

from __future__ import annotations

import numpy as np

from tickwheel.storage.bundle import Layout
from tickwheel.storage.disk import Disk
from tickwheel.storage.segment import SegmentLengths
from tickwheel.wheel.bundles import Ingested, Overlay, TakenChunks
from tickwheel.wheel.holdings import WheelConfig
from tickwheel.wheel.jobs import AbsorbJob, HourChunks
from tickwheel.wheel.units import HOUR_MS, Ids
from tickwheel.wheel.window import Window


class Ingest(Window):
    def __init__(self, disk: Disk, directory: str, config: WheelConfig, state: bytes = b"") -> None:
        super().__init__(disk, directory, config, state)
        self._fresh: tuple[Overlay, TakenChunks] | None = None
        self._absorbing: AbsorbJob | None = None

    def ingest(self, name: str, layout: Layout, topic_ids: tuple[int, ...], stamped_ms: int) -> Ingested:
        """Take a bundle over: its units get the next indexes of their hours.

        Units due before the cursor become due at the cursor, as arrivals do; if their hour is over they go to the
        cursor's hour. Nothing is read or written: `absorbing` is true until a job has read the soon-due units.
        """
        assert self._fresh is None, "a bundle that was taken over is still being read"
        table = layout.table
        cursor_hour = self.cursor.due_ms // HOUR_MS
        target = np.maximum(table["hour"].astype(np.int64), cursor_hour)
        units, log_bytes = table["units"].astype(np.int64), table["log_bytes"].astype(np.int64)
        starts = np.flatnonzero(np.diff(target, prepend=-1))
        used = target[starts]
        hours = self._hours
        hours.cover(int(used[0]), int(used[-1]))
        at_hour = used - hours.base
        counts = np.diff(starts, append=len(target))
        before_units, before_bytes = np.cumsum(units) - units, np.cumsum(log_bytes) - log_bytes
        first = before_units + np.repeat(hours.next_index[at_hour] - before_units[starts], counts)
        offsets = before_bytes + np.repeat(hours.next_offset[at_hour] - before_bytes[starts], counts)
        hours.next_index[at_hour] += np.add.reduceat(units, starts)
        hours.next_offset[at_hour] += np.add.reduceat(log_bytes, starts)
        taken = self._bundles.take(
            name,
            layout,
            target,
            first,
            offsets,
            clamp_ms=self.cursor.due_ms,
            stamped_ms=stamped_ms,
            topic_ids=topic_ids,
        )
        self._fresh = (self._bundles.overlays()[-1], taken)
        self.pending += layout.units
        for hour in used.tolist():
            self._chunks.pop(hour, None)
        return Ingested(taken, self.cursor.due_ms, int(units[table["hour"] < cursor_hour].sum()))

    def withhold(self, ids: Ids) -> Ids:
        """Cancel units of the bundle that was just taken over, before any is read. `ids`: by rising row; returned
        unchanged."""
        hours = (ids >> np.uint64(32)).astype(np.int64)
        starts = np.flatnonzero(np.diff(hours, prepend=-1))
        for part in np.split(ids, starts[1:]) if len(ids) else []:
            self._marks.add_many(int(part[0]) >> 32, (part & np.uint64(0xFFFF_FFFF)).astype(np.uint32))
        self.pending -= len(ids)
        return ids

    def covers(self, hour_max: int) -> bool:
        """Whether the hour table can hold hours up to this one."""
        return self._hours.fits(self.cursor.due_ms // HOUR_MS, hour_max)

    @property
    def absorbing(self) -> bool:
        """Whether nothing may be applied yet, because units of the last taken-over bundle must be read first."""
        return self._fresh is not None

    @property
    def lacking(self) -> tuple[str, int] | None:
        """Name and bytes of the bundle whose file is missing; None: none is."""
        if self._fresh is None or self._absorbing is not None or self._disk.exists(self._fresh[0].path):
            return None
        return self._fresh[0].name, self._fresh[0].bytes

    def _wanted_absorb(self, overlay: Overlay, taken: TakenChunks) -> AbsorbJob | None:
        """The job that reads the bundle's soon-due units. No load begins meanwhile, so the job's window is all that can
        be loaded."""
        if self._absorbing is not None or not self._disk.exists(overlay.path):
            return None
        due_max = self._second.until_ms if self._loading is None else self._loading.due_max
        near = taken[taken["hour"].astype(np.int64) * HOUR_MS < due_max]
        starts = np.flatnonzero(np.diff(near["hour"].astype(np.int64), prepend=-1))
        parts = np.split(near, starts[1:]) if len(near) else []
        hours = [
            HourChunks(self._disk, self._directory, int(part["hour"][0]), SegmentLengths(), None, self._bundles, part)
            for part in parts
        ]
        self._absorbing = AbsorbJob(self._slot_ms, due_max, hours)
        return self._absorbing

    def _finish_absorb(self, job: AbsorbJob) -> None:
        self._absorbing = None
        self._fresh = None
        for block in job.found:
            self._take_near(block)
