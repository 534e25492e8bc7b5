"""Requests made of a caller's arguments.

Owns the check of their kinds: protobuf raises other errors, which do not name the field. Whether a node allows a value
is the node's to say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tickwheel.client.errors import RequestRefused, refused

P = ParamSpec("P")
M = TypeVar("M")

TEXT = "a text of UTF-8"
TIMEOUT_S_MAX = 1e9
"""Thirty years. A call whose deadline gRPC cannot count, such as infinity, never ends and is never sent."""
_TAKES = {
    FieldDescriptor.CPPTYPE_STRING: TEXT,
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_INT32: f"a whole number from {-(1 << 31)} to {(1 << 31) - 1}",
    FieldDescriptor.CPPTYPE_INT64: f"a whole number from {-(1 << 63)} to {(1 << 63) - 1}",
    FieldDescriptor.CPPTYPE_UINT32: f"a whole number from 0 to {(1 << 32) - 1}",
    FieldDescriptor.CPPTYPE_UINT64: f"a whole number from 0 to {(1 << 64) - 1}",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
}


_READS = ("Get", "List", "Count", "Preview", "WhoAmI")


def is_read(request: Message) -> bool:
    """Whether a request changes nothing, so that nobody has to know whether a lost one was carried out."""
    return request.DESCRIPTOR.name.startswith(_READS)


def request_of(kind: Callable[P, M], /, *positional: P.args, **fields: P.kwargs) -> M:
    """`kind(**fields)`, a protobuf message.

    Raises RequestRefused, which names the field, for a value of another kind, a text that is no UTF-8, or a number that
    the field cannot hold.
    """
    try:
        return kind(*positional, **fields)
    except (TypeError, ValueError, AttributeError) as error:
        refusal = _refusal(kind, fields)
        if refusal is None:
            raise
        raise refusal from error


def checked_text(field: str, value: object) -> str:
    """The value, if it is a text that can be sent. Raises RequestRefused."""
    if isinstance(value, str):
        if value.isascii():
            return value
        try:
            value.encode()
        except UnicodeEncodeError:
            raise refused(field, repr(value), TEXT) from None
        return value
    raise refused(field, repr(value), TEXT)


def checked_count(field: str, value: object, least: int, limit: str = "") -> int:
    """The value, if it is a whole number from `least` on. `limit` says so in other words. Raises RequestRefused."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 32:
        raise refused(field, repr(value), limit or f"a whole number from {least} on")
    return value


def checked_timeout(field: str, value: object) -> float:
    """The value, if it is a number of seconds above 0; at most TIMEOUT_S_MAX of it. Raises RequestRefused."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise refused(field, repr(value), "a number of seconds above 0")
    return min(float(value), TIMEOUT_S_MAX)


def _refusal(kind: Any, fields: dict[str, Any]) -> RequestRefused | None:
    """For the first field that cannot be set; None if each can."""
    for name, value in fields.items():
        try:
            kind(**{name: value})
        except (TypeError, ValueError, AttributeError):
            return refused(name, repr(value), _takes(kind.DESCRIPTOR.fields_by_name[name]))
    return None


def _takes(field: Any) -> str:
    """What the field holds, in words."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return "a mapping of texts to texts"
    if field.type == FieldDescriptor.TYPE_BYTES:
        return "bytes"
    one: str = _TAKES.get(field.cpp_type, field.name)
    return f"a list, each {one}" if field.is_repeated else one
