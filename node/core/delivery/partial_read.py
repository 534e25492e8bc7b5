"""Reads messages of which some cannot be read: finds those out, and brings the rest.

A read of many messages fails as a whole. Here the failing part is halved and read again until single messages fail. So
a few bad messages cost some reads each, and none is called unreadable because of its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tickwheel.node.core.work import Background, RemovedError
from tickwheel.storage.disk import DiskError
from tickwheel.wheel.units import UNIT, Ids, Units


@dataclass(slots=True)
class ReadRows:
    """For each requested row its unit, valid where `known`, and its record, None if it was not read."""

    units: Units
    known: list[bool]
    records: list[bytes | None]
    failed: dict[int, DiskError] = field(default_factory=dict)
    """Row -> why it cannot be read. Rows with neither record nor error were removed with their hour."""


class PartialRead:
    """For one use. `done` gets the answer; `broken` is called instead after an error that is not the disk's fault."""

    def __init__(
        self,
        background: Background,
        ids: Ids,
        units: Units | None,
        done: Callable[[ReadRows], None],
        broken: Callable[[BaseException], None],
        *,
        units_only: bool = False,
    ) -> None:
        """`units`: the ids' units if they are in memory. `units_only`: records are empty, and moves are not
        followed."""
        self._background = background
        self._ids = ids
        self._done = done
        self._broken = broken
        count = len(ids)
        found = np.zeros(count, UNIT) if units is None else units.copy()
        self._found = ReadRows(found, [units is not None] * count, [None] * count)
        self._left = [(0, count)]
        self._units_only = units_only

    def go(self) -> None:
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
