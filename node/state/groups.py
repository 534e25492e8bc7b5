"""Consumer groups by name and id, with their subscriptions, retry policy and dead letters.

Ids rise from 1 and are never used again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tickwheel.node.state.dead_letters import DeadLetters
from tickwheel.node.state.retry_policy import RetryPolicy
from tickwheel.node.state.subscription import Subscription
from tickwheel.node.state.waiting import WaitingRetries
from tickwheel.proto import admin_pb2


@dataclass(slots=True)
class Group:
    """A consumer group. `subscriptions`: by topic id, in the order they were added."""

    group_id: int
    name: str
    filter: str
    broadcasting: bool
    dead: DeadLetters
    paused: bool = False
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    waiting: WaitingRetries = field(default_factory=WaitingRetries)
    subscriptions: dict[int, Subscription] = field(default_factory=dict)
    owner: str = ""
    """User who created the group; empty: nobody owns it."""
    closing: bool = False
    """A sweep is deleting the group."""

    def message(self, topics: list[str]) -> admin_pb2.Group:
        """The group as operators see it, without facts that only the master knows."""
        return admin_pb2.Group(
            name=self.name,
            group_id=self.group_id,
            topics=topics,
            filter=self.filter,
            broadcasting=self.broadcasting,
            paused=self.paused,
            backlog=sum(subscription.backlog for subscription in self.subscriptions.values()),
            retry=self.retry.message(),
            dead=self.dead.count,
        )


class Groups:
    """All groups, and the subscriptions by topic."""

    def __init__(self) -> None:
        self._by_id: dict[int, Group] = {}
        self._by_name: dict[str, Group] = {}
        self._by_topic: dict[int, list[Subscription]] = {}
        self.last_id = 0
        self._owned: Counter[str] = Counter()
        self.subscription_count = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Group]:
        """Groups by rising id."""
        return iter(self._by_id.values())

    def get(self, group_id: int) -> Group | None:
        return self._by_id.get(group_id)

    def named(self, name: str) -> Group | None:
        return self._by_name.get(name)

    def add(self, group: Group) -> None:
        """Add a group; its id is above all earlier ones."""
        self.last_id = max(self.last_id, group.group_id)
        self._by_id[group.group_id] = group
        self._by_name[group.name] = group
        if group.owner:
            self._owned[group.owner] += 1
        self.subscription_count += len(group.subscriptions)
        for subscription in group.subscriptions.values():
            self._by_topic.setdefault(subscription.topic_id, []).append(subscription)

    def owned_by(self, user: str) -> int:
        """Number of existing groups that a user created."""
        return self._owned[user]

    def subscribe(self, group: Group, subscription: Subscription) -> None:
        """Give a group one more topic."""
        group.subscriptions[subscription.topic_id] = subscription
        self.subscription_count += 1
        self._by_topic.setdefault(subscription.topic_id, []).append(subscription)

    def remove(self, group: Group) -> None:
        """Remove a group and its subscriptions."""
        del self._by_id[group.group_id]
        del self._by_name[group.name]
        if group.owner:
            self._owned[group.owner] -= 1
            if not self._owned[group.owner]:
                del self._owned[group.owner]
        self.subscription_count -= len(group.subscriptions)
        for subscription in group.subscriptions.values():
            subscription.forget()
            self._by_topic[subscription.topic_id].remove(subscription)

    def forget_topic(self, topic_id: int) -> None:
        """Remove a deleted topic's subscriptions from all groups."""
        for subscription in self._by_topic.pop(topic_id, ()):
            subscription.forget()
            self.subscription_count -= 1
            del self._by_id[subscription.group_id].subscriptions[topic_id]

    def of_topic(self, topic_id: int) -> list[Subscription]:
        """Subscriptions of a topic, in the order they were added."""
        return self._by_topic.get(topic_id, [])

    def subscriptions(self) -> Iterator[Subscription]:
        """All subscriptions, by group."""
        return (s for group in self for s in group.subscriptions.values())
