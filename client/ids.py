"""Names of messages: text for people and tables, one integer for columns, the proto message for calls.

The text is "group-hour-index" and stays the same for ever: store it to recognise a repeat.
"""

from __future__ import annotations

from tickwheel.client.errors import RequestRefused
from tickwheel.proto import common_pb2

INDEX_BITS = 32
MASK = (1 << INDEX_BITS) - 1


def id_text(id64: int, wheel_group: int = 0) -> str:
    """`0-500123-42` of an id as it stands in a column."""
    return f"{wheel_group}-{id64 >> INDEX_BITS}-{id64 & MASK}"


def text_of(message_id: common_pb2.MessageId) -> str:
    """The text of an id of the wire."""
    return f"{message_id.wheel_group}-{message_id.hour}-{message_id.index}"


def id64_of_text(text: str) -> int:
    """The integer of an id's text (the wheel group is left out). RequestRefused if it is none."""
    message_id = parse_id(text)
    return message_id.hour << INDEX_BITS | message_id.index


def parse_id(text: str) -> common_pb2.MessageId:
    """The wire's id of a text. RequestRefused if it is none."""
    parts = text.split("-")
    if len(parts) == 3 and all(part.isascii() and part.isdigit() for part in parts):
        group, hour, index = map(int, parts)
        if max(group, hour, index) <= MASK:
            return common_pb2.MessageId(wheel_group=group, hour=hour, index=index)
    limit = "three numbers below 2^32 as group-hour-index"
    shown = text[:100]
    raise RequestRefused(f"id: {shown!r}: {limit}", "INVALID_FIELD", {"field": "id", "value": shown, "limit": limit})
