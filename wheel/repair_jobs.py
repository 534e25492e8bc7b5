"""Rows of an hour's own delay index that the disk has lost: finds them, and writes them again.

A delay log holds only records; what the index says about them (due time, start and end) is not in it. But all members
have the same units, so another member supplies the fields that the log of commands decided (`SurveyJob.ids` are the
units to ask for). Fields that depend on this node's merges (place in the run, chain) follow from the neighbouring rows.
So a row is restored to the byte. Before it is written, it is checked against the chunk's directory.

Jobs for a worker, on files that only merges change, by appending. Called by node/core/repair/index_repair.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tickwheel.storage.disk import DiskError
from tickwheel.storage.segment import Chunk, row_checksums
from tickwheel.wheel.jobs import HourChunks, bytes_of
from tickwheel.wheel.units import HOUR_MS, LACKING, NO_INDEX, UNIT, Ids, Units, indexes_of

SURVEY_ROWS = 4_096
"""Rows read at a time: 384 KiB."""


class UnlikeUnitError(Exception):
    """A unit from another member does not fit the place of the lost one."""


@dataclass(frozen=True, slots=True)
class BadRows:
    """Unreadable rows of one chunk."""

    chunk: Chunk
    rows: NDArray[np.int64]
    """Row numbers within the chunk, rising."""
    ids: Ids
    """Ids of the units in these rows."""


class SurveyJob:
    """After `run`: the unreadable rows of an hour's own index. Raises CorruptSegmentError if its heads are damaged
    too."""

    kind = "survey"

    def __init__(self, hour: HourChunks) -> None:
        self._hour = hour
        self.bad: list[BadRows] = []

    @property
    def ids(self) -> Ids:
        """Ids of the lost units."""
        return np.concatenate([np.zeros(0, np.uint64), *(bad.ids for bad in self.bad)])

    def run(self) -> None:
        """Read the whole index."""
        try:
            for chunk in self._hour.chunks():
                if chunk.seq == 0:
                    self._look(chunk)
        finally:
            self._hour.close()

    def _look(self, chunk: Chunk) -> None:
        segment = self._hour.segment(0)
        found = [
            segment.bad_rows(chunk.first_row + at, min(SURVEY_ROWS, chunk.count - at))
            for at in range(0, chunk.count, SURVEY_ROWS)
        ]
        rows = np.concatenate(found) - chunk.first_row
        if not len(rows):
            return
        places = segment.places(chunk, chunk.first_index, chunk.first_index + chunk.count)
        index_at = np.full(chunk.count, NO_INDEX, np.uint32)
        index_at[places] = np.arange(chunk.count, dtype=np.uint32)
        if (index_at == NO_INDEX).any():
            raise segment.corrupt_places(chunk)
        index = index_at[rows].astype(np.uint64) + np.uint64(chunk.first_index)
        self.bad.append(BadRows(chunk, rows, np.uint64(self._hour.hour << 32) | index))


class RepairJob:
    """Writes lost rows again. `units`: id -> the unit as the log decided it. Raises UnlikeUnitError, DiskError."""

    kind = "repair"

    def __init__(self, hour: HourChunks, slot_ms: int, bad: list[BadRows], units: dict[int, np.void]) -> None:
        self._hour = hour
        self._slot_ms = slot_ms
        self._bad = bad
        self._units = units

    def run(self) -> None:
        """Write run by run; a run is the units of one tick of a chunk."""
        try:
            for bad in self._bad:
                runs = np.searchsorted(bad.chunk.starts, bad.rows, side="right") - 1
                for run in np.unique(runs).tolist():
                    of_run = runs == run
                    self._repair(bad.chunk, run, bad.rows[of_run], bad.ids[of_run])
        finally:
            self._hour.close()

    def _repair(self, chunk: Chunk, run: int, rows: NDArray[np.int64], ids: Ids) -> None:
        first, last = int(chunk.starts[run]), int(chunk.starts[run + 1])
        segment = self._hour.segment(0)
        units: Units = np.zeros(last - first, UNIT)
        lost = np.zeros(last - first, np.bool_)
        lost[rows - first] = True
        for low, high in _stretches(~lost):
            units[low:high] = self._hour.units(chunk, first + low, high - low)
        for at, id in zip((rows - first).tolist(), ids.tolist(), strict=True):
            units[at] = self._units[id]
        units["flags"][lost] &= np.uint8(0xFF ^ LACKING)
        self._check(chunk, run, units, lost, ids)
        _chain(units, lost)
        for at in np.flatnonzero(lost).tolist():
            if self._lacks(chunk, units[at]):
                units["flags"][at] |= LACKING
        raw = bytes_of(units)
        units["crc"][lost] = row_checksums(raw)[lost]
        for low, high in _stretches(lost):
            segment.repair_rows(chunk.first_row + first + low, raw[low:high])

    def _check(self, chunk: Chunk, run: int, units: Units, lost: NDArray[np.bool_], ids: Ids) -> None:
        """Check a lost row against the chunk's directory and the rows beside it."""
        ticks_per_hour = HOUR_MS // self._slot_ms
        due, index = units["due_ms"], units["index"].astype(np.int64)
        tick = self._hour.hour * ticks_per_hour + int(chunk.ticks[run])
        rises = (due[1:] > due[:-1]) | ((due[1:] == due[:-1]) & (index[1:] > index[:-1]))
        ends = units["offset"].astype(np.int64) + units["size"]
        inside = (units["offset"] >= np.uint64(chunk.log_start)) & (ends <= chunk.log_start + chunk.log_bytes)
        same = units["index"][lost] == indexes_of(ids)
        if not ((due // self._slot_ms == tick).all() and rises.all() and inside.all() and same.all()):
            raise UnlikeUnitError(f"units {ids[:3].tolist()} of hour {self._hour.hour} are not what was lost here")

    def _lacks(self, chunk: Chunk, unit: np.void) -> bool:
        """Whether this node may never have had the record: then zeros lie in its place (`Wheel.fetch`).

        A record that really is all zeros counts too, which costs no more than a question to the other members."""
        size = int(unit["size"])
        if not size:
            return False
        try:
            return not any(self._hour.segment(0).read_log(chunk, int(unit["offset"]), size))
        except DiskError:
            return False  # the next read of the record finds that out


def _chain(units: Units, lost: NDArray[np.bool_]) -> None:
    """Fill place and chain of a run's lost units as the merge did. Raises UnlikeUnitError if the other rows
    disagree."""
    order = np.argsort(units["index"], kind="stable")
    run_index = np.arange(len(units), dtype=np.uint32)
    local_index = np.empty_like(run_index)
    local_index[order] = run_index
    previous = np.empty_like(run_index)
    previous[order] = np.concatenate([np.array([NO_INDEX], np.uint32), units["index"][order][:-1]])
    for name, wanted in (("run_index", run_index), ("local_index", local_index), ("previous_index", previous)):
        if (units[name] != wanted)[~lost].any():
            raise UnlikeUnitError(f"{name} of the rows beside units {units['index'][lost][:3].tolist()} does not fit")
        units[name] = wanted


def _stretches(wanted: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """(low, high) of each stretch of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], wanted, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
