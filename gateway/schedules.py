"""The routes of recurring schedules.

A name may contain `/`, so it takes the rest of the path: a call that needs a word behind it is a POST, and no other
call on a name is one.

Keys: the cluster itself remembers the requests to trigger and backfill, 16 of each schedule, so a repeat finds the
first answer through any gateway. A backfill makes one part of its range and says where the next begins: a repeat of a
longer job would need more answers than a schedule remembers.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import APIRouter, Body, Header, Path, Query, Response

from tickwheel.client import AsyncClient, NotFound, RequestRefused, TickwheelError
from tickwheel.client.calls import ask
from tickwheel.client.cluster import TRY_TIMEOUT_S
from tickwheel.client.errors import refused
from tickwheel.client.moments import moment_of
from tickwheel.client.schedules import TRY_TIMEOUT_S as BACKFILL_TRY_S
from tickwheel.client.schedules import run_of, schedule_of
from tickwheel.gateway.api import ERRORS, NO_QUERY, WELL_FORMED, Caller, JsonRoute
from tickwheel.gateway.models import Model
from tickwheel.gateway.schedule_models import (
    Backfill,
    Backfilled,
    Counts,
    Deleted,
    Expected,
    Listing,
    NewSchedule,
    Planned,
    Preview,
    PutAnswer,
    PutConditions,
    RunView,
    Schedules,
    ScheduleView,
    ScheduleWithRuns,
    Timing,
)
from tickwheel.node.times import span_text
from tickwheel.proto import schedules_pb2
from tickwheel.proto.schedules_pb2_grpc import SchedulesStub

if TYPE_CHECKING:
    from tickwheel.proto.schedules_pb2_grpc import SchedulesAsyncStub

A = TypeVar("A")

MOMENTS = {"start_ms": "start", "end_ms": "end", "from_ms": "from", "until_ms": "until", "after_ms": "after"}
SPANS = {"interval_ms": "every", "jitter_ms": "jitter", "missed_window_ms": "missed_window", "late_ms_max": "late_max"}
FIELDS = {**MOMENTS, **SPANS, "meta.headers": "headers", "meta": "headers", "request_id": "Idempotency-Key"}
"""Names of the wire -> names of the REST API; the other fields have the same name in both."""
KEY_PATTERN = "^[A-Za-z0-9_.-]{1,64}$"
REPLAYED = "Idempotent-Replayed"


Name = Annotated[
    str,
    Path(
        min_length=1, max_length=200, description="1 to 200 bytes, percent-encoded; `/` may stay.", examples=["report"]
    ),
]
Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=KEY_PATTERN,
        description="A repeat with the same key gets the first answer, through any gateway. A schedule remembers 16.",
    ),
]

schedules = APIRouter(prefix="/v1", responses=ERRORS, dependencies=WELL_FORMED, route_class=JsonRoute)


RUN: dict[str, Any] = {
    "planned": "2026-12-24T08:00:00Z",
    "outcome": "made",
    "id": "0-499280-0",
    "due": "2026-12-24T08:00:11.204000Z",
    "count": 1,
}
EXAMPLE_SCHEDULE: dict[str, Any] = {
    "name": "report",
    "state": "active",
    "revision": 7,
    "definition": {
        "text": '{"report":"daily"}',
        "headers": {"content-type": "application/json"},
        "topic": "reports",
        "cron": "0 9 * * MON-FRI",
        "zone": "Europe/Berlin",
        "jitter": "30s",
        "missed": "last",
        "overlap": "allow",
    },
    "next_run": "2026-12-25T08:00:00Z",
    "counts": dict.fromkeys(Counts.model_fields, 0) | {"made": 23},
    "created": "2026-11-23T14:00:00Z",
    "changed": "2026-11-23T14:00:00Z",
    "owner": "reporting",
}
LISTED = EXAMPLE_SCHEDULE | {"definition": {"topic": "polls", "every": "30s", "missed": "skip", "overlap": "skip"}}
WITH_RUNS = EXAMPLE_SCHEDULE | {"runs": [RUN], "upcoming": ["2026-12-25T08:00:00Z", "2026-12-28T08:00:00Z"]}


def example(value: object, description: str, replays: bool = False) -> dict[str, Any]:
    """A response in OpenAPI. `replays`: it may be the answer to an earlier request."""
    told: dict[str, Any] = {"description": description, "content": {"application/json": {"example": value}}}
    if replays:
        told["headers"] = {REPLAYED: {"description": "true, for a repeat", "schema": {"type": "string"}}}
    return told


@schedules.put(
    "/schedules/{name:path}",
    summary="Create a schedule, or replace the one of this name",
    response_model_exclude_none=True,
    responses={
        200: example({"created": False, "changed": True, "schedule": EXAMPLE_SCHEDULE}, "There was one of this name."),
        201: {
            "model": PutAnswer,
            **example({"created": True, "changed": True, "schedule": EXAMPLE_SCHEDULE}, "It is new."),
        },
    },
)
async def put_schedule(
    name: Name,
    schedule: Annotated[
        NewSchedule,
        Body(
            openapi_examples={
                "by the clock": {
                    "value": {
                        "topic": "reports",
                        "json": {"report": "daily"},
                        "cron": "0 9 * * MON-FRI",
                        "zone": "Europe/Berlin",
                        "jitter": "30s",
                    }
                },
                "by an interval": {
                    "value": {"topic": "polls", "text": "go", "every": "30s", "overlap": "skip", "missed": "skip"}
                },
            }
        ),
    ],
    conditions: Annotated[PutConditions, Query()],
    client: Caller,
    response: Response,
) -> PutAnswer:
    """Putting the same again changes nothing."""
    request = schedules_pb2.PutScheduleRequest(
        definition=schedule.definition(name),
        if_absent=conditions.if_absent,
        expected_revision=conditions.expected_revision,
        paused=schedule.paused,
    )
    answer = await _ask(client, lambda stub: stub.Put, request, schedule)
    response.status_code = 201 if answer.created else 200
    return PutAnswer(created=answer.created, changed=answer.changed, schedule=_view(answer.schedule))


@schedules.get(
    "/schedules",
    summary="Schedules by name",
    response_model_exclude_none=True,
    responses={200: example({"schedules": [LISTED], "next": "report"}, "A page.")},
)
async def list_schedules(listing: Annotated[Listing, Query()], client: Caller) -> Schedules:
    """Those whose topics the caller may read. A page may be empty and still have a next one."""
    request = schedules_pb2.ListSchedulesRequest(
        prefix=listing.prefix, page_size=listing.limit, page_token=listing.after, content=listing.content
    )
    answer = await _ask(client, lambda stub: stub.List, request)
    return Schedules(schedules=[_view(one) for one in answer.schedules], next=answer.next_page_token)


@schedules.get(
    "/schedules/{name:path}",
    summary="A schedule, its last runs and the next ones",
    response_model_exclude_none=True,
    dependencies=NO_QUERY,
    responses={200: example(WITH_RUNS, "With what became of the last ten runs.")},
)
async def get_schedule(name: Name, client: Caller) -> ScheduleWithRuns:
    """`GET /v1/messages/{id}` says more about the message of a run."""
    answer = await _ask(client, lambda stub: stub.Get, schedules_pb2.GetScheduleRequest(name=name))
    return ScheduleWithRuns.of_schedule(schedule_of(answer.schedule, upcoming_ms=answer.upcoming_ms))


@schedules.delete(
    "/schedules/{name:path}",
    summary="Delete a schedule",
    responses={200: example({"name": "report", "cancelled": 0}, "It is gone.")},
)
async def delete_schedule(name: Name, conditions: Annotated[Expected, Query()], client: Caller) -> Deleted:
    """Runs made ahead for a later time are cancelled. 404: there is none, perhaps since a request before this one,
    whose answer was lost, has deleted it."""
    request = schedules_pb2.DeleteScheduleRequest(name=name, expected_revision=conditions.expected_revision)
    answer = await _ask(client, lambda stub: stub.Delete, request)
    if not answer.deleted:
        raise NotFound(f"no schedule {name!r} exists", "UNKNOWN_NAME", {"field": "name", "value": name})
    return Deleted(name=name, cancelled=answer.cancelled)


@schedules.post(
    "/schedules/{name:path}/pause",
    summary="Make no more runs",
    response_model_exclude_none=True,
    responses={200: example({**EXAMPLE_SCHEDULE, "state": "paused"}, "It is paused.")},
)
async def pause_schedule(name: Name, conditions: Annotated[Expected, Query()], client: Caller) -> ScheduleView:
    """Runs made ahead for a later time are cancelled. No error if it is paused."""
    request = schedules_pb2.PauseScheduleRequest(name=name, expected_revision=conditions.expected_revision)
    return _view(await _ask(client, lambda stub: stub.Pause, request))


@schedules.post(
    "/schedules/{name:path}/resume",
    summary="Go on with the next planned time",
    response_model_exclude_none=True,
    responses={200: example(EXAMPLE_SCHEDULE, "It is not paused.")},
)
async def resume_schedule(name: Name, conditions: Annotated[Expected, Query()], client: Caller) -> ScheduleView:
    """What passed during the pause was not missed; a backfill makes it. No error if it is not paused."""
    request = schedules_pb2.ResumeScheduleRequest(name=name, expected_revision=conditions.expected_revision)
    return _view(await _ask(client, lambda stub: stub.Resume, request))


@schedules.post(
    "/schedules/{name:path}/trigger",
    status_code=201,
    summary="Make one run now",
    response_model_exclude_none=True,
    dependencies=NO_QUERY,
    responses={201: example({**RUN, "outcome": "triggered"}, "The run is made.", replays=True)},
)
async def trigger_schedule(name: Name, client: Caller, response: Response, key: Key = None) -> RunView:
    """Beside the plan, also while it is paused."""
    request = schedules_pb2.TriggerScheduleRequest(name=name, request_id=key or uuid.uuid4().hex)
    answer = await _ask(client, lambda stub: stub.Trigger, request)
    if answer.repeated:
        response.headers[REPLAYED] = "true"
    return RunView.of_run(run_of(answer.run))


@schedules.post(
    "/schedules/{name:path}/backfill",
    summary="Make the runs of a past time again",
    response_model_exclude_none=True,
    dependencies=NO_QUERY,
    responses={200: example({"made": 500, "next": "2026-11-02T20:00:00Z"}, "The runs are made.", replays=True)},
)
async def backfill_schedule(
    name: Name,
    part: Annotated[
        Backfill,
        Body(
            openapi_examples={
                "two days": {"value": {"from": "2026-11-01T00:00:00+01:00", "until": "2026-11-03T00:00:00+01:00"}}
            }
        ),
    ],
    client: Caller,
    response: Response,
    key: Key = None,
) -> Backfilled:
    """They are due at once. At most 500 runs or 1 MiB a call: `next` says where to go on."""
    request = part.request(name, key or uuid.uuid4().hex)
    answer = await _ask(client, lambda stub: stub.Backfill, request, part, BACKFILL_TRY_S)
    if answer.repeated:
        response.headers[REPLAYED] = "true"
    return Backfilled(made=answer.made, next=moment_of(answer.next_from_ms) if answer.next_from_ms else None)


@schedules.post(
    "/schedule-preview",
    summary="When would it run?",
    dependencies=NO_QUERY,
    responses={200: example({"planned": ["2026-12-24T08:00:00Z", "2026-12-25T08:00:00Z"]}, "The planned times.")},
)
async def preview_schedule(
    preview: Annotated[
        Preview,
        Body(openapi_examples={"a plan": {"value": {"cron": "0 9 * * *", "zone": "Europe/Berlin", "times": 2}}}),
    ],
    client: Caller,
) -> Planned:
    """Creates nothing."""
    answer = await _ask(client, lambda stub: stub.Preview, preview.request(), preview)
    return Planned(planned=[moment_of(ms) for ms in answer.planned_ms])


def _view(wire: schedules_pb2.Schedule) -> ScheduleView:
    return ScheduleView.of_schedule(schedule_of(wire))


async def _ask(
    client: AsyncClient,
    method: Callable[[SchedulesAsyncStub], Callable[..., Awaitable[A]]],
    request: Any,
    given: Model | None = None,
    try_s: float = TRY_TIMEOUT_S,
) -> A:
    """The cluster's answer. Raises TickwheelError, which names the caller's fields."""
    try:
        return await ask(client, SchedulesStub, method, request, try_s)
    except TickwheelError as error:
        raise in_the_callers_words(error, given) from None


def in_the_callers_words(error: TickwheelError, given: Model | None) -> TickwheelError:
    """The error with the names and units of the REST API. `given`: the body that was refused."""
    facts = error.metadata
    full = facts.get("field", "")
    wire = re.sub(r"\[\d+\]$", "", full.removeprefix("definition.").removeprefix("spec."))
    names = FIELDS | (given.names() if isinstance(given, Timing) else {})
    name = names.get(wire, wire)
    if error.reason == "NAME_TAKEN" and wire == "request_id":
        changes = {"field": name, "limit": "a new key for each request"}
        return RequestRefused("the key came before with another request", "KEY_REUSED", facts | changes)
    if name == full:
        return error
    if error.reason != "INVALID_FIELD":
        return type(error)(str(error).replace(full, name), error.reason, facts | {"field": name})
    value, limit = facts.get("value", ""), facts.get("limit", "")
    if wire in MOMENTS or wire == "spec":
        limit = re.sub(r"\d{5,}", lambda ms: moment_of(int(ms[0])).isoformat().replace("+00:00", "Z"), limit)
    elif wire in SPANS:
        limit = re.sub(r"\d+", lambda ms: span_text(int(ms[0])), limit)
    if wire in MOMENTS or wire in SPANS or wire == "spec":
        value = str(given.model_dump(by_alias=True).get(name, value)) if given is not None else value
        for other, called in MOMENTS.items():
            limit = limit.replace(other, called)
    return refused(name, value, limit)
