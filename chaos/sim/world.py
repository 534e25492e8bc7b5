"""The world a simulated cluster lives in: true time, an agenda, randomness from one seed.

Invariants: time only moves when an event of the agenda is taken; events of equal time run in the order
in which they were put there; every random number comes from a stream named after its use, so that taking
one fault away leaves the dice of everything else as they were. Nothing here knows a node.

`World.mark` folds what happens into a digest: two runs are the same if their digests are.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from typing import Any

MS = 1_000_000
SECOND = 1_000 * MS
HOUR_MS = 3_600_000

# 2030-01-01T00:00Z. A run starts a little before it, so that most runs cross the border of an hour.
EPOCH_HOUR_MS = 1_893_456_000_000

Story = Callable[[int, str, str], None]
"""Told (true time in ns, who, what) by a run that is traced."""


class World:
    """True time and the agenda. `now_ns` counts from the start of the run."""

    def __init__(self, seed: int, story: Story | None = None) -> None:
        self.seed = seed
        self.now_ns = 0
        self.steps = 0
        self.story = story
        self.start_wall_ms = EPOCH_HOUR_MS - self.stream("start").randrange(1_000, 45_000)
        self._agenda: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self._digest = hashlib.blake2b(str(seed).encode(), digest_size=16)

    def stream(self, name: str) -> random.Random:
        """A generator of its own for one use; equal names in equal seeds give equal numbers."""
        return random.Random(f"{self.seed}/{name}")

    @property
    def wall_ms(self) -> int:
        """True wall time in milliseconds since the Unix epoch: no fault touches it."""
        return self.start_wall_ms + self.now_ns // MS

    def at(self, when_ns: int, function: Callable[..., None], *args: Any) -> None:
        """Put an event on the agenda; a time that has passed means now."""
        self._number += 1
        heapq.heappush(self._agenda, (max(when_ns, self.now_ns), self._number, function, args))

    def after(self, delay_ns: int, function: Callable[..., None], *args: Any) -> None:
        """Put an event on the agenda, counted from now."""
        self._number += 1
        heapq.heappush(self._agenda, (self.now_ns + max(delay_ns, 0), self._number, function, args))

    def run_until(self, end_ns: int) -> None:
        """Take events until true time is `end_ns`."""
        agenda = self._agenda
        pop = heapq.heappop
        while agenda and agenda[0][0] <= end_ns:
            self.now_ns, _, function, args = pop(agenda)
            self.steps += 1
            function(*args)
        self.now_ns = max(self.now_ns, end_ns)

    def mark(self, what: bytes) -> None:
        """Fold an event into the digest of the run."""
        self._digest.update(b"%d %b\n" % (self.now_ns, what))

    def tell(self, who: str, what: str) -> None:
        """A line of the story; callers on hot paths ask `world.story is not None` first."""
        if self.story is not None:
            self.story(self.now_ns, who, what)

    def digest(self) -> str:
        """Digest of all that was marked so far."""
        return self._digest.hexdigest()
