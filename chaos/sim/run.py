"""One run: a seed, a cluster, faults, then heal, drain and the verdict.

`simulate` never raises for what the cluster does: a broken promise, or an exception that came out of a
node, is in the `RunResult`.
"""

from __future__ import annotations

import gc
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace

from tickwheel.chaos.sim.checkers import ALL, BrokenPromise, Checker, attach
from tickwheel.chaos.sim.checkers.p5_duplicates import FewDuplicates
from tickwheel.chaos.sim.checkers.p7_one_master import OneMaster
from tickwheel.chaos.sim.checkers.p10_live import Live
from tickwheel.chaos.sim.checkers.p13_keys import KeysHeld
from tickwheel.chaos.sim.clock_faults import DRIFT_ALLOWANCE_MS
from tickwheel.chaos.sim.core_process import pushes_first
from tickwheel.chaos.sim.fault import Operators
from tickwheel.chaos.sim.faults import KINDS, Injector, plan
from tickwheel.chaos.sim.history import Drained, HandoverEnded, Healed, History, Record, RunBegan
from tickwheel.chaos.sim.history_machines import MomentSeen, RoleSeen, Stopped
from tickwheel.chaos.sim.log_load import LogLoad
from tickwheel.chaos.sim.network import Fabric
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.setup import Level, Load, RunResult, SimulationConfig
from tickwheel.chaos.sim.shape import Shape, draw, slow_work_ns
from tickwheel.chaos.sim.world import EPOCH_HOUR_MS, MS, SECOND, Story, World
from tickwheel.node.core.pacing import SPACING_MS_MAX

PERIOD_NS = 10 * SECOND
SPELL_NS = 500 * MS


