"""The wheel of one wheel group: every pending message, and the cursor that moves through them.

Composes the hour table, the arrival buffer, the hour segments and the second wheel. Deterministic and
synchronous: time is an argument, files are only touched by jobs that somebody else runs, and by a
synchronous load when a dispatch reaches further than what is loaded.

Invariants:
- Ids, offsets and due times are given by `append`, from the log alone. When a buffer is merged, a tick
  loaded or a checkpoint written shows in no id, order, answer or digest.
- Every pending unit due before `SecondWheel.until_ms` is in the second wheel.
- A unit is in exactly one of: the hour segments (merged), a bundle that was taken over, the frozen buffer,
  the active buffer.
- After a bundle was taken over nothing else is applied until what it brings for the loaded ticks has been read
  (`absorbing`); it needs the bundle's file, the taking over itself does not.
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
from tickwheel.storage.bundle import Layout
from tickwheel.storage.disk import Disk, DiskError
from tickwheel.storage.segment import Chunk, Segment, SegmentLengths
from tickwheel.wheel import sweep
from tickwheel.wheel.buffer import Block, Buffer
from tickwheel.wheel.bundles import Bundles, Ingested, Overlay, TakenChunks
from tickwheel.wheel.checkpoint import CheckpointJob, WheelState, read_run, run_path
from tickwheel.wheel.hours import HourTable
from tickwheel.wheel.jobs import AbsorbJob, HourChunks, Job, LoadJob, MapJob, MergeJob
from tickwheel.wheel.marks import Marks
from tickwheel.wheel.pinned import Pinned
from tickwheel.wheel.queries import HOURS_MAX as QUERY_HOURS_MAX
from tickwheel.wheel.queries import CountJob, ScanJob, Schedule, Wanted
from tickwheel.wheel.reading import LookupJob, RecordsJob
from tickwheel.wheel.slots import SecondWheel, cut_at
from tickwheel.wheel.sweep import Outcomes
from tickwheel.wheel.units import HOUR_MS, LACKING, UNIT, CursorKey, Ids, Units, join_units
from tickwheel.wheel.usage import UsageJob

HOURS_AHEAD = 2
"""Hours after the cursor's whose chunk directories are kept in memory; hours older than this are let go."""
LOAD_UNITS_MAX = 500_000
"""Units one load brings at most, as far as ticks allow."""
LOADED_UNITS_MAX = 2_000_000
"""Above this nothing further is loaded ahead (192 MB)."""
SLOT_WIDTHS_MS = (1_000, 500, 200, 100)


@dataclass(frozen=True, slots=True)
class WheelConfig:
    """`slot_ms` is fixed when the cluster is created."""

    slot_ms: int = 1_000
    buffer_bytes_max: int = 128 << 20
    """The arrival buffer is merged when it holds more."""
    preload_ms: int = 10_000

    def __post_init__(self) -> None:
        if self.slot_ms not in SLOT_WIDTHS_MS:
            raise ValueError(f"slot_ms: {self.slot_ms}: one of {SLOT_WIDTHS_MS}")


class CancelOutcome(enum.Enum):
    """Answer of `cancel` and `move`."""

    CANCELLED = "cancelled"
    MOVED = "moved"
    ALREADY_DISPATCHED = "already_dispatched"
    NOT_FOUND = "not_found"


@dataclass(frozen=True, slots=True, eq=False)
class Dispatched:
    """Live units in (due_ms, index) order, and how many were passed, cancelled and moved ones included."""

    units: Units
    passed_count: int


_NOTHING = Dispatched(np.zeros(0, dtype=UNIT), 0)

MERGE_SHARE_MIN = 8
"""A merge begins at an eighth of a full buffer at the least,"""

MERGE_HOUR_BYTES = 4 << 20
"""and not before it brings so much to each hour, or many hours would mean many small writes."""


