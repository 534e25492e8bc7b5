"""The history of a run: its events, as an observer with a true clock would record them.

Every record carries true time in ns, which no fault changes. Records are only ever added. Each one goes to the checkers
at once (safety after each step) and into the digest of the run. No code may change a record; they are not frozen only
because that takes three times as long, and a run makes tens of thousands.

This module has the base of all records, the records of the run itself, and `History`, which takes all of them. Other
records are grouped by subject: `history_machines.py` (nodes on their machines), `history_log.py` (the replicated log),
`history_messages.py` (producers and consumers), `history_bulk.py` (bulk writers and loaders), `history_operators.py`
(requests of operators).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Concatenate, ParamSpec, dataclass_transform

from tickwheel.chaos.sim.world import World


@dataclass_transform()
@dataclass
class Record:
    """Anything that happened at a true time. Each kind derives from it and is thereby a dataclass."""

    at_ns: int

    def __init_subclass__(cls) -> None:
        dataclass(cls)


# -- the run


class RunBegan(Record):
    """First record. True wall time in ms is `start_wall_ms` + at_ns // 1_000_000."""

    start_wall_ms: int
    faults: tuple[str, ...]
    groups: tuple[str, ...]
    clock_allowance_ms: int = 0
    push_first: bool = False
    """Deliveries may come before their dispatch is committed."""
    nodes: int = 0
    """Voters of the cluster; 0: not said."""
    slow_work: bool = False
    """Background work is slow on all nodes until the heal. This is no fault, but may delay messages."""
    dispatch_ahead_ms: int = 32
    """How long before its due time a message may be dispatched."""
    hours_kept: int = 1
    """Whole hours before the present one that no message is removed from."""
    loop_gap_ns: int = 0
    """Least time between two turns of a node's loop."""
    in_flight_max: int = 0
    """Most messages that a group may have out with its consumers; 0: no limit that holds for the whole run."""
    retention_ms: int = 0
    """How long the cluster keeps unsettled messages; 0: longer than the run."""
    window_messages: int = 0
    """Messages of a topic that a group may have from its first unsettled one on; 0: more than a run has."""


class FaultBegan(Record):
    fault: str


class FaultEnded(Record):
    fault: str


class HandoverEnded(Record):
    """A planned handover that a master was asked for at `asked_ns`."""

    node: str
    asked_ns: int
    came_about: bool


class Healed(Record):
    """All faults have ended and all machines run."""


class Drained(Record):
    """The run is over; `reason` says what was still missing, empty if nothing."""

    reason: str


P = ParamSpec("P")
Observer = Callable[[Record], None]


class _Kind:
    """All about one kind of record: how many there were, its values as a tuple, who judges it."""

    __slots__ = ("count", "observers", "values")

    def __init__(self, kind: type[Record]) -> None:
        self.count = 0
        self.observers: list[Observer] = []
        self.values = attrgetter("__class__.__name__", *(field.name for field in fields(kind)))


class History:
    """Records in the order in which they happened."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.newest_ns = 0
        """True time of the newest record."""
        self._kinds: dict[type[Record], _Kind] = {}

    @property
    def counts(self) -> dict[str, int]:
        """Records of each kind so far, in the order of their first."""
        return {kind.__name__: known.count for kind, known in self._kinds.items() if known.count}

    def subscribe(self, kinds: Sequence[type[Record]], observer: Observer) -> None:
        """`observer` gets every record of these kinds from now on."""
        for kind in kinds:
            self._known(kind).observers.append(observer)

    def note(self, kind: Callable[Concatenate[int, P], Record], *args: P.args, **named: P.kwargs) -> None:
        """`add` a record of now."""
        self.add(kind(self._world.now_ns, *args, **named))

    def add(self, record: Record) -> None:
        """Write a record down and let the checkers judge it."""
        known = self._kinds.get(type(record)) or self._known(type(record))
        known.count += 1
        self.newest_ns = record.at_ns
        self._world.mark(repr(known.values(record)).encode())
        for observer in known.observers:
            observer(record)

    def _known(self, kind: type[Record]) -> _Kind:
        known = self._kinds.get(kind)
        if known is None:
            known = self._kinds[kind] = _Kind(kind)
        return known
