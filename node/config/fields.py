"""How a configuration field says what it is: default, bounds, words for the reference.

Owns the vocabulary (`number`, `text`, `choice`, ...) that `sections.py` is written in; `read.py` checks values
against it and `reference.py` prints it. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tickwheel.node.core.config import CoreConfig
from tickwheel.node.state.names import check_topic_name
from tickwheel.node.state.settings import BOUNDS
from tickwheel.replication.log import Member

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}\Z")
KEY = "tickwheel"
_CORE_DEFAULTS = CoreConfig()


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """The values that one field allows, and its text in the reference."""

    kind: str
    doc: str
    allowed: str
    parse: Callable[[object], object]
    """From a TOML value or a string (environment, flag); raises ValueError when it is not allowed."""
    show: Callable[[Any], str]
    """The value as TOML."""
    core: str = ""
    """Name of the CoreConfig field it sets, if it does."""


def _toml_text(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def number(default: int, low: int, high: int, doc: str, *, core: str = "") -> Any:
    """An integer from `low` to `high`."""

    def parse(value: object) -> object:
        if isinstance(value, str):
            text = value.replace("_", "").strip()
            if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
                raise ValueError
            value = int(text)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError
        return value

    spec = FieldSpec("integer", doc, f"{low:,} to {high:,}", parse, str, core)
    return field(default=default, metadata={KEY: spec})


def core_number(core: str, low: int, high: int, doc: str) -> Any:
    """An integer that the core is told under the name `core`; its default is the core's own."""
    return number(getattr(_CORE_DEFAULTS, core), low, high, doc, core=core)


def optional_number(low: int, high: int, doc: str) -> Any:
    """An integer, or absent: then something else decides."""

    def parse(value: object) -> object:
        spec: FieldSpec = number(low, low, high, doc).metadata[KEY]
        return spec.parse(value)

    return field(default=None, metadata={KEY: FieldSpec("integer", doc, f"{low:,} to {high:,}, or absent", parse, str)})


def setting(name: str, doc: str) -> Any:
    """An integer within the bounds of this replicated setting, or absent."""
    return optional_number(*BOUNDS[name], doc)


def _parse_flag(value: object) -> object:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "yes", "on", "1"):
        return True
    if isinstance(value, str) and value.lower() in ("false", "no", "off", "0"):
        return False
    raise ValueError


def _flag(default: bool | None, doc: str, core: str = "") -> Any:
    allowed = "true, false" if default is not None else "true, false, or absent"
    spec = FieldSpec("boolean", doc, allowed, _parse_flag, lambda value: str(value).lower(), core)
    return field(default=default, metadata={KEY: spec})


def flag(default: bool, doc: str) -> Any:
    """true or false."""
    return _flag(default, doc)


def core_flag(core: str, doc: str) -> Any:
    """true or false, told to the core under the name `core`; its default is the core's own."""
    return _flag(getattr(_CORE_DEFAULTS, core), doc, core)


def optional_flag(doc: str) -> Any:
    """true, false, or absent."""
    return _flag(None, doc)


def text(default: str | None, doc: str, *, allowed: str = "text", pattern: re.Pattern[str] | None = None) -> Any:
    """A string, whole matched by `pattern` unless it is the default. A default of None: absent."""

    def parse(value: object) -> object:
        if not isinstance(value, str) or "\0" in value or len(value) > 4096:
            raise ValueError
        if pattern is not None and value != default and not pattern.match(value):
            raise ValueError
        return value

    return field(default=default, metadata={KEY: FieldSpec("string", doc, allowed, parse, _toml_text)})


def name(doc: str) -> Any:
    """A name of a cluster or node; required."""
    return text("", doc, allowed="1 to 64 characters of [A-Za-z0-9_.-], not starting with a dot", pattern=NAME)


def choice(default: str, options: tuple[str, ...], doc: str) -> Any:
    """One of a few words."""

    def parse(value: object) -> object:
        if value not in options:
            raise ValueError
        return value

    return field(default=default, metadata={KEY: FieldSpec("string", doc, ", ".join(options), parse, _toml_text)})


def parse_address(address: str, *, port_min: int = 1) -> tuple[str, int]:
    """Host and port of `host:port` or `[ipv6]:port`; raises ValueError."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9_.-]{1,253})):([0-9]{1,5})", address)
    if match is None:
        raise ValueError
    port = int(match[3])
    if not port_min <= port <= 65_535:
        raise ValueError
    return match[1] or match[2], port


def address(default: str, doc: str, *, empty: str = "", port_min: int = 1) -> Any:
    """host:port; an empty one means what `empty` says (not allowed when that is empty too)."""

    def parse(value: object) -> object:
        if not isinstance(value, str) or (not value and not empty):
            raise ValueError
        if value:
            parse_address(value, port_min=port_min)
        return value

    allowed = "host:port or [ipv6]:port" + (f"; empty: {empty}" if empty else "")
    return field(default=default, metadata={KEY: FieldSpec("string", doc, allowed, parse, _toml_text)})


def _parse_names(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise ValueError
    return tuple(value)


def _show_names(value: tuple[str, ...]) -> str:
    return "[" + ", ".join(_toml_text(item) for item in value) + "]"


def names(doc: str) -> Any:
    """A list of names; in the environment and in flags separated by commas."""
    spec = FieldSpec(
        "list of strings", doc, "names; from the environment separated by commas", _parse_names, _show_names
    )
    return field(default=(), metadata={KEY: spec})


def topics(core: str, count_max: int, doc: str) -> Any:
    """A list of different names of topics, told to the core under the name `core`; its default is the core's own."""

    def parse(value: object) -> object:
        found = _parse_names(value)
        if len(set(found)) != len(found) or len(found) > count_max or any(map(check_topic_name, found)):
            raise ValueError
        return found

    allowed = f"up to {count_max:,} different names of topics; from the environment separated by commas"
    spec = FieldSpec("list of strings", doc, allowed, parse, _show_names, core)
    return field(default=getattr(_CORE_DEFAULTS, core), metadata={KEY: spec})


def _member(item: object) -> Member:
    if isinstance(item, str):
        node_id, _, rest = item.partition("=")
        peer_address, _, client_address = rest.partition("/")
        item = {"id": node_id.strip(), "peer_address": peer_address.strip(), "client_address": client_address.strip()}
    if not isinstance(item, dict) or set(item) != {"id", "peer_address", "client_address"}:
        raise ValueError
    if not all(isinstance(part, str) for part in item.values()) or not NAME.match(item["id"]):
        raise ValueError
    parse_address(item["peer_address"])
    parse_address(item["client_address"])
    return Member(item["id"], item["peer_address"], item["client_address"])


def _parse_members(value: object) -> object:
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    if not isinstance(value, list):
        raise ValueError
    return tuple(_member(item) for item in value)


def _show_members(value: tuple[Member, ...]) -> str:
    rows = (
        f"{{ id = {_toml_text(member.node_id)}, peer_address = {_toml_text(member.peer_address)}, "
        f"client_address = {_toml_text(member.client_address)} }}"
        for member in value
    )
    return "[" + ", ".join(rows) + "]"


def members(doc: str) -> Any:
    """Members: tables {id, peer_address, client_address}, or `id=peer/client,...` as one string."""
    spec = FieldSpec(
        "list of tables",
        doc,
        "{ id, peer_address, client_address } each; from the environment `id=peer/client,...`",
        _parse_members,
        _show_members,
    )
    return field(default=(), metadata={KEY: spec})
