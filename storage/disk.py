"""The disk port: all operations of a file system that tickwheel uses.

Everything that is written to disk goes through these two protocols, so that a simulation can give a
node a disk that forgets bytes that were not fsynced. `local.py` is the real one, `simulated.py` its twin; both pass
`tests/storage/test_disk_conformance.py`.

Paths are relative to the disk's root, with `/` between the parts; both disks refuse the same ones (`path_parts`).
Nothing here is asynchronous: a caller that must not block uses a worker thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Buffer = bytes | bytearray | memoryview


class DiskError(Exception):
    """The disk failed to do what was asked; the message names path and cause."""


class DiskFullError(DiskError):
    """No space is left. What was to be written is missing or incomplete."""


class NoDescriptorError(DiskFullError):
    """No file descriptor is left in the process or the machine; nothing was done. Like a full disk, this may pass."""


class DirectoryInUseError(DiskError):
    """Another process holds the lock of the directory."""


class FsyncFailedError(DiskError):
    """An fdatasync failed. What it was to save may be lost even if a later one succeeds: write and promise nothing
    more."""


class File(Protocol):
    """An open file. Offsets and sizes are in bytes."""

    @property
    def path(self) -> str: ...

    def size(self) -> int:
        """Length of the file, without reserved space."""
        ...

    def append(self, data: Buffer) -> int:
        """Write all of `data` at the end; returns the offset where it starts.

        Raises DiskFullError; the file is then truncated to its old length, if that succeeds.
        """
        ...

    def append_many(self, parts: Sequence[Buffer]) -> int:
        """`append` of the concatenation, without joining it first (writev)."""
        ...

    def write_at(self, offset: int, data: Buffer) -> None:
        """Overwrite in place; may extend the file."""
        ...

    def read_at(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes (fewer at the end of the file). Never faults on a mapped page."""
        ...

    def truncate(self, size: int) -> None: ...

    def preallocate(self, size: int) -> None:
        """Reserve space up to `size` bytes without changing the length that `size()` returns."""
        ...

    def map(self) -> memoryview:
        """Read-only view of the file at its present length. Valid until `close`."""
        ...

    def fsync(self) -> None:
        """fdatasync: after return everything written before is on stable storage. Raises FsyncFailedError."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class Disk(Protocol):
    """A directory of files."""

    def open(self, path: str, *, create: bool = False) -> File:
        """Open for reading and writing; `create` makes the file and missing parents.

        A created file survives a crash only after `fsync_dir` of its directory.
        """
        ...

    def exists(self, path: str) -> bool:
        """Raises DiskError if that cannot be found out: what may be there must not be taken for absent."""
        ...

    def size(self, path: str) -> int: ...

    def files(self, path: str) -> list[str]:
        """Paths of all files below a directory, however deep, sorted; [] if it does not exist."""
        ...

    def list(self, path: str) -> list[str]:
        """Names in a directory, sorted; [] if it does not exist."""
        ...

    def make_dir(self, path: str) -> None:
        """Make a directory and its parents; no error if it exists."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file or a whole directory; no error if it does not exist."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Atomically replace `target`. Durable after `fsync_dir`."""
        ...

    def fsync_dir(self, path: str) -> None:
        """Make creations, removals and renames in a directory durable. Raises FsyncFailedError."""
        ...

    def space_left(self) -> int:
        """Bytes that can still be written."""
        ...

    def space_total(self) -> int:
        """Capacity in bytes, used space included."""
        ...

    def lock(self) -> None:
        """Lock the directory for this process until it ends. Raises DirectoryInUseError."""
        ...


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
