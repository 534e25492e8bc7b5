"""What clocks agree on: Marzullo's algorithm against a plain count, and the bound of its error against lies."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tickwheel.replication.clock_intervals import Interval, agree, marzullo

SMALL = st.integers(-20, 20)
INTERVALS = st.lists(st.tuples(SMALL, st.integers(0, 15)).map(lambda v: Interval(v[0], v[0] + v[1])), min_size=1)
FAR = 10**15


@given(INTERVALS)
def test_most_overlap_is_found(intervals: list[Interval]) -> None:
    """The sweep finds the same count, first and last point as looking at every point."""
    counts = {at: sum(i.low_ns <= at <= i.high_ns for i in intervals) for at in range(-20, 36)}
    most = max(counts.values())
    points = [at for at, count in counts.items() if count == most]
    assert marzullo(intervals) == (most, points[0], points[-1])


@st.composite
def clusters(draw: st.DrawFn, *, spread: int = 0) -> tuple[list[Interval], list[Interval], int]:
    """(right clocks heard of, wrong ones heard of, members): a majority of the members is right, true time is 0.

    Right clocks may show up to `spread` from the truth. A member need not be heard of.
    """
    members = draw(st.integers(1, 7))
    wrong = draw(st.integers(0, (members - 1) // 2))
    heard_right = draw(st.integers(0, members - wrong))
    right = [
        Interval(off - draw(st.integers(0, 30)), off + draw(st.integers(0, 30)))
        for off in (draw(st.integers(-spread, spread)) for _ in range(heard_right))
    ]
    wide = st.one_of(st.integers(-100, 100), st.integers(-FAR, FAR))
    lies = [
        Interval(low, low + draw(st.integers(0, 60)))
        for low in (draw(wide) for _ in range(draw(st.integers(0, wrong))))
    ]
    return right, lies, members


@given(clusters(), st.integers(0, 300))
def test_the_truth_is_within_the_error(cluster: tuple[list[Interval], list[Interval], int], tolerance: int) -> None:
    """Whatever wrong clocks show, and whoever cannot be heard of, the true time is within the error that is told."""
    right, lies, members = cluster
    agreement = agree([*lies, *right], members // 2 + 1, tolerance)
    if agreement is not None:
        assert abs(agreement.time_ns) <= agreement.error_ns
        assert 2 * agreement.widened_ns <= tolerance + 1


@given(clusters())
def test_a_right_majority_always_agrees(cluster: tuple[list[Interval], list[Interval], int]) -> None:
    """No lie keeps a majority of right clocks from agreeing, and without lies the result is not early."""
    right, lies, members = cluster
    quorum = members // 2 + 1
    agreement = agree([*lies, *right], quorum, 0)
    if len(right) >= quorum:
        assert agreement is not None
        if not lies:
            assert agreement.time_ns <= 0 <= agreement.high_ns


@given(clusters(spread=40))
def test_lies_move_it_no_further_than_right_clocks_differ(
    cluster: tuple[list[Interval], list[Interval], int],
) -> None:
    """Right clocks that differ by NTP's leavings still agree, and the closest majority keeps a far lie out."""
    right, lies, members = cluster
    quorum = members // 2 + 1
    if len(right) < quorum:
        return
    agreement = agree([*lies, *right], quorum, 80)
    assert agreement is not None
    lowest, highest = min(i.low_ns for i in right), max(i.high_ns for i in right)
    assert lowest - 40 <= agreement.time_ns <= highest + 40


def test_two_that_are_apart_agree_within_the_tolerance_only() -> None:
    """Two survivors an hour apart have no time; half a second apart they meet in the middle."""
    hour = Interval(3_600_000, 3_600_001)
    assert agree([Interval(0, 1), hour], 2, 500) is None
    met = agree([Interval(0, 1), Interval(500, 501)], 2, 500)
    assert met is not None
    assert (met.time_ns, met.error_ns) == (250, 251)


def test_one_of_three_is_outvoted() -> None:
    """An hour either way, next to two that differ by a little."""
    pair = [Interval(-1, 1), Interval(3, 5)]
    for off in (-3_600_000, 3_600_000):
        agreement = agree([*pair, Interval(off, off + 2)], 2, 500)
        assert agreement is not None
        assert -1 <= agreement.time_ns <= 5


def test_too_few_never_agree() -> None:
    """A minority that agrees with itself has no time."""
    assert agree([Interval(0, 1)], 2, 500) is None
