"""What is taken without pydantic becomes what typer makes of it, in every parameter of every command."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.node.cli.commands import every, load, others
from tickwheel.node.cli.plain_values import NOT_PLAIN, plain
from tickwheel.node.cli.program import app

TEXTS = (
    *("", "0", "7", "007", "-0", "-1", "+1", " 1", "1_000", "250", "65535", "65536", "999999999999999", "1" * 30, "٣"),
    *("1.5", "0.05", ".5", "1.", "1e3", "-2.5", "0." + "1" * 20, "nan", "inf", "true", "no", "-", "é", "\udcff"),
)

PLAIN = (str, int, float, Path, list[str])
"""Texts of these kinds are taken."""


def parameters(command: Any) -> Iterator[Any]:
    """Of a command and of those below it, with those for help."""
    yield from command.get_params(typer.Context(command))
    for below in getattr(command, "commands", {}).values():
        yield from parameters(below)


@cache
def kinds() -> tuple[Any, list[Any]]:
    """A context, and one parameter of each kind of all commands. Not made at import: that loads every command."""
    root: Any = typer.main.get_command(app)
    found = {}
    for command in (root, *map(load, every()), *map(load, others())):
        for parameter in parameters(command):
            rules = parameter.type_descriptor.parameter_info
            kind = (parameter.type_descriptor.annotation, parameter.multiple, parameter.nargs)
            found[str((*kind, rules.min, rules.max, rules.exists))] = parameter
    return typer.Context(root), list(found.values())


def both(parameter: Any, value: Any) -> tuple[Any, Any]:
    """What is made of a value here, and by typer, which may refuse it."""
    by_typer: Any = NOT_PLAIN
    with suppress(typer.BadParameter):
        taking = type(parameter).get_runtime_param(parameter)
        by_typer = taking.coerce(value, param=parameter, ctx=kinds()[0])
    return plain(parameter, value), by_typer


def test_a_plain_value_is_what_typer_makes_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts at the edges, files that are there or not, lists, and the default."""
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    context, every_kind = kinds()
    texts = (*TEXTS, "file", str(tmp_path), "missing", "file/below")
    taken_of = Counter[str]()
    for parameter in every_kind:
        values = (*texts, *map(Path, texts), 1, 0.5, 3, None, parameter.get_default(context))
        several = parameter.multiple or parameter.nargs == -1
        for value in values:
            taken, by_typer = both(parameter, (value, "b") if several and value is not None else value)
            assert taken is NOT_PLAIN or (taken, type(taken)) == (by_typer, type(by_typer)), (parameter, value)
            taken_of[str(parameter.type_descriptor.annotation)] += taken is not NOT_PLAIN and type(value) is str
    assert {kind for kind, times in taken_of.items() if times} == {str(kind) for kind in PLAIN}


@given(st.from_regex(r"-?[0-9.]{1,12}", fullmatch=True))
def test_numbers(text: str) -> None:
    """Those that are taken are those that typer reads."""
    for parameter in kinds()[1]:
        if parameter.type_descriptor.annotation in (int, float):
            taken, by_typer = both(parameter, text)
            assert taken is NOT_PLAIN or (taken, type(taken)) == (by_typer, type(by_typer))


def test_what_was_not_given_is_plain() -> None:
    """So a command that is given little needs no pydantic."""
    context, every_kind = kinds()
    for parameter in every_kind:
        bare = parameter.type_descriptor.annotation is bool
        assert bare or plain(parameter, parameter.get_default(context)) is not NOT_PLAIN


def test_a_file_that_may_not_be_read_is_told_by_typer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs this."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    for parameter in kinds()[1]:
        if parameter.type_descriptor.annotation is Path:
            assert plain(parameter, str(tmp_path)) is NOT_PLAIN
