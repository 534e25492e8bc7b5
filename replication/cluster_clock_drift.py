"""How fast this node's own oscillator goes, measured against what the nodes agree on.

Compares agreements that lie seconds apart. Only what their errors cannot explain counts as drift, so that an
oscillator as good as is assumed is left alone; one that is 2 % off is corrected after a second, and a node keeps
the cluster's time while it is cut off. Pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

PPB = 1_000_000_000
RATE_PPB_MAX = 50_000_000
"""An oscillator worse than 5 % is not corrected: then the agreed time itself has moved."""
WANDER_PPB = 1_000_000
"""An oscillator that changes by more than 0.1 % at once is measured anew."""
SPAN_NS_MAX = 60_000_000_000
PAUSE_NS = 450_000_000
"""Between two agreements that are compared at the least: bounds how many are remembered."""


@dataclass(frozen=True, slots=True)
class _Point:
    at_ns: int
    time_ns: int
    error_ns: int


class DriftEstimate:
    """`rate_ppb`: how much faster than this oscillator time goes; `doubt_ppb`: what that may be off by."""

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
        while points and at_ns - points[0].at_ns > SPAN_NS_MAX:
            points.popleft()
        best: _Point | None = None
        least = 0.0
        for point in points:  # oldest first
            passed_ns = at_ns - point.at_ns
            if passed_ns < PAUSE_NS:
                break
            doubt = (point.error_ns + error_ns) / passed_ns
            if best is None or doubt < least:
                best, least = point, doubt
        if best is not None:
            self._measure(best, new)
        if not points or at_ns - points[-1].at_ns >= PAUSE_NS:
            points.append(new)

    def _changed(self, before: _Point, now: _Point) -> bool:
        """The rate as it is known cannot be what it was between these."""
        passed_ns = now.at_ns - before.at_ns
        off_ns = abs(now.time_ns - before.time_ns - passed_ns - passed_ns * self.rate_ppb // PPB)
        return off_ns > passed_ns * (WANDER_PPB + self.doubt_ppb) // PPB + before.error_ns + now.error_ns

    @staticmethod
    def _stepped(before: _Point, now: _Point) -> bool:
        """No rate explains it."""
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
