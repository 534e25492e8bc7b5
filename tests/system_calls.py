"""Calls of the system that fail, or after which the machine loses power, for tests of what commands do to files."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

CALLS = (
    *("open", "write", "pwritev", "ftruncate", "posix_fallocate", "fdatasync", "fsync"),
    *("replace", "rename", "link", "unlink", "mkdir", "rmdir"),
)
"""Of the module `os`. pathlib and shutil use these."""


class Killed(BaseException):
    """The process has ended."""


class Faults:
    """Lets the call of that number fail, and the later ones as well if the process is killed."""

    def __init__(self, patch: pytest.MonkeyPatch, fault: int | None) -> None:
        self.at = -1
        self.calls = 0
        self._fault = fault
        self._waits = (os.fsync, os.fdatasync)
        """Whoever is only killed needs not wait for the disk."""
        for name in CALLS:
            patch.setattr(os, name, functools.partial(self._call, getattr(os, name)))

    def arm(self, at: int) -> None:
        """From now on; -1: let nothing fail."""
        self.at, self.calls = at, 0

    def _call(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        number, self.calls = self.calls, self.calls + 1
        if self.at >= 0 and (number == self.at or (number > self.at and self._fault is None)):
            if self._fault is None:
                raise Killed
            raise OSError(self._fault, os.strerror(self._fault))
        return None if call in self._waits else call(*arguments, **named)


class PowerLoss:
    """Knows what of a directory is durable, and lets a call be the last one before the machine is without power.

    `survivors` is what the machine finds: bytes that no fsync has covered are gone. Names are those of the last fsync
    of their directory, or, as a file system may write them earlier than the bytes, those of the moment.
    """

    def __init__(self, patch: pytest.MonkeyPatch, root: Path) -> None:
        self.at = -1
        self.calls = 0
        self._root = root
        self._bytes: dict[int, bytes] = {}
        """By inode; what the last fsync brought there,"""
        self._names: dict[int, dict[str, int]] = {}
        """and by the inode of a directory: its names then."""
        self._gone: list[BinaryIO] = []
        self._durable = {name: getattr(os, name) for name in ("fsync", "fdatasync")}
        for name in CALLS:
            patch.setattr(os, name, functools.partial(self._call, name, getattr(os, name)))

    def arm(self, at: int) -> None:
        """All that is there is durable; power is lost at the call of that number."""
        self.close()
        self.at, self.calls = at, 0
        self._bytes.clear()
        self._names.clear()
        for folder in (self._root, *(path for path in self._root.rglob("*") if path.is_dir())):
            self._note_names(folder)
        for path in self._root.rglob("*"):
            if path.is_file():
                self._bytes[path.stat().st_ino] = path.read_bytes()

    def close(self) -> None:
        """Forget what is gone, and lose power at no call."""
        self.at = -1
        for file in self._gone:
            file.close()
        self._gone.clear()

    def survivors(self, target: Path, *, names_at_once: bool) -> None:
        """Make `target` what is found at the next start."""
        self._copy(self._root, self._root.stat().st_ino, target, names_at_once)

    def _copy(self, folder: Path, inode: int, target: Path, names_at_once: bool) -> None:
        target.mkdir()
        names = self._names_of(folder) if names_at_once else self._names.get(inode, {})
        for name, found in names.items():
            if found in self._names or (folder / name).is_dir():
                self._copy(folder / name, found, target / name, names_at_once)
            else:
                (target / name).write_bytes(self._bytes.get(found, b""))
                with contextlib.suppress(FileNotFoundError):
                    (target / name).chmod((folder / name).stat().st_mode)

    def _names_of(self, folder: Path) -> dict[str, int]:
        return {entry.name: entry.inode() for entry in os.scandir(folder)} if folder.is_dir() else {}

    def _note_names(self, folder: Path) -> None:
        self._names[folder.stat().st_ino] = self._names_of(folder)

    def _call(self, name: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        number, self.calls = self.calls, self.calls + 1
        if 0 <= self.at <= number:
            raise Killed
        if name in self._durable:
            path = Path(f"/proc/self/fd/{arguments[0]}").readlink()
            if path.is_dir():
                self._note_names(path)
            elif path.exists():
                self._bytes[path.stat().st_ino] = path.read_bytes()
            return None
        if name in ("unlink", "replace", "rename") and "dir_fd" not in named:
            gone = Path(arguments[-1 if name != "unlink" else 0])
            if gone.is_relative_to(self._root) and gone.is_file():
                self._gone.append(gone.open("rb"))  # no other file gets its inode
        return call(*arguments, **named)
