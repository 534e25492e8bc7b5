"""Topics, groups and members as messages of the wire, gathered from the parts of a core on request."""

from __future__ import annotations

from collections.abc import Iterator

from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.metas import fitting
from tickwheel.node.core.watch.status import LOOKS_MAX
from tickwheel.node.state.membership import message_of
from tickwheel.proto import admin_pb2


def members_of(core: NodeCore) -> admin_pb2.MemberList:
    """Members as applied on this node."""
    return admin_pb2.MemberList(members=[message_of(member) for member in core.log.members()])


def topics_after(core: NodeCore, after_id: int = 0) -> Iterator[admin_pb2.Topic]:
    """Topics with a higher id than `after_id`, by rising id. An iterator, so that the caller can pause between
    topics."""
    return (_with_limit(core, topic.message()) for topic in core.state.topics.after(after_id))


def named_topic(core: NodeCore, name: str) -> admin_pb2.Topic | None:
    """One topic."""
    known = core.state.topics.named(name)
    return None if known is None else _with_limit(core, known.message())


def _with_limit(core: NodeCore, topic: admin_pb2.Topic) -> admin_pb2.Topic:
    """Add how many messages are pending in a topic, and how many may be, if this node applies a limit to it."""
    limit = core.parts.topic_pending.limit(topic.name) if core.parts.topic_pending.wanted else 0
    if limit:
        topic.pending, topic.pending_max = core.parts.topic_pending.of(topic.topic_id), limit
    return topic


def groups_after(core: NodeCore, after_id: int = 0) -> Iterator[admin_pb2.Group]:
    """Groups with a higher id than `after_id`, by rising id, with their consumers as far as this node knows them.
    An iterator, so that the caller can pause between groups."""
    looks = LOOKS_MAX
    for known in core.state.groups.after(after_id):
        group = core.state.group_message(known.name)
        assert group is not None, "the group is there"
        looks -= _fill(core, group, looks)
        yield group


def named_group(core: NodeCore, name: str) -> admin_pb2.Group | None:
    """One consumer group."""
    group = core.state.group_message(name)
    if group is not None:
        _fill(core, group, LOOKS_MAX)
    return group


def _fill(core: NodeCore, group: admin_pb2.Group, looks_max: int) -> int:
    """Add what is not replicated or takes a look at topics, and cut the topics that do not fit an answer. Returns how
    many topics it looked at, `looks_max` at most."""
    group.consumers = len(core.parts.delivery.sessions.of_group(group.group_id))
    group.in_flight = core.parts.delivery.leases.in_flight_of_group(group.group_id)
    oldest_ms, looks = core.state.oldest_of_group(group.group_id, looks_max)
    if oldest_ms is not None:
        group.oldest_unsettled_ms = oldest_ms
    fit = len(fitting(group.topics, len))
    group.topics_left_out = len(group.topics) - fit
    del group.topics[fit:]
    return looks
