"""The cluster's time as one node sees it.

Until the nodes agree on it among themselves: the wall clock at start, advanced by the monotonic clock, so
that a step of the wall clock does not move a running node. Nothing else in a node reads a wall clock.
"""

from __future__ import annotations

from tickwheel.replication.ports import Clock


class ClusterClock:
    """Milliseconds since the Unix epoch; never goes back."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._wall_ms = clock.wall_ms()
        self._start_ns = clock.monotonic_ns()

    def now_ms(self) -> int:
        """The time that due times are compared with."""
        return self._wall_ms + (self._clock.monotonic_ns() - self._start_ns) // 1_000_000
