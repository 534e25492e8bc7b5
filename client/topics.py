"""Topics and consumer groups, and what becomes of one that is deleted."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from tickwheel.client.moments import moment_of
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
    """Dead letters of a group that went with it, or those of a topic that were thrown away so far, of all groups."""


def topic_of(wire: admin_pb2.Topic) -> Topic:
    """A topic from its protobuf message."""
    return Topic(
        name=wire.name,
        topic_id=wire.topic_id,
        fifo=wire.fifo,
        paused=wire.paused,
        dispatched=wire.dispatched,
        pending=wire.pending if wire.HasField("pending") else None,
        pending_max=wire.pending_max if wire.HasField("pending_max") else None,
    )


def group_of(wire: admin_pb2.Group) -> Group:
    """A group from its protobuf message."""
    return Group(
        name=wire.name,
        group_id=wire.group_id,
        topics=tuple(wire.topics),
        topics_left_out=wire.topics_left_out,
        filter=wire.filter,
        broadcasting=wire.broadcasting,
        paused=wire.paused,
        retry=policy_of(wire.retry) if wire.HasField("retry") else None,
        backlog=wire.backlog,
        oldest_unsettled=moment_of(wire.oldest_unsettled_ms) if wire.HasField("oldest_unsettled_ms") else None,
        in_flight=wire.in_flight,
        consumers=wire.consumers,
        dead=wire.dead,
    )


def deletion_of(wire: admin_pb2.DeleteTopicResponse | admin_pb2.DeleteGroupResponse) -> Deletion:
    """A deletion from its protobuf message."""
    return Deletion(
        job_id=wire.job_id,
        finished=wire.finished,
        cancelled=wire.cancelled,
        undelivered=wire.undelivered,
        dead=wire.dead,
    )
