"""Rules for names. Each check returns the rule that a name breaks, or the empty string."""

from __future__ import annotations

import re

TOPIC_NAME_LENGTH_MAX = 127
"""Promised by common.proto for topics; groups and members have the same bound."""
PRODUCER_ID_LENGTH_MAX = 64

_TOPIC = re.compile(r"[A-Za-z0-9_\-%][A-Za-z0-9_\-.%]{0,126}")
_PATTERN = re.compile(r"[A-Za-z0-9_\-.%*]{1,127}")
_PRODUCER = re.compile(r"[A-Za-z0-9_\-.]{1,64}")

_TOPIC_RULE = f"1 to {TOPIC_NAME_LENGTH_MAX} characters of [A-Za-z0-9_-.%], not starting with a dot"
_PRODUCER_RULE = f"1 to {PRODUCER_ID_LENGTH_MAX} characters of [A-Za-z0-9_-.]"


def check_topic_name(name: str) -> str:
    return "" if _TOPIC.fullmatch(name) else _TOPIC_RULE


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
