"""Hand-made histories before a single checker: how they are shown to it, and what it is to find."""

from __future__ import annotations

import pytest

from tickwheel.chaos.sim.checkers import ALL, BrokenPromise, Checker, attach
from tickwheel.chaos.sim.history import History, Record, RunBegan
from tickwheel.chaos.sim.history_machines import HoursRemoved
from tickwheel.chaos.sim.world import SECOND, World

Case = tuple[type[Checker], list[Record]]


def judge(case: Case, *, settles: bool = True) -> None:
    """Show a history to a checker of the simulation; `settles`: to its end, where accounts are settled."""
    kind, records = case
    assert kind in ALL
    history = History(World(0))
    [checker] = attach(history, [kind])
    for record in records:
        assert type(record) in (RunBegan, HoursRemoved, *kind.judges), record
        history.add(record)
    if settles:
        checker.settle_accounts(60 * SECOND)


def is_caught(case: Case, *, settles: bool = True) -> None:
    """The checker says that its own promise is broken."""
    with pytest.raises(BrokenPromise) as caught:
        judge(case, settles=settles)
    assert caught.value.promise == case[0].promise
