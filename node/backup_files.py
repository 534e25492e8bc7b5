"""A backup as a directory: the files of one node, and a list of them with sizes and checksums, which is written last.

Owns the list (backup.json). A directory without it is no backup: the copy was interrupted. A restore checks every byte
before it renames the data directory into place, so a half restored one is never taken for complete.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO, Any

import google_crc32c

from tickwheel.proto import admin_pb2
from tickwheel.storage.disk import DiskError
from tickwheel.storage.local import LocalDisk

LIST_NAME = "backup.json"
VERSION = 1
BLOCK_BYTES = 1 << 20


class BackupError(Exception):
    """The backup cannot be written or is incomplete; the text is for people."""


def origin_facts(origin: admin_pb2.BackupOrigin) -> dict[str, str | int]:
    """The origin of a backup as entries for its list; empty if it is not known."""
    if not origin.cluster_id:
        return {}
    return {
        "cluster": origin.cluster_id,
        "node": origin.node_id,
        "index": origin.applied_index,
        "made_ms": origin.made_ms,
        "lag_entries": origin.lag_entries,
        "stale_reason": origin.stale_reason,
        "program": origin.version,
    }


def origin_of(source: Path) -> admin_pb2.BackupOrigin:
    """The origin of a backup, from its list; empty if the list has none. Raises BackupError."""
    facts = _listed(source).get("origin") or {}
    try:
        return admin_pb2.BackupOrigin(
            cluster_id=facts.get("cluster", ""),
            node_id=facts.get("node", ""),
            applied_index=facts.get("index", 0),
            made_ms=facts.get("made_ms", 0),
            lag_entries=facts.get("lag_entries", 0),
            stale_reason=facts.get("stale_reason", ""),
            version=facts.get("program", ""),
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise BackupError(f"{source} holds no whole backup: {LIST_NAME}: origin: {error}") from error


def _listed(source: Path) -> dict[str, Any]:
    """The list. Raises BackupError."""
    try:
        listed = json.loads((source / LIST_NAME).read_text(encoding="utf-8"))
        version = listed["version"]
        listed["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BackupError(f"{source} holds no whole backup: {LIST_NAME}: {error}") from error
    if version != VERSION:
        raise BackupError(f"{source} is a backup of version {version}; this program reads {VERSION}")
    return dict(listed)


def _safe(path: str) -> PurePosixPath:
    checked = PurePosixPath(path)
    if not path or checked.is_absolute() or ".." in checked.parts:
        raise BackupError(f"a file named {path!r} is no part of a backup")
    return checked


def _need_empty(directory: Path, advice: str) -> None:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise BackupError(f"{directory} is not empty: {advice}")


class BackupWriter:
    """Writes the chunks of a copy; only `finish` makes the directory a backup."""

    def __init__(self, directory: Path) -> None:
        _need_empty(directory, "name a new directory for each backup")
        directory.mkdir(0o700, parents=True, exist_ok=True)
        self._directory = directory
        self._open: IO[bytes] | None = None
        self._path = ""
        self._crc = 0
        self._list: dict[str, dict[str, int]] = {}
        self._complete = False
        self.bytes = 0
        self.origin = admin_pb2.BackupOrigin()
        """The origin of the backup; empty if the node's version does not send it."""

    @property
    def files(self) -> int:
        return len(self._list)

    def write(self, chunk: admin_pb2.BackupChunk) -> None:
        """Write a chunk. Files must come one after the other, each from its beginning."""
        if google_crc32c.value(chunk.data) != chunk.crc32c:
            raise BackupError(f"{chunk.path} arrived damaged at byte {chunk.offset}")
        if chunk.HasField("origin"):
            self.origin.CopyFrom(chunk.origin)
        if chunk.path != self._path or chunk.offset == 0:
            self._close_file()
            target = self._directory / _safe(chunk.path)
            target.parent.mkdir(0o700, parents=True, exist_ok=True)
            self._open = target.open("xb")
            self._path, self._crc = chunk.path, 0
        if self._open is None or self._open.tell() != chunk.offset:
            raise BackupError(f"{chunk.path}: byte {chunk.offset} came out of order")
        self._open.write(chunk.data)
        self._crc = google_crc32c.extend(self._crc, chunk.data)
        self.bytes += len(chunk.data)
        if chunk.offset + len(chunk.data) >= chunk.file_bytes:
            self._close_file()
        self._complete = self._complete or chunk.last

    def _close_file(self) -> None:
        if self._open is None:
            return
        self._open.flush()
        os.fsync(self._open.fileno())
        self._list[self._path] = {"bytes": self._open.tell(), "crc32c": self._crc}
        self._open.close()
        self._open, self._path = None, ""

    def finish(self) -> None:
        """Write the list, once all chunks are written."""
        self._close_file()
        if not self._complete:
            raise BackupError("the node ended the copy before its last file; start the backup again")
        text = json.dumps({"version": VERSION, "origin": origin_facts(self.origin), "files": self._list}, indent=1)
        part = self._directory / (LIST_NAME + ".part")
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.rename(self._directory / LIST_NAME)


def _in_use(directory: Path) -> bool:
    if not directory.is_dir() or not any(directory.iterdir()):
        return False
    disk = LocalDisk(str(directory))
    try:
        disk.lock()
    except DiskError:
        return True
    disk.unlock()
    return False


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def restore_backup(
    source: Path, data_dir: Path, progress: Callable[[int, int], None], prepare: Callable[[Path], None]
) -> tuple[int, int]:
    """Copy the files, check them, `prepare` the copy, put it in place. Returns (files, bytes).

    Raises BackupError and what `prepare` raises.
    """
    if _in_use(data_dir):
        raise BackupError(
            f"a node is running on {data_dir}: its data is alive and nothing was changed. To restore all the same, "
            "stop it and move the directory away, or restore on another machine"
        )
    _need_empty(data_dir, "move it away first; what is there is never overwritten")
    files: dict[str, dict[str, int]] = _listed(source)["files"]
    try:
        data_dir.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f"{data_dir.name}.restore-", dir=data_dir.parent))
    except OSError as error:
        raise BackupError(f"{data_dir}: {error.strerror}") from error
    try:
        copied = _copied(source, files, part, progress)
        prepare(part)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    try:
        if data_dir.exists():
            data_dir.rmdir()
        part.rename(data_dir)
        _sync_directory(data_dir.parent)
    except OSError as error:
        raise BackupError(
            f"the checked copy lies in {part}, but cannot be moved to {data_dir}: {error.strerror}"
        ) from error
    return copied


def _copied(
    source: Path, files: dict[str, dict[str, int]], part: Path, progress: Callable[[int, int], None]
) -> tuple[int, int]:
    """Copy the files and check them. Returns (files, bytes). Raises BackupError."""
    total = sum(item["bytes"] for item in files.values())
    done = 0
    for path, item in files.items():
        target = part / _safe(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        crc = size = 0
        try:
            with (source / path).open("rb") as read, target.open("xb") as write:
                while block := read.read(BLOCK_BYTES):
                    write.write(block)
                    crc = google_crc32c.extend(crc, block)
                    size += len(block)
                    done += len(block)
                    progress(done, total)
                write.flush()
                os.fsync(write.fileno())
        except OSError as error:
            raise BackupError(f"{path}: {error.strerror}") from error
        if (size, crc) != (item["bytes"], item["crc32c"]):
            raise BackupError(f"{source / path} is damaged: its size or checksum is not the listed one")
    return len(files), total
