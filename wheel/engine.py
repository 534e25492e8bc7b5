"""The wheel of one wheel group: every pending message, and the cursor that moves through them.

`Wheel` is the uppermost of five layers. Each is a class in a module of its own and knows those below: holdings.py (the
stored units), reads.py, window.py (the loaded ticks), ingest.py (takeover of bundles), and this module with the
commands of the log, background work and checkpoints. Other packages use `Wheel` alone.

Deterministic and synchronous. Time is an argument. Files are touched only by jobs that the caller runs, and by
a synchronous load when a dispatch reaches beyond the loaded ticks.

Invariants:
- `append` gives ids, offsets and due times, from the log alone. Merges, loads and checkpoints may happen at any time:
  no id, order, answer or digest depends on when.
- The cursor never moves back; no unit below it is pending.

All methods belong to one thread, that of the node's core; `run` of a job may be called by any.
"""

from __future__ import annotations

import enum
import hashlib
from bisect import insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tickwheel.proto.log_pb2 import ManifestFile
from tickwheel.storage.disk import Disk
from tickwheel.wheel import sweep
from tickwheel.wheel.buffer import Block, Buffer
from tickwheel.wheel.checkpoint import CheckpointJob, WheelState
from tickwheel.wheel.holdings import WheelConfig
from tickwheel.wheel.ingest import Ingest
from tickwheel.wheel.jobs import AbsorbJob, Job, LoadJob, MapJob, MergeJob
from tickwheel.wheel.sweep import Outcomes
from tickwheel.wheel.units import HOUR_MS, UNIT, CursorKey, Ids, Units, join_units
from tickwheel.wheel.window import HOURS_AHEAD


class CancelOutcome(enum.Enum):
    """Outcome of `cancel` and `move`."""

    CANCELLED = "cancelled"
    MOVED = "moved"
    ALREADY_DISPATCHED = "already_dispatched"
    NOT_FOUND = "not_found"


@dataclass(frozen=True, slots=True, eq=False)
class Dispatched:
    """Live units in (due_ms, index) order, and how many units the cursor passed, including cancelled and moved ones."""

    units: Units
    passed_count: int


_NOTHING = Dispatched(np.zeros(0, dtype=UNIT), 0)

MERGE_SHARE_MIN = 8
"""A merge begins once the buffer is an eighth full,"""

MERGE_HOUR_BYTES = 4 << 20
"""and has this many bytes for each touched hour (otherwise many hours would mean many small writes); or is full."""


