"""The recent samples of one clock, combined into an interval of its time now.

A sample says that the other clock stood within an interval at one moment of this node's monotonic clock. The interval
is as wide as the round trip plus the millisecond of the reading. With age it is carried on by the monotonic clock and
widens by the assumed drift. All samples of the last seconds hold at once, so the result is their intersection. A sample
that contradicts a newer one was taken before a step of that clock, and is forgotten. So one quick answer among slow
ones is enough, provided that this node's oscillator is as good as assumed. Slow answers could not reveal that it is
not, so the certain interval (`newest`) uses the newest sample only. Pure.
"""

from __future__ import annotations

from collections import deque

from tickwheel.replication.cluster_clock_interval import Interval

SAMPLES_MAX = 16
SPAN_NS = 500_000_000
"""Samples within this time are kept as one, their intersection."""
AGE_NS_MAX = 10_000_000_000
"""Older samples no longer count."""
PPB = 1_000_000_000


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
    """The newest samples of one clock.

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
        if samples and at_ns - self._began_ns < SPAN_NS:
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
