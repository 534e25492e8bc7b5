"""What the metrics show of deliveries: totals since the process started."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

LATE_BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 10_000, 60_000, 600_000)
_LATE_BOUNDS = np.array(LATE_BOUNDS_MS, np.int64)


@dataclass(slots=True)
class Counters:
    """Changed by the master's deliveries only."""

    delivered: int = 0
    redelivered: int = 0
    settled: int = 0
    expired: int = 0
    late_counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(LATE_BOUNDS_MS) + 1, np.int64))
    """First deliveries by lateness: at most each bound, the last one above all."""
    late_sum_ms: int = 0

    def note_delivery(self, now_ms: int, due_ms: NDArray[np.int64], attempts: NDArray[np.uint32]) -> None:
        """A batch goes out; all three by message."""
        self.delivered += len(due_ms)
        self.redelivered += int((attempts > 1).sum())
        late_ms = now_ms - due_ms
        self.late_counts += np.bincount(np.searchsorted(_LATE_BOUNDS, late_ms), minlength=len(LATE_BOUNDS_MS) + 1)
        self.late_sum_ms += int(late_ms.sum())
