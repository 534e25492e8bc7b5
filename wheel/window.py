"""The cursor, and the ticks loaded ahead of it.

Owns the cursor, the second wheel, and the jobs that load units and chunk directories near the cursor.

Invariants:
- The cursor never moves back.
- Every unit from the cursor on that is due before `SecondWheel.until_ms` is in the second wheel, marked or not. No unit
  below the cursor is.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tickwheel.wheel.buffer import Block, cut_at, join_blocks
from tickwheel.wheel.holdings import Holdings
from tickwheel.wheel.jobs import LoadJob, MapJob
from tickwheel.wheel.units import HOUR_MS, UNIT, CursorKey, Units, join_units

HOURS_AHEAD = 2
"""Chunk directories are kept for so many hours on either side of the cursor's. Those ahead are read in advance; older
ones are dropped."""
LOAD_UNITS_MAX = 500_000
"""Units that one load aims at; a single tick may have more."""
LOADED_UNITS_MAX = 2_000_000
"""With this many units loaded (192 MB), no further tick is loaded ahead."""
SORTED_UNITS_MAX = 16_384
"""Units of a slot that are sorted at once, in some five milliseconds. Of more, those that leave first are."""
SMALL_BLOCKS_MAX = 16
"""Small blocks that arrived one after the other are joined when they are so many."""


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
        self.load_to(to.due_ms)
        units = _joined(self._second.take(to))
        same_tick = to.due_ms // self._slot_ms == self.tick
        self.cursor = to
        if not same_tick:
            self.local_index = 0
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
        return None if to > CursorKey(self._second.until_ms, 0) else _joined(self._second.peek(start, to))

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
        wanted_ms = (due_ms // self._slot_ms + 1) * self._slot_ms
        while self._second.until_ms <= due_ms:
            self.loading = None  # a job under way is superseded; `finish_load` ignores it
            begin_ms, end_ms = self._next_stretch(wanted_ms)
            if begin_ms < end_ms:
                job = self._load_job(begin_ms, end_ms)
                job.run()
                self._take_loaded(job)
            else:
                self._second.until_ms = end_ms

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


class _Slot:
    """The units of a tick: sorted pieces, of which few remain, and blocks as they arrived (`fresh`)."""

    __slots__ = ("_small", "first_due_ms", "fresh", "fresh_units", "pieces")

    def __init__(self) -> None:
        self.fresh: list[Block] = []
        self.fresh_units = 0
        self.pieces: list[Block] = []
        self.first_due_ms: int | None = None  # of `fresh`
        self._small = 0
        """How many blocks at the end of `fresh` are small."""

    def put(self, block: Block) -> None:
        """Take arrivals."""
        fresh, units = self.fresh, len(block.due_ms)
        fresh.append(block)
        self.fresh_units += units
        due_ms = int(block.due_ms[0])
        if self.first_due_ms is None or due_ms < self.first_due_ms:
            self.first_due_ms = due_ms
        self._small = self._small + 1 if units * SMALL_BLOCKS_MAX <= SORTED_UNITS_MAX else 0
        if self._small == SMALL_BLOCKS_MAX:
            fresh[-SMALL_BLOCKS_MAX:] = [join_blocks(fresh[-SMALL_BLOCKS_MAX:])]
            self._small = 0

    def sort(self, to: CursorKey) -> None:
        """Sort arrivals into the pieces: all if they are few, else at least those below a key."""
        if not self.fresh:
            return
        below, rest = self.fresh, list[Block]()
        if self.fresh_units > SORTED_UNITS_MAX:
            if self.first_due_ms is None or self.first_due_ms > to.due_ms:
                return
            below = []
            for block in self.fresh:
                first, last = _parts(block, cut_at(block, to))
                below += first
                rest += last
        self._sort(below, rest)

    def sort_first(self, until_ms: int, units_max: int) -> None:
        """Sort arrivals into the pieces: all if they are few, else at least those among the first `units_max` of the
        tick that are due up to `until_ms`."""
        if self.fresh_units <= SORTED_UNITS_MAX:
            self.sort(CursorKey(until_ms + 1, 0))
        elif self.first_due_ms is not None and self.first_due_ms <= until_ms:
            before = sum([int(piece.due_ms.searchsorted(self.first_due_ms + 1)) for piece in self.pieces])
            if before < units_max:
                self.sort(_key_after(self.fresh, self.first_due_ms, until_ms, units_max - before))

    def _sort(self, below: list[Block], rest: list[Block]) -> None:
        if not below:
            return
        self.fresh, self._small = rest, 0
        self.fresh_units = sum([len(block.due_ms) for block in rest])
        self.first_due_ms = min([int(block.due_ms[0]) for block in rest], default=None)
        pieces = self.pieces
        pieces.append(join_blocks(below))
        while len(pieces) > 1 and len(pieces[-2].due_ms) <= 2 * len(pieces[-1].due_ms):
            if len(pieces[-1].due_ms) >= SORTED_UNITS_MAX and pieces[-2].due_ms[-1] <= pieces[-1].due_ms[0]:
                break  # they leave one after the other as they are
            pieces[-2:] = [join_blocks(pieces[-2:])]

    def count_below(self, key: CursorKey) -> int:
        """Number of units below a key."""
        return sum([cut_at(block, key) for block in (*self.pieces, *self.fresh)])

    def next_due_ms(self) -> int | None:
        """Due time of the first unit."""
        dues = [int(piece.due_ms[0]) for piece in self.pieces]
        if self.first_due_ms is not None:
            dues.append(self.first_due_ms)
        return min(dues, default=None)

    def next_due_ms_from(self, key: CursorKey) -> int | None:
        """Due time of the first unit at or above a key."""
        first_ms: int | None = None
        for block in (*self.pieces, *self.fresh):
            cut = cut_at(block, key)
            if cut < len(block.due_ms):
                due_ms = int(block.due_ms[cut])
                first_ms = due_ms if first_ms is None else min(first_ms, due_ms)
        return first_ms


class SecondWheel:
    """The second wheel: the loaded ticks by tick number, each a slot of units that leave in (due_ms, index) order.

    Owns the loaded window [.., until_ms): every pending unit due before `until_ms` is in a slot. Arrivals go in
    unsorted. When a slot is read they are sorted, but of many only those that leave first: a tick with a million units
    would hold the thread for a quarter of a second. Of units with the same due time, pieces and then arrivals keep the
    order of arrival, so that a stable sort by due time alone gives (due_ms, index) order: a tick lies in one hour,
    whose indexes rise.
    """

    def __init__(self, slot_ms: int, until_ms: int) -> None:
        self._slot_ms = slot_ms
        self._slots: dict[int, _Slot] = {}
        self.until_ms = until_ms
        """End of the loaded window, a multiple of slot_ms: every pending unit due before it is loaded."""
        self.units = 0

    def insert(self, block: Block) -> None:
        """Insert a sorted block, whose units all lie in the window."""
        slot_ms = self._slot_ms
        due = block.due_ms
        if not len(due):
            return
        self.units += len(due)
        first, last = int(due[0]) // slot_ms, int(due[-1]) // slot_ms
        if first == last:
            self._put(first, block)
            return
        ticks = due // slot_ms
        edges = [0, *(np.flatnonzero(ticks[1:] != ticks[:-1]) + 1).tolist(), len(due)]
        for low, high in itertools.pairwise(edges):
            self._put(int(ticks[low]), Block(due[low:high], block.units[low:high]))

    def _put(self, tick: int, block: Block) -> None:
        slot = self._slots.get(tick)
        if slot is None:
            slot = self._slots[tick] = _Slot()
        slot.put(block)

    def take(self, to: CursorKey) -> list[Block]:
        """Remove and return all units below a key: blocks whose concatenation, tick by tick, is in dispatch order."""
        taken: list[Block] = []
        slot_ms = self._slot_ms
        for tick in sorted(tick for tick in self._slots if tick * slot_ms <= to.due_ms):
            slot = self._slots[tick]
            slot.sort(to)
            passed: list[Block] = []
            kept: list[Block] = []
            for piece in slot.pieces:
                cut = len(piece.due_ms) if (tick + 1) * slot_ms <= to.due_ms else cut_at(piece, to)
                first, last = _parts(piece, cut)
                passed += first
                kept += last
            slot.pieces = kept
            if not kept and not slot.fresh:
                del self._slots[tick]
            if passed:
                taken.append(join_blocks(passed))
        self.units -= sum(len(block.due_ms) for block in taken)
        return taken

    def peek(self, start: CursorKey, to: CursorKey) -> list[Block]:
        """Units from `start` up to `to`, without removing them; their concatenation is in dispatch order."""
        found: list[Block] = []
        slot_ms = self._slot_ms
        first = start.due_ms // slot_ms
        for tick in sorted(tick for tick in self._slots if tick >= first and tick * slot_ms <= to.due_ms):
            slot = self._slots[tick]
            slot.sort(to)
            parts = []
            for piece in slot.pieces:
                low, high = cut_at(piece, start), cut_at(piece, to)
                if high > low:
                    parts.append(Block(piece.due_ms[low:high], piece.units[low:high]))
            if parts:
                found.append(join_blocks(parts))
        return found

    def key_after(self, until_ms: int, units_max: int) -> tuple[CursorKey | None, int]:
        """Of the units due up to `until_ms`, at most the first `units_max`: the key just after the last one, and how
        many they are. None: there is none."""
        slot_ms = self._slot_ms
        key: CursorKey | None = None
        count = 0
        for tick in sorted(tick for tick in self._slots if tick * slot_ms <= until_ms):
            slot = self._slots[tick]
            slot.sort_first(until_ms, units_max - count)
            firsts: list[Block] = []
            for piece in slot.pieces:
                cut = min(int(piece.due_ms.searchsorted(until_ms + 1)), units_max - count)
                if cut:
                    firsts.append(Block(piece.due_ms[:cut], piece.units[:cut]))
            if firsts:
                number = min(sum(len(first.due_ms) for first in firsts), units_max - count)
                due, index = _nth(firsts, number - 1)
                key = CursorKey(due, index + 1)
                count += number
                if count >= units_max:
                    break
        return key, count

    def count_below(self, key: CursorKey) -> int:
        """Number of units below a key."""
        slot_ms = self._slot_ms
        count = 0
        for tick in [tick for tick in self._slots if tick * slot_ms <= key.due_ms]:
            slot = self._slots[tick]
            slot.sort(key)
            count += slot.count_below(key)
        return count

    def next_due_ms(self, after: CursorKey | None = None) -> int | None:
        """Due time of the first unit at or above a key; exact."""
        if not self._slots:
            return None
        if after is None:
            return self._slots[min(self._slots)].next_due_ms()
        first = after.due_ms // self._slot_ms
        for tick in sorted(tick for tick in self._slots if tick >= first):
            slot = self._slots[tick]
            if tick > first:
                return slot.next_due_ms()
            slot.sort(after)
            due_ms = slot.next_due_ms_from(after)
            if due_ms is not None:
                return due_ms
        return None


def _parts(block: Block, cut: int) -> tuple[list[Block], list[Block]]:
    """The first `cut` units of a block and the others, each as a block or none."""
    if not cut:
        return [], [block]
    if cut == len(block.due_ms):
        return [block], []
    return [Block(block.due_ms[:cut], block.units[:cut])], [Block(block.due_ms[cut:], block.units[cut:])]


def _key_after(blocks: Sequence[Block], first_ms: int, until_ms: int, units_max: int) -> CursorKey:
    """A key above the first units, in dispatch order, of those due from `first_ms` up to `until_ms`: at least
    `units_max` and SORTED_UNITS_MAX of them, or all. None is due earlier. Of units with the same due time the indexes
    rise from block to block."""
    units_max = max(units_max, SORTED_UNITS_MAX)

    def due_by(due_ms: int) -> int:
        return sum([int(block.due_ms.searchsorted(due_ms + 1)) for block in blocks])

    if due_by(until_ms) <= units_max:
        return CursorKey(until_ms + 1, 0)
    last_ms = first_ms + bisect.bisect_left(range(first_ms, until_ms), units_max, key=due_by)
    left = units_max - due_by(last_ms - 1)
    for block in blocks:
        low, high = block.due_ms.searchsorted((last_ms, last_ms + 1)).tolist()
        if left <= high - low:
            return CursorKey(last_ms, int(block.units["index"][low + left - 1]) + 1)
        left -= high - low
    raise AssertionError("so many units are due up to then")


def _nth(blocks: Sequence[Block], number: int) -> tuple[int, int]:
    """(due_ms, index) of unit `number`, counted from 0 in dispatch order."""
    if len(blocks) == 1:
        return int(blocks[0].due_ms[number]), int(blocks[0].units["index"][number])
    due: NDArray[np.int64] = np.concatenate([block.due_ms for block in blocks])
    row = int(np.argsort(due, kind="stable")[number])
    for block in blocks:
        if row < len(block.due_ms):
            return int(block.due_ms[row]), int(block.units["index"][row])
        row -= len(block.due_ms)
    raise AssertionError("number is below the sum of lengths")
