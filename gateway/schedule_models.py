"""What the REST API takes and answers about recurring schedules, and how it becomes what travels to the cluster."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from tickwheel.client import Missed, Overlap, RunOutcome, Schedule, ScheduleRun, ScheduleState
from tickwheel.client.errors import refused
from tickwheel.client.messages import JITTER_MS_MAX, meta_of
from tickwheel.client.moments import MILLISECOND, duration_of, ms_of, span_ms_of
from tickwheel.gateway.models import INT64_MAX, PAGE_MAX, Content, Duration, Model, Moment, moment_of, payload_fields
from tickwheel.node.times import span_text
from tickwheel.proto import schedules_pb2

TIMES_MAX = 1_000


def _positive(text: str) -> str:
    if not duration_of(text):
        raise ValueError("a duration above zero")
    return text


PositiveDuration = Annotated[Duration, AfterValidator(_positive)]
Revision = Annotated[
    int, Field(ge=0, le=INT64_MAX, description="Refused with 409 if the schedule has another revision by now. 0: any.")
]


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


def _shown(value: Any) -> Any:
    """A span as text; other values as they are."""
    return span_text(value // MILLISECOND) if isinstance(value, timedelta) else value


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
    def of_run(cls, run: ScheduleRun) -> RunView:
        """From the client's."""
        return cls.of(run, id=run.id or None, last_planned=run.last_planned if run.count > 1 else None)


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
    def of_schedule(cls, schedule: Schedule) -> Definition:
        """From the client's."""
        payload = payload_fields(schedule.payload or None)  # a schedule has one; in a list it may be left out
        names = [name for name in cls.model_fields if name not in payload]
        return cls(**payload, **{name: _shown(value) for name in names if (value := getattr(schedule, name))})


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
    def of_schedule(cls, schedule: Schedule) -> Self:
        """From the client's."""
        return cls.of(
            schedule,
            definition=Definition.of_schedule(schedule),
            counts=Counts.of(schedule.counts),
            owner=schedule.owner or None,
        )


class ScheduleWithRuns(ScheduleView):
    """A schedule with its last and next runs."""

    runs: list[RunView] = Field(description="The last ten, oldest first.")
    upcoming: list[datetime] = Field(description="The next ten planned times, as if it were not paused.")

    @classmethod
    def of(cls, given: object, **known: Any) -> Self:
        """As in Model."""
        assert isinstance(given, Schedule)
        return super().of(given, runs=[RunView.of_run(run) for run in given.runs], **known)


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
