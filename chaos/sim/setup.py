"""What a run is made of and what comes out of it: plain data, no behaviour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from tickwheel.chaos.sim.fault import PlannedFault, Tally
from tickwheel.chaos.sim.faults import DEFAULT_KINDS
from tickwheel.chaos.sim.history import History
from tickwheel.chaos.sim.node import Machine, Process
from tickwheel.chaos.sim.shape import Shape
from tickwheel.chaos.sim.world import World
from tickwheel.replication.guards import Guards

if TYPE_CHECKING:
    from tickwheel.chaos.sim.operators import Operators


class Level(Enum):
    """What runs on the machines: the whole node, or its replicated log alone."""

    LOG = "log"
    NODE = "node"


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """What a run is made of, besides its seed."""

    level: Level = Level.NODE
    nodes: int = 0
    """0: by the dice of the seed, mostly three."""
    seconds: int = 20
    """Simulated time with load and faults; warm-up and drain come on top."""
    faults: tuple[str, ...] = DEFAULT_KINDS
    only: tuple[int, ...] | None = None
    """Numbers of the planned faults to inject; None: all."""
    guards: Guards = field(default_factory=Guards)
    shape: tuple[tuple[str, int], ...] = ()
    """Fields of the run's shape (shape.py) that are not left to the dice."""
    mutation: str = ""
    """Name of an old bug that is put in (mutations.py); empty: none."""


@dataclass(slots=True)
class RunResult:
    """What came out of a run."""

    seed: int
    digest: str = ""
    promise: str = ""
    """The promise that was broken; "crash" for an exception that came out of a node; empty if all is well."""
    broken: str = ""
    where: str = ""
    """Traceback when an exception came out of a node."""
    simulated_ns: int = 0
    cpu_s: float = 0.0
    steps: int = 0
    planned: tuple[PlannedFault, ...] = ()
    tallies: dict[str, Tally] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return bool(self.broken)


class Stage(Protocol):
    """What a load sees of the run it belongs to."""

    world: World
    history: History
    founders: tuple[str, ...]
    """The members that the cluster was founded with."""
    config: SimulationConfig
    shape: Shape
    faults_end_ns: int
    """When all faults have ended."""

    @property
    def machines(self) -> Sequence[Machine]: ...

    def leave(self, machine: Machine) -> None:
        """Its node is no member any more."""
        ...


class Load(Protocol):
    """What runs on the machines, and the clients."""

    groups: tuple[str, ...]

    def build(self, machine: Machine) -> Process:
        """A process on a machine's ports."""
        ...

    def start(self) -> None:
        """Clients begin."""
        ...

    def wind_down(self) -> None:
        """Faults are over: no new work but what shows that the cluster is alive; what is open is finished."""
        ...

    def unfinished(self) -> str:
        """What the drain still waits for, in words; empty when done."""
        ...

    def finish(self) -> None:
        """Everything is drained: last look-ups into the history."""
        ...

    @property
    def operators(self) -> Operators | None:
        """Who adds and removes members."""
        ...

    def hand_over(self, machine: Machine, target: str, done: Callable[[bool], None]) -> None:
        """Planned handover from this machine."""
        ...
