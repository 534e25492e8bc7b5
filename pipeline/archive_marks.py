"""How far an archive was with a group: what it takes to tell, at the next run, what was removed in between.

Pure. A topic's messages have positions in the order of their dispatch; a run sees those from the first one that is
kept to the last one there is. What it finds removed and no run had seen, or what the last run had to leave because it
was not settled, is missing. That is counted by positions, so at most: retries have positions of their own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tickwheel.client.snapshot import SettledPin, SettledTopic

VERSION = 1


@dataclass(frozen=True, slots=True)
class TopicMark:
    """Of one topic, as the last run saw it."""

    topic_id: int
    end: int
    """It looked at all positions below."""
    floor: int
    open: int
    """Of those from the floor on, how many the group had not settled."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Of one group."""

    topics: tuple[TopicMark, ...]

    def text(self) -> str:
        """As it is kept."""
        return json.dumps({"version": VERSION, "topics": [asdict(topic) for topic in self.topics]})

    @classmethod
    def parsed(cls, text: str) -> Mark:
        """What `text` gave. ValueError if it is damaged, or of another version."""
        try:
            found = json.loads(text)
            if found["version"] != VERSION:
                raise ValueError(f"version {found['version']}, this is {VERSION}")
            return cls(tuple(TopicMark(**topic) for topic in found["topics"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not as it was written: {error!r}") from None


def mark_of(pin: SettledPin) -> Mark:
    """Once all that a pin shows is archived."""
    return Mark(tuple(TopicMark(topic.topic_id, topic.end, topic.floor, topic.open) for topic in pin.topics))


def missing(topic: SettledTopic, last: Mark | None, passed_over: Sequence[tuple[int, int]]) -> int:
    """At most how many messages that the group was given are in no run: removed before this one, or, at
    `passed_over`, while it read."""
    seen, floor, left = 0, 0, 0
    for mark in last.topics if last is not None else ():
        # One that was further than the cluster is of another cluster, or of another life of this one.
        if mark.topic_id == topic.topic_id and mark.end <= topic.end:
            seen, floor, left = mark.end, mark.floor, mark.open
    unseen = in_between = at = 0
    for first, end in sorted([(0, topic.retained), *passed_over]):
        first = max(at, first, topic.began)
        unseen += max(0, end - max(first, seen))
        in_between += max(0, min(end, seen) - max(first, floor))
        at = max(at, end)
    return unseen + min(in_between, left)
