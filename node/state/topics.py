"""Topics by name and id. Ids rise from 1 and are never used again."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
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
    """User who created the topic; empty: nobody owns it."""
    closing: bool = False
    """A sweep is deleting the topic: it accepts and hands out no message."""

    def message(self) -> admin_pb2.Topic:
        """The topic as operators see it."""
        return admin_pb2.Topic(
            name=self.name, topic_id=self.topic_id, fifo=self.fifo, paused=self.paused, dispatched=self.ready.count
        )


class Topics:
    """All topics."""

    def __init__(self) -> None:
        self._by_id: dict[int, Topic] = {}
        self._ids: list[int] = []
        self._by_name: dict[str, Topic] = {}
        self.get: Callable[[int], Topic | None] = self._by_id.get
        """The topic of an id; None: there is none."""
        self.named: Callable[[str], Topic | None] = self._by_name.get
        """The topic of a name; None: there is none."""
        self.last_id = 0
        self._owned: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Topic]:
        """Topics by rising id."""
        return iter(self._by_id.values())

    def after(self, topic_id: int) -> Iterator[Topic]:
        """Topics with higher ids, by rising id; topics may come and go between two of them."""
        while (place := bisect_right(self._ids, topic_id)) < len(self._ids):
            topic_id = self._ids[place]
            yield self._by_id[topic_id]

    def takes(self, topic_id: int) -> bool:
        """Whether the topic may get messages: it exists and is not being deleted."""
        topic = self._by_id.get(topic_id)
        return topic is not None and not topic.closing

    def add(self, topic: Topic) -> None:
        """Add a topic; its id is above all earlier ones."""
        self.last_id = max(self.last_id, topic.topic_id)
        self._by_id[topic.topic_id] = topic
        self._ids.append(topic.topic_id)
        self._by_name[topic.name] = topic
        if topic.owner:
            self._owned[topic.owner] += 1

    def remove(self, topic: Topic) -> None:
        """Remove a topic. Its name becomes free again, its id does not."""
        del self._by_id[topic.topic_id]
        del self._ids[bisect_left(self._ids, topic.topic_id)]
        del self._by_name[topic.name]
        if topic.owner:
            self._owned[topic.owner] -= 1
            if not self._owned[topic.owner]:
                del self._owned[topic.owner]

    def owned_by(self, user: str) -> int:
        """Number of existing topics that a user created."""
        return self._owned[user]
