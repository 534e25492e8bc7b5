"""Message ids in three forms: text for people and tables, an integer for columns, a protobuf message for calls.

The text is "group-hour-index", like 0-498706-12, and never changes: store it to recognize a repeat.
"""

from __future__ import annotations

from tickwheel.client.errors import RequestRefused
from tickwheel.proto import common_pb2

INDEX_BITS = 32
MASK = (1 << INDEX_BITS) - 1


def id_text(id64: int, wheel_group: int = 0) -> str:
    """The text, such as `0-500123-42`, of an id in a column."""
    return f"{wheel_group}-{id64 >> INDEX_BITS}-{id64 & MASK}"


def text_of(message_id: common_pb2.MessageId) -> str:
    """The text of a protobuf id."""
    return f"{message_id.wheel_group}-{message_id.hour}-{message_id.index}"


def id64_of_text(text: str) -> int:
    """The integer of an id's text, without the wheel group. Raises RequestRefused if the text is no id."""
    message_id = parse_id(text)
    return message_id.hour << INDEX_BITS | message_id.index


def parse_id(text: str) -> common_pb2.MessageId:
    """The protobuf id of a text. Raises RequestRefused if the text is no id."""
    parts = text.split("-") if isinstance(text, str) else ()
    if len(parts) == 3 and all(part.isascii() and part.isdigit() for part in parts):
        group, hour, index = map(int, parts)
        if max(group, hour, index) <= MASK:
            return common_pb2.MessageId(wheel_group=group, hour=hour, index=index)
    limit = "an id of a message, group-hour-index, such as 0-498706-12"
    shown = str(text)[:100]
    raise RequestRefused(f"id: {shown!r}: {limit}", "INVALID_FIELD", {"field": "id", "value": shown, "limit": limit})
