"""The schema of the log and of checkpoints in this version, so that it never ignores a field of a newer one.

Protobuf silently skips unknown fields. In the log that would break P8: the newer node acts on the field, the older one
does not. So a writer states its schema: a checksum over all messages, fields and enum values that its entries can
contain. A reader with another schema looks for anything that it does not know. Between nodes of one version this is a
comparison of two numbers.

Pure. Used by apply, by a slave before it takes an entry into its journal, and by readers of checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable

import google_crc32c
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from tickwheel.proto.log_pb2 import Command, LogEntry, ScheduleCommand
from tickwheel.proto.parsing import parsed
from tickwheel.proto.state_pb2 import StateSnapshot, StateWindows


def _lines(descriptor: Descriptor, seen: set[str]) -> Iterable[str]:
    """One line for everything that can stand in a message."""
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
    """Checksum over everything that can stand in these messages; never 0."""
    seen: set[str] = set()
    lines = {line for descriptor in descriptors for line in _lines(descriptor, seen)}
    return int(google_crc32c.value("\n".join(sorted(lines)).encode())) or 1


ENTRY_SCHEMA = checksum(LogEntry.DESCRIPTOR)
"""`LogEntry.schema` of entries that this version writes."""
STATE_SCHEMA = checksum(StateSnapshot.DESCRIPTOR, StateWindows.DESCRIPTOR)
"""`StateSnapshot.schema` of checkpoints that this version writes."""

EARLIER_SCHEMAS = frozenset({0x63B68C51})
"""`LogEntry.schema` of versions that copied clients' bytes into entries. An unknown field in such an entry comes from a
client, not from a newer version: no node ever acted on it, and none stops for it."""

CHECKSUMS_LEVEL = 1
"""The level of log content that has checksums and owners of requests. A master writes what a level adds once all
members have said that they read it, or the log contains some already. Each level includes the ones below."""
SCHEDULES_LEVEL = 2
"""Recurring schedules."""
KEYS_LEVEL = 3
"""Unique keys."""
TOPIC_DEAD_LEVEL = 4
"""Deletions of topics that take the topic's dead letters along."""
PRODUCER_SHARES_LEVEL = 5
"""Producers are forgotten by the shares of their owners."""
REPLAYS_LEVEL = 6
"""Replayed dead letters hold no unique key; a filter ends the pauses of the messages that it skips."""
RUNS_AHEAD_LEVEL = 7
"""Runs of schedules that are dispatched ahead of their planned time stay known until then; after a change of the plan
a cancelled run is not the one before the next."""
LOG_LEVEL = RUNS_AHEAD_LEVEL
"""What this version reads."""

_TAIL = bytes([LogEntry.DESCRIPTOR.fields_by_name["schema"].number << 3 | 5]) + ENTRY_SCHEMA.to_bytes(4, "little")
"""Last bytes of an entry of this version: fields are written in the order of their numbers, and this one is the
last."""


_HEAD = b"\x08\x01"
"""First bytes of every entry: `format_version` 1."""


def _takes_over(body: Descriptor, above: frozenset[str] = frozenset()) -> bool:
    """Whether it contains messages that are not the log's own: requests of clients, or parts of them."""
    if body.file.name != Command.DESCRIPTOR.file.name:
        return True
    parts = [field.message_type for field in body.fields if field.message_type is not None]
    return any(_takes_over(part, above | {body.full_name}) for part in parts if part.full_name not in above)


def _bodies_taken_over(command: Descriptor) -> frozenset[str]:
    bodies = [(field.name, field.message_type) for field in command.fields]
    return frozenset(name for name, body in bodies if body is not None and _takes_over(body))


_TAKEN_OVER = _bodies_taken_over(Command.DESCRIPTOR)
_SCHEDULES_TAKEN_OVER = _bodies_taken_over(ScheduleCommand.DESCRIPTOR)


def holds_requests(command: Command) -> bool:
    """Whether a command contains messages as clients sent them; the others contain only numbers and columns."""
    kind = command.WhichOneof("body")
    if kind == "schedule":
        return command.schedule.WhichOneof("body") in _SCHEDULES_TAKEN_OVER
    return kind in _TAKEN_OVER


def unknown_in(message: Message) -> str:
    """Fields and values of a message that this version does not know, in words; empty: none."""
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
    """An entry of the log as apply reads it. None: no version can decode the bytes, and every node skips them.

    A master reads each entry with this function before it proposes it, so no such entry is written any more. A log of
    an earlier version may contain one, made from a client's bytes; only protobuf's limit of nesting causes it. No later
    version can decode and act on it either: an entry's own messages nest only as deep as its writer's schema, and its
    writer could read that. Raises DecodeError for bytes that do not begin like entries of this format.
    """
    try:
        return parsed(LogEntry, data)
    except DecodeError:
        if data.startswith(_HEAD):
            return None
        raise


def entry_problem(entry: LogEntry) -> str:
    """Why this version must not apply an entry; empty: it may. Entries without a schema are of older versions."""
    known = entry.schema in (0, ENTRY_SCHEMA) or entry.schema in EARLIER_SCHEMAS
    return "" if known else unknown_in(entry)


def command_problem(entry: bytes, start: int = 0) -> str:
    """`entry_problem` of an entry that is not parsed yet, in `entry[start:]`; nearly free for one of this version."""
    if entry.endswith(_TAIL):
        return ""
    try:
        parsed = read_entry(entry[start:])
    except DecodeError as error:
        return f"bytes that are no entry ({error})"
    return "" if parsed is None else entry_problem(parsed)


def state_problem(snapshot: StateSnapshot, windows: StateWindows) -> str:
    """Why this version must not start from a checkpoint; empty: it may."""
    return unknown_in(snapshot) or unknown_in(windows) if snapshot.schema not in (0, STATE_SCHEMA) else ""
