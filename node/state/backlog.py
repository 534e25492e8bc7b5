"""Counts dispatched messages that groups have not settled yet: in all, and by topic.

A message counts once for each group. The counts are updated with each change, so reading them costs the same with any
number of topics or groups. Also counts the memory of all their windows. Invariant: `by_topic` has exactly the topics
whose count is not 0, and `total` is their sum.

Changed by the windows of subscriptions (window.py) and by units that enter a ready queue. No part of the replicated
state, since it follows from it.
"""

from __future__ import annotations

import heapq


class Backlog:
    __slots__ = ("by_topic", "total", "window_values")

    def __init__(self) -> None:
        self.total = 0
        self.window_values = 0
        """Values in the arrays of all windows, two bytes each."""
        self.by_topic: dict[int, int] = {}

    def add(self, topic_id: int, count: int) -> None:
        """`count` more messages (fewer, if negative) wait for a group of this topic."""
        if not count:
            return
        self.total += count
        waiting = self.by_topic.get(topic_id, 0) + count
        if waiting:
            self.by_topic[topic_id] = waiting
        else:
            del self.by_topic[topic_id]

    def fullest(self, limit: int) -> list[int]:
        """The `limit` topics with most waiting messages, most first. Costs a pass over the topics that have any."""
        by_topic = self.by_topic
        return heapq.nsmallest(limit, by_topic, key=lambda topic_id: (-by_topic[topic_id], topic_id))
