"""How much one request may hold: bytes by method, elements by repeated field. The door refuses what is beyond, before
any other code walks through it.

Bytes are checked before decoding, and whether there are far more fields than any request needs. Elements are checked
right after decoding. So what a request costs the loop is bounded by what its method needs, not by the largest message
that a connection may carry. No bound is below what a request may hold that
would be served; narrower limits (settings, rules of a handler) are checked behind the door.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, cast

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.message import DecodeError, Message

from tickwheel.node.core.metas import HEADERS_OF_REQUEST_MAX, headers_at_most, surplus_headers
from tickwheel.node.core.schedule.creations import SUBSCRIPTIONS_MAX
from tickwheel.node.state.publishing import META_BYTES_MAX
from tickwheel.node.state.rights import GRANTS_MAX, PATTERNS_MAX, ROLES_OF_USER_MAX
from tickwheel.node.state.settings import BOUNDS
from tickwheel.proto import common_pb2, scheduler_pb2
from tickwheel.proto.access_pb2 import Right
from tickwheel.proto.parsing import parsed

SMALL_BYTES_MAX = 64 << 10
"""For a request with some names, ids and numbers. The largest that is served has about 35 KB: a filter."""
LISTING_BYTES_MAX = 1 << 20
"""For a request with lists of names, or one payload of a schedule. The largest that is served has about 530 KB: a role
with all grants and patterns."""

LISTING_METHODS = frozenset(
    {
        "/tickwheel.v1.Scheduler/RescheduleMany",
        "/tickwheel.v1.Schedules/Put",
        "/tickwheel.v1.Consumer/Pull",
        "/tickwheel.v1.Admin/CreateGroup",
        "/tickwheel.v1.Admin/UpdateSettings",
        "/tickwheel.v1.Snapshot/Pin",
        "/tickwheel.v1.Access/SetRole",
    }
)
FULL_METHODS = frozenset(
    {
        "/tickwheel.v1.Scheduler/Schedule",
        "/tickwheel.v1.Scheduler/ScheduleStream",
        "/tickwheel.v1.Scheduler/ScheduleMany",
        "/tickwheel.v1.Consumer/Consume",
        "/tickwheel.v1.Consumer/Settle",
        "/tickwheel.v1.Consumer/Extend",
        "/tickwheel.v1.Admin/ResetGroup",
        "/tickwheel.v1.Admin/Backup",
        "/tickwheel.v1.Staging/Stage",
        "/tickwheel.v1.Staging/Commit",
        "/tickwheel.v1.Bulk/SendBundle",
        "/tickwheel.v1.Bulk/TakeOver",
        "/tickwheel.v1.Cold/RegisterCold",
    }
)
"""Messages, settlements, and lists of 20,000 elements and more: only `limits.request_bytes_max` bounds them."""

ELEMENTS_MAX = 100_000
"""Elements of a repeated field without a bound of its own."""
ELEMENTS_MAX_BY_FIELD: Mapping[str, int] = {
    "tickwheel.v1.RowBatch.messages": BOUNDS["batch_messages_max"][1],
    "tickwheel.v1.MessageMeta.tags": META_BYTES_MAX // 2,
    "tickwheel.v1.MessageMeta.headers": META_BYTES_MAX // 5,
    "tickwheel.v1.AccessRole.grants": GRANTS_MAX,
    "tickwheel.v1.Grant.rights": len(Right.values()),
    "tickwheel.v1.Grant.topics": PATTERNS_MAX,
    "tickwheel.v1.Grant.groups": PATTERNS_MAX,
    "tickwheel.v1.SetUserRequest.roles": ROLES_OF_USER_MAX,
    "tickwheel.v1.ResetGroupRequest.topics": SUBSCRIPTIONS_MAX,
}
"""By full name of the field. A tag takes at least 2 bytes of a meta, a header 5."""


FIELDS_MAX = SUBSCRIPTIONS_MAX + 1_000
"""Fields of one request on the wire, elements counted one by one: its own, and those of the messages in fields with one
value. The longest list, of a ResetGroupRequest, still fits. To decode 4 million empty elements takes up to 0.7 s."""


def request_bytes_max(method: str) -> int | None:
    """Bytes of one request of a method of the client port (`/service/method`). None: only the connection bounds it."""
    if method in FULL_METHODS:
        return None
    return LISTING_BYTES_MAX if method in LISTING_METHODS else SMALL_BYTES_MAX


def elements_max(field: FieldDescriptor) -> int:
    """Elements that a repeated field of a request may have."""
    return ELEMENTS_MAX_BY_FIELD.get(field.full_name, ELEMENTS_MAX)


class TooManyFieldsError(Exception):
    """A request has more than FIELDS_MAX fields. `path`: of the field in which, or behind which, counting ended."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path


_Outline = dict[int, tuple[str, "_Outline | None"]]
"""The fields of a message type by number: name, and what they hold if that is one message."""


@cache
def _outline_of(descriptor: Descriptor) -> _Outline:
    """No request type contains itself (a test ensures that)."""
    return {
        field.number: (
            field.name,
            None if field.message_type is None or field.is_repeated else _outline_of(field.message_type),
        )
        for field in descriptor.fields
    }


def check_fields(kind: type[Message], data: bytes) -> None:
    """Raises TooManyFieldsError. Bytes that are no message of this kind pass, or raise DecodeError: decoding refuses
    them, before it comes further than this."""
    if len(data) > 2 * FIELDS_MAX:  # a field takes at least two bytes
        with suppress(IndexError):
            _count_fields(_outline_of(cast(Descriptor, kind.DESCRIPTOR)), data, 0, len(data), FIELDS_MAX)


