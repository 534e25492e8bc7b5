"""Recurring schedules: named plans of the cluster that make a message at each planned time. See docs/SCHEDULES.md.

`AsyncClient.schedules`. Every call repeats itself safely after a lost answer: a definition that is there already
changes nothing, and a run that is asked for (`trigger`, `backfill`) has a request id.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from tickwheel.client.answers import enum_of, reader
from tickwheel.client.calls import ServiceCalls
from tickwheel.client.errors import TickwheelError, refused
from tickwheel.client.messages import content_of, jitter_ms_of, meta_of
from tickwheel.client.moments import moment_if, moment_of, ms_of, span_ms_of, span_of
from tickwheel.client.payloads import Payload
from tickwheel.client.requests import checked_text, request_of
from tickwheel.proto import schedules_pb2
from tickwheel.proto.schedules_pb2_grpc import SchedulesStub

REQUEST_ID_CHARACTERS_MAX = 58
COUNT_MAX = 1 << 48
"""Of a backfill: the parts of a long one get numbers behind it."""
ZONE_RULE = "an IANA time zone such as Europe/Berlin; left out it is UTC"
PAGE = 500
TRY_TIMEOUT_S = 10.0
"""Time-out of a backfill's part, in which up to 500 messages go through the log."""


class Missed(StrEnum):
    """What becomes of runs that nobody could make in time, since the cluster was down or at a limit."""

    SKIP = "skip"
    LAST = "last"
    """The last one is made, late."""
    ALL = "all"
    """All within a window are made, late."""


class Overlap(StrEnum):
    """What becomes of a run while the one before it is not settled."""

    ALLOW = "allow"
    SKIP = "skip"


class ScheduleState(StrEnum):
    """Whether a schedule makes runs."""

    ACTIVE = "active"
    PAUSED = "paused"
    ENDED = "ended"
    """Its end or count is reached. It stays until it is deleted or replaced."""
    UNKNOWN = "unknown"
    """Of a node of a later version."""


class RunOutcome(StrEnum):
    """What became of a planned time, or of a run that was asked for."""

    MADE = "made"
    """Its message waits for its time, or was dispatched."""
    SKIPPED_OVERLAP = "skipped_overlap"
    """The run before it was not settled."""
    MISSED = "missed"
    TRIGGERED = "triggered"
    BACKFILLED = "backfilled"
    NO_TOPIC = "no_topic"
    """The topic did not exist."""
    CANCELLED = "cancelled"
    """Made ahead, then cancelled when the schedule was paused, replaced or deleted."""
    UNKNOWN = "unknown"
    """Of a node of a later version."""


@dataclass(frozen=True, slots=True)
class ScheduleRun:
    """A run, or several planned times that were missed together."""

    planned: datetime
    outcome: RunOutcome
    id: str = ""
    """Id of the message; empty if none was made."""
    due: datetime | None = None
    """When it is delivered: `planned` and the jitter. None if no message was made."""
    count: int = 1
    """Planned times that this stands for; at 100 they may be more."""
    last_planned: datetime | None = None
    """The last of them."""


