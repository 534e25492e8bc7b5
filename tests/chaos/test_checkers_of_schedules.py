"""The checker of recurring schedules catches hand-made bad histories and lets their good twins pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.chaos.judging import Case, is_caught, judge
from tickwheel.chaos.sim.checkers.p12_runs import RunsOnce
from tickwheel.chaos.sim.history import Healed, Record, RunBegan
from tickwheel.chaos.sim.history_operators import RunSeen, ScheduleChanged
from tickwheel.chaos.sim.world import HOUR_MS, MS
from tickwheel.node.state.schedules import ANSWERS_KEPT

WALL_MS = 500_000 * HOUR_MS
BEGAN = RunBegan(0, WALL_MS, ("kill",), ("g",))


def changed(index: int, change: str, at_ms: int, *, next_ms: int = 0, revision: int = 1) -> ScheduleChanged:
    """A change of a schedule of every second, that holds from this moment on."""
    next_ms = WALL_MS + next_ms if next_ms else 0
    return ScheduleChanged(at_ms * MS, "n1", index, 0, "s", change, WALL_MS + at_ms, revision, 1_000, next_ms)


def seen(
    index: int, planned_ms: int, outcome: str = "RUN_MADE", *, at_ms: int = 0, last_ms: int = 0, times: int = 1
) -> RunSeen:
    """What became of a planned time, or of those up to `last_ms`."""
    planned_ms, due_ms = WALL_MS + planned_ms, WALL_MS + (last_ms or planned_ms)
    return RunSeen((at_ms or 600) * MS, "n1", index, 0, "s", 1, outcome, planned_ms, due_ms, index, times)


def extra(index: int, request_id: str) -> RunSeen:
    return replace(seen(index, 700, "RUN_TRIGGERED"), request_id=request_id)


def elsewhere(*records: RunSeen | ScheduleChanged) -> list[Record]:
    """Another node does the same later."""
    return [replace(record, node="n2", at_ns=record.at_ns + 50 * MS) for record in records]


PUT = changed(1, "put", 500, next_ms=1_000)
RUNS = [seen(2, 1_000), seen(3, 2_000), seen(4, 3_000)]
PAUSED = changed(5, "pause", 1_500)
CANCELLED = [replace(seen(5, 2_000, "RUN_CANCELLED"), number=0), replace(seen(5, 3_000, "RUN_CANCELLED"), number=1)]
RESUMED = changed(6, "resume", 1_700, next_ms=2_000, revision=2)
MANY = [extra(10 + number, f"r{number}") for number in range(1, ANSWERS_KEPT + 1)]

GOOD: dict[str, Case] = {
    "each once, on two nodes": (RunsOnce, [BEGAN, PUT, *RUNS, *elsewhere(PUT, *RUNS)]),
    "missed, then made": (
        RunsOnce,
        [BEGAN, PUT, seen(2, 1_000, "RUN_MISSED", last_ms=3_000, times=3), seen(3, 4_000)],
    ),
    "more missed than are counted": (
        RunsOnce,
        [BEGAN, PUT, seen(2, 1_000, "RUN_MISSED", last_ms=500_000, times=100)],
    ),
    "paused, and made again after that": (
        RunsOnce,
        [BEGAN, PUT, *RUNS, *CANCELLED, PAUSED, RESUMED, replace(seen(7, 2_000), revision=2)],
    ),
    "deleted": (RunsOnce, [BEGAN, PUT, seen(2, 1_000), changed(3, "delete", 1_500)]),
    "triggered twice by two requests": (RunsOnce, [BEGAN, PUT, extra(2, "a"), extra(3, "b")]),
    "triggered again when nobody remembers": (RunsOnce, [BEGAN, PUT, extra(2, "a"), *MANY, extra(40, "a")]),
    "a new schedule of the name remembers nothing": (
        RunsOnce,
        [BEGAN, PUT, extra(2, "a"), changed(3, "delete", 600), replace(PUT, index=4), extra(5, "a")],
    ),
    "a new schedule of the name has runs of its own": (
        RunsOnce,
        [BEGAN, PUT, seen(2, 1_000), changed(3, "delete", 1_000), replace(PUT, index=4), seen(5, 1_000)],
    ),
    "late, while faults were there": (RunsOnce, [BEGAN, PUT, seen(2, 1_000, at_ms=50_000)]),
}

BAD: dict[str, Case] = {
    "left out": (RunsOnce, [BEGAN, PUT, seen(2, 2_000)]),
    "made twice": (RunsOnce, [BEGAN, PUT, *RUNS, seen(5, 3_000)]),
    "skipped after it was made": (RunsOnce, [BEGAN, PUT, *RUNS, seen(5, 3_000, "RUN_SKIPPED_OVERLAP")]),
    "due before it is planned": (RunsOnce, [BEGAN, PUT, seen(2, 1_000, last_ms=999)]),
    "nodes differ in a run": (RunsOnce, [BEGAN, PUT, seen(2, 1_000), replace(seen(2, 1_000), node="n2", at_ms=5)]),
    "nodes differ in a change": (RunsOnce, [BEGAN, PUT, replace(PUT, node="n2", next_ms=WALL_MS + 2_000)]),
    "of an old revision": (RunsOnce, [BEGAN, PUT, replace(seen(2, 1_000), revision=7)]),
    "of a deleted one": (RunsOnce, [BEGAN, PUT, changed(2, "delete", 600), seen(3, 1_000)]),
    "not the first time from now on": (RunsOnce, [BEGAN, replace(PUT, next_ms=WALL_MS + 2_000)]),
    "its planned time has no run and no note": (RunsOnce, [BEGAN, PUT, changed(2, "delete", 1_500)]),
    "a run outlives the pause": (RunsOnce, [BEGAN, PUT, *RUNS, CANCELLED[0], PAUSED]),
    "cancelled, and never made": (RunsOnce, [BEGAN, PUT, seen(2, 1_000, "RUN_CANCELLED")]),
    "miscounted": (RunsOnce, [BEGAN, PUT, seen(2, 1_000, "RUN_MISSED", last_ms=3_000, times=2)]),
    "triggered twice by one request": (RunsOnce, [BEGAN, PUT, extra(2, "a"), extra(3, "a")]),
    "stood still without a fault": (RunsOnce, [BEGAN, PUT, Healed(2_000 * MS), seen(2, 1_000, at_ms=50_000)]),
}


@pytest.mark.parametrize("name", GOOD)
def test_sound_histories_pass(name: str) -> None:
    """Else a broken promise would prove nothing."""
    judge(GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_broken_promises_are_caught(name: str) -> None:
    """Each sentence of P12."""
    is_caught(BAD[name])
