"""Parts of the cold tier: which exist, and where the messages of a loaded part are.

Owns the numbers of the parts and the jobs that brought them. Logical state. The message in row r of part p has the id
(2^31 + p, r). No hour comes near that number, so such an id is never one of the wheel's and shows by itself that it is
cold.

Invariants: numbers rise and are never reused. A part is loaded once; it is remembered until all hours into which its
messages were loaded are removed. At most JOBS_MAX jobs are remembered; jobs without remembered parts are forgotten
first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.failure import Failure, RequestError, invalid, limit_reached, refuse, refused
from tickwheel.node.state.names import check_topic_name
from tickwheel.proto import cold_pb2
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto.cold_pb2 import ColdJobSnapshot
from tickwheel.storage.bundle import UNITS_MAX, is_name

PARTS_MAX = 100_000
"""Remembered parts: about 400 bytes each."""
REGISTER_PARTS_MAX = 4_096
"""Parts of one job: enough for a thousand million messages."""
JOBS_MAX = 10_000
DAY_MS = 86_400_000
PAGE_PARTS = 1_000

_COLD_BIT = 1 << 63
SHA_BYTES = 32

CHUNK = np.dtype([("first_row", "<u4"), ("hour", "<u4"), ("first_index", "<u4")])
"""A range of rows of a part: its first row, and the id in the wheel of that row's message; the ids of the next rows
follow."""

Chunks = NDArray[np.void]


def is_cold(number: int) -> bool:
    """Whether an id is of the cold tier."""
    return number >= _COLD_BIT


def cold_id(part: int, row: int) -> int:
    """The cold id of a message."""
    return _COLD_BIT | part << 32 | row


def place_of(number: int) -> tuple[int, int]:
    """Part and row of a cold id."""
    return (number & ~_COLD_BIT) >> 32, number & 0xFFFF_FFFF


def ids_of_rows(chunks: Chunks, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Ids in the wheel of rows of a bundle, computed from its chunks."""
    at = np.searchsorted(chunks["first_row"], rows, side="right") - 1
    index = chunks["first_index"][at].astype(np.int64) + rows - chunks["first_row"][at]
    found: NDArray[np.uint64] = (chunks["hour"][at].astype(np.uint64) << np.uint64(32)) | index.astype(np.uint64)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A part; loading replaces it by a new object."""

    number: int
    day: int
    rows: int
    due_min_ms: int
    due_max_ms: int
    sha256: bytes
    chunks: Chunks | None = None
    """Set once the part is loaded."""


def told(job: ColdJobSnapshot, *, repeated: bool = False) -> cold_pb2.ColdJob:
    """A job as clients see it."""
    return cold_pb2.ColdJob(job_id=job.job_id, first_part=job.first_part, parts=job.parts, repeated=repeated)


class ColdParts:
    def __init__(self) -> None:
        self._parts: dict[int, Part] = {}  # by rising number
        self._jobs: dict[str, ColdJobSnapshot] = {}  # in the order they came
        self._summary: tuple[int, int] | None = None
        """(first due time, number of days) of unloaded parts; None: not computed yet."""
        self.last = 0
        """Highest number ever given to a part."""
        self.waiting = self.waiting_rows = 0
        """Unloaded parts, and their messages."""

    def get(self, number: int) -> Part | None:
        """A part if it is remembered, else None."""
        return self._parts.get(number)

    def __iter__(self) -> Iterator[Part]:
        """Parts by rising number."""
        return iter(self._parts.values())

    def jobs(self) -> Iterator[ColdJobSnapshot]:
        """Jobs in order of registration."""
        return iter(self._jobs.values())

    # -- changed by apply

    def register(self, request: cold_pb2.RegisterColdRequest) -> cold_pb2.ColdJob:
        """Give numbers to the parts of a job; a repeat gets the same numbers. Raises RequestError."""
        refuse(problem_of(request))
        known = self._jobs.get(request.job_id)
        if known is not None:
            if known.sha256 == request.sha256:
                return told(known, repeated=True)
            text = f"job_id: {request.job_id}: it has brought something else; name this job otherwise"
            raise refused(pb.NAME_TAKEN, text, field="job_id", value=request.job_id)
        columns = request.parts
        count = len(columns.rows) // 4
        if len(self._parts) + count > PARTS_MAX:
            raise RequestError(limit_reached("cold_parts", PARTS_MAX, 60_000))
        if not self._room_for_a_job():
            raise RequestError(limit_reached("cold_jobs", JOBS_MAX, 60_000))
        job = ColdJobSnapshot(job_id=request.job_id, sha256=request.sha256, first_part=self.last + 1, parts=count)
        self._jobs[job.job_id] = job
        values = zip(
            np.frombuffer(columns.days, "<u4").tolist(),
            np.frombuffer(columns.rows, "<u4").tolist(),
            np.frombuffer(columns.due_min_ms, "<i8").tolist(),
            np.frombuffer(columns.due_max_ms, "<i8").tolist(),
            strict=True,
        )
        for place, (day, rows, due_min_ms, due_max_ms) in enumerate(values):
            sha = columns.sha256[place * SHA_BYTES : (place + 1) * SHA_BYTES]
            self._add(Part(job.first_part + place, day, rows, due_min_ms, due_max_ms, sha))
        return told(job)

    def _room_for_a_job(self) -> bool:
        if len(self._jobs) < JOBS_MAX:
            return True
        least = next(iter(self._parts), self.last + 1)
        gone = next((j.job_id for j in self._jobs.values() if j.first_part + j.parts <= least), None)
        if gone is None:
            return False
        del self._jobs[gone]
        return True

    def _add(self, part: Part) -> None:
        self._parts[part.number] = part
        self.last = max(self.last, part.number)
        if part.chunks is None:
            self.waiting += 1
            self.waiting_rows += part.rows
            self._summary = None

    def loaded(self, part: Part, chunks: Chunks) -> None:
        """Note that a part was taken over."""
        assert part.chunks is None, "a part is loaded once"
        self._parts[part.number] = replace(part, chunks=chunks)
        self.waiting -= 1
        self.waiting_rows -= part.rows
        self._summary = None

    def forget(self, below: int) -> None:
        """Hours below are gone: forget parts that were loaded into those hours alone."""
        gone = [p.number for p in self if p.chunks is not None and int(p.chunks["hour"].max()) < below]
        for number in gone:
            del self._parts[number]

    # -- for readers

    def _summed(self) -> tuple[int, int]:
        if self._summary is None:
            waiting = [(part.due_min_ms, part.day) for part in self if part.chunks is None]
            self._summary = (min((due for due, _ in waiting), default=0), len({day for _, day in waiting}))
        return self._summary

    def next_due_ms(self) -> int:
        """First due time of unloaded parts; 0 if there are none."""
        return self._summed()[0]

    def waiting_days(self) -> int:
        """Days with unloaded parts."""
        return self._summed()[1]

    # -- checkpoints

    def capture(self) -> tuple[list[ColdJobSnapshot], list[Part]]:
        """All jobs and parts; these objects never change."""
        return list(self._jobs.values()), list(self._parts.values())

    def load(self, snapshot: cold_pb2.ColdSnapshot) -> None:
        """Fill from a checkpoint."""
        for job in snapshot.jobs:
            own = self._jobs[job.job_id] = ColdJobSnapshot()
            own.CopyFrom(job)
        for p in snapshot.parts:
            chunks = np.frombuffer(p.chunks, CHUNK) if p.chunks else None
            self._add(Part(p.number, p.day, p.rows, p.due_min_ms, p.due_max_ms, p.sha256, chunks))
        self.last = snapshot.last_part


def part_message(part: Part) -> cold_pb2.ColdPartSnapshot:
    """A part for a checkpoint."""
    return cold_pb2.ColdPartSnapshot(
        number=part.number,
        day=part.day,
        rows=part.rows,
        due_min_ms=part.due_min_ms,
        due_max_ms=part.due_max_ms,
        sha256=part.sha256,
        chunks=b"" if part.chunks is None else part.chunks.tobytes(),
    )


def problem_of(request: cold_pb2.RegisterColdRequest) -> Failure | None:
    """The fault of a request that is wrong in any state; None if it has none."""
    rule = check_topic_name(request.job_id)
    if rule:
        return invalid("job_id", request.job_id, rule).failure
    if not is_name(request.sha256):
        return invalid("sha256", request.sha256, "64 digits of [0-9a-f]").failure
    columns = request.parts
    count = len(columns.rows) // 4
    if not 1 <= count <= REGISTER_PARTS_MAX:
        return invalid("parts", count, f"1 to {REGISTER_PARTS_MAX}; make several jobs of it").failure
    for name, data, size in (
        ("rows", columns.rows, 4),
        ("days", columns.days, 4),
        ("due_min_ms", columns.due_min_ms, 8),
        ("due_max_ms", columns.due_max_ms, 8),
        ("sha256", columns.sha256, SHA_BYTES),
    ):
        if len(data) != size * count:
            return invalid(f"parts.{name}", f"{len(data)} bytes", f"{count} elements of {size} bytes").failure
    rows = np.frombuffer(columns.rows, "<u4")
    if not rows.min() or int(rows.max()) > UNITS_MAX:
        return invalid("parts.rows", f"{rows.min()} to {rows.max()}", f"1 to {UNITS_MAX}").failure
    days = np.frombuffer(columns.days, "<u4").astype(np.int64)
    first, last = np.frombuffer(columns.due_min_ms, "<i8"), np.frombuffer(columns.due_max_ms, "<i8")
    if not ((first // DAY_MS == days) & (last // DAY_MS == days) & (first <= last)).all():
        return invalid("parts.due_min_ms", "a due time", "of the part's day, the first not after the last").failure
    return None
