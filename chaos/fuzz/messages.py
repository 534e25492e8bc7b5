"""Messages by chance, from their descriptors: plausible enough to come far, with every bound among the values.

Owns what a field may be given. Nothing here knows a service or a command: a field that is new is covered the day it is
added. Depends on its random generator alone, so a seed says what is made.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.internal.encoder import _VarintBytes  # type: ignore[attr-defined]  # the wire, by hand
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

NAMES = ("t", "t2", "fifo", "g", "g2", "job", "run", "p", "n1", "%DLQ%g", "a||b", "k", "")
"""Names that exist, or soon will, or look like it."""
LONG_NAMES = tuple("a" * length for length in (64, 65, 127, 128))
ODD_TEXTS = ("", ".", "..", "/", "é", "\u2028", "\0", "%", "*", " ", "-1", "9" * 30, *LONG_NAMES)
LEVELS = ("1s", "1s 5s", "999999999d", "1x", " 1s  2s ", "1s " * 65)
LENGTHS = (0, 0, 1, 1, 2, 3, 7, 8, 33)
REPEATS_MAX = 3
DEEP = (1, 40, 97, 98, 99, 100, 101, 300)
"""How deep unknown groups are nested; protobuf reads 100."""
UNKNOWN_FIELD = 900
NAMED_BY = ("id", "key")
"""Fields of which a request for one message takes one, though they are no oneof."""

_WIDTHS = {
    FieldDescriptor.TYPE_INT32: (32, True),
    FieldDescriptor.TYPE_SINT32: (32, True),
    FieldDescriptor.TYPE_SFIXED32: (32, True),
    FieldDescriptor.TYPE_UINT32: (32, False),
    FieldDescriptor.TYPE_FIXED32: (32, False),
    FieldDescriptor.TYPE_INT64: (64, True),
    FieldDescriptor.TYPE_SINT64: (64, True),
    FieldDescriptor.TYPE_SFIXED64: (64, True),
    FieldDescriptor.TYPE_UINT64: (64, False),
    FieldDescriptor.TYPE_FIXED64: (64, False),
}

Hints = Mapping[str, Callable[[Random], Any]]
"""By the name of a field: a value that goes with what there is, such as the id of a message."""
Fits = Mapping[str, Callable[[Random, Any], None]]
"""By the full name of a message type: gives fields that must go together values that do, and leaves others."""
FITTED_SHARE = 0.7
"""Share of the messages of such a type that are made to fit."""


def field_kind(field: FieldDescriptor) -> type:
    """The Python type of a scalar field."""
    if field.type == FieldDescriptor.TYPE_BYTES:
        return bytes
    return str if field.type == FieldDescriptor.TYPE_STRING else int


def varint(number: int) -> bytes:
    """A number as the wire has it."""
    data: bytes = _VarintBytes(number)
    return data


def nested(depth: int) -> bytes:
    """A field that nobody knows: groups in each other."""
    return varint(UNKNOWN_FIELD << 3 | 3) * depth + varint(UNKNOWN_FIELD << 3 | 4) * depth


class Maker:
    """Makes messages. `now_ms`: what times are near to."""

    def __init__(self, rng: Random, now_ms: int, hints: Hints | None = None, fits: Fits | None = None) -> None:
        self._rng = rng
        self._now_ms = now_ms
        self._hints = hints or {}
        self._fits = fits or {}

    def message(self, descriptor: Descriptor) -> Message:
        """One, with each of its fields as often given as not."""
        rng = self._rng
        made = GetMessageClass(descriptor)()
        often = rng.choice((0.3, 0.7, 1.0))
        chosen = {oneof.name: rng.choice(oneof.fields).name for oneof in descriptor.oneofs if oneof.fields}
        name = rng.choice(NAMED_BY)
        by_either = all(one in descriptor.fields_by_name for one in NAMED_BY)
        for field in descriptor.fields:
            oneof = field.containing_oneof
            if by_either and field.name in NAMED_BY and field.name != name and rng.random() > 0.05:
                continue
            if oneof is not None and len(oneof.fields) > 1:
                if chosen[oneof.name] != field.name or rng.random() < 0.05:
                    continue
            elif rng.random() > often:
                continue
            self._fill(made, field)
        fit = self._fits.get(descriptor.full_name)
        if fit is not None and rng.random() < FITTED_SHARE:
            fit(rng, made)
        return made

    def _fill(self, made: Message, field: FieldDescriptor) -> None:
        rng = self._rng
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(rng.randrange(REPEATS_MAX)):
                getattr(made, field.name)[self._text("header")] = self._text("header")
        elif field.message_type is not None:
            for _ in range(rng.randrange(1, REPEATS_MAX + 1) if field.is_repeated else 1):
                part = self.message(field.message_type)
                value = getattr(made, field.name)
                if field.is_repeated:
                    value.append(part)
                else:
                    value.CopyFrom(part)
        elif field.is_repeated:
            getattr(made, field.name).extend(self._value(field) for _ in range(rng.choice(LENGTHS)))
        else:
            setattr(made, field.name, self._value(field))

    def _value(self, field: FieldDescriptor) -> Any:
        rng = self._rng
        hint = self._hints.get(field.name)
        if hint is not None and rng.random() < 0.7:
            value = hint(rng)
            if isinstance(value, field_kind(field)):
                return value
        if field.enum_type is not None:
            numbers = [value.number for value in field.enum_type.values]
            return rng.choice([*numbers * 4, 77])
        if field.type == FieldDescriptor.TYPE_BOOL:
            return rng.random() < 0.5
        if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
            return rng.choice((0.0, 0.5, 1.0, 2.0, -1.0, 1e300, float("inf"), float("nan")))
        if field.type == FieldDescriptor.TYPE_STRING:
            return self._text(field.name)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._bytes()
        bits, signed = _WIDTHS[field.type]
        return self.number(bits, signed)

    def number(self, bits: int, signed: bool) -> int:
        """A small one, a time, or one at a bound."""
        rng = self._rng
        most = (1 << bits - signed) - 1
        least = -most - 1 if signed else 0
        kind = rng.random()
        if kind < 0.4:
            return rng.choice((0, 1, 1, 2, 3, 5, 100, 1_000))
        if kind < 0.7 and bits == 64:
            return self._now_ms + rng.choice((-3_600_000, -1, 0, 1, 500, 5_000, 60_000, 86_400_000))
        edges = (least, least + 1, most, most - 1, 1 << 31, (1 << 31) - 1, 1 << 50, (1 << 50) + 1, 1 << 53, 1 << 62)
        edge = rng.choice(edges)
        return edge if least <= edge <= most else most

    def _text(self, name: str) -> str:
        rng = self._rng
        kind = rng.random()
        if name == "delay_levels" or (kind > 0.98 and "level" in name):
            return rng.choice(LEVELS)
        if kind < 0.75:
            return rng.choice(NAMES)
        if kind < 0.98:
            return rng.choice(ODD_TEXTS)
        return "x" * rng.choice((1_000, 5_000, 70_000))

    def _bytes(self) -> bytes:
        rng = self._rng
        kind = rng.random()
        count = rng.choice(LENGTHS)
        if kind < 0.2:
            return rng.randbytes(count)
        width = rng.choice((4, 8, 8))
        numbers = [self.number(width * 8, False) for _ in range(count)]
        if kind < 0.5:
            numbers = [1] * count
        return struct.pack(f"<{count}{'I' if width == 4 else 'Q'}", *numbers)


def spoilt(rng: Random, data: bytes) -> bytes:
    """A message's bytes with something wrong: cut, changed, doubled, with unknown fields, or no message at all."""
    kind = rng.randrange(6)
    if kind == 0:
        return data[: rng.randrange(len(data) + 1)]
    if kind == 1 and data:
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)
    if kind == 2:
        return data + data
    if kind == 3:
        return rng.randbytes(rng.choice((1, 5, 50, 500)))
    if kind == 4:
        return data + varint(UNKNOWN_FIELD << 3) + b"\x01"
    return data + nested(rng.choice(DEEP))


def pick(rng: Random, values: Sequence[Any], otherwise: Any) -> Any:
    """One of the values; `otherwise` without any. Takes one number from `rng`, however many values there are."""
    share = rng.random()
    return values[int(share * len(values))] if values else otherwise