def decoded_varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of the wire, modulo 2^64, and where the next thing begins. Raises DecodeError for one of more than ten
    bytes, IndexError for one that the end of the data cuts."""
    number = 0
    for place in range(at, at + 10):
        byte = data[place]
        number |= (byte & 0x7F) << 7 * (place - at)
        if byte < 0x80:
            return number & 0xFFFF_FFFF_FFFF_FFFF, place + 1
    raise DecodeError("a number without an end")


def _count_fields(outline: _Outline, data: bytes, at: int, end: int, left: int) -> int:
    """How many more fields there may be, behind those between two places. Raises DecodeError for a number without an
    end."""
    groups = 0
    while at < end:
        tag = data[at]
        at += 1
        if tag > 0x7F:
            tag, at = tag & 0x7F | data[at] << 7, at + 1  # two bytes: not worth a call
            if tag > 0x3FFF:
                tag, at = decoded_varint(data, at - 2)
        number, wire_type = tag >> 3, tag & 7
        left -= 1
        if left < 0:
            raise TooManyFieldsError(_name(outline, number))
        if wire_type == 2:
            size = data[at]
            at += 1
            if size > 0x7F:
                size, at = decoded_varint(data, at - 1)
            if size:
                inner = None if groups else outline.get(number, _NOTHING)[1]
                if inner is not None:
                    try:
                        left = _count_fields(inner, data, at, at + size, left)
                    except TooManyFieldsError as error:
                        raise TooManyFieldsError(f"{_name(outline, number)}.{error.path}") from None
                at += size
        elif wire_type == 0:
            if data[at] > 0x7F:
                found = _NUMBER.match(data, at)
                if found is None:
                    raise DecodeError("a number without an end")
                at = found.end()
            else:
                at += 1
        elif wire_type == 1:
            at += 8
        elif wire_type == 5:
            at += 4
        elif wire_type == 3:
            groups += 1  # unknown, as no request has groups: its fields are none of ours, whatever their numbers
        elif wire_type == 4:
            groups -= 1
    return left


_NOTHING = ("", None)
_NUMBER = re.compile(rb"[\x80-\xff]{0,9}[\x00-\x7f]")
"""On the wire. Without a bound one could go on to the end of the request."""


def _name(outline: _Outline, number: int) -> str:
    return outline.get(number, _NOTHING)[0] or str(number)


def headers_in(kind: type[Message], data: bytes) -> int:
    """How many headers the metas of a request have, if that is more than HEADERS_OF_REQUEST_MAX; else 0: as
    `surplus_headers`. Found in an outline of the request, since decoding the headers is what takes long."""
    outline = _OUTLINES.get(kind)
    if outline is None or len(data) <= 2 * HEADERS_OF_REQUEST_MAX:
        return 0
    if kind is scheduler_pb2.ScheduleBatch and not parsed(_ROWS, data).parts:
        return 0  # columns hold metas as bytes
    if headers_at_most(data) <= HEADERS_OF_REQUEST_MAX:
        return 0
    rows = parsed(outline, data).parts
    odd = False
    if kind is scheduler_pb2.ScheduleBatch:
        odd, rows = len(rows) > 1, rows[0].parts if rows else rows
    if odd or len(rows) > ELEMENTS_MAX or any(len(row.parts) > 1 for row in rows):
        return headers_at_most(data)  # no client writes it so: it is not worth a closer look
    return surplus_headers(b"".join([part for row in rows for part in row.parts]))


def _outlines() -> Iterable[Any]:
    """Message types with the same fields on the wire, as far as they lead to a meta: of a request, of a batch, and of
    the rows of a batch as bytes. All fields are repeated, as protobuf merges what comes more than once."""
    file = FileDescriptorProto(name="tickwheel/outline.proto", package="tickwheel.outline", syntax="proto3")
    message, batch, rows = scheduler_pb2.ScheduleRequest, scheduler_pb2.ScheduleBatch, scheduler_pb2.RowBatch
    for name, field, part in (
        ("Row", common_pb2.Message.DESCRIPTOR.fields_by_name["meta"], ""),
        ("Request", message.DESCRIPTOR.fields_by_name["message"], "Row"),
        ("Rows", rows.DESCRIPTOR.fields_by_name["messages"], "Row"),
        ("Batch", batch.DESCRIPTOR.fields_by_name["rows"], "Rows"),
        ("RowsOfBatch", batch.DESCRIPTOR.fields_by_name["rows"], ""),
    ):
        file.message_type.add(name=name).field.add(
            name="parts",
            number=field.number,
            label=FieldDescriptorProto.LABEL_REPEATED,
            type=FieldDescriptorProto.TYPE_MESSAGE if part else FieldDescriptorProto.TYPE_BYTES,
            type_name=f".tickwheel.outline.{part}" if part else None,
        )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    names = ("Request", "Batch", "RowsOfBatch")
    return map(message_factory.GetMessageClass, (pool.FindMessageTypeByName(f"tickwheel.outline.{n}") for n in names))


_OF_REQUEST, _OF_BATCH, _ROWS = _outlines()
_OUTLINES: Mapping[type[Message], Any] = {
    scheduler_pb2.ScheduleRequest: _OF_REQUEST,
    scheduler_pb2.ScheduleBatch: _OF_BATCH,
}
