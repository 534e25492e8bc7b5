"""Payloads that are JSON: encoded when a message is scheduled, decoded when it is read.

Owns the header `content-type` and what may be encoded. Models of pydantic and msgspec do the work themselves; neither
is imported unless such a model, or a dataclass (by msgspec), is used. A message without a content
type, such as one of a client in another language, is read as JSON if the reader asks for that.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, TypeVar, cast

from tickwheel.client.errors import PayloadError, refused

CONTENT_TYPE = "content-type"
JSON = "application/json"
SHOWN_BYTES = 40
"""Beginning of a payload that an error shows."""
ENCODABLE = "bytes, a text, a dict, a list, a pydantic model, a msgspec Struct or a dataclass"

T = TypeVar("T")


class PydanticModel(Protocol):
    """A model of pydantic."""

    def model_dump_json(self) -> str: ...


class MsgspecStruct(Protocol):
    """A Struct of msgspec."""

    __struct_fields__: ClassVar[tuple[str, ...]]


class Dataclass(Protocol):
    """An object of a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


Raw = bytes | bytearray | memoryview | str
Payload = Raw | Mapping[str, Any] | list[Any] | tuple[Any, ...] | PydanticModel | MsgspecStruct | Dataclass
"""What a message may carry. Text becomes UTF-8, and what is not raw becomes JSON."""


def encoded(payload: Payload) -> tuple[bytes, str]:
    """The bytes of a payload that is no text, and its content type; empty for bytes. Raises RequestRefused."""
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload), ""
    kind = type(payload)
    try:
        if isinstance(payload, Mapping):
            return _json_bytes(dict(payload)), JSON
        if isinstance(payload, list | tuple):
            return _json_bytes(payload), JSON
        if hasattr(kind, "model_dump_json"):
            return cast(PydanticModel, payload).model_dump_json().encode(), JSON
        if _is_of_msgspec(kind):
            return bytes(_msgspec("payload", kind).json.encode(payload)), JSON
    except (TypeError, ValueError, RecursionError) as error:
        raise refused("payload", f"a {kind.__name__} that cannot be encoded", f"JSON: {error}") from error
    raise refused("payload", f"a {kind.__name__}", ENCODABLE)


def with_content_type(headers: Mapping[str, str] | None, content_type: str) -> dict[str, str]:
    """The headers with a content type, unless they have one."""
    given = dict(headers or {})
    if not content_type_of(given):
        given[CONTENT_TYPE] = content_type
    return given


def content_type_of(headers: Mapping[str, str] | None) -> str:
    """The content type; empty without one. The case of the header's name does not count."""
    return next((value for name, value in (headers or {}).items() if name.lower() == CONTENT_TYPE), "")


def json_of(payload: bytes | None, content_type: str) -> Any:
    """The decoded JSON. Raises PayloadError."""
    data = _checked(payload, content_type)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _undecodable(data, content_type, "JSON", error) from error


def decoded(payload: bytes | None, content_type: str, model: type[T]) -> T:
    """The payload as an object of a pydantic model, a msgspec Struct or a dataclass. Raises PayloadError.

    Raises RequestRefused for a class of another kind.
    """
    validate = getattr(model, "model_validate_json", None)
    if validate is None and not _is_of_msgspec(model):
        shown = getattr(model, "__name__", repr(model))
        raise refused("model", shown, "a pydantic model, a msgspec Struct or a dataclass; json() gives plain values")
    data = _checked(payload, content_type)
    if validate is not None:
        try:
            return cast(T, validate(data))
        except (ValueError, RecursionError) as error:
            raise _undecodable(data, content_type, model.__name__, error) from error
    msgspec = _msgspec("model", model)
    try:
        return cast(T, msgspec.json.decode(data, type=model))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _undecodable(data, content_type, model.__name__, error) from error


class Carrier:
    """What has a payload and headers: how it is read."""

    __slots__ = ()

    @property
    def payload(self) -> bytes | None: ...

    @property
    def headers(self) -> Mapping[str, str] | None: ...

    @property
    def content_type(self) -> str:
        """The content type of its payload; empty without one."""
        return content_type_of(self.headers)

    def json(self) -> Any:
        """The payload, decoded from JSON. Raises PayloadError."""
        return json_of(self.payload, self.content_type)

    def decode(self, model: type[T]) -> T:
        """The payload as a pydantic model, a msgspec Struct or a dataclass. Raises PayloadError."""
        return decoded(self.payload, self.content_type, model)


def _json_bytes(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _is_of_msgspec(kind: type) -> bool:
    return hasattr(kind, "__struct_fields__") or dataclasses.is_dataclass(kind)


def _msgspec(field: str, kind: type) -> Any:
    try:
        import msgspec
    except ImportError:
        limit = "dataclasses need msgspec: install it, or use dataclasses.asdict and json()"
        raise refused(field, kind.__name__, limit) from None
    return msgspec


def _checked(payload: bytes | None, content_type: str) -> bytes:
    if payload is None:
        raise PayloadError("the message came without its payload: ask for it with content=True", "PAYLOAD")
    kind = content_type.partition(";")[0].strip().lower()
    if kind and kind != JSON and not kind.endswith("+json"):
        text = f"the content type is {content_type!r}, not {JSON}: {_shown(payload)}"
        raise PayloadError(text, "PAYLOAD", {"content_type": content_type, "value": _shown(payload)})
    return payload


def _undecodable(data: bytes, content_type: str, wanted: str, error: Exception) -> PayloadError:
    text = f"the payload is no {wanted}: {error}; it is {_shown(data)}"
    return PayloadError(text, "PAYLOAD", {"content_type": content_type, "value": _shown(data)})


def _shown(data: bytes) -> str:
    if len(data) <= SHOWN_BYTES:
        return f"{len(data)} bytes, {data!r}"
    return f"{len(data)} bytes, {data[:SHOWN_BYTES]!r}..."
