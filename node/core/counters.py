"""Totals since the process started, for status and metrics: what was applied and delivered, and how fast it goes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.core.world import SteadyMs
from tickwheel.node.state.cold import ColdResult
from tickwheel.node.state.loads import IngestResult
from tickwheel.node.state.results import CancelResult, DispatchResult, PublishResult, SettleResult
from tickwheel.node.state.staging import StagingResult
from tickwheel.proto.scheduler_pb2 import CANCELLED

LATE_BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 10_000, 60_000, 600_000)
_LATE_BOUNDS = np.array(LATE_BOUNDS_MS, np.int64)
RATE_WINDOW_MS = 5_000


@dataclass(slots=True)
class Counters:
    """Changed by the master's deliveries only."""

    delivered: int = 0
    redelivered: int = 0
    settled: int = 0
    expired: int = 0
    late_counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(LATE_BOUNDS_MS) + 1, np.int64))
    """Deliveries by lateness: for each bound those at most that late and later than the bound before; the last for all
    others."""
    late_sum_ms: int = 0

    def note_delivery(self, now_ms: int, due_ms: NDArray[np.int64], attempts: NDArray[np.uint32]) -> None:
        """Count a batch. The arrays have one element for each message."""
        self.delivered += len(due_ms)
        self.redelivered += int((attempts > 1).sum())
        late_ms = now_ms - due_ms
        self.late_counts += np.bincount(np.searchsorted(_LATE_BOUNDS, late_ms), minlength=len(LATE_BOUNDS_MS) + 1)
        self.late_sum_ms += int(late_ms.sum())


@dataclass(frozen=True, slots=True)
class _Note:
    at_ms: int
    scheduled: int
    dispatched: int
    delivered: int
    settled: int


@dataclass(slots=True)
class Totals:
    """Counts of what was applied since the process started."""

    scheduled: int = 0
    dispatched: int = 0
    settled: int = 0
    cancelled: int = 0
    loaded: int = 0
    """Of `scheduled`, messages that came in bundles,"""
    loaded_bundles: int = 0
    """and the number of these bundles."""

    def note(self, result: object) -> None:
        """Count one result of apply."""
        if isinstance(result, PublishResult):
            self.scheduled += result.scheduled
        elif isinstance(result, IngestResult):
            self.scheduled += result.units
            self.loaded += result.units
            self.loaded_bundles += result.ingested is not None
        elif isinstance(result, StagingResult):
            self.scheduled += result.published
        elif isinstance(result, DispatchResult):
            self.dispatched += result.dispatched
        elif isinstance(result, SettleResult):
            self.settled += result.settled
        elif isinstance(result, CancelResult):
            self.cancelled += result.outcome == CANCELLED
        elif isinstance(result, ColdResult):
            self.cancelled += result.cancelled


class Rates:
    """Rates over the last seconds, from totals noted once a second."""

    def __init__(self) -> None:
        self._notes: deque[_Note] = deque()

    def note(self, totals: Totals, delivered: int, steady_ms: SteadyMs) -> None:
        """Note the totals. Called once a second."""
        self._notes.append(_Note(steady_ms, totals.scheduled, totals.dispatched, delivered, totals.settled))
        while self._notes[0].at_ms < steady_ms - RATE_WINDOW_MS:
            self._notes.popleft()

    def per_second(self) -> tuple[float, float, float, float]:
        """Scheduled, dispatched, delivered, settled per second."""
        if len(self._notes) < 2:
            return (0.0, 0.0, 0.0, 0.0)
        first, last = self._notes[0], self._notes[-1]
        seconds = max(1, last.at_ms - first.at_ms) / 1_000
        return (
            (last.scheduled - first.scheduled) / seconds,
            (last.dispatched - first.dispatched) / seconds,
            (last.delivered - first.delivered) / seconds,
            (last.settled - first.settled) / seconds,
        )
