"""Faults that wait for a moment of an election or a handover and strike then, for `faults.KINDS`."""

from __future__ import annotations

import random

from tickwheel.chaos.sim.fault import Active, Course, Going, PlannedFault, Scene
from tickwheel.chaos.sim.history_log import VoteSeen
from tickwheel.chaos.sim.history_machines import RoleSeen
from tickwheel.chaos.sim.network_faults import bridge, links_of
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.world import MS


def handover(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Course:
    going = Going(scene)

    def ended(came_about: bool) -> None:
        going.hits += int(came_about)

    scene.hand_over(ended)
    yield
    return going.hits


def kill_voters(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Course:
    """A node that votes for another dies a moment later and comes back soon: a vote must outlive its voter."""
    going = Going(scene)
    machines = scene.fabric.machines

    def voted(record: VoteSeen) -> None:
        voter = machines[record.node]
        if record.voted_for != record.node and rng.random() >= 0.2:
            going.after(rng.randrange(0, 20 * MS), strike, voter, voter.boot)

    def strike(voter: Machine, boot: int) -> None:
        if voter.boot != boot or voter.process is None:
            return
        going.hits += 1
        if rng.random() < 0.5:
            voter.kill()
        else:
            voter.lose_power()
        scene.world.after(rng.randrange(10 * MS, 400 * MS), voter.start)

    going.when(VoteSeen, voted)
    if machine.process is not None:
        machine.kill()  # else there would be no election
    return (yield from going.until_end())


def cut_candidates(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Course:
    """The connections of a candidate break at once: its requests for votes are lost."""
    going = Going(scene)
    machines = scene.fabric.machines

    def stands(record: RoleSeen) -> None:
        if record.role == "candidate":
            scene.world.after(0, strike, machines[record.node])

    def strike(candidate: Machine) -> None:
        going.hits += 1
        for link in links_of(scene, candidate):
            if rng.random() < 0.8:
                link.reset()

    going.when(RoleSeen, stands)
    if machine.process is not None:
        machine.kill()
    yield
    going.over = True
    machine.start()
    return going.hits


def restart_bridge(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Course:
    """Only the target sees both sides of a cut, and it restarts in a moment, now and then: what it had promised to
    one side it must not forget towards the other."""
    cut = Active(bridge(scene, machine, planned, rng))
    going = Going(scene)

    def restart() -> None:
        if machine.process is not None and not machine.frozen:
            going.hits += 1
            machine.kill()
            scene.world.after(rng.randrange(5 * MS, 100 * MS), machine.start)

    first_ns = rng.randrange(600 * MS, 1_200 * MS)
    scene.world.after(first_ns, going.again, restart, lambda: rng.randrange(300 * MS, 1_500 * MS))
    yield
    going.over = True
    cut.end()
    machine.start()
    return going.hits
