"""What masters said the time is: how far it can be by now, if no master jumps.

What is said arrives late, so of the last minutes the furthest counts, carried on by the monotonic clock. Older words do
not: an oscillator that runs fast would take them further and further ahead.

How late it was is not said. A word that came alone may have been under way for a second, and a time that is ahead of
it by that much has not jumped. So each comes with the longest that it can have taken: what was sent to this process was
sent after it began, and the time that a master has can be asked for, which takes no longer than from the question to
the answer. The least of what these allow is where the time can be at the most. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

PPB = 1_000_000_000
SPAN_NS = 60_000_000_000
"""The furthest of the span under way and of the one before count."""
LATE_NS_SHARP = 2_000_000_000
"""What may have taken longer does not replace an older bound."""


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
        self._most: _Furthest | None = None

    def hear(self, now_ns: int, time_ns: int, late_ns_max: int) -> None:
        """A master said it is `time_ns`, and that took `late_ns_max` at the most."""
        self._bound(now_ns, time_ns + late_ns_max, sharp=late_ns_max <= LATE_NS_SHARP)
        said = _Furthest(time_ns - now_ns, now_ns)
        if not self._spans or now_ns - self._began_ns > SPAN_NS:
            self._spans = [said, *self._spans[:1]]
            self._began_ns = now_ns
        elif said.ahead_ns > self._spans[0].ahead_ns:
            self._spans[0] = said

    def hear_bound(self, now_ns: int, most_ns: int) -> None:
        """A master's time is `most_ns` at the most."""
        self._bound(now_ns, most_ns, sharp=True)

    def _bound(self, now_ns: int, most_ns: int, *, sharp: bool) -> None:
        bound, most = _Furthest(most_ns - now_ns, now_ns), self._most
        # One that has become too low makes no difference: the furthest that was heard is allowed in any case.
        if most is None or bound.ahead_ns <= most.ahead_ns or (sharp and now_ns - most.at_ns > SPAN_NS):
            self._most = bound

    def furthest_ns(self, now_ns: int) -> int | None:
        """What the time is by the furthest that was heard; None if nothing was."""
        return max((now_ns + span.ahead_ns for span in self._spans), default=None)

    def late_ns(self, now_ns: int, drift_ppb: int) -> int:
        """By how much the furthest may be behind because it was under way for long."""
        furthest_ns, most = self.furthest_ns(now_ns), self._most
        if furthest_ns is None or most is None:
            return 0
        return max(0, now_ns + most.ahead_ns + (now_ns - most.at_ns) * drift_ppb // PPB - furthest_ns)

    def doubt_ns(self, now_ns: int, drift_ppb: int) -> int:
        """What the furthest may be off by, for all that this oscillator drifts."""
        return max(((now_ns - span.at_ns) * drift_ppb // PPB for span in self._spans), default=0)
