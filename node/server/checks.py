"""Checks of rights, as the table of endpoints uses them.

A check gets the caller, the request and the state, and returns the refusal or None. For a stream of requests the
request is None, and its handler checks each one. If a request names a message by its id, the code that looks the
message up checks the right. A check looks at each topic once, and refuses more topics than the handler takes unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tickwheel.node.core.delivery.settlements import SETTLE_TOPICS_MAX
from tickwheel.node.core.schedule.creations import TOPICS_PER_GROUP_MAX
from tickwheel.node.core.schedule.intake import Row
from tickwheel.node.core.watch.pins import TOPICS_MAX as PIN_TOPICS_MAX
from tickwheel.node.failure import Failure, invalid
from tickwheel.node.server.callers import Caller
from tickwheel.node.state.view import StateView
from tickwheel.proto.access_pb2 import RIGHT_ADMINISTER, RIGHT_CANCEL, RIGHT_CONSUME, RIGHT_READ
from tickwheel.proto.consumer_pb2 import SettleBatch

Check = Callable[[Caller, Any, StateView], Failure | None]


def _too_many(topics: int, limit: int) -> Failure | None:
    """The refusal of a request that names more topics than its handler takes: each would be checked."""
    return invalid("topics", topics, f"at most {limit}").failure if topics > limit else None


def known(caller: Caller, request: Any, state: StateView) -> Failure | None:
    """Allows every known caller: the answer shows no messages, or only those that the caller may see."""
    return None


def somewhere(right: int) -> Check:
    """Needs the right to at least one name; the handler checks which."""
    return lambda caller, request, state: caller.somewhere(right)


def topic(right: int, named: Callable[[Any], str]) -> Check:
    """Needs the right to the topic that the request names; without a name, to every topic."""
    return lambda caller, request, state: caller.topic(right, named(request))


def group(right: int, named: Callable[[Any], str]) -> Check:
    """Needs the right to the group that the request names."""
    return lambda caller, request, state: caller.group(right, named(request))


def cluster(caller: Caller, request: Any, state: StateView) -> Failure | None:
    """Needs the right to administer the whole cluster."""
    return caller.everything(RIGHT_ADMINISTER)


def pinning(caller: Caller, request: Any, state: StateView) -> Failure | None:
    """To pin messages: needs the right to read the topics. An existing pin: its handler checks the owner."""
    if request.pin_id:
        return caller.somewhere(RIGHT_READ)
    too_many = _too_many(len(request.topics), PIN_TOPICS_MAX)
    return too_many or caller.topics(RIGHT_READ, dict.fromkeys(request.topics or [""]))


def reading_settled(caller: Caller, request: Any, state: StateView) -> Failure | None:
    """To pin what a group has settled: needs the right to read the group and its topics. An existing pin: its handler
    checks the owner."""
    if request.pin_id:
        return caller.somewhere(RIGHT_READ)
    return caller.group_and_topics(RIGHT_READ, request.group, topics_of(state, request.group))


def sweeping(caller: Caller, request: Any, state: StateView) -> Failure | None:
    """To see or stop a sweep: needs the right to cancel in its topic."""
    job = state.sweeps.get(request.job_id)
    return caller.somewhere(RIGHT_CANCEL) if job is None else caller.topic_of_named(RIGHT_CANCEL, job.selection.topic)


def consuming(caller: Caller, request: Any, state: StateView) -> Failure | None:
    """To open a consumer: needs the right to its group, and to the topics of the request and of the group."""
    too_many = _too_many(len(request.topics), TOPICS_PER_GROUP_MAX)
    if too_many is not None or caller.free:
        return too_many
    named = [*request.topics, *([request.topic] if "topic" in request.DESCRIPTOR.fields_by_name else [])]
    topics = {name for name in (*named, *topics_of(state, request.group)) if name}
    return caller.group_and_topics(RIGHT_CONSUME, request.group, sorted(topics))


def settling(caller: Caller, request: Any, state: StateView) -> Failure | None:
    """To settle or extend deliveries: needs the right to the group, and to the topics that the request names."""
    several = request.topics if isinstance(request, SettleBatch) else ()
    too_many = _too_many(len(several), SETTLE_TOPICS_MAX)
    if too_many is not None or caller.free:  # each batch is settled once: a free caller costs no look at its topics
        return too_many
    topics = [*([request.topic] if request.topic else []), *several]
    return caller.group_and_topics(RIGHT_CONSUME, request.group, dict.fromkeys(topics))


def creating_group(caller: Caller, request: Any, state: StateView) -> Failure | None:
    """To create a group: needs the right to administer it and its topics."""
    too_many = _too_many(len(request.topics), TOPICS_PER_GROUP_MAX)
    return too_many or caller.group_and_topics(RIGHT_ADMINISTER, request.name, dict.fromkeys(request.topics))


def topics_of(state: StateView, name: str) -> Iterable[str]:
    """Topics of a group; none if there is no such group."""
    group_id = state.group_id(name)
    return [] if group_id is None else [state.topic_name(topic_id) for topic_id in state.group_topics(group_id)]


def by_name(request: Any) -> str:
    """The request's `name`."""
    return str(request.name)


def by_group(request: Any) -> str:
    """The request's `group`."""
    return str(request.group)


def by_message(request: Any) -> str:
    """The topic of the request's message, or of a request that is a row itself (plain.py); never empty."""
    row = request if type(request) is Row else request.message
    return str(row.topic) or "(none)"


def by_topic(request: Any) -> str:
    """The request's `topic`."""
    return str(request.topic)
