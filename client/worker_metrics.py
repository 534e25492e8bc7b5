"""What a worker has done, by topic: counts and times, as an object and for Prometheus."""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

BOUNDS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0, 1_800.0)


class Times:
    """Durations, counted by the bounds BOUNDS_S."""

    __slots__ = ("counts", "longest_s", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        """Durations up to each bound and above the one before; the last: above all bounds."""
        self.sum_s = 0.0
        self.longest_s = 0.0

    def note(self, seconds: float) -> None:
        """Count a duration; a negative one counts as 0."""
        seconds = max(0.0, seconds)
        self.counts[bisect.bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds
        self.longest_s = max(self.longest_s, seconds)

    @property
    def count(self) -> int:
        """Number of durations."""
        return sum(self.counts)

    @property
    def mean_s(self) -> float:
        """The mean; 0 without any."""
        return self.sum_s / self.count if self.count else 0.0


@dataclass(slots=True)
class TopicMetrics:
    """Counts of one topic's deliveries."""

    done: int = 0
    """The handler returned: acknowledged."""
    retried: int = 0
    """Given back, to be delivered again."""
    dead: int = 0
    """Made dead letters."""
    dropped: int = 0
    """Acknowledged although the handler failed."""
    abandoned: int = 0
    """Still running when the worker had to end: not settled, delivered again."""
    timed_out: int = 0
    """Handlers that took longer than their time-out; each counts as retried, dead or dropped too."""
    running: int = 0
    """Handlers that run now."""
    handler: Times = field(default_factory=Times)
    """How long handlers took."""
    lateness: Times = field(default_factory=Times)
    """How long after the due time a handler began, by this machine's clock."""


SETTLED = ("done", "retried", "dead", "dropped", "abandoned")


class WorkerMetrics:
    """Counts of one worker."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.topics: dict[str, TopicMetrics] = {}

    def topic(self, name: str) -> TopicMetrics:
        """The counts of one topic."""
        found = self.topics.get(name)
        if found is None:
            found = self.topics[name] = TopicMetrics()
        return found

    def total(self, name: str) -> int:
        """The sum of one count over all topics: `metrics.total("done")`."""
        return sum(getattr(topic, name) for topic in self.topics.values())

    def export(self, registry: CollectorRegistry) -> None:
        """Show the counts to Prometheus. Workers of the same registry share their metrics."""
        collector = _collectors.get(registry)
        if collector is None:
            collector = _collectors[registry] = _Collector()
            collector.workers.append(self)
            registry.register(collector)
        else:
            collector.workers.append(self)


_collectors: weakref.WeakKeyDictionary[Any, _Collector] = weakref.WeakKeyDictionary()


class _Collector:
    """The metrics of all workers of a registry. Two workers of one group add up."""

    def __init__(self) -> None:
        self.workers: list[WorkerMetrics] = []

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        by_labels: dict[tuple[str, str], list[TopicMetrics]] = {}
        for worker in list(self.workers):
            for name, topic in list(worker.topics.items()):
                by_labels.setdefault((worker.group, name), []).append(topic)
        labels = ("group", "topic")
        ended = CounterMetricFamily(
            "tickwheel_worker_deliveries", "Deliveries by what became of them", labels=(*labels, "outcome")
        )
        timed_out = CounterMetricFamily("tickwheel_worker_timeouts", "Handlers beyond their time-out", labels=labels)
        running = GaugeMetricFamily("tickwheel_worker_running", "Handlers that run", labels=labels)
        took = HistogramMetricFamily("tickwheel_worker_handler_seconds", "How long handlers took", labels=labels)
        late = HistogramMetricFamily(
            "tickwheel_worker_lateness_seconds", "How long after the due time a handler began", labels=labels
        )
        for where, topics in by_labels.items():
            for outcome in SETTLED:
                ended.add_metric((*where, outcome), sum(getattr(topic, outcome) for topic in topics))
            timed_out.add_metric(where, sum(topic.timed_out for topic in topics))
            running.add_metric(where, sum(topic.running for topic in topics))
            took.add_metric(where, *_histogram([topic.handler for topic in topics]))
            late.add_metric(where, *_histogram([topic.lateness for topic in topics]))
        yield from (ended, timed_out, running, took, late)


def _histogram(times: list[Times]) -> tuple[list[tuple[str, float]], float]:
    """(cumulated counts by upper bound, sum) of several."""
    total = 0
    buckets: list[tuple[str, float]] = []
    for place, bound in enumerate((*map(str, BOUNDS_S), "+Inf")):
        total += sum(one.counts[place] for one in times)
        buckets.append((bound, total))
    return buckets, sum(one.sum_s for one in times)
