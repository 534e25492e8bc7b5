"""The rate of this node's oscillator, measured against the agreed time.

Compares agreements that are seconds apart. Only a difference that their errors cannot explain counts as drift, so an
oscillator within the assumed drift is left alone. One that is 2 % off is corrected after a second, and the node keeps
the cluster's time while it is cut off. Pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

PPB = 1_000_000_000
RATE_PPB_MAX = 50_000_000
"""A difference above 5 % is not corrected: then the agreed time itself has moved."""
WANDER_PPB = 1_000_000
"""After a change of more than 0.1 % at once the oscillator's rate is measured from scratch."""
SPAN_NS_MAX = 60_000_000_000
PAUSE_NS = 450_000_000
"""Least time between two agreements that are kept: bounds their number."""


@dataclass(frozen=True, slots=True)
class _Point:
    at_ns: int
    time_ns: int
    error_ns: int


class DriftEstimate:
    """`rate_ppb`: how much faster time runs than this oscillator; `doubt_ppb`: the possible error of that."""

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
