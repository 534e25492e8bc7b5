"""Members that come and go while everything else goes wrong, for `faults.KINDS`."""

from __future__ import annotations

import random

from tickwheel.chaos.sim.core_process import CoreProcess
from tickwheel.chaos.sim.fault import Active, Course, Going, Operators, Scene, other_than_master
from tickwheel.chaos.sim.history_machines import MomentSeen
from tickwheel.chaos.sim.moments import FOUNDER_REFUSED, FOUNDERS_CONNECTED
from tickwheel.chaos.sim.network_faults import block, links_of
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.world import MS
from tickwheel.node.core import founding

MEMBERS_MOST = 6
MEMBERS_LEAST = 3
LOOK_NS = 100 * MS
FOUNDED_LOOK_NS = MS
"""Between two looks whether the cluster is founded; the first election comes some 300 ms later."""
LATER_NS_MOST = 1_000 * MS
WORKED_NS_LEAST = 800 * MS
WORKED_NS_MOST = 1_800 * MS
"""A cluster without some of its founders has elected and accepted messages by then."""


def newcomer(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    """A node with an empty disk joins: it learns, and counts once it has everything."""
    operators = scene.operators
    if operators is None or len(scene.machines) >= MEMBERS_MOST:
        return 0
    joined = scene.join()
    operators.add(joined)
    yield
    return int(joined.name in operators.promoted)


def replace_member(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    """A newcomer, and the target is removed: before it is there, while it learns, or once it counts."""
    operators = scene.operators
    if operators is None or len(scene.machines) >= MEMBERS_MOST:
        return 0
    first = rng.random() < 0.3 and len(scene.machines) >= MEMBERS_LEAST
    waits = rng.random() < 0.7
    if first:
        operators.remove(machine)
    joined = scene.join()
    operators.add(joined)

    def follow() -> None:
        if machine not in scene.machines:
            return
        if not waits or joined.name in operators.promoted:
            operators.remove(machine)
        else:
            going.after(LOOK_NS, follow)

    if not first:
        going.after(rng.randrange(500 * MS), follow)
    yield
    return int(machine.name in operators.removed)


def wiped_disk(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    """A member is killed and comes back with an empty disk, as often as it is turned away, until it is replaced.

    One at a time, and only where all others know its disk: else data of a majority is lost, and no promise holds."""
    operators = scene.operators
    room = MEMBERS_LEAST <= len(scene.machines) < MEMBERS_MOST
    if operators is None or not room or not operators.can_lose(machine):
        return 0
    machine.wipe()
    scene.world.after(rng.randrange(1, 500 * MS), machine.start)
    operators.lost = machine.name

    def replaced() -> None:
        if not going.hits:
            going.hits = 1
            operators.replace_lost(machine, scene.join())

    scene.world.after(rng.randrange(going.length_ns), replaced)
    yield
    replaced()
    machine.start()
    return machine.turned_away


def stale_founders(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    """A minority of the founders dies once the cluster is founded, mostly before it has any entry of the log. The
    others accept messages, then all of them die, and the target loses its disk for good. It meets those that were away
    while nobody else is up: together they would be a majority, and nobody among them has what was accepted.

    Half of the time the directories are left as by a version that did not record the founding."""
    operators = scene.operators
    if operators is None or len(scene.machines) < MEMBERS_LEAST:
        return 0
    fault = _StaleFounders(scene, operators, machine, rng)
    yield
    fault.end()
    return fault.meetings


class _StaleFounders:
    """The state of one `stale_founders` fault."""

    def __init__(self, scene: Scene, operators: Operators, lost: Machine, rng: random.Random) -> None:
        self._scene = scene
        self._operators = operators
        self._lost = lost
        self._rng = rng
        self._founders = list(scene.machines)
        others = [one for one in self._founders if one is not lost]
        rng.shuffle(others)
        minority = (len(self._founders) - 1) // 2
        self._away, self._rest = others[:minority], others[minority:]
        self._recorded = rng.random() < 0.5
        self._struck = self._over = False
        self._refused = self._connected = False
        self._wait()

    @property
    def meetings(self) -> int:
        """1 if they met."""
        return int(self._refused or self._connected)

    def _cores(self, machines: list[Machine]) -> list[CoreProcess]:
        return [one.process for one in machines if isinstance(one.process, CoreProcess)]

    def _wait(self) -> None:
        """Until the cluster is founded."""
        if self._over:
            return
        cores = self._cores(self._founders)
        if len(cores) == len(self._founders) and all(core.host.core.parts.founding.may_vote for core in cores):
            later = self._rng.random() < 0.3
            self._scene.world.after(self._rng.randrange(LATER_NS_MOST) if later else 0, self._leave)
        else:
            self._scene.world.after(FOUNDED_LOOK_NS, self._wait)

    def _leave(self) -> None:
        if not self._over:
            for one in self._away:
                one.kill()
            self._scene.world.after(self._rng.randrange(WORKED_NS_LEAST, WORKED_NS_MOST), self._strike)

    def _strike(self) -> None:
        """As soon as the rest knows for good what is accepted and the disk that gets lost; unless one that was away has
        come back by another fault, or a member has come or gone.

        Where directories are of an earlier version the log must have checksums of requests already: without the record
        of the founding, masters would write none while a founder is away, and two senders of one id be mixed up."""
        if self._over:
            return
        operators = self._operators
        changed = {one.name for one in self._scene.machines} != {one.name for one in self._founders}
        if changed or operators.lost or any(one.process is not None for one in self._away):
            return
        ready = all(
            core.knows_disk_of(self._lost.name) and (self._recorded or core.host.core.state.producers.stated)
            for core in self._cores(self._rest)
        )
        if operators.unfinished() or len(self._cores(self._rest)) < len(self._rest) or not ready:
            self._scene.world.after(LOOK_NS, self._strike)
            return
        self._struck = True
        for one in self._rest:
            one.kill()
        self._lost.wipe()
        operators.lost = self._lost.name
        if not self._recorded:
            for one in (*self._rest, *self._away):
                one.disk.forget(founding.PATH)
        for one in (self._lost, *self._away):
            self._scene.world.after(self._rng.randrange(1, 300 * MS), one.start)
        self._scene.world.after(LOOK_NS, self._look)

    def _look(self) -> None:
        """Whether they meet."""
        if self._over:
            return
        world, links = self._scene.world, self._scene.fabric.links
        alone = all(one.process is None for one in self._rest)
        if alone and self._lost.turned_away and not self._refused:
            self._refused = True
            self._scene.history.note(MomentSeen, self._lost.name, self._lost.boot, FOUNDER_REFUSED)
        lost = self._lost.name
        between = [link for one in self._away for link in (links[one.name, lost], links[lost, one.name])]
        if alone and all(link.up for link in between) and not self._connected:
            self._connected = True
            self._scene.history.note(MomentSeen, self._lost.name, self._lost.boot, FOUNDERS_CONNECTED)
        world.after(LOOK_NS, self._look)

    def end(self) -> None:
        """All others come back, and the lost one is replaced."""
        self._over = True
        if self._struck:
            self._operators.replace_lost(self._lost, self._scene.join())
        for one in self._founders:
            one.start()


def strangers(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    """A slave is cut off, half of the time dead too, while all other members are replaced: on its return it knows
    none of them. Half of the time so many of them die just then that the cluster has no majority without it."""
    operators = scene.operators
    if operators is None or operators.unfinished() or any(link.blocked for link in scene.fabric.links.values()):
        return 0
    fault = _Strangers(scene, operators, other_than_master(scene, machine), rng)
    yield
    fault.end()
    return fault.came_back


class _Strangers:
    """The state of one `strangers` fault."""

    def __init__(self, scene: Scene, operators: Operators, slave: Machine, rng: random.Random) -> None:
        self._scene = scene
        self._operators = operators
        self._slave = slave
        self._rng = rng
        self._old = [one for one in scene.machines if one is not slave]
        self._new: list[Machine] = []
        self._leaving = 0
        self._dead: list[Machine] = []
        self._cuts = [Active(block(links_of(scene, slave)))]
        self._back = False
        self.came_back = 0
        """1 if the slave knew none of the members when it came back."""
        if rng.random() < 0.5:
            slave.kill()
        self._replace()

    def _replace(self) -> None:
        """Add a newcomer for each old member while there is room. Remove an old member once its newcomer counts."""
        if self._back:
            return
        if len(self._new) < len(self._old) and len(self._scene.machines) < MEMBERS_MOST:
            joined = self._scene.join()
            between = [
                link for link in links_of(self._scene, joined) if self._slave.name in (link.sender, link.receiver)
            ]
            self._cuts.append(Active(block(between)))
            self._operators.add(joined)
            self._new.append(joined)
        while self._leaving < sum(one.name in self._operators.promoted for one in self._new):
            if self._old[self._leaving].name not in self._operators.removed:
                self._operators.remove(self._old[self._leaving])
            self._leaving += 1
        if all(one.retired and one.process is None for one in self._old):
            self.came_back = int(self._slave in self._scene.machines)
            if self._rng.random() < 0.5:
                self._dead = self._rng.sample(self._new, len(self._new) // 2)
            for one in self._dead:
                one.kill()
            self._come_back()
            return
        self._scene.world.after(LOOK_NS, self._replace)

    def _come_back(self) -> None:
        """Connect the slave again. Frames on their way to it are lost, since their senders are gone."""
        self._back = True
        for link in links_of(self._scene, self._slave):
            link.reset()
        for cut in self._cuts:
            cut.end()
        self._slave.start()

    def end(self) -> None:
        if not self._back:
            self._come_back()
        for one in self._dead:
            one.start()
