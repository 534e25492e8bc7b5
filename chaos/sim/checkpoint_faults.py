"""Faults that strike while a node writes a checkpoint of its own or takes that of a peer, for `faults.KINDS`."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tickwheel.chaos.sim.core_process import CoreProcess
from tickwheel.chaos.sim.executor import HELD_NS
from tickwheel.chaos.sim.fault import Active, Counted, Course, Going, Scene, lost_on, other_than_master
from tickwheel.chaos.sim.history_machines import CheckpointBegan, CheckpointTaken, MomentSeen
from tickwheel.chaos.sim.moments import COPY_OF_LATER, COPY_RESUMED, HOURS_REMOVED
from tickwheel.chaos.sim.network_faults import block, links_of
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.world import MS
from tickwheel.node.core.checkpoint import Checkpointer
from tickwheel.node.core.promise import Reply
from tickwheel.proto.peer_pb2 import CheckpointChunk

STEPS_MOST = 80
"""The power fails within this many disk steps. Entries applied during a checkpoint take some of them."""
BREAKS_MOST = 4
"""Copies that one fault breaks; a node is told about once a second that it needs one."""
STRUCK_NS_MOST = 400 * MS
"""A copy takes some 100 ms."""
CHECKPOINT_WORK = Checkpointer._write.__qualname__  # noqa: SLF001  (its name alone)
"""Function of the work that writes a checkpoint."""


def kill_installed(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Counted:
    """A slave takes a checkpoint of a peer, and a moment later the master dies: the slave must still know all that it
    had heard before."""
    slave = other_than_master(scene, machine)

    def taken(record: CheckpointTaken) -> None:
        if record.node == slave.name and not going.hits:
            going.hits = 1
            scene.world.after(rng.randrange(20 * MS, 400 * MS), strike)

    def strike() -> None:
        master = scene.master()
        if master is None or master is slave or master.process is None:
            going.hits = 0
            return
        master.kill()
        for link in links_of(scene, master):
            link.reset()
        scene.world.after(rng.randrange(1_500 * MS, 2_500 * MS), master.start)

    going.when(CheckpointTaken, taken)
    behind = Active(_behind(scene, slave, rng))
    yield
    behind.end()
    for one in scene.machines:
        one.start()


def hung_install(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    """A slave's own checkpoint hangs in its disk while one of a peer arrives. In the end it gets through to the disk,
    and the process dies before it hears of that."""
    slave = other_than_master(scene, machine)
    before = slave.work_faults.hung
    slave.work_faults.hung_work = CHECKPOINT_WORK
    _ask_for_checkpoint(slave)

    behind = Active(_behind(scene, slave, rng))
    yield
    behind.end()
    slave.work_faults.hung_work = ""
    scene.world.after(rng.randrange(HELD_NS, 4 * HELD_NS), slave.kill)
    scene.world.after(rng.randrange(4 * HELD_NS, 8 * HELD_NS), slave.start)
    return slave.work_faults.hung - before


def broken_copy(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    """A slave is far behind, and its copies of a peer's checkpoint break midway, several times. Meanwhile the slave or
    the peer dies, or the peer's checkpoint is replaced by a later one."""
    slave = other_than_master(scene, machine)
    breaks = _Breaks(scene, slave, rng)
    behind = Active(_behind(scene, slave, rng))
    yield
    breaks.end()
    behind.end()
    for one in scene.machines:
        one.start()
    return breaks.broken


