"""The base of all checkers, and the exception for a broken promise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NoReturn, get_args, get_type_hints

from tickwheel.chaos.sim.history import History, Record, RunBegan
from tickwheel.chaos.sim.history_machines import HoursRemoved
from tickwheel.chaos.sim.world import HOUR_MS, MS

CLOCK_SLACK_MS = 1_000
"""The cluster's time may be ahead of the true one by this."""
AHEAD_SLACK_MS = 88
"""By true time a dispatch may be proposed this much earlier than its lead says: the error of the clock."""


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
    """Judges records: each kind by the method `_on_...` whose `record` is of that kind, or of one of several.

    `settle_accounts` is called once, after the drain.
    """

    promise: ClassVar[str] = ""
    what_is_owed: ClassVar[str] = ""
    """In words, for a checker that says what is `owed`."""
    owed_late_ms: ClassVar[int] = 1_000
    """At the end, what has been owed for no longer than this may still be missing."""
    judges: ClassVar[dict[type[Record], str]]
    """By kind of record: the method that takes it."""
    run: RunBegan = RunBegan(0, 0, ("not said",), ())
    """The first record of the history: what the run is like. Without one, a run with faults."""
    history: History
    """The history that it watches."""
    gone_below: int = 0
    """Hours below are gone because their retention was over, on some node."""

    def __init_subclass__(cls) -> None:
        takes = {name: get_type_hints(method)["record"] for name, method in vars(cls).items() if name[:4] == "_on_"}
        cls.judges = {kind: name for name, taken in takes.items() for kind in get_args(taken) or (taken,)}

    def begin(self, run: Record) -> None:
        """Called before the first record that it judges."""
        assert isinstance(run, RunBegan)
        self.run = run

    def wall_ms(self, at_ns: int) -> int:
        """True wall time in ms."""
        return self.run.start_wall_ms + at_ns // MS

    def true_ns(self, wall_ms: int) -> int:
        """The true time of the run at which that was the true wall time."""
        return (wall_ms - self.run.start_wall_ms) * MS

    def hour_may_be_gone(self, message_id: int, at_ns: int) -> bool:
        """Whether the message's hour ended so long ago that it is removed once all is settled."""
        return message_id >> 32 < (self.wall_ms(at_ns) + CLOCK_SLACK_MS) // HOUR_MS - self.run.hours_kept

    def hours_removed(self, record: Record) -> None:
        """Called when a node has removed hours, before it is judged."""
        assert isinstance(record, HoursRemoved)
        below = min(record.below, record.forced_below)
        if self.run.retention_ms and below > self.gone_below:
            self.gone_below = below
            self.forget_gone()

    def forget_gone(self) -> None:
        """More hours are gone: nothing of them is owed any more."""

    def is_gone(self, message_id: int) -> bool:
        """Whether retention has removed the hour of a message."""
        return message_id >> 32 < self.gone_below

    def was_due_in_gone(self, due_ms: int) -> bool:
        """The same for what is due then."""
        return due_ms // HOUR_MS < self.gone_below

    @property
    def ahead_ms(self) -> int:
        """How long before its due time a message may be dispatched, by true time."""
        return self.run.dispatch_ahead_ms + AHEAD_SLACK_MS

    @property
    def now_ms(self) -> int:
        """True wall time of the newest record."""
        return self.wall_ms(self.history.newest_ns)

    def owed(self, at_ns: int) -> Sequence[object]:
        """What had to come by then and has not."""
        return ()

    def missing(self, at_ns: int) -> str:
        """The event, in words, that the drain must still wait for; empty for none."""
        owed = self.owed(at_ns)
        return f"{len(owed)} {self.what_is_owed}, for instance {owed[0]}" if owed else ""

    def settle_accounts(self, at_ns: int) -> None:
        """The run is over: judge whether everything that had to happen has happened."""
        owed = self.owed(at_ns - self.owed_late_ms * MS)
        if owed:
            self.broken(f"{len(owed)} {self.what_is_owed} never came: {', '.join(map(str, owed[:5]))}")

    def broken(self, what: str) -> NoReturn:
        """The newest record breaks the promise, or shows that it is broken."""
        raise BrokenPromise(self.promise, self.history.newest_ns, what)


def attach(history: History, kinds: Sequence[type[Checker]]) -> list[Checker]:
    """Make one of each checker and let it watch the history."""
    checkers = [kind() for kind in kinds]
    for checker in checkers:
        checker.history = history
        history.subscribe((RunBegan,), checker.begin)
        history.subscribe((HoursRemoved,), checker.hours_removed)
        for kind, method in checker.judges.items():
            history.subscribe((kind,), getattr(checker, method))
    return checkers
