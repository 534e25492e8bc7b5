"""Sweeps: jobs that cancel or move many messages. The cluster runs them by itself, through changes of master.

`AsyncClient.sweeps`. A job covers the messages that were acknowledged before it began. Messages scheduled after
`cancel` or `reschedule` has returned stay untouched. Each message counts once, even if the master changes during the
job. A repeat with the same job_id starts no second job.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta

from tickwheel.client.answers import reader
from tickwheel.client.calls import ServiceCalls
from tickwheel.client.errors import refused
from tickwheel.client.moments import moment_of, ms_of, range_ms, span_ms_of
from tickwheel.client.requests import request_of
from tickwheel.client.states import SweepState
from tickwheel.proto import scheduler_pb2
from tickwheel.proto.scheduler_pb2_grpc import SchedulerStub

LOOK_S = 0.2
"""Pause between two questions of `follow`."""


@dataclass(frozen=True, slots=True, init=False)
class Selection:
    """Selects pending messages that meet all given conditions; a sweep needs one of the first four at least."""

    topic: str
    tag: str
    key: str
    key_prefix: str
    due_ms_min: int
    """From this time on; 0: no limit."""
    due_ms_max: int
    """Below this time; 0: no limit."""

    def __init__(
        self,
        topic: str = "",
        *,
        tag: str = "",
        key: str = "",
        key_prefix: str = "",
        due_from: datetime | None = None,
        due_before: datetime | None = None,
        due_ms_min: int = 0,
        due_ms_max: int = 0,
    ) -> None:
        """The bounds of the due time are datetimes with a time zone, or milliseconds since the Unix epoch."""
        due_ms_min, due_ms_max = range_ms(due_from, due_before, due_ms_min, due_ms_max)
        values = (topic, tag, key, key_prefix, due_ms_min, due_ms_max)
        for name, value in zip(self.__slots__, values, strict=True):
            object.__setattr__(self, name, value)

    @property
    def due_from(self) -> datetime | None:
        """The first due time that counts, in UTC; None: no limit."""
        return moment_of(self.due_ms_min) if self.due_ms_min else None

    @property
    def due_before(self) -> datetime | None:
        """The first due time that does not count any more, in UTC; None: no limit."""
        return moment_of(self.due_ms_max) if self.due_ms_max else None


def _wanted(chosen: Selection) -> scheduler_pb2.Selection:
    """A selection for a node."""
    return request_of(scheduler_pb2.Selection, **asdict(chosen))


@dataclass(frozen=True, slots=True)
class Sweep:
    """The state of a job."""

    job_id: str
    state: SweepState
    action: str
    """The action in words: cancel, move to a time, shift by milliseconds, or delete a topic or group by name."""
    selection: Selection
    begun_ms: int
    ended_ms: int
    pending: int
    """Messages pending when the job began, selected or not; while it runs, of the selection's time range alone."""
    examined: int
    """Approximate number of those that were examined so far."""
    done: int
    """Messages cancelled or moved by the job."""
    too_late: int
    """Messages that were dispatched before the job could cancel or move them."""
    gone: int
    """Messages that another caller cancelled or moved meanwhile."""
    too_far: int
    """Messages left alone because the new time would be further ahead than the cluster allows."""
    undelivered: int = 0
    """For a finished deletion: messages dispatched and not settled, counted once for each group."""
    dead: int = 0
    """For a finished deletion: dead letters."""

    @property
    def begun_at(self) -> datetime:
        """When it began, in UTC."""
        return moment_of(self.begun_ms)

    @property
    def ended_at(self) -> datetime | None:
        """When it ended, in UTC; None while it runs."""
        return moment_of(self.ended_ms) if self.ended else None

    @property
    def ended(self) -> bool:
        """Whether the job has ended."""
        return self.state in (SweepState.FINISHED, SweepState.STOPPED)

    @property
    def fraction(self) -> float:
        """Approximate progress, from 0 to 1."""
        if self.state == SweepState.FINISHED:
            return 1.0
        return min(0.99, self.examined / self.pending) if self.pending else 0.0


def _action(wire: scheduler_pb2.Sweep) -> str:
    return {
        "due_ms": f"move to {wire.due_ms}",
        "shift_ms": f"shift by {wire.shift_ms}",
        "delete_topic": f"delete topic {wire.delete_topic}",
        "delete_group": f"delete group {wire.delete_group}",
    }.get(wire.WhichOneof("action") or "", "cancel")


_sweep = reader(Sweep, scheduler_pb2.Sweep, action=_action)


class SweepClient(ServiceCalls[SchedulerStub]):
    """`AsyncClient.sweeps`."""

    _service = SchedulerStub

    async def cancel(self, selection: Selection, *, job_id: str | None = None) -> Sweep:
        """Start a job that cancels messages; returns at once. Use `follow` or `wait` for its end."""
        return await self._begin(
            request_of(
                scheduler_pb2.BeginSweepRequest, job_id=job_id or _new(), selection=_wanted(selection), cancel=True
            )
        )

    async def reschedule(
        self,
        selection: Selection,
        *,
        at: datetime | None = None,
        delay: timedelta | None = None,
        due_ms: int | None = None,
        shift: timedelta | None = None,
        job_id: str | None = None,
    ) -> Sweep:
        """Start a job that moves all `at` a time, which `due_ms` states in milliseconds, all to `delay` from now, or
        each by `shift`; returns at once."""
        request = request_of(scheduler_pb2.BeginSweepRequest, job_id=job_id or _new(), selection=_wanted(selection))
        if (at is not None) + (delay is not None) + (due_ms is not None) + (shift is not None) != 1:
            raise refused("when", "none or several", "exactly one of at, delay, due_ms and shift")
        if at is not None:
            request.due_ms = ms_of("at", at)
        elif delay is not None:
            request.delay_ms = span_ms_of("delay", delay)
        elif due_ms is not None:
            request.due_ms = due_ms
        elif shift is not None:
            request.shift_ms = span_ms_of("shift", shift)
        return await self._begin(request)

    async def _begin(self, request: scheduler_pb2.BeginSweepRequest) -> Sweep:
        return _sweep(await self._ask(lambda stub: stub.BeginSweep, request))

    async def get(self, job_id: str) -> Sweep:
        """The state of a job. Raises NotFound if the cluster does not know it; it keeps the last 64."""
        request = request_of(scheduler_pb2.GetSweepRequest, job_id=job_id)
        return _sweep(await self._ask(lambda stub: stub.GetSweep, request))

    async def list(self) -> tuple[Sweep, ...]:
        """All jobs that the cluster keeps, in the order of their start."""
        response = await self._ask(lambda stub: stub.ListSweeps, scheduler_pb2.ListSweepsRequest())
        return tuple(map(_sweep, response.sweeps))

    async def stop(self, job_id: str) -> Sweep:
        """Stop a job. Messages already cancelled or moved stay so."""
        request = request_of(scheduler_pb2.StopSweepRequest, job_id=job_id)
        return _sweep(await self._ask(lambda stub: stub.StopSweep, request))

    async def follow(self, job_id: str) -> AsyncIterator[Sweep]:
        """Yield the state of a job repeatedly, the last time after its end. Continues through a change of master."""
        while True:
            sweep = await self.get(job_id)
            yield sweep
            if sweep.ended:
                return
            await asyncio.sleep(LOOK_S)

    async def wait(self, job_id: str) -> Sweep:
        """Wait until the job has ended; returns its last state."""
        async for sweep in self.follow(job_id):
            last = sweep
        return last


def _new() -> str:
    return uuid.uuid4().hex
