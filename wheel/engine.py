"""The wheel of one wheel group: every pending message, and the cursor that moves through them.

`Wheel` carries out the commands of the log, hands out background work, and counts what is pending. It composes five
owners, which never reach back:

- `holdings`: the hour wheel, that is, where every unit lies (holdings.py)
- `files`: the files' merges, checkpoints and removal (files.py)
- `marks`: cancelled and moved units (marks.py)
- `window`: the cursor, and the second wheel with the ticks loaded ahead of it (window.py)
- `ingestion`: a bundle that is becoming part of the wheel (ingestion.py)

`reads` answers questions from them (reads.py). Other packages change the wheel by methods of `Wheel` alone, and read
from its parts.

Deterministic and synchronous. Time is an argument. Files are touched only by jobs that the caller runs, by `fetch`, and
by a synchronous load when a dispatch reaches beyond the loaded ticks.

Invariants:
- `append` gives ids, offsets and due times, from the log alone. Merges, loads and checkpoints may happen at any time:
  no id, order, answer or digest depends on when.
- No unit below the cursor is pending. `pending` counts the units from the cursor on that have no mark.

All methods belong to one thread, that of the node's core; `run` of a job may be called by any.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Generator, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tickwheel.storage.bundle import Layout
from tickwheel.storage.disk import Disk, DiskError
from tickwheel.wheel import sweep
from tickwheel.wheel.buffer import Block
from tickwheel.wheel.bundles import Ingested
from tickwheel.wheel.checkpoint import CheckpointJob, WheelState, read_run, run_path
from tickwheel.wheel.files import Files
from tickwheel.wheel.holdings import Holdings
from tickwheel.wheel.ingestion import Ingestion
from tickwheel.wheel.jobs import AbsorbJob, Job, LoadJob, MapJob, MergeJob
from tickwheel.wheel.marks import Marks, join_runs
from tickwheel.wheel.reads import Reads
from tickwheel.wheel.sweep import Outcomes
from tickwheel.wheel.units import HOUR_MS, LACKING, UNIT, CursorKey, Ids, Units, hour_and_index, picked
from tickwheel.wheel.window import Window

DIGEST_TURN_BYTES = 2 << 20
"""Bytes of one turn of a digest: a few milliseconds."""
SLOT_WIDTHS_MS = (1_000, 500, 200, 100)


@dataclass(frozen=True, slots=True)
class WheelConfig:
    """`slot_ms` is fixed when the cluster is created."""

    slot_ms: int = 1_000
    buffer_bytes_max: int = 128 << 20
    """Bytes of the arrival buffer above which it is merged."""
    preload_ms: int = 10_000
    """How far ahead of the clock ticks are loaded."""

    def __post_init__(self) -> None:
        if self.slot_ms not in SLOT_WIDTHS_MS:
            raise ValueError(f"slot_ms: {self.slot_ms}: one of {SLOT_WIDTHS_MS}")


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


class Wheel:
    """Every pending message of one wheel group, and the cursor."""

    def __init__(self, disk: Disk, directory: str, config: WheelConfig, state: bytes = b"") -> None:
        """`state`: the `wheel` of the manifest; empty: a new wheel, in an empty directory.

        Raises CorruptSegmentError, and ValueError if the cluster was created with another `slot_ms`.
        """
        slot_ms = config.slot_ms
        known = WheelState.decode(state) if state else WheelState(slot_ms, CursorKey(0, 0), 0, 0, 0, 0)
        if known.slot_ms != slot_ms:
            raise ValueError(f"slot_ms: {slot_ms}: this cluster was created with {known.slot_ms}")
        self.holdings = Holdings(disk, directory, slot_ms)
        self.marks = Marks()
        if state:
            content = read_run(disk, run_path(directory, known.run))
            self.holdings.restore(content, known.removed_below)
            self.marks.load(content.marks, content.moves)
        self.files = Files(disk, directory, slot_ms, config.buffer_bytes_max, self.holdings, known.run)
        self.window = Window(self.holdings, slot_ms, config.preload_ms, known.cursor, known.local_index)
        self.ingestion = Ingestion(disk, slot_ms, self.holdings)
        self.reads = Reads(self.holdings, self.marks, self.window, slot_ms)
        self.pending = known.pending

    @property
    def cursor(self) -> CursorKey:
        """Key of the next unit to dispatch."""
        return self.window.cursor

    # -- commands of the log

    def append(self, units: Units, records: bytes | memoryview) -> Ids:
        """Append units, sorted by due_requested_ms. Fills due_ms, index and offset in place and returns the ids.

        `records`: meta and payload of each unit, one after the other, in the same order. Array work only: the cost does
        not depend on how many messages are pending or how many hours a batch spans.
        """
        if not len(units):
            return np.zeros(0, dtype=np.uint64)
        assert not self.ingestion.absorbing, "an ingested bundle is still being read"
        due = np.maximum(units["due_requested_ms"], self.cursor.due_ms)
        ids = self.holdings.append(due, units, records)
        self.pending += len(units)
        self.window.insert(Block(due, units))
        return ids

    def fetch(self, ids: Ids, bytes_max: int) -> tuple[Units, list[bytes]]:
        """Units and records of existing messages, read at once on this thread: the first ones up to `bytes_max` (at
        least one). The result follows from the log alone, wherever the messages lie. If the disk cannot read a record,
        zeros of the same size take its place, and the unit has the flag LACKING."""
        lookup = self.reads.lookup(ids)
        lookup.run()
        if not lookup.found.all():
            raise AssertionError(f"messages {ids[~lookup.found][:3].tolist()} were to be copied and are not there")
        ends = np.cumsum(lookup.units["size"], dtype=np.int64)
        units = lookup.units[: max(1, int(np.searchsorted(ends, bytes_max, "right")))]
        records = self.reads.records(units)
        try:
            records.run()
        except DiskError:
            return units, [self._record_or_zeros(units[row : row + 1]) for row in range(len(units))]
        return units, records.records

    def _record_or_zeros(self, unit: Units) -> bytes:
        job = self.reads.records(unit)
        try:
            job.run()
        except DiskError:
            unit["flags"] |= LACKING
            return bytes(int(unit["size"][0]))
        return job.records[0]

    def covers(self, hour_max: int) -> bool:
        """Whether the wheel could take units of all hours up to this one: the hour table has a greatest span."""
        return self.holdings.hours.fits(self.cursor.due_ms // HOUR_MS, hour_max)

    @property
    def bundle_chunks(self) -> int:
        """Number of chunks that lie in bundles."""
        return self.holdings.bundles.chunks

    def ingest(self, name: str, layout: Layout, topic_ids: tuple[int, ...], stamped_ms: int) -> Ingested:
        """Ingest a bundle: its units get the next indexes of their hours.

        Units due before the cursor become due at the cursor, as arrivals do; if their hour is over they go to the
        cursor's hour. Nothing is read or written: `ingestion.absorbing` is true until a job has read the soon-due
        units.
        """
        ingested = self.ingestion.begin(
            name, layout, clamp_ms=self.cursor.due_ms, stamped_ms=stamped_ms, topic_ids=topic_ids
        )
        self.pending += layout.units
        return ingested

    def withhold(self, ids: Ids) -> Ids:
        """Cancel units of the bundle that was just ingested, before any is read. `ids`: by rising row; returned
        unchanged."""
        self.marks.add_many(ids)
        self.pending -= len(ids)
        return ids

    def dispatch(self, to: CursorKey) -> Dispatched:
        """Move the cursor to `to` and pass everything below it. Does nothing if `to` is not ahead of the cursor.

        An index above the number of the hour's units is lowered to that number. Otherwise a unit that arrives later for
        that very millisecond could get an index below the cursor.
        """
        units_in_hour = self.holdings.hours.units(to.due_ms // HOUR_MS)
        if to.index > units_in_hour:
            to = CursorKey(to.due_ms, units_in_hour)
        if to <= self.cursor:
            return _NOTHING
        assert not self.ingestion.absorbing, "an ingested bundle is still being read"
        units = self.window.advance(to)
        passed = len(units)
        if not passed:
            return _NOTHING
        units = self._unmarked(units)
        self.pending -= len(units)
        return Dispatched(units, passed)

    def _unmarked(self, units: Units) -> Units:
        marked = self.marks.marked(units)
        return picked(units, ~marked) if marked.any() else units

    def cancel(self, id: int, due_ms: int) -> CancelOutcome:
        """Cancel by id. `due_ms`: the unit's own due time; for a moved message it is looked up and this value is
        ignored."""
        id, _, outcome = self.standing(id, due_ms)
        if outcome is not None:
            return outcome
        self.marks.add(*hour_and_index(id))
        self.pending -= 1
        return CancelOutcome.CANCELLED

    def standing(self, id: int, due_ms: int) -> tuple[int, int, CancelOutcome | None]:
        """A message's newest id, its due time, and why it can no longer be cancelled; None: it is pending. Arguments
        as for `cancel`."""
        id, moved_due_ms = self.marks.moves.resolve(int(id))
        due_ms = due_ms if moved_due_ms is None else moved_due_ms
        hour, index = hour_and_index(id)
        if hour < self.holdings.removed_below or index >= self.holdings.hours.units(hour):
            return id, due_ms, CancelOutcome.NOT_FOUND
        if self.marks.has(hour, index):
            return id, due_ms, CancelOutcome.CANCELLED
        if due_ms // HOUR_MS != hour:
            return id, due_ms, CancelOutcome.NOT_FOUND
        if CursorKey(due_ms, index) < self.cursor:
            return id, due_ms, CancelOutcome.ALREADY_DISPATCHED
        return id, due_ms, None

    def standing_many(self, ids: Ids, due_ms: NDArray[np.int64]) -> sweep.Standing:
        """`standing` for many messages."""
        return sweep.look(ids, due_ms, self.marks, self.holdings, self.cursor)[0]

    def move(self, id: int, due_ms: int, units: Units, record: bytes) -> tuple[CancelOutcome, int]:
        """Cancel a unit and append its successor (one unit, as for `append`), which the old id names from then on.
        Returns the outcome and the new id; 0 unless MOVED."""
        old, _ = self.marks.moves.resolve(int(id))
        if self.marks.has(*hour_and_index(old)):
            return CancelOutcome.CANCELLED, 0
        outcome = self.cancel(id, due_ms)
        if outcome is not CancelOutcome.CANCELLED:
            return outcome, 0
        new_id = int(self.append(units, record)[0])
        self.marks.moves.add(old, new_id, int(units["due_ms"][0]))
        return CancelOutcome.MOVED, new_id

    def cancel_many(self, ids: Ids, due_ms: NDArray[np.int64]) -> Outcomes:
        """`cancel` for many messages. Returns one outcome for each."""
        _, outcomes = sweep.mark(ids, due_ms, self.marks, self.holdings, self.cursor)
        self.pending -= int(np.count_nonzero(outcomes == sweep.DONE))
        return outcomes

    def move_many(
        self, ids: Ids, due_ms: NDArray[np.int64], units: Units, records: bytes
    ) -> tuple[Outcomes, Ids, NDArray[np.int64]]:
        """`move` for many messages. `units` and `records` belong to their successors, sorted by due_requested_ms.
        Returns an outcome for each, and the new ids and due times of those that were moved, in their order."""
        newest, outcomes = sweep.mark(ids, due_ms, self.marks, self.holdings, self.cursor)
        done = outcomes == sweep.DONE
        if not done.all():
            records = sweep.cut_records(records, units["size"], done)
            units, newest = picked(units, done), newest[done]
        self.pending -= len(units)
        new_ids = self.append(units, records)
        moved_ms: NDArray[np.int64] = units["due_ms"].copy()
        self.marks.moves.add_many(newest, new_ids, moved_ms)
        return outcomes, new_ids, moved_ms

    def remove_hours(self, below: int) -> None:
        """Forget all hours before `below`, which is at most the cursor's hour: nothing in them is pending. Their files
        go with the next durable checkpoint, since a replay may need them until then."""
        if below <= self.holdings.removed_below:
            return
        if below > self.cursor.due_ms // HOUR_MS:
            raise AssertionError(f"hours below {below} were to be removed, the cursor is at {self.cursor}")
        self.files.doom(*self.holdings.remove(below))
        self.marks.forget(below)

    # -- questions of the master

    def plan(self, until_ms: int, units_max: int, after: CursorKey | None = None) -> CursorKey | None:
        """The cursor that dispatches the units due up to `until_ms`, at most `units_max` units from `after` on.

        None: no unit is due, or due units are still being loaded (ask again when a load has finished).
        """
        return None if self.ingestion.absorbing else self.window.plan(until_ms, units_max, after)

    def peek(self, start: CursorKey, to: CursorKey) -> Units | None:
        """The units that a dispatch from `start` to `to` would bring if it were applied now; nothing moves.

        None: some of them are not loaded.
        """
        units = None if self.ingestion.absorbing else self.window.peek(start, to)
        return units if units is None else self._unmarked(units)

    # -- background work

    def jobs(self, now_ms: int, *, merges: bool = True) -> list[Job]:
        """Jobs that are wanted now and not under way; a merge only if `merges`. Run each, then give it to `finish` or
        `abandon`."""
        wanted: list[Job | None] = [self.files.merge() if merges else None]
        if self.ingestion.absorbing:
            # The bundle's file may still be missing, so no other job may read its chunks, and no load may begin that
            # would need its units.
            wanted += [self.ingestion.wanted(self.window.end_ms)]
        else:
            wanted += [self.window.wanted_map(), self.window.wanted_load(now_ms)]
        return [job for job in wanted if job is not None]

    def finish(self, job: Job) -> None:
        """Take the result of a job whose `run` has returned."""
        if isinstance(job, MergeJob):
            self.files.finish(job, self.window.hour_max)
        elif isinstance(job, LoadJob):
            self.window.finish_load(job)
        elif isinstance(job, AbsorbJob):
            for block in self.ingestion.finish(job):
                self.window.insert(block)
        elif isinstance(job, MapJob):
            self.window.finish_map(job)

    def needed(self, job: Job) -> bool:
        """Whether a job under way still matters; if not, its failure does not matter either."""
        return self.window.needed(job) if isinstance(job, LoadJob | MapJob) else True

    def abandon(self, job: Job | CheckpointJob) -> None:
        """`run` of a job raised: drop the job; its work will be wanted again."""
        if isinstance(job, MergeJob):
            self.files.abandon()
        elif isinstance(job, LoadJob | MapJob):
            self.window.abandon(job)
        elif isinstance(job, AbsorbJob):
            self.ingestion.abandon()
        elif isinstance(job, CheckpointJob):
            self.files.checkpoint_failed(job)

    # -- checkpoints

    def begin_checkpoint(self) -> CheckpointJob:
        """Capture the state. Run the job in a worker; then call `checkpoint_durable`, or `abandon` if it failed."""
        assert not self.ingestion.absorbing, "the file of a bundle may be missing yet"
        return self.files.begin_checkpoint(self.cursor, self.window.local_index, self.pending, self.marks.capture())

    def checkpoint_durable(self, job: CheckpointJob) -> None:
        """The manifest with this checkpoint is durable. Run the job's `remove_old` in a worker now."""
        self.files.checkpoint_durable(job)

    def digest_in_turns(self) -> Generator[None, None, dict[str, bytes]]:
        """Digests of the logical state, by name: the same on every node at the same applied index. Made in turns of
        some milliseconds; only moves are joined in one go. Nothing may be applied between the turns."""
        marks = self.marks.capture()
        hours = self.holdings.hours.dump()[:, :3]
        place = (*self.cursor, self.window.local_index, self.pending, self.holdings.removed_below)
        parts: dict[str, Iterable[bytes]] = {
            "cursor": (repr(place).encode(),),
            "hours": (np.ascontiguousarray(hours).tobytes(),),
            "marks": (ids.tobytes() for ids in marks.ids()),
            "moves": (join_runs(marks.runs).tobytes(),),
        }
        bundles = self.holdings.bundles.dump()
        if bundles:
            parts["bundles"] = (bundles,)
        digests: dict[str, bytes] = {}
        size = 0
        for name, contents in parts.items():
            sha = hashlib.sha256()
            for content in contents:
                for at in range(0, len(content), DIGEST_TURN_BYTES):
                    piece = content[at : at + DIGEST_TURN_BYTES]
                    sha.update(piece)
                    size += len(piece)
                    if size >= DIGEST_TURN_BYTES:
                        size = 0
                        yield
            digests[name] = sha.digest()
        return digests
