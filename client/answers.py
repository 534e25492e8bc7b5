"""Answers of nodes as dataclasses, field by field.

A field is taken from the one of the protobuf message that has its name, or its name and the unit that its type already
says: `next_due: datetime` is next_due_ms. A datetime is made of milliseconds since 1970, a timedelta of milliseconds,
an enum of the number whose member has the same name. None is an absent field, or time 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from operator import attrgetter
from types import NoneType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message

from tickwheel.client.moments import moment_of, span_of

K = TypeVar("K")
M = TypeVar("M", bound=Message)
E = TypeVar("E", bound=StrEnum)


def reader(kind: type[K], message: type[M], **special: Callable[[M], Any]) -> Callable[[M], K]:
    """A function that makes a `kind`, a dataclass, of a protobuf message.

    `special`: values that need more than the field of their name. Raises KeyError now for a field that the message
    does not have.
    """
    return _reader(kind, message.DESCRIPTOR, special)


def plain(name: str) -> str:
    """The name of a field without its unit, which its type says: `delay_max` for delay_ms_max."""
    return "_".join(part for part in name.split("_") if part != "ms")


def enum_of(kind: type[E], descriptor: EnumDescriptor, number: int) -> E:
    """The member for a number of a protobuf enum; `UNKNOWN` for one that this version does not know.

    Members are named as in the protobuf enum, without a first word that all its names share.
    """
    names = {value.number: value.name for value in descriptor.values}
    first, _, _ = descriptor.values[0].name.partition("_")
    prefix = f"{first}_"
    name = names.get(number, "")
    if all(other.startswith(prefix) for other in names.values()):
        name = name.removeprefix(prefix)
    return kind.__members__.get(name, kind["UNKNOWN"])


def _reader(kind: type[K], descriptor: Any, special: Mapping[str, Callable[[Any], Any]]) -> Callable[[Any], K]:
    hints = get_type_hints(kind)
    known = {plain(field.name): field for field in descriptor.fields} | dict(descriptor.fields_by_name)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # it is a dataclass
    values = {name: special.get(name) or _value(hints[name], known[name]) for name in names}
    return lambda wire: kind(**{name: value(wire) for name, value in values.items()})


def _value(hint: Any, field: Any) -> Callable[[Any], Any]:
    """A function that makes a value of this type of a whole message."""
    get = attrgetter(field.name)
    parts = get_args(hint)
    if get_origin(hint) is Mapping:
        return lambda wire: dict(get(wire))
    if get_origin(hint) is tuple:
        each = _converter(parts[0], field)
        return lambda wire: tuple(map(each, get(wire)))
    if NoneType not in parts:
        convert = _converter(hint, field)
        return lambda wire: convert(get(wire))
    convert = _converter(parts[0], field)
    if field.has_presence:
        return lambda wire: convert(get(wire)) if wire.HasField(field.name) else None
    return lambda wire: convert(found) if (found := get(wire)) else None


def _converter(hint: Any, field: Any) -> Callable[[Any], Any]:
    """A function that makes a value of this type of what the field holds."""
    if hint is datetime:
        return moment_of
    if hint is timedelta:
        return span_of
    if is_dataclass(hint):
        return _reader(cast(type[Any], hint), field.message_type, {})
    if issubclass(hint, StrEnum):
        return partial(enum_of, hint, field.enum_type)
    return cast(type[Any], hint)
