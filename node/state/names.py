"""Rules for names. Each check returns the rule that a name breaks, or the empty string."""

from __future__ import annotations

import re

TOPIC_NAME_LENGTH_MAX = 127
"""Promised by common.proto for topics; groups and members have the same bound."""
PRODUCER_ID_LENGTH_MAX = 64

DEAD_QUEUE_PREFIX = "%DLQ%"
"""A group's dead letters lie in the queue with this and the group's name, which is no topic."""

_TOPIC = re.compile(r"[A-Za-z0-9_\-%][A-Za-z0-9_\-.%]{0,126}")
_PATTERN = re.compile(r"[A-Za-z0-9_\-.%*]{1,127}")
_PRODUCER = re.compile(r"[A-Za-z0-9_\-.]{1,64}")

_TOPIC_RULE = f"1 to {TOPIC_NAME_LENGTH_MAX} characters of [A-Za-z0-9_-.%], not starting with a dot"
_PRODUCER_RULE = f"1 to {PRODUCER_ID_LENGTH_MAX} characters of [A-Za-z0-9_-.]"


def check_topic_name(name: str) -> str:
    return "" if _TOPIC.fullmatch(name) else _TOPIC_RULE


def check_open_topic(name: str) -> str:
    """The rule for a topic that clients send to or create. Apply does not ask: earlier versions let clients create
    topics with names of dead letter queues. Those can still be consumed and deleted."""
    if name.startswith(DEAD_QUEUE_PREFIX):
        return f"a name that does not begin with {DEAD_QUEUE_PREFIX}, as queues of dead letters do"
    return check_topic_name(name)


def check_group_name(name: str) -> str:
    """The same rule as for topics."""
    return "" if _TOPIC.fullmatch(name) else _TOPIC_RULE


def check_node_id(name: str) -> str:
    """The same rule as for topics."""
    return "" if _TOPIC.fullmatch(name) else _TOPIC_RULE


def check_producer_id(name: str) -> str:
    """The rule for a producer's id. The empty id, which stands for none, is not allowed here."""
    return "" if _PRODUCER.fullmatch(name) else _PRODUCER_RULE


def is_name_pattern(pattern: str) -> bool:
    """Whether the text is a pattern of topic or group names; `*` stands for any characters."""
    return _PATTERN.fullmatch(pattern) is not None
