"""Bugs of recurring schedules; mutations.py knows them all."""

from __future__ import annotations

from typing import Any

from tickwheel.chaos.sim.mutation_table import Patches, aimed, mutation
from tickwheel.node.core.schedule.planner import Planner
from tickwheel.node.state.recurring import Recurring
from tickwheel.node.state.schedules import Schedules
from tickwheel.replication.cluster_clock import ClusterClock

TIMETABLES = aimed("kill", schedules=1)
CUTS = aimed("kill", "freeze", "handover", schedules=1)


@mutation(Recurring, "_plan", aim=TIMETABLES)
def next_time_not_advanced(original: Any, self: Recurring, schedule: Any, row: Any, times: Any) -> Any:
    """The next planned time is not passed by the command that makes the run."""
    plan = original(self, schedule, row, times)
    if plan.runs and plan.runs[-1].planned_ms % 7_000 == 0:
        plan.schedule = plan.schedule._replace(next_ms=schedule.next_ms)
    return plan


@mutation(aim=TIMETABLES)
def next_run_by_own_clock(patches: Patches) -> None:
    """The next planned time comes from the clock of the node that applies the command."""
    clocks: dict[Recurring, ClusterClock] = {}

    def __init__(original: Any, self: Planner, core: Any, *others: Any) -> None:
        clocks[core.state._recurring] = core.clock
        original(self, core, *others)

    def _plan(original: Any, self: Recurring, schedule: Any, row: Any, times: Any) -> Any:
        plan = original(self, schedule, row, times)
        clock = clocks.get(self)
        if plan.schedule.next_ms and clock is not None and clock.known:
            interval_ms = schedule.definition(content=False).spec.interval_ms
            next_ms = (clock.now_ms() // interval_ms + 1) * interval_ms
            plan.schedule = plan.schedule._replace(next_ms=next_ms)
        return plan

    patches.replace(Planner, "__init__", __init__)
    patches.replace(Recurring, "_plan", _plan)


@mutation(Recurring, "_extra", aim=CUTS)
def requests_forgotten(original: Any, self: Recurring, extra: Any, stamped_ms: int) -> Any:
    """A schedule forgets which triggers and backfills it has carried out."""
    schedule = self._state.schedules.get(extra.name)
    if schedule is not None:
        self._state.schedules.put(schedule._replace(answers=()))
    return original(self, extra, stamped_ms)


@mutation(Recurring, "_stopped", aim=TIMETABLES)
def runs_ahead_not_cancelled(original: Any, self: Recurring, old: Any, from_ms: int) -> Any:
    """Runs made ahead outlive a pause, a replacement and a deletion."""
    return original(self, old, max([from_ms, *(row.planned_ms for row in old.runs_ahead())]))


@mutation(aim=CUTS)
def compare_and_set_left_out(patches: Patches) -> None:
    """A command of another revision or planned time counts."""

    def _make(original: Any, self: Recurring, command: Any, stamped_ms: int) -> Any:
        for row in command.rows:
            found = self._state.schedules.get(row.name)
            if found is not None and found.next_ms:
                row.revision, row.expected_ms = found.revision, found.next_ms
        return original(self, command, stamped_ms)

    def _resting(original: Any, self: Planner, now: Any) -> bool:
        self._under_way = False
        return bool(original(self, now))

    patches.replace(Recurring, "_make", _make)
    patches.replace(Planner, "_resting", _resting)


@mutation(Schedules, "capture", aim=TIMETABLES)
def schedules_not_checkpointed(original: Any, self: Schedules) -> Any:
    """The runs of a schedule are not in the checkpoint."""
    return [found._replace(ahead=b"") for found in original(self)]
