"""How many dispatched messages groups have not settled yet: in all, and by topic.

Counted once per group, and kept as it changes, so that asking costs nothing that grows with topics or groups.
Beside it, how much memory all their windows take together.
Invariant: `by_topic` has the topics whose count is not 0, and `total` is their sum.

Changed by the windows of subscriptions (window.py) and by what enters a ready queue; no part of the replicated state,
since it follows from it.
"""

from __future__ import annotations

import heapq


class Backlog:
    """One per state machine."""

    __slots__ = ("by_topic", "total", "window_values")

    def __init__(self) -> None:
        self.total = 0
        self.window_values = 0
        """What the arrays of all windows hold, two bytes each."""
        self.by_topic: dict[int, int] = {}

    def add(self, topic_id: int, count: int) -> None:
        """So many messages more (less, if negative) are waiting for a group of this topic."""
        if not count:
            return
        self.total += count
        waiting = self.by_topic.get(topic_id, 0) + count
        if waiting:
            self.by_topic[topic_id] = waiting
        else:
            del self.by_topic[topic_id]

    def fullest(self, limit: int) -> list[int]:
        """The topics with most messages waiting, most first; costs a pass over the topics that have any."""
        by_topic = self.by_topic
        return heapq.nsmallest(limit, by_topic, key=lambda topic_id: (-by_topic[topic_id], topic_id))
