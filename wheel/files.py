"""Files of the wheel: written by merges, made durable by checkpoints, removed once no checkpoint needs them.

Owns the merge under way, the segments that it keeps open, and what has happened to files since the last checkpoint
began: which hours were merged, which were removed, which bundles lost their last chunk.

Invariants:
- One merge at a time, and nothing else, writes hour files.
- A file that the newest durable checkpoint names is not removed: a replay may need it. Nor is a directory that a merge
  may still write to.
"""

from __future__ import annotations

from tickwheel.proto.log_pb2 import ManifestFile
from tickwheel.storage.disk import Disk
from tickwheel.storage.segment import CorruptSegmentError, Segment
from tickwheel.wheel.checkpoint import CheckpointJob, WheelState
from tickwheel.wheel.holdings import Holdings
from tickwheel.wheel.jobs import MergeJob
from tickwheel.wheel.marks import MarksCapture
from tickwheel.wheel.units import CursorKey

MERGE_SHARE_MIN = 8
"""No merge begins before the buffer is this part full (an eighth)."""

MERGE_HOUR_BYTES = 4 << 20
"""A merge begins before the buffer is full only if it has this many bytes for each touched hour: otherwise many hours
would mean many small writes."""


class Files:
    def __init__(
        self, disk: Disk, directory: str, slot_ms: int, buffer_bytes_max: int, holdings: Holdings, run: int = 0
    ) -> None:
        """`run`: number of the run file that the holdings come from; 0: there is none."""
        self._disk = disk
        self._directory = directory
        self._slot_ms = slot_ms
        self._buffer_bytes_max = buffer_bytes_max
        self._holdings = holdings
        self.merging: MergeJob | None = None
        self._open: dict[int, Segment] = {}
        self._run = run
        """Number of the run file of the checkpoint that began last."""
        self._dirty: set[int] = set()
        """Hours merged since that checkpoint began."""
        self._doomed: list[int] = []
        """Hours removed since that checkpoint began."""
        self._gone: dict[str, int] = {}
        """Bundle without remaining chunks -> the last checkpoint begun before that. A replay needs the file until a
        later checkpoint is durable."""
        if run:
            self._remove_leavings()
        else:
            disk.make_dir(f"{directory}/hours")
            disk.make_dir(f"{directory}/runs")

    def _remove_leavings(self) -> None:
        """Remove files that the checkpoint does not name: written after it, or left by a crash before their removal."""
        disk, directory = self._disk, self._directory
        for name in disk.list(f"{directory}/hours"):
            if not (name.isdecimal() and self._holdings.hours.has_merged(int(name))):
                disk.remove(f"{directory}/hours/{name}")
        for name in disk.list(f"{directory}/runs"):
            if name != f"{self._run}.run":
                disk.remove(f"{directory}/runs/{name}")

    # -- merges

    @property
    def wants_merge(self) -> bool:
        """Whether a merge should begin; False while one is under way."""
        return self.merging is None and (self._holdings.frozen is not None or self._worth_merging())

    def merge(self) -> MergeJob | None:
        """The merge that should begin; None: none should. The buffer is frozen for it."""
        if not self.wants_merge:
            return None
        holdings = self._holdings
        self.merging = MergeJob(
            self._disk,
            self._directory,
            self._slot_ms,
            holdings.freeze(),
            holdings.hours.merged,
            self._open,
            holdings.removed_below,
        )
        return self.merging

    def _worth_merging(self) -> bool:
        """Whether the buffer is full, or has enough for each touched hour: an early, small merge occupies processor and
        disk for a shorter time."""
        size, most = self._holdings.active.bytes, self._buffer_bytes_max
        least = min(most, max(most // MERGE_SHARE_MIN, self._holdings.active.hours * MERGE_HOUR_BYTES))
        return size >= least

    def finish(self, job: MergeJob, near_max: int) -> None:
        """The merge has ended. `near_max`: see `Holdings.take_merged`."""
        assert job is self.merging
        self.merging = None
        self._holdings.take_merged(job.results, near_max)
        for hour, _, _ in job.results:
            if hour >= self._holdings.removed_below:
                self._dirty.add(hour)
                continue
            # Removed while it was being written.
            self._close(hour)
            if hour not in self._doomed:
                self._doomed.append(hour)

    def abandon(self) -> None:
        """The merge failed: nothing of it counts, and it will be wanted again."""
        self.merging = None
        for segment in self._open.values():
            segment.close()
        self._open.clear()

    def _close(self, hour: int) -> None:
        segment = self._open.pop(hour, None)
        if segment is not None:
            segment.close()

    # -- removal

    def doom(self, hours: list[int], bundles: list[str]) -> None:
        """The holdings no longer need the files of these hours and bundles."""
        self._doomed += hours
        for name in bundles:
            self._gone[name] = self._run

    def bundle_names(self) -> set[str]:
        """Bundles whose files are needed."""
        return {overlay.name for overlay in self._holdings.bundles.overlays()} | self._gone.keys()

    # -- checkpoints

    def begin_checkpoint(self, cursor: CursorKey, local_index: int, pending: int, marks: MarksCapture) -> CheckpointJob:
        """Capture the holdings, and what must happen to files, as they are now."""
        self._run += 1
        holdings = self._holdings
        state = WheelState(
            slot_ms=self._slot_ms,
            cursor=cursor,
            local_index=local_index,
            pending=pending,
            removed_below=holdings.removed_below,
            run=self._run,
        )
        dirty, self._dirty = self._dirty, set()
        # A merge under way may still write to hours removed since it began: their files wait for the next checkpoint.
        busy = set() if self.merging is None else set(self.merging.hours)
        doomed = [hour for hour in self._doomed if hour not in busy]
        self._doomed = [hour for hour in self._doomed if hour in busy]
        bundles = {o.path: ManifestFile(path=o.path, bytes=o.bytes) for o in holdings.bundles.overlays()}
        return CheckpointJob(
            self._disk,
            self._directory,
            state,
            holdings.hours.dump(),
            marks,
            holdings.buffers(),
            dirty,
            doomed,
            holdings.bundles.dump(),
            list(bundles.values()),
        )

    def checkpoint_durable(self, job: CheckpointJob) -> None:
        """The manifest with this checkpoint is durable."""
        for hour in job.doomed:
            self._close(hour)
        self._gone = {name: run for name, run in self._gone.items() if run >= job.wheel_state.run}

    def checkpoint_failed(self, job: CheckpointJob) -> None:
        """Leave the work of this checkpoint to the next one."""
        self._dirty |= job.dirty
        self._doomed = [*job.doomed, *self._doomed]

    # -- damage

    def damaged_hour(self, error: BaseException) -> int | None:
        """The hour whose own delay index an error says is damaged; None: the error is about something else."""
        if not isinstance(error, CorruptSegmentError):
            return None
        parts = error.path.removeprefix(f"{self._directory}/hours/").split("/")
        return int(parts[0]) if len(parts) == 2 and parts[1] == "0.index" and parts[0].isdecimal() else None
