"""Replacements for the globals through which pysyncobj reaches the world.

pysyncobj takes clock, random numbers, journal, poller and pickle from globals of its modules (monotonicTime, random,
createJournal, createPoller, pickle). `install` replaces each by one that asks the current engine; outside any engine it
behaves like the original. So several nodes with their own clocks can live in one process.

Invariants: the engine entered last is the current one; inside an engine nothing is pickled or unpickled.

Only the seam uses this, and tests that look through it.
"""

from __future__ import annotations

from typing import Any, Protocol

import pysyncobj.serializer
import pysyncobj.syncobj

from tickwheel.replication.guards import Guards
from tickwheel.replication.ports import Random


class PickleRefusedError(RuntimeError):
    """Code inside a node tried to pickle or unpickle."""


class Inside(Protocol):
    """The part of an engine that pysyncobj uses through its globals."""

    random: Random
    guards: Guards
    view: Any
    """The journal, with the methods that pysyncobj calls."""

    def now_s(self) -> float: ...


_stack: list[Inside] = []


class entered:
    """`with entered(engine)` makes it the current engine. A class: a generator would take four times as long."""

    __slots__ = ("_engine",)

    def __init__(self, engine: Inside) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        _stack.append(self._engine)

    def __exit__(self, *_: object) -> None:
        _stack.pop()


class _NoPoller:
    def subscribe(self, *_: object) -> None: ...
    def unsubscribe(self, *_: object) -> None: ...
    def poll(self, _timeout: float) -> None: ...


class _RandomHere:
    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def random(self) -> float:
        return _stack[-1].random.random() if _stack else self._stock.random()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


class _PickleHere:
    """Raises PickleRefusedError inside an engine; behaves like pickle elsewhere in the process."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def __getattr__(self, name: str) -> Any:
        if _stack and _stack[-1].guards.pickle_refused:
            raise PickleRefusedError(f"pickle.{name} inside a node")
        return getattr(self._stock, name)


def install() -> None:
    """Replace the globals of pysyncobj's modules. Later calls in the process do nothing."""
    module = pysyncobj.syncobj
    if isinstance(module.pickle, _PickleHere):
        return
    clock, journal, poller = module.monotonicTime, module.createJournal, module.createPoller
    module.monotonicTime = lambda: _stack[-1].now_s() if _stack else clock()
    module.createJournal = lambda path: _stack[-1].view if _stack else journal(path)
    module.createPoller = lambda kind: _NoPoller() if _stack else poller(kind)
    module.random = _RandomHere(module.random)
    module.pickle = _PickleHere(module.pickle)
    pysyncobj.serializer.pickle = _PickleHere(pysyncobj.serializer.pickle)
