"""The table of old bugs, and the means to put one into the product.

A mutation replaces methods of the product's classes for the length of a run; the product itself has no
switch for it. Methods are named by their public classes, and one that no longer exists is an error: a
mutation that changes nothing proves nothing. The bugs are in mutations*.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, isfunction, signature
from typing import Any

from tickwheel.chaos.sim.aims import Aim

Break = Callable[["Patches"], None]


class Patches:
    """Replaced methods, to be put back."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put `make(original)` in the place of a method of a class, or of a function of a module."""
        original = owner.__dict__[name]
        made = make(original)
        assert _takes_the_same(original, made), f"{name} is called with other arguments now"
        self._undo.append((owner, name, original))
        setattr(owner, name, made)

    def undo(self) -> None:
        """Put everything back, last first."""
        while self._undo:
            owner, name, original = self._undo.pop()
            setattr(owner, name, original)


def _takes_the_same(original: Any, made: Any) -> bool:
    """Whether what replaces a function can be called like it: a TypeError would be found instead of the old bug."""
    if not (isfunction(original) and isfunction(made)):
        return True
    given, taken = signature(original).parameters.values(), signature(made).parameters.values()
    if any(parameter.kind is Parameter.VAR_POSITIONAL for parameter in taken):
        return True
    return len(given) == len(taken)


@dataclass(frozen=True, slots=True)
class Mutation:
    """One old bug. `level` is the lowest level of simulation that can show it."""

    name: str
    what: str
    level: str
    apply: Break
    aim: Aim | None
    """Directed: it shows sooner there than with the default faults."""


MUTATIONS: dict[str, Mutation] = {}


def mutation(what: str, level: str = "node", aim: Aim | None = None) -> Callable[[Break], Break]:
    """Enter a function, named after its bug, into the table."""

    def enter(function: Break) -> Break:
        MUTATIONS[function.__name__] = Mutation(function.__name__, what, level, function, aim)
        return function

    return enter
