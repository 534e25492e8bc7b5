"""The settings and the result of a run: plain data, no behaviour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from tickwheel.chaos.sim.checkers import Checker
from tickwheel.chaos.sim.fault import Operators, PlannedFault, Tally
from tickwheel.chaos.sim.faults import DEFAULT_KINDS
from tickwheel.chaos.sim.history import History
from tickwheel.chaos.sim.node import Machine, Process
from tickwheel.chaos.sim.shape import Shape
from tickwheel.chaos.sim.world import World
from tickwheel.replication.guards import Guards


class Level(Enum):
    """The software on the machines: the whole node, or its replicated log alone."""

    LOG = "log"
    NODE = "node"


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """The settings of a run besides its seed."""

    level: Level = Level.NODE
    nodes: int = 0
    """Number of nodes; 0: drawn from the seed, mostly three."""
    seconds: int = 20
    """Simulated time with load and faults; warm-up and drain come on top."""
    faults: tuple[str, ...] = DEFAULT_KINDS
    only: tuple[int, ...] | None = None
    """Numbers of the planned faults to inject; None: all."""
    guards: Guards = field(default_factory=Guards)
    shape: tuple[tuple[str, int], ...] = ()
    """Fields of the run's shape (shape.py) that are set instead of drawn."""
    mutation: str = ""
    """Name of an old bug to insert (mutations.py); empty: none."""


@dataclass(slots=True)
class RunResult:
    """The result of a run."""

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
    commands: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Commands of the log by name: how many, and how many beside a change of master (rolled.py)."""

    @property
    def failed(self) -> bool:
        return bool(self.broken)


class Stage(Protocol):
    """The part of a run that its load sees."""

    world: World
    history: History
    checkers: list[Checker]
    founders: tuple[str, ...]
    """The members that the cluster was founded with."""
    config: SimulationConfig
    shape: Shape
    faults_end_ns: int
    """Time by which all faults have ended."""

    @property
    def machines(self) -> Sequence[Machine]: ...

    def leave(self, machine: Machine) -> None:
        """The machine's node is no longer a member."""
        ...


class Load(Protocol):
    """The processes on the machines, and the clients."""

    groups: tuple[str, ...]

    def small(self) -> AbstractContextManager[None]:
        """Bounds and tables of the nodes that suit a run of seconds, for the length of the run."""
        ...

    def build(self, machine: Machine) -> Process:
        """A process on a machine's ports."""
        ...

    def start(self) -> None:
        """Clients begin."""
        ...

    def wind_down(self) -> None:
        """Faults are over: finish open work, and begin new work only to show that the cluster is alive."""
        ...

    def unfinished(self) -> str:
        """The reason, in words, why the drain must still wait; empty when it is done."""
        ...

    def finish(self) -> None:
        """Everything is drained: last look-ups into the history."""
        ...

    @property
    def operators(self) -> Operators | None:
        """The operators, who add and remove members."""
        ...

    def hand_over(self, machine: Machine, target: str, done: Callable[[bool], None]) -> None:
        """Planned handover from this machine."""
        ...

    def commands(self) -> dict[str, tuple[int, int]]:
        """As `RunResult.commands`."""
        ...
