"""Worker threads of one simulated machine: work takes simulated time, nothing runs beside anything.

A work starts when one of `WORKERS` is free, takes effect at a random moment of its time and is reported
at its end. So what was written after an fdatasync began may or may not be covered by it, and a crash
before its report may find it done or not.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from tickwheel.chaos.sim.world import MS, World
from tickwheel.storage.simulated import PowerLost

WORKERS = 4
WORK_NS_LEAST = 100_000
WORK_NS_MOST = 10_000_000
# However many faults slow one disk: a sync that hangs for seconds is another fault.
SLOWNESS_MOST = 60.0
HELD_NS = 50 * MS
"""How often a work that hangs by itself is looked at."""

T = TypeVar("T")


@dataclass(slots=True)
class WorkFaults:
    """Delays and stops of the work of one machine, through all its boots. Faults set them."""

    slowness: float = 1.0
    slow_work_ns: dict[str, int] = field(default_factory=dict)
    """By name of the function: longest duration of work that is slower than other work."""
    hangs_until_ns: int = 0
    """Time until which no work returns."""
    hung_work: str = ""
    """Works of functions whose name begins so return only when this is empty again."""
    hung: int = 0
    """Number of works that hung."""


class Host(Protocol):
    """The machine, as its executor sees it."""

    work_faults: WorkFaults
    boot: int
    frozen: bool

    @property
    def process(self) -> object | None: ...

    def when_thawed(self, function: Callable[..., None], *args: Any) -> None: ...

    def power_lost(self) -> None: ...

    def deliver(self, function: Callable[..., object], *args: Any) -> None: ...


def _name(work: Callable[[], object]) -> str:
    """By which faults name it."""
    return (work.func if isinstance(work, partial) else work).__qualname__


class SyncAnswer(Generic[T]):
    """A call that only the log waits for: the answer to a sync of its journal."""

    def __init__(self, done: Callable[[T | None, BaseException | None], None]) -> None:
        self._done = done

    def __call__(self, result: T | None, error: BaseException | None) -> None:
        self._done(result, error)


class SimulatedExecutor:
    """`replication.ports.Executor` of one boot of a machine; a later boot has its own."""

    def __init__(self, world: World, machine: Host, rng: random.Random) -> None:
        self._world = world
        self._machine = machine
        self._boot = machine.boot
        self._rng = rng
        self._free_ns = [0] * WORKERS

    def submit(self, work: Callable[[], T], done: Callable[[T | None, BaseException | None], None]) -> None:
        """Run `work` in simulated time; `done` comes in a later turn of the machine."""
        rng, faults = self._rng, self._machine.work_faults
        # Log-uniform: mostly fast, sometimes the slow disk of a bad day.
        takes_ns = int(WORK_NS_LEAST * (WORK_NS_MOST / WORK_NS_LEAST) ** rng.random())
        takes_ns = int(takes_ns * min(faults.slowness, SLOWNESS_MOST))
        slow_ns = faults.slow_work_ns.get(_name(work), 0)
        if slow_ns:
            takes_ns = max(takes_ns, int(slow_ns * rng.random()))
        start_ns = max(self._world.now_ns, heapq.heappop(self._free_ns))
        end_ns = start_ns + takes_ns
        heapq.heappush(self._free_ns, end_ns)
        effect_ns = start_ns if rng.random() < 0.3 else start_ns + int(takes_ns * rng.random())
        self._world.at(effect_ns, self._take_effect, work, done, end_ns)

    def _take_effect(
        self, work: Callable[[], T], done: Callable[[T | None, BaseException | None], None], end_ns: int
    ) -> None:
        machine, faults = self._machine, self._machine.work_faults
        if machine.boot != self._boot or machine.process is None:
            return
        if faults.hangs_until_ns > self._world.now_ns:
            faults.hung += 1
            late_ns = faults.hangs_until_ns - self._world.now_ns
            self._world.after(late_ns, self._take_effect, work, done, end_ns + late_ns)
            return
        if faults.hung_work and _name(work).startswith(faults.hung_work):
            faults.hung += 1
            self._world.after(HELD_NS, self._take_effect_unheard, work)
            return
        if machine.frozen:
            machine.when_thawed(self._take_effect, work, done, end_ns)
            return
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except PowerLost:
            machine.power_lost()
            return
        except Exception as error:
            failure = error
        self._world.at(end_ns, self._report, done, result, failure)

    def _take_effect_unheard(self, work: Callable[[], T]) -> None:
        """Carry out a piece of work that hung by itself, once the hang is over. Its effect reaches the disk; its call
        never returns."""
        machine = self._machine
        if machine.boot != self._boot or machine.process is None:
            return
        if machine.work_faults.hung_work:
            self._world.after(HELD_NS, self._take_effect_unheard, work)
        else:
            work()

    def _report(
        self, done: Callable[[T | None, BaseException | None], None], result: T | None, failure: BaseException | None
    ) -> None:
        if self._machine.boot == self._boot:
            self._machine.deliver(done, result, failure)


class SyncExecutor:
    """The same executor, as the one that syncs the journal."""

    def __init__(self, executor: SimulatedExecutor) -> None:
        self._executor = executor

    def submit(self, work: Callable[[], T], done: Callable[[T | None, BaseException | None], None]) -> None:
        """As Executor.submit."""
        self._executor.submit(work, SyncAnswer(done))
