"""Other clocks as intervals: the samples of each, the time that a majority agrees on, and what this node's oscillator
makes of it.

Each clock is an interval that holds the true time if the clock is right (`ClockSamples`). `agree` finds the time of a
majority of them. `DriftEstimate` measures the rate of this node's oscillator against that time. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

PPB = 1_000_000_000


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
    """The agreement of at least `quorum` intervals, by Marzullo's algorithm; None if fewer agree.

    The algorithm (Keith Marzullo, "Maintaining the Time in a Distributed System", Stanford 1984; NTP selects its
    sources by a relative of it) finds where most intervals overlap. Right clocks still differ by the error that NTP
    leaves, so their intervals may miss each other by a little. So all intervals are widened by the least amount at
    which a majority overlaps. Thus the closest majority decides, and a wrong clock can move the result by no more than
    right clocks differ.

    The result is the lower end of the overlap. If all these clocks are right, the true time is no earlier, so nothing
    is early by the result, nor late by more than the width of the overlap. The error is the distance from the result
    within which a majority of the intervals lies whole. Two majorities share a member. So if the clocks of a majority
    of the members are right, reachable or not, one of them is among those intervals, and the true time is within that
    distance.

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


SAMPLES_MAX = 16
SAMPLE_SPAN_NS = 500_000_000
"""Samples within this time are kept as one, their intersection."""
AGE_NS_MAX = 10_000_000_000
"""Older samples no longer count."""


def carried(shown: Interval, age_ns: int, rate_ppb: int, drift_ppb: int) -> Interval:
    """The interval now of a clock that stood in `shown` `age_ns` ago."""
    passed_ns = age_ns + age_ns * rate_ppb // PPB
    spread_ns = age_ns * drift_ppb // PPB
    return Interval(shown.low_ns + passed_ns - spread_ns, shown.high_ns + passed_ns + spread_ns)


def common(one: Interval, other: Interval) -> Interval | None:
    """The intersection; None if it is empty."""
    low_ns, high_ns = max(one.low_ns, other.low_ns), min(one.high_ns, other.high_ns)
    return Interval(low_ns, high_ns) if low_ns <= high_ns else None


class ClockSamples:
    """The newest samples of one clock, combined into an interval of its time now.

    A sample says that the other clock stood within an interval at one moment of this node's monotonic clock. The
    interval is as wide as the round trip plus the millisecond of the reading. With age it is carried on by the
    monotonic clock and widens by the assumed drift. All samples of the last seconds hold at once, so the result is
    their intersection. A sample that contradicts a newer one was taken before a step of that clock, and is forgotten.
    So one quick answer among slow ones is enough, provided that this node's oscillator is as good as assumed. Slow
    answers could not reveal that it is not, so the certain interval (`newest`) uses the newest sample only.

    `rate_ppb`: how much faster time runs than this node's monotonic clock. `drift_ppb`: the possible error of that.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[int, Interval]] = deque(maxlen=SAMPLES_MAX)
        """(monotonic_ns of this node, interval of the other clock), oldest first."""
        self._began_ns = 0
        """When the first of the samples that are merged into the last one was taken."""

    @property
    def newest_ns(self) -> int:
        """When the newest sample was taken; 0 if there is none."""
        return self._samples[-1][0] if self._samples else 0

    def add(self, at_ns: int, shown: Interval, rate_ppb: int, drift_ppb: int) -> None:
        """Add a sample that is newer than all others."""
        samples = self._samples
        if samples and at_ns - self._began_ns < SAMPLE_SPAN_NS:
            last_ns, last = samples[-1]
            both = common(carried(last, at_ns - last_ns, rate_ppb, drift_ppb), shown)
            if both is not None:
                samples[-1] = (at_ns, both)
                return
        self._began_ns = at_ns
        samples.append((at_ns, shown))
        _, agreeing = self._hold(at_ns, rate_ppb, drift_ppb)
        while len(samples) > agreeing:
            samples.popleft()

    def at(self, now_ns: int, rate_ppb: int, drift_ppb: int) -> Interval | None:
        """The clock's interval now, by all samples that agree with the newest; None without a sample of AGE_NS_MAX."""
        return self._hold(now_ns, rate_ppb, drift_ppb)[0]

    def newest(self, now_ns: int, rate_ppb: int, drift_ppb: int) -> Interval | None:
        """The clock's interval now by the newest sample alone: a bad oscillator cannot have moved it much."""
        if not self._samples or now_ns - self._samples[-1][0] > AGE_NS_MAX:
            return None
        at_ns, shown = self._samples[-1]
        return carried(shown, now_ns - at_ns, rate_ppb, drift_ppb)

    def _hold(self, now_ns: int, rate_ppb: int, drift_ppb: int) -> tuple[Interval | None, int]:
        """The intersection of the newest samples that do not contradict each other, and their number."""
        # `carried` and `common` inlined for speed: a master does this for each answer to its syncs.
        low_ns = high_ns = agreeing = 0
        for at_ns, (shown_low_ns, shown_high_ns) in reversed(self._samples):
            age_ns = now_ns - at_ns
            if age_ns > AGE_NS_MAX:
                break
            passed_ns = age_ns + age_ns * rate_ppb // PPB
            spread_ns = age_ns * drift_ppb // PPB
            stands_low_ns = shown_low_ns + passed_ns - spread_ns
            stands_high_ns = shown_high_ns + passed_ns + spread_ns
            if not agreeing:
                low_ns, high_ns = stands_low_ns, stands_high_ns
            elif stands_low_ns > high_ns or stands_high_ns < low_ns:
                break
            else:
                if stands_low_ns > low_ns:
                    low_ns = stands_low_ns
                if stands_high_ns < high_ns:
                    high_ns = stands_high_ns
            agreeing += 1
        return (Interval(low_ns, high_ns) if agreeing else None), agreeing


