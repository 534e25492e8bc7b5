"""What masters said the time is: how far it can be by now, if no master jumps.

What is said arrives late, so of the last minutes the furthest counts, carried on by the monotonic clock. Older words do
not: an oscillator that runs fast would take them further and further ahead. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

PPB = 1_000_000_000
SPAN_NS = 60_000_000_000
"""The furthest of the span under way and of the one before count."""


@dataclass(slots=True)
class _Furthest:
    ahead_ns: int
    """Time minus this node's monotonic clock."""
    at_ns: int


class HeardTime:
    """By the monotonic clock of this node."""

    def __init__(self) -> None:
        self._spans: list[_Furthest] = []
        """Of the span under way, then of the one before it."""
        self._began_ns = 0

    def hear(self, now_ns: int, time_ns: int) -> None:
        """A master says it is `time_ns`."""
        said = _Furthest(time_ns - now_ns, now_ns)
        if not self._spans or now_ns - self._began_ns > SPAN_NS:
            self._spans = [said, *self._spans[:1]]
            self._began_ns = now_ns
        elif said.ahead_ns > self._spans[0].ahead_ns:
            self._spans[0] = said

    def furthest_ns(self, now_ns: int) -> int | None:
        """What the time is by the furthest that was heard; None if nothing was."""
        return max((now_ns + span.ahead_ns for span in self._spans), default=None)

    def doubt_ns(self, now_ns: int, drift_ppb: int) -> int:
        """What that may be off by, for all that this oscillator drifts."""
        return max(((now_ns - span.at_ns) * drift_ppb // PPB for span in self._spans), default=0)
