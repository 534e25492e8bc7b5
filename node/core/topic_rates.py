"""What happens by topic, counted a batch at a time, and how fast it goes: for status and `tickwheel top`.

Counts are of this process, of what it applied; deliveries are counted where they are made. Notes of the last seconds
are kept, so a rate is the difference of two.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.core.counters import LATE_BOUNDS_MS, Counters
from tickwheel.node.state.results import PublishResult, SettleResult
from tickwheel.proto.log_pb2 import Command

WINDOW_MS = 5_000
SCHEDULED, DISPATCHED, DELIVERED, SETTLED = range(4)
LATE_ABOVE_MS = 3_600_000
"""Said of what was later than the last bound."""


@dataclass(frozen=True, slots=True)
class _Note:
    at_ms: int
    counts: dict[int, tuple[int, ...]]
    late_counts: NDArray[np.int64]
    redelivered: int


@dataclass(slots=True)
class TopicRates:
    """One per node."""

    counts: dict[int, list[int]] = field(default_factory=dict)
    """Scheduled, dispatched, delivered, settled, by topic id."""
    _notes: deque[_Note] = field(default_factory=deque)

    def add(self, topic_id: int, what: int, count: int) -> None:
        """So many messages of a topic."""
        found = self.counts.get(topic_id)
        if found is None:
            found = self.counts[topic_id] = [0, 0, 0, 0]
        found[what] += count

    def applied(self, command: Command, result: object) -> None:
        """Count what a command did."""
        if isinstance(result, PublishResult):
            topics = np.frombuffer(command.publish.topic_ids, "<u4")
            if len(topics) == 1:
                count = sum(len(outcome.ids) for outcome in result.requests if not outcome.repeated)
                self.add(int(topics[0]), SCHEDULED, count)
            else:
                for topic_id, count in zip(*np.unique(topics, return_counts=True), strict=True):
                    self.add(int(topic_id), SCHEDULED, int(count))
        elif isinstance(result, SettleResult):
            for batch, part in zip(command.settle.batches, result.parts, strict=False):
                self.add(batch.topic_id, SETTLED, part.settled)

    def note(self, now_ms: int, counters: Counters) -> None:
        """Remember where the counts stand; once a second."""
        counts = {topic_id: tuple(values) for topic_id, values in self.counts.items()}
        self._notes.append(_Note(now_ms, counts, counters.late_counts.copy(), counters.redelivered))
        while self._notes[0].at_ms < now_ms - WINDOW_MS:
            self._notes.popleft()

    def per_second(self) -> dict[int, tuple[float, ...]]:
        """Scheduled, dispatched, delivered and settled a second, by topic id."""
        if len(self._notes) < 2:
            return {}
        first, last = self._notes[0], self._notes[-1]
        seconds = max(1, last.at_ms - first.at_ms) / 1_000
        none = (0, 0, 0, 0)
        return {
            topic_id: tuple(
                (new - old) / seconds for new, old in zip(values, first.counts.get(topic_id, none), strict=True)
            )
            for topic_id, values in last.counts.items()
        }

    def redelivered_per_second(self) -> float:
        """Deliveries that were not the first."""
        if len(self._notes) < 2:
            return 0.0
        first, last = self._notes[0], self._notes[-1]
        return (last.redelivered - first.redelivered) / (max(1, last.at_ms - first.at_ms) / 1_000)

    def late_ms(self, share: float) -> int:
        """So many of the deliveries of the last seconds left at most so late; -1: there were none."""
        if len(self._notes) < 2:
            return -1
        counts = self._notes[-1].late_counts - self._notes[0].late_counts
        total = int(counts.sum())
        if not total:
            return -1
        at = int(np.searchsorted(np.cumsum(counts), share * total))
        return LATE_BOUNDS_MS[at] if at < len(LATE_BOUNDS_MS) else LATE_ABOVE_MS
