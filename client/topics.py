"""Topics and consumer groups, and what becomes of one that is deleted."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from tickwheel.client.answers import reader
from tickwheel.client.retrying import RetryPolicy, policy_of
from tickwheel.proto import admin_pb2


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the master has it."""

    name: str
    topic_id: int
    """Never used for another topic."""
    fifo: bool
    """Messages of one message group are delivered one at a time, in order."""
    paused: bool
    """Nothing of it is delivered until it is resumed."""
    dispatched: int
    """Messages that have entered its ready queue so far."""
    pending: int | None
    """Pending messages; None: the setting `topic_pending_max` does not limit it."""
    pending_max: int | None
    """Its limit; None: the setting `topic_pending_max` does not limit it."""


@dataclass(frozen=True, slots=True)
class Group:
    """A consumer group as the master has it."""

    name: str
    group_id: int
    """Never used for another group."""
    topics: tuple[str, ...]
    topics_left_out: int
    """Topics that did not fit the answer."""
    filter: str
    """`a || b`, normalized; empty: everything."""
    broadcasting: bool
    """Each consumer gets every message, and nothing is retried."""
    paused: bool
    """Nothing is delivered to it until it is resumed."""
    retry: RetryPolicy | None
    """None: the delay levels and the setting `attempts_max`."""
    backlog: int
    """Messages that have entered the ready queue and are not settled."""
    oldest_unsettled: datetime | None
    """Due time of the oldest message of the backlog, rounded down to its tick, in UTC; None: there is no backlog, or to
    tell would have cost the node too much."""
    in_flight: int
    """Deliveries that are out with its consumers."""
    consumers: int
    """Consumers that are connected."""
    dead: int
    """Dead letters that are kept."""


@dataclass(frozen=True, slots=True)
class Deletion:
    """The deletion of a topic or group as it stands. A large one continues as a sweep."""

    job_id: str
    """For `sweeps.get`, `wait` and `stop`."""
    finished: bool
    cancelled: int
    """Pending messages of a topic, or retries of a group, that were cancelled so far."""
    undelivered: int
    """Messages that were dispatched and not settled when it went, counted once for each group."""
    dead: int
    """Of a group: dead letters deleted with it. Of a topic: its dead letters deleted so far, in all groups."""


topic_of = reader(Topic, admin_pb2.Topic)
group_of = reader(Group, admin_pb2.Group, retry=lambda wire: policy_of(wire.retry) if wire.HasField("retry") else None)
topic_deletion_of = reader(Deletion, admin_pb2.DeleteTopicResponse)
group_deletion_of = reader(Deletion, admin_pb2.DeleteGroupResponse)
