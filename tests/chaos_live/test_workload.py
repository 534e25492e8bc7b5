"""The load of a run: when it stops waiting for what has not come."""

from __future__ import annotations

from tickwheel.chaos.live.workload import DRAIN_S, DRAIN_S_MAX, Patience


def given_up_after_s(waiting: int, per_s: float, left: int = 0) -> int | None:
    """When it is over if so many come a second, but for the last `left`; None: all have come before."""
    patience = Patience(0.0, waiting)
    for second in range(10_000):
        still = max(left, waiting - int(second * per_s))
        if not still:
            return None
        if patience.over(float(second), still):
            return second
    raise AssertionError("it never ends")


def test_consumers_that_are_behind_are_waited_for() -> None:
    """Half a million at 5,000 a second take longer than the pause in which nothing comes."""
    assert DRAIN_S < 500_000 / 5_000
    assert given_up_after_s(500_000, 5_000) is None


def test_a_message_that_never_comes_is_not_waited_for() -> None:
    """One that is lost costs one pause, also behind many that came; a trickle does not keep a run alive."""
    assert given_up_after_s(1, 0.0) == DRAIN_S
    after_s = given_up_after_s(500_000, 5_000, left=1)
    assert after_s is not None and after_s <= 100 + DRAIN_S
    trickle_s = given_up_after_s(500_000, 1.0)
    assert trickle_s == DRAIN_S
    longest_s = given_up_after_s(10_000_000, 10_000)
    assert longest_s is not None and longest_s <= DRAIN_S_MAX
