"""Rates over the last seconds, in all and by topic: for status and `tickwheel top`.

The totals (counters.py) are noted once a second, and events by topic are counted a batch at a time. Notes of the last
seconds are kept; a rate is the difference of two notes. All is of this process: what it applied, and its deliveries.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.core.watch.counters import LATE_BOUNDS_MS, Counters, Totals
from tickwheel.node.core.world import SteadyMs
from tickwheel.node.state.backlog import Backlog
from tickwheel.node.state.machine import AnyResult
from tickwheel.node.state.results import PublishResult, ScheduleResult, SettleResult
from tickwheel.node.state.schedules import MESSAGES
from tickwheel.proto.log_pb2 import Command

WINDOW_MS = 5_000
SCHEDULED, DISPATCHED, DELIVERED, SETTLED = range(4)
_NO_RATES = (0.0, 0.0, 0.0, 0.0)
LATE_ABOVE_MS = 3_600_000
"""Reported for deliveries later than the last bound."""


@dataclass(frozen=True, slots=True)
class _Note:
    at_ms: int
    totals: tuple[int, int, int, int]
    """Messages scheduled, dispatched, delivered and settled since the process started."""
    counts: dict[int, list[int]]
    """The same by topic, since the note before."""
    late_counts: NDArray[np.int64]
    redelivered: int


@dataclass(slots=True)
class TopicRates:
    """Of the topics it remembers only those with events in the last seconds."""

    counts: dict[int, list[int]] = field(default_factory=dict)
    """Topic id -> messages scheduled, dispatched, delivered and settled since the last note."""
    _notes: deque[_Note] = field(default_factory=deque)
    _busiest: list[tuple[int, tuple[float, ...]]] | None = None
    """Found since the last note; None: not requested yet."""

    def add(self, topic_id: int, what: int, count: int) -> None:
        """Count `count` messages of a topic; `what` is DISPATCHED or another of the module's numbers."""
        found = self.counts.get(topic_id)
        if found is None:
            found = self.counts[topic_id] = [0, 0, 0, 0]
        found[what] += count

    def applied(self, command: Command, result: AnyResult) -> None:
        """Count the effect of an applied command."""
        if isinstance(result, PublishResult):
            if not result.scheduled:
                return
            topics = np.frombuffer(command.publish.topic_ids, "<u4")
            if len(topics) == 1:
                self.add(int(topics[0]), SCHEDULED, result.scheduled)
            else:
                for topic_id, count in zip(*np.unique(topics, return_counts=True), strict=True):
                    self.add(int(topic_id), SCHEDULED, int(count))
        elif isinstance(result, SettleResult):
            for batch, part in zip(command.settle.batches, result.parts, strict=False):
                self.add(batch.topic_id, SETTLED, part.settled)
        elif isinstance(result, ScheduleResult):
            for note in result.notes:
                if note.run.outcome in MESSAGES:
                    self.add(note.topic_id, SCHEDULED, 1)

    def note(self, steady_ms: SteadyMs, totals: Totals, counters: Counters) -> None:
        """Keep the counts as a note and start new ones. Called once a second."""
        sums = (totals.scheduled, totals.dispatched, counters.delivered, totals.settled)
        self._notes.append(_Note(steady_ms, sums, self.counts, counters.late_counts.copy(), counters.redelivered))
        self.counts = {}
        self._busiest = None
        while self._notes[0].at_ms < steady_ms - WINDOW_MS:
            self._notes.popleft()

    def _seconds(self) -> float:
        """Between the first and the last note; 0: there are fewer than two."""
        if len(self._notes) < 2:
            return 0.0
        return max(1, self._notes[-1].at_ms - self._notes[0].at_ms) / 1_000

    def in_all_per_second(self) -> tuple[float, ...]:
        """Messages scheduled, dispatched, delivered and settled per second."""
        seconds = self._seconds()
        if not seconds:
            return _NO_RATES
        first, last = self._notes[0].totals, self._notes[-1].totals
        return tuple((after - before) / seconds for before, after in zip(first, last, strict=True))

    def per_second(self) -> dict[int, tuple[float, ...]]:
        """Topic id -> messages scheduled, dispatched, delivered and settled per second."""
        seconds = self._seconds()
        if not seconds:
            return {}
        sums: dict[int, list[int]] = {}
        for note in islice(self._notes, 1, None):
            for topic_id, counts in note.counts.items():
                before = sums.get(topic_id)
                sums[topic_id] = counts if before is None else [a + b for a, b in zip(before, counts, strict=True)]
        return {topic_id: tuple(count / seconds for count in counts) for topic_id, counts in sums.items()}

    def busiest(self, backlog: Backlog, limit: int) -> list[tuple[int, tuple[float, ...]]]:
        """The busiest topics with their rates; then those with most waiting messages.

        The choice is made once after each note, however often it is requested.
        """
        if self._busiest is None:
            rates = self.per_second()
            wanted = {topic_id for topic_id, values in rates.items() if any(values)} | set(backlog.fullest(limit))
            waiting = backlog.by_topic
            order = sorted(wanted, key=lambda t: (-sum(rates.get(t, _NO_RATES)), -waiting.get(t, 0), t))
            self._busiest = [(topic_id, rates.get(topic_id, _NO_RATES)) for topic_id in order[:limit]]
        return self._busiest

    def redelivered_per_second(self) -> float:
        """Redeliveries per second."""
        seconds = self._seconds()
        return (self._notes[-1].redelivered - self._notes[0].redelivered) / seconds if seconds else 0.0

    def late_ms(self, share: float) -> int:
        """The lateness in ms that the given share of the last seconds' deliveries did not exceed; -1: there were
        none."""
        if len(self._notes) < 2:
            return -1
        counts = self._notes[-1].late_counts - self._notes[0].late_counts
        total = int(counts.sum())
        if not total:
            return -1
        at = int(np.searchsorted(np.cumsum(counts), share * total))
        return LATE_BOUNDS_MS[at] if at < len(LATE_BOUNDS_MS) else LATE_ABOVE_MS
