"""The progress of an archive with a group, from which the next run computes what was removed in between.

Pure. The messages of a topic have positions in the order of their dispatch. A run sees the positions from the first one
kept to the last one that exists. Missing are removed positions that no run has seen, and those that the last run left
out because they were not settled. The count is an upper bound, since retries have positions too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass

from tickwheel.client.snapshot import SettledPin, SettledTopic

VERSION = 1
_RUN = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class TopicMark:
    """The positions of one topic at the last run."""

    topic_id: int
    end: int
    """The run saw all positions below this one."""
    floor: int
    open: int
    """Number of those from the floor on that the group had not settled."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The record of a run: the progress of the archive with one group, and where the run's rows were."""

    topics: tuple[TopicMark, ...] = ()
    staged: str = ""
    """The run's folder of rows, from which they are moved to their days; empty: it had none."""

    def text(self) -> str:
        """The mark as JSON text, as the archive stores it."""
        body = {"version": VERSION, "topics": [asdict(topic) for topic in self.topics], "staged": self.staged}
        return json.dumps(body)

    @classmethod
    def parsed(cls, text: str) -> Mark:
        """The mark of a `text`. Raises ValueError if it is damaged or of another version."""
        try:
            found = json.loads(text)
            if found["version"] != VERSION:
                raise ValueError(f"version {found['version']}, this is {VERSION}")
            topics = tuple(TopicMark(**topic) for topic in found["topics"])
            staged = found.get("staged", "")  # earlier versions wrote rows to their days at once
        except (AttributeError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"it differs from what was written: {error!r}") from None
        wrong = [value for topic in topics for value in astuple(topic) if type(value) is not int]
        if wrong or not (isinstance(staged, str) and (not staged or _RUN.fullmatch(staged))):
            raise ValueError(f"it differs from what was written: {(wrong or [staged])[0]!r}")
        return cls(topics, staged)


def progress_of(pin: SettledPin) -> tuple[TopicMark, ...]:
    """The progress to store once everything that a pin shows is archived."""
    return tuple(TopicMark(topic.topic_id, topic.end, topic.floor, topic.open) for topic in pin.topics)


def missing(topic: SettledTopic, last: Mark, passed_over: Sequence[tuple[int, int]]) -> int:
    """An upper bound of the group's messages that no run has seen.

    They were removed before this run, or during its reads, at the positions `passed_over`.
    """
    seen, floor, left = 0, 0, 0
    for mark in last.topics:
        # A mark beyond the cluster's positions belongs to another cluster, or to this one before it was restored.
        if mark.topic_id == topic.topic_id and mark.end <= topic.end:
            seen, floor, left = mark.end, mark.floor, mark.open
    unseen = in_between = at = 0
    for first, end in sorted([(0, topic.retained), *passed_over]):
        first = max(at, first, topic.began)
        unseen += max(0, end - max(first, seen))
        in_between += max(0, min(end, seen) - max(first, floor))
        at = max(at, end)
    return unseen + min(in_between, left)
