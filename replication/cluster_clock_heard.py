"""The masters' time, as heard by this node: its latest possible value now, if no master's time jumps.

A master's report arrives late. So the report that is furthest ahead counts, of those of the last minutes, carried on by
the monotonic clock. Older reports do not count: an oscillator that runs fast would carry them further and further
ahead.

A report does not say how late it is. A single report may have been under way for a second, and then a time that is
ahead of it by a second has not jumped. So each report comes with the longest time that it can have been under way. A
frame sent to this process was sent after the process began. And a master that is asked for its time answers within the
round trip. The lowest of these bounds is the latest that the time can be. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

PPB = 1_000_000_000
SPAN_NS = 60_000_000_000
"""The furthest reports of the current span and of the one before it count."""
LATE_NS_SHARP = 2_000_000_000
"""A report that may have been under way for longer does not replace an expired bound."""


@dataclass(slots=True)
class _Furthest:
    ahead_ns: int
    """Time minus this node's monotonic clock."""
    at_ns: int


class HeardTime:
    """The reports of masters. `now_ns` is this node's monotonic clock, `drift_ppb` its assumed drift."""

    def __init__(self) -> None:
        self._spans: list[_Furthest] = []
        """The furthest report of the current span, then that of the span before it."""
        self._began_ns = 0
        self._most: _Furthest | None = None

    def hear(self, now_ns: int, time_ns: int, late_ns_max: int) -> None:
        """A master has reported `time_ns`; the report was under way for at most `late_ns_max`."""
        self._bound(now_ns, time_ns + late_ns_max, sharp=late_ns_max <= LATE_NS_SHARP)
        said = _Furthest(time_ns - now_ns, now_ns)
        if not self._spans or now_ns - self._began_ns > SPAN_NS:
            self._spans = [said, *self._spans[:1]]
            self._began_ns = now_ns
        elif said.ahead_ns > self._spans[0].ahead_ns:
            self._spans[0] = said

    def hear_bound(self, now_ns: int, most_ns: int) -> None:
        """A master's time is at most `most_ns`."""
        self._bound(now_ns, most_ns, sharp=True)

    def _bound(self, now_ns: int, most_ns: int, *, sharp: bool) -> None:
        bound, most = _Furthest(most_ns - now_ns, now_ns), self._most
        # A bound below the furthest report has no effect: `late_ns` never goes below 0.
        if most is None or bound.ahead_ns <= most.ahead_ns or (sharp and now_ns - most.at_ns > SPAN_NS):
            self._most = bound

    def furthest_ns(self, now_ns: int) -> int | None:
        """The time now by the furthest report; None without a report."""
        return max((now_ns + span.ahead_ns for span in self._spans), default=None)

    def late_ns(self, now_ns: int, drift_ppb: int) -> int:
        """By how much the furthest report may be behind because it was under way."""
        furthest_ns, most = self.furthest_ns(now_ns), self._most
        if furthest_ns is None or most is None:
            return 0
        return max(0, now_ns + most.ahead_ns + (now_ns - most.at_ns) * drift_ppb // PPB - furthest_ns)

    def doubt_ns(self, now_ns: int, drift_ppb: int) -> int:
        """By how much the furthest report may be wrong because this node's oscillator drifts."""
        return max(((now_ns - span.at_ns) * drift_ppb // PPB for span in self._spans), default=0)
