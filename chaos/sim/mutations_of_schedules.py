"""Bugs of recurring schedules; mutations.py knows them all."""

from __future__ import annotations

from typing import Any

from tickwheel.chaos.sim.aims import Aim
from tickwheel.chaos.sim.mutation_table import Patches, mutation
from tickwheel.node.core.schedule.planner import Planner
from tickwheel.node.state.recurring import Recurring
from tickwheel.node.state.schedules import Schedules
from tickwheel.replication.cluster_clock import ClusterClock

TIMETABLES = Aim(("kill",), shape=(("schedules", 1),))
CUTS = Aim(("kill", "freeze", "handover"), shape=(("schedules", 1),))


@mutation("the next planned time is not passed by the command that makes the run", aim=TIMETABLES)
def next_time_not_advanced(patches: Patches) -> None:
    def make(original: Any) -> Any:
        def _plan(self: Recurring, schedule: Any, row: Any, times: Any) -> Any:
            plan = original(self, schedule, row, times)
            if plan.runs and plan.runs[-1].planned_ms % 7_000 == 0:
                plan.schedule = plan.schedule._replace(next_ms=schedule.next_ms)
            return plan

        return _plan

    patches.replace(Recurring, "_plan", make)


@mutation("the next planned time comes from the clock of the node that applies the command", aim=TIMETABLES)
def next_run_by_own_clock(patches: Patches) -> None:
    clocks: dict[Recurring, ClusterClock] = {}

    def make_init(original: Any) -> Any:
        def __init__(self: Planner, core: Any, *others: Any) -> None:
            clocks[core.state._recurring] = core.clock
            original(self, core, *others)

        return __init__

    def make_plan(original: Any) -> Any:
        def _plan(self: Recurring, schedule: Any, row: Any, times: Any) -> Any:
            plan = original(self, schedule, row, times)
            clock = clocks.get(self)
            if plan.schedule.next_ms and clock is not None and clock.known:
                interval_ms = schedule.definition(content=False).spec.interval_ms
                next_ms = (clock.now_ms() // interval_ms + 1) * interval_ms
                plan.schedule = plan.schedule._replace(next_ms=next_ms)
            return plan

        return _plan

    patches.replace(Planner, "__init__", make_init)
    patches.replace(Recurring, "_plan", make_plan)


@mutation("a schedule forgets which triggers and backfills it has carried out", aim=CUTS)
def requests_forgotten(patches: Patches) -> None:
    def make(original: Any) -> Any:
        def _extra(self: Recurring, extra: Any, stamped_ms: int) -> Any:
            schedule = self._state.schedules.get(extra.name)
            if schedule is not None:
                self._state.schedules.put(schedule._replace(answers=()))
            return original(self, extra, stamped_ms)

        return _extra

    patches.replace(Recurring, "_extra", make)


@mutation("runs made ahead outlive a pause, a replacement and a deletion", aim=TIMETABLES)
def runs_ahead_not_cancelled(patches: Patches) -> None:
    def make(original: Any) -> Any:
        def _stopped(self: Recurring, old: Any, from_ms: int) -> Any:
            return original(self, old, max([from_ms, *(row.planned_ms for row in old.runs_ahead())]))

        return _stopped

    patches.replace(Recurring, "_stopped", make)


@mutation("a command of another revision or planned time counts", aim=CUTS)
def compare_and_set_left_out(patches: Patches) -> None:
    def make(original: Any) -> Any:
        def _make(self: Recurring, command: Any, stamped_ms: int) -> Any:
            for row in command.rows:
                found = self._state.schedules.get(row.name)
                if found is not None and found.next_ms:
                    row.revision, row.expected_ms = found.revision, found.next_ms
            return original(self, command, stamped_ms)

        return _make

    patches.replace(Recurring, "_make", make)

    def resting(original: Any) -> Any:
        def _resting(self: Planner, now: Any) -> bool:
            self._under_way = False
            return bool(original(self, now))

        return _resting

    patches.replace(Planner, "_resting", resting)


@mutation("the runs of a schedule are not in the checkpoint", aim=TIMETABLES)
def schedules_not_checkpointed(patches: Patches) -> None:
    def make(original: Any) -> Any:
        def capture(self: Schedules) -> Any:
            return [found._replace(ahead=b"") for found in original(self)]

        return capture

    patches.replace(Schedules, "capture", make)
