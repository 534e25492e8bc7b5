"""Reads a configuration once: file, then environment, then flags, each over the one before; checks it whole.

Owns precedence and error collection. May be called by the process at start, `config check` and tests.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from tickwheel.node.config.fields import KEY, FieldSpec
from tickwheel.node.config.relations import Problem, problems_of
from tickwheel.node.config.sections import NodeConfig

ENVIRONMENT_PREFIX = "TICKWHEEL_"
CLIENT_VARIABLES = {f"TICKWHEEL_TLS_{name}" for name in ("CA", "CERT", "KEY", "NAME")}
"""Variables of the command line's own connections; a node that inherits them ignores them."""
FILE_BYTES_MAX = 1 << 20


class ConfigError(Exception):
    """A configuration that a node must not start with. Its text has one line a problem."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def specs() -> dict[str, FieldSpec]:
    """Every field by its dotted name, in order."""
    found: dict[str, FieldSpec] = {}
    for section in dataclasses.fields(NodeConfig):
        kind = cast(type[Any], section.default_factory)
        for item in dataclasses.fields(kind):
            found[f"{section.name}.{item.name}"] = item.metadata[KEY]
    return found


def environment_name(name: str) -> str:
    """`raft.lease_ms` -> `TICKWHEEL_RAFT_LEASE_MS`."""
    return ENVIRONMENT_PREFIX + name.replace(".", "_").upper()


def _unknown(name: str, value: object, known: Iterable[str], where: str) -> Problem:
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return Problem(name, _shown(value), f"unknown name{where}{hint}")


def _shown(value: object) -> str | int | float:
    return value if isinstance(value, str | int | float) else "..."


def toml_of(data: bytes) -> dict[str, Any]:
    """The content of a file. Raises ValueError, whose text says what is wrong with it."""
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8, from byte {error.start} on") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"is not TOML: {error}") from None
    except ValueError:  # Python converts no text of thousands of digits
        raise ValueError("is not TOML: an integer has more than 64 bits") from None
    except RecursionError:
        raise ValueError("is not TOML: it nests too deep") from None


def _from_file(path: Path) -> tuple[dict[str, object], list[Problem]]:
    try:
        with path.open("rb") as opened:
            data = opened.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError([Problem("--config", path, f"cannot be read: {error.strerror}")]) from None
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError([Problem("--config", path, f"is larger than {FILE_BYTES_MAX:,} bytes")])
    try:
        tree = toml_of(data)
    except ValueError as error:
        raise ConfigError([Problem("--config", path, str(error))]) from None
    known = specs()
    values: dict[str, object] = {}
    problems: list[Problem] = []
    sections = {name.partition(".")[0] for name in known}
    for section, content in tree.items():
        if section not in sections:
            problems.append(_unknown(section, content, sections, f" in {path.name}"))
            continue
        if not isinstance(content, dict):
            begins = f"it is a section, which begins with a line [{section}]"
            found = ", once and in single brackets" if isinstance(content, list) else ""
            problems.append(Problem(section, _shown(content), begins + found))
            continue
        for key, value in content.items():
            name = f"{section}.{key}"
            if name in known:
                values[name] = value
            else:
                problems.append(_unknown(name, value, known, f" in {path.name}"))
    return values, problems


def _from_environment(environment: Mapping[str, str]) -> tuple[dict[str, object], list[Problem]]:
    by_name = {environment_name(name): name for name in specs()}
    values: dict[str, object] = {}
    problems: list[Problem] = []
    for variable, value in sorted(environment.items()):
        if variable in by_name:
            values[by_name[variable]] = value
        elif variable in CLIENT_VARIABLES:
            continue
        elif variable.startswith(ENVIRONMENT_PREFIX) and variable.split("_")[1].lower() in {
            name.partition(".")[0] for name in by_name.values()
        }:
            problems.append(_unknown(variable, value, by_name, " in the environment"))
    return values, problems


def read_config(
    path: Path | None = None, environment: Mapping[str, str] | None = None, flags: Mapping[str, object] | None = None
) -> NodeConfig:
    """The configuration of a node.

    `flags` are dotted names to values (strings, or of the field's type). Raises ConfigError with all problems at
    once: unknown names, values that are not allowed, relations that do not hold.
    """
    known = specs()
    values: dict[str, object] = {}
    problems: list[Problem] = []
    file_values, file_problems = _from_file(path) if path is not None else ({}, [])
    environment_values, environment_problems = _from_environment(environment or {})
    problems += file_problems + environment_problems
    for name, value in {**file_values, **environment_values, **(flags or {})}.items():
        spec = known.get(name)
        if spec is None:
            problems.append(_unknown(name, value, known, ""))
            continue
        try:
            values[name] = spec.parse(value)
        except ValueError:
            problems.append(Problem(name, value, f"allowed: {spec.allowed}"))
    sections = {}
    for section in dataclasses.fields(NodeConfig):
        kind = cast(type[Any], section.default_factory)
        names = {item.name for item in dataclasses.fields(kind)}
        given = {key: values[f"{section.name}.{key}"] for key in names if f"{section.name}.{key}" in values}
        sections[section.name] = kind(**given)
    config = NodeConfig(**sections)
    named = {problem.field for problem in problems}
    problems += [problem for problem in problems_of(config) if problem.field not in named]
    if problems:
        raise ConfigError(problems)
    return config


def to_toml(config: NodeConfig) -> str:
    """The configuration as a file that `read_config` reads back to an equal one; defaults are left out."""
    known = specs()
    lines: list[str] = []
    for section in dataclasses.fields(NodeConfig):
        content = getattr(config, section.name)
        rows = [
            f"{item.name} = {known[f'{section.name}.{item.name}'].show(getattr(content, item.name))}"
            for item in dataclasses.fields(content)
            if getattr(content, item.name) != item.default
        ]
        if rows:
            lines += [f"[{section.name}]", *rows, ""]
    return "\n".join(lines)
