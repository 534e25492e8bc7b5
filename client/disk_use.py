"""What the data directory of a node holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from tickwheel.client.answers import reader
from tickwheel.client.moments import moment_of
from tickwheel.proto import admin_pb2

HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class DiskPart:
    """A part of the data directory."""

    name: str
    """journal, wheel/hours, state/ready, ..."""
    bytes: int


@dataclass(frozen=True, slots=True)
class DiskHour:
    """The files of one hour."""

    start: datetime
    """The messages in them are due in the hour from here on, in UTC."""
    bytes: int


@dataclass(frozen=True, slots=True)
class DiskTopic:
    """What a topic takes in the files of the hours."""

    topic: str
    """Empty: of topics that were deleted."""
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class DiskUse:
    """The data directory of one node and its file system."""

    node_id: str
    bytes_total: int
    """Of the file system."""
    bytes_free: int
    """Of the file system."""
    high_water_percent: int
    """From this share on the disk is above its mark; 0: there is no mark."""
    above_high_water: bool
    parts: tuple[DiskPart, ...]
    hours: tuple[DiskHour, ...]
    """By hour, without what is not merged into hour files yet."""
    hours_left_out: int
    """Hours that did not fit the answer: the latest."""
    topics: tuple[DiskTopic, ...]
    """Empty unless asked for."""
    topics_left_out: int
    """Topics that did not fit an answer: those with the fewest bytes."""


_disk_use_of = reader(
    DiskUse,
    admin_pb2.DiskUse,
    hours=lambda wire: tuple(DiskHour(moment_of(hour.hour * HOUR_MS), hour.bytes) for hour in wire.hours),
)


def disk_use_of(pages: Sequence[admin_pb2.DiskUse]) -> DiskUse:
    """A node's disk use from the answers to one question: parts and hours are in the first, topics add up."""
    sums: dict[str, tuple[int, int]] = {}
    for page in pages:
        for found in page.topics:
            messages, size = sums.get(found.topic, (0, 0))
            sums[found.topic] = (messages + found.messages, size + found.bytes)
    return _disk_use_of(
        pages[0],
        topics=tuple(DiskTopic(topic, messages, size) for topic, (messages, size) in sums.items()),
        topics_left_out=max(page.topics_left_out for page in pages),
    )
