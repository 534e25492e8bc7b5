"""Members that come and go while everything else goes wrong, for `faults.KINDS`."""

from __future__ import annotations

import random

from tickwheel.chaos.sim.fault import Active, PlannedFault, Scene, nothing
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.world import MS

MEMBERS_MOST = 6
MEMBERS_LEAST = 3
LOOK_NS = 100 * MS


def newcomer(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    """A node with an empty disk joins: it learns, and counts once it has everything."""
    operators = scene.operators
    if operators is None or len(scene.machines) >= MEMBERS_MOST:
        return Active(nothing, lambda: 0)
    joined = scene.join()
    operators.add(joined)
    return Active(nothing, lambda: int(joined.name in operators.promoted))


def replace_member(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    """A newcomer, and the target is removed: before it is there, while it learns, or once it counts."""
    operators = scene.operators
    if operators is None or len(scene.machines) >= MEMBERS_MOST:
        return Active(nothing, lambda: 0)
    state = {"over": 0}
    first = rng.random() < 0.3 and len(scene.machines) >= MEMBERS_LEAST
    waits = rng.random() < 0.7
    if first:
        operators.remove(machine)
    joined = scene.join()
    operators.add(joined)

    def follow() -> None:
        if state["over"] or machine not in scene.machines:
            return
        if not waits or joined.name in operators.promoted:
            operators.remove(machine)
            return
        scene.world.after(LOOK_NS, follow)

    def end() -> None:
        state["over"] = 1

    if not first:
        scene.world.after(rng.randrange(500 * MS), follow)
    return Active(end, lambda: int(machine.name in operators.removed))
