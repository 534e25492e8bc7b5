"""Paths below a disk's root: what is allowed, and how they are cut into parts.

Both disks use it, so that a path that one of them refuses is refused by the other too.
"""

from __future__ import annotations

from tickwheel.storage.disk import DiskError

LOCK_NAME = ".lock"
"""The file below the root that the lock is taken on; no caller sees or opens it."""


def path_parts(path: str) -> tuple[str, ...]:
    """The parts of a path relative to the root; () for the root itself, written "".

    Raises DiskError for what could leave the root: absolute paths, `..`, empty parts, NUL.
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
