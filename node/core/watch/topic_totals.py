"""Metrics of the topics that the configuration names: messages dispatched, delivered and settled, and the backlog.

Taken once a second from the counts behind the rates (topic_rates.py), name by name. So the cost grows with the names,
not with the topics, and a page has a row for each name and no other. Messages scheduled are left out: their count by
topic is good enough for a rate only, since it lacks bundles and staged writes and may include repeats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tickwheel.node.core.watch.topic_rates import DELIVERED, DISPATCHED, SETTLED
from tickwheel.node.metrics import MetricValue
from tickwheel.node.state.view import StateView

_COUNTED = {DISPATCHED: "dispatched", DELIVERED: "delivered", SETTLED: "settled"}


class TopicTotals:
    """Totals since the process started. They never fall, also when a topic is deleted and comes again."""

    def __init__(self, state: StateView, names: Sequence[str]) -> None:
        self._state = state
        self._totals = {name: dict.fromkeys(_COUNTED, 0) for name in names}

    def add(self, counts: Mapping[int, Sequence[int]]) -> None:
        """Add the counts of the last second, `TopicRates.counts`."""
        for name, totals in self._totals.items():
            topic_id = self._state.topic_id(name)
            found = counts.get(topic_id) if topic_id is not None else None
            if found is not None:
                for what in _COUNTED:
                    totals[what] += found[what]

    def metrics(self) -> Mapping[str, MetricValue]:
        """Name -> value; empty if no topic is named. A name without a topic has zeros."""
        if not self._totals:
            return {}
        values: dict[str, MetricValue] = {
            f"topic_{word}_messages": {(name,): float(totals[what]) for name, totals in self._totals.items()}
            for what, word in _COUNTED.items()
        }
        backlog: dict[tuple[str, ...], float] = {}
        for name in self._totals:
            topic_id = self._state.topic_id(name)
            backlog[name,] = 0.0 if topic_id is None else float(self._state.backlog.by_topic.get(topic_id, 0))
        return {**values, "topic_backlog_messages": backlog}
