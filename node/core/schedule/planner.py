"""Makes the runs of recurring schedules while this node is master.

A tick that finds schedules which want a look (state/schedules.py keeps when) computes what each is to do now, and
proposes it for all of them in one command. Apply compares each row with the state (state/recurring.py), so this part
keeps nothing that has to be right: a command that is lost, late or repeated is made up for by the next look. One
command at a time is under way.

A run is put into the wheel AHEAD_MS before its planned time, or up to GATHER_MS earlier: runs that are planned for
different moments share a command, since the number of entries is what costs. So it is replicated when it comes due, and
is dispatched to the millisecond even through a change of masters. Planned times that are older than a schedule's
`late_ms_max` are missed, and its policy decides; younger ones are always made.

What holds up schedules of clients (limits on pending messages, quotas of the owner, full ticks, full disks) holds up a
run as well: the look is repeated every RETRY_MS until there is room. A run that has waited for longer than
`late_ms_max` is a missed one like any other, noted with its schedule. A zone or cron text that only another master knew
holds up its schedules alone, and the operator is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.core.kernel import Kernel
from tickwheel.node.core.part import Part
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.schedule.calendar import Calendar, calendar_of
from tickwheel.node.core.schedule.flow import FlowControl
from tickwheel.node.core.schedule.intake import KIND_DUE, IncomingBatch
from tickwheel.node.core.schedule.publisher import spread
from tickwheel.node.core.world import ClusterMs, Now, Reported
from tickwheel.node.failure import Failure, RequestError
from tickwheel.node.metrics import MetricValue
from tickwheel.node.state.machine import CommandResult
from tickwheel.node.state.publishing import DUE_MS_MAX
from tickwheel.node.state.results import ScheduleResult
from tickwheel.node.state.schedules import AHEAD_MS, NEVER, Schedule
from tickwheel.node.state.schema import RUNS_AHEAD_LEVEL
from tickwheel.proto.log_pb2 import Command, MakeRuns, ScheduleCommand, ScheduleRuns
from tickwheel.proto.parsing import parsed
from tickwheel.proto.schedules_pb2 import MISSED_ALL, MISSED_LAST, ScheduleDefinition, ScheduleSpec

ROWS_MAX = 250
"""Schedules in one command: some milliseconds of apply."""
RUNS_MAX = 500
"""Runs in one command."""
RUNS_OF_ONE_MAX = 100
"""Runs of one schedule in one command; the next command goes on."""
BYTES_MAX = 512 << 10
"""Payloads that the runs of one command copy, unless a single one is larger."""
STEPS_MAX = 1_000
"""Planned times computed for one command: some milliseconds."""
MISSED_COUNTED_MAX = 100
"""Planned times counted in one gap. A schedule for every second that missed a year is not worth counting."""
LATE_MS_DEFAULT = 60_000
RETRY_MS = 500
UNKNOWN_RETRY_MS = 10_000
"""Between two looks at a schedule that this node cannot read: it will hardly learn to before it is started anew."""
TOLD_EVERY_MS = 60_000
"""Between two lines for the operator about such schedules."""
GATHER_MS = 250
"""A look also makes the runs that would want one within this. Less than RETRY_MS, so that what is held up rests."""
CALENDARS_KEPT = 4_096
CLIENT = "schedules"
"""Client name of runs, for client_quotas."""


@lru_cache(maxsize=CALENDARS_KEPT)
def _calendar(spec: bytes) -> Calendar:
    return calendar_of_spec(parsed(ScheduleSpec, spec))


def calendar_of_spec(spec: ScheduleSpec) -> Calendar:
    """The calendar of a spec. Raises RequestError, with the names of its fields."""
    return calendar_of(
        cron=spec.cron,
        zone=spec.zone,
        interval_ms=spec.interval_ms,
        start_ms=spec.start_ms,
        end_ms=spec.end_ms,
    )


def calendar_of_schedule(definition: ScheduleDefinition) -> Calendar:
    """The calendar of a schedule in the state; schedules with the same spec share it."""
    return _calendar(definition.spec.SerializeToString(deterministic=True))


class Planner(Part):
    of_master = True

    def __init__(
        self,
        core: Kernel,
        flow: FlowControl,
        full: Callable[[], Failure | None],
        all_understand: Callable[[int], bool],
    ) -> None:
        """`full`: why no message is accepted now. `all_understand`: every member reads a log of a level."""
        self._core = core
        self._all_understand = all_understand
        self._flow = flow
        self._full = full
        self._under_way = False
        self._mastership = 0
        self._not_before_ms = 0
        self._tell_from_ms = 0
        self.held_up = 0
        """Looks that found no room for a run."""

    def begin(self, term: int, now_ms: ClusterMs) -> None:
        self._mastership += 1
        self._under_way = False
        self._not_before_ms = 0

    def end(self, failure: Failure) -> None:
        """The answer to a command under way is of no use any more."""
        self._mastership += 1
        self._under_way = False

    def metrics(self) -> Mapping[str, MetricValue]:
        return {"schedule_runs_held_up": float(self.held_up)}

    def _resting(self, now: Now) -> bool:
        return self._under_way or not (now.acting and now.dispatching) or not self._core.clock.known

    def wait_ms(self, now: Now) -> int | None:
        """Until a schedule wants a look."""
        first_ms = self._core.state.schedules.first_look_ms
        if first_ms == NEVER or self._resting(now):
            return None
        return max(first_ms - now.cluster_ms, self._not_before_ms - now.steady_ms)

    def tick(self, now: Now) -> None:
        """Propose the runs of schedules that want a look. Nearly free while none does."""
        schedules = self._core.state.schedules
        if schedules.first_look_ms > now.cluster_ms or self._resting(now) or now.steady_ms < self._not_before_ms:
            return
        if self._full() is not None:
            self._pause(now)
            return
        look = self._look(now.cluster_ms)
        for schedule in schedules.wanting(now.cluster_ms + GATHER_MS, ROWS_MAX):
            # Whether a run overlaps is known at its planned time only.
            if not schedule.overlap and schedule.next_ms > now.cluster_ms:
                continue
            if look.full:
                break
            # A mistake over one schedule holds up that one alone.
            self._core.serving.side(partial(look.hold_up, schedule, UNKNOWN_RETRY_MS), look.take, schedule)
        self.held_up += look.held_up
        if look.unknown:
            self._tell(look, now)
        if look.make.rows:
            self._propose(look)

    async def catch_up(self, schedule: Schedule, until_ms: int, *, make: bool) -> bool:
        """Before a change that holds from `until_ms` on: pass the planned times of a schedule up to then by their runs,
        as a look would. Not `make`, or no room: by a note that they were missed. False: neither is possible, since this
        node does not know the zone or cron text."""
        look = self._look(self._core.clock.now_ms())
        if make and self._full() is None:
            look.take(schedule)
        try:
            if not look.make.rows:
                look.pass_by(schedule, until_ms)
            await self._core.proposer.propose(Command(schedule=ScheduleCommand(make=look.make)), ScheduleResult)
        except RequestError:
            if look.make.rows:
                raise
            return False
        finally:
            self._flow.answered(look.admitted)
        return True

    def _look(self, now_ms: int) -> _Look:
        look = _Look(self._core, self._flow, now_ms)
        if self._all_understand(RUNS_AHEAD_LEVEL):
            look.make.now_ms = now_ms
        return look

    def _pause(self, now: Now) -> None:
        self.held_up += 1
        self._not_before_ms = now.steady_ms + RETRY_MS

    def _tell(self, look: _Look, now: Now) -> None:
        """Tell the operator of schedules that this node cannot read, now and then."""
        if now.steady_ms < self._tell_from_ms:
            return
        self._tell_from_ms = now.steady_ms + TOLD_EVERY_MS
        name, failure = look.unknown[0]
        facts: dict[str, object] = {
            "schedule": name,
            "field": failure.metadata["field"],
            "value": failure.metadata["value"],
            "others": len(look.unknown) - 1,
            "do": "update tzdata and tickwheel on this host and restart the node, transfer mastership to a node that"
            " knows the value, or put the schedule with another",
        }
        event = "runs of a schedule wait: this node does not know its zone or cron text"
        self._core.report(Reported("error", event, facts))

    def _propose(self, look: _Look) -> None:
        self._under_way = True
        mastership = self._mastership

        def ended(*, again: bool) -> None:
            self._flow.answered(look.admitted)
            if mastership != self._mastership:
                return
            self._under_way = False
            if again:
                # Somebody changed a schedule meanwhile, or the log is full: look again, but not at once.
                self._not_before_ms = self._core.steady_ms() + RETRY_MS // 10

        def applied(result: CommandResult) -> None:
            ended(again=isinstance(result, ScheduleResult) and result.stale_rows > 0)

        reply = Reply(applied, lambda failure: ended(again=True))
        self._core.proposer.submit(Command(schedule=ScheduleCommand(make=look.make)), reply)


class _Look:
    """One command in the making."""

    def __init__(self, core: Kernel, flow: FlowControl, now_ms: int) -> None:
        self._core = core
        self._flow = flow
        self._now_ms = now_ms
        self.make = MakeRuns()
        self.admitted: list[IncomingBatch] = []
        """What flow control counts until the command is answered."""
        self.held_up = 0
        self.unknown: list[tuple[str, Failure]] = []
        """Schedules whose plan this node cannot read, and why."""
        self._runs = 0
        self._bytes = 0
        self._steps = 0

    @property
    def full(self) -> bool:
        """Further schedules have to wait for the next command."""
        return self._runs >= RUNS_MAX or self._bytes >= BYTES_MAX or self._steps >= STEPS_MAX

    def take(self, schedule: Schedule) -> None:
        """Add what a schedule is to do now."""
        definition = parsed(ScheduleDefinition, schedule.plan)
        row = ScheduleRuns(name=schedule.name, revision=schedule.revision, expected_ms=schedule.next_ms)
        jitter_ms = definition.spec.jitter_ms
        try:
            planned = self._plan(schedule, definition, row, RUNS_OF_ONE_MAX)
            if len(planned) > 1 and not self._admits(schedule, planned, jitter_ms, row):
                # Limits that refuse many at once may have room for one.
                row = ScheduleRuns(name=row.name, revision=row.revision, expected_ms=row.expected_ms)
                planned = self._plan(schedule, definition, row, 1)
        except RequestError as error:
            # Accepted by a master with newer zone data or another version; it runs once a node that has these leads.
            self.unknown.append((schedule.name, error.failure))
            self.hold_up(schedule, UNKNOWN_RETRY_MS)
            return
        if len(planned) == 1 and not self._admits(schedule, planned, jitter_ms, row):
            self.hold_up(schedule)
            return
        self._runs += len(planned)
        self._bytes += len(planned) * (len(schedule.payload) + len(schedule.meta))
        self.make.rows.append(row)

    def pass_by(self, schedule: Schedule, until_ms: int) -> None:
        """Add a note that the planned times up to `until_ms` were missed. Raises RequestError like `_plan`."""
        calendar, first_ms = calendar_of_schedule(schedule.definition(content=False)), schedule.next_ms
        passed = [first_ms, *calendar.between(first_ms, until_ms, MISSED_COUNTED_MAX)]
        self.make.rows.add(
            name=schedule.name,
            revision=schedule.revision,
            expected_ms=first_ms,
            missed=min(len(passed), MISSED_COUNTED_MAX),
            missed_first_ms=first_ms,
            missed_last_ms=max(first_ms, calendar.last_until(until_ms) or 0),
            next_ms=calendar.next_after(max(first_ms, until_ms)) or 0,
        )

    def hold_up(self, schedule: Schedule, wait_ms: int = RETRY_MS) -> None:
        """Leave the schedule to a later look."""
        self.held_up += 1
        self._core.state.schedules.look_later(schedule.name, self._now_ms + wait_ms)

    def _plan(self, schedule: Schedule, definition: ScheduleDefinition, row: ScheduleRuns, runs_max: int) -> list[int]:
        """The planned times whose runs are to be made now, `runs_max` at most. Fills in what is missed, and what comes
        next. Raises RequestError: this node does not know the schedule's zone or cron text."""
        calendar, now_ms = calendar_of_schedule(definition), self._now_ms
        until_ms = now_ms + (AHEAD_MS + GATHER_MS if schedule.overlap else 0)
        limit = max(1, min(runs_max, RUNS_MAX - self._runs, schedule.runs_left))
        limit = max(1, min(limit, BYTES_MAX // max(1, len(schedule.payload))))
        made_from_ms = now_ms - (definition.late_ms_max or LATE_MS_DEFAULT)
        if definition.missed == MISSED_ALL:
            made_from_ms = min(made_from_ms, now_ms - definition.missed_window_ms)
        first_ms = schedule.next_ms
        planned: list[int] = []
        if first_ms < made_from_ms:
            planned += self._pass_over(first_ms, made_from_ms, calendar, definition.missed == MISSED_LAST, row)
            planned += calendar.between(made_from_ms - 1, until_ms, limit)
        elif first_ms <= until_ms:
            # It is run even if newer zone data no longer have it.
            planned += [first_ms, *calendar.between(first_ms, until_ms, limit - 1)]
        del planned[limit:]
        self._steps += 1 + len(planned)
        row.next_ms = calendar.next_after(max([made_from_ms - 1, first_ms - 1, *planned[-1:]])) or 0
        return planned

    def _pass_over(
        self, first_ms: int, before_ms: int, calendar: Calendar, make_last: bool, row: ScheduleRuns
    ) -> list[int]:
        """Note the planned times from `first_ms` to below `before_ms` as missed; `make_last`: but not the last one,
        which is returned."""
        passed = [first_ms, *calendar.between(first_ms, before_ms - 1, MISSED_COUNTED_MAX)]
        last_ms = calendar.last_until(before_ms - 1) or first_ms
        self._steps += 2 + len(passed)
        made: list[int] = []
        if make_last:
            made = [max(first_ms, last_ms)]
            passed = [at_ms for at_ms in passed if at_ms < made[0]]
            last_ms = calendar.last_until(made[0] - 1) or first_ms
        if passed:
            row.missed = min(len(passed), MISSED_COUNTED_MAX)
            row.missed_first_ms, row.missed_last_ms = first_ms, max(first_ms, last_ms)
        return made

    def _admits(self, schedule: Schedule, planned: list[int], jitter_ms: int, row: ScheduleRuns) -> bool:
        """Whether limits leave room for these runs; then they are counted, and their due times are drawn."""
        core = self._core
        count = len(planned)
        due_ms = np.array(planned, np.int64)
        if jitter_ms:
            due_ms = spread(due_ms, np.full(count, jitter_ms, np.int64), DUE_MS_MAX, core.random_bits)
        row.planned_ms, row.due_ms = np.array(planned, "<i8").tobytes(), due_ms.astype("<i8").tobytes()
        rights = core.state.settings.rights
        if not self._flow.limits(schedule.owner if rights else ""):
            return True
        batch = batch_of_runs(rights, schedule, due_ms)
        if self._flow.admit(batch, due_ms, self._now_ms) is not None:
            return False
        self.admitted.append(batch)
        return True


def batch_of_runs(rights: bool, schedule: Schedule, due_ms: NDArray[np.int64]) -> IncomingBatch:
    """The messages of runs as flow control counts them; `rights`: against the quotas of the schedule's owner."""
    count = len(due_ms)
    return IncomingBatch(
        producer_id="",
        sequence=0,
        count=count,
        topics=[schedule.topic],
        topic_of=None,
        when=due_ms,
        kinds=KIND_DUE,
        sizes=np.full(count, len(schedule.payload) + len(schedule.meta), np.uint32),
        records=schedule.payload * count,
        client=CLIENT,
        actor=schedule.owner if rights else "",
    )
