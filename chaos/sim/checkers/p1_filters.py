"""P1 of filters: a group gets every message that its filter lets through, and no other.

A filter may be in force from the moment a client asks for it. Its answer ends the filters before it. A message is owed
if it passes every filter that may have been in force since a little before the message was due.
"""

from __future__ import annotations

from dataclasses import dataclass

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history_messages import Delivered, ScheduleAcknowledged, ScheduleSent
from tickwheel.chaos.sim.history_operators import FilterAnswered, FilterAsked
from tickwheel.chaos.sim.world import MS


@dataclass(slots=True)
class _Filter:
    """`over_ns`: time at which the next filter was confirmed; 0: it is the last."""

    tags: tuple[str, ...]
    over_ns: int = 0

    def takes(self, tags: tuple[str, ...]) -> bool:
        return not self.tags or any(tag in tags for tag in self.tags)


class FiltersHold(Checker):
    """Judges groups with a recorded filter, and messages labelled without a key or message group."""

    promise = "P1 (filter)"
    what_is_owed = "messages (group, message) that every filter lets through"

    def __init__(self) -> None:
        self._filters: dict[str, list[_Filter]] = {}
        self._topics: dict[str, str] = {}
        """The topic of each group with a filter."""
        self._tags: dict[int, tuple[str, ...]] = {}
        self._topic_of: dict[int, str] = {}
        self._due_ms: dict[int, int] = {}
        """Due times of acknowledged messages."""
        self._delivered: dict[str, set[int]] = {}

    def _on_delivered(self, record: Delivered) -> None:
        filters = self._filters.get(record.group)
        if filters is not None:
            self._judge(record, filters)

    def _on_schedule_sent(self, record: ScheduleSent) -> None:
        label = record.rows[0].label
        if self._filters and label is not None and label.lane is None and not label.key:
            for row in record.rows:
                self._tags.setdefault(row.uid, row.label.tags if row.label is not None else ())
                self._topic_of[row.uid] = row.topic

    def _on_schedule_acknowledged(self, record: ScheduleAcknowledged) -> None:
        if record.uids[0] in self._tags:
            self._due_ms.update(zip(record.uids, record.due_ms, strict=True))

    def _on_filter_asked(self, record: FilterAsked) -> None:
        self._filters.setdefault(record.group, []).append(_Filter(record.tags))
        self._topics[record.group] = record.topic

    def _on_filter_answered(self, record: FilterAnswered) -> None:
        for earlier in self._filters[record.group][:-1]:
            earlier.over_ns = earlier.over_ns or record.at_ns

    def _judge(self, record: Delivered, filters: list[_Filter]) -> None:
        self._delivered.setdefault(record.group, set()).add(record.uid)
        tags = self._tags.get(record.uid, ())
        now = [one for one in filters if not one.over_ns]
        if not any(one.takes(tags) for one in now):
            self.broken(
                f"{record.node} delivers message {record.uid} with tags {tags} to {record.group}, which takes "
                f"{' or '.join(str(one.tags) for one in now)}"
            )

    def owed(self, at_ns: int) -> list[tuple[str, int]]:
        wall_ms = self.wall_ms(at_ns)
        owed = []
        for group, filters in self._filters.items():
            delivered = self._delivered.get(group, set())
            for uid, due_ms in self._due_ms.items():
                if uid in delivered or due_ms > wall_ms or self._topic_of[uid] != self._topics[group]:
                    continue
                since_ns = (due_ms - self.ahead_ms - self.run.start_wall_ms) * MS
                if all(one.takes(self._tags[uid]) for one in filters if not one.over_ns or one.over_ns >= since_ns):
                    owed.append((group, uid))
        return owed
