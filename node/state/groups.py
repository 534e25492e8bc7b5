"""Consumer groups by name and id, with their subscriptions and dead letters.

Ids rise from 1 and are never used again. Dead letters of a group are kept as records (id, topic,
attempts) in an append-only list, so that none is lost; they hold their hours back from removal until retention is
over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tickwheel.node.state.sequence import Sequence
from tickwheel.node.state.subscription import Attempts, Subscription
from tickwheel.proto import admin_pb2
from tickwheel.wheel.units import Ids

DEAD = np.dtype([("id", "<u8"), ("topic_id", "<u4"), ("attempts", "<u4")])


def dead_path(directory: str, group_id: int) -> str:
    """What the names of a group's files of dead letters begin with."""
    return f"{directory}/dead/{group_id}"


@dataclass(slots=True)
class Group:
    """A consumer group. `subscriptions` by topic id, in the order they were added."""

    group_id: int
    name: str
    filter: str
    broadcasting: bool
    dead: Sequence
    paused: bool = False
    dead_hours: dict[int, int] = field(default_factory=dict)
    """Dead letters by their hour; those of removed hours do not count any more."""
    subscriptions: dict[int, Subscription] = field(default_factory=dict)

    def bury(self, topic_id: int, ids: Ids, attempts: Attempts) -> None:
        """Keep these as dead letters."""
        rows = np.empty(len(ids), DEAD)
        rows["id"], rows["topic_id"], rows["attempts"] = ids, topic_id, attempts
        self.dead.append(rows)
        hours, counts = np.unique((ids >> np.uint64(32)).astype(np.int64), return_counts=True)
        for hour, count in zip(hours.tolist(), counts.tolist(), strict=True):
            self.dead_hours[hour] = self.dead_hours.get(hour, 0) + count

    @property
    def dead_count(self) -> int:
        """Dead letters whose messages are still there."""
        return sum(self.dead_hours.values())

    def remove_hours(self, below: int) -> int:
        """Messages of hours below are gone; returns how many of its dead letters were among them."""
        gone = [hour for hour in self.dead_hours if hour < below]
        count = sum(self.dead_hours.pop(hour) for hour in gone)
        if not self.dead_hours:
            # Records lie in the order of burial, not of hours: they go when none is needed.
            self.dead.drop_below(self.dead.count)
        return count

    def message(self, topics: list[str]) -> admin_pb2.Group:
        """As operators see it, without what only the master knows."""
        return admin_pb2.Group(
            name=self.name,
            group_id=self.group_id,
            topics=topics,
            filter=self.filter,
            broadcasting=self.broadcasting,
            paused=self.paused,
            backlog=sum(subscription.backlog for subscription in self.subscriptions.values()),
        )


class Groups:
    """All groups, and the subscriptions by topic."""

    def __init__(self) -> None:
        self._by_id: dict[int, Group] = {}
        self._by_name: dict[str, Group] = {}
        self._by_topic: dict[int, list[Subscription]] = {}
        self.last_id = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Group]:
        """By rising id."""
        return iter(self._by_id.values())

    def get(self, group_id: int) -> Group | None:
        """By id."""
        return self._by_id.get(group_id)

    def named(self, name: str) -> Group | None:
        """By name."""
        return self._by_name.get(name)

    def add(self, group: Group) -> None:
        """A new one; its id is above all before."""
        self.last_id = max(self.last_id, group.group_id)
        self._by_id[group.group_id] = group
        self._by_name[group.name] = group
        for subscription in group.subscriptions.values():
            self._by_topic.setdefault(subscription.topic_id, []).append(subscription)

    def subscribe(self, group: Group, subscription: Subscription) -> None:
        """One more topic for a group that was added."""
        group.subscriptions[subscription.topic_id] = subscription
        self._by_topic.setdefault(subscription.topic_id, []).append(subscription)

    def remove(self, group: Group) -> None:
        """With its subscriptions."""
        del self._by_id[group.group_id]
        del self._by_name[group.name]
        for subscription in group.subscriptions.values():
            self._by_topic[subscription.topic_id].remove(subscription)

    def forget_topic(self, topic_id: int) -> None:
        """A topic was deleted: nobody has it any more."""
        self._by_topic.pop(topic_id, None)
        for group in self:
            group.subscriptions.pop(topic_id, None)

    def of_topic(self, topic_id: int) -> list[Subscription]:
        """Subscriptions of a topic, in the order they were added."""
        return self._by_topic.get(topic_id, [])

    def subscriptions(self) -> Iterator[Subscription]:
        """All, by group."""
        return (s for group in self for s in group.subscriptions.values())
