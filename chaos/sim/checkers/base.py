"""The base of all checkers, and the exception for a broken promise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NoReturn

from tickwheel.chaos.sim.history import History, Record, RunBegan
from tickwheel.chaos.sim.world import MS


class BrokenPromise(BaseException):
    """A promise of docs/PROMISES.md does not hold; raised at the moment it shows.

    No Exception: it is raised through the code of a node, and what catches errors there must not catch it.
    """

    def __init__(self, promise: str, at_ns: int, what: str) -> None:
        super().__init__(f"{promise} at {at_ns / 1e9:.6f} s: {what}")
        self.promise = promise
        self.at_ns = at_ns
        self.what = what


class Checker:
    """Judges the records of `kinds`. `settle_accounts` is called once, after the drain."""

    promise: ClassVar[str] = ""
    kinds: ClassVar[tuple[type[Record], ...]] = ()
    run: RunBegan = RunBegan(0, 0, ("not said",), ())
    """The first record of the history: what the run is like. Without one, a run with faults."""

    def begin(self, run: Record) -> None:
        """Called before the first record of `kinds`."""
        assert isinstance(run, RunBegan)
        self.run = run

    def wall_ms(self, at_ns: int) -> int:
        """True wall time in ms."""
        return self.run.start_wall_ms + at_ns // MS

    def observe(self, record: Record) -> None:
        """A record of one of `kinds` happened."""

    def missing(self, at_ns: int) -> str:
        """The event, in words, that the drain must still wait for; empty for none."""
        return ""

    def settle_accounts(self, at_ns: int) -> None:
        """The run is over: judge whether everything that had to happen has happened."""

    def broken(self, at_ns: int, what: str) -> NoReturn:
        raise BrokenPromise(self.promise, at_ns, what)


def attach(history: History, kinds: Sequence[type[Checker]]) -> list[Checker]:
    """Make one of each checker and let it watch the history."""
    checkers = [kind() for kind in kinds]
    for checker in checkers:
        history.subscribe((RunBegan,), checker.begin)
        history.subscribe(checker.kinds, checker.observe)
    return checkers
