"""The report of the demonstration: it accounts for every reminder by its own number.

Owns the verdict. It trusts nothing but what was acknowledged to the producer and what reached the consumer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class Tally:
    """Filled while it runs; indexes are places in the schedule."""

    due_ms: list[int]
    seen: list[int] = field(default_factory=list)
    lateness_ms: list[int] = field(default_factory=list)
    scheduled: int = 0
    delivered: int = 0
    duplicates: int = 0
    unknown: int = 0
    """Deliveries that nobody scheduled."""
    early: int = 0

    def __post_init__(self) -> None:
        self.seen = [0] * len(self.due_ms)

    def take(self, place: int, now_ms: int) -> None:
        """A reminder has arrived."""
        self.delivered += 1
        if not 0 <= place < len(self.due_ms):
            self.unknown += 1
            return
        self.seen[place] += 1
        if now_ms < self.due_ms[place]:
            self.early += 1
        if self.seen[place] > 1:
            self.duplicates += 1
        else:
            self.lateness_ms.append(now_ms - self.due_ms[place])

    @property
    def lost(self) -> int:
        """Acknowledged and never seen."""
        return self.scheduled - sum(1 for count in self.seen if count)

    @property
    def complete(self) -> bool:
        return self.lost <= 0

    def lateness(self, percent: float) -> float:
        """A percentile of the lateness of first deliveries, in milliseconds."""
        return float(np.percentile(self.lateness_ms, percent)) if self.lateness_ms else 0.0

    @property
    def good(self) -> bool:
        """Nothing lost, invented or early."""
        return not (self.lost or self.early or self.unknown)
