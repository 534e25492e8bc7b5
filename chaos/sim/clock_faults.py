"""Faults of clocks, for `faults.KINDS`.

A majority of the members always has a right clock. Without one the cluster's time would be wrong by design, and no
checker could judge it. So once a minority of the clocks is wrong, a further fault hits one of these again. Directed
tests (tests/chaos/test_clock_cases.py) cover the rest: all clocks wrong, or none agreeing.
"""

from __future__ import annotations

import random

from tickwheel.chaos.sim.fault import Course, Going, Scene
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.world import MS

SKEWS_MS = (-3_600_000, -600_000, -5_000, -200, -20, 20, 200, 5_000, 600_000, 3_600_000)
DRIFTS_PPM = (-20_000, -1_000, -100, 100, 1_000, 20_000)
DRIFT_ALLOWANCE_MS = 5
"""An oscillator that is off by more than a node assumes shows only with the next agreement."""

ECHO_NS = 2_000 * MS
"""Other nodes still believe readings of a wrong clock for this long after it was set right."""


def _strike(scene: Scene, machine: Machine, rng: random.Random) -> Machine:
    """Choose the machine whose clock becomes wrong: `machine`, unless that would leave no majority of right clocks.

    Newcomers that do not count yet are none, and members beyond the founders' number may leave again.
    """
    operators = scene.operators
    wrong = [one for one in scene.machines if one.clock.faults]
    counting = [
        one for one in scene.machines if not one.joining or (operators is not None and one.name in operators.promoted)
    ]
    newcomers = [one for one in scene.machines if one not in counting]
    if counting == [machine] and newcomers:
        machine = rng.choice(newcomers)  # alone it is the majority
    elif wrong and machine not in wrong and len(wrong) >= (min(len(counting), len(scene.founders)) - 1) // 2:
        machine = rng.choice(wrong)
    return machine


def _wrong(scene: Scene, struck: Machine) -> Course:
    """The machine's clock is wrong."""
    clock = struck.clock
    before = clock.wrong_readings
    clock.faults += 1

    def over() -> None:
        clock.faults -= 1

    yield
    clock.heal()
    scene.world.after(ECHO_NS, over)
    return clock.wrong_readings - before


def skew(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    """The wall clock is off by up to an hour."""
    struck = _strike(scene, machine, rng)
    struck.clock.skew_ms = rng.choice(SKEWS_MS)
    return _wrong(scene, struck)


def ahead(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    """The wall clock is ahead by seconds or more: what is delivered by it is early."""
    struck = _strike(scene, machine, rng)
    struck.clock.skew_ms = rng.choice([skew_ms for skew_ms in SKEWS_MS if skew_ms >= 1_000])
    return _wrong(scene, struck)


def drift(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    """Wall and monotonic clock run fast or slow, by up to 2 %; in the end the wall clock is set right."""
    struck = _strike(scene, machine, rng)
    struck.clock.set_drift(rng.choice(DRIFTS_PPM))
    return _wrong(scene, struck)


def steps(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    """The wall clock steps forth and back, again and again."""
    struck = _strike(scene, machine, rng)

    def step() -> None:
        struck.clock.skew_ms = rng.choice((0, *SKEWS_MS))

    going.again(step, lambda: rng.randrange(20 * MS, 1_500 * MS))
    return (yield from _wrong(scene, struck))
