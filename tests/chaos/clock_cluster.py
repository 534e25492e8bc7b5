"""Directed runs: a script of what happens to clocks, instead of dice, on a whole simulated cluster.

`ClockCluster` is a run's cluster whose nodes may be configured and whose clocks may be wrong from the first start.
`ClockScript` takes the place of the dice in `Cluster.play`, so that all checkers judge, P3 by true time among them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tickwheel.chaos.sim.core_process import CoreProcess
from tickwheel.chaos.sim.fault import PlannedFault
from tickwheel.chaos.sim.faults import Injector
from tickwheel.chaos.sim.history import FaultBegan, FaultEnded
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.node_load import NodeLoad
from tickwheel.chaos.sim.run import Cluster
from tickwheel.chaos.sim.setup import SimulationConfig
from tickwheel.chaos.sim.world import MS, SECOND
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.core import NodeCore

LOOK_NS = 20 * MS
COARSE = (
    *(("loop_gap_us", 10_000), ("sync_period_ms", 50), ("thin", 3), ("sharing_percent", 100)),
    *(("users", 0), ("sizes", 0)),
)
"""A third of the clients' calls show a wrong clock too, and so do nodes that turn a hundred times a second.
What `sizes` says of delays holds where the cluster knows the time."""
FINE = (("loop_gap_us", 5_000), *COARSE[1:])
"""Where clocks are wrong by milliseconds: what came that much too early would hide in longer gaps."""


class _Load(NodeLoad):
    def __init__(self, cluster: ClockCluster, changes: dict[str, Any]) -> None:
        super().__init__(cluster)
        self._changes = changes

    def node_config(self) -> CoreConfig:
        return replace(super().node_config(), **self._changes)


@dataclass(slots=True)
class Off:
    """How far nodes' time was from the true time, seen every 20 ms; and beyond what they said it could be."""

    ahead_ms: float = -1e9
    behind_ms: float = -1e9
    beyond_ms: float = -1e9
    last: dict[str, tuple[int, int]] = field(default_factory=dict)

    def note(self, machine: Machine, core: NodeCore) -> None:
        """One look."""
        now_ms = core.clock.now_ms()
        boot, before_ms = self.last.get(machine.name, (0, 0))
        assert boot != machine.boot or not core.leading or now_ms >= before_ms, f"{machine.name} was set back"
        self.last[machine.name] = (machine.boot, now_ms)
        off_ms = now_ms - machine.world.start_wall_ms - machine.world.now_ns / MS
        self.ahead_ms = max(self.ahead_ms, off_ms)
        self.behind_ms = max(self.behind_ms, -off_ms)
        self.beyond_ms = max(self.beyond_ms, off_ms - core.clock.error_ns() / MS)


class ClockCluster(Cluster):
    """Machines on which a script is played. `watch` is fed with the time of the master, while it may dispatch."""

    def __init__(
        self, seed: int, nodes: int = 3, seconds: int = 20, shape: tuple[tuple[str, int], ...] = COARSE, **changes: Any
    ) -> None:
        self._changes = changes
        super().__init__(seed, SimulationConfig(nodes=nodes, seconds=seconds, faults=(), shape=shape))
        self.watch = Off()

    def _make_load(self) -> _Load:
        return _Load(self, self._changes)

    def core(self, machine: Machine) -> NodeCore:
        """The core that runs on a machine."""
        assert isinstance(machine.process, CoreProcess)
        return machine.process.host.core

    @property
    def leader(self) -> Machine:
        """The master, which there is."""
        master = self.master()
        assert master is not None
        return master

    @property
    def slaves(self) -> list[Machine]:
        """All others."""
        return [machine for machine in self.machines if machine is not self.leader]

    def run(self, seconds: float) -> None:
        """Only let time pass."""
        self.world.run_until(self.world.now_ns + int(seconds * SECOND))

    def boot(self, seconds: float = 2.0) -> None:
        """Start all machines, without clients."""
        for machine in self.machines:
            machine.start()
        self.run(seconds)

    def look(self) -> None:
        """Note how far the master's time is off, again and again."""
        master = self.master()
        if master is not None and isinstance(master.process, CoreProcess) and not master.frozen:
            core = master.process.host.core
            if core.leading and core.clock.may_dispatch():
                self.watch.note(master, core)
        self.world.after(LOOK_NS, self.look)


class ClockScript(Injector):
    """Steps at true seconds of the run; the end of all faults heals all clocks. Counts as a run with drift."""

    def __init__(self, cluster: ClockCluster, steps: dict[float, Callable[[], None]]) -> None:
        super().__init__(cluster, [PlannedFault(0, "drift", 0, 0, "", 0)])
        self._cluster = cluster
        self._steps = steps
        self._begun: list[str] = []

    def arm(self) -> None:
        """Put the steps on the agenda."""
        self._cluster.look()
        for at_s, step in sorted(self._steps.items()):
            self._cluster.world.at(int(at_s * SECOND), self._do, f"{at_s} s of the script", step)

    def _do(self, name: str, step: Callable[[], None]) -> None:
        self._cluster.history.add(FaultBegan(self._cluster.world.now_ns, name))
        self._begun.append(name)
        step()

    def end_all(self) -> None:
        """Everything heals now."""
        for name in self._begun:
            self._cluster.history.add(FaultEnded(self._cluster.world.now_ns, name))
        for machine in self._cluster.machines:
            machine.clock.heal()