RATE_PPB_MAX = 50_000_000
"""A difference above 5 % is not corrected: then the agreed time itself has moved."""
WANDER_PPB = 1_000_000
"""After a change of more than 0.1 % at once the oscillator's rate is measured from scratch."""
DRIFT_SPAN_NS_MAX = 60_000_000_000
DRIFT_PAUSE_NS = 450_000_000
"""Least time between two agreements that are kept: bounds their number."""


@dataclass(frozen=True, slots=True)
class _Point:
    at_ns: int
    time_ns: int
    error_ns: int


class DriftEstimate:
    """The rate of this node's oscillator, measured against the agreed time.

    Compares agreements that are seconds apart. Only a difference that their errors cannot explain counts as drift, so
    an oscillator within the assumed drift is left alone. One that is 2 % off is corrected after a second, and the node
    keeps the cluster's time while it is cut off.

    `rate_ppb`: how much faster time runs than this oscillator; `doubt_ppb`: the possible error of that.
    """

    def __init__(self) -> None:
        self._points: deque[_Point] = deque()
        self.rate_ppb = 0
        self.doubt_ppb = 0

    def add(self, at_ns: int, time_ns: int, error_ns: int) -> None:
        """The nodes agree that it is `time_ns`, within `error_ns`."""
        points = self._points
        new = _Point(at_ns, time_ns, error_ns)
        if points and self._changed(points[-1], new):
            newest = points.pop()
            points.clear()
            if not self._stepped(newest, new):
                points.append(newest)
            self.rate_ppb = self.doubt_ppb = 0
        while points and at_ns - points[0].at_ns > DRIFT_SPAN_NS_MAX:
            points.popleft()
        best: _Point | None = None
        least = 0.0
        for point in points:  # oldest first
            passed_ns = at_ns - point.at_ns
            if passed_ns < DRIFT_PAUSE_NS:
                break
            doubt = (point.error_ns + error_ns) / passed_ns
            if best is None or doubt < least:
                best, least = point, doubt
        if best is not None:
            self._measure(best, new)
        if not points or at_ns - points[-1].at_ns >= DRIFT_PAUSE_NS:
            points.append(new)

    def _changed(self, before: _Point, now: _Point) -> bool:
        """Whether the rate between the two points differs from `rate_ppb` by more than the errors explain."""
        passed_ns = now.at_ns - before.at_ns
        off_ns = abs(now.time_ns - before.time_ns - passed_ns - passed_ns * self.rate_ppb // PPB)
        return off_ns > passed_ns * (WANDER_PPB + self.doubt_ppb) // PPB + before.error_ns + now.error_ns

    @staticmethod
    def _stepped(before: _Point, now: _Point) -> bool:
        """Whether no rate up to RATE_PPB_MAX explains the two points: the agreed time has stepped."""
        passed_ns = now.at_ns - before.at_ns
        off_ns = abs(now.time_ns - before.time_ns - passed_ns)
        return off_ns > passed_ns * RATE_PPB_MAX // PPB + before.error_ns + now.error_ns

    def _measure(self, before: _Point, now: _Point) -> None:
        passed_ns = now.at_ns - before.at_ns
        off_ns = now.time_ns - before.time_ns - passed_ns
        doubt_ns = before.error_ns + now.error_ns
        beyond_ns = max(0, abs(off_ns) - doubt_ns)
        rate_ppb = min(beyond_ns * PPB // passed_ns, RATE_PPB_MAX)
        self.rate_ppb = rate_ppb if off_ns > 0 else -rate_ppb
        self.doubt_ppb = 2 * doubt_ns * PPB // passed_ns if rate_ppb else 0
