"""Pauses between tries: growing, with jitter, bounded, so that many clients do not come back at once.

The clock and the randomness of the client are used here and in deadlines only.
"""

from __future__ import annotations

import asyncio
import random
import time

PAUSE_S_FIRST = 0.02
PAUSE_S_MAX = 0.5


class Deadline:
    """How long something may take in all."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds left; 0 when over."""
        return max(0.0, self._end - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether nothing is left."""
        return self.left_s == 0.0


class Backoff:
    """One series of tries."""

    def __init__(self, first_s: float = PAUSE_S_FIRST, max_s: float = PAUSE_S_MAX) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._next_s = first_s
        self._redirected = False

    def reset(self) -> None:
        """Something succeeded."""
        self._next_s = self._first_s
        self._redirected = False

    def follows(self, master_address: str) -> bool:
        """Whether to go where a node points without a pause: once a series, since two nodes may point at each other."""
        first, self._redirected = not self._redirected, self._redirected or bool(master_address)
        return first and bool(master_address)

    def next_s(self, least_s: float = 0.0) -> float:
        """The next pause: at least `least_s`, half of it by chance."""
        pause_s = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(self._max_s, self._next_s * 2)
        return max(least_s, pause_s)

    async def pause(self, deadline: Deadline, least_s: float = 0.0) -> None:
        """Wait, but not beyond the deadline."""
        await asyncio.sleep(min(self.next_s(least_s), deadline.left_s))
