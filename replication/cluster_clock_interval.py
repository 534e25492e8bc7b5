"""The time that the clocks of a majority agree on, by Marzullo's algorithm, and a bound of its error.

Each clock is an interval that holds the true time if the clock is right. Marzullo's algorithm (Keith Marzullo,
"Maintaining the Time in a Distributed System", Stanford 1984; NTP selects its sources by a relative of it) finds
where most intervals overlap. Right clocks still differ by the error that NTP leaves, so their intervals may miss each
other by a little. So all intervals are widened by the least amount at which a majority overlaps. Thus the closest
majority decides, and a wrong clock can move the result by no more than right clocks differ.

The result is the lower end of the overlap. If all these clocks are right, the true time is no earlier, so nothing is
early by the result, nor late by more than the width of the overlap. The error is the distance from the result within
which a majority of the intervals lies whole. Two majorities share a member. So if the clocks of a majority of the
members are right, reachable or not, one of them is among those intervals, and the true time is within that distance.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple


class Interval(NamedTuple):
    """A closed interval: both ends belong to it."""

    low_ns: int
    high_ns: int

    def widened(self, by_ns: int) -> Interval:
        """The interval with each end moved outwards by `by_ns`."""
        return Interval(self.low_ns - by_ns, self.high_ns + by_ns)


class Overlap(NamedTuple):
    """The range in which most intervals overlap, from the first such point to the last, and their number."""

    clocks: int
    low_ns: int
    high_ns: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """The time that a majority agrees on."""

    time_ns: int
    """The lower end of the overlap."""
    high_ns: int
    error_ns: int
    """How far the true time can be from `time_ns`, if the clocks of a majority are right."""
    widened_ns: int
    """By how much the intervals had to be widened."""
    agreeing: tuple[int, ...]
    """Places, in the argument, of the intervals that overlap there."""


def marzullo(intervals: Sequence[Interval]) -> Overlap:
    """The greatest overlap of one or more intervals. Separate ranges of equal overlap are joined into one."""
    # At equal points beginnings sort before ends: intervals that touch overlap.
    edges = sorted([(i.low_ns, 0) for i in intervals] + [(i.high_ns, 1) for i in intervals])
    best = count = low_ns = high_ns = 0
    for at_ns, ends in edges:
        if ends:
            if count == best:
                high_ns = at_ns
            count -= 1
            continue
        count += 1
        if count > best:
            best, low_ns = count, at_ns
    return Overlap(best, low_ns, high_ns)


def _widenings(intervals: Sequence[Interval]) -> Iterator[int]:
    """The amounts of widening at which one more pair overlaps, ascending.

    Pairs suffice: intervals of which each pair overlaps have a common point.
    """
    gaps = (max(a.low_ns, b.low_ns) - min(a.high_ns, b.high_ns) for a, b in combinations(intervals, 2))
    yield from sorted({0, *((gap + 1) // 2 for gap in gaps if gap > 0)})


def agree(
    intervals: Sequence[Interval], quorum: int, tolerance_ns: int, sure: Sequence[Interval] = ()
) -> Agreement | None:
    """The agreement of at least `quorum` intervals; None if fewer agree.

    `intervals` are those of the members heard lately; `quorum` is a majority of all members. Clocks of the majority may
    be up to `tolerance_ns` further apart than their intervals allow. `sure` are wider intervals of the same clocks,
    which hold even if the assumption that narrowed the others is wrong; the error is computed from them.
    """
    if len(intervals) < quorum:
        return None
    for widened_ns in _widenings(intervals):
        if widened_ns * 2 > tolerance_ns + 1:
            return None
        widened = [interval.widened(widened_ns) for interval in intervals]
        found = marzullo(widened)
        if found.clocks >= quorum:
            agreeing = [n for n, i in enumerate(widened) if i.low_ns <= found.high_ns and i.high_ns >= found.low_ns]
            time_ns = found.low_ns
            reaches = sorted(max(time_ns - i.low_ns, i.high_ns - time_ns) for i in sure or intervals)
            return Agreement(time_ns, found.high_ns, reaches[quorum - 1], widened_ns, tuple(agreeing))
    return None
