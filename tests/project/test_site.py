"""The site of the documents: every page has its place, and links lead to pages.

`make docs-site` builds it and takes no warning; what can be said without Sphinx is tested here.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from scripts.docs_site.pages import (
    DOCS,
    FRONT,
    LIST,
    PARTS,
    REPOSITORY,
    ROOT,
    SPECIAL,
    names,
    parts,
    relinked,
    sections,
)


def relinked_in(document: Path, text: str) -> tuple[str, list[Path]]:
    """The text with links of the site, and the pictures that it shows."""
    pictures: list[Path] = []
    return relinked(text, document, names(), pictures.append), pictures


def test_every_document_is_a_page_once() -> None:
    """docs/README.md lists each page; those of the architecture are below ARCHITECTURE.md, which links to each."""
    listed = [document for documents in sections().values() for document in documents]
    assert len(listed) == len(set(listed))
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    documents = {path for name in tracked if (path := ROOT / name).exists()}
    assert documents - {LIST, FRONT, ROOT / "CHANGELOG.md"} == {*listed, *parts()}
    assert set(SPECIAL) <= documents
    above = (DOCS / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert [part.name for part in parts() if f"(architecture/{part.name}" not in above] == []


def test_sections_are_those_of_the_site() -> None:
    """Tutorial, how-to, runbook, reference, explanation; none is empty."""
    assert list(sections()) == ["Tutorial", "How-to guides", "Runbook", "Reference", "Explanation"]
    assert all(sections().values())


def test_names_of_pages_differ() -> None:
    """Also where a file system takes capital letters for small ones."""
    found = [name.lower() for name in names().values()]
    assert len(found) == len(set(found))


def test_links_lead_to_pages_pictures_and_the_repository() -> None:
    """A document becomes its page, with its anchor; a picture comes along; any other file is in the repository."""
    assert relinked_in(FRONT, "[x](docs/CLI.md#exit-codes)") == ("[x](cli.md#exit-codes)", [])
    assert relinked_in(DOCS / "CLI.md", "[x](../README.md) [y](architecture/clock.md)") == (
        "[x](index.md) [y](architecture/clock.md)",
        [],
    )
    assert relinked_in(PARTS / "clock.md", "[x](../../replication/DESIGN.md#time)")[0] == "[x](replication.md#time)"
    assert relinked_in(DOCS / "CLI.md", "[x](../proto) [y](architecture)")[0] == (
        "[x](reference/proto.md) [y](architecture.md)"
    )
    assert relinked_in(DOCS / "CLI.md", "[x](../node/metrics.py) [y](../examples)")[0] == (
        f"[x]({REPOSITORY}/blob/main/node/metrics.py) [y]({REPOSITORY}/tree/main/examples)"
    )
    assert relinked_in(DOCS / "CONSOLE.md", "![x](img/console-overview.png)") == (
        "![x](docs/img/console-overview.png)",
        [DOCS / "img/console-overview.png"],
    )


def test_links_that_are_none_stay() -> None:
    """Code, other hosts, anchors of the same page; and what leads nowhere, for the build to name."""
    for text in (
        "`[x](CLI.md)`",
        "```\n[x](CLI.md)\n```",
        "[x](https://example.com/CLI.md)",
        "[x](#here)",
        "[x](NO_SUCH.md)",
        "[x](../../outside.md)",
    ):
        assert relinked_in(DOCS / "CLIENT.md", text) == (text, [])


def test_drawings_have_a_dark_version() -> None:
    """White in a dark page dazzles. Each colour of a drawing stands in its styles, where the dark ones replace it."""
    drawings = sorted(DOCS.rglob("*.svg"))
    assert drawings
    for drawing in drawings:
        _, styles, shapes = re.split(r"</?style>", drawing.read_text(encoding="utf-8"))
        light, _, dark = styles.partition("@media (prefers-color-scheme: dark)")
        coloured = re.compile(r"([.\w]+) \{[^}]*(?:fill|stroke): #")
        assert set(coloured.findall(light)) == set(coloured.findall(dark)), drawing
        assert "#" not in re.sub(r"url\(#\w+\)", "", shapes), drawing
