"""What this version knows of the log and of checkpoints, so that it never passes over what a newer one meant.

Protobuf keeps silent about fields that it does not know. In the log that would be the end of P8: the newer node acts on
the field, the older one does not. So whoever writes says with which schema (a checksum over all messages, fields and
values of enums that can stand there), and whoever reads with another one looks whether what it got has anything that it
does not know. Between nodes of one version that is a comparison of two numbers.

Pure. Used by apply, by a slave before it takes an entry into its journal, and by who reads a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable

import google_crc32c
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from tickwheel.proto.log_pb2 import LogEntry
from tickwheel.proto.state_pb2 import StateSnapshot, StateWindows


def _lines(descriptor: Descriptor, seen: set[str]) -> Iterable[str]:
    """All that can stand in a message, a line each."""
    if descriptor.full_name in seen:
        return
    seen.add(descriptor.full_name)
    for field in descriptor.fields:
        kind = field.message_type or field.enum_type
        name = kind.full_name if kind is not None else ""
        yield f"{descriptor.full_name} {field.number} {field.type} {field.is_repeated} {name}"
        if field.message_type is not None:
            yield from _lines(field.message_type, seen)
        elif field.enum_type is not None:
            yield from _values(field.enum_type)


def _values(enum: EnumDescriptor) -> Iterable[str]:
    return (f"{enum.full_name} = {value.number}" for value in enum.values)


def checksum(*descriptors: Descriptor) -> int:
    """Of everything that can stand in these messages; never 0."""
    seen: set[str] = set()
    lines = {line for descriptor in descriptors for line in _lines(descriptor, seen)}
    return int(google_crc32c.value("\n".join(sorted(lines)).encode())) or 1


ENTRY_SCHEMA = checksum(LogEntry.DESCRIPTOR)
"""`LogEntry.schema` of what this version writes."""
STATE_SCHEMA = checksum(StateSnapshot.DESCRIPTOR, StateWindows.DESCRIPTOR)
"""`StateSnapshot.schema` likewise."""

EARLIER_SCHEMAS = frozenset({0x63B68C51})
"""`LogEntry.schema` of versions that copied what clients sent into entries. What is not known in an entry of theirs is
no meaning of a newer version but some client's bytes: nobody ever acted on it, and no node stops for it."""

_TAIL = bytes([LogEntry.DESCRIPTOR.fields_by_name["schema"].number << 3 | 5]) + ENTRY_SCHEMA.to_bytes(4, "little")
"""How an entry of this version ends: fields are written in the order of their numbers, this one is the last."""


_HEAD = b"\x08\x01"
"""How every entry begins: `format_version` 1."""


def unknown_in(message: Message) -> str:
    """What stands in a message that this version does not know, in words; empty: nothing."""
    own = message.DESCRIPTOR
    unknown = UnknownFieldSet(message)
    if len(unknown):
        return f"field {unknown[0].field_number} of {own.name}"
    for field, value in message.ListFields():
        problem = _unknown_value(field, value if field.is_repeated else [value])
        if problem:
            return problem
    return ""


def _unknown_value(field: FieldDescriptor, values: Iterable[object]) -> str:
    if field.message_type is not None and not field.message_type.GetOptions().map_entry:
        return next((problem for value in values if isinstance(value, Message) and (problem := unknown_in(value))), "")
    if field.enum_type is not None:
        known = field.enum_type.values_by_number
        return next((f"value {value} of {field.enum_type.name}" for value in values if value not in known), "")
    return ""


def read_entry(data: bytes) -> LogEntry | None:
    """An entry of the log as apply reads it. None: bytes that nobody can decode and everybody passes over.

    A master reads what it is about to propose with this very function, so no such entry is written any more; a log of
    an earlier version may hold one, made of what a client had sent, and only protobuf's limit of depth makes one.
    No later version can decode it either and act on it: what an entry nests is what its writer's schema nests, and
    that was read by its writer. Raises DecodeError for what does not begin as entries of this format do.
    """
    try:
        return LogEntry.FromString(data)
    except DecodeError:
        if data.startswith(_HEAD):
            return None
        raise


def entry_problem(entry: LogEntry) -> str:
    """Why this version must not apply an entry; empty: it may. Entries without a schema are of older versions."""
    known = entry.schema in (0, ENTRY_SCHEMA) or entry.schema in EARLIER_SCHEMAS
    return "" if known else unknown_in(entry)


def command_problem(data: bytes, start: int = 0) -> str:
    """`entry_problem` of an entry that is not parsed yet, in `data[start:]`; nearly free for one of this version."""
    if data.endswith(_TAIL):
        return ""
    try:
        entry = read_entry(data[start:])
    except DecodeError as error:
        return f"bytes that are no entry ({error})"
    return "" if entry is None else entry_problem(entry)


def state_problem(snapshot: StateSnapshot, windows: StateWindows) -> str:
    """Why this version must not start from a checkpoint; empty: it may."""
    return unknown_in(snapshot) or unknown_in(windows) if snapshot.schema not in (0, STATE_SCHEMA) else ""
