"""The base of all clients in a run of whole nodes: the network to the nodes, one random stream, one clock.

Every client is simple and honest. It asks the presumed master, and then the next node if that node is not
master or does not answer in time. Calls and answers take time. Calls open at the end of a process are never
answered.

To add a kind of clients: write a `Clients` in a new module, and put it into `NodeLoad.parts`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Protocol

from tickwheel.chaos.sim.core_process import CoreProcess
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.setup import Stage
from tickwheel.chaos.sim.shape import Shape
from tickwheel.chaos.sim.world import MS
from tickwheel.node.core.core import NodeCore
from tickwheel.node.failure import Failure

TIMEOUT_NS = 900 * MS
"""How long a client waits for an answer."""
PAUSE_NS_MOST = 10_000 * MS
"""Longest pause, however thin a run is. Only clients that share a run pause longer (Shape.sharing_percent)."""


class Clients(Protocol):
    """Some of the clients of a run. `Wires.winding_down` tells them that faults are over."""

    def start(self) -> None:
        """Begin."""
        ...

    def unfinished(self) -> str:
        """The reason, in words, why the drain must still wait; empty when it is done."""
        ...


class Wires:
    """Between the clients and the nodes of a run."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.world = stage.world
        self.history = stage.history
        self.rng = stage.world.stream("clients")
        self.winding_down = False
        """Finish open work, and begin new work only to show that the cluster is alive."""
        self._numbers = 0
        self._sessions = 0

    @property
    def shape(self) -> Shape:
        """The shape of this run."""
        return self._stage.shape

    def pause_ns(self, mean_ns: int, rng: Random, cheap: bool = False) -> int:
        """The pause until a client acts again. `mean_ns` is the mean in a dense run. `cheap`: a small action. A thin
        run has twice as many of these, and `sharing_percent` does not slow them. The part of a pause after the end of
        the faults is as short as in a dense run, since a longer one would only lengthen the drain."""
        shape = self.shape
        thin = max(1, shape.thin // 2) if cheap else shape.thin
        dense_ns = min(int(rng.expovariate(1 / (mean_ns * thin))), PAUSE_NS_MOST) // thin
        slower_percent = thin * (100 if cheap else shape.sharing_percent)
        pause_ns = dense_ns * slower_percent // 100
        left_ns = max(0, self._stage.faults_end_ns - self.world.now_ns)
        return pause_ns if pause_ns <= left_ns else left_ns + (pause_ns - left_ns) * 100 // slower_percent

    def number(self) -> int:
        """The next of the numbers from 1 on that name things of this run."""
        self._numbers += 1
        return self._numbers

    def session(self) -> int:
        """The number of the next session of any consumer, from 1 on."""
        self._sessions += 1
        return self._sessions

    def machine(self, target: int) -> Machine:
        """The machine for a number that a client increases when one does not answer."""
        machines = self._stage.machines
        return machines[target % len(machines)]

    @property
    def machine_count(self) -> int:
        """Number of machines now, newcomers included."""
        return len(self._stage.machines)

    def call(self, machine: Machine, action: Callable[[NodeCore], None]) -> None:
        """Run something on a node's core after the way there; lost if the process is gone by then."""

        def arrive() -> None:
            process = machine.process
            if isinstance(process, CoreProcess):
                boot = machine.boot
                machine.deliver(lambda: action(process.host.core) if machine.boot == boot else None)

        self.world.after(self.rng.randrange(100_000, 2 * MS), arrive)

    def back(self, function: Callable[..., None], *args: object) -> None:
        """Call a function of the client after the way back of an answer."""
        self.world.after(self.rng.randrange(100_000, 2 * MS), function, *args)

    def redirect(self, failure: Failure, target: int) -> int:
        """Number of the machine to ask next after a refusal."""
        names = [machine.name for machine in self._stage.machines]
        master = failure.metadata.get("master_id", "")
        return names.index(master) if master in names else target + 1
