"""Calls for the cold tier: register parts and list those that wait.

Every call may be repeated: a known job is answered with its existing part numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime

import numpy as np

from tickwheel.client.answers import reader
from tickwheel.client.calls import ServiceCalls, listed
from tickwheel.client.errors import refused
from tickwheel.client.moments import moment_of, ms_of
from tickwheel.client.requests import request_of
from tickwheel.proto import cold_pb2
from tickwheel.proto.cold_pb2_grpc import ColdStub

FIRST_DAY = date(1970, 1, 1)
DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class NewColdPart:
    """A part to register: messages of one day, in a file outside the cluster."""

    day: date
    """UTC day of all its due times."""
    rows: int
    """Messages in it, 1 to 262,144."""
    due_first: datetime
    """The first due time."""
    due_last: datetime
    """The last due time."""
    sha256: bytes
    """Of the part's file."""


@dataclass(frozen=True, slots=True)
class ColdJob:
    """The parts of a job, as the cluster knows them."""

    job_id: str
    first_part: int
    """The parts of the job have this number and the following ones. The message in row r of part p has the id
    (hour = 2^31 + p, index = r)."""
    parts: int
    repeated: bool
    """They were known before."""


@dataclass(frozen=True, slots=True)
class ColdPart:
    """A part that the cluster keeps."""

    number: int
    job_id: str
    place: int
    """Its place in the job, from 0."""
    day: date
    """UTC day of all its due times."""
    rows: int
    """Messages in it."""
    due_first: datetime
    """The first due time, in UTC."""
    due_last: datetime
    """The last due time, in UTC."""
    sha256: bytes
    """Of the part's file."""
    loaded: bool
    moved: int
    """Messages of it that were moved and are not loaded: its file is still needed for them."""


@dataclass(frozen=True, slots=True)
class ColdMoved:
    """A page of messages that were moved and are not loaded."""

    ids: tuple[int, ...]
    """As integers, rising."""
    due_ms: tuple[int, ...]
    """The times that hold, in milliseconds since the Unix epoch."""
    more: bool
    """Others follow: ask for those after the last one."""


@dataclass(frozen=True, slots=True)
class ColdLoad:
    """The cold messages that a bundle loads: all of one part, in its order; or single ones that were moved."""

    part: int = 0
    """0: the bundle has moved messages."""
    ids: Sequence[int] = ()
    """Of moved messages, in the order of the bundle, as integers; at most 2,048."""
    due_ms: Sequence[int] = ()
    """Their times, in milliseconds since the Unix epoch."""
    late: int | None = None
    """How many messages were due when the master was asked to ingest the bundle; None: the cluster counts by hours."""


job_of = reader(ColdJob, cold_pb2.ColdJob)
part_of = reader(
    ColdPart,
    cold_pb2.ColdPart,
    day=lambda wire: moment_of(wire.day * DAY_MS).date(),
    due_first=lambda wire: moment_of(wire.due_min_ms),
    due_last=lambda wire: moment_of(wire.due_max_ms),
)


def moved_of(wire: cold_pb2.ColdMoved) -> ColdMoved:
    """A page from its protobuf message."""
    ids, due_ms = np.frombuffer(wire.ids, "<u8"), np.frombuffer(wire.due_ms, "<i8")
    return ColdMoved(ids=tuple(ids.tolist()), due_ms=tuple(due_ms.tolist()), more=wire.more)


def load_message(load: ColdLoad) -> cold_pb2.ColdLoad:
    """A load for a node."""
    return cold_pb2.ColdLoad(
        part=load.part,
        ids=np.array(load.ids, "<u8").tobytes(),
        due_ms=np.array(load.due_ms, "<i8").tobytes(),
        late=load.late,
    )


def _columns(parts: Sequence[NewColdPart]) -> cold_pb2.ColdColumns:
    return cold_pb2.ColdColumns(
        days=np.array([_days(part.day) for part in parts], "<u4").tobytes(),
        rows=np.array([part.rows for part in parts], "<u4").tobytes(),
        due_min_ms=np.array([ms_of("due_first", part.due_first) for part in parts], "<i8").tobytes(),
        due_max_ms=np.array([ms_of("due_last", part.due_last) for part in parts], "<i8").tobytes(),
        sha256=b"".join(part.sha256 for part in parts),
    )


def _days(day: date) -> int:
    days = (day - FIRST_DAY).days
    if days < 0:
        raise refused("day", day, f"{FIRST_DAY} or later")
    return days


class ColdClient(ServiceCalls[ColdStub]):
    """`AsyncClient.cold`. Needs the admin role."""

    _service = ColdStub

    async def register(self, job_id: str, sha256: str, parts: Sequence[NewColdPart]) -> ColdJob:
        """Register the 1 to 4,096 parts of a job; a repeat returns the same job.

        `sha256`: of the job's content, in hexadecimal. One job id stands for one content.
        """
        request = request_of(cold_pb2.RegisterColdRequest, job_id=job_id, sha256=sha256, parts=_columns(parts))
        return job_of(await self._ask(lambda stub: stub.RegisterCold, request))

    async def parts(self, *, waiting_only: bool = False) -> tuple[list[ColdPart], int]:
        """(all parts that the cluster keeps, by ascending number; the highest number ever given)."""

        async def fetch(last: cold_pb2.ColdPart | None) -> cold_pb2.ColdParts:
            request = request_of(
                cold_pb2.ListColdPartsRequest, after=last.number if last else 0, waiting_only=waiting_only
            )

            return await self._ask(lambda stub: stub.ListColdParts, request)

        found, page = await listed(fetch, lambda page: page.parts)
        return [part_of(part) for part in found], page.last_part

    async def moved(self, due_before: datetime, after: int = 0) -> ColdMoved:
        """A page of the moved messages that still wait and are due before a time. `after`: the last id of the page
        before."""
        request = request_of(cold_pb2.ListColdMovedRequest, after=after, due_below_ms=ms_of("due_before", due_before))
        return moved_of(await self._ask(lambda stub: stub.ListColdMoved, request))
