"""What the REST API takes and answers about recurring schedules, and how it becomes what travels to the cluster."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, model_validator

from tickwheel.client import Missed, Overlap, RunOutcome, ScheduleState
from tickwheel.client.errors import refused
from tickwheel.client.ids import text_of
from tickwheel.client.messages import JITTER_MS_MAX, meta_of
from tickwheel.client.moments import duration_of, ms_of, span_ms_of
from tickwheel.client.moments import moment_of as datetime_of_ms
from tickwheel.gateway.models import INT64_MAX, PAGE_MAX, Content, Duration, Model, Moment, moment_of
from tickwheel.node.times import span_text
from tickwheel.proto import schedules_pb2

E = TypeVar("E", bound=StrEnum)

TIMES_MAX = 1_000


def _positive(text: str) -> str:
    if not duration_of(text):
        raise ValueError("a duration above zero")
    return text


PositiveDuration = Annotated[Duration, AfterValidator(_positive)]
Revision = Annotated[
    int,
    Field(ge=0, le=INT64_MAX, description="Refused with 409 if the schedule has another revision by now. 0: any."),
]


def _known(wire: Iterable[tuple[str, int]], prefix: str, kind: type[E]) -> dict[int, E]:
    """The words for an enum's numbers, as the clients have them."""
    names = {prefix + one.name: one for one in kind}
    return {number: names[name] for name, number in wire if name in names}


STATES = _known(schedules_pb2.ScheduleState.items(), "SCHEDULE_", ScheduleState)
OUTCOMES = _known(schedules_pb2.RunOutcome.items(), "RUN_", RunOutcome)
MISSED = _known(schedules_pb2.MissedPolicy.items(), "MISSED_", Missed)
OVERLAP = _known(schedules_pb2.OverlapPolicy.items(), "OVERLAP_", Overlap)


def _span_ms(field: str, text: str | None) -> int:
    return span_ms_of(field, duration_of(text)) if text is not None else 0


def _moment_ms(field: str, text: str | None) -> int:
    """0 for none. Raises RequestRefused for a time up to 1970, since 0 would be none."""
    if text is None:
        return 0
    ms = ms_of(field, moment_of(text))
    if ms <= 0:
        raise refused(field, text, "a time after 1970-01-01T00:00:00Z")
    return ms


def _moment(ms: int) -> datetime | None:
    return datetime_of_ms(ms) if ms else None


def _span(ms: int) -> str | None:
    return span_text(ms) if ms else None


class Timing(Model):
    """When a schedule runs: by exactly one of cron and every."""

    cron: str | None = Field(
        None, min_length=1, max_length=1_000, description="Five fields; or six, the first is the second."
    )
    every: PositiveDuration | None = Field(None, description="An interval, counted from `start`, else from 1970.")
    zone: str | None = Field(None, min_length=1, max_length=1_000, description="An IANA name, for `cron`. Absent: UTC.")
    start: Moment | None = Field(None, description="No run is planned before it.")
    end: Moment | None = Field(None, description="No run is planned after it.")
    count: int = Field(0, ge=0, le=INT64_MAX, strict=True, description="It ends after so many runs. 0: no limit.")

    @model_validator(mode="after")
    def _is_one(self) -> Timing:
        if (self.cron is None) == (self.every is None):
            raise ValueError("exactly one of cron and every")
        return self

    def spec(self, jitter_ms: int = 0) -> schedules_pb2.ScheduleSpec:
        """As it travels. Raises RequestRefused."""
        spec = schedules_pb2.ScheduleSpec(
            zone=self.zone or "",
            start_ms=_moment_ms("start", self.start),
            end_ms=_moment_ms("end", self.end),
            count=self.count,
            jitter_ms=jitter_ms,
        )
        if self.cron is not None:
            spec.cron = self.cron
        else:
            spec.interval_ms = _span_ms("every", self.every)
        return spec

    def names(self) -> dict[str, str]:
        """What the fields are called that go by several names; by their names of the wire."""
        return {"spec": "cron" if self.cron is not None else "every"}


