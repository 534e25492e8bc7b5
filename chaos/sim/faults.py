"""What can go wrong, when it does, and how we know that it had an effect.

`plan` throws the dice of a seed once, before the run: a list of numbered faults, each with its time,
length and target. Leaving one out (`only`) changes nothing about the others, which is how a failing run
is shrunk. A kind is a function that begins a fault and returns its `Active`: how to end it, and what it did.

To add one: write such a function, put it into `KINDS` with the range of its length.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tickwheel.chaos.sim import clock_faults
from tickwheel.chaos.sim.history import FaultBegan, FaultEnded, History, Record, RoleSeen, VoteSeen
from tickwheel.chaos.sim.network import Fabric, Link
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.world import MS, SECOND, World
from tickwheel.replication.pysyncobj_seam import REGULAR
from tickwheel.replication.raft import RaftLog

MASTER = "master"
# A process may stop itself because of a fault this long after the fault has ended.
EXCUSE_ECHO_NS = 3 * SECOND
UNPROPOSED = (1 << 63).to_bytes(8, "little")
"""A command that no client ever sent."""


class Scene(Protocol):
    """What faults act on."""

    world: World
    fabric: Fabric
    history: History

    @property
    def machines(self) -> Sequence[Machine]: ...

    def master(self) -> Machine | None:
        """Who is master now, by the highest term."""
        ...

    def hand_over(self, done: Callable[[bool], None]) -> None:
        """Ask the master for a planned handover; `done` tells whether it came about."""
        ...


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One throw of the dice."""

    number: int
    kind: str
    at_ns: int
    length_ns: int
    target: str
    seed: int


@dataclass(slots=True)
class Active:
    """A fault that has begun. `effect` counts its evidence, read at its end."""

    end: Callable[[], None]
    effect: Callable[[], int]


@dataclass(slots=True)
class Tally:
    """What became of all faults of a kind, over one run or many."""

    injected: int = 0
    effective: int = 0
    evidence: int = 0
    unit: str = ""

    def add(self, other: Tally) -> None:
        self.injected += other.injected
        self.effective += other.effective
        self.evidence += other.evidence
        self.unit = self.unit or other.unit


