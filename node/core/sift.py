"""Reads messages of which some cannot be read: finds out which, and brings the rest.

A read of many fails as a whole. Here the failing part is halved and read again until single messages fail, so that a
few bad ones cost some reads each, and none is said to be unreadable because of its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tickwheel.node.core.work import Background, RemovedError
from tickwheel.storage.disk import DiskError
from tickwheel.wheel.units import UNIT, Ids, Units


@dataclass(slots=True)
class Sifted:
    """By row of what was asked for: its unit, valid where `known`, and its record, None if it was not read."""

    units: Units
    known: list[bool]
    records: list[bytes | None]
    failed: dict[int, DiskError] = field(default_factory=dict)
    """Rows that cannot be read, and why. Rows with neither record nor error were removed with their hour."""


class Sift:
    """One use. `done` has the answer; `broken` is called instead for what is no fault of a disk."""

    def __init__(
        self,
        background: Background,
        ids: Ids,
        units: Units | None,
        done: Callable[[Sifted], None],
        broken: Callable[[BaseException], None],
        *,
        units_only: bool = False,
    ) -> None:
        """`units`: of the ids, if they are at hand. `units_only`: records are empty, and moves are not followed."""
        self._background = background
        self._ids = ids
        self._done = done
        self._broken = broken
        count = len(ids)
        found = np.zeros(count, UNIT) if units is None else units.copy()
        self._found = Sifted(found, [units is not None] * count, [None] * count)
        self._left = [(0, count)]
        self._units_only = units_only

    def go(self) -> None:
        """Read the next part, or answer."""
        if not self._left:
            self._done(self._found)
            return
        first, last = self._left.pop()
        if all(self._found.known[first:last]):
            self._read_records(first, last)
        else:
            self._read_units(first, last)

    def _read_units(self, first: int, last: int) -> None:
        def read(units: Units | None, error: BaseException | None) -> None:
            if units is None:
                self._failed(first, last, error)
                return
            self._found.units[first:last] = units
            self._found.known[first:last] = [True] * (last - first)
            if self._units_only:
                self._found.records[first:last] = [b""] * (last - first)
                self.go()
                return
            self._read_records(first, last)

        self._background.read_units(self._ids[first:last], read, following=not self._units_only)

    def _read_records(self, first: int, last: int) -> None:
        def read(records: list[bytes] | None, error: BaseException | None) -> None:
            if records is None:
                self._failed(first, last, error)
                return
            self._found.records[first:last] = records
            self.go()

        self._background.read_records(self._found.units[first:last], read)

    def _failed(self, first: int, last: int, error: BaseException | None) -> None:
        if not isinstance(error, DiskError | RemovedError):
            self._broken(error or AssertionError("a read ended without an answer"))
            return
        if last - first > 1:
            middle = (first + last) // 2
            self._left += [(middle, last), (first, middle)]
        elif isinstance(error, DiskError):
            self._found.failed[first] = error
        self.go()
