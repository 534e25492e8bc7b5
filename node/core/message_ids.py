"""Message ids as callers know them: (wheel group, hour, global index), or a text `group-hour-index`.

Inside the node an id is one number, with the hour in the upper 32 bits and the index in the lower.
"""

from __future__ import annotations

from tickwheel.node.failure import Failure, invalid
from tickwheel.proto import common_pb2
from tickwheel.wheel.units import hour_and_index


def id_of(message_id: common_pb2.MessageId, wheel_group: int) -> int:
    """The number of a message id. Raises RequestError for an id of another wheel group, which would name another
    message here."""
    if message_id.wheel_group != wheel_group:
        shown = f"{message_id.wheel_group}-{message_id.hour}-{message_id.index}"
        raise invalid("id", shown, f"an id of wheel group {wheel_group}, which begins with {wheel_group}-")
    return message_id.hour << 32 | message_id.index


def message_id_of(number: int, wheel_group: int) -> common_pb2.MessageId:
    """The reverse of `id_of`."""
    hour, index = hour_and_index(number)
    return common_pb2.MessageId(wheel_group=wheel_group, hour=hour, index=index)


def fill_message_id(message_id: common_pb2.MessageId, number: int, wheel_group: int) -> None:
    """As `message_id_of`, in place."""
    message_id.hour, message_id.index = hour_and_index(number)
    message_id.wheel_group = wheel_group


def id_text(number: int, wheel_group: int) -> str:
    """The id as people see it."""
    hour, index = hour_and_index(number)
    return f"{wheel_group}-{hour}-{index}"


def no_message(number: int, wheel_group: int) -> Failure:
    """The refusal of an id that names no message."""
    text = id_text(number, wheel_group)
    return Failure(common_pb2.UNKNOWN_NAME, f"no message {text}", {"field": "id", "value": text})
