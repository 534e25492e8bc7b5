"""Faults that wait for a moment of an election, a handover or a delivery and strike then, for `faults.KINDS`."""

from __future__ import annotations

import random

from tickwheel.chaos.sim.core_process import CoreProcess
from tickwheel.chaos.sim.fault import Active, Counted, Going, Scene
from tickwheel.chaos.sim.history_log import VoteSeen
from tickwheel.chaos.sim.history_machines import RoleSeen
from tickwheel.chaos.sim.history_messages import STREAM_BROKE, Delivered, SessionClosed, SettleSent
from tickwheel.chaos.sim.network_faults import bridge, links_of
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.world import MS
from tickwheel.node.core.core import NodeCore


def handover(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Counted:

    def ended(came_about: bool) -> None:
        going.hits += int(came_about)

    scene.hand_over(ended)
    yield


def kill_voters(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Counted:
    """A node that votes for another dies a moment later and comes back soon: a vote must outlive its voter."""
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
    yield from going.until_end()


def cut_candidates(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Counted:
    """The connections of a candidate break at once: its requests for votes are lost."""
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
    machine.start()


def restart_bridge(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Counted:
    """Only the target sees both sides of a cut, and it restarts in a moment, now and then: what it had promised to
    one side it must not forget towards the other."""
    cut = Active(bridge(scene, machine, going, rng))

    def restart() -> None:
        if machine.process is not None and not machine.frozen:
            going.hits += 1
            machine.kill()
            scene.world.after(rng.randrange(5 * MS, 100 * MS), machine.start)

    first_ns = rng.randrange(600 * MS, 1_200 * MS)
    scene.world.after(first_ns, going.again, restart, lambda: rng.randrange(300 * MS, 1_500 * MS))
    yield
    cut.end()
    machine.start()


def kill_returning(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Counted:
    """The master dies a moment after consumers left or handed back: its slaves may not have heard of it all."""
    last_ns = 0

    def returned(record: SessionClosed | SettleSent) -> None:
        nonlocal last_ns
        if isinstance(record, SettleSent) and record.outcome == "ACK":
            return
        if rng.random() < 0.3 and scene.world.now_ns - last_ns > 1_500 * MS:
            last_ns = scene.world.now_ns
            going.after(rng.randrange(50 * MS), strike)

    def strike() -> None:
        master = scene.master()
        if master is None or master.process is None:
            return
        going.hits += 1
        master.kill()
        scene.world.after(rng.randrange(10 * MS, 400 * MS), master.start)

    going.when(SessionClosed, returned)
    going.when(SettleSent, returned)
    yield from going.until_end()


def handover_delivering(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Counted:
    """Planned handovers, each just after a delivery: of its lease no sync has told yet."""
    next_ns = 0

    def delivered(record: Delivered) -> None:
        nonlocal next_ns
        if scene.world.now_ns >= next_ns:
            next_ns = scene.world.now_ns + rng.randrange(600 * MS, 1_200 * MS)
            going.after(rng.randrange(5 * MS), scene.hand_over, ended)

    def ended(came_about: bool) -> None:
        going.hits += int(came_about)

    going.when(Delivered, delivered)
    yield


def kill_left(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Counted:
    """The streams of all consumers break; what they held comes back, and before anybody takes it the master dies."""

    def leave() -> None:
        master = scene.master()
        if master is None or not master.running:
            return
        process = master.process
        assert isinstance(process, CoreProcess)
        core = process.host.core
        master.deliver(close, core)
        going.after(rng.randrange(15 * MS, 60 * MS), strike, master, master.boot)

    def close(core: NodeCore) -> None:
        for group_id in sorted(core.parts.delivery.sessions.groups()):
            for session in list(core.parts.delivery.sessions.of_group(group_id)):
                core.parts.delivery.close_session(session, core.clock.now_ms(), give_back=True)
                session.closed(STREAM_BROKE)

    def strike(master: Machine, boot: int) -> None:
        if master.boot != boot or master.process is None:
            return
        going.hits += 1
        master.kill()
        scene.world.after(rng.randrange(1_500 * MS, 2_500 * MS), master.start)

    leave()
    yield from going.until_end()