@dataclass(frozen=True, slots=True)
class RunCounts:
    """Runs since the schedule was created."""

    made: int = 0
    skipped: int = 0
    missed: int = 0
    triggered: int = 0
    backfilled: int = 0
    no_topic: int = 0
    cancelled: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule as the cluster has it."""

    name: str
    topic: str
    revision: int
    """Every change of the definition and every pause gives it a new one."""
    state: ScheduleState
    cron: str = ""
    every: timedelta | None = None
    """An interval, instead of `cron`."""
    zone: str = ""
    """Empty: UTC."""
    start: datetime | None = None
    end: datetime | None = None
    count: int = 0
    jitter: timedelta = timedelta(0)
    missed: Missed = Missed.SKIP
    missed_window: timedelta = timedelta(0)
    late_max: timedelta = timedelta(0)
    """How late a run may be made before it counts as missed; 0: a minute."""
    overlap: Overlap = Overlap.ALLOW
    payload: bytes | None = None
    """None in a list, as the next four are empty there."""
    key: str = ""
    tags: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    message_group: str = ""
    next_run: datetime | None = None
    """The next planned time whose message is not made yet."""
    counts: RunCounts = RunCounts()
    runs: tuple[ScheduleRun, ...] = ()
    """The last ten, oldest first; empty in a list."""
    upcoming: tuple[datetime, ...] = ()
    """The next ten planned times, as if it were not paused; only `get` gives them."""
    created: datetime | None = None
    changed: datetime | None = None
    owner: str = ""
    """The user who put it last; empty if rights are off."""


@dataclass(frozen=True, slots=True)
class PutResult:
    """What `put` did. A repeat after a lost answer says that nothing was created or changed."""

    schedule: Schedule
    created: bool
    changed: bool


run_of = reader(ScheduleRun, schedules_pb2.ScheduleRun, count=lambda wire: max(1, wire.count))
counts_of = reader(RunCounts, schedules_pb2.Schedule)


def _missed_of(wire: schedules_pb2.Schedule) -> Missed:
    return enum_of(Missed, schedules_pb2.MissedPolicy.DESCRIPTOR, wire.definition.missed, Missed.SKIP)


def _overlap_of(wire: schedules_pb2.Schedule) -> Overlap:
    return enum_of(Overlap, schedules_pb2.OverlapPolicy.DESCRIPTOR, wire.definition.overlap, Overlap.ALLOW)


_schedule_of = reader(
    Schedule,
    schedules_pb2.Schedule,
    "definition",
    "definition.spec",
    "definition.meta",
    every=lambda wire: span_of(ms) if (ms := wire.definition.spec.interval_ms) else None,
    missed=_missed_of,
    overlap=_overlap_of,
    next_run=lambda wire: moment_if(wire.next_ms),
    counts=counts_of,
    runs=lambda wire: tuple(map(run_of, wire.runs)),
    upcoming=lambda wire: (),
)


def schedule_of(wire: schedules_pb2.Schedule, content: bool = True, upcoming_ms: Sequence[int] = ()) -> Schedule:
    """A schedule from its protobuf message; `content`: with the payload."""
    payload = wire.definition.payload if content else None
    return _schedule_of(wire, payload=payload, upcoming=tuple(map(moment_of, upcoming_ms)))


def _spec(
    cron: str | None,
    every: timedelta | None,
    zone: str | None,
    start: datetime | None,
    end: datetime | None,
    count: int,
    jitter: timedelta | None,
) -> schedules_pb2.ScheduleSpec:
    """When it runs. Raises RequestRefused for a wrong argument."""
    if (cron is None) == (every is None):
        raise refused("cron", "none" if cron is None else cron, "exactly one of cron and every")
    if zone == "" and cron is not None:
        raise refused("zone", "''", ZONE_RULE)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= COUNT_MAX:
        raise refused("count", count, f"a whole number from 1 to {COUNT_MAX}, or 0 for no limit")
    spec = request_of(
        schedules_pb2.ScheduleSpec,
        zone="" if zone is None else zone,
        start_ms=_after_1970("start", start) if start is not None else 0,
        end_ms=_after_1970("end", end) if end is not None else 0,
        count=count,
        jitter_ms=jitter_ms_of(jitter),
    )
    if cron is not None:
        spec.cron = checked_text("cron", cron)
    if every is not None:
        spec.interval_ms = _above_zero("every", every)
    return spec


def _after_1970(field_name: str, moment: datetime) -> int:
    """In milliseconds. 0 would mean none. Raises RequestRefused."""
    ms = ms_of(field_name, moment)
    if ms <= 0:
        raise refused(field_name, moment, "after 1970-01-01T00:00Z")
    return ms


def _above_zero(field_name: str, span: timedelta) -> int:
    """In milliseconds. 0 would mean the default, or none. Raises RequestRefused."""
    ms = span_ms_of(field_name, span)
    if ms <= 0:
        raise refused(field_name, span, "above zero")
    return ms


def _policy(field_name: str, given: str, kind: type[Missed | Overlap]) -> str:
    """The name of a policy in the protocol. Raises RequestRefused for anything else."""
    if given not in list(kind):
        raise refused(field_name, given, ", ".join(kind))
    return f"{field_name}_{given}".upper()


class ScheduleClient(ServiceCalls[SchedulesStub]):
    """`AsyncClient.schedules`."""

    _service = SchedulesStub

    async def put(
        self,
        name: str,
        topic: str,
        payload: Payload,
        *,
        cron: str | None = None,
        every: timedelta | None = None,
        zone: str | None = None,
        start: datetime | None = None,
        end: datetime | None = None,
        count: int = 0,
        jitter: timedelta | None = None,
        missed: Missed = Missed.LAST,
        missed_window: timedelta | None = None,
        late_max: timedelta | None = None,
        overlap: Overlap = Overlap.ALLOW,
        key: str = "",
        tags: Sequence[str] = (),
        headers: Mapping[str, str] | None = None,
        message_group: str = "",
        paused: bool | None = None,
        if_absent: bool = False,
        expected_revision: int = 0,
    ) -> PutResult:
        """Create a schedule, or replace the one of this name.

        `cron`: five fields, or six with the second first, in the IANA time zone `zone` (None: UTC). `every`: an
        interval from a second on, counted from `start`, without it from 1970. `start`, `end`: no planned time before or
        behind them. `count`: it ends after so many runs. `jitter`: each run is due later by a random part of it.

        `missed`, with `missed_window` for `Missed.ALL`: what becomes of runs that nobody could make within `late_max`
        (a minute). `overlap`: whether a run is left out while the one before it is not settled. `paused`: None leaves
        it as it is. `if_absent`: raises RequestRefused if another one has the name. `expected_revision`: raises
        RequestRefused if it has another revision by now.
        """
        if missed_window is not None and missed != Missed.ALL:
            raise refused("missed_window", missed_window, "only with missed=Missed.ALL")
        content, headers = content_of(payload, headers)
        definition = request_of(
            schedules_pb2.ScheduleDefinition,
            name=name,
            spec=_spec(cron, every, zone, start, end, count, jitter),
            topic=topic,
            payload=content,
            meta=meta_of(key, tags, headers, message_group),
            missed=schedules_pb2.MissedPolicy.Value(_policy("missed", missed, Missed)),
            missed_window_ms=_above_zero("missed_window", missed_window) if missed_window is not None else 0,
            late_ms_max=_above_zero("late_max", late_max) if late_max is not None else 0,
            overlap=schedules_pb2.OverlapPolicy.Value(_policy("overlap", overlap, Overlap)),
        )
        answer = await self._ask(
            lambda stub: stub.Put,
            request_of(
                schedules_pb2.PutScheduleRequest,
                definition=definition,
                if_absent=if_absent,
                expected_revision=expected_revision,
                paused=paused,
            ),
        )
        return PutResult(schedule_of(answer.schedule), answer.created, answer.changed)

    async def get(self, name: str) -> Schedule:
        """One schedule with its last and its next ten runs. Raises NotFound."""
        answer = await self._ask(lambda stub: stub.Get, request_of(schedules_pb2.GetScheduleRequest, name=name))
        return schedule_of(answer.schedule, upcoming_ms=answer.upcoming_ms)

    async def list(self, prefix: str = "", *, content: bool = False) -> AsyncIterator[Schedule]:
        """All whose name begins with `prefix`, by name, fetched in pages. `content`: with payload, key, tags, headers
        and message group."""
        request = request_of(schedules_pb2.ListSchedulesRequest, prefix=prefix, page_size=PAGE, content=content)
        while True:
            page = await self._ask(lambda stub: stub.List, request)
            for found in page.schedules:
                yield schedule_of(found, content)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def pause(self, name: str, *, expected_revision: int = 0) -> Schedule:
        """Make no more runs, and cancel those made ahead for a later time. No error if it is paused already."""
        request = request_of(schedules_pb2.PauseScheduleRequest, name=name, expected_revision=expected_revision)
        return schedule_of(await self._ask(lambda stub: stub.Pause, request))

    async def resume(self, name: str, *, expected_revision: int = 0) -> Schedule:
        """Go on with the first planned time from now on; those that passed meanwhile are no missed runs."""
        request = request_of(schedules_pb2.ResumeScheduleRequest, name=name, expected_revision=expected_revision)
        return schedule_of(await self._ask(lambda stub: stub.Resume, request))

    async def trigger(self, name: str, *, request_id: str | None = None) -> ScheduleRun:
        """Make one run now, beside the plan, also while it is paused. `request_id`: a call with the same one makes no
        second run."""
        request = request_of(schedules_pb2.TriggerScheduleRequest, name=name, request_id=_request_id(request_id))
        return run_of((await self._ask(lambda stub: stub.Trigger, request)).run)

    async def backfill(self, name: str, start: datetime, end: datetime, *, request_id: str | None = None) -> int:
        """Make the runs of a past time, from `start` on and before `end`, due at once. Returns how many.

        A long one is made in parts of at most 500 runs. If a part fails, the error's metadata have `made` (runs of the
        parts before), `next_from_ms` and `request_id`: with these as `start` and `request_id` the next call goes on and
        makes no run twice.
        """
        base = _request_id(request_id)
        request = request_of(
            schedules_pb2.BackfillScheduleRequest,
            name=name,
            request_id=base,
            from_ms=ms_of("start", start),
            until_ms=ms_of("end", end),
        )
        made = parts = 0
        while True:
            try:
                answer = await self._ask(lambda stub: stub.Backfill, request, try_timeout_s=TRY_TIMEOUT_S)
            except TickwheelError as error:
                error.metadata |= {
                    "made": str(made),
                    "next_from_ms": str(request.from_ms),
                    "request_id": request.request_id,
                }
                raise
            made += answer.made
            if not answer.next_from_ms:
                return made
            parts += 1
            request.from_ms, request.request_id = answer.next_from_ms, f"{base}.{parts}"

    async def delete(self, name: str, *, expected_revision: int = 0) -> bool:
        """Delete it; runs made ahead for a later time are cancelled. False: there was none, or an earlier try of this
        call, whose answer was lost, has deleted it."""
        request = request_of(schedules_pb2.DeleteScheduleRequest, name=name, expected_revision=expected_revision)
        return (await self._ask(lambda stub: stub.Delete, request)).deleted

    async def preview(
        self,
        *,
        cron: str | None = None,
        every: timedelta | None = None,
        zone: str | None = None,
        start: datetime | None = None,
        end: datetime | None = None,
        count: int = 0,
        after: datetime | None = None,
        times: int = 10,
    ) -> tuple[datetime, ...]:
        """The first planned times of such a schedule after a moment (None: now), without creating it."""
        if isinstance(times, bool) or not isinstance(times, int) or not 1 <= times <= 1_000:
            raise refused("times", times, "a whole number from 1 to 1000")
        request = request_of(
            schedules_pb2.PreviewScheduleRequest,
            spec=_spec(cron, every, zone, start, end, count, None),
            after_ms=ms_of("after", after) if after is not None else 0,
            times=times,
        )
        answer = await self._ask(lambda stub: stub.Preview, request)
        return tuple(map(moment_of, answer.planned_ms))


def _request_id(given: str | None) -> str:
    if given is None:
        return uuid.uuid4().hex
    if not 1 <= len(checked_text("request_id", given)) <= REQUEST_ID_CHARACTERS_MAX:
        raise refused("request_id", given, f"1 to {REQUEST_ID_CHARACTERS_MAX} characters of [A-Za-z0-9_-.]")
    return given
