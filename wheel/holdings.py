"""Places of all pending units (hour files, bundles, the two arrival buffers), and the marks on units.

The lowest layer of the wheel (engine.py): holds its state and restores it, moves nothing. Each layer above is used
through `Wheel` alone.

Invariant: a unit is in exactly one of: the hour segments (merged), a bundle that was taken over, the frozen buffer, the
active buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tickwheel.storage.disk import Disk
from tickwheel.storage.segment import Chunk, Segment
from tickwheel.wheel.buffer import Buffer
from tickwheel.wheel.bundles import Bundles
from tickwheel.wheel.checkpoint import WheelState, read_run, run_path
from tickwheel.wheel.hours import HourTable
from tickwheel.wheel.jobs import HourChunks
from tickwheel.wheel.marks import Marks
from tickwheel.wheel.units import CursorKey

SLOT_WIDTHS_MS = (1_000, 500, 200, 100)


@dataclass(frozen=True, slots=True)
class WheelConfig:
    """`slot_ms` is fixed when the cluster is created."""

    slot_ms: int = 1_000
    buffer_bytes_max: int = 128 << 20
    """Bytes of the arrival buffer above which it is merged."""
    preload_ms: int = 10_000

    def __post_init__(self) -> None:
        if self.slot_ms not in SLOT_WIDTHS_MS:
            raise ValueError(f"slot_ms: {self.slot_ms}: one of {SLOT_WIDTHS_MS}")


class Holdings:
    def __init__(self, disk: Disk, directory: str, config: WheelConfig, state: bytes = b"") -> None:
        """`state`: `Manifest.wheel`; without it the directory must be empty. Raises CorruptSegmentError."""
        self._disk = disk
        self._directory = directory
        self._config = config
        self._slot_ms = config.slot_ms
        self._hours = HourTable()
        self._marks = Marks()
        self._active = Buffer()
        self._frozen: Buffer | None = None
        self._bundles = Bundles()
        self._gone: dict[str, int] = {}
        """Bundle without remaining chunks -> the last checkpoint begun before that. A replay needs the file until a
        later checkpoint is durable."""
        self._chunks: dict[int, list[Chunk]] = {}
        self._open: dict[int, Segment] = {}
        self._run = 0
        self._removed_below = 0
        self.cursor = CursorKey(0, 0)
        self.local_index = 0
        """Units of the cursor's tick that are already passed, in dispatch order."""
        self.pending = 0
        if state:
            self._restore(WheelState.decode(state))
        else:
            disk.make_dir(f"{directory}/hours")
            disk.make_dir(f"{directory}/runs")

    def _restore(self, state: WheelState) -> None:
        if state.slot_ms != self._slot_ms:
            raise ValueError(f"slot_ms: {self._slot_ms}: this cluster was created with {state.slot_ms}")
        self.cursor = state.cursor
        self.local_index = state.local_index
        self.pending = state.pending
        self._removed_below = state.removed_below
        self._run = state.run
        content = read_run(self._disk, run_path(self._directory, state.run))
        self._hours.load(content.hours)
        self._bundles.load(content.bundles)
        self._remove_leavings()
        self._marks.load(content.marks, content.moves)
        self._active.restore(content.units, content.extents, content.records)

    def _remove_leavings(self) -> None:
        """Remove files that this checkpoint does not name: written after it, or left by a crash before their
        removal."""
        disk, directory = self._disk, self._directory
        for name in disk.list(f"{directory}/hours"):
            if not (name.isdecimal() and self._hours.merged(int(name)).rows):
                disk.remove(f"{directory}/hours/{name}")
        for name in disk.list(f"{directory}/runs"):
            if name != f"{self._run}.run":
                disk.remove(f"{directory}/runs/{name}")

    @property
    def tick(self) -> int:
        """Tick of the cursor."""
        return self.cursor.due_ms // self._slot_ms

    def _buffers(self) -> list[Buffer]:
        """The buffers, the older first."""
        return [self._active] if self._frozen is None else [self._frozen, self._active]

    def _in_files(self, hour: int) -> bool:
        """Whether files hold some of an hour's units."""
        return self._bundles.has(hour) or self._hours.has_merged(hour)

    def _lies_in_files(self, hour: int, index: NDArray[np.int64]) -> NDArray[np.bool_]:
        """True for each index of an hour that lies in files: in a bundle, or merged."""
        inside, below = self._bundles.inside(hour, index)
        return inside | (index - below < self._hours.merged(hour).rows)

    def _open_hour(self, hour: int) -> HourChunks:
        return HourChunks(
            self._disk, self._directory, hour, self._hours.merged(hour), self._chunks.get(hour), self._bundles
        )

    def _close_hour(self, hour: int) -> None:
        segment = self._open.pop(hour, None)
        if segment is not None:
            segment.close()

    @property
    def buffer_bytes(self) -> int:
        """Bytes of unmerged arrivals in memory."""
        return sum(buffer.bytes for buffer in self._buffers())

    @property
    def bundle_chunks(self) -> int:
        """Chunks of hours that lie in bundles."""
        return self._bundles.chunks

    def bundle_names(self) -> set[str]:
        """Bundles whose files are needed."""
        return {overlay.name for overlay in self._bundles.overlays()} | self._gone.keys()

    def hours(self) -> list[int]:
        """Hours that have units."""
        used: list[int] = self._hours.used().tolist()
        return used
