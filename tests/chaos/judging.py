"""Hand-made histories before a single checker: how they are shown to it, and what it is to find."""

from __future__ import annotations

import pytest

from tickwheel.chaos.sim.checkers import ALL, BrokenPromise, Checker
from tickwheel.chaos.sim.history import Record, RunBegan
from tickwheel.chaos.sim.world import SECOND

Case = tuple[type[Checker], list[Record]]


def judge(case: Case, *, settles: bool = True) -> None:
    """Show a history to a checker of the simulation; `settles`: to its end, where accounts are settled."""
    kind, records = case
    assert kind in ALL
    checker = kind()
    for record in records:
        if isinstance(record, RunBegan):
            checker.begin(record)
            continue
        assert isinstance(record, kind.kinds), record
        checker.observe(record)
    if settles:
        checker.settle_accounts(60 * SECOND)


def is_caught(case: Case, *, settles: bool = True) -> None:
    """The checker says that its own promise is broken."""
    with pytest.raises(BrokenPromise) as caught:
        judge(case, settles=settles)
    assert caught.value.promise == case[0].promise
