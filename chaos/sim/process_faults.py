"""Faults of processes and of the power of machines, for `faults.KINDS`."""

from __future__ import annotations

import random

from tickwheel.chaos.sim import clock_faults
from tickwheel.chaos.sim.fault import Active, Counted, Course, Going, Scene, excused, lost_on, other_than_master
from tickwheel.chaos.sim.network_faults import block, links_of
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.world import MS


def kill(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    was_running = machine.process is not None
    machine.kill()
    yield
    machine.start()
    return int(was_running)


def power(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    before = lost_on(machine)
    machine.lose_power()
    lost = lost_on(machine) - before
    yield
    machine.start()
    return lost


def kill_all(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    running = [m for m in scene.machines if m.process is not None]
    left = list(running)

    def kill(one: Machine) -> None:
        if one in left:
            left.remove(one)
            one.kill()

    for one in running:
        scene.world.after(rng.randrange(1, 50 * MS), kill, one)
    yield
    # Kill the processes still alive before starting all: nothing would start them after a later kill.
    for one in list(left):
        kill(one)
    start_all(scene, rng)
    return len(running)


def power_all(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    before = lost_on(*scene.machines)
    for one in scene.machines:
        one.lose_power()
    lost = lost_on(*scene.machines) - before
    yield
    start_all(scene, rng)
    return lost


def power_slaves(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    """All but the master lose power and come back to elect one of themselves: the master is cut off and dies."""
    isolation = Active(block(links_of(scene, machine)))
    slaves = [one for one in scene.machines if one is not machine]
    before = lost_on(*slaves)
    for one in slaves:
        one.lose_power()
        scene.world.after(rng.randrange(1, 200 * MS), one.start)
    lost = lost_on(*slaves) - before
    yield
    machine.lose_power()
    isolation.end()
    scene.world.after(rng.randrange(1, 200 * MS), machine.start)
    return lost


def wrong_start(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    """All processes are killed and start again while one machine's wall clock is ahead."""
    clock = Active(clock_faults.ahead(scene, machine, going, rng))
    Active(kill_all(scene, machine, going, rng))
    for one in scene.machines:
        scene.world.after(rng.randrange(60 * MS, 300 * MS), one.start)
    yield
    clock.end()
    return clock.evidence


def start_all(scene: Scene, rng: random.Random) -> None:
    for one in scene.machines:
        scene.world.after(rng.randrange(1, 400 * MS), one.start)


def restart(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    was_running = machine.process is not None
    machine.stop()
    yield
    machine.start()
    return int(was_running)


def freeze(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Counted:
    if machine.process is None or machine.frozen:
        return
    turns, boot = machine.turns, machine.boot
    machine.freeze()
    yield
    if machine.boot == boot and machine.frozen:
        going.hits = machine.waiting + int(machine.turns == turns)
        machine.thaw()


def failed_apply(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    """A bug of ours: what a log entry does to the state raises. The process must stop, once."""
    before = machine.applies_failed
    with excused(scene, machine):
        machine.fail_applies = 1
        yield
        machine.fail_applies = 0
    return machine.applies_failed - before


def full_voter(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    """A slave's disk is full when the others go on to another term; killed, it comes back with room on its disk."""
    slave = other_than_master(scene, machine)
    before = slave.disk.counters().writes_refused

    def lose_master() -> None:
        master = scene.master()
        if master is not None and master is not slave:
            master.kill()
            scene.world.after(rng.randrange(1_500 * MS, 2_500 * MS), master.start)

    with excused(scene, slave):
        slave.disk.fill(0)
        going.after(rng.randrange(1, 200 * MS), lose_master)
        yield
        slave.kill()
        slave.disk.make_room()
        scene.world.after(rng.randrange(1, 100 * MS), slave.start)
    return slave.disk.counters().writes_refused - before
