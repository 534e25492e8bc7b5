"""Unique keys: at most one pending message of a topic has a given one.

Checks a key and what goes with it, and says what became of a message that has one. Pure.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

from tickwheel.client.errors import Fault, RequestRefused, refused
from tickwheel.client.moments import moment_of
from tickwheel.client.requests import request_of
from tickwheel.proto import common_pb2

UNIQUE_KEY_BYTES_MAX = 255
KEY_RULE = f"1 to {UNIQUE_KEY_BYTES_MAX} bytes of UTF-8"
KEYED_MAX = 2_000
"""Messages with a unique key that a node takes in one batch."""
KEY_FIELD = "meta.unique_key"
"""The field that a node names when it refuses a key."""


class KeyConflict(StrEnum):
    """What to do with a message whose unique key another message of its topic holds."""

    REFUSE = "refuse"
    """Raise KeyTaken, which names the message that holds the key."""
    USE_EXISTING = "use_existing"
    """Schedule nothing. The receipt names the message that holds the key."""
    REPLACE = "replace"
    """Cancel the message that holds the key, and schedule this one."""


class KeyOutcome(StrEnum):
    """What became of a message, by its unique key."""

    FREE = "FREE"
    """It was scheduled: nobody held its key, or it has none."""
    REFUSED = "REFUSED"
    """It was not scheduled. Id and due time belong to the message that holds the key."""
    USED_EXISTING = "USED_EXISTING"
    """It was not scheduled, as requested. Id and due time belong to the message that holds the key."""
    REPLACED = "REPLACED"
    """It was scheduled, and the message that held the key was cancelled by the same command."""


_CONFLICTS = {one: common_pb2.KeyConflict.Value(f"KEY_CONFLICT_{one.name}") for one in KeyConflict}
_OUTCOMES: dict[int, KeyOutcome] = {common_pb2.KeyOutcome.Value(f"KEY_{one.name}"): one for one in KeyOutcome}


class KeyRule(NamedTuple):
    """What a node is told beside a unique key."""

    conflict: common_pb2.KeyConflict.ValueType = common_pb2.KEY_CONFLICT_UNSPECIFIED
    until_settled: bool = False


NO_RULE = KeyRule()


class KeyTaken(RequestRefused):
    """The caller's: another message of the topic holds the unique key, so this one was not scheduled."""

    @property
    def topic(self) -> str:
        return self.metadata.get("topic", "")

    @property
    def unique_key(self) -> str:
        return self.metadata.get("unique_key", "")

    @property
    def id(self) -> str:
        """The id of the message that holds the key."""
        return self.metadata.get("id", "")

    @property
    def due_ms(self) -> int:
        """Its due time in milliseconds since the Unix epoch."""
        return int(self.metadata.get("due_ms", "0"))

    @property
    def due(self) -> datetime:
        """Its due time in UTC."""
        return moment_of(self.due_ms)


def key_taken(topic: str, unique_key: str, message_id: str, due_ms: int) -> KeyTaken:
    """The refusal of a message because of its key. `message_id`, `due_ms`: of the message that holds the key."""
    due = moment_of(due_ms).isoformat(timespec="milliseconds")
    return KeyTaken(
        f"unique key {unique_key!r} of topic {topic} is held by message {message_id}, due {due}",
        "KEY_TAKEN",
        {
            "field": KEY_FIELD,
            "value": unique_key,
            "limit": "a key that no other message of the topic holds",
            "topic": topic,
            "unique_key": unique_key,
            "id": message_id,
            "due_ms": str(due_ms),
        },
    )


def key_taken_of(fault: Fault, topic: str, unique_key: str) -> KeyTaken | None:
    """The same of a node's answer; None if the fault is another one."""
    if fault.reason != "KEY_TAKEN":
        return None
    due_ms = fault.metadata.get("due_ms", "")
    known = due_ms.removeprefix("-").isdecimal()
    return key_taken(topic, unique_key, fault.metadata.get("id", ""), int(due_ms) if known else 0)


def checked_key(unique_key: object) -> str:
    """The key. Raises RequestRefused if it cannot be one."""
    if not isinstance(unique_key, str):
        raise refused("unique_key", repr(unique_key), f"a text of {KEY_RULE}")
    try:
        size = len(unique_key.encode())
    except UnicodeEncodeError:
        raise refused("unique_key", ascii(unique_key), KEY_RULE) from None
    if not 1 <= size <= UNIQUE_KEY_BYTES_MAX:
        raise refused("unique_key", f"{size} bytes", KEY_RULE)
    return unique_key


def rule_of(
    on_key_conflict: KeyConflict | str | None,
    key_until_settled: bool,
    default: common_pb2.KeyConflict.ValueType = common_pb2.KEY_CONFLICT_REFUSE,
) -> KeyRule:
    """What goes with a key. Raises RequestRefused for a value that there is not."""
    if not isinstance(key_until_settled, bool):
        raise refused("key_until_settled", repr(key_until_settled), "True or False")
    if on_key_conflict is None:
        return KeyRule(default, key_until_settled)
    if on_key_conflict not in list(KeyConflict):
        raise refused("on_key_conflict", on_key_conflict, ", ".join(KeyConflict))
    return KeyRule(_CONFLICTS[KeyConflict(on_key_conflict)], key_until_settled)


def check_no_rule(on_key_conflict: KeyConflict | str | None, key_until_settled: bool, needed: str) -> None:
    """Raises RequestRefused if something is said about a key although there is none. `needed`: where it would be."""
    if on_key_conflict is not None:
        raise refused("on_key_conflict", on_key_conflict, f"only with {needed}")
    if key_until_settled:
        raise refused("key_until_settled", key_until_settled, f"only with {needed}")


def outcome_of(number: int) -> KeyOutcome:
    """The outcome with this number of the protobuf enum."""
    return _OUTCOMES[number]


def topic_key(topic: str, unique_key: str) -> common_pb2.TopicKey:
    """Names the message that holds a key. Raises RequestRefused if there can be no such key."""
    return request_of(common_pb2.TopicKey, topic=topic, unique_key=checked_key(unique_key))
