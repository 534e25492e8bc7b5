"""The second wheel: the loaded ticks, each a slot of units that leave in (due_ms, index) order.

Owns the loaded window [.., until_ms): every pending unit due before `until_ms` is in a slot. Arrivals go in unsorted; a
slot is sorted when it is first read, and later arrivals are merged lazily. Pieces of a slot keep the order of their
arrival, so that a stable sort by due time alone gives (due_ms, index) order: a tick lies in one hour, whose indexes
rise.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tickwheel.wheel.buffer import Block, join_blocks
from tickwheel.wheel.units import CursorKey


def cut_at(block: Block, key: CursorKey) -> int:
    """Number of a block's units below a key."""
    low, high = block.due_ms.searchsorted((key.due_ms, key.due_ms + 1))
    if high > low and key.index:
        low += np.searchsorted(np.ascontiguousarray(block.units["index"][low:high]), key.index)
    return int(low)


class _Slot:
    __slots__ = ("first_due_ms", "fresh", "pieces")

    def __init__(self) -> None:
        self.fresh: list[Block] = []
        self.pieces: list[Block] = []
        self.first_due_ms: int | None = None  # of `fresh`

    def sort(self) -> None:
        """Sort the arrivals since the last call into the pieces. Each piece is sorted; few remain."""
        if self.fresh:
            self.pieces.append(join_blocks(self.fresh))
            self.fresh = []
            self.first_due_ms = None
            pieces = self.pieces
            while len(pieces) > 1 and len(pieces[-2].due_ms) <= 2 * len(pieces[-1].due_ms):
                pieces[-2:] = [join_blocks(pieces[-2:])]

    def next_due_ms(self) -> int | None:
        dues = [int(piece.due_ms[0]) for piece in self.pieces]
        if self.first_due_ms is not None:
            dues.append(self.first_due_ms)
        return min(dues, default=None)


class SecondWheel:
    """Slots of the loaded ticks, by tick number."""

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
        slot.fresh.append(block)
        due_ms = int(block.due_ms[0])
        if slot.first_due_ms is None or due_ms < slot.first_due_ms:
            slot.first_due_ms = due_ms

    def take(self, to: CursorKey) -> list[Block]:
        """Remove and return all units below a key: blocks whose concatenation, tick by tick, is in dispatch order."""
        taken: list[Block] = []
        slot_ms = self._slot_ms
        for tick in sorted(tick for tick in self._slots if tick * slot_ms <= to.due_ms):
            slot = self._slots[tick]
            slot.sort()
            passed: list[Block] = []
            kept: list[Block] = []
            for piece in slot.pieces:
                cut = len(piece.due_ms) if (tick + 1) * slot_ms <= to.due_ms else cut_at(piece, to)
                if cut:
                    passed.append(Block(piece.due_ms[:cut], piece.units[:cut]))
                if cut < len(piece.due_ms):
                    kept.append(Block(piece.due_ms[cut:], piece.units[cut:]))
            slot.pieces = kept
            if not kept:
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
            slot.sort()
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
            slot.sort()
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
            slot.sort()
            whole = (tick + 1) * slot_ms <= key.due_ms
            count += sum(len(piece.due_ms) if whole else cut_at(piece, key) for piece in slot.pieces)
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
            slot.sort()
            dues = [
                int(piece.due_ms[cut]) for piece in slot.pieces if (cut := cut_at(piece, after)) < len(piece.due_ms)
            ]
            if dues:
                return min(dues)
        return None


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
