"""Counts dispatched messages that groups have not settled yet: in all, by topic, and by group.

A message counts once for each group. The counts are updated with each change, so reading them costs the same with any
number of topics or groups. Also counts the memory of all their windows. Invariant: `by_topic` has exactly the topics
whose count is not 0, `by_group` the groups, and `total` is the sum of either.

Changed by the windows of subscriptions (window.py) and by units that enter a ready queue. No part of the replicated
state, since it follows from it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class Backlog:
    __slots__ = ("by_group", "by_topic", "total", "window_values")

    def __init__(self) -> None:
        self.total = 0
        self.window_values = 0
        """Values in the arrays of all windows, two bytes each."""
        self.by_topic: dict[int, int] = {}
        self.by_group: dict[int, int] = {}

    def add(self, group_id: int, topic_id: int, count: int) -> None:
        """`count` more messages (fewer, if negative) of this topic wait for this group."""
        if not count:
            return
        self.total += count
        for counts, key in ((self.by_topic, topic_id), (self.by_group, group_id)):
            waiting = counts.get(key, 0) + count
            if waiting:
                counts[key] = waiting
            else:
                del counts[key]

    def arrived(self, topic_id: int, group_ids: Iterable[int], count: int) -> None:
        """`count` new messages of this topic wait for each of these groups, at least one of each."""
        by_group, groups = self.by_group, 0
        for group_id in group_ids:
            by_group[group_id] = by_group.get(group_id, 0) + count
            groups += 1
        if groups:
            self.total += groups * count
            self.by_topic[topic_id] = self.by_topic.get(topic_id, 0) + groups * count

    def fullest(self, limit: int) -> list[int]:
        """The `limit` topics with most waiting messages, most first. Costs a pass over the topics that have any."""
        by_topic = self.by_topic
        return heapq.nsmallest(limit, by_topic, key=lambda topic_id: (-by_topic[topic_id], topic_id))
