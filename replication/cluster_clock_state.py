"""The state of the nodes' agreement on a time, and whether a master may dispatch in it.

States of the agreement:

    unagreed -> agreed     a majority of the clocks agrees for the first time since this node's start
    own      -> agreed     the same, where the operator allows dispatch by this node's own clock until then
    agreed   -> holdover   no majority has agreed for 3 s
    holdover -> agreed     a majority agrees again
    holdover -> expired    clock.holdover_ms_max is over
    expired  -> agreed     a majority agrees again

A master dispatches in own, agreed and holdover. In unagreed and expired dispatch waits; schedules are accepted. Pure.
"""

from __future__ import annotations

import enum

FRESH_MS = 3_000
FRESH_NS = FRESH_MS * 1_000_000
"""An agreement counts for this long: several rounds of questions may fail before the state changes."""


class TimeState(enum.Enum):
    UNAGREED = "unagreed"
    OWN = "own"
    AGREED = "agreed"
    HOLDOVER = "holdover"
    EXPIRED = "expired"


class Holdover:
    """The newest agreement, and the state that follows from its age."""

    def __init__(self, holdover_ns: int, *, own_clock_allowed: bool) -> None:
        self._holdover_ns = max(holdover_ns, FRESH_NS)
        self._own_clock_allowed = own_clock_allowed
        self.agreed_ns: int | None = None
        """When a majority agreed last, by this node's monotonic clock."""

    def agreed(self, at_ns: int) -> None:
        """A majority agrees, by answers as old as `at_ns`."""
        self.agreed_ns = at_ns if self.agreed_ns is None else max(self.agreed_ns, at_ns)

    def state(self, now_ns: int) -> TimeState:
        """The state of the agreement now."""
        if self.agreed_ns is None:
            return TimeState.OWN if self._own_clock_allowed else TimeState.UNAGREED
        age_ns = now_ns - self.agreed_ns
        if age_ns <= FRESH_NS:
            return TimeState.AGREED
        return TimeState.HOLDOVER if age_ns <= self._holdover_ns else TimeState.EXPIRED

    def dispatch_until_ns(self) -> int | None:
        """Until when a master may dispatch if no further agreement comes. None: for ever; 0: not at all."""
        if self.agreed_ns is None:
            return None if self._own_clock_allowed else 0
        return self.agreed_ns + self._holdover_ns
