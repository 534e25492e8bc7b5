"""Fields of the records in manifests: checked as they are read, since anybody may have written the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

A = TypeVar("A")

INT_MAX = (1 << 63) - 1


def whole(body: Any, name: str) -> int:
    """A field that is a number, not negative, in 64 bits. Raises ValueError that names it, as all functions here."""
    return int(_checked(name, _field(body, name), int))


def text(body: Any, name: str) -> str:
    """A field that is a text."""
    return str(_checked(name, _field(body, name), str))


def rows(body: Any, name: str) -> list[Any]:
    """A field that is a list, of anything."""
    found = _field(body, name)
    if not isinstance(found, list):
        raise ValueError(f"{name}: {_shown(found)}: a list")
    return found


def made(kind: type[A], body: Any, **given: Any) -> A:
    """A dataclass of numbers, texts and lists of texts, from a record with these fields and no others. `given`: fields
    that the record has, too, and that the caller has read."""
    wanted = get_type_hints(kind)
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if isinstance(body, Mapping) and set(body) - names:
        raise ValueError(f"{_shown(min(map(str, set(body) - names)))}: unknown")
    read = {name: _checked(name, _field(body, name), wanted[name]) for name in names - set(given)}
    return kind(**read, **given)


def _field(body: Any, name: str) -> Any:
    if not isinstance(body, Mapping):
        raise ValueError(f"{_shown(body)}: a record with {name}")
    if name not in body:
        raise ValueError(f"{name}: missing")
    return body[name]


def _checked(name: str, value: Any, kind: Any) -> Any:
    if kind is int and (type(value) is not int or not 0 <= value <= INT_MAX):
        raise ValueError(f"{name}: {_shown(value)}: a number from 0 to 2^63 - 1")
    if kind is str and not isinstance(value, str):
        raise ValueError(f"{name}: {_shown(value)}: a text")
    if kind == list[str] and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
        raise ValueError(f"{name}: {_shown(value)}: a list of texts")
    return value


def _shown(value: Any) -> str:
    try:
        found = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or a deep list
        return f"a {type(value).__name__}"
    return found if len(found) <= 60 else f"{found[:60]}..."
