"""Paths and URIs in a command's arguments: separates folders that all machines mount from other places.

Cold tier and builds fsync, rename and link files themselves, so they need a folder: a path, or a `file:` URI.
Parquet that only Spark reads and writes (input, archive) may be anywhere that Spark can reach.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")


class PlaceError(ValueError):
    """The place is not accepted here; the text names it and says what is."""


def scheme_of(place: str) -> str:
    """`file`, `s3a`, `hdfs`, ...; empty for a plain path."""
    found = _SCHEME.match(place)
    return found[1].lower() if found else ""


def local_folder(place: str | Path, what: str) -> Path:
    """The folder that a path or a `file:` URI names, absolute. Raises PlaceError for any other."""
    text = _stated(place, what)
    scheme = scheme_of(text)
    if not scheme:
        return Path(text).absolute()
    parts = urlsplit(text)
    if scheme != "file":
        raise PlaceError(
            f"{what}: {text}: it must be a path, or file:///..., of a folder that all machines mount: files there are "
            f"fsynced and renamed one by one. {scheme}: is accepted for what Spark reads (IN.parquet) and for archives"
        )
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not parts.path.startswith("/"):
        raise PlaceError(f"{what}: {text}: it must be like file:///folder, without a host, a query or a fragment")
    return Path(unquote(parts.path))


def spark_folder(place: str | Path, what: str) -> str:
    """An absolute path for Spark; a URI is returned unchanged. Raises PlaceError for an empty one."""
    text = _stated(place, what)
    return text if scheme_of(text) else str(Path(text).absolute())


def _stated(place: str | Path, what: str) -> str:
    """The place as text. An empty one is a variable that is not set, not the working directory."""
    if place == "":
        raise PlaceError(f"{what}: '': the path of a folder")
    return str(place)