def power_checkpoint(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Counted:
    """Backups are asked for, and a node that begins a checkpoint loses power before it is durable, or just then."""
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

    going.when(CheckpointBegan, begun)
    going.again(lambda: _ask_for_checkpoint(rng.choice(scene.machines)), lambda: rng.randrange(100 * MS, 500 * MS))
    yield from going.until_end()


def power_in_checkpoint(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Counted:
    """Again and again a checkpoint of the target hangs in its disk until the machine loses power."""

    def hang() -> None:
        machine.work_faults.hung_work = CHECKPOINT_WORK
        _ask_for_checkpoint(machine)
        going.after(rng.randrange(20 * MS, 200 * MS), strike, machine.work_faults.hung)

    def strike(before: int) -> None:
        if machine.work_faults.hung > before:
            lost = lost_on(machine)
            machine.lose_power()
            going.hits += lost_on(machine) - lost
            scene.world.after(rng.randrange(10 * MS, 100 * MS), machine.start)
        going.after(rng.randrange(200 * MS, 700 * MS), hang)

    hang()
    yield
    machine.work_faults.hung_work = ""
    machine.kill()
    scene.world.after(1, machine.start)


def power_removing(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    """A node that removes an hour is made to write a checkpoint at once, and loses power in the middle of it."""
    machines = scene.fabric.machines
    before = sum(one.powers_lost for one in machines.values())

    def removed(record: MomentSeen) -> None:
        if record.what == HOURS_REMOVED:
            one = machines[record.node]
            _ask_for_checkpoint(one)
            one.disk.lose_power_after(rng.randrange(STEPS_MOST))

    going.when(MomentSeen, removed)
    yield
    for one in scene.machines:
        one.disk.lose_power_after(-1)
        scene.world.after(1, one.start)
    return sum(one.powers_lost for one in machines.values()) - before


def _ask_for_checkpoint(machine: Machine) -> None:
    if isinstance(machine.process, CoreProcess):
        checkpointer = machine.process.host.core.checkpointer
        machine.deliver(checkpointer.request, Reply.either(checkpointer.copied))


class _Breaks:
    """`CopyFault`: the state of one `broken_copy`."""

    def __init__(self, scene: Scene, slave: Machine, rng: random.Random) -> None:
        self._scene = scene
        self._slave = slave
        self._rng = rng
        self._left = rng.randint(1, BREAKS_MOST)
        """Copies still to break."""
        self._manifest_crc = 0
        """Of the last copy; a later checkpoint has another manifest."""
        self.broken = 0
        slave.copy_fault = self

    def begins(self, chunks: Sequence[CheckpointChunk]) -> int:
        """Break it or not, and strike one of the two nodes in this time."""
        manifest = chunks[-1]
        if any(chunk.offset for chunk in chunks):
            self._see(COPY_RESUMED)
            if not manifest.offset and self._manifest_crc not in (0, manifest.crc32c):
                self._see(COPY_OF_LATER)
        if not manifest.offset:
            self._manifest_crc = manifest.crc32c
        whole = sum(len(chunk.data) for chunk in chunks)
        if self._left <= 0 or not whole:
            return whole
        self._left -= 1
        self._scene.world.after(self._rng.randrange(STRUCK_NS_MOST), self._strike)
        return self._rng.randrange(whole)

    def broke(self) -> None:
        """Count it."""
        self.broken += 1

    def end(self) -> None:
        """Break no more."""
        self._left = 0
        if self._slave.copy_fault is self:
            self._slave.copy_fault = None

    def _see(self, what: str) -> None:
        self._scene.history.note(MomentSeen, self._slave.name, self._slave.boot, what)

    def _strike(self) -> None:
        """One of what may come between a copy that broke and the next."""
        if self._slave.copy_fault is not self:
            return
        strike = self._rng.choice(("nothing", "receiver dies", "receiver loses power", "source dies", "checkpoints"))
        struck = self._scene.master() if strike == "source dies" else self._slave
        if strike == "checkpoints":
            for one in self._scene.machines:
                if one is not self._slave:
                    _ask_for_checkpoint(one)
        elif strike != "nothing" and struck is not None:
            if strike == "receiver loses power":
                struck.lose_power()
            else:
                struck.kill()
            self._scene.world.after(self._rng.randrange(10 * MS, 400 * MS), struck.start)


def _behind(scene: Scene, slave: Machine, rng: random.Random) -> Counted:
    """A slave is cut off while all others write checkpoints; what was on its way to it then is lost."""
    links = links_of(scene, slave)
    cut: list[Active] = [Active(block(links))]

    def checkpoints() -> None:
        for one in scene.machines:
            if one is not slave:
                _ask_for_checkpoint(one)

    def connect() -> None:
        if cut:
            for link in links:
                link.reset()
            cut.pop().end()

    cut_ns = rng.randrange(500 * MS, 1_200 * MS)
    scene.world.after(cut_ns // 2, checkpoints)
    scene.world.after(cut_ns, connect)
    yield
    connect()