class Wheel(Ingest):
    """Every pending message of one wheel group, and the cursor."""

    def __init__(self, disk: Disk, directory: str, config: WheelConfig, state: bytes = b"") -> None:
        """`state`: `Manifest.wheel`; without it the directory must be empty. Raises CorruptSegmentError."""
        super().__init__(disk, directory, config, state)
        self._merging: MergeJob | None = None
        self._dirty: set[int] = set()
        self._doomed: list[int] = []

    # -- commands of the log

    def append(self, units: Units, records: bytes | memoryview) -> Ids:
        """Append units, sorted by due_requested_ms. Fills due_ms, index and offset in place and returns the ids.

        `records`: meta and payload of each unit, one after the other, in the same order. Array work only: the cost does
        not depend on how many messages are pending or how many hours a batch spans.
        """
        count = len(units)
        if not count:
            return np.zeros(0, dtype=np.uint64)
        assert self._fresh is None, "a bundle that was taken over is still being read"
        hours = self._hours
        due = np.maximum(units["due_requested_ms"], self.cursor.due_ms)
        if int(due[0]) // HOUR_MS == int(due[-1]) // HOUR_MS:
            return self._append_to_hour(int(due[0]) // HOUR_MS, due, units, records)
        hour = due // HOUR_MS
        starts = np.flatnonzero(np.diff(hour, prepend=hour[0] - 1))
        used = hour[starts]
        hours.cover(int(used[0]), int(used[-1]))
        at_hour = used - hours.base
        counts = np.diff(starts, append=count)
        ends = np.cumsum(units["size"], dtype=np.int64)
        places = ends - units["size"]
        at = places[starts]
        index = np.arange(count, dtype=np.int64) + np.repeat(hours.next_index[at_hour] - starts, counts)
        units["due_ms"] = due
        units["index"] = index
        units["offset"] = places + np.repeat(hours.next_offset[at_hour] - at, counts)
        hours.next_index[at_hour] += counts
        hours.next_offset[at_hour] += np.diff(at, append=int(ends[-1]))
        ids: Ids = (hour.astype(np.uint64) << np.uint64(32)) | index.astype(np.uint64)
        self._active.add(due, units, ids, bytes(records), starts, at)
        self.pending += count
        self._take_near(Block(due, units))
        return ids

    def _append_to_hour(self, hour: int, due: NDArray[np.int64], units: Units, records: bytes | memoryview) -> Ids:
        """`append` for units of a single hour, as in most batches."""
        hours, count = self._hours, len(units)
        hours.cover(hour, hour)
        at_hour = hour - hours.base
        first, offset = int(hours.next_index[at_hour]), int(hours.next_offset[at_hour])
        index = np.arange(first, first + count, dtype=np.int64)
        ends = np.cumsum(units["size"], dtype=np.int64)
        units["due_ms"] = due
        units["index"] = index
        units["offset"] = ends - units["size"] + offset
        hours.next_index[at_hour] = first + count
        hours.next_offset[at_hour] = offset + int(ends[-1])
        ids: Ids = np.uint64(hour << 32) | index.astype(np.uint64)
        start = np.zeros(1, np.int64)
        self._active.add(due, units, ids, bytes(records), start, start)
        self.pending += count
        self._take_near(Block(due, units))
        return ids

    def dispatch(self, to: CursorKey) -> Dispatched:
        """Move the cursor to `to` and pass everything below it. Does nothing if `to` is not ahead of the cursor.

        An index above the units of the hour is cut to their number: a unit that arrives later for that very millisecond
        gets an index from there on, and must not be below the cursor.
        """
        units_in_hour = self._hours.units(to.due_ms // HOUR_MS)
        if to.index > units_in_hour:
            to = CursorKey(to.due_ms, units_in_hour)
        if to <= self.cursor:
            return _NOTHING
        assert self._fresh is None, "a bundle that was taken over is still being read"
        taken: list[Block] = []
        while self._second.until_ms <= to.due_ms:
            taken += self._second.take(to)
            self._load_now(to.due_ms + 1)
        taken += self._second.take(to)
        same_tick = to.due_ms // self._slot_ms == self.tick
        self.cursor = to
        if not same_tick:
            self.local_index = 0
        if not taken:
            return _NOTHING
        units = join_units([block.units for block in taken])
        self.local_index += int(np.count_nonzero(units["due_ms"] >= self.tick * self._slot_ms))
        passed = len(units)
        marked = self._marks.marked(units)
        if marked.any():
            units = units[~marked]
        self.pending -= len(units)
        return Dispatched(units, passed)

    def cancel(self, id: int, due_ms: int) -> CancelOutcome:
        """Cancel by id. `due_ms`: the unit's own due time; for a moved message it is looked up and this value is
        ignored."""
        id, moved_due_ms = self._marks.moves.resolve(int(id))
        due_ms = due_ms if moved_due_ms is None else moved_due_ms
        hour, index = id >> 32, id & 0xFFFF_FFFF
        if hour < self._removed_below or index >= self._hours.units(hour):
            return CancelOutcome.NOT_FOUND
        if self._marks.has(hour, index):
            return CancelOutcome.CANCELLED
        if due_ms // HOUR_MS != hour:
            return CancelOutcome.NOT_FOUND
        if CursorKey(due_ms, index) < self.cursor:
            return CancelOutcome.ALREADY_DISPATCHED
        self._marks.add(hour, index)
        self.pending -= 1
        return CancelOutcome.CANCELLED

    def move(self, id: int, due_ms: int, units: Units, record: bytes) -> tuple[CancelOutcome, int]:
        """Cancel a unit and append its successor (one unit, as for `append`); the old id keeps naming it."""
        old, _ = self._marks.moves.resolve(int(id))
        if self._marks.has(old >> 32, old & 0xFFFF_FFFF):
            return CancelOutcome.CANCELLED, 0
        outcome = self.cancel(id, due_ms)
        if outcome is not CancelOutcome.CANCELLED:
            return outcome, 0
        new_id = int(self.append(units, record)[0])
        self._marks.moves.add(old, new_id, int(units["due_ms"][0]))
        return CancelOutcome.MOVED, new_id

    def cancel_many(self, ids: Ids, due_ms: NDArray[np.int64]) -> Outcomes:
        """`cancel` for many messages; one outcome each."""
        _, outcomes = sweep.mark(ids, due_ms, self._marks, self._hours, self._removed_below, self.cursor)
        self.pending -= int(np.count_nonzero(outcomes == sweep.DONE))
        return outcomes

    def move_many(
        self, ids: Ids, due_ms: NDArray[np.int64], units: Units, records: bytes
    ) -> tuple[Outcomes, Ids, NDArray[np.int64]]:
        """`move` for many messages. `units` and `records`: of their successors, sorted by due_requested_ms. Also
        returns the new ids and due times of the moved messages, in their order."""
        newest, outcomes = sweep.mark(ids, due_ms, self._marks, self._hours, self._removed_below, self.cursor)
        done = outcomes == sweep.DONE
        if not done.all():
            records = sweep.cut_records(records, units["size"], done)
            units, newest = units[done], newest[done]
        self.pending -= len(units)
        new_ids = self.append(units, records)
        moved_ms: NDArray[np.int64] = units["due_ms"].copy()
        self._marks.moves.add_many(newest, new_ids, moved_ms)
        return outcomes, new_ids, moved_ms

    def remove_hours(self, below: int) -> None:
        """Forget hours below. Their files go with a durable checkpoint, since a replay may need them until then.

        Only hours before the cursor's: nothing in them is pending.
        """
        if below <= self._removed_below:
            return
        if below > self.cursor.due_ms // HOUR_MS:
            raise AssertionError(f"hours below {below} were to be removed, the cursor is at {self.cursor}")
        self._removed_below = below
        self._doomed += self._hours.forget(below)
        self._marks.forget(below)
        for name in self._bundles.forget(below):
            self._gone[name] = self._run
        for hour in [hour for hour in self._chunks if hour < below]:
            del self._chunks[hour]

    # -- questions of the master

    def plan(self, until_ms: int, units_max: int, after: CursorKey | None = None) -> CursorKey | None:
        """The cursor that dispatches the units due up to `until_ms`, at most `units_max` units behind `after`.

        None: no unit is due, or due units are still being loaded (ask again when a load has finished).
        """
        if self._fresh is not None:
            return None
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
        """The units that a dispatch from `start` to `to` would bring if it were applied now; nothing moves.

        None: some of them are not loaded.
        """
        if self._second.until_ms <= to.due_ms or self._fresh is not None:
            return None
        found = self._second.peek(start, to)
        if not found:
            return np.zeros(0, dtype=UNIT)
        units = join_units([block.units for block in found])
        marked = self._marks.marked(units)
        return units[~marked] if marked.any() else units

    # -- background work

    def jobs(self, now_ms: int) -> list[Job]:
        """Jobs that are wanted now and not under way. Run each, then give it to `finish` or `abandon`."""
        wanted: list[Job] = []
        if self._merging is None and (self._frozen is not None or self._worth_merging()):
            if self._frozen is None:
                self._frozen, self._active = self._active, Buffer()
            self._merging = MergeJob(
                self._disk,
                self._directory,
                self._slot_ms,
                self._frozen,
                self._hours.merged,
                self._open,
                self._removed_below,
            )
            wanted.append(self._merging)
        if self._fresh is not None:
            # The file of these chunks may still be missing, so no other job may read them.
            absorbing = self._wanted_absorb(*self._fresh)
            return wanted if absorbing is None else [*wanted, absorbing]
        mapping = self._wanted_map()
        if mapping is not None:
            wanted.append(mapping)
        loading = self._wanted_load(now_ms)
        if loading is not None:
            wanted.append(loading)
        return wanted

    def _worth_merging(self) -> bool:
        """Whether the buffer is full, or has enough for each touched hour: small merges occupy core and disk for a
        shorter time."""
        size, most = self._active.bytes, self._config.buffer_bytes_max
        least = min(most, max(most // MERGE_SHARE_MIN, self._active.hours * MERGE_HOUR_BYTES))
        return size >= least

    def finish(self, job: Job) -> None:
        """Take the result of a job whose `run` has returned."""
        if isinstance(job, MergeJob):
            self._finish_merge(job)
        elif isinstance(job, LoadJob):
            if job is self._loading:
                self._loading = None
                self._take_loaded(job)
        elif isinstance(job, AbsorbJob):
            self._finish_absorb(job)
        elif isinstance(job, MapJob):
            self._finish_map(job)

    def _finish_merge(self, job: MergeJob) -> None:
        assert job is self._merging
        self._merging = None
        self._frozen = None
        for hour, lengths, chunk in job.results:
            if hour < self._removed_below:
                # Removed while it was being written.
                self._close_hour(hour)
                if hour not in self._doomed:
                    self._doomed.append(hour)
                continue
            first = not self._hours.merged(hour).rows
            self._hours.set_merged(hour, lengths)
            self._dirty.add(hour)
            if hour in self._chunks:
                insort(self._chunks[hour], chunk, key=lambda known: known.first_index)
            elif first and not len(self._bundles.of(hour)) and hour <= self.cursor.due_ms // HOUR_MS + HOURS_AHEAD:
                self._chunks[hour] = [chunk]

    def needed(self, job: Job) -> bool:
        """Whether a job under way still matters; if not, its failure does not matter either."""
        if isinstance(job, LoadJob):
            return job is self._loading
        if isinstance(job, MapJob):
            return all(hour.hour >= self._removed_below for hour in job.hours)
        return True

    def abandon(self, job: Job | CheckpointJob) -> None:
        """`run` of a job raised: drop the job; its work will be wanted again."""
        if isinstance(job, MergeJob):
            self._merging = None
            for segment in self._open.values():
                segment.close()
            self._open.clear()
        elif isinstance(job, LoadJob):
            if job is self._loading:
                self._loading = None
        elif isinstance(job, MapJob):
            self._mapping = None
        elif isinstance(job, AbsorbJob):
            self._absorbing = None
        elif isinstance(job, CheckpointJob):
            self._dirty |= job.dirty
            self._doomed = [*job.doomed, *self._doomed]

    # -- checkpoints

    def begin_checkpoint(self) -> CheckpointJob:
        """Capture the state. Run the job in a worker; then call `checkpoint_durable`, or `abandon` if it failed."""
        self._run += 1
        state = WheelState(
            slot_ms=self._slot_ms,
            cursor=self.cursor,
            local_index=self.local_index,
            pending=self.pending,
            removed_below=self._removed_below,
            run=self._run,
        )
        dirty, self._dirty = self._dirty, set()
        # A merge under way may still write to hours removed since it began: their files wait for the next checkpoint.
        busy = set() if self._merging is None else set(self._merging.hours)
        doomed = [hour for hour in self._doomed if hour not in busy]
        self._doomed = [hour for hour in self._doomed if hour in busy]
        assert self._fresh is None, "the file of a bundle may be missing yet"
        files = {o.path: ManifestFile(path=o.path, bytes=o.bytes) for o in self._bundles.overlays()}
        return CheckpointJob(
            self._disk,
            self._directory,
            state,
            self._hours.dump(),
            self._marks.capture(),
            self._buffers(),
            dirty,
            doomed,
            self._bundles.dump(),
            list(files.values()),
        )

    def checkpoint_durable(self, job: CheckpointJob) -> None:
        """The manifest with this checkpoint is durable. Run the job's `remove_old` in a worker now."""
        for hour in job.doomed:
            self._close_hour(hour)
        self._gone = {name: run for name, run in self._gone.items() if run >= job.wheel_state.run}

    def digest_parts(self) -> dict[str, bytes]:
        """Digests of the logical state, by name: the same on every node at the same applied index."""
        marks, moves = self._marks.dump()
        hours = self._hours.dump()[:, :3]
        parts = {
            "cursor": repr((*self.cursor, self.local_index, self.pending, self._removed_below)).encode(),
            "hours": np.ascontiguousarray(hours).tobytes(),
            "marks": marks.tobytes(),
            "moves": moves.tobytes(),
        }
        bundles = self._bundles.dump()
        if bundles:
            parts["bundles"] = bundles
        return {name: hashlib.sha256(content).digest() for name, content in parts.items()}
