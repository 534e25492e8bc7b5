"""Which document is which page of the site, and how links between documents become links between pages.

docs/README.md is the one place that orders the documents: its headings are the sections of the site, and the first link
of each row of its tables is a page. Nothing here needs more than Python, so the tests read the same order.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FRONT = ROOT / "README.md"
LIST = DOCS / "README.md"
PARTS = DOCS / "architecture"
"""Pages below ARCHITECTURE.md."""
REPOSITORY = "https://github.com/tickwheel/tickwheel"

SPECIAL = {FRONT: "index", LIST: "documents", ROOT / "CHANGELOG.md": "changelog"}
FOLDERS = {DOCS: "documents", PARTS: "architecture", ROOT / "proto": "reference/proto"}
"""Links to these folders lead to pages."""
PICTURES = (".png", ".svg")

_SECTION = re.compile(r"^## (.+)$")
_ROW = re.compile(r"^\| \[[^]]+\]\(([^)#]+)\) \|")
_LINK = re.compile(r"(```.*?```|`[^`\n]*`)|(?<=\]\()([^)\s]+)(?=\))", re.DOTALL)
"""Code, which is left alone, or the target of a link."""


def sections() -> dict[str, list[Path]]:
    """The documents that docs/README.md lists, by its headings."""
    found: dict[str, list[Path]] = {}
    for line in LIST.read_text(encoding="utf-8").splitlines():
        if heading := _SECTION.match(line):
            found[heading[1]] = []
        elif found and (row := _ROW.match(line)):
            found[list(found)[-1]].append((DOCS / row[1]).resolve())
    return found


def parts() -> list[Path]:
    """The pages below ARCHITECTURE.md, in order of their names."""
    return sorted(PARTS.glob("*.md"))


def names() -> dict[Path, str]:
    """Document -> name of its page, for all of the site but what is generated."""
    found = dict(SPECIAL)
    for document in [*(document for listed in sections().values() for document in listed), *parts()]:
        if document.is_relative_to(DOCS):
            found[document] = document.relative_to(DOCS).with_suffix("").as_posix().lower()
        else:
            found[document] = f"architecture/{document.parent.name}"
    return found


def relinked(text: str, document: Path, pages: dict[Path, str], picture: Callable[[Path], None]) -> str:
    """A document with links that hold in the site: to pages, to copied pictures, else to the repository.

    `picture` is told each picture that is shown. A link to nothing stays as it is: the build then names it.
    """
    here = Path(pages[document]).parent

    def replaced(match: re.Match[str]) -> str:
        if match[1] is not None:
            return match[1]
        target = match[2]
        path, hash_sign, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return target
        file = (document.parent / path).resolve()
        if file in pages or file in FOLDERS:
            page = f"{pages.get(file) or FOLDERS[file]}.md"
            return f"{os.path.relpath(page, here)}{hash_sign}{anchor}"
        if not file.is_relative_to(ROOT) or not file.exists():
            return target
        if file.suffix in PICTURES:
            picture(file)
            return os.path.relpath(file.relative_to(ROOT), here)
        kind = "tree" if file.is_dir() else "blob"
        return f"{REPOSITORY}/{kind}/main/{file.relative_to(ROOT).as_posix()}{hash_sign}{anchor}"

    return _LINK.sub(replaced, text)
