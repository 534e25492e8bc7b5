"""The commands that documents show are those that there are: every word and every option."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from tickwheel.node.cli import program as cli

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHOWN = re.compile(r"(?:^\s*|\$\(|&& )(tickwheel [a-z-].*)")
IN_PROSE = re.compile(r"`(tickwheel [a-z-][^`]*)`")
HEAD_OF_TOP = "tickwheel local"
"""What `tickwheel top` shows of a cluster with this name; no command."""
ENDS = re.compile(r"\s*(?:&&|\||;|>|<|&|#|\s{2,}|\)$)")


def shown_in(document: Path) -> list[str]:
    """The command lines of blocks of code, with what a backslash continues, and those in the text."""
    found, block = [], False
    for line in document.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if line.lstrip().startswith("```"):
            block = not block
        elif block or line.startswith("    "):
            found += [ENDS.split(shown, maxsplit=1)[0] for shown in SHOWN.findall(line)]
        found += [ENDS.split(shown, maxsplit=1)[0] for shown in IN_PROSE.findall(line)]
    return [line for line in found if line != HEAD_OF_TOP]


def unknown_in(line: str) -> str:
    """What of a command line there is not; empty: it can be called."""
    root: Any = typer.main.get_command(cli.app)
    context = typer.Context(root)
    try:
        words = shlex.split(line)[1:]
    except ValueError:
        return ""  # an argument that a pipe or a comment cuts
    if any("|" in word or word.startswith(("...", "COMMAND")) for word in words):
        return ""
    command = root
    try:
        while hasattr(command, "commands"):
            _, words, _ = command.make_parser(context).parse_args(list(words))
            if not words:
                return ""
            _, command, words = command.resolve_command(context, words)
            context = typer.Context(command, parent=context)
        command.make_parser(context).parse_args(list(words))
    except cli.USAGE_ERROR as error:
        return f"{line}: {error.format_message()}"
    return ""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_every_command_that_is_shown_exists(document: Path) -> None:
    """With its options. Whether it does what it says is for the tests that run it."""
    assert [told for line in shown_in(document) if (told := unknown_in(line))] == []


def test_commands_are_found() -> None:
    """By the tutorial, which has many; and what there is not is told."""
    assert len(shown_in(ROOT / "docs" / "TUTORIAL.md")) > 10
    assert "--dealy" in unknown_in("tickwheel schedule t x --dealy 5s")
    assert "shedule" in unknown_in("tickwheel shedule t x")
    assert "ad" in unknown_in("tickwheel context ad x")
