"""Topics by name and id. Ids rise from 1 and are never used again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tickwheel.node.state.ready import ReadyLog
from tickwheel.proto import admin_pb2


@dataclass(slots=True)
class Topic:
    """A topic and its ready queue."""

    topic_id: int
    name: str
    fifo: bool
    ready: ReadyLog
    paused: bool = False
    owner: str = ""
    """The user who created it; empty: nobody's."""
    closing: bool = False
    """A sweep of the state deletes it: it takes no message and hands none out."""

    def message(self) -> admin_pb2.Topic:
        """As operators see it."""
        return admin_pb2.Topic(
            name=self.name, topic_id=self.topic_id, fifo=self.fifo, paused=self.paused, dispatched=self.ready.count
        )


class Topics:
    """All topics."""

    def __init__(self) -> None:
        self._by_id: dict[int, Topic] = {}
        self._by_name: dict[str, Topic] = {}
        self.last_id = 0
        self._owned: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Topic]:
        """By rising id."""
        return iter(self._by_id.values())

    def get(self, topic_id: int) -> Topic | None:
        """By id."""
        return self._by_id.get(topic_id)

    def takes(self, topic_id: int) -> bool:
        """Whether it may be given messages: it exists and is not being deleted."""
        topic = self._by_id.get(topic_id)
        return topic is not None and not topic.closing

    def named(self, name: str) -> Topic | None:
        """By name."""
        return self._by_name.get(name)

    def add(self, topic: Topic) -> None:
        """A new one; its id is above all before."""
        self.last_id = max(self.last_id, topic.topic_id)
        self._by_id[topic.topic_id] = topic
        self._by_name[topic.name] = topic
        if topic.owner:
            self._owned[topic.owner] += 1

    def remove(self, topic: Topic) -> None:
        """Its name is free again, its id is not."""
        del self._by_id[topic.topic_id]
        del self._by_name[topic.name]
        if topic.owner:
            self._owned[topic.owner] -= 1
            if not self._owned[topic.owner]:
                del self._owned[topic.owner]

    def owned_by(self, user: str) -> int:
        """Topics that a user created and that exist."""
        return self._owned[user]