Begin = Callable[[Scene, Machine, PlannedFault, random.Random], Active]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault: how it begins, how long it lasts, what its evidence counts."""

    begin: Begin
    length_ms: tuple[int, int]
    unit: str
    default: bool = True
    """In the default set."""


def _nothing() -> None:
    """The end of a fault that ends by itself."""


def _links_of(scene: Scene, machine: Machine) -> list[Link]:
    return scene.fabric.of(machine.name)


def _frames_hit(links: Sequence[Link]) -> Callable[[], int]:
    before = sum(link.lost + link.held_back for link in links)
    epochs = sum(link.epoch for link in links)
    return lambda: (
        sum(link.lost + link.held_back for link in links) - before + sum(link.epoch for link in links) - epochs
    )


def _block(links: Sequence[Link]) -> Active:
    for link in links:
        link.block()

    def end() -> None:
        for link in links:
            link.unblock()

    return Active(end, _frames_hit(links))


def _reset(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    links = _links_of(scene, machine)
    hit = rng.sample(links, rng.randint(1, len(links)))
    effect = _frames_hit(hit)
    for link in hit:
        link.reset()
    return Active(_nothing, effect)


def _delay(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    links = [link for link in _links_of(scene, machine) if rng.random() < 0.7] or _links_of(scene, machine)[:1]
    extra_ns = rng.randrange(5 * MS, 300 * MS)
    before = sum(link.delivered for link in links)
    for link in links:
        link.extra_delay_ns += extra_ns

    def end() -> None:
        for link in links:
            link.extra_delay_ns -= extra_ns

    return Active(end, lambda: sum(link.delivered for link in links) - before)


def _replay(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    links = _links_of(scene, machine)
    before = sum(link.replayed for link in links)
    rate = rng.uniform(0.05, 0.5)
    for link in links:
        link.replay_rate += rate

    def end() -> None:
        for link in links:
            link.replay_rate = max(0.0, link.replay_rate - rate)
            if link.replay_rate < 1e-9:
                link.replay_rate = 0.0

    return Active(end, lambda: sum(link.replayed for link in links) - before)


def _one_way(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    outward = rng.random() < 0.5
    ends = [link for link in _links_of(scene, machine) if (link.sender == machine.name) == outward]
    return _block(rng.sample(ends, rng.randint(1, len(ends))))


def _partition(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    names = [m.name for m in scene.machines if m is not machine]
    side = {machine.name, *rng.sample(names, rng.randint(0, len(names) - 1))}
    links = [link for _, link in sorted(scene.fabric.links.items()) if (link.sender in side) != (link.receiver in side)]
    return _block(links)


def _isolate(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    return _block(_links_of(scene, machine))


def _bridge(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    """All others see the target and not each other across a cut: it connects two sides."""
    names = [m.name for m in scene.machines if m is not machine]
    side = set(rng.sample(names, max(1, len(names) // 2)))
    links = [
        link
        for _, link in sorted(scene.fabric.links.items())
        if machine.name not in (link.sender, link.receiver) and (link.sender in side) != (link.receiver in side)
    ]
    return _block(links)


def _flap(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    links = _links_of(scene, machine)
    effect = _frames_hit(links)
    state = {"blocked": False, "over": False}

    def turn() -> None:
        if state["over"]:
            return
        for link in links:
            if state["blocked"]:
                link.unblock()
            else:
                link.block()
        state["blocked"] = not state["blocked"]
        scene.world.after(rng.randrange(20 * MS, 600 * MS), turn)

    def end() -> None:
        if state["blocked"]:
            for link in links:
                link.unblock()
        state["over"] = True

    turn()
    return Active(end, effect)


def _kill(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    was_running = machine.process is not None
    machine.kill()
    return Active(machine.start, lambda: int(was_running))


def _power(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    before = machine.disk.counters()
    machine.lose_power()
    after = machine.disk.counters()
    lost = after.pages_lost + after.dir_changes_lost - before.pages_lost - before.dir_changes_lost
    return Active(machine.start, lambda: lost)


def _kill_all(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    running = [m for m in scene.machines if m.process is not None]
    for one in running:
        scene.world.after(rng.randrange(1, 50 * MS), one.kill)
    return Active(_start_all(scene, rng), lambda: len(running))


def _power_all(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    before = sum(m.disk.counters().pages_lost + m.disk.counters().dir_changes_lost for m in scene.machines)
    for one in scene.machines:
        one.lose_power()
    lost = sum(m.disk.counters().pages_lost + m.disk.counters().dir_changes_lost for m in scene.machines) - before
    return Active(_start_all(scene, rng), lambda: lost)


def _power_slaves(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    """All but the master lose power and come back to elect one of themselves: the master is cut off and dies."""
    isolation = _block(_links_of(scene, machine))
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


def _start_all(scene: Scene, rng: random.Random) -> Callable[[], None]:
    def start() -> None:
        for one in scene.machines:
            scene.world.after(rng.randrange(1, 400 * MS), one.start)

    return start


def _restart(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    was_running = machine.process is not None
    machine.stop()
    return Active(machine.start, lambda: int(was_running))


def _freeze(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    if machine.process is None or machine.frozen:
        return Active(_nothing, lambda: 0)
    turns, boot = machine.turns, machine.boot
    waited = {"inputs": 0}
    machine.freeze()

    def end() -> None:
        if machine.boot == boot and machine.frozen:
            waited["inputs"] = machine.waiting + int(machine.turns == turns)
            machine.thaw()

    return Active(end, lambda: waited["inputs"])


def _excuse_over(machine: Machine) -> None:
    machine.excuses -= 1


def _slow_disk(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    factor = rng.choice((5.0, 20.0, 60.0))
    before = machine.disk.counters().syncs
    machine.disk_slowness *= factor

    def end() -> None:
        machine.disk_slowness /= factor

    return Active(end, lambda: machine.disk.counters().syncs - before)


def _failed_sync(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    before = machine.disk.counters().syncs_failed
    machine.excuses += 1
    machine.disk.fail_sync(1)

    def end() -> None:
        machine.disk.fail_sync(0)
        scene.world.after(EXCUSE_ECHO_NS, _excuse_over, machine)

    return Active(end, lambda: machine.disk.counters().syncs_failed - before)


def _disk_full(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    before = machine.disk.counters().writes_refused
    machine.excuses += 1
    machine.disk.fill(rng.choice((0, 4_096, 100_000)))

    def end() -> None:
        machine.disk.make_room()
        scene.world.after(EXCUSE_ECHO_NS, _excuse_over, machine)

    return Active(end, lambda: machine.disk.counters().writes_refused - before)


def _handover(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    done = {"yes": 0}

    def ended(came_about: bool) -> None:
        done["yes"] += int(came_about)

    scene.hand_over(ended)
    return Active(_nothing, lambda: done["yes"])


def _kill_voters(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    """Whoever votes for another dies a moment later and comes back soon: a vote must outlive its voter."""
    hit = {"voters": 0, "over": 0}
    machines = {one.name: one for one in scene.machines}

    def voted(record: Record) -> None:
        assert isinstance(record, VoteSeen)
        voter = machines[record.node]
        if hit["over"] or record.voted_for == record.node or rng.random() < 0.2:
            return
        scene.world.after(rng.randrange(0, 20 * MS), strike, voter, voter.boot)

    def strike(voter: Machine, boot: int) -> None:
        if voter.boot != boot or voter.process is None or hit["over"]:
            return
        hit["voters"] += 1
        if rng.random() < 0.5:
            voter.kill()
        else:
            voter.lose_power()
        scene.world.after(rng.randrange(10 * MS, 400 * MS), voter.start)

    def end() -> None:
        hit["over"] = 1
        for one in scene.machines:
            one.start()

    scene.history.subscribe((VoteSeen,), voted)
    if machine.process is not None:
        machine.kill()  # else there would be no election
    return Active(end, lambda: hit["voters"])


def _cut_candidates(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    """The connections of whoever stands for election break at once: its requests for votes are lost."""
    hit = {"candidates": 0, "over": 0}
    machines = {one.name: one for one in scene.machines}

    def stands(record: Record) -> None:
        assert isinstance(record, RoleSeen)
        if not hit["over"] and record.role == "candidate":
            scene.world.after(0, strike, machines[record.node])

    def strike(candidate: Machine) -> None:
        hit["candidates"] += 1
        for link in _links_of(scene, candidate):
            if rng.random() < 0.8:
                link.reset()

    def end() -> None:
        hit["over"] = 1
        machine.start()

    scene.history.subscribe((RoleSeen,), stands)
    if machine.process is not None:
        machine.kill()
    return Active(end, lambda: hit["candidates"])


def _restart_bridge(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    """Only the target sees both sides of a cut, and it restarts in a moment, now and then: what it had promised to
    one side it must not forget towards the other."""
    bridge = _bridge(scene, machine, planned, rng)
    state = {"restarts": 0, "over": 0}

    def again() -> None:
        if state["over"]:
            return
        if machine.process is not None and not machine.frozen:
            state["restarts"] += 1
            machine.kill()
            scene.world.after(rng.randrange(5 * MS, 100 * MS), machine.start)
        scene.world.after(rng.randrange(300 * MS, 1_500 * MS), again)

    def end() -> None:
        state["over"] = 1
        bridge.end()
        machine.start()

    scene.world.after(rng.randrange(600 * MS, 1_200 * MS), again)
    return Active(end, lambda: state["restarts"])


def _failed_apply(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    """A bug of ours: what a log entry does to the state raises. The process must stop, once."""
    before = machine.applies_failed
    machine.excuses += 1
    machine.fail_applies = 1

    def end() -> None:
        machine.fail_applies = 0
        scene.world.after(EXCUSE_ECHO_NS, _excuse_over, machine)

    return Active(end, lambda: machine.applies_failed - before)


def _hung_disk(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    """No work of the disk returns until the end, without an error."""
    before = machine.works_hung
    machine.hangs_until_ns = max(machine.hangs_until_ns, scene.world.now_ns + planned.length_ns)
    return Active(_nothing, lambda: machine.works_hung - before)


def _read_error(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    """Some of the files there are cannot be read; half of the time the process starts anew and must read them."""
    before = machine.disk.counters().reads_failed
    machine.excuses += 1
    paths = machine.disk.paths()
    for path in rng.sample(paths, rng.randint(1, len(paths)) if rng.random() < 0.5 else 1) if paths else []:
        machine.disk.read_error(path)
    if rng.random() < 0.5:
        machine.kill()
        scene.world.after(rng.randrange(1, 100 * MS), machine.start)

    def end() -> None:
        machine.disk.heal_reads()
        scene.world.after(1, machine.start)
        scene.world.after(EXCUSE_ECHO_NS, _excuse_over, machine)

    return Active(end, lambda: machine.disk.counters().reads_failed - before)


def _library_calls(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
    """pysyncobj is told to write a dump, and to take a command into its own queue: both must come to nothing."""
    called = {"times": 0}
    over = {"yes": False}

    def call() -> None:
        log = getattr(machine.process, "log", None)
        if over["yes"]:
            return
        if isinstance(log, RaftLog):
            called["times"] += 1
            engine = log._engine
            machine.deliver(engine.forceLogCompaction)
            machine.deliver(engine._applyCommand, REGULAR + UNPROPOSED, None)
        scene.world.after(rng.randrange(50 * MS, 500 * MS), call)

    def end() -> None:
        over["yes"] = True

    call()
    return Active(end, lambda: called["times"])


def _clock(begin: clock_faults.Clockwork) -> Begin:
    def begun(scene: Scene, machine: Machine, planned: PlannedFault, rng: random.Random) -> Active:
        return Active(*begin(scene.world, scene.machines, machine, rng))

    return begun


KINDS: dict[str, Kind] = {
    "reset": Kind(_reset, (1, 2), "frames lost, connections broken"),
    "delay": Kind(_delay, (300, 5_000), "frames late"),
    "replay": Kind(_replay, (500, 6_000), "frames twice"),
    "one-way": Kind(_one_way, (200, 6_000), "frames held or lost"),
    "partition": Kind(_partition, (200, 8_000), "frames held or lost"),
    "isolate": Kind(_isolate, (200, 6_000), "frames held or lost"),
    "bridge": Kind(_bridge, (500, 6_000), "frames held or lost"),
    "flap": Kind(_flap, (500, 5_000), "frames held or lost"),
    "kill": Kind(_kill, (20, 4_000), "processes killed"),
    "power": Kind(_power, (20, 4_000), "pages and directory changes lost"),
    "kill-all": Kind(_kill_all, (60, 2_000), "processes killed"),
    "power-all": Kind(_power_all, (60, 2_000), "pages and directory changes lost"),
    # Directed: finds acknowledgements that came before their fdatasync. Not in the default set.
    "power-slaves": Kind(_power_slaves, (1_500, 3_000), "pages and directory changes lost", default=False),
    "restart": Kind(_restart, (20, 2_000), "processes stopped"),
    "freeze": Kind(_freeze, (100, 4_000), "inputs that waited"),
    "slow-disk": Kind(_slow_disk, (500, 5_000), "syncs slowed"),
    "failed-sync": Kind(_failed_sync, (200, 3_000), "syncs failed"),
    "disk-full": Kind(_disk_full, (500, 5_000), "writes refused"),
    "kill-voters": Kind(_kill_voters, (1_000, 6_000), "voters killed"),
    "cut-candidates": Kind(_cut_candidates, (1_000, 6_000), "candidates cut off"),
    "restart-bridge": Kind(_restart_bridge, (1_500, 6_000), "restarts of the bridge"),
    "failed-apply": Kind(_failed_apply, (200, 2_000), "applies that raised"),
    "hung-disk": Kind(_hung_disk, (500, 4_000), "works that hung"),
    "read-error": Kind(_read_error, (200, 3_000), "reads failed"),
    # Directed: calls that nothing in a node makes.
    "library-calls": Kind(_library_calls, (1_000, 4_000), "calls", default=False),
    "handover": Kind(_handover, (1_000, 3_000), "handovers done"),
    "skew": Kind(_clock(clock_faults.skew), (500, 10_000), "readings of a wrong clock"),
    "drift": Kind(_clock(clock_faults.drift), (2_000, 20_000), "readings of a wrong clock"),
    "clock-steps": Kind(_clock(clock_faults.steps), (500, 8_000), "readings of a wrong clock"),
}
DEFAULT_KINDS = tuple(name for name, kind in KINDS.items() if kind.default)
MEAN_GAP_NS = 2_500 * MS


def plan(world: World, kinds: Sequence[str], names: Sequence[str], begin_ns: int, end_ns: int) -> list[PlannedFault]:
    """The faults of a seed, by time. One seed takes some of the kinds, so that each also comes alone."""
    rng = world.stream("faults")
    if not kinds:
        return []
    chosen = sorted(rng.sample(sorted(kinds), rng.randint(1, len(kinds))))
    planned: list[PlannedFault] = []
    now_ns = begin_ns
    while True:
        now_ns += int(rng.expovariate(1.0 / MEAN_GAP_NS))
        if now_ns >= end_ns:
            return planned
        kind = rng.choice(chosen)
        low, high = KINDS[kind].length_ms
        length_ns = int(low * (high / low) ** rng.random()) * MS
        target = MASTER if rng.random() < 0.5 else rng.choice(list(names))
        planned.append(PlannedFault(len(planned), kind, now_ns, length_ns, target, rng.getrandbits(32)))


@dataclass(slots=True)
class Injector:
    """Begins and ends the planned faults of one run."""

    scene: Scene
    planned: Sequence[PlannedFault]
    tallies: dict[str, Tally] = field(default_factory=dict)
    _active: dict[int, tuple[PlannedFault, str, Active]] = field(default_factory=dict)

    def arm(self) -> None:
        """Put all faults on the agenda."""
        for planned in self.planned:
            self.scene.world.at(planned.at_ns, self._begin, planned)

    def _begin(self, planned: PlannedFault) -> None:
        scene = self.scene
        machine = scene.master() if planned.target == MASTER else None
        if machine is None:
            names = {m.name: m for m in scene.machines}
            machine = names.get(planned.target) or scene.machines[planned.seed % len(scene.machines)]
        name = f"#{planned.number} {planned.kind} {machine.name}"
        scene.history.add(FaultBegan(scene.world.now_ns, name))
        scene.world.tell("fault", f"begins: {name} for {planned.length_ns / SECOND:.3f} s")
        active = KINDS[planned.kind].begin(scene, machine, planned, random.Random(planned.seed))
        self._active[planned.number] = (planned, name, active)
        scene.world.after(planned.length_ns, self._end, planned.number)

    def _end(self, number: int) -> None:
        entry = self._active.pop(number, None)
        if entry is None:
            return
        planned, name, active = entry
        active.end()
        evidence = active.effect()
        tally = self.tallies.setdefault(planned.kind, Tally(unit=KINDS[planned.kind].unit))
        tally.add(Tally(1, int(evidence > 0), evidence))
        self.scene.history.add(FaultEnded(self.scene.world.now_ns, name))
        self.scene.world.tell("fault", f"ends: {name}; {evidence} {KINDS[planned.kind].unit}")

    def end_all(self) -> None:
        """Everything heals now."""
        for number in sorted(self._active):
            self._end(number)

    @property
    def unfinished(self) -> bool:
        return bool(self._active)
