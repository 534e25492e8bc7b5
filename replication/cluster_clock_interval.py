"""What the clocks of a majority agree on: Marzullo's algorithm, and how far the result may be from the truth.

Each clock is an interval in which the time lies if that clock is right. Marzullo's algorithm (Keith Marzullo,
"Maintaining the Time in a Distributed System", Stanford 1984; NTP selects its sources by a relative of it) finds
where most intervals overlap. Right clocks still differ by what NTP leaves them, so their intervals may miss each
other by a little: all of them are widened, by the least amount at which a majority overlaps and no further. Thus
the closest majority decides, and a clock that is wrong can move the result by no more than right ones differ.

Of what they overlap in, the lower end is taken: if all of these clocks are right, it is at least that late, so that
nothing that goes by it is early, nor late by more than the overlap is wide. The error is the distance from there
within which a majority of the intervals lies whole. Two majorities share a member: if a majority of the members'
clocks is right, reachable or not, one of them is among those, and so the true time is within that distance. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple


class Interval(NamedTuple):
    """Both ends belong to it."""

    low_ns: int
    high_ns: int

    def widened(self, by_ns: int) -> Interval:
        """By so much at each end."""
        return Interval(self.low_ns - by_ns, self.high_ns + by_ns)


class Overlap(NamedTuple):
    """Where most intervals overlap: how many, from the first such point to the last."""

    clocks: int
    low_ns: int
    high_ns: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """The time that a majority agrees on."""

    time_ns: int
    """The lower end of what they overlap in."""
    high_ns: int
    error_ns: int
    """How far the true time can be from `time_ns`; see the module."""
    widened_ns: int
    """By how much the intervals had to be widened."""
    agreeing: tuple[int, ...]
    """Places of the intervals that overlap there."""


def marzullo(intervals: Sequence[Interval]) -> Overlap:
    """Most overlap of one or more intervals. Places with equal overlap that lie apart are taken together."""
    # At one point intervals begin before others end: touching is overlapping.
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
    """Amounts at which one more pair overlaps, least first. Intervals that overlap in pairs overlap all together."""
    gaps = (max(a.low_ns, b.low_ns) - min(a.high_ns, b.high_ns) for a, b in combinations(intervals, 2))
    yield from sorted({0, *((gap + 1) // 2 for gap in gaps if gap > 0)})


def agree(
    intervals: Sequence[Interval], quorum: int, tolerance_ns: int, sure: Sequence[Interval] = ()
) -> Agreement | None:
    """What at least `quorum` of the members' intervals agree on; None if fewer do.

    `intervals` are those at hand, `quorum` is a majority of all members. Clocks of the majority may be apart by
    `tolerance_ns` beyond what their intervals allow. `sure` are wider ones of the same clocks, which hold even if what
    made the others narrow does not: the error is by them.
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
