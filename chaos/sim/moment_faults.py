"""Faults that wait for the moment at which a node is in the middle of something, for `faults.KINDS`."""

from __future__ import annotations

import random

from tickwheel.chaos.sim.core_process import CoreProcess
from tickwheel.chaos.sim.fault import Course, Going, PlannedFault, Scene, lost_on
from tickwheel.chaos.sim.history_machines import CheckpointBegan
from tickwheel.chaos.sim.history_messages import STREAM_BROKE, Delivered, SessionClosed, SettleSent
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.world import MS
from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.promise import Reply


def power_checkpoint(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Course:
    """Backups are asked for, and a node that begins a checkpoint loses power before it is durable, or just then."""
    going = Going(scene)
    machines = scene.fabric.machines

    def begun(record: CheckpointBegan) -> None:
        if rng.random() < 0.5:
            going.after(rng.randrange(10 * MS), strike, machines[record.node], record.boot)

    def strike(struck: Machine, boot: int) -> None:
        if struck.boot != boot or struck.process is None:
            return
        before = lost_on(struck)
        struck.lose_power()
        going.hits += lost_on(struck) - before
        scene.world.after(rng.randrange(10 * MS, 400 * MS), struck.start)

    def ask() -> None:
        asked = rng.choice(scene.machines)
        host = getattr(asked.process, "host", None)
        if host is not None:
            checkpointer = host.core.checkpointer
            asked.deliver(checkpointer.request, Reply.either(checkpointer.copied))

    going.when(CheckpointBegan, begun)
    going.again(ask, lambda: rng.randrange(100 * MS, 500 * MS))
    return (yield from going.until_end())


def kill_returning(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Course:
    """The master dies a moment after consumers left or handed back: its slaves may not have heard of it all."""
    going = Going(scene)
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
    return (yield from going.until_end())


def handover_delivering(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Course:
    """Planned handovers, each just after a delivery: of its lease no sync has told yet."""
    going = Going(scene)
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
    going.over = True
    return going.hits


def kill_left(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Course:
    """The streams of all consumers break; what they held comes back, and before anybody takes it the master dies."""
    going = Going(scene)

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
    return (yield from going.until_end())
