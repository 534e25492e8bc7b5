"""What the data directory of a node holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

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


def disk_use_of(pages: Sequence[admin_pb2.DiskUse]) -> DiskUse:
    """A node's disk use from the answers to one question: parts and hours are in the first, topics add up."""
    first = pages[0]
    sums: dict[str, tuple[int, int]] = {}
    for page in pages:
        for found in page.topics:
            messages, size = sums.get(found.topic, (0, 0))
            sums[found.topic] = (messages + found.messages, size + found.bytes)
    return DiskUse(
        node_id=first.node_id,
        bytes_total=first.bytes_total,
        bytes_free=first.bytes_free,
        high_water_percent=first.high_water_percent,
        above_high_water=first.above_high_water,
        parts=tuple(DiskPart(part.name, part.bytes) for part in first.parts),
        hours=tuple(DiskHour(moment_of(hour.hour * HOUR_MS), hour.bytes) for hour in first.hours),
        hours_left_out=first.hours_left_out,
        topics=tuple(DiskTopic(topic, messages, size) for topic, (messages, size) in sums.items()),
        topics_left_out=max(page.topics_left_out for page in pages),
    )
