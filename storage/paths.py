"""Paths below a disk's root: the rules, and how paths are split.

Both disks use this module, so that they refuse the same paths.
"""

from __future__ import annotations

from tickwheel.storage.disk import DiskError

LOCK_NAME = ".lock"
"""Name of the lock file below the root; no caller sees or opens it."""


def path_parts(path: str) -> tuple[str, ...]:
    """The parts of a path relative to the root; () for the root itself, written "".

    Raises DiskError for anything that could leave the root: absolute paths, `..`, empty parts, NUL.
    """
    if path == "":
        return ()
    parts = tuple(path.split("/"))
    for part in parts:
        if part in ("", ".", "..") or "\0" in part:
            raise DiskError(f"path {path!r} is not allowed: parts are names, without '.', '..' or empty ones")
    if parts[0] == LOCK_NAME:
        raise DiskError(f"path {path!r} is not allowed: the disk keeps its lock there")
    return parts


def parent_of(path: str) -> str:
    """The directory of a path, "" for one directly below the root."""
    return path.rpartition("/")[0]
