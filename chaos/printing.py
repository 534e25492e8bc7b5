"""Consoles of the chaos commands.

What they print comes from errors, paths, plans and nodes. Text in brackets is part of it, never a style.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text


def open_console(*, stderr: bool = False) -> Console:
    """A console without markup: a style is given by `style=` or by a Text."""
    return Console(stderr=stderr, markup=False)


def headed(head: str, style: str, text: str) -> Text:
    """A line whose head is styled and whose text is shown as it is."""
    return Text.assemble((head, style), text)
