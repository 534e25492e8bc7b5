"""Applies the commands of recurring schedules: what becomes of each schedule, and the messages of its runs.

The next planned time is passed by the very command that makes its run, or notes why there is none. A row of MakeRuns
counts only if the schedule still has the revision and the next planned time that the master had read. So a run is
neither lost nor made twice, whatever happens to masters: a command that comes again, late, or from a deposed master
finds another planned time and does nothing.

Every time in a command is the master's. A change takes effect at its `from_ms`: planned times up to then belong to what
was before. Runs that were made ahead for later are cancelled by the change itself, and come off the count of runs. If
one of them has been dispatched since the master looked, the change is stale: the master looks again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tickwheel.node.failure import Failure, invalid
from tickwheel.node.state.cluster import ClusterState
from tickwheel.node.state.groups import unsettled
from tickwheel.node.state.ports import WheelPort
from tickwheel.node.state.publishing import DUE_MS_MAX, META_BYTES_MAX
from tickwheel.node.state.results import RunNote, ScheduleResult
from tickwheel.node.state.schedules import (
    ANSWERS_KEPT,
    MESSAGES,
    Ahead,
    Answer,
    Run,
    Schedule,
    made_of,
    pack_ahead,
    pack_run,
    unknown_schedule,
    unpack_run,
)
from tickwheel.node.state.topics import Topic
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto.log_pb2 import (
    DeleteSchedule,
    ExtraRuns,
    MakeRuns,
    PauseSchedule,
    PutSchedule,
    ResumeSchedule,
    ScheduleCommand,
    ScheduleRuns,
)
from tickwheel.proto.schedules_pb2 import (
    RUN_BACKFILLED,
    RUN_CANCELLED,
    RUN_MADE,
    RUN_MISSED,
    RUN_NO_TOPIC,
    RUN_SKIPPED_OVERLAP,
    RUN_TRIGGERED,
)
from tickwheel.wheel.units import ONE_TAG, UNIT

STALE = ScheduleResult(stale=True)


class _Times(NamedTuple):
    """A run to make."""

    planned_ms: int
    due_ms: int


@dataclass(slots=True)
class _Plan:
    """The effect of a command on one schedule, before its messages have ids."""

    schedule: Schedule
    topic: Topic | None
    runs: list[Run]
    """In order. Runs with an outcome of MESSAGES still lack their id and the due time that holds."""


class Recurring:
    def __init__(self, state: ClusterState, wheel: WheelPort) -> None:
        self._state = state
        self._wheel = wheel

    def apply(self, command: ScheduleCommand, stamped_ms: int) -> ScheduleResult:
        """Apply one command."""
        kind = command.WhichOneof("body")
        if kind == "make":
            return self._make(command.make, stamped_ms)
        if kind == "put":
            return self._put(command.put, stamped_ms)
        if kind == "pause":
            return self._pause(command.pause, stamped_ms)
        if kind == "resume":
            return self._resume(command.resume, stamped_ms)
        if kind == "delete":
            return self._delete(command.delete)
        if kind == "extra":
            return self._extra(command.extra, stamped_ms)
        return ScheduleResult(failure=Failure(pb.WRONG_STATE, f"schedule command {kind} is not known to this version"))

    # -- changes

    def _put(self, put: PutSchedule, stamped_ms: int) -> ScheduleResult:
        schedules = self._state.schedules
        old = schedules.get(put.definition.name)
        if (0 if old is None else old.revision) != put.read_revision:
            return STALE
        new = made_of(put.definition, put.meta)._replace(
            paused=put.paused,
            owner=put.owner,
            tag_hash=put.tag_hash,
            tag_mask=put.tag_mask,
            key_hash=put.key_hash,
            created_ms=stamped_ms,
            changed_ms=stamped_ms,
        )
        refused = schedules.refusal(new, old)
        if refused is not None:
            return ScheduleResult(failure=refused)
        if len(new.record(DUE_MS_MAX)[0]) - len(new.payload) > META_BYTES_MAX:
            return ScheduleResult(failure=invalid("meta", len(put.meta), f"at most {META_BYTES_MAX} bytes").failure)
        notes: list[RunNote] = []
        if old is not None:
            stopped = self._stopped(old, put.from_ms)
            if stopped is None:
                return STALE
            old, notes = stopped
            new = new._replace(
                created_ms=old.created_ms,
                counts=old.counts,
                runs=old.runs,
                ahead=old.ahead,
                answers=old.answers,
                last_id=old.last_id,
                last_due_ms=old.last_due_ms,
            )
            # Cancelled by this change, by a pause before it, or by its id.
            if put.counts_what_stays and self._cancelled(old.last_id, old.last_due_ms):
                last_id, last_due_ms = self._newest_made(old)
                new = new._replace(last_id=last_id, last_due_ms=last_due_ms)
        new = new._replace(revision=schedules.next_revision())
        new = new._replace(next_ms=0 if new.paused or not new.runs_left else put.next_ms)
        schedules.put(new)
        return ScheduleResult(new, notes=tuple(notes))

    def _pause(self, pause: PauseSchedule, stamped_ms: int) -> ScheduleResult:
        old = self._state.schedules.get(pause.name)
        if old is None or old.revision != pause.read_revision:
            return STALE
        stopped = self._stopped(old, pause.from_ms)
        if stopped is None:
            return STALE
        new, notes = stopped
        return self._changed(new._replace(paused=True, next_ms=0), stamped_ms, notes)

    def _resume(self, resume: ResumeSchedule, stamped_ms: int) -> ScheduleResult:
        old = self._state.schedules.get(resume.name)
        if old is None or old.revision != resume.read_revision:
            return STALE
        next_ms = resume.next_ms if old.runs_left else 0
        return self._changed(old._replace(paused=False, next_ms=next_ms), stamped_ms, ())

    def _delete(self, delete: DeleteSchedule) -> ScheduleResult:
        old = self._state.schedules.get(delete.name)
        if old is None or old.revision != delete.read_revision:
            return STALE
        stopped = self._stopped(old, delete.from_ms)
        if stopped is None:
            return STALE
        last, notes = stopped
        self._state.schedules.remove(delete.name)
        return ScheduleResult(last, notes=tuple(notes))

    def _changed(self, new: Schedule, stamped_ms: int, notes: Iterable[RunNote]) -> ScheduleResult:
        schedules = self._state.schedules
        new = new._replace(revision=schedules.next_revision(), changed_ms=stamped_ms)
        schedules.put(new)
        return ScheduleResult(new, notes=tuple(notes))

    def _stopped(self, old: Schedule, from_ms: int) -> tuple[Schedule, list[RunNote]] | None:
        """The schedule with the runs planned after `from_ms` cancelled, and notes of what that changed. A planned time
        up to `from_ms` whose run was not made is noted as missed: the master has let it pass before, unless it does not
        know the calendar. None: a run to be cancelled is dispatched already."""
        rows = old.runs_ahead()
        later: set[int] = set()
        for row in rows:
            if row.planned_ms <= from_ms:
                continue
            _, _, outcome = self._wheel.standing(row.id, row.due_ms)
            if outcome is None:
                later.add(row.id)
            elif outcome.name != "CANCELLED":
                return None
        for row in rows:
            if row.id in later:
                self._wheel.cancel(row.id, row.due_ms)
        counts = list(old.counts)
        counts[RUN_MADE] -= len(later)
        counts[RUN_CANCELLED] += len(later)
        kept = [run._replace(outcome=RUN_CANCELLED) if run.id in later else run for run in old.last_runs()]
        new = old._replace(
            counts=tuple(counts),
            # A run made for the plan before the last put does not count.
            counted=max(0, old.counted - len(later)),
            runs=b"".join(map(pack_run, kept)),
            ahead=pack_ahead(row for row in rows if row.id not in later),
        )
        notes = [
            RunNote(old.name, old.revision, Run(row.planned_ms, row.due_ms, row.id, RUN_CANCELLED), 0)
            for row in rows
            if row.id in later
        ]
        if old.next_ms and old.next_ms <= from_ms:
            missed = Run(old.next_ms, old.next_ms, 0, RUN_MISSED)
            new = new.noting([missed])
            notes.append(RunNote(old.name, old.revision, missed, 0))
        return new, notes

    # -- runs

    def _make(self, make: MakeRuns, stamped_ms: int) -> ScheduleResult:
        plans: list[_Plan] = []
        seen: set[str] = set()
        stale = 0
        for row in make.rows:
            schedule = self._state.schedules.get(row.name)
            times = _times_of(row)
            if (
                schedule is None
                or times is None
                or row.name in seen
                or schedule.revision != row.revision
                or schedule.next_ms != row.expected_ms
                or not row.expected_ms
            ):
                stale += 1
                continue
            seen.add(row.name)
            plans.append(self._plan(schedule, row, times))
        notes = self._carry_out(plans, stamped_ms, make.now_ms or DUE_MS_MAX)
        return ScheduleResult(notes=tuple(notes), stale_rows=stale)

    def _plan(self, schedule: Schedule, row: ScheduleRuns, times: list[_Times]) -> _Plan:
        runs: list[Run] = []
        if row.missed:
            runs.append(Run(row.missed_first_ms, row.missed_last_ms, 0, RUN_MISSED, row.missed))
        topic = self._topic(schedule)
        free = schedule.overlap or topic is None or not self._unsettled(schedule, topic.topic_id)
        left = schedule.runs_left
        for planned_ms, due_ms in times:
            if not left:
                break
            if topic is None:
                runs.append(Run(planned_ms, planned_ms, 0, RUN_NO_TOPIC))
                continue
            if not free:
                runs.append(Run(planned_ms, planned_ms, 0, RUN_SKIPPED_OVERLAP))
                continue
            runs.append(Run(planned_ms, due_ms, 0, RUN_MADE))
            left -= 1
            free = schedule.overlap
        return _Plan(schedule._replace(next_ms=row.next_ms if left else 0), topic, runs)

    def _extra(self, extra: ExtraRuns, stamped_ms: int) -> ScheduleResult:
        schedule = self._state.schedules.get(extra.name)
        if schedule is None:
            return ScheduleResult(failure=unknown_schedule(extra.name))
        given = next((answer for answer in schedule.answers if answer.request_id == extra.request_id), None)
        if given is not None:
            if (given.outcome, given.from_ms, given.until_ms) != (extra.outcome, extra.from_ms, extra.until_ms):
                text = f"request {extra.request_id} of schedule {extra.name} was another one"
                facts = {"field": "request_id", "value": extra.request_id}
                return ScheduleResult(failure=Failure(pb.NAME_TAKEN, text, facts))
            return ScheduleResult(schedule, repeated=True, answer=given)
        if schedule.revision != extra.read_revision:
            return STALE
        topic = self._topic(schedule)
        if topic is None:
            facts = {"field": "topic", "value": schedule.topic}
            return ScheduleResult(failure=Failure(pb.UNKNOWN_NAME, f"no topic {schedule.topic} exists", facts))
        count = len(extra.planned_ms) // 8
        wrong = len(extra.planned_ms) % 8 or extra.outcome not in (RUN_TRIGGERED, RUN_BACKFILLED)
        if wrong or not 0 <= extra.due_ms <= DUE_MS_MAX:
            return ScheduleResult(failure=invalid("due_ms", extra.due_ms, f"0 to {DUE_MS_MAX}").failure)
        planned = np.frombuffer(extra.planned_ms, "<i8").tolist()
        runs = [Run(planned_ms, extra.due_ms, 0, extra.outcome) for planned_ms in planned]
        notes = self._carry_out([_Plan(schedule, topic, runs)], stamped_ms, DUE_MS_MAX)
        packed = pack_run(notes[-1].run) if extra.outcome == RUN_TRIGGERED and notes else b""
        answer = Answer(
            extra.request_id, extra.outcome, extra.from_ms, extra.until_ms, count, extra.next_from_ms, packed
        )
        done = self._state.schedules.get(extra.name)
        assert done is not None
        done = done._replace(answers=(*done.answers, answer)[-ANSWERS_KEPT:])
        self._state.schedules.put(done)
        return ScheduleResult(done, notes=tuple(notes), answer=answer)

    def _carry_out(self, plans: list[_Plan], stamped_ms: int, now_ms: int) -> list[RunNote]:
        """Append the messages of all runs, then note the runs. Returns the notes, in the order of the plans.

        A run that was made ahead is forgotten once it is dispatched and was planned for `now_ms` or earlier: a change
        must take effect after one that is dispatched ahead of its planned time."""
        ids, due_ms = self._append(plans, stamped_ms)
        notes: list[RunNote] = []
        at = 0
        for plan in plans:
            schedule, topic = plan.schedule, plan.topic
            topic_id = topic.topic_id if topic is not None else 0
            runs: list[Run] = []
            made: list[Ahead] = []
            for run in plan.runs:
                if run.outcome in MESSAGES:
                    run = run._replace(at_ms=due_ms[at], id=ids[at])
                    at += 1
                    if run.outcome == RUN_MADE:
                        made.append(Ahead(run.planned_ms, run.at_ms, run.id))
                runs.append(run)
            if made:
                waiting = [row for row in schedule.runs_ahead() if row.planned_ms > now_ms or not self._gone(row)]
                last = made[-1]
                schedule = schedule._replace(
                    ahead=pack_ahead([*waiting, *made]), last_id=last.id, last_due_ms=last.due_ms
                )
            self._state.schedules.put(schedule.noting(runs))
            notes += [RunNote(schedule.name, schedule.revision, run, topic_id) for run in runs]
        return notes

    def _gone(self, row: Ahead) -> bool:
        """Whether a run can no longer be cancelled."""
        return self._wheel.standing(row.id, row.due_ms)[2] is not None

    def _cancelled(self, id: int, due_ms: int) -> bool:
        outcome = self._wheel.standing(id, due_ms)[2]
        return outcome is not None and outcome.name == "CANCELLED"

    def _newest_made(self, schedule: Schedule) -> tuple[int, int]:
        """Id and due time of the newest run of the plan that is not cancelled, as far as it is remembered; zeros:
        none."""
        runs = [(row.planned_ms, row.id, row.due_ms) for row in schedule.runs_ahead()]
        runs += [(run.planned_ms, run.id, run.at_ms) for run in schedule.last_runs() if run.outcome == RUN_MADE]
        newest_first = ((id, due_ms) for _, id, due_ms in sorted(runs, reverse=True))
        return next((run for run in newest_first if not self._cancelled(*run)), (0, 0))

    def _append(self, plans: list[_Plan], stamped_ms: int) -> tuple[list[int], list[int]]:
        """Append a message for each run that makes one; their ids and the due times that hold, in that order."""
        rows: list[tuple[Schedule, int, Run]] = [
            (plan.schedule, plan.topic.topic_id, run)
            for plan in plans
            if plan.topic is not None
            for run in plan.runs
            if run.outcome in MESSAGES
        ]
        if not rows:
            return [], []
        order = sorted(range(len(rows)), key=lambda place: rows[place][2].at_ms)
        units = np.zeros(len(rows), UNIT)
        columns: list[tuple[int, int, int, int, int, int, int]] = []
        records: list[bytes] = []
        for place in order:
            schedule, topic_id, run = rows[place]
            record, meta_size = schedule.record(run.planned_ms)
            records.append(record)
            columns.append(
                (
                    run.at_ms,
                    len(record),
                    meta_size,
                    topic_id,
                    schedule.tag_hash,
                    schedule.tag_mask,
                    schedule.key_hash,
                )
            )
        names = ("due_requested_ms", "size", "meta_size", "topic_id", "tag_hash", "tag_mask", "key_hash")
        for name, column in zip(names, zip(*columns, strict=True), strict=True):
            units[name] = column
        units["scheduled_ms"] = stamped_ms
        units["flags"] = np.where(units["tag_hash"] != 0, ONE_TAG, 0)
        appended = self._wheel.append(units, b"".join(records)).tolist()
        ids, due_ms = [0] * len(rows), [0] * len(rows)
        for place, number, due in zip(order, appended, units["due_ms"].tolist(), strict=True):
            ids[place], due_ms[place] = number, due
        return ids, due_ms

    # -- what holds a run up

    def _topic(self, schedule: Schedule) -> Topic | None:
        topic = self._state.topics.named(schedule.topic)
        return None if topic is None or topic.closing else topic

    def _unsettled(self, schedule: Schedule, topic_id: int) -> bool:
        """Whether the last run of the plan is pending, or a group of the topic has not settled it."""
        last_id, last_due_ms = schedule.last_id, schedule.last_due_ms
        return bool(last_id) and unsettled(self._state.groups, self._wheel, topic_id, last_id, last_due_ms)


def _times_of(row: ScheduleRuns) -> list[_Times] | None:
    """The runs of a row; None: its columns do not fit each other, which no sound master writes."""
    if len(row.planned_ms) % 8 or len(row.planned_ms) != len(row.due_ms):
        return None
    due_ms = np.frombuffer(row.due_ms, "<i8").tolist()
    if due_ms and not 0 <= min(due_ms) <= max(due_ms) <= DUE_MS_MAX:
        return None
    return [_Times(*pair) for pair in zip(np.frombuffer(row.planned_ms, "<i8").tolist(), due_ms, strict=True)]


def run_of(answer: Answer) -> Run:
    """The run of an answer to a trigger."""
    return unpack_run(answer.run)