class Pace:
    """Sets the least time between turns of the machines of a run: in long runs coarse, but for a spell of each period.

    Every machine has spells of its own, so that mostly one is quick among slow ones. What falls between coarse turns is
    met in the spells; a run that were fine throughout would take several times as long.
    """

    def __init__(self, world: World, shape: Shape) -> None:
        self._world = world
        self._spell_ns = shape.loop_gap_us * MS // 1_000
        self._rest_ns = max(self._spell_ns, shape.rest_gap_us * MS // 1_000)

    def start(self, machine: Machine) -> None:
        """From now on."""
        machine.turn_ns = self._rest_ns
        if self._rest_ns > self._spell_ns:
            rng = self._world.stream(f"pace/{machine.name}")

            def period() -> None:
                begin_ns = rng.randrange(PERIOD_NS - SPELL_NS)
                self._world.after(begin_ns, set_gap, self._spell_ns)
                self._world.after(begin_ns + SPELL_NS, set_gap, self._rest_ns)
                self._world.after(PERIOD_NS, period)

            def set_gap(turn_ns: int) -> None:
                machine.turn_ns = turn_ns

            period()


WARM_UP_NS = 2 * SECOND
DRAIN_NS_LEAST = 2 * SECOND
DRAIN_NS_MOST = 60 * SECOND
DRAIN_STEP_NS = 250 * MS


class Cluster:
    """The machines of a run with their network, clients and checkers; `faults.Scene` and `setup.Stage`."""

    def __init__(self, seed: int, config: SimulationConfig, story: Story | None = None) -> None:
        self.config = config
        self.world = World(seed, story)
        self.history = History(self.world)
        self.fabric = Fabric[Machine](self.world)
        fixed = config.shape if not config.nodes else (*config.shape, ("nodes", config.nodes))
        self.shape = draw(self.world, config.seconds, fixed)
        if self.shape.hour_after_ms:
            self.world.start_wall_ms = EPOCH_HOUR_MS - self.shape.hour_after_ms
        self.faults_end_ns = WARM_UP_NS + config.seconds * SECOND
        self._pace = Pace(self.world, self.shape)
        self.founders = tuple(f"n{number}" for number in range(1, self.shape.nodes + 1))
        self._masters: dict[str, int] = {}
        self.moments: dict[str, int] = {}
        self.history.subscribe((RoleSeen, Stopped), self._standing)
        self.history.subscribe((MomentSeen,), self._moment)
        self.checkers: list[Checker] = attach(self.history, ALL)
        self.load: Load = self._make_load()
        self._machines: list[Machine] = []
        for name in self.founders:
            self._machine(name)

    def _machine(self, name: str) -> Machine:
        machine = Machine(self.world, self.fabric, self.history, name, self.load.build)
        self._pace.start(machine)
        machine.work_faults.slow_work_ns = slow_work_ns(self.shape)
        self._machines.append(machine)
        self.fabric.add(machine)
        return machine

    def _make_load(self) -> Load:
        if self.config.level is Level.LOG:
            return LogLoad(self)
        # Not at the top: the log alone can be driven without the rest of the node.
        from tickwheel.chaos.sim.node_load import NodeLoad

        return NodeLoad(self)

    @property
    def machines(self) -> Sequence[Machine]:
        return self._machines

    def master(self) -> Machine | None:
        """The machine that leads the highest term."""
        best = max(self._masters.items(), key=lambda item: (item[1], item[0]), default=None)
        return self.fabric.machines[best[0]] if best else None

    @property
    def operators(self) -> Operators | None:
        return self.load.operators

    def join(self) -> Machine:
        """A new machine with an empty disk, which boots and waits to be added."""
        machine = self._machine(f"n{len(self.fabric.machines) + 1}")
        machine.joining = True
        machine.start()
        return machine

    def leave(self, machine: Machine) -> None:
        """The machine's node is no longer a member: no fault strikes it, and the run's end does not wait for it."""
        self._machines.remove(machine)

    def _counts(self, machine: Machine) -> bool:
        return self.operators is not None and machine.name in self.operators.promoted

    def hand_over(self, done: Callable[[bool], None]) -> None:
        """Ask the master to hand over to any other."""
        master = self.master()
        if master is None or not master.running:
            done(False)
            return
        others = [m.name for m in self._machines if m is not master and not (m.joining and not self._counts(m))]
        if not others:  # a lost member was removed, and the one in its place does not count yet
            done(False)
            return
        asked_ns = self.world.now_ns

        def ended(came_about: bool) -> None:
            self.history.note(HandoverEnded, master.name, asked_ns, came_about)
            done(came_about)

        self.load.hand_over(master, others[self.world.steps % len(others)], ended)

    def _standing(self, record: Record) -> None:
        match record:
            case RoleSeen(role="master"):
                self._masters[record.node] = record.term
            case RoleSeen() | Stopped():
                self._masters.pop(record.node, None)

    def _moment(self, record: Record) -> None:
        assert isinstance(record, MomentSeen)
        self.moments[record.what] = self.moments.get(record.what, 0) + 1

    # -- the course of a run

    def play(self, injector: Injector) -> None:
        """All of it; raises BrokenPromise."""
        with self.load.small():
            self._play(injector)

    def _play(self, injector: Injector) -> None:
        world, history = self.world, self.history
        kinds = tuple(p.kind for p in injector.planned)
        push_first = self.config.level is Level.NODE and pushes_first(world.seed)
        allowance_ms = DRIFT_ALLOWANCE_MS if "drift" in kinds else 0
        history.add(
            RunBegan(
                0,
                world.start_wall_ms,
                kinds,
                self.load.groups,
                allowance_ms,
                push_first,
                len(self.founders),
                self.shape.work_ms > 0,
                self.shape.dispatch_ahead_ms + SPACING_MS_MAX,
                self.shape.hours_kept,
                self.shape.loop_gap_us * MS // 1_000,
                self.shape.in_flight_max,
                self.shape.retention_ms,
                self.shape.window_messages,
            )
        )
        rng = world.stream("boot")
        for machine in self._machines:
            world.at(rng.randrange(200 * MS), machine.start)
        self.load.start()
        injector.arm()
        world.run_until(self.faults_end_ns)
        injector.end_all()
        for machine in self._machines:
            if machine.frozen:
                machine.thaw()
            machine.start()
        for machine in self._machines:
            machine.work_faults.slow_work_ns = {}
        history.note(Healed)
        world.tell("run", "all faults have ended: drain")
        self.load.wind_down()
        begun_ns = world.now_ns
        waits_for = "the least time of a drain"
        while world.now_ns < begun_ns + DRAIN_NS_MOST:
            world.run_until(world.now_ns + DRAIN_STEP_NS)
            waits_for = self.load.unfinished()
            if not waits_for and world.now_ns >= begun_ns + DRAIN_NS_LEAST:
                break
        if not waits_for:
            self.load.finish()
        elif any(isinstance(checker, Live) and checker.resumed_after_ns is not None for checker in self.checkers):
            # The cluster works: that something never comes is told by whom it is missing to, not as a standstill.
            for checker in self.checkers:
                if checker.missing(world.now_ns):
                    checker.settle_accounts(world.now_ns)
        history.note(Drained, waits_for)
        for checker in self.checkers:
            checker.settle_accounts(world.now_ns)


def simulate(seed: int, config: SimulationConfig, story: Story | None = None) -> RunResult:
    """Run one seed to its verdict, with the configured old bug put in, if any."""
    if not config.mutation:
        return _simulate(seed, config, story)
    # Not at the top: the log alone can be driven without the rest of the node.
    from tickwheel.chaos.sim.mutations import mutated

    with mutated(config.mutation):
        return _simulate(seed, config, story)


def _simulate(seed: int, config: SimulationConfig, story: Story | None) -> RunResult:
    logging.getLogger("pysyncobj").setLevel(logging.CRITICAL)
    result = RunResult(seed)
    started_s = time.process_time()
    cluster = Cluster(seed, config, story)
    world = cluster.world
    kinds = [k for k in config.faults if config.level is Level.NODE or not KINDS[k].node_only]
    planned = plan(world, kinds, cluster.founders, WARM_UP_NS, cluster.faults_end_ns)
    result.planned = tuple(planned)
    if config.only is not None:
        planned = [fault for fault in planned if fault.number in config.only]
    injector = Injector(cluster, planned)
    collecting = gc.isenabled()
    gc.disable()  # objects live as long as the run; collections only cost time
    try:
        cluster.play(injector)
    except BrokenPromise as broken:
        result.promise, result.broken = broken.promise, str(broken)
        world.tell("run", f"BROKEN: {broken}")
    except Exception as error:  # whatever a node raises is a finding, not our end
        result.promise = "crash"
        result.broken = f"crash at {world.now_ns / SECOND:.6f} s: {type(error).__name__}: {error}"
        result.where = traceback.format_exc()
        world.tell("run", result.broken)
    finally:
        if collecting:
            gc.enable()
    result.digest = world.digest()
    result.simulated_ns = world.now_ns
    result.steps = world.steps
    result.cpu_s = time.process_time() - started_s
    result.tallies = injector.tallies
    result.counts = dict(cluster.history.counts)
    result.facts = _facts(cluster)
    result.commands = cluster.load.commands()
    return result


def _facts(cluster: Cluster) -> dict[str, float]:
    facts: dict[str, float] = {"turns": sum(m.turns for m in cluster.machines)}
    facts |= {f"moment: {what}": count for what, count in cluster.moments.items()}
    for checker in cluster.checkers:
        match checker:
            case OneMaster():
                facts["elections"] = checker.elections
            case FewDuplicates():
                for reason, count in checker.reasons.items():
                    facts[f"again: {reason}"] = count
            case KeysHeld() if checker.judged:
                facts["keys judged"], facts["keys in doubt"] = checker.judged, checker.doubtful
            case Live() if checker.resumed_after_ns is not None:
                facts["resumed_s"] = checker.resumed_after_ns / SECOND
    return facts


def shrink(
    failing: RunResult, config: SimulationConfig, tried: Callable[[int, int], None]
) -> tuple[SimulationConfig, RunResult]:
    """Leave faults out, halves first and then one by one, while the same promise breaks.

    `tried(runs, faults_left)` is told of every attempt.
    """
    kept = list(config.only) if config.only is not None else [fault.number for fault in failing.planned]
    best = failing
    runs = 0
    size = max(1, len(kept) // 2)
    while size:
        start = 0
        while start < len(kept):
            candidate = kept[:start] + kept[start + size :]
            result = simulate(failing.seed, replace(config, only=tuple(candidate)))
            runs += 1
            if result.failed and result.promise == failing.promise:
                kept, best = candidate, result
            else:
                start += size
            tried(runs, len(kept))
        size //= 2
    return replace(config, only=tuple(kept)), best