class NewSchedule(Timing, Content):
    """A schedule to put: its topic, the message of each run, and when it runs."""

    topic: str = Field(min_length=1, max_length=200)
    jitter: Duration | None = Field(None, description="Each run is due later by a random part of this.")
    missed: Missed = Field(Missed.LAST, description="What becomes of runs that nobody could make within `late_max`.")
    missed_window: PositiveDuration | None = Field(None, description="With `missed` all: those of this time are made.")
    late_max: PositiveDuration | None = Field(
        None, description="How late a run may be made before it counts as missed. Absent: a minute."
    )
    overlap: Overlap = Field(Overlap.ALLOW, description="skip: no run while the one before it is not settled.")
    paused: bool | None = Field(None, strict=True, description="Absent: stays as it is; a new one is not paused.")

    def definition(self, name: str) -> schedules_pb2.ScheduleDefinition:
        """As it travels. Raises RequestRefused."""
        jitter_ms = _span_ms("jitter", self.jitter)
        if jitter_ms > JITTER_MS_MAX:
            raise refused("jitter", self.jitter, f"at most {span_text(JITTER_MS_MAX)}")
        if (self.missed is Missed.ALL) != (self.missed_window is not None):
            raise refused("missed_window", self.missed_window or "absent", "a duration with missed all, only then")
        return schedules_pb2.ScheduleDefinition(
            name=name,
            spec=self.spec(jitter_ms),
            topic=self.topic,
            payload=self.payload(),
            meta=meta_of(**self.content()),
            missed=schedules_pb2.MissedPolicy.Value(f"MISSED_{self.missed.name}"),
            missed_window_ms=_span_ms("missed_window", self.missed_window),
            late_ms_max=_span_ms("late_max", self.late_max),
            overlap=schedules_pb2.OverlapPolicy.Value(f"OVERLAP_{self.overlap.name}"),
        )

    def names(self) -> dict[str, str]:
        """As of a timing."""
        payload = "text" if self.text is not None else "base64" if self.base64 is not None else "json"
        return {**super().names(), "payload": payload, "payloads": payload}


class Expected(Model):
    """A condition for a change."""

    expected_revision: Revision = 0


class PutConditions(Expected):
    """Conditions for a put."""

    if_absent: bool = Field(False, description="Refused with 409 if another one has the name.")


class Listing(Model):
    """Which schedules, and which page of them."""

    prefix: str = Field("", max_length=1_000, description="What the name begins with.")
    limit: int = Field(100, ge=1, le=PAGE_MAX)
    after: str = Field("", max_length=1_000, description="`next` of the page before, with the same prefix.")
    content: bool = Field(False, description="With payload, key, tags, headers and message group.")


class Preview(Timing):
    """A plan, and which of its times are wanted."""

    after: Moment | None = Field(None, description="Times after this one. Absent: after now.")
    times: int = Field(10, ge=1, le=TIMES_MAX, strict=True, description="At most so many.")

    def request(self) -> schedules_pb2.PreviewScheduleRequest:
        """As it travels. Raises RequestRefused."""
        return schedules_pb2.PreviewScheduleRequest(
            spec=self.spec(), after_ms=_moment_ms("after", self.after), times=self.times
        )


class Planned(Model):
    """Planned times, rising."""

    planned: list[datetime] = Field(description="Fewer than asked for if the plan ends.")


class Backfill(Model):
    """A range of the past."""

    since: Moment = Field(alias="from", description="Planned times from here on,")
    until: Moment = Field(description="and before this one, which is not in the future.")

    def request(self, name: str, request_id: str) -> schedules_pb2.BackfillScheduleRequest:
        """As it travels."""
        return schedules_pb2.BackfillScheduleRequest(
            name=name,
            request_id=request_id,
            from_ms=ms_of("from", moment_of(self.since)),
            until_ms=ms_of("until", moment_of(self.until)),
        )


class Backfilled(Model):
    """What a backfill has made."""

    made: int = Field(description="Runs made.")
    next: datetime | None = Field(
        None,
        description="Absent: the range is complete. Else a call's bound was reached: go on with this as `from` and "
        "another key.",
    )


class RunView(Model):
    """A run, or several planned times that were missed together."""

    planned: datetime
    outcome: RunOutcome
    id: str | None = Field(None, description="Of its message. Absent if none was made.")
    due: datetime | None = Field(None, description="`planned` and the jitter. Absent if no message was made.")
    count: int = Field(1, description="Planned times that this stands for; at 100 they may be more.")
    last_planned: datetime | None = Field(None, description="The last of them, if they are several.")

    @classmethod
    def of(cls, wire: schedules_pb2.ScheduleRun) -> RunView:
        """As it came."""
        return cls(
            planned=datetime_of_ms(wire.planned_ms),
            outcome=OUTCOMES.get(wire.outcome, RunOutcome.UNKNOWN),
            id=text_of(wire.id) if wire.HasField("id") else None,
            due=_moment(wire.due_ms),
            count=max(1, wire.count),
            last_planned=_moment(wire.last_planned_ms) if wire.count > 1 else None,
        )


