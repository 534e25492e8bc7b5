"""The disk port: all that tickwheel asks of a file system.

Everything that is written to disk goes through these two protocols, so that a simulation can put
a disk below a node that forgets what was not synced. `local.py` is the real one, `simulated.py`
its twin; both pass `tests/storage/test_disk_conformance.py`.

Paths are relative to the disk's root, with `/` between the parts. Nothing here is asynchronous:
who must not block calls it in a worker thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Buffer = bytes | bytearray | memoryview


class DiskError(Exception):
    """The disk did not do what it was asked; the message names path and cause."""


class DiskFullError(DiskError):
    """No space is left; nothing, or only a part, was written."""


class NoDescriptorError(DiskFullError):
    """The process, or the machine, has no file descriptor left; nothing was done. Like a full disk it may pass."""


class SyncFailedError(DiskError):
    """An fdatasync failed. What it covered may be lost even if a later one succeeds: stop the process."""


class File(Protocol):
    """An open file. Offsets and sizes are in bytes."""

    @property
    def path(self) -> str: ...

    def size(self) -> int:
        """Length of the file."""
        ...

    def append(self, data: Buffer) -> int:
        """Write all of `data` at the end; returns the offset it starts at.

        Raises DiskFullError; then the file is truncated back to where it was, if that succeeds.
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
        """Reserve space up to `size` bytes without changing the length that `size()` tells."""
        ...

    def map(self) -> memoryview:
        """Read-only view of the file as long as it is now. Valid until `close`."""
        ...

    def sync(self) -> None:
        """fdatasync: on return everything written before is on stable storage. Raises SyncFailedError."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class Disk(Protocol):
    """A directory of files."""

    def open(self, path: str, *, create: bool = False) -> File:
        """Open for reading and writing; with `create`, missing parents and file are made.

        A created file survives a crash only after `sync_dir` of its directory.
        """
        ...

    def exists(self, path: str) -> bool: ...

    def size(self, path: str) -> int: ...

    def list(self, path: str) -> list[str]:
        """Names in a directory, sorted; [] if it does not exist."""
        ...

    def make_dir(self, path: str) -> None:
        """With parents; no error if it exists."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file or a whole directory; no error if it is not there."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Atomically replace `target`. Durable after `sync_dir`."""
        ...

    def sync_dir(self, path: str) -> None:
        """Make creations, removals and renames in a directory durable. Raises SyncFailedError."""
        ...

    def space_left(self) -> int:
        """Bytes that can still be written."""
        ...

    def space_total(self) -> int:
        """Bytes that it holds in all, written or not."""
        ...

    def lock(self) -> None:
        """Take the directory for this process until it ends. Raises DiskError if another has it."""
        ...
