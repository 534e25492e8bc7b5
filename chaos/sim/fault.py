"""The life of a fault: planned by dice, begun on a machine, ended, then asked for its effect. Kinds: *_faults.py."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tickwheel.chaos.sim.history import History, Record
from tickwheel.chaos.sim.network import Fabric
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.world import SECOND, World

R = TypeVar("R", bound=Record)
EXCUSE_ECHO_NS = 3 * SECOND
"""A process may stop itself because of a fault this long after the fault has ended."""


class Operators(Protocol):
    """The operators of the cluster, as faults ask for changes of its members."""

    lost: str
    """A member whose disk was wiped, until it is removed; empty if there is none."""
    promoted: set[str]
    """Newcomers that came to count."""
    removed: set[str]

    def unfinished(self) -> str:
        """The change that is under way, in words; empty without one."""
        ...

    def add(self, machine: Machine) -> None: ...

    def remove(self, machine: Machine) -> None: ...

    def can_lose(self, machine: Machine) -> bool:
        """Whether the cluster can replace this member if its disk is wiped now."""
        ...

    def replace_lost(self, machine: Machine, by: Machine) -> None: ...


class Scene(Protocol):
    """The part of a run that faults act on."""

    world: World
    fabric: Fabric[Machine]
    history: History
    founders: tuple[str, ...]

    @property
    def machines(self) -> Sequence[Machine]: ...

    def master(self) -> Machine | None:
        """The machine of the current master, by the highest term; None without a master."""
        ...

    @property
    def operators(self) -> Operators | None:
        """The operators, who add and remove members; None in a run of the log alone."""
        ...

    def join(self) -> Machine:
        """A new machine with an empty disk, which boots and waits to be added."""
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


Course = Generator[None, None, int]
"""A fault from its beginning: it strikes, yields until its end, undoes what it did, and returns the evidence of its
effect. One that cannot strike returns 0 at once."""
Counted = Iterator[None]
"""A course whose evidence is counted on the way, by `Going.hits`."""


@dataclass(slots=True)
class Going:
    """A fault under way, as its course and its callbacks share it: none of these acts once it is over."""

    scene: Scene
    length_ns: int
    hits: int = 0
    """Evidence of its effect so far."""
    over: bool = False

    def when(self, kind: type[R], act: Callable[[R], None]) -> None:
        """Act on each record of a kind."""

        def seen(record: Any) -> None:
            if not self.over:
                act(record)

        self.scene.history.subscribe((kind,), seen)

    def after(self, delay_ns: int, act: Callable[..., None], *args: Any) -> None:
        """Act some time later."""

        def strike() -> None:
            if not self.over:
                act(*args)

        self.scene.world.after(delay_ns, strike)

    def again(self, act: Callable[[], None], pause_ns: Callable[[], int]) -> None:
        """Act now, and after each pause."""
        if not self.over:
            act()
            self.scene.world.after(pause_ns(), self.again, act, pause_ns)

    def until_end(self) -> Counted:
        """The rest of the fault's course, if nothing but nodes that are down is to be undone."""
        yield
        for one in self.scene.machines:
            one.start()


class Active:
    """A fault that has begun. `evidence` of its effect is counted at its end."""

    def __init__(self, course: Counted, going: Going | None = None) -> None:
        self._course = course
        self._going = going
        self.evidence = 0
        self._go_on()

    def end(self) -> None:
        """End it, if it has not ended."""
        if self._going is not None:
            self._going.over = True
        self._go_on()

    def _go_on(self) -> None:
        try:
            next(self._course)
        except StopIteration as over:
            if over.value is not None:
                self.evidence = over.value
            elif self._going is not None:
                self.evidence = self._going.hits


@dataclass(slots=True)
class Tally:
    """The outcome of all faults of a kind, over one run or many."""

    injected: int = 0
    effective: int = 0
    evidence: int = 0
    unit: str = ""

    def add(self, other: Tally) -> None:
        self.injected += other.injected
        self.effective += other.effective
        self.evidence += other.evidence
        self.unit = self.unit or other.unit


Begin = Callable[[Scene, Machine, Going, random.Random], Counted]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault: how it begins, how long it lasts, what its evidence counts."""

    begin: Begin
    length_ms: tuple[int, int]
    unit: str
    default: bool = True
    """Whether the kind is in the default set."""
    apart: bool = False
    """Drawn from a separate random stream, so that it does not change the other faults of a seed."""
    at_start: bool = False
    """Begins with the run, once at most; only for kinds that are drawn apart."""
    node_only: bool = False
    """Needs whole nodes: a run of the log alone has no target for it."""


@contextmanager
def excused(scene: Scene, machine: Machine) -> Iterator[None]:
    """The process on a machine may stop itself, until a moment after the end."""
    machine.excuses += 1
    yield
    scene.world.after(EXCUSE_ECHO_NS, _excuse_over, machine)


def _excuse_over(machine: Machine) -> None:
    """A stop of the machine's process is a broken promise again. A process that is frozen meanwhile has the time again
    when it wakes: it may stop only then."""
    if machine.frozen:
        machine.world.after(EXCUSE_ECHO_NS, _excuse_over, machine)
        return
    machine.excuses -= 1


def lost_on(*machines: Machine) -> int:
    """Pages and directory changes that the disks of machines have lost so far."""
    counters = [machine.disk.counters() for machine in machines]
    return sum(one.pages_lost + one.dir_changes_lost for one in counters)


def other_than_master(scene: Scene, machine: Machine) -> Machine:
    """The target, or another if that is the master."""
    master = scene.master()
    return machine if machine is not master else next(one for one in scene.machines if one is not master)
