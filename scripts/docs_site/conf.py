"""Sphinx's settings for the site; build.py puts the pages where Sphinx finds them.

Nothing on a page comes from another host: Furo brings its styles, and the search is a file beside the pages.
"""

from __future__ import annotations

import builtins
import re
from importlib.metadata import version as version_of
from typing import Any

from sphinx import addnodes

project = "tickwheel"
release = version = version_of("tickwheel")
extensions = ["myst_parser", "sphinx.ext.autodoc"]
highlight_language = "text"
nitpicky = False

# Headings have the anchors that they have on GitHub.
myst_heading_anchors = 6

autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
add_module_names = False
# Each class has a heading; entries for members would make every page slow.
toc_object_entries = False

html_theme = "furo"
html_title = f"tickwheel {version}"
html_favicon = "../../console/static/icon.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "github-dark"

_CODE = re.compile(r"(`[^`]+`)")
_CLASS = re.compile(r"`[A-Z][a-z]\w+`")
_ITEM = re.compile(r"\s*- ")


def _piece(piece: str) -> str:
    if _CLASS.fullmatch(piece):
        return f":py:obj:`.{piece[1:-1]}`"
    return f"`{piece}`" if piece[:1] == "`" else re.sub(r"([*|\\])", r"\\\1", piece)


def _restructured(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings are written as plain text with code in single backticks and lists that follow their paragraph."""
    found: list[str] = []
    for line in lines:
        if _ITEM.match(line) and found and found[-1] and not _ITEM.match(found[-1]) and not found[-1][:1].isspace():
            found.append("")
        pieces = _CODE.split(line)
        found.append("".join(map(_piece, pieces)))
    lines[:] = found


def _keep_builtins(app: object, doctree: Any) -> None:
    """The type `bytes` in a signature is Python's: Sphinx would link it to any attribute of that name."""
    for reference in list(doctree.findall(addnodes.pending_xref)):
        if reference.get("refdomain") == "py" and hasattr(builtins, reference["reftarget"]):
            reference.replace_self(addnodes.desc_sig_name("", reference[0].astext()))


def setup(app: Any) -> None:
    """Sphinx calls it."""
    app.connect("doctree-read", _keep_builtins)
    app.connect("autodoc-process-docstring", _restructured)
