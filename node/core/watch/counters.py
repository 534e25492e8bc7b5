"""Totals since the process started, for status and metrics: what was applied, and what this node delivered."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.state.cold import ColdResult
from tickwheel.node.state.loads import IngestResult
from tickwheel.node.state.machine import AnyResult
from tickwheel.node.state.results import (
    CancelResult,
    DispatchResult,
    PublishResult,
    ScheduleResult,
    SettleResult,
    SweepResult,
)
from tickwheel.node.state.schedules import MESSAGES, no_counts
from tickwheel.node.state.staging import StagingResult
from tickwheel.node.state.sweeps import CANCELLING
from tickwheel.proto.scheduler_pb2 import CANCELLED
from tickwheel.proto.schedules_pb2 import RUN_CANCELLED

LATE_BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 60_000, 600_000)
_LATE_BOUNDS = np.array(LATE_BOUNDS_MS, np.int64)


@dataclass(slots=True)
class Counters:
    """Changed by the master's deliveries only."""

    delivered: int = 0
    redelivered: int = 0
    redelivered_by_group: Counter[int] = field(default_factory=Counter)
    """By group id."""
    expired: int = 0
    late_counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(LATE_BOUNDS_MS) + 1, np.int64))
    """Deliveries by lateness: for each bound those at most that late and later than the bound before; the last for all
    others."""
    late_sum_ms: int = 0

    def note_delivery(
        self, group_id: int, now_ms: int, due_ms: NDArray[np.int64], attempts: NDArray[np.uint32]
    ) -> None:
        """Count a batch. The arrays have one element for each message."""
        self.delivered += len(due_ms)
        again = int((attempts > 1).sum())
        if again:
            self.redelivered += again
            self.redelivered_by_group[group_id] += again
        late_ms = now_ms - due_ms
        self.late_counts += np.bincount(np.searchsorted(_LATE_BOUNDS, late_ms), minlength=len(LATE_BOUNDS_MS) + 1)
        self.late_sum_ms += int(late_ms.sum())


@dataclass(slots=True)
class Totals:
    """Counts of what was applied since the process started."""

    scheduled: int = 0
    dispatched: int = 0
    settled: int = 0
    cancelled: int = 0
    loaded: int = 0
    """Messages that came in bundles; they count as `scheduled` too."""
    loaded_bundles: int = 0
    """Bundles that these messages came in."""
    schedule_runs: list[int] = field(default_factory=lambda: list(no_counts()))
    """Planned times of recurring schedules, by the number of their outcome."""

    def note(self, result: AnyResult) -> None:
        """Count one result of apply."""
        if isinstance(result, PublishResult):
            self.scheduled += result.scheduled
            self.cancelled += len(result.replaced)
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
            self.cancelled += result.outcome == CANCELLED and not result.repeated
        elif isinstance(result, SweepResult):
            if result.sweep is not None and result.sweep.WhichOneof("action") in CANCELLING:
                self.cancelled += result.done
        elif isinstance(result, ColdResult):
            self.cancelled += result.cancelled
        elif isinstance(result, ScheduleResult):
            for note in result.notes:
                self.schedule_runs[note.run.outcome] += note.run.times
                self.scheduled += note.run.outcome in MESSAGES
                self.cancelled += note.run.outcome == RUN_CANCELLED
