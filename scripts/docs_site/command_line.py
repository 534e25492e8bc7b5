"""The page of the commands, as their help has them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from scripts.docs_site.markdown import plain
from tickwheel.node.cli import commands
from tickwheel.node.cli.program import app


def command_line() -> dict[str, str]:
    """Every command with its arguments and options, as its help has them."""
    lines = [
        "# Commands\n",
        "Every command of `tickwheel`, as `--help` says it. [The command line](../cli.md) has what they share: "
        "addresses, TLS, contexts, durations, exit codes.\n",
    ]
    root = typer.Context(typer.main.get_command(app), info_name="tickwheel")
    own = [name for name, found in commands.others().items() if found.dist and found.dist.name == "tickwheel"]
    for name in sorted([*commands.every(), *own]):
        command = commands.load(name)
        lines += _command(command, typer.Context(command, parent=root, info_name=name), 2)
    return {"reference/commands.md": "\n".join(lines)}


def _command(command: Any, context: Any, level: int) -> Iterator[str]:
    yield f"{'#' * level} {context.command_path}\n"
    yield f"{plain(inspect.cleandoc(command.help or ''))}\n"
    subcommands = getattr(command, "commands", {})
    if not subcommands:
        pieces = [piece for piece in command.collect_usage_pieces(context) if not piece.startswith("COMMAND")]
        yield f"```text\n{' '.join([context.command_path, *pieces])}\n```\n"
    records = [record for parameter in command.get_params(context) if (record := _parameter(parameter, context))]
    if records:
        yield "| | |\n|---|---|"
        yield from records
        yield ""
    for name, below in subcommands.items():
        if not below.hidden:
            yield from _command(below, type(context)(below, parent=context, info_name=name), level + 1)


def _parameter(parameter: Any, context: Any) -> str:
    """A row of the table, as help has it; empty for `--help` and what is hidden."""
    record = None if "--help" in parameter.opts else parameter.get_help_record(context)
    if record is None:
        return ""
    name, said = (text.replace("\\[", "[") for text in record)
    return f"| {plain(f'`{name}`')} | {plain(' '.join(said.split()))} |"
