"""By which names pysyncobj reaches the world, and what stands there instead.

It takes clock, randomness, journal, poller and pickle from globals of its modules (monotonicTime, random,
createJournal, createPoller, pickle). `install` replaces them by names that ask the engine entered at the moment;
outside of any engine they are the stock ones. So several nodes with clocks of their own live in one process.

Invariants: the engine entered last is asked, and no other; inside an engine nothing is pickled or unpickled.

Only the seam uses this, and tests that look through it.
"""

from __future__ import annotations

from typing import Any, Protocol

import pysyncobj.serializer
import pysyncobj.syncobj

from tickwheel.replication.guards import Guards
from tickwheel.replication.ports import Random


class PickleRefusedError(RuntimeError):
    """Something inside a node wanted to pickle or unpickle."""


class Inside(Protocol):
    """What an engine gives to pysyncobj while it is entered."""

    random: Random
    guards: Guards
    view: Any
    """The journal, with the methods that pysyncobj calls."""

    def now_s(self) -> float: ...


_stack: list[Inside] = []


class entered:
    """`with entered(engine)`; a class, since generators as context managers take four times as long."""

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
    """Refuses inside an engine; elsewhere in the process pysyncobj may do as it likes."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def __getattr__(self, name: str) -> Any:
        if _stack and _stack[-1].guards.pickle_refused:
            raise PickleRefusedError(f"pickle.{name} inside a node")
        return getattr(self._stock, name)


def install() -> None:
    """Put our names into pysyncobj's modules, once per process."""
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
