"""Text from errors, paths and users is printed as it is: rich would read `[spark]` as a style and leave it out."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project.imports import FOLDERS, ROOT
from tickwheel.chaos.printing import headed, open_console
from tickwheel.node.cli import options, output

PUT_TOGETHER = {"node/cli/trace.py"}
"""Modules whose lines with markup are put together elsewhere in them, each value escaped."""
MADE = {"escape"}
"""Functions whose results are safe to print with markup."""


def calls(*names: str, below: str = "") -> Iterator[tuple[str, ast.Call]]:
    """Of functions and methods of these names in the product, with the path of the module. Most modules have none, and
    are not parsed."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            place, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
            if "_pb2" in path.name or not place.startswith(below) or not any(f"{name}(" in text for name in names):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and called(node) in names:
                    yield place, node


def called(call: ast.Call) -> str:
    """The name of the function or method."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def markup_of(call: ast.Call) -> object:
    """What it says of markup; None: nothing."""
    given = (k.value for k in call.keywords if k.arg == "markup")
    return next((value.value for value in given if isinstance(value, ast.Constant)), None)


def is_safe(value: ast.expr) -> bool:
    """Whether it has no brackets but those that the code itself writes."""
    match value:
        case ast.Constant():
            return True
        case ast.JoinedStr(values=parts):
            return all(map(is_safe, parts))
        case ast.FormattedValue(value=inner, format_spec=spec):
            numeric = isinstance(spec, ast.JoinedStr) and any(
                isinstance(part, ast.Constant) and str(part.value).endswith((",", "d", "f", "%"))
                for part in spec.values
            )
            return numeric or is_safe(inner)
        case ast.IfExp(body=body, orelse=other):
            return is_safe(body) and is_safe(other)
        case ast.BoolOp(values=values):
            return all(map(is_safe, values))
        case ast.BinOp(left=left, right=right):
            return is_safe(left) and is_safe(right)
        case ast.Subscript(value=ast.Name(id=name)):
            return name.isupper()
        case ast.Call():
            return called(value) in MADE or called(value) == "Text"
    return False


def test_no_console_reads_markup() -> None:
    """So a line that nobody thought of is printed as it is."""
    made = [(path, call) for path, call in calls("Console", "PlainConsole") if path != "console/app.py"]
    assert len(made) > 5
    wrong = [f"{path}:{call.lineno}" for path, call in made if markup_of(call) is not False]
    assert not wrong, f"{wrong}: Console(markup=False); a style is given by style= or by a Text"


def test_what_is_printed_with_markup_is_escaped() -> None:
    """Where a line asks for markup. A Status and a Spinner always read it: they get a Text."""
    prints = [(path, call) for path, call in calls("print") if markup_of(call) is True and path not in PUT_TOGETHER]
    shown = [
        (path, call)
        for path, call in calls("status", "update")
        if getattr(getattr(call.func, "value", None), "id", "") in ("console", "err", "out", "status")
    ]
    wrong = [f"{path}:{call.lineno}" for path, call in prints + shown if not all(map(is_safe, call.args))]
    assert not wrong, "\n".join(wrong)


def test_errors_keep_their_brackets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The extra that is missing, a path: of the command line, and of a chaos command on its own console."""
    told = "pip install 'tickwheel[spark]' for /a/[b]/[/c]"
    options.use_json(False)  # as for each command
    output.fail(told, "", {})
    output.warn(told)
    assert capsys.readouterr().err.count(told) == 2
    open_console().print(headed("void:", "bold red", f" {told}"), soft_wrap=True)
    assert capsys.readouterr().out == f"void: {told}\n"


def test_a_chaos_run_names_the_extra_that_it_needs(tmp_path: Path) -> None:
    """The command as a user starts it, where pyspark cannot be imported."""
    (tmp_path / "pyspark.py").write_text("raise ImportError('no pyspark here')\n", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "tickwheel.node.cli.main",
        "chaos",
        "run",
        "--audit",
        "--dir",
        str(tmp_path / "run"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert done.returncode == 3 and "tickwheel[spark]" in done.stdout, done


def test_lines_for_people_are_not_broken() -> None:
    """What a command says beside its output may hold names and commands to copy: each line stays one line."""
    broken = []
    for path, call in calls("print", below="node/cli/"):
        match call:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="err")), args=[ast.expr() as said]):
                whole = any(keyword.arg == "soft_wrap" for keyword in call.keywords)
                if not whole and not isinstance(said, ast.Constant):
                    broken.append(f"{path}:{call.lineno}")
    assert not broken
