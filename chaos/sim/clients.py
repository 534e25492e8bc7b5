"""The base of all clients in a run of whole nodes: the network to the nodes, one random stream, one clock.

Every client is simple and honest. It asks the presumed master, and then the next node if that node is not
master or does not answer in time. Calls and answers take time. Calls open at the end of a process are never
answered. What takes several steps is a coroutine, which awaits pauses and answers alone (`Wires.run`).

To add a kind of clients: write an `AskingClients` in a new module, and name it in node_load.py.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any, Protocol

from tickwheel.chaos.sim.core_process import CoreProcess
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.setup import Stage
from tickwheel.chaos.sim.shape import Shape
from tickwheel.chaos.sim.world import MS
from tickwheel.node.core.core import NodeCore, serve
from tickwheel.node.core.promise import Promise
from tickwheel.node.failure import Failure

TIMEOUT_NS = 900 * MS
"""How long a client waits for an answer."""
PAUSE_NS_MOST = 10_000 * MS
"""Longest pause, however thin a run is. Only clients that share a run pause longer (Shape.sharing_percent)."""

Call = Callable[[NodeCore, Callable[[Any], None]], None]
"""Puts a question to a node's core; the function is for its answer."""
Course = Coroutine[Promise[Any], None, None]
"""What a client does, step by step."""
NO_ANSWER = object()
"""Instead of an answer: none has come in time."""


def served(request: Callable[[NodeCore], Coroutine[Any, Any, Any]]) -> Call:
    """The call of a request that a core serves in steps."""
    return lambda core, answer: serve(core, request(core), answer)


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
    def machines(self) -> Sequence[Machine]:
        """The machines now, newcomers included."""
        return self._stage.machines

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

    def run(self, course: Course) -> None:
        """Take the steps of a coroutine, from now on."""

        def step() -> None:
            try:
                course.send(None).when_kept(step)
            except StopIteration:
                return

        step()

    async def pause(self, pause_ns: int) -> None:
        """Let time pass."""
        over: Promise[None] = Promise()
        self.world.after(pause_ns, over.keep, None)
        await over

    async def answer(
        self, machine: Machine, call: Call, timeout_ns: int = TIMEOUT_NS, heard: Callable[[], bool] = lambda: True
    ) -> Any:
        """The answer of a node, perhaps a Failure; NO_ANSWER after `timeout_ns`. What comes later is ignored. `heard`:
        whether an answer that leaves the node arrives."""
        first: list[Promise[Any]] = [Promise()]

        def take(answer: Any) -> None:
            if first:
                first.pop().keep(answer)

        def left(answer: Any) -> None:
            if heard():
                self.back(take, answer)

        promise = first[0]
        self.call(machine, lambda core: call(core, left))
        self.world.after(timeout_ns, take, NO_ANSWER)
        return await promise

    def redirect(self, failure: Failure, target: int) -> int:
        """Number of the machine to ask next after a refusal."""
        names = [machine.name for machine in self._stage.machines]
        master = failure.metadata.get("master_id", "")
        return names.index(master) if master in names else target + 1
