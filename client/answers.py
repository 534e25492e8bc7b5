"""Answers of nodes as dataclasses, field by field.

A field comes from the protobuf field of the same name, or of the name with the unit that the type already says:
`next_due: datetime` is next_due_ms. Datetimes come from milliseconds since 1970, timedeltas from milliseconds, enums
from numbers (by the name of the member), texts from message ids, and arrays from the bytes of a column, without a copy.
None stands for an absent field, or time 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from functools import cache, partial
from operator import attrgetter
from types import NoneType
from typing import Any, Protocol, TypeVar, cast, get_args, get_origin, get_type_hints

import numpy as np
from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message

from tickwheel.client.ids import text_of
from tickwheel.client.moments import moment_of, span_of
from tickwheel.proto.common_pb2 import MessageId

K = TypeVar("K", covariant=True)
M = TypeVar("M", bound=Message, contravariant=True)
E = TypeVar("E", bound=StrEnum)


class Reader(Protocol[M, K]):
    """Makes a dataclass of a protobuf message. `given`: values that the caller knows better than the message."""

    def __call__(self, wire: M, /, **given: Any) -> K: ...


def reader(kind: type[K], message: type[M], /, *parts: str, **special: Callable[[M], Any]) -> Reader[M, K]:
    """A function that makes a `kind`, a dataclass, of a protobuf message.

    `parts`: messages inside it, as `definition.spec`, whose fields count as its own. `special`: values that need more
    than the field of their name. Raises KeyError now for a field that the message does not have.
    """
    return _reader(kind, message.DESCRIPTOR, parts, special)


def plain(name: str) -> str:
    """The name of a field without its unit, which its type says: `delay_max` for delay_ms_max."""
    return "_".join(part for part in name.split("_") if part != "ms")


def enum_of(kind: type[E], descriptor: EnumDescriptor, number: int, otherwise: E | None = None) -> E:
    """The member for a number of a protobuf enum; `otherwise`, else `UNKNOWN`, for one that this version does not know.

    Members are named as in the protobuf enum, without a first word that all its names share.
    """
    return kind.__members__.get(_names_of(descriptor).get(number, "")) or otherwise or kind["UNKNOWN"]


@cache
def _names_of(descriptor: EnumDescriptor) -> dict[int, str]:
    """By number, without a first word that all share."""
    first, _, _ = descriptor.values[0].name.partition("_")
    prefix = f"{first}_"
    shared = all(value.name.startswith(prefix) for value in descriptor.values)
    return {value.number: value.name.removeprefix(prefix) if shared else value.name for value in descriptor.values}


def _reader(
    kind: type[K], descriptor: Any, parts: Sequence[str], special: Mapping[str, Callable[[Any], Any]]
) -> Reader[Any, K]:
    hints = get_type_hints(kind)
    known = _places(descriptor)
    for part in parts:
        known = _places(_inside(descriptor, part), f"{part}.") | known
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # it is a dataclass
    values = {name: special.get(name) or _value(hints[name], *known[name]) for name in names}

    def read(wire: Any, /, **given: Any) -> K:
        return kind(**{name: value(wire) for name, value in values.items() if name not in given}, **given)

    return read


def _places(descriptor: Any, before: str = "") -> dict[str, tuple[str, Any]]:
    """The fields of a message by their names, and by their plain ones unless those are names of others."""
    found = [(f"{before}{field.name}", field) for field in descriptor.fields]
    return {plain(field.name): (path, field) for path, field in found} | {
        field.name: (path, field) for path, field in found
    }


def _inside(descriptor: Any, path: str) -> Any:
    """The descriptor of the message at this path."""
    for name in path.split("."):
        descriptor = descriptor.fields_by_name[name].message_type
    return descriptor


def _value(hint: Any, path: str, field: Any) -> Callable[[Any], Any]:
    """A function that makes a value of this type of a whole message."""
    get = attrgetter(path)
    holder, _, name = path.rpartition(".")

    def is_there(wire: Any) -> bool:
        return bool((attrgetter(holder)(wire) if holder else wire).HasField(name))

    hint = _without_alias(hint)
    parts = get_args(hint)
    origin = get_origin(hint)
    if origin is Mapping or origin is dict:
        return lambda wire: dict(get(wire))
    if origin is np.ndarray:
        dtype = np.dtype(get_args(parts[1])[0]).newbyteorder("<")
        return lambda wire: np.frombuffer(get(wire), dtype)
    if origin is tuple:
        each = _converter(parts[0], field)
        return lambda wire: tuple(map(each, get(wire)))
    if field.message_type is MessageId.DESCRIPTOR:
        return lambda wire: text_of(get(wire)) if is_there(wire) else ""
    if NoneType not in parts:
        convert = _converter(hint, field)
        return lambda wire: convert(get(wire))
    convert = _converter(parts[0], field)
    if field.has_presence:
        return lambda wire: convert(get(wire)) if is_there(wire) else None
    return lambda wire: convert(found) if (found := get(wire)) else None


def _without_alias(hint: Any) -> Any:
    """What a generic alias made by `type` (PEP 695) stands for, as numpy's `NDArray` is from 2.5 on."""
    meaning = getattr(get_origin(hint), "__value__", None)
    return hint if meaning is None else meaning[get_args(hint)]


def _converter(hint: Any, field: Any) -> Callable[[Any], Any]:
    """A function that makes a value of this type of what the field holds."""
    if hint is datetime:
        return moment_of
    if hint is timedelta:
        return span_of
    if is_dataclass(hint):
        return _reader(cast(type[Any], hint), field.message_type, (), {})
    if issubclass(hint, StrEnum):
        return partial(enum_of, hint, field.enum_type)
    return cast(type[Any], hint)
