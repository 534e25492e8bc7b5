"""Text for a page in Markdown."""

from __future__ import annotations

import re


def plain(text: str) -> str:
    """A text that Markdown shows as it is; code between backticks stays code, and a table's cell stays one."""
    pieces = re.split(r"(`[^`]*`)", text)
    escaped = [piece if piece[:1] == "`" else re.sub(r"([*_<>\[\]\\{}])", r"\\\1", piece) for piece in pieces]
    return "".join(escaped).replace("|", "\\|")
