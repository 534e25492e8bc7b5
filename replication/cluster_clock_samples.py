"""What one clock has shown lately, as an interval of the time that it shows now.

A sample says that at a moment of this node's monotonic clock the other clock stood somewhere in an interval: as
wide as the round trip (whatever way of it took longer) and the millisecond in which it was read. It ages: carried
on by the monotonic clock, it widens with the drift that is assumed. All samples of the last seconds hold at once,
so the interval is what they have in common; samples that contradict a newer one are of before a step of that clock
and are forgotten. So one quick answer among slow ones is enough. Pure.
"""

from __future__ import annotations

from collections import deque

from tickwheel.replication.cluster_clock_interval import Interval

SAMPLES_MAX = 16
AGE_NS_MAX = 10_000_000_000
"""Older samples say nothing of a clock any more."""
PPB = 1_000_000_000


class ClockSamples:
    """The newest samples of one clock."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, Interval]] = deque(maxlen=SAMPLES_MAX)
        """(monotonic_ns of this node, where the other clock stood), oldest first."""

    @property
    def newest_ns(self) -> int:
        """When the newest one was taken; 0 if there is none."""
        return self._samples[-1][0] if self._samples else 0

    def add(self, at_ns: int, shown: Interval, rate_ppb: int, drift_ppb: int) -> None:
        """A sample newer than all others."""
        self._samples.append((at_ns, shown))
        _, agreeing = self._common(at_ns, rate_ppb, drift_ppb)
        while len(self._samples) > agreeing:
            self._samples.popleft()

    def at(self, now_ns: int, rate_ppb: int, drift_ppb: int) -> Interval | None:
        """Where the clock stands now; None if nothing was heard of it lately.

        `rate_ppb`: how much faster than this node's monotonic clock time goes; `drift_ppb`: what that may be off by.
        """
        return self._common(now_ns, rate_ppb, drift_ppb)[0]

    def _common(self, now_ns: int, rate_ppb: int, drift_ppb: int) -> tuple[Interval | None, int]:
        """What the newest samples have in common, and how many those are."""
        common: Interval | None = None
        agreeing = 0
        for at_ns, shown in reversed(self._samples):
            age_ns = now_ns - at_ns
            if age_ns > AGE_NS_MAX:
                break
            passed_ns = age_ns + age_ns * rate_ppb // PPB
            spread_ns = age_ns * drift_ppb // PPB
            low_ns = shown.low_ns + passed_ns - spread_ns
            high_ns = shown.high_ns + passed_ns + spread_ns
            if common is not None:
                low_ns, high_ns = max(low_ns, common.low_ns), min(high_ns, common.high_ns)
                if low_ns > high_ns:
                    break
            common = Interval(low_ns, high_ns)
            agreeing += 1
        return common, agreeing
