"""Pauses between tries: growing, bounded and with jitter, so that many clients do not return at the same moment."""

from __future__ import annotations

import asyncio
import random
import time

PAUSE_S_FIRST = 0.02
PAUSE_S_MAX = 0.5
TRY_S_MIN = 0.01
"""With less time left no further try is sent after a refusal: its answer would come too late, and nobody would know
whether it was carried out."""


class Deadline:
    """The end of the time that an operation may take."""

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


class OwnTime:
    """Time that passes for this process: a wait counts only for as long as it was meant to take. If it takes longer,
    the process got no processor, and the answers of others may wait to be read."""

    def __init__(self, timeout_s: float) -> None:
        self.left_s = timeout_s
        self._counted_s = time.monotonic()

    @property
    def over(self) -> bool:
        """Whether nothing is left."""
        return self.left_s == 0.0

    def count(self, most_s: float) -> None:
        """Count the time since the last call, up to `most_s`."""
        now_s = time.monotonic()
        self.left_s = max(0.0, self.left_s - min(most_s, now_s - self._counted_s))
        self._counted_s = now_s


class Backoff:
    """The pauses of one series of tries."""

    def __init__(self, first_s: float = PAUSE_S_FIRST, max_s: float = PAUSE_S_MAX) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._next_s = first_s
        self._redirected = False

    def reset(self) -> None:
        """Start over after a success."""
        self._next_s = self._first_s
        self._redirected = False

    def follows(self, master_address: str) -> bool:
        """Whether to try the named master without a pause: once a series, as two nodes may name each other."""
        first, self._redirected = not self._redirected, self._redirected or bool(master_address)
        return first and bool(master_address)

    def next_s(self, least_s: float = 0.0) -> float:
        """The next pause in seconds, at least `least_s`. Up to half of it is random."""
        pause_s = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(self._max_s, self._next_s * 2)
        return max(least_s, pause_s)

    async def pause(self, deadline: Deadline, least_s: float = 0.0) -> None:
        """Sleep for the next pause, but not beyond the deadline."""
        await asyncio.sleep(min(self.next_s(least_s), deadline.left_s))
