"""The table of old bugs, the means to put one into the product, and the directed scenarios that find them.

A mutation replaces methods of the product's classes for the length of a run; the product itself has no
switch for it. Methods are named by their public classes, and one that no longer exists is an error: a
mutation that changes nothing proves nothing. The bugs are in mutations*.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any, TypeVar


@dataclass(frozen=True, slots=True)
class Aim:
    """Faults and settings of a run that walks into one gap. With nothing switched off or broken such a run is clean."""

    faults: tuple[str, ...]
    nodes: int = 0
    """0: by the dice of the seed."""
    shape: tuple[tuple[str, int], ...] = ()
    """Fields of shape.Shape that are not left to the dice."""
    without: str = ""
    """A guard in front of the one in question that is taken away too (mutations.LAYERS)."""
    seconds: int = 0
    """Length of load and faults, where the gap takes longer to reach than a run of its level lasts; 0: that length."""

    def words(self) -> str:
        """For the table."""
        parts = [", ".join(self.faults)]
        if self.nodes:
            parts.append(f"{self.nodes} nodes")
        parts += [f"{name} {value}" for name, value in self.shape]
        if self.without:
            parts.append(self.without)
        if self.seconds:
            parts.append(f"{self.seconds} s")
        return "; ".join(parts)


def aimed(*faults: str, nodes: int = 0, without: str = "", seconds: int = 0, **shape: int) -> Aim:
    """An aim; `shape` are fields of shape.Shape."""
    return Aim(faults, nodes, tuple(shape.items()), without, seconds)


FEW_CLIENTS = tuple(
    (name, 0)
    for name in (
        *("lines", "pauses", "sweeps", "writes", "loads", "parcels"),
        *("stewards", "twins", "cold", "clerks", "schedules", "keys"),
        *("turn", "splits", "resets", "past_moves", "tight"),
        *("users", "sizes", "producers_max", "retention_ms", "window_messages"),
    )
)
"""A directed run has no more clients, and no more of their habits, than it needs, so that it stays what it is when some
are added."""

GUARD_AIMS: dict[str, Aim] = {
    "answers_fenced": aimed("old-answers", nodes=5, log_pause_ms=2_000, without="repeats_taken"),
    "votes_counted_once": aimed("votes-twice", nodes=5, without="repeats_taken"),
    "pickle_refused": aimed("pickled-frame"),
    "foreign_commands_fatal": aimed("foreign-entry"),
    "bare_commit_clamped": aimed("left-behind", nodes=3, journal_tail_bytes=0, checkpoint_every=50),
    "starts_silent": aimed("restart-bridge", nodes=3, log_pause_ms=2_000),
    "apply_errors_fatal": aimed("failed-apply"),
    "transfer_marked": aimed("handover", nodes=5),
    "input_drained_first": aimed("freeze", nodes=3),
    "votes_sticky": aimed("bridge", nodes=3, log_pause_ms=2_000),
    "lease_from_sending": aimed("delay", nodes=3),
    "dumps_refused": aimed("library-calls"),
    "proposals_local": aimed("library-calls"),
}
"""By guard (replication.guards.Guards)."""


Break = Callable[["Patches"], None]
Broken = Callable[..., Any]
"""What replaces a method: it is given the original, and then what the original would be called with."""
F = TypeVar("F", bound=Callable[..., Any])


class Patches:
    """Replaced methods, to be put back."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Give an attribute of a class or a module another value."""
        self._undo.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, value)

    def replace(self, owner: Any, name: str, broken: Broken) -> None:
        """Have `broken(original, ...)` called for a method or property of a class, or for a function of a module."""
        found = owner.__dict__[name]
        original = found.fget if isinstance(found, property) else found
        assert _takes_the_same(original, broken), f"{name} is called with other arguments now"

        def instead(*args: Any, **named: Any) -> Any:
            return broken(original, *args, **named)

        self.put(owner, name, property(instead) if isinstance(found, property) else instead)

    def undo(self) -> None:
        """Put everything back, last first."""
        while self._undo:
            owner, name, original = self._undo.pop()
            setattr(owner, name, original)


def _takes_the_same(original: Any, broken: Broken) -> bool:
    """Whether what replaces a function can be called like it: a TypeError would be found instead of the old bug."""
    taken = signature(broken).parameters.values()
    if any(parameter.kind is Parameter.VAR_POSITIONAL for parameter in taken):
        return True
    return len(signature(original).parameters) == len(taken) - 1


@dataclass(frozen=True, slots=True)
class Mutation:
    """One old bug. `level` is the lowest level of simulation that can show it."""

    level: str
    apply: Break
    aim: Aim | None
    """Directed: it shows sooner there than with the default faults."""


MUTATIONS: dict[str, Mutation] = {}


def mutation(owner: Any = None, method: str = "", *, level: str = "node", aim: Aim | None = None) -> Callable[[F], F]:
    """Enter a function into the table, named after its bug, which its docstring describes.

    With an owner the function stands in the place of that one method, as `Patches.replace` says. Without, it is given
    the `Patches` and replaces what it needs.
    """

    def enter(function: F) -> F:
        apply = function if owner is None else lambda patches: patches.replace(owner, method, function)
        MUTATIONS[function.__name__] = Mutation(level, apply, aim)
        return function

    return enter
