"""What one clock has shown lately, as an interval of the time that it shows now.

A sample says that at a moment of this node's monotonic clock the other clock stood somewhere in an interval: as
wide as the round trip (whatever way of it took longer) and the millisecond in which it was read. It ages: carried
on by the monotonic clock, it widens with the drift that is assumed. All samples of the last seconds hold at once,
so the interval is what they have in common; samples that contradict a newer one are of before a step of that clock
and are forgotten. So one quick answer among slow ones is enough, if this node's oscillator is as good as is assumed:
slow answers cannot show that it is not. So how sure one may be is said by the newest samples alone. Pure.
"""

from __future__ import annotations

from collections import deque

from tickwheel.replication.cluster_clock_interval import Interval

SAMPLES_MAX = 16
SPAN_NS = 500_000_000
"""Samples within so much time are kept as one: what they have in common."""
AGE_NS_MAX = 10_000_000_000
"""Older samples say nothing of a clock any more."""
PPB = 1_000_000_000


def carried(shown: Interval, age_ns: int, rate_ppb: int, drift_ppb: int) -> Interval:
    """Where a clock stands that stood in `shown` `age_ns` ago."""
    passed_ns = age_ns + age_ns * rate_ppb // PPB
    spread_ns = age_ns * drift_ppb // PPB
    return Interval(shown.low_ns + passed_ns - spread_ns, shown.high_ns + passed_ns + spread_ns)


def common(one: Interval, other: Interval) -> Interval | None:
    """What both hold."""
    low_ns, high_ns = max(one.low_ns, other.low_ns), min(one.high_ns, other.high_ns)
    return Interval(low_ns, high_ns) if low_ns <= high_ns else None


class ClockSamples:
    """The newest samples of one clock. `rate_ppb` is how much faster than this node's monotonic clock time goes,
    `drift_ppb` what that may be off by."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, Interval]] = deque(maxlen=SAMPLES_MAX)
        """(monotonic_ns of this node, where the other clock stood), oldest first."""
        self._began_ns = 0
        """When the first of those was taken that are in the last."""

    @property
    def newest_ns(self) -> int:
        """When the newest one was taken; 0 if there is none."""
        return self._samples[-1][0] if self._samples else 0

    def add(self, at_ns: int, shown: Interval, rate_ppb: int, drift_ppb: int) -> None:
        """A sample newer than all others."""
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
        """Where the clock stands now; None if nothing was heard of it lately."""
        return self._hold(now_ns, rate_ppb, drift_ppb)[0]

    def newest(self, now_ns: int, rate_ppb: int, drift_ppb: int) -> Interval | None:
        """The same by the newest of them alone: an oscillator worse than is assumed cannot have spoilt it much."""
        if not self._samples or now_ns - self._samples[-1][0] > AGE_NS_MAX:
            return None
        at_ns, shown = self._samples[-1]
        return carried(shown, now_ns - at_ns, rate_ppb, drift_ppb)

    def _hold(self, now_ns: int, rate_ppb: int, drift_ppb: int) -> tuple[Interval | None, int]:
        """What the newest samples have in common, and how many those are."""
        # As `carried` and `common`, written out: a master does this for each answer to its syncs.
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
