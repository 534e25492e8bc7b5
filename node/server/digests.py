"""GetDigest: the digest of this node's state.

It is computed on the loop in one piece, since it is of one entry, and the time it takes grows with topics, groups and
subscriptions. So all who wait share one, and after each the loop has time for what a master must do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tickwheel.proto.admin_pb2 import StateDigest

PAUSE_FACTOR = 19
"""A pause is this many times as long as the digest before it took: they take at most 5 % of the loop, as long as one
takes less than 150 ms."""
PAUSE_S_MAX = 3.0
"""The longest pause, so that callers of a node with a large state get an answer in time. Meanwhile heartbeats go and
the lease is renewed."""


class Digests:
    def __init__(self, compute: Callable[[], StateDigest]) -> None:
        """`compute` returns the digest of the state as it is now."""
        self._compute = compute
        self._turn = asyncio.Lock()
        self._made = 0
        self._last = StateDigest()
        self._next_s = 0.0
        """Time of the loop from which another may be computed."""

    async def get(self) -> StateDigest:
        """A digest of the state at some moment after the call. Raises what `compute` raises."""
        made = self._made
        async with self._turn:
            if self._made == made:
                loop = asyncio.get_running_loop()
                await asyncio.sleep(self._next_s - loop.time())
                start_s = loop.time()
                try:
                    self._last = self._compute()
                finally:
                    end_s = loop.time()
                    self._next_s = end_s + min((end_s - start_s) * PAUSE_FACTOR, PAUSE_S_MAX)
                self._made += 1
            return self._last
