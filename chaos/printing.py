"""Consoles, tables and directories of the chaos commands.

What they print comes from errors, paths, plans and nodes. Text in brackets is part of it, never a style.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

EXIT_BROKEN, EXIT_VOID = 1, 3
"""Something did not hold; the run proves nothing."""


def open_console(*, stderr: bool = False) -> Console:
    """A console without markup: a style is given by `style=` or by a Text."""
    return Console(stderr=stderr, markup=False)


def headed(head: str, style: str, text: str) -> Text:
    """A line whose head is styled and whose text is shown as it is."""
    return Text.assemble((head, style), text)


def teller(console: Console) -> Callable[[str], None]:
    """What prints a line behind the seconds since this call."""
    began_s = time.monotonic()

    def told(line: str) -> None:
        took = headed(f"{time.monotonic() - began_s:7.1f} s", "dim", f"  {line}")
        console.print(took, highlight=False, soft_wrap=True)

    return told


def bare_table(columns: Sequence[str], right: Sequence[int]) -> Table:
    """A table without lines. `right`: columns of numbers."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number in right else "left")
    return table


def empty_directory(given: Path | None, command: str) -> Path:
    """The directory for a run, or a new one. A usage error if there is something in it."""
    where = given or Path(tempfile.mkdtemp(prefix=f"tickwheel-{command}-"))
    if where.exists() and any(where.iterdir()):
        raise typer.BadParameter(f"{where} is not empty")
    return where
