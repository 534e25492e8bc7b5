"""Builds the documents as a site: `python -m scripts.docs_site.build` writes build/site.

The Markdown of the repository is the only source. It is copied to build/site-source with links that hold there, beside
the pages that come from the code; Sphinx makes the site of that. A warning is an error: a link or an anchor that leads
nowhere, a page in no list, a docstring that cannot be shown.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from scripts.docs_site.alerts import alerts
from scripts.docs_site.command_line import command_line
from scripts.docs_site.pages import FRONT, LIST, ROOT, names, parts, relinked, sections
from scripts.docs_site.protocol import proto
from scripts.docs_site.python_api import python

SOURCE = ROOT / "build" / "site-source"
CACHE = ROOT / "build" / "site-cache"
SITE = ROOT / "build" / "site"

FIRST = {"Runbook": ["alerts"], "Reference": ["reference/python", "reference/proto", "reference/commands"]}
"""Generated pages of a section; the others follow."""

_DIAGRAM = re.compile(r"```mermaid\nstateDiagram-v2\n(.*?)```", re.DOTALL)


def main() -> int:
    """Exit code 0: built, without a warning."""
    for made in (SOURCE, CACHE, SITE):  # what is not read anew would not warn anew
        shutil.rmtree(made, ignore_errors=True)
    stage()
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-c", str(Path(__file__).parent), "-d", str(CACHE)]
    command += ["-W", "--keep-going", "-q", "-j", "auto", str(SOURCE), str(SITE)]
    code = subprocess.run(command, check=False).returncode
    if code == 0:
        print(f"the site is built: {SITE / 'index.html'}")
    return code


def stage() -> None:
    """Write what Sphinx reads."""
    pages = names()
    for document, name in pages.items():
        text = relinked(document.read_text(encoding="utf-8"), document, pages, _copied)
        text = _DIAGRAM.sub(lambda found: _as_table(found[1]), text)
        if document == FRONT:
            text += _contents(pages)
        elif name == "architecture":
            text += _toctree("", [pages[part] for part in parts()])
        _write(f"{name}.md", text)
    for made in (python(), proto(), command_line(), alerts()):
        for file, text in made.items():
            _write(file, text)


def _write(file: str, text: str) -> None:
    path = SOURCE / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _copied(picture: Path) -> None:
    target = SOURCE / picture.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(picture, target)


def _contents(pages: dict[Path, str]) -> str:
    """The lists of pages beside every page, in the order of docs/README.md."""
    trees = [_toctree("", [pages[LIST]])]
    for title, documents in sections().items():
        listed = [*FIRST.get(title, []), *(pages[document] for document in documents)]
        trees.append(_toctree(title, listed + (["changelog"] if title == "Reference" else [])))
    return "".join(trees)


def _toctree(caption: str, listed: list[str]) -> str:
    head = [":hidden:"] + ([f":caption: {caption}"] if caption else [])
    return "\n".join(["\n```{toctree}", *head, "", *(f"/{name}" for name in listed), "```\n"])


def _as_table(diagram: str) -> str:
    """A state diagram as a table: drawing it would take a script of another host."""
    rows = [re.match(r"\s*(\S+) --> (\S+)(?:: (.*))?$", line) for line in diagram.splitlines()]
    cells = [f"| `{row[1]}` | `{row[2]}` | {row[3] or ''} |" for row in rows if row]
    return "\n".join(["| from | to | when |", "|---|---|---|", *cells, ""])


if __name__ == "__main__":
    sys.exit(main())
