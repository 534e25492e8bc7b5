"""Faults of disks, for `faults.KINDS`."""

from __future__ import annotations

import random
from fnmatch import fnmatchcase

from tickwheel.chaos.sim.fault import Course, Going, Scene, excused
from tickwheel.chaos.sim.history_machines import Booted
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.world import MS

STEPS_MOST = 40
"""The power fails within this many disk steps: about as many as a checkpoint takes."""
STEPS_OF_FILE = 8
"""Writing a file whole takes seven."""
KINDS_OF_FILES = (
    *("founding*", "manifest*", "leases*", "synced*", "wheel", "wheel/*", "state", "state/*"),
    *("journal", "journal/*.segment", "journal/hard_state*", "journal/newest*"),
    *("bulk", "bulk/*.part", "bulk/*.bundle", "staging", "staging/*", "staging/complete*"),
)
"""Most steps of a disk are those of the journal: a power loss at any step hardly ever meets others."""


def slow_disk(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    factor = rng.choice((5.0, 20.0, 60.0))
    before = machine.disk.counters().fsyncs
    machine.work_faults.slowness *= factor
    yield
    machine.work_faults.slowness /= factor
    return machine.disk.counters().fsyncs - before


def failed_sync(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    before = machine.disk.counters().fsyncs_failed
    with excused(scene, machine):
        machine.disk.fail_fsync(1)
        yield
        machine.disk.fail_fsync(0)
    return machine.disk.counters().fsyncs_failed - before


def disk_full(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    before = machine.disk.counters().writes_refused
    with excused(scene, machine):
        machine.disk.fill(rng.choice((0, 4_096, 100_000)))
        yield
        machine.disk.make_room()
    return machine.disk.counters().writes_refused - before


def hung_disk(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    """No work of the disk returns until the end, without an error."""
    faults = machine.work_faults
    before = faults.hung
    faults.hangs_until_ns = max(faults.hangs_until_ns, scene.world.now_ns + going.length_ns)
    yield
    return faults.hung - before


def power_in_work(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    """Again and again the machine loses power between two writes or syncs, wherever it is: what a worker does as one
    piece is cut in the middle too."""
    before = machine.powers_lost

    def arm() -> None:
        machine.disk.lose_power_after(rng.randrange(STEPS_MOST))

    going.again(arm, lambda: rng.randrange(300 * MS, 1_500 * MS))
    yield
    machine.disk.lose_power_after(-1)
    scene.world.after(1, machine.start)
    return machine.powers_lost - before


def power_at_file(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    """Again and again a machine loses power at some kind of file or soon after, at each kind as often; many lose it
    again while they start."""
    machines = scene.fabric.machines
    before = sum(one.powers_lost for one in machines.values())

    def arm(one: Machine) -> None:
        kind = rng.choice(KINDS_OF_FILES)
        steps = rng.randrange(STEPS_OF_FILE if rng.random() < 0.7 else STEPS_MOST)
        one.disk.lose_power_after(steps, lambda path: fnmatchcase(path, kind))

    def booted(record: Booted) -> None:
        if rng.random() < 0.3:
            machines[record.node].disk.lose_power_after(rng.randrange(STEPS_MOST))
        else:
            arm(machines[record.node])

    going.when(Booted, booted)
    going.again(lambda: arm(rng.choice(scene.machines)), lambda: rng.randrange(300 * MS, 1_000 * MS))
    yield
    for one in machines.values():
        one.disk.lose_power_after(-1)
        scene.world.after(1, one.start)
    return sum(one.powers_lost for one in machines.values()) - before


def read_error(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    """Some existing files cannot be read. Half of the time the process restarts and must read them."""
    before = machine.disk.counters().reads_failed
    with excused(scene, machine):
        paths = machine.disk.paths()
        for path in rng.sample(paths, rng.randint(1, len(paths)) if rng.random() < 0.5 else 1) if paths else []:
            machine.disk.read_error(path)
        if rng.random() < 0.5:
            machine.kill()
            scene.world.after(rng.randrange(1, 100 * MS), machine.start)
        yield
        machine.disk.heal_reads()
        scene.world.after(1, machine.start)
    return machine.disk.counters().reads_failed - before