class Wheel:
    """See the module."""

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
        self._merging: MergeJob | None = None
        self._loading: LoadJob | None = None
        self._mapping: MapJob | None = None
        self._bundles = Bundles()
        self._fresh: tuple[Overlay, TakenChunks] | None = None
        self._absorbing: AbsorbJob | None = None
        self._chunks: dict[int, list[Chunk]] = {}
        self._open: dict[int, Segment] = {}
        self._dirty: set[int] = set()
        self._doomed: list[int] = []
        self._run = 0
        self._removed_below = 0
        self.cursor = CursorKey(0, 0)
        self.local_index = 0
        """Units of the cursor's tick already passed, in dispatch order."""
        self.pending = 0
        if state:
            self._restore(WheelState.decode(state))
        else:
            disk.make_dir(f"{directory}/hours")
            disk.make_dir(f"{directory}/runs")
        self._second = SecondWheel(self._slot_ms, self.tick * self._slot_ms)

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
        """Files that this checkpoint does not name: written behind it, or left by a crash before they were removed."""
        disk, directory = self._disk, self._directory
        for name in disk.list(f"{directory}/hours"):
            if not (name.isdecimal() and self._hours.merged(int(name)).rows):
                disk.remove(f"{directory}/hours/{name}")
        for name in disk.list(f"{directory}/runs"):
            if name != f"{self._run}.run":
                disk.remove(f"{directory}/runs/{name}")

    # -- what the log says

    @property
    def tick(self) -> int:
        """Tick of the cursor."""
        return self.cursor.due_ms // self._slot_ms

    def append(self, units: Units, records: bytes | memoryview) -> Ids:
        """Take units, sorted by due_requested_ms; fills due_ms, index and offset in place and returns the ids.

        `records`: meta and payload of each unit, one after the other, in the same order. Array work only:
        its cost depends neither on how many messages are pending nor on how many hours a batch spans.
        """
        count = len(units)
        if not count:
            return np.zeros(0, dtype=np.uint64)
        assert self._fresh is None, "a bundle that was taken over is still being read"
        hours = self._hours
        due = np.maximum(units["due_requested_ms"], self.cursor.due_ms)
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

    def _take_near(self, block: Block) -> None:
        """Arrivals for what is loaded, or just being loaded, go straight in."""
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

    def ingest(self, name: str, layout: Layout, topic_ids: tuple[int, ...], stamped_ms: int) -> Ingested:
        """Take a bundle over: its units get the next indexes of their hours.

        Units due before the cursor become due at the cursor, as arrivals do; if their hour is over they go to the
        cursor's. Nothing is read or written: `absorbing` holds until a job has read what is due soon.
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
        """Cancel units of the bundle that was taken over just now, by rising row, before any is read; the same ids."""
        hours = (ids >> np.uint64(32)).astype(np.int64)
        starts = np.flatnonzero(np.diff(hours, prepend=-1))
        for part in np.split(ids, starts[1:]) if len(ids) else []:
            self._marks.add_many(int(part[0]) >> 32, (part & np.uint64(0xFFFF_FFFF)).astype(np.uint32))
        self.pending -= len(ids)
        return ids

    def covers(self, hour_max: int) -> bool:
        """Whether hours up to this one can be used."""
        return self._hours.fits(self.cursor.due_ms // HOUR_MS, hour_max)

    @property
    def absorbing(self) -> bool:
        """Whether nothing may be applied yet, because of the bundle that was taken over last."""
        return self._fresh is not None

    @property
    def lacking(self) -> tuple[str, int] | None:
        """Name and bytes of the bundle whose file is waited for; None: no file is missing."""
        if self._fresh is None or self._absorbing is not None or self._disk.exists(self._fresh[0].path):
            return None
        return self._fresh[0].name, self._fresh[0].bytes

    @property
    def loaded_units(self) -> int:
        """Units in the second wheel."""
        return self._second.units

    @property
    def bundle_chunks(self) -> int:
        """Chunks of hours that lie in bundles."""
        return self._bundles.chunks

    def bundle_names(self) -> set[str]:
        """Bundles whose files are needed."""
        return {overlay.name for overlay in self._bundles.overlays()}

    def dispatch(self, to: CursorKey) -> Dispatched:
        """Move the cursor; everything below it is passed. Does nothing if `to` is not ahead of the cursor.

        An index above the units of the hour is cut to their number: a unit that arrives later for that very
        millisecond gets an index from there on, and must not be below the cursor.
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
        """Cancel by id; `due_ms` is the unit's own (of the newest unit if it was moved, that one's is used)."""
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
        """As `cancel`, for many; an outcome each."""
        _, outcomes = sweep.mark(ids, due_ms, self._marks, self._hours, self._removed_below, self.cursor)
        self.pending -= int(np.count_nonzero(outcomes == sweep.DONE))
        return outcomes

    def move_many(
        self, ids: Ids, due_ms: NDArray[np.int64], units: Units, records: bytes
    ) -> tuple[Outcomes, Ids, NDArray[np.int64]]:
        """As `move`, for many: `units` and `records` of their successors, sorted by due_requested_ms. Also returns ids
        and due times of those that were moved, in their order."""
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

    def resolve(self, id: int) -> int:
        """Id of the newest unit of a message."""
        return self._marks.moves.resolve(int(id))[0]

    def remove_hours(self, below: int) -> None:
        """Forget hours below; their files go with a durable checkpoint, for a replay may need them until then.

        Only hours before the cursor's: nothing in them is pending.
        """
        if below <= self._removed_below:
            return
        if below > self.cursor.due_ms // HOUR_MS:
            raise AssertionError(f"hours below {below} were to be removed, the cursor is at {self.cursor}")
        self._removed_below = below
        self._doomed += self._hours.forget(below)
        self._marks.forget(below)
        self._bundles.forget(below)
        for hour in [hour for hour in self._chunks if hour < below]:
            del self._chunks[hour]

    # -- what the master asks

    def plan(self, until_ms: int, units_max: int, after: CursorKey | None = None) -> CursorKey | None:
        """The cursor that dispatches what is due up to until_ms, at most units_max units behind `after`.

        None: nothing is due (or what is due is still being loaded: ask again when a load is finished).
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
        """What a dispatch to `to` would bring that begins at `start`, if it were applied now; nothing moves.

        None: part of it is not loaded.
        """
        if self._second.until_ms <= to.due_ms or self._fresh is not None:
            return None
        found = self._second.peek(start, to)
        if not found:
            return np.zeros(0, dtype=UNIT)
        units = join_units([block.units for block in found])
        marked = self._marks.marked(units)
        return units[~marked] if marked.any() else units

    def next_due_ms(self, after: CursorKey | None = None) -> int | None:
        """Lower bound of the due time of the next unit behind `after`; exact when loaded; None: none is pending."""
        due_ms = self._second.next_due_ms(after)
        if due_ms is not None:
            return due_ms
        return self._next_unloaded_ms(self._second.until_ms)

    def _next_unloaded_ms(self, from_ms: int) -> int | None:
        """Lower bound of the first due time from `from_ms` on that is not loaded."""
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

    # -- reads

    def records(self, units: Units) -> RecordsJob:
        """Fetch the records of units; those of removed hours are missing in it."""
        return RecordsJob(units, self._removed_below, self._buffers(), self._lies_in_files, self._open_hour)

    def removed(self, ids: Ids) -> bool:
        """Whether one of them was in an hour that has been removed."""
        return bool((ids >> np.uint64(32) < np.uint64(self._removed_below)).any())

    def lookup(self, ids: Ids) -> LookupJob:
        """Find units by id, following moves."""
        resolved = np.array([self._marks.moves.resolve(id)[0] for id in ids.tolist()], dtype=np.uint64)
        hours = (resolved >> np.uint64(32)).tolist()
        indexes = (resolved & np.uint64(0xFFFF_FFFF)).tolist()
        pairs = list(zip(hours, indexes, strict=True))
        found = np.array([h >= self._removed_below and i < self._hours.units(h) for h, i in pairs], dtype=np.bool_)
        cancelled = np.array([self._marks.has(h, i) for h, i in pairs], dtype=np.bool_)
        return LookupJob(ids, resolved, found, cancelled, self._buffers(), self._lies_in_files, self._open_hour)

    def fetch(self, ids: Ids, bytes_max: int) -> tuple[Units, list[bytes]]:
        """Units and records of messages that are there, read at once on this thread: the first ones up to `bytes_max`
        (one at least). What follows from the log alone, however the messages lie: in place of a record that the disk
        does not give back come as many zeros, and its unit says so (LACKING).
        """
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
        """Pending units with due_min <= due_ms < due_max from `start` on, in dispatch order; see ScanJob."""
        if start is not None:
            due_min = max(due_min, start.due_ms)
        return ScanJob(self._schedule(due_min, due_max), start, limit, wanted or Wanted())

    def count(self, due_min: int, due_max: int, bucket_ms: int, wanted: Wanted | None = None) -> CountJob:
        """How many units are pending, by bucket; see CountJob."""
        return CountJob(self._schedule(due_min, due_max), bucket_ms, wanted or Wanted())

    def pin(self, due_min: int, due_max: int) -> Pinned:
        """What is pending now with due_min <= due_ms < due_max, for `scan_pinned` at any time later."""
        due_min = max(due_min, self.cursor.due_ms)
        hours = self._hours.used(due_min // HOUR_MS, -(-due_max // HOUR_MS))
        bounds = self._hours.next_index[hours - self._hours.base]
        return Pinned(self.cursor, hours, bounds, self._marks.copy(hours.tolist()))

    def scan_pinned(
        self, pinned: Pinned, hour: int, start: CursorKey | None, due_min: int, due_max: int, limit: int
    ) -> ScanJob:
        """One hour's units that a pin may mean, from `start` on: `Pinned.known` says which it does."""
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

    def usage(self, hours: list[int]) -> UsageJob:
        """What hours take on disk, by topic."""
        return UsageJob([self._open_hour(hour) for hour in hours])

    def _buffers(self) -> list[Buffer]:
        """Buffers, older first."""
        return [self._active] if self._frozen is None else [self._frozen, self._active]

    def _in_files(self, hour: int) -> bool:
        """Whether some of an hour's units lie in files."""
        return self._hours.merged(hour).rows > 0 or len(self._bundles.of(hour)) > 0

    def _lies_in_files(self, hour: int, index: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which indexes of an hour lie in files: of a bundle, or merged."""
        inside, below = self._bundles.inside(hour, index)
        return inside | (index - below < self._hours.merged(hour).rows)

    def _open_hour(self, hour: int) -> HourChunks:
        return HourChunks(
            self._disk, self._directory, hour, self._hours.merged(hour), self._chunks.get(hour), self._bundles
        )

    @property
    def buffer_bytes(self) -> int:
        """Memory of arrivals that are not merged."""
        return sum(buffer.bytes for buffer in self._buffers())

    def hours(self) -> list[int]:
        """Hours that have units."""
        used: list[int] = self._hours.used().tolist()
        return used

    # -- background work

    def jobs(self, now_ms: int) -> list[Job]:
        """Work that is wanted now and not under way. Each is to be run, then given to `finish` or `abandon`."""
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
            # The file of its chunks may be missing yet: nothing else looks into them.
            absorbing = self._wanted_absorb(*self._fresh)
            return wanted if absorbing is None else [*wanted, absorbing]
        mapping = self._wanted_map()
        if mapping is not None:
            wanted.append(mapping)
        loading = self._wanted_load(now_ms)
        if loading is not None:
            wanted.append(loading)
        return wanted

    def _wanted_absorb(self, overlay: Overlay, taken: TakenChunks) -> AbsorbJob | None:
        """Nothing further is loaded meanwhile, so the window that it reads is all that can be."""
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

    def _worth_merging(self) -> bool:
        """Full, or enough for each hour that it touches: small merges hold loop and disk up for less long."""
        size, most = self._active.bytes, self._config.buffer_bytes_max
        least = min(most, max(most // MERGE_SHARE_MIN, self._active.hours * MERGE_HOUR_BYTES))
        return size >= least

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
        """The next stretch to load: it begins where the next unit may be, and holds few enough units."""
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
        # Buffers are captured now, as slices: what arrives later goes to the job's arrivals.
        blocks = [
            part
            for buffer in self._buffers()
            for block in buffer.blocks
            if (part := block.between(begin_ms, end_ms)) is not None
        ]
        return LoadJob(self._slot_ms, begin_ms, end_ms, merged, blocks)

    def _load_now(self, wanted_ms: int) -> None:
        """Load one more stretch on this thread: a dispatch needs it."""
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
        """Without what the cursor has passed while the block was read."""
        cut = cut_at(block, self.cursor)
        if cut == len(block.due_ms):
            return None
        return Block(block.due_ms[cut:], block.units[cut:]) if cut else block

    def finish(self, job: Job) -> None:
        """A job ran to its end."""
        if isinstance(job, MergeJob):
            self._finish_merge(job)
        elif isinstance(job, LoadJob):
            if job is self._loading:
                self._loading = None
                self._take_loaded(job)
        elif isinstance(job, AbsorbJob):
            self._finish_absorb(job)
        elif isinstance(job, MapJob):
            self._mapping = None
            for hour in job.hours:
                if (
                    hour.lengths == self._hours.merged(hour.hour)
                    and hour.taken == len(self._bundles.of(hour.hour))
                    and hour.hour >= self._removed_below
                ):
                    self._chunks[hour.hour] = list(hour.chunks())

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

    def _close_hour(self, hour: int) -> None:
        segment = self._open.pop(hour, None)
        if segment is not None:
            segment.close()

    def needed(self, job: Job) -> bool:
        """Whether a job that is under way still matters; if not, its failure does not either."""
        if isinstance(job, LoadJob):
            return job is self._loading
        if isinstance(job, MapJob):
            return all(hour.hour >= self._removed_below for hour in job.hours)
        return True

    def abandon(self, job: Job | CheckpointJob) -> None:
        """`run` of a job raised: nothing of it counts, and it will be wanted again."""
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
        """Capture the state as it is. Run it in a worker; then `checkpoint_durable`, or `abandon` if it failed."""
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
        # A merge under way may still write to hours that have gone since it began: those wait for the next one.
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
        """The manifest that names this checkpoint is durable; its `remove_old` is to run now, in a worker."""
        for hour in job.doomed:
            self._close_hour(hour)

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
