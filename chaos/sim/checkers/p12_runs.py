"""P12: each planned time of a schedule has its run exactly once, or is noted as skipped or missed; and nodes agree.
A trigger or backfill that is repeated makes nothing again.

Judges what nodes did when they applied the log, the first node that gets to an entry for what it did, all others for
doing the same. The plans of a run are intervals, so the checker knows every planned time by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history import Healed
from tickwheel.chaos.sim.history_operators import RunSeen, ScheduleChanged
from tickwheel.node.state.schedules import ANSWERS_KEPT

COUNTED_MAX = 100
"""Planned times that one note of missed ones counts at most."""
SOON_MS = 6_000
"""Without faults, a planned time is passed no later than this."""


@dataclass(slots=True)
class _Plan:
    revision: int
    interval_ms: int
    next_ms: int
    """0: none, as while it is paused."""


@dataclass(slots=True)
class _Schedule:
    plan: _Plan | None = None
    live: set[int] = field(default_factory=set)
    """Planned times with a run that was made by the plan and not cancelled."""
    requests: dict[str, int] = field(default_factory=dict)
    """The last triggers and backfills, oldest first, and the entry that carried each out."""


class RunsOnce(Checker):
    """Also tells that a plan stood still although no fault was there."""

    promise = "P12"

    def __init__(self) -> None:
        self._healed_ms = 0
        self._schedules: dict[str, _Schedule] = {}
        self._seen: dict[tuple[int, int], tuple[object, ...]] = {}

    def _on_schedule_changed(self, record: ScheduleChanged) -> None:
        what = (record.name, record.change, record.from_ms, record.revision, record.next_ms)
        if self._first(record.index, -1 - record.number, what):
            self._changed(record)

    def _on_run_seen(self, record: RunSeen) -> None:
        what = (record.name, record.revision, record.outcome, record.planned_ms, record.at_ms, record.id)
        if self._first(record.index, record.number, what):
            self._ran(record)

    def _on_healed(self, record: Healed) -> None:
        self._healed_ms = self.now_ms

    def _first(self, index: int, number: int, what: tuple[object, ...]) -> bool:
        """Whether no node has done this before; another one that did it otherwise breaks the promise."""
        before = self._seen.setdefault((index, number), what)
        if before is what:
            return True
        if before != what:
            self.broken(f"entry {index}: a node did {what}, another one {before}")
        return False

    def _changed(self, record: ScheduleChanged) -> None:
        schedule = self._schedules.setdefault(record.name, _Schedule())
        plan = schedule.plan
        if plan is not None and plan.next_ms and plan.next_ms <= record.from_ms:
            self.broken(f"{record.name}: {plan.next_ms} was planned, and has no run and no note")
        later = [planned_ms for planned_ms in schedule.live if planned_ms > record.from_ms]
        if later and record.change != "resume":
            self.broken(f"{record.name}: runs of {sorted(later)[:3]} outlive a {record.change}")
        if record.change == "delete":
            # Runs that were dispatched ahead of their times stay; another schedule of this name has runs of its own.
            schedule.plan = None
            schedule.live.clear()
            schedule.requests.clear()
            return
        if record.next_ms:
            first = (record.from_ms // record.interval_ms + 1) * record.interval_ms
            if record.next_ms != first:
                self.broken(f"{record.name}: the next time is {record.next_ms} and not {first}")
        schedule.plan = _Plan(record.revision, record.interval_ms, record.next_ms)

    def _ran(self, record: RunSeen) -> None:
        schedule = self._schedules.setdefault(record.name, _Schedule())
        name = f"{record.name} (revision {record.revision})"
        if record.outcome == "RUN_CANCELLED":
            if record.planned_ms not in schedule.live:
                self.broken(f"{name}: the run of {record.planned_ms} is cancelled, and there was none")
            schedule.live.discard(record.planned_ms)
            return
        if record.outcome in ("RUN_TRIGGERED", "RUN_BACKFILLED"):
            before = schedule.requests.setdefault(record.request_id, record.index)
            if before != record.index:
                self.broken(f"{name}: request {record.request_id} of entry {before} is carried out again")
            if len(schedule.requests) > ANSWERS_KEPT:
                del schedule.requests[next(iter(schedule.requests))]
            return
        plan = schedule.plan
        if plan is None or plan.revision != record.revision:
            self.broken(f"{name}: {record.outcome} of a plan that no longer holds")
        if record.outcome == "RUN_MADE":
            if record.planned_ms in schedule.live:
                self.broken(f"{name}: the run of {record.planned_ms} is made twice")
            if record.at_ms < record.planned_ms:
                self.broken(f"{name}: the run of {record.planned_ms} is due at {record.at_ms}")
            schedule.live.add(record.planned_ms)
        if record.planned_ms != plan.next_ms:
            self.broken(f"{name}: {record.outcome} of {record.planned_ms}; next was {plan.next_ms}")
        last_ms = record.at_ms if record.outcome == "RUN_MISSED" else record.planned_ms
        count = (last_ms - record.planned_ms) // plan.interval_ms + 1
        if record.outcome == "RUN_MISSED" and record.times != min(count, COUNTED_MAX):
            self.broken(f"{name}: {count} planned times were missed, and {record.times} are told")
        plan.next_ms = last_ms + plan.interval_ms
        wall_ms = self.now_ms
        if self._healed_ms and wall_ms - self._healed_ms > 2 * SOON_MS and record.planned_ms < wall_ms - SOON_MS:
            self.broken(f"{name}: {record.planned_ms} is passed {wall_ms - record.planned_ms} ms later")
