"""How a bundle that was built outside becomes part of the wheel.

Owns the bundle that was ingested last, until its soon-due units have been read.

Invariant: between `begin` and `finish` nothing else is applied (`absorbing`). `finish` needs the bundle's file, `begin`
does not.
"""

from __future__ import annotations

import numpy as np

from tickwheel.storage.bundle import Layout
from tickwheel.storage.disk import Disk
from tickwheel.wheel.buffer import Block
from tickwheel.wheel.bundles import Ingested, Overlay, TakenChunks
from tickwheel.wheel.holdings import Holdings
from tickwheel.wheel.jobs import AbsorbJob
from tickwheel.wheel.units import HOUR_MS


class Ingestion:
    def __init__(self, disk: Disk, slot_ms: int, holdings: Holdings) -> None:
        self._disk = disk
        self._slot_ms = slot_ms
        self._holdings = holdings
        self._fresh: tuple[Overlay, TakenChunks] | None = None
        self._job: AbsorbJob | None = None

    def begin(
        self, name: str, layout: Layout, *, clamp_ms: int, stamped_ms: int, topic_ids: tuple[int, ...]
    ) -> Ingested:
        """Give the bundle's units their indexes. Units due before `clamp_ms` become due then. Touches no file."""
        assert self._fresh is None, "an ingested bundle is still being read"
        table = layout.table
        taken = self._holdings.ingest(name, layout, clamp_ms=clamp_ms, stamped_ms=stamped_ms, topic_ids=topic_ids)
        self._fresh = (self._holdings.bundles.overlays()[-1], taken)
        late = table["hour"].astype(np.int64) < clamp_ms // HOUR_MS
        return Ingested(taken, clamp_ms, int(table["units"][late].astype(np.int64).sum()))

    @property
    def absorbing(self) -> bool:
        """Whether units of the bundle must be read before anything else is applied."""
        return self._fresh is not None

    @property
    def lacking(self) -> tuple[str, int] | None:
        """Name and bytes of the bundle whose file is missing; None: none is."""
        if self._fresh is None or self._job is not None or self._disk.exists(self._fresh[0].path):
            return None
        return self._fresh[0].name, self._fresh[0].bytes

    def wanted(self, due_max: int) -> AbsorbJob | None:
        """The job that reads the bundle's units due before `due_max`; None: it is under way, or the file is missing."""
        if self._fresh is None or self._job is not None or not self._disk.exists(self._fresh[0].path):
            return None
        _, taken = self._fresh
        near = taken[taken["hour"].astype(np.int64) * HOUR_MS < due_max]
        starts = np.flatnonzero(np.diff(near["hour"].astype(np.int64), prepend=-1))
        parts = np.split(near, starts[1:]) if len(near) else []
        self._job = AbsorbJob(self._slot_ms, due_max, [self._holdings.open_taken(part) for part in parts])
        return self._job

    def finish(self, job: AbsorbJob) -> list[Block]:
        """The units that the job has read, for the loaded ticks."""
        self._job = None
        self._fresh = None
        return job.found

    def abandon(self) -> None:
        """The job failed; it will be wanted again."""
        self._job = None
