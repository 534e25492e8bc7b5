"""Answers requests about recurring schedules on the master: checks them, computes their times, and proposes changes.

A change names the revision that was read for it. If apply finds another one, or a run that is dispatched meanwhile, it
changes nothing, and the request is computed anew from what there is then. Repeating a request is safe: a definition
that is there already, and a pause of what is paused, change nothing; triggers and backfills have a request id.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from tickwheel.node.core.kernel import Kernel, require_current
from tickwheel.node.core.message_ids import message_id_of
from tickwheel.node.core.metas import ANSWER_BYTES_MAX, DECODED_BYTES_MAX, FIELD_BYTES
from tickwheel.node.core.promise import Promise
from tickwheel.node.core.requests import ClientRequests
from tickwheel.node.core.schedule.calendar import Calendar, calendar_of
from tickwheel.node.core.schedule.flow import FlowControl
from tickwheel.node.core.schedule.intake import JITTER_MS_MAX, META_BYTES_MAX, MetaColumns, from_batch
from tickwheel.node.core.schedule.planner import Planner, batch_of_runs, calendar_of_schedule, calendar_of_spec
from tickwheel.node.failure import Failure, Permitted, RequestError, invalid, no_agreed_time, refuse, refused
from tickwheel.node.state.names import check_open_topic, check_producer_id
from tickwheel.node.state.publishing import DUE_MS_MAX
from tickwheel.node.state.recurring import run_of
from tickwheel.node.state.results import ScheduleResult
from tickwheel.node.state.schedules import (
    NAME_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    Run,
    Schedule,
    made_of,
    unknown_schedule,
)
from tickwheel.node.state.schema import RUNS_AHEAD_LEVEL, SCHEDULES_LEVEL
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto import schedules_pb2
from tickwheel.proto.admin_pb2 import CreateTopicRequest
from tickwheel.proto.log_pb2 import (
    AdminCommand,
    Command,
    DeleteSchedule,
    ExtraRuns,
    PauseSchedule,
    PutSchedule,
    ResumeSchedule,
    ScheduleCommand,
)
from tickwheel.proto.scheduler_pb2 import RowBatch, ScheduleBatch
from tickwheel.proto.schedules_pb2 import (
    MISSED_ALL,
    RUN_BACKFILLED,
    RUN_CANCELLED,
    RUN_MADE,
    RUN_MISSED,
    RUN_NO_TOPIC,
    RUN_SKIPPED_OVERLAP,
    RUN_TRIGGERED,
    SCHEDULE_ACTIVE,
    SCHEDULE_ENDED,
    SCHEDULE_PAUSED,
    ScheduleDefinition,
    ScheduleSpec,
)

COUNT_MAX = 1 << 48
LATE_MS_MIN, LATE_MS_MAX = 1_000, 86_400_000
MISSED_WINDOW_MS_MAX = 31 * 86_400_000
HEADER_PREFIX = "tickwheel-"
UPCOMING = 10
PREVIEW_DEFAULT, PREVIEW_MAX = 10, 1_000
PAGE_DEFAULT, PAGE_MAX = 100, 1_000
EXAMINED_MAX = 2_000
"""Schedules that one page looks at, those included that the caller may not see."""
BACKFILL_RUNS_MAX = 500
BACKFILL_BYTES_MAX = 1 << 20
"""Bounds of one backfill: apply makes its messages in one piece."""
TRIES = 8
"""How often a change is computed anew because a run was dispatched, or the schedule changed, meanwhile."""


@dataclass(frozen=True, slots=True)
class _Checked:
    """A definition that may be put."""

    definition: ScheduleDefinition
    """Without its meta."""
    meta: bytes
    calendar: Calendar
    tag_hash: int
    tag_mask: int
    key_hash: int

    def like(self, schedule: Schedule) -> bool:
        """Whether a schedule has this definition already."""
        new = made_of(self.definition, self.meta)
        return (new.plan, new.payload, new.meta) == (schedule.plan, schedule.payload, schedule.meta)


class ScheduleRequests:
    def __init__(
        self,
        core: Kernel,
        requests: ClientRequests,
        all_understand: Callable[[int], bool],
        flow: FlowControl,
        full: Callable[[], Failure | None],
        planner: Planner,
    ) -> None:
        """`all_understand` tells whether every member reads a log of a level, `full` why no message is accepted now."""
        self._core = core
        self._requests = requests
        self._all_understand = all_understand
        self._flow = flow
        self._full = full
        self._planner = planner

    # -- changes

    async def put(
        self, request: schedules_pb2.PutScheduleRequest, actor: str, permitted: Permitted
    ) -> schedules_pb2.PutScheduleResponse:
        """Create or replace a schedule. `permitted` judges the topic of the one that is replaced."""
        core = self._core
        checked = self._checked(request.definition)
        name = request.definition.name
        if not core.state.schedules.used and not self._all_understand(SCHEDULES_LEVEL):
            text = "a member of the cluster runs a version without recurring schedules, or has not been heard yet"
            raise refused(pb.RECOVERING, text, field="members", retry_after_ms=200)
        await self._need_topic(request.definition.topic, actor)
        for tries in range(TRIES):
            old = self._current(name)
            if old is not None:
                refuse(permitted(old.topic))
            paused = request.paused if request.HasField("paused") else old is not None and old.paused
            if old is not None and checked.like(old) and old.paused == paused:
                return schedules_pb2.PutScheduleResponse(schedule=self._described(old))
            if old is not None and request.if_absent:
                text = f"schedule {name} exists with another definition"
                raise refused(pb.NAME_TAKEN, text, field="definition.name", value=name)
            _expect(request.expected_revision, old)
            from_ms = self._from_ms(old)
            if old is not None and await self._was_behind(old, from_ms, tries):
                continue
            next_ms = checked.calendar.next_after(from_ms)
            if next_ms is None:
                spec = request.definition.spec
                raise invalid("definition.spec", spec.cron or spec.interval_ms, f"a plan with a time after {from_ms}")
            command = PutSchedule(
                definition=checked.definition,
                read_revision=0 if old is None else old.revision,
                from_ms=from_ms,
                next_ms=next_ms,
                paused=paused,
                owner=actor,
                tag_hash=checked.tag_hash,
                tag_mask=checked.tag_mask,
                key_hash=checked.key_hash,
                meta=checked.meta,
                counts_what_stays=self._all_understand(RUNS_AHEAD_LEVEL),
            )
            result = await self._propose(ScheduleCommand(put=command))
            if result.schedule is not None:
                shown = self._described(result.schedule)
                return schedules_pb2.PutScheduleResponse(schedule=shown, created=old is None, changed=True)
        raise _contended(name)

    async def pause(self, request: schedules_pb2.PauseScheduleRequest, permitted: Permitted) -> schedules_pb2.Schedule:
        """Make no more runs of the plan."""
        for tries in range(TRIES):
            old = self._existing(request.name, permitted)
            if old.paused:
                return self._described(old)
            _expect(request.expected_revision, old)
            from_ms = self._from_ms(old)
            if await self._was_behind(old, from_ms, tries):
                continue
            command = PauseSchedule(name=old.name, read_revision=old.revision, from_ms=from_ms)
            result = await self._propose(ScheduleCommand(pause=command))
            if result.schedule is not None:
                return self._described(result.schedule)
        raise _contended(request.name)

    async def resume(
        self, request: schedules_pb2.ResumeScheduleRequest, permitted: Permitted
    ) -> schedules_pb2.Schedule:
        """Go on with the plan from now on."""
        for _ in range(TRIES):
            old = self._existing(request.name, permitted)
            if not old.paused:
                return self._described(old)
            _expect(request.expected_revision, old)
            from_ms = self._from_ms(old)
            next_ms = calendar_of_schedule(old.definition(content=False)).next_after(from_ms) or 0
            command = ResumeSchedule(name=old.name, read_revision=old.revision, from_ms=from_ms, next_ms=next_ms)
            result = await self._propose(ScheduleCommand(resume=command))
            if result.schedule is not None:
                return self._described(result.schedule)
        raise _contended(request.name)

    async def delete(
        self, request: schedules_pb2.DeleteScheduleRequest, permitted: Permitted
    ) -> schedules_pb2.DeleteScheduleResponse:
        """Remove a schedule; that it is not there is no error."""
        _check_name("name", request.name)
        for tries in range(TRIES):
            old = self._current(request.name)
            if old is None:
                return schedules_pb2.DeleteScheduleResponse()
            refuse(permitted(old.topic))
            _expect(request.expected_revision, old)
            from_ms = self._from_ms(old)
            if await self._was_behind(old, from_ms, tries):
                continue
            command = DeleteSchedule(name=old.name, read_revision=old.revision, from_ms=from_ms)
            result = await self._propose(ScheduleCommand(delete=command))
            if result.schedule is not None:
                cancelled = sum(note.run.outcome == RUN_CANCELLED for note in result.notes)
                return schedules_pb2.DeleteScheduleResponse(deleted=True, cancelled=cancelled)
        raise _contended(request.name)

    async def trigger(
        self, request: schedules_pb2.TriggerScheduleRequest, permitted: Permitted
    ) -> schedules_pb2.TriggerScheduleResponse:
        """Make one run now."""
        _check_request_id(request.request_id)
        for _ in range(TRIES):
            old = self._existing(request.name, permitted)
            now_ms = self._now_ms()
            command = ExtraRuns(
                name=old.name,
                read_revision=old.revision,
                request_id=request.request_id,
                outcome=RUN_TRIGGERED,
                planned_ms=np.array([now_ms], "<i8").tobytes(),
                due_ms=now_ms,
            )
            result = await self._carry_out(old, command)
            if result.answer is not None:
                run = self._run(run_of(result.answer))
                return schedules_pb2.TriggerScheduleResponse(run=run, repeated=result.repeated)
        raise _contended(request.name)

    async def backfill(
        self, request: schedules_pb2.BackfillScheduleRequest, permitted: Permitted
    ) -> schedules_pb2.BackfillScheduleResponse:
        """Make the runs of a range of the past, as many as one call may."""
        _check_request_id(request.request_id)
        for _ in range(TRIES):
            old = self._existing(request.name, permitted)
            now_ms = self._now_ms()
            if not 0 <= request.from_ms < request.until_ms:
                raise invalid("from_ms", request.from_ms, f"0 or more, and below until_ms ({request.until_ms})")
            known = any(answer.request_id == request.request_id for answer in old.answers)
            if request.until_ms > now_ms and not known:
                raise invalid("until_ms", request.until_ms, f"at most now ({now_ms})")
            planned, next_from_ms = _range(old, request.from_ms, request.until_ms)
            command = ExtraRuns(
                name=old.name,
                read_revision=old.revision,
                request_id=request.request_id,
                outcome=RUN_BACKFILLED,
                from_ms=request.from_ms,
                until_ms=request.until_ms,
                planned_ms=np.array(planned, "<i8").tobytes(),
                due_ms=now_ms,
                next_from_ms=next_from_ms,
            )
            result = await self._carry_out(old, command)
            if result.answer is not None:
                runs = [note.run for note in result.notes]
                return schedules_pb2.BackfillScheduleResponse(
                    made=result.answer.made,
                    next_from_ms=result.answer.next_from_ms,
                    repeated=result.repeated,
                    planned_ms=np.array([run.planned_ms for run in runs], "<i8").tobytes(),
                    ids=np.array([run.id for run in runs], "<u8").tobytes(),
                )
        raise _contended(request.name)

    async def _was_behind(self, schedule: Schedule, from_ms: int, tries: int) -> bool:
        """Whether planned times up to `from_ms` were not passed yet, as in the moment after a change of master. They
        are now, or more of them: look again. The first tries make their runs, the later ones note them as missed."""
        if not 0 < schedule.next_ms <= from_ms:
            return False
        return await self._planner.catch_up(schedule, from_ms, make=tries < TRIES // 2)

    async def _carry_out(self, schedule: Schedule, command: ExtraRuns) -> ScheduleResult:
        """Propose runs beside the plan, as many as limits let in at once. Raises RequestError if that is none; a repeat
        needs no room."""
        core, flow = self._core, self._flow
        planned = np.frombuffer(command.planned_ms, "<i8")
        if not len(planned) or any(answer.request_id == command.request_id for answer in schedule.answers):
            return await self._propose(ScheduleCommand(extra=command))
        full = self._full()
        while full is None:
            due_ms = np.full(len(planned), command.due_ms, np.int64)
            batch = batch_of_runs(core.state.settings.rights, schedule, due_ms)
            full = flow.admit(batch, due_ms, command.due_ms)
            if full is None:
                try:
                    return await self._propose(ScheduleCommand(extra=command))
                finally:
                    flow.answered([batch])
            if full.reason == pb.INVALID_FIELD and len(planned) > 1:
                # More than the limit itself: a part fits, and the next call goes on behind it.
                half = len(planned) // 2
                command.next_from_ms, planned, full = int(planned[half]), planned[:half], None
                command.planned_ms = planned.tobytes()
        raise RequestError(full)

    async def _propose(self, command: ScheduleCommand) -> ScheduleResult:
        return await self._core.proposer.propose(Command(schedule=command), ScheduleResult)

    async def _need_topic(self, name: str, actor: str) -> None:
        state = self._core.state
        if state.topic_id(name) is not None:
            return
        if not state.settings.topics_auto_create:
            require_current(self._core)
            raise refused(pb.UNKNOWN_NAME, f"topic {name} does not exist", field="definition.topic", value=name)
        await self._requests.admin(AdminCommand(create_topic=CreateTopicRequest(name=name), actor=actor))

    def _now_ms(self) -> int:
        if not self._core.clock.known:
            raise RequestError(no_agreed_time())
        return self._core.clock.now_ms()

    def _from_ms(self, old: Schedule | None) -> int:
        """When a change takes effect: now, but behind every run that can no longer be cancelled."""
        now_ms = self._now_ms()
        wheel = self._core.wheel
        rows = () if old is None else old.runs_ahead()
        gone = (row.planned_ms for row in rows if wheel.standing(row.id, row.due_ms)[2] is not None)
        return max(now_ms, *gone, 0)

    def _current(self, name: str) -> Schedule | None:
        """The schedule of a name. Raises RequestError if this node may not know the newest state."""
        require_current(self._core)
        return self._core.state.schedules.get(name)

    def _existing(self, name: str, permitted: Permitted) -> Schedule:
        _check_name("name", name)
        found = self._current(name)
        if found is None:
            raise RequestError(unknown_schedule(name))
        refuse(permitted(found.topic))
        return found

    # -- reads

    async def get(
        self, request: schedules_pb2.GetScheduleRequest, permitted: Permitted
    ) -> schedules_pb2.GetScheduleResponse:
        """One schedule, and its next planned times."""
        schedule = self._existing(request.name, permitted)
        upcoming: list[int] = []
        if not schedule.ended and self._core.clock.known:
            now_ms = self._core.clock.now_ms()
            ahead = sum(row.planned_ms > now_ms for row in schedule.runs_ahead())
            count = min(UPCOMING, schedule.runs_left + ahead)
            # A zone that only another master knows does not hide the schedule.
            with suppress(RequestError):
                calendar = calendar_of_schedule(schedule.definition(content=False))
                upcoming = calendar.between(now_ms, DUE_MS_MAX, count)
        shown = self._described(schedule)
        return schedules_pb2.GetScheduleResponse(schedule=shown, upcoming_ms=upcoming)

    async def page(
        self, request: schedules_pb2.ListSchedulesRequest, permitted: Permitted
    ) -> schedules_pb2.ListSchedulesResponse:
        """The schedules of a prefix, a page at a time. The token is the name of the last one that was looked at."""
        if request.page_size > PAGE_MAX:
            raise invalid("page_size", request.page_size, f"0 to {PAGE_MAX}")
        if len(request.prefix.encode()) > NAME_BYTES_MAX:
            raise invalid("prefix", request.prefix, f"at most {NAME_BYTES_MAX} bytes")
        require_current(self._core)
        schedules = self._core.state.schedules
        size_max = request.page_size or PAGE_DEFAULT
        answer = schedules_pb2.ListSchedulesResponse()
        left, examined, last = DECODED_BYTES_MAX if request.content else ANSWER_BYTES_MAX, 0, ""
        for name in schedules.names_from(max(request.prefix, request.page_token)):
            if not name.startswith(request.prefix):
                return answer
            if name == request.page_token:
                continue
            if examined >= EXAMINED_MAX or len(answer.schedules) >= size_max:
                answer.next_page_token = last
                return answer
            schedule = schedules.get(name)
            assert schedule is not None, "a listed name is there"
            if permitted(schedule.topic) is None:
                shown = self._described(schedule, content=request.content, runs=False)
                left -= shown.ByteSize() + FIELD_BYTES
                if left < 0 and answer.schedules:
                    answer.next_page_token = last
                    return answer
                answer.schedules.append(shown)
            examined, last = examined + 1, name
        return answer

    async def preview(self, request: schedules_pb2.PreviewScheduleRequest) -> schedules_pb2.PreviewScheduleResponse:
        """The planned times of a spec. A worker computes them: a thousand take some 50 ms."""
        calendar = _calendar("spec", request.spec)
        if request.times > PREVIEW_MAX:
            raise invalid("times", request.times, f"0 to {PREVIEW_MAX}")
        if request.after_ms < 0:
            raise invalid("after_ms", request.after_ms, "0 or more")
        after_ms = request.after_ms or self._now_ms()
        count = min(request.times or PREVIEW_DEFAULT, request.spec.count or PREVIEW_MAX)
        planned: Promise[list[int]] = Promise()
        self._core.background.submit(partial(calendar.between, after_ms, DUE_MS_MAX, count), planned.answered)
        return schedules_pb2.PreviewScheduleResponse(planned_ms=await planned)

    def _described(self, schedule: Schedule, *, content: bool = True, runs: bool = True) -> schedules_pb2.Schedule:
        counts = schedule.counts
        state = SCHEDULE_PAUSED if schedule.paused else SCHEDULE_ENDED if schedule.ended else SCHEDULE_ACTIVE
        return schedules_pb2.Schedule(
            definition=schedule.definition(content=content),
            revision=schedule.revision,
            state=state,
            next_ms=schedule.next_ms,
            made=counts[RUN_MADE],
            skipped=counts[RUN_SKIPPED_OVERLAP],
            missed=counts[RUN_MISSED],
            triggered=counts[RUN_TRIGGERED],
            backfilled=counts[RUN_BACKFILLED],
            no_topic=counts[RUN_NO_TOPIC],
            cancelled=counts[RUN_CANCELLED],
            runs=[self._run(run) for run in schedule.last_runs()] if runs else (),
            created_ms=schedule.created_ms,
            changed_ms=schedule.changed_ms,
            owner=schedule.owner,
        )

    def _run(self, run: Run) -> schedules_pb2.ScheduleRun:
        if not run.id:
            return schedules_pb2.ScheduleRun(
                planned_ms=run.planned_ms, outcome=run.outcome, count=run.times, last_planned_ms=run.at_ms
            )
        return schedules_pb2.ScheduleRun(
            planned_ms=run.planned_ms,
            due_ms=run.at_ms,
            id=message_id_of(run.id, self._core.identity.wheel_group),
            outcome=run.outcome,
            count=run.times,
            last_planned_ms=run.planned_ms,
        )

    # -- the door

    def _checked(self, definition: ScheduleDefinition) -> _Checked:
        """Check a definition. Raises RequestError, with the field, its value and what is allowed."""
        _check_name("definition.name", definition.name)
        problem = check_open_topic(definition.topic)
        if problem:
            raise invalid("definition.topic", definition.topic, problem)
        settings = self._core.state.settings
        payload_max = min(PAYLOAD_BYTES_MAX, settings.payload_bytes_max)
        if not 1 <= len(definition.payload) <= payload_max:
            raise invalid("definition.payload", f"{len(definition.payload)} bytes", f"1 to {payload_max} bytes")
        spec = definition.spec
        calendar = _calendar("definition.spec", spec)
        if definition.missed == MISSED_ALL:
            if not 1 <= definition.missed_window_ms <= MISSED_WINDOW_MS_MAX:
                limit = f"1 to {MISSED_WINDOW_MS_MAX} with MISSED_ALL"
                raise invalid("definition.missed_window_ms", definition.missed_window_ms, limit)
        elif definition.missed_window_ms:
            raise invalid("definition.missed_window_ms", definition.missed_window_ms, "0 without MISSED_ALL")
        if definition.late_ms_max and not LATE_MS_MIN <= definition.late_ms_max <= LATE_MS_MAX:
            raise invalid("definition.late_ms_max", definition.late_ms_max, f"{LATE_MS_MIN} to {LATE_MS_MAX}, or 0")
        reserved = [name for name in definition.meta.headers if name.lower().startswith(HEADER_PREFIX)]
        if reserved:
            raise invalid("definition.meta.headers", min(reserved), f"names that do not begin with {HEADER_PREFIX}")
        if definition.meta.unique_key:
            limit = "none: a schedule makes a message for each planned time; see `overlap`"
            raise invalid("definition.meta.unique_key", definition.meta.unique_key, limit)
        meta = definition.meta.SerializeToString(deterministic=True)
        plain = ScheduleDefinition()
        plain.CopyFrom(definition)
        plain.ClearField("meta")
        if len(meta) > META_BYTES_MAX:
            raise invalid("definition.meta", f"{len(meta)} bytes", f"at most {META_BYTES_MAX}")
        message = pb.Message(topic=definition.topic, payload=definition.payload, meta=definition.meta, due_ms=0)
        batch = from_batch(ScheduleBatch(rows=RowBatch(messages=[message])), settings)
        metas = batch.metas or MetaColumns.none(1)
        return _Checked(
            plain,
            meta,
            calendar,
            int(metas.tag_hashes[0]),
            int(metas.tag_masks[0]),
            int(metas.key_hashes[0]),
        )


def _calendar(field: str, spec: ScheduleSpec) -> Calendar:
    """The calendar of a spec, all of whose fields are checked. Raises RequestError."""
    try:
        calendar = calendar_of_spec(spec)
    except RequestError as error:
        facts = error.failure.metadata
        raise invalid(f"{field}.{facts['field']}", facts["value"], facts["limit"]) from None
    if spec.jitter_ms > JITTER_MS_MAX:
        raise invalid(f"{field}.jitter_ms", spec.jitter_ms, f"0 to {JITTER_MS_MAX}")
    if spec.count > COUNT_MAX:
        raise invalid(f"{field}.count", spec.count, f"0 to {COUNT_MAX}")
    return calendar


def _check_name(field: str, name: str) -> None:
    if not 1 <= len(name.encode()) <= NAME_BYTES_MAX or not name.isprintable():
        raise invalid(field, name, f"1 to {NAME_BYTES_MAX} bytes of printable UTF-8")


def _check_request_id(request_id: str) -> None:
    problem = check_producer_id(request_id)
    if problem:
        raise invalid("request_id", request_id, problem)


def _expect(expected: int, old: Schedule | None) -> None:
    """Raise RequestError unless the schedule has the expected revision; 0: any."""
    present = 0 if old is None else old.revision
    if expected and expected != present:
        text = f"expected_revision: {expected}: the schedule has revision {present}" if present else "no such schedule"
        raise refused(pb.WRONG_STATE, text, field="expected_revision", value=expected, limit=present)


def _contended(name: str) -> RequestError:
    text = f"schedule {name} changes faster than this request can be carried out; repeat it"
    return refused(pb.WRONG_STATE, text, field="name", value=name, retry_after_ms=100)


def _range(schedule: Schedule, from_ms: int, until_ms: int) -> tuple[list[int], int]:
    """The planned times of a backfill that one call makes, and where the next one goes on; 0: nowhere."""
    spec = schedule.definition(content=False).spec
    start_ms = spec.start_ms % spec.interval_ms if spec.interval_ms else 0
    calendar = calendar_of(
        cron=spec.cron, zone=spec.zone, interval_ms=spec.interval_ms, start_ms=start_ms, end_ms=spec.end_ms
    )
    size = len(schedule.payload) + len(schedule.meta) + NAME_BYTES_MAX
    count = max(1, min(BACKFILL_RUNS_MAX, BACKFILL_BYTES_MAX // size))
    planned = calendar.between(from_ms - 1, until_ms - 1, count + 1)
    return planned[:count], planned[count] if len(planned) > count else 0
