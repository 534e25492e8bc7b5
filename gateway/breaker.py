"""When a target may be posted to: at its rate, and not while it is down.

Sans I/O: callers give the time (monotonic seconds) and sleep themselves.
"""

from __future__ import annotations

FAILURES_MAX = 10
"""Failures in a row after which a target counts as down."""
PAUSE_S_MIN = 1.0
PAUSE_S_MAX = 300.0


class Breaker:
    """A circuit breaker. After `failures_max` failures in a row it is open for a pause; then one post is tried, and its
    result closes it or opens it for twice as long."""

    def __init__(self, failures_max: int = FAILURES_MAX) -> None:
        self._failures_max = failures_max
        self._failures = 0
        self._pause_s = 0.0
        self._open_until_s = 0.0
        self._trying = False

    @property
    def is_open(self) -> bool:
        """Whether the target counts as down."""
        return self._pause_s > 0

    def wait_s(self, now_s: float) -> float:
        """Seconds until a post may be tried; 0: now, and the caller must report its end."""
        if not self.is_open:
            return 0.0
        if now_s < self._open_until_s:
            return self._open_until_s - now_s
        if self._trying:
            return PAUSE_S_MIN  # the result of the one that is tried will decide
        self._trying = True
        return 0.0

    def succeeded(self) -> None:
        """A post was answered by a target that works."""
        self._failures, self._pause_s, self._trying = 0, 0.0, False

    def failed(self, now_s: float) -> bool:
        """A post failed as it does when a target is down. Whether the breaker has opened by it."""
        self._failures += 1
        if self.is_open and not self._trying:
            return False  # it was under way when the breaker opened
        if not self.is_open and self._failures < self._failures_max:
            return False
        opened = not self.is_open
        self._pause_s = min(max(PAUSE_S_MIN, 2 * self._pause_s), PAUSE_S_MAX)
        self._open_until_s, self._trying = now_s + self._pause_s, False
        return opened

    def gave_up(self) -> None:
        """A post ended without a result: it says nothing of the target."""
        self._trying = False


class Pace:
    """At most `rate` turns a second, evenly; 0: any number."""

    def __init__(self, rate: float) -> None:
        self._step_s = 1 / rate if rate else 0.0
        self._next_s = 0.0

    def turn_s(self, now_s: float) -> float:
        """Take a turn: the seconds until it."""
        begin_s = max(now_s, self._next_s)
        self._next_s = begin_s + self._step_s
        return begin_s - now_s
