"""Faults of processes and of the power of machines, for `faults.KINDS`."""

from __future__ import annotations

import random
from collections.abc import Callable

from tickwheel.chaos.sim import clock_faults
from tickwheel.chaos.sim.fault import EXCUSE_ECHO_NS, Active, PlannedFault, Scene, excuse_over, nothing
from tickwheel.chaos.sim.network_faults import block, links_of
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.world import MS


def kill(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    was_running = machine.process is not None
    machine.kill()
    return Active(machine.start, lambda: int(was_running))


def power(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    before = machine.disk.counters()
    machine.lose_power()
    after = machine.disk.counters()
    lost = after.pages_lost + after.dir_changes_lost - before.pages_lost - before.dir_changes_lost
    return Active(machine.start, lambda: lost)


def kill_all(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    running = [m for m in scene.machines if m.process is not None]
    left, start = list(running), start_all(scene, rng)

    def kill(one: Machine) -> None:
        if one in left:
            left.remove(one)
            one.kill()

    def end() -> None:
        """Kill the processes still alive before starting all: nothing would start them after a later kill."""
        for one in list(left):
            kill(one)
        start()

    for one in running:
        scene.world.after(rng.randrange(1, 50 * MS), kill, one)
    return Active(end, lambda: len(running))


def power_all(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    before = sum(m.disk.counters().pages_lost + m.disk.counters().dir_changes_lost for m in scene.machines)
    for one in scene.machines:
        one.lose_power()
    lost = sum(m.disk.counters().pages_lost + m.disk.counters().dir_changes_lost for m in scene.machines) - before
    return Active(start_all(scene, rng), lambda: lost)


def power_slaves(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    """All but the master lose power and come back to elect one of themselves: the master is cut off and dies."""
    isolation = block(links_of(scene, machine))
    slaves = [one for one in scene.machines if one is not machine]
    before = sum(m.disk.counters().pages_lost + m.disk.counters().dir_changes_lost for m in slaves)
    for one in slaves:
        one.lose_power()
        scene.world.after(rng.randrange(1, 200 * MS), one.start)
    lost = sum(m.disk.counters().pages_lost + m.disk.counters().dir_changes_lost for m in slaves) - before

    def end() -> None:
        machine.lose_power()
        isolation.end()
        scene.world.after(rng.randrange(1, 200 * MS), machine.start)

    return Active(end, lambda: lost)


def wrong_start(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    """All processes are killed and start again while one machine's wall clock is ahead."""
    end, effect = clock_faults.ahead(scene, machine, rng)
    kill_all(scene, machine, planned, rng)
    for one in scene.machines:
        scene.world.after(rng.randrange(60 * MS, 300 * MS), one.start)
    return Active(end, effect)


def start_all(scene: Scene, rng: random.Random) -> Callable[[], None]:
    def start() -> None:
        for one in scene.machines:
            scene.world.after(rng.randrange(1, 400 * MS), one.start)

    return start


def restart(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    was_running = machine.process is not None
    machine.stop()
    return Active(machine.start, lambda: int(was_running))


def freeze(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    if machine.process is None or machine.frozen:
        return Active(nothing, lambda: 0)
    turns, boot = machine.turns, machine.boot
    waited = {"inputs": 0}
    machine.freeze()

    def end() -> None:
        if machine.boot == boot and machine.frozen:
            waited["inputs"] = machine.waiting + int(machine.turns == turns)
            machine.thaw()

    return Active(end, lambda: waited["inputs"])


def failed_apply(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    """A bug of ours: what a log entry does to the state raises. The process must stop, once."""
    before = machine.applies_failed
    machine.excuses += 1
    machine.fail_applies = 1

    def end() -> None:
        machine.fail_applies = 0
        scene.world.after(EXCUSE_ECHO_NS, excuse_over, machine)

    return Active(end, lambda: machine.applies_failed - before)


def full_voter(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    """A slave's disk is full when the others go on to another term; killed, it comes back with room on its disk."""
    slave = machine if machine is not scene.master() else next(one for one in scene.machines if one is not machine)
    before = slave.disk.counters().writes_refused
    over = {"yes": False}
    slave.excuses += 1
    slave.disk.fill(0)

    def lose_master() -> None:
        master = scene.master()
        if not over["yes"] and master is not None and master is not slave:
            master.kill()
            scene.world.after(rng.randrange(1_500 * MS, 2_500 * MS), master.start)

    def end() -> None:
        over["yes"] = True
        slave.kill()
        slave.disk.make_room()
        scene.world.after(rng.randrange(1, 100 * MS), slave.start)
        scene.world.after(EXCUSE_ECHO_NS, excuse_over, slave)

    scene.world.after(rng.randrange(1, 200 * MS), lose_master)
    return Active(end, lambda: slave.disk.counters().writes_refused - before)
