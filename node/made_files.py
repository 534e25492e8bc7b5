"""A note of the folders that a command made in a directory, so that nothing else is ever deleted.

Owns the file MARK_NAME of one directory, which lists the nodes' folders made there. Invariants:
- A folder is noted before it is made, and only if nothing of that name existed.
- `remove` deletes only noted folders and a node's files in them. It follows no symbolic link, deletes nothing while any
  of it is in use, and leaves all other files.
- A command holds `lock` while it runs nodes in the directory, so a second command is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tickwheel.storage.disk import LOCK_NAME
from tickwheel.storage.plain_file import ASIDE_SUFFIX, make_directory, replace_file

MARK_NAME = "made-by-tickwheel.json"
VERSION = 1
CONFIG_NAME, LOG_NAME, DATA_NAME = "node.toml", "node.log", "data"
NODE_PARTS = (CONFIG_NAME, CONFIG_NAME + ASIDE_SUFFIX, LOG_NAME, "knobs.json", DATA_NAME)


class LocalClusterError(Exception):
    """A local cluster is not as it must be; the text is for people."""


class MadeFiles:
    """The nodes' folders that were made in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._mark = directory / MARK_NAME

    def names(self) -> list[str]:
        """The noted folders; none if nothing was ever made here. Raises LocalClusterError for a damaged note."""
        try:
            if self._mark.is_symlink():
                raise LocalClusterError(f"{self._mark} is a symbolic link, which tickwheel never makes")
            text = self._mark.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise LocalClusterError(f"{self._mark} cannot be read: {error}") from None
        try:
            noted = json.loads(text)
            version, names = noted["version"], noted["nodes"]
        except (ValueError, KeyError, TypeError):
            raise LocalClusterError(f"{self._mark} does not list what was made here") from None
        if version != VERSION:
            raise LocalClusterError(f"{self._mark} is of version {version}; this program reads {VERSION}")
        if not isinstance(names, list) or not all(isinstance(name, str) and _is_plain(name) for name in names):
            raise LocalClusterError(f"{self._mark} lists what is no folder in this directory")
        return names

    def make(self, names: list[str]) -> None:
        """Note and make these folders. Raises LocalClusterError if one of the names exists already."""
        known = self.names()
        for name in names:
            if os.path.lexists(self.directory / name) and not _is_bare(self.directory / name):
                raise LocalClusterError(
                    f"{self.directory / name} is there already and was not made by tickwheel: it is left alone; "
                    "name another directory"
                )
        try:
            make_directory(self.directory)
            noted = {"version": VERSION, "nodes": list(dict.fromkeys([*known, *names]))}
            replace_file(self._mark, (json.dumps(noted) + "\n").encode())
            for name in names:
                make_directory(self.directory / name)
        except OSError as error:
            raise LocalClusterError(f"{self.directory}: {error.strerror}") from None

    def unfinished(self) -> bool:
        """Whether a command was killed while it made the folders: a configuration is missing, and no node has data."""
        folders = [self.directory / name for name in self.names()]
        return any(not os.path.lexists(folder / CONFIG_NAME) for folder in folders) and not any(
            os.path.lexists(folder / DATA_NAME) for folder in folders
        )

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Held while a command runs nodes here; makes the directory. Raises LocalClusterError if another holds it."""
        try:
            make_directory(self.directory)
        except FileExistsError:
            raise LocalClusterError(f"{self.directory} is no directory") from None
        except OSError as error:
            raise LocalClusterError(f"{self.directory}: {error.strerror}") from None
        with contextlib.ExitStack() as held:
            _hold(held, self.directory.resolve(), f"another command runs the cluster in {self.directory}")
            yield

    def remove(self) -> list[str]:
        """Remove the noted folders. Returns the names of other files in the directory. The caller holds `lock`.

        Raises LocalClusterError and removes nothing if any of it is in use or is a symbolic link, or if nothing says
        that it was made here.
        """
        if self.directory.is_symlink():
            raise LocalClusterError(f"{self.directory} is a symbolic link: it is left alone")
        names = self.names()
        try:
            if not names and any(self.directory.iterdir()):
                raise LocalClusterError(
                    f"{self.directory} is left alone: no {MARK_NAME} says that tickwheel made what is in it"
                )
            folders = [self.directory / name for name in names if os.path.lexists(self.directory / name)]
            for folder in folders:
                for path in (folder, *(folder / part for part in NODE_PARTS)):
                    if path.is_symlink():
                        raise LocalClusterError(f"{path} is a symbolic link: {self.directory} is left alone")
            with contextlib.ExitStack() as held:
                for folder in folders:
                    in_use = folder / DATA_NAME / LOCK_NAME
                    if os.path.lexists(in_use):
                        _hold(held, in_use, f"a node is running on {folder / DATA_NAME}")
                for folder in folders:
                    _remove_node(folder)
            self._mark.unlink(missing_ok=True)
            return sorted(entry.name for entry in self.directory.iterdir())
        except OSError as error:
            raise LocalClusterError(f"{error.filename or self.directory}: {error.strerror}") from None


def _remove_node(folder: Path) -> None:
    for part in NODE_PARTS:
        path = folder / part
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()  # it stays if other files were put there


def _hold(held: contextlib.ExitStack, path: Path, busy: str) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise LocalClusterError(f"{path}: {error.strerror}") from None
    held.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise LocalClusterError(f"{busy}: stop it first; nothing was changed") from None


def _is_bare(folder: Path) -> bool:
    """Whether a folder holds no file and no link. It may hold folders, as mount points of disks for the nodes."""
    return folder.is_dir() and not any(path.is_symlink() or not path.is_dir() for path in (folder, *folder.rglob("*")))


def _is_plain(name: str) -> bool:
    return bool(name) and name not in {".", ".."} and "/" not in name and "\0" not in name
