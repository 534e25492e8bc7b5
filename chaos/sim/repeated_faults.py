"""Frames of peers that come, or come again, when they are true no longer, for `faults.KINDS`.

The envelope drops what was seen before: these show what stands behind it, when it is taken away (mutations.LAYERS).
"""

from __future__ import annotations

import random

from tickwheel.chaos.sim.fault import Active, Counted, Course, Going, Scene
from tickwheel.chaos.sim.history import Record
from tickwheel.chaos.sim.history_machines import RoleSeen
from tickwheel.chaos.sim.library_faults import log_of
from tickwheel.chaos.sim.network import Link
from tickwheel.chaos.sim.network_faults import block
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.world import MS
from tickwheel.proto.peer_pb2 import PeerFrame

FAR_NS = 35 * MS
"""One way between all but one: two of them are less than what the answers before an election are waited for."""
PORTION = 5
PORTION_EVERY_NS = 5 * MS
PORTIONS = 50
LOOK_EVERY_NS = 50 * MS
ALONE_NS = 150 * MS
SYNCED_NS = 150 * MS
"""A new master has served and sent several syncs by then."""


def _others(scene: Scene, *machines: Machine) -> list[Machine]:
    return [one for one in scene.machines if one not in machines]


def late_syncs(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Counted:
    """Nobody hears the master, whose connections hold: again and again another one is elected, and a moment after it
    leads, what the deposed one had sent arrives at last."""
    held: list[Link] = []

    def hold() -> None:
        master = scene.master()
        if master is None or held:
            return
        held.extend(scene.fabric.links[master.name, one.name] for one in _others(scene, master))
        for link in held:
            link.blocked += 1  # not `block`: the transport has not noticed yet

    def arrive() -> None:
        before = sum(link.delivered for link in held)
        for link in held:
            link.unblock()
        going.hits += sum(link.delivered for link in held) - before
        held.clear()
        going.after(rng.randrange(100 * MS, 400 * MS), hold)

    def elected(record: RoleSeen) -> None:
        if held and record.role == "master" and record.node != held[0].sender:
            scene.world.after(rng.randrange(SYNCED_NS, 3 * SYNCED_NS), arrive)

    going.when(RoleSeen, elected)
    hold()
    yield
    if held:
        arrive()


def votes_twice(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Counted:
    """The master dies. One node is near to all, the others far from each other, and every vote comes twice: the near
    one's, counted twice, is there before any other has voted."""
    master = scene.master()
    near = machine if machine is not master else rng.choice(_others(scene, machine))
    links = list(scene.fabric.links.values())
    far = [link for link in links if near.name not in (link.sender, link.receiver)]

    def twice(link: Link, data: bytes) -> None:
        if PeerFrame.FromString(data).HasField("vote"):
            going.hits += 1
            scene.fabric.machines[link.receiver].frame(link.sender, data)

    for link in links:
        link.watchers.append(twice)
    for link in far:
        link.extra_delay_ns += FAR_NS
    if master is not None:
        master.kill()
    yield
    for link in links:
        link.watchers.remove(twice)
    for link in far:
        link.extra_delay_ns -= FAR_NS
    if master is not None:
        master.start()


class _OldAnswers:
    """The state of one `old_answers` fault."""

    def __init__(self, scene: Scene, machine: Machine, rng: random.Random) -> None:
        self._scene = scene
        self._master = scene.master() or machine
        self._slave = rng.choice(_others(scene, self._master))
        self._ally = rng.choice(_others(scene, self._master, self._slave))
        self._answers: list[tuple[int, bytes]] = []
        """(next index, frame), as the slave sent them while both were cut off."""
        self._link = scene.fabric.links[self._slave.name, self._master.name]
        self._elected: Machine | None = None
        self._over = False
        self.repeated = 0
        pair = (self._master.name, self._slave.name)
        links = list(scene.fabric.links.values())
        self._cut = Active(block([link for link in links if (link.sender in pair) != (link.receiver in pair)]))
        self._link.watchers.append(self._keep)
        scene.history.subscribe((RoleSeen,), self._role)
        self._fill(PORTIONS)

    def _keep(self, link: Link, data: bytes) -> None:
        frame = PeerFrame.FromString(data)
        if frame.append_result.success:
            self._answers.append((frame.append_result.next_index, data))

    def _fill(self, portions: int) -> None:
        """Propose empty entries in portions, so that the slave answers at many places of the log."""
        if portions and not self._over:
            self._master.deliver(self._propose, PORTION)
            self._scene.world.after(PORTION_EVERY_NS, self._fill, portions - 1)

    def _propose(self, entries: int) -> None:
        log = log_of(self._master)
        if log is not None:
            for _ in range(entries):
                log.propose(b"", lambda result: None)

    def _role(self, record: Record) -> None:
        assert isinstance(record, RoleSeen)
        if self._over or record.role != "master":
            return
        if self._elected is None and record.node not in (self._master.name, self._slave.name):
            self._elected = self._scene.fabric.machines[record.node]
            self._heal()
            self._scene.world.after(LOOK_EVERY_NS, self._give_back)
        elif self._elected is not None and record.node == self._master.name:
            self._scene.world.after(0, self._strike)

    def _heal(self) -> None:
        self._cut.end()
        if self._keep in self._link.watchers:
            self._link.watchers.remove(self._keep)

    def _give_back(self) -> None:
        """Make the new master hand over to the old one as soon as the old one follows."""
        if self._over or self._elected is None:
            return
        log = log_of(self._elected)
        if log is not None:
            self._elected.deliver(log.transfer, self._master.name, lambda problem: None)
        self._scene.world.after(LOOK_EVERY_NS, self._give_back)

    def _strike(self) -> None:
        """Once the old master leads again, let only one other node hear it and repeat an old answer of the slave."""
        if self._over:
            return
        self._over = True
        deaf = _others(self._scene, self._master, self._ally)
        cut = Active(block([self._scene.fabric.links[self._master.name, one.name] for one in deaf]))
        self._scene.world.after(ALONE_NS, cut.end)
        self._master.deliver(self._propose, PORTION * PORTIONS)
        self._master.deliver(self._hear_again)

    def _hear_again(self) -> None:
        log, slave = log_of(self._master), log_of(self._slave)
        if log is None or slave is None:
            return
        last, has = log.status().last_index, slave.status().last_index
        old = [answer for answer in self._answers if has + 1 < answer[0] <= last + 1]
        if old:
            self.repeated += 1
            self._master.frame(self._slave.name, max(old)[1])

    def end(self) -> None:
        self._over = True
        self._heal()


def old_answers(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    """A master and one slave are cut off and write what nobody else gets; the others elect, the two follow and cut it
    away again. Then the old master leads again, heard by one other, and an earlier answer of the slave arrives again:
    it reports entries that the slave has lost since."""
    fault = _OldAnswers(scene, machine, rng)
    yield
    fault.end()
    return fault.repeated
