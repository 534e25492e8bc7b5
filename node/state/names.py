"""Which names are allowed. Each check returns what is allowed if the name is not, else the empty string."""

from __future__ import annotations

import re

TOPIC_NAME_LENGTH_MAX = 127
"""As common.proto promises for topics; groups and members have the same bound."""
PRODUCER_ID_LENGTH_MAX = 64

_TOPIC = re.compile(r"[A-Za-z0-9_\-%][A-Za-z0-9_\-.%]{0,126}")
_PATTERN = re.compile(r"[A-Za-z0-9_\-.%*]{1,127}")
_PRODUCER = re.compile(r"[A-Za-z0-9_\-.]{1,64}")

_TOPIC_RULE = f"1 to {TOPIC_NAME_LENGTH_MAX} characters of [A-Za-z0-9_-.%], not starting with a dot"
_PRODUCER_RULE = f"1 to {PRODUCER_ID_LENGTH_MAX} characters of [A-Za-z0-9_-.]"


def check_topic_name(name: str) -> str:
    """Name of a topic."""
    return "" if _TOPIC.fullmatch(name) else _TOPIC_RULE


def check_group_name(name: str) -> str:
    """Name of a consumer group: as for topics."""
    return "" if _TOPIC.fullmatch(name) else _TOPIC_RULE


def check_node_id(name: str) -> str:
    """Id of a member: as for topics."""
    return "" if _TOPIC.fullmatch(name) else _TOPIC_RULE


def check_producer_id(name: str) -> str:
    """Id of a producer (not the empty one, which stands for none)."""
    return "" if _PRODUCER.fullmatch(name) else _PRODUCER_RULE


def is_name_pattern(pattern: str) -> bool:
    """A pattern of topic or group names; `*` stands for any characters."""
    return _PATTERN.fullmatch(pattern) is not None