class Definition(Model):
    """What was put, in the same fields; a field that was not set is absent. Without its first six in a list, unless
    `content` asks for them."""

    text: str | None = Field(None, description="The payload, if it is UTF-8.")
    base64: str | None = Field(None, description="The payload, if it is no UTF-8.")
    key: str | None = None
    tags: list[str] | None = None
    headers: dict[str, str] | None = None
    message_group: str | None = None
    topic: str
    cron: str | None = None
    every: str | None = None
    zone: str | None = None
    start: datetime | None = None
    end: datetime | None = None
    count: int | None = None
    jitter: str | None = None
    missed: Missed
    missed_window: str | None = None
    late_max: str | None = None
    overlap: Overlap

    @classmethod
    def of(cls, wire: schedules_pb2.ScheduleDefinition) -> Definition:
        """As it came."""
        spec, meta = wire.spec, wire.meta
        text = encoded = None
        if wire.payload:  # a schedule has one; in a list it may be left out
            try:
                text = wire.payload.decode()
            except UnicodeDecodeError:
                encoded = base64.b64encode(wire.payload).decode()
        return cls(
            text=text,
            base64=encoded,
            key=meta.key or None,
            tags=list(meta.tags) or None,
            headers=dict(meta.headers) or None,
            message_group=meta.message_group or None,
            topic=wire.topic,
            cron=spec.cron or None,
            every=_span(spec.interval_ms),
            zone=spec.zone or None,
            start=_moment(spec.start_ms),
            end=_moment(spec.end_ms),
            count=spec.count or None,
            jitter=_span(spec.jitter_ms),
            missed=MISSED.get(wire.missed, Missed.SKIP),
            missed_window=_span(wire.missed_window_ms),
            late_max=_span(wire.late_ms_max),
            overlap=OVERLAP.get(wire.overlap, Overlap.ALLOW),
        )


class Counts(Model):
    """Runs since the schedule was created, by what became of them."""

    made: int
    skipped: int
    missed: int
    triggered: int
    backfilled: int
    no_topic: int
    cancelled: int


class ScheduleView(Model):
    """A schedule as the cluster has it."""

    name: str
    state: ScheduleState = Field(description="ended: its end or count is reached.")
    revision: int = Field(description="Every change of the definition and every pause gives it a new one.")
    definition: Definition = Field(description="Can be put again as it is.")
    next_run: datetime | None = Field(None, description="The next planned time whose message is not made yet.")
    counts: Counts
    created: datetime
    changed: datetime
    owner: str | None = Field(None, description="The user who put it last. Absent if rights are off.")

    @classmethod
    def fields_of(cls, wire: schedules_pb2.Schedule) -> dict[str, Any]:
        """The fields of every view of a schedule."""
        return {
            "name": wire.definition.name,
            "state": STATES.get(wire.state, ScheduleState.UNKNOWN),
            "revision": wire.revision,
            "definition": Definition.of(wire.definition),
            "next_run": _moment(wire.next_ms),
            "counts": Counts(
                made=wire.made,
                skipped=wire.skipped,
                missed=wire.missed,
                triggered=wire.triggered,
                backfilled=wire.backfilled,
                no_topic=wire.no_topic,
                cancelled=wire.cancelled,
            ),
            "created": datetime_of_ms(wire.created_ms),
            "changed": datetime_of_ms(wire.changed_ms),
            "owner": wire.owner or None,
        }

    @classmethod
    def of(cls, wire: schedules_pb2.Schedule) -> ScheduleView:
        """As it came."""
        return cls(**cls.fields_of(wire))


class ScheduleWithRuns(ScheduleView):
    """A schedule with its last and next runs."""

    runs: list[RunView] = Field(description="The last ten, oldest first.")
    upcoming: list[datetime] = Field(description="The next ten planned times, as if it were not paused.")

    @classmethod
    def with_runs(cls, wire: schedules_pb2.Schedule, upcoming_ms: Sequence[int]) -> ScheduleWithRuns:
        """As it came."""
        runs = [RunView.of(run) for run in wire.runs]
        return cls(**cls.fields_of(wire), runs=runs, upcoming=[datetime_of_ms(ms) for ms in upcoming_ms])


class PutAnswer(Model):
    """What a put did."""

    created: bool
    changed: bool = Field(description="False: it was there already with this definition.")
    schedule: ScheduleView


class Schedules(Model):
    """A page of schedules, by name in the order of its UTF-8 bytes."""

    schedules: list[ScheduleView]
    next: str = Field("", description="Give it as `after` for the next page; empty: there is none.")


class Deleted(Model):
    """The schedule is gone."""

    name: str
    cancelled: int = Field(description="Runs made ahead for a later time, and cancelled.")
