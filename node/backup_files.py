"""A backup as a directory: the files of one node, and a list of them with sizes and checksums, which is written last.

Owns the list (backup.json) and the mark of a copy that is not whole (backup.unfinished). A directory without the list
is no backup: the copy was interrupted, and another one goes on with it. The list is written once everything that it
names is on stable storage. A restore checks every byte, and works in the data directory itself: a disk may be mounted
there. No node starts on it before the restore has ended.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import google_crc32c

from tickwheel.client.copies import BackupChunk, BackupOrigin, HeldFile
from tickwheel.client.moments import moment_of, ms_of
from tickwheel.node.core.checkpoint import in_checkpoint
from tickwheel.node.server.identity import UNFINISHED_RESTORE
from tickwheel.storage.disk import LOCK_NAME, DirectoryInUseError, DiskError, DiskFullError, parent_of
from tickwheel.storage.local import LocalDisk
from tickwheel.storage.partial_copy import CopyError, PartialCopy
from tickwheel.storage.plain_file import ASIDE_SUFFIX, fsync_directory, replace_file

LIST_NAME = "backup.json"
UNFINISHED_NAME = "backup.unfinished"
_OWN_NAMES = frozenset({LOCK_NAME, UNFINISHED_NAME, UNFINISHED_NAME + ASIDE_SUFFIX})
"""Of an unfinished backup in which nothing has arrived."""
_OF_FILE_SYSTEM = frozenset({"lost+found"})
"""An empty data directory may have it, if it is where a disk is mounted."""
VERSION = 1
BLOCK_BYTES = 1 << 20


class BackupError(Exception):
    """The backup cannot be written or is incomplete; the text is for people."""


def origin_facts(origin: BackupOrigin | None) -> dict[str, str | int]:
    """The origin of a backup as entries for its list; empty if it is not known."""
    if origin is None:
        return {}
    return {
        "cluster": origin.cluster_id,
        "node": origin.node_id,
        "index": origin.applied_index,
        "made_ms": ms_of("made", origin.made),
        "lag_entries": origin.lag_entries,
        "stale_reason": origin.stale_reason,
        "program": origin.version,
    }


def origin_of(source: Path) -> BackupOrigin | None:
    """The origin of a backup, from its list; None if the list has none. Raises BackupError."""
    facts = _listed(source).get("origin") or {}
    try:
        if not facts.get("cluster"):
            return None
        return BackupOrigin(
            cluster_id=str(facts["cluster"]),
            node_id=str(facts.get("node", "")),
            applied_index=int(facts.get("index", 0)),
            made=moment_of(int(facts.get("made_ms", 0))),
            lag_entries=int(facts.get("lag_entries", 0)),
            stale_reason=str(facts.get("stale_reason", "")),
            version=str(facts.get("program", "")),
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise BackupError(f"{source} holds no whole backup: {LIST_NAME}: origin: {error}") from error


def _listed(source: Path) -> dict[str, Any]:
    """The list. Raises BackupError."""
    if _is_unfinished(source):
        raise BackupError(
            f"{source} holds no whole backup: its copy was interrupted. `tickwheel backup {source}` goes on with it"
        )
    try:
        listed = json.loads((source / LIST_NAME).read_text(encoding="utf-8"))
        version, files = listed["version"], listed["files"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise BackupError(f"{source} holds no whole backup: {LIST_NAME}: {error}") from error
    if version != VERSION:
        raise BackupError(f"{source} is a backup of version {version}; this program reads {VERSION}")
    if not isinstance(files, dict) or not all(map(_is_fact, files.values())):
        raise BackupError(f"{source} holds no whole backup: {LIST_NAME}: files: bytes and crc32c of each file")
    return dict(listed)


def _is_fact(fact: object) -> bool:
    """Whether it states a file's size and checksum."""
    return isinstance(fact, dict) and all(type(fact.get(name)) is int for name in ("bytes", "crc32c"))


def _is_unfinished(directory: Path) -> bool:
    return (directory / UNFINISHED_NAME).exists() and not (directory / LIST_NAME).exists()


def _unfinished_cluster(directory: Path) -> str:
    """The cluster of an unfinished backup; empty if nothing has come from it yet. Raises BackupError."""
    try:
        mark = json.loads((directory / UNFINISHED_NAME).read_text(encoding="utf-8"))
        version, cluster_id = mark["version"], str(mark["cluster"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise BackupError(f"{directory}: {UNFINISHED_NAME}: {error}. Remove the directory and start again") from error
    if version != VERSION:
        raise BackupError(f"{directory} is an unfinished backup of version {version}; this program reads {VERSION}")
    return cluster_id


def _write_json(directory: Path, name: str, value: object) -> None:
    """Replace a file of the directory; durable on return. Raises OSError."""
    replace_file(directory / name, json.dumps(value, indent=1).encode(), mode=0o600)


class BackupWriter:
    """Writes the chunks of a copy, in as many tries and processes as that takes; only `finish` makes it a backup.

    A directory in which a copy was begun has the file UNFINISHED_NAME until it is a backup. It is locked, so that two
    processes never write to it.
    """

    def __init__(self, directory: Path, read: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Begin a copy in a new or empty directory, or go on with an unfinished one, whose files are read for that.

        `read` is told of how many bytes of how many. Raises BackupError, DiskError.
        """
        self._directory = directory
        self._need_room()
        made = [path for path in (directory, *directory.parents) if not path.exists()]
        self._disk = LocalDisk(directory)
        for path in made:
            fsync_directory(path.parent)
        try:
            self._disk.lock()
        except DirectoryInUseError:
            raise BackupError(f"{directory}: another process is making this backup") from None
        try:
            self._need_room()  # from now on nobody else changes it
            self._cluster_id = ""
            if _is_unfinished(directory):
                self._cluster_id = _unfinished_cluster(directory)
            else:
                self._mark()
            total = sum(self._disk.size(path) for path in self._disk.files(""))
            done = 0

            def one_read(size: int) -> None:
                nonlocal done
                done += size
                read(done, total)

            self._files = PartialCopy(self._disk, "", in_checkpoint, one_read)
        except BaseException:
            self._disk.unlock()
            raise
        self._file_bytes: dict[str, int] = {}
        """Sizes of the files that this try has named, as the node stated them."""
        self.complete = False
        """Whether this try has got the node's last chunk."""
        self.origin: BackupOrigin | None = None
        """The origin of the backup; None if the node's version does not send it."""

    def _need_room(self) -> None:
        """Raises BackupError if a copy cannot be begun or gone on with."""
        if (self._directory / LIST_NAME).exists():
            raise BackupError(f"{self._directory} holds a whole backup: name a new directory for each backup")
        if _is_unfinished(self._directory) or not self._directory.exists():
            return
        if {path.name for path in self._directory.iterdir()} - _OWN_NAMES:
            raise BackupError(f"{self._directory} is not empty: name a new directory for each backup")

    @property
    def files(self) -> int:
        """The files that this try has named."""
        return len(self._file_bytes)

    @property
    def held_bytes(self) -> int:
        """Bytes left by all tries, of this version of the files or of earlier ones."""
        return self._files.held_bytes

    @property
    def bytes(self) -> int:
        """Bytes that this try has: received, or held and found right by the node."""
        return self._files.whole_bytes

    def begin(self) -> list[HeldFile]:
        """Begin a try. Returns what is held of the earlier ones, the most bytes first."""
        self.complete = False
        self.origin = None
        self._file_bytes.clear()
        return [HeldFile(file.path, file.bytes, file.crc32c) for file in self._files.begin()]

    def write(self, chunk: BackupChunk) -> None:
        """Write a chunk. Raises BackupError for one that does not fit, DiskError."""
        if chunk.origin is not None:
            self._came_from(chunk.origin)
        if chunk.comparing:
            return
        if self.complete:
            raise BackupError(f"{chunk.path} came after the last file")
        if chunk.offset + len(chunk.data) > self._file_bytes.setdefault(chunk.path, chunk.file_bytes):
            raise BackupError(f"{chunk.path} is larger than the node said")
        try:
            self._files.take(chunk.path, chunk.offset, chunk.data, chunk.crc32c)
        except CopyError as error:
            raise BackupError(f"the node's copy cannot be used: {error}") from error
        self.complete = chunk.last

    def _came_from(self, origin: BackupOrigin) -> None:
        if self._cluster_id and origin.cluster_id != self._cluster_id:
            raise BackupError(
                f"{self._directory} holds an unfinished backup of cluster {self._cluster_id}, and this is cluster "
                f"{origin.cluster_id}: name another directory, or remove this one"
            )
        self.origin = origin
        if origin.cluster_id != self._cluster_id:
            self._cluster_id = origin.cluster_id
            self._mark()

    def finish(self) -> None:
        """Make the directory a backup, once all chunks are written and everything is on stable storage.

        Raises BackupError, DiskError.
        """
        received = self._files.received()
        cut = [file.path for file in received if file.bytes != self._file_bytes[file.path]]
        if not self.complete or cut:
            raise BackupError("the node ended the copy before the end of its last file")
        self._files.fsync()
        self._disk.fsync_dir("")  # before the list: a rename may become durable before older changes do
        facts = {file.path: {"bytes": file.bytes, "crc32c": file.crc32c} for file in received}
        _write_json(
            self._directory, LIST_NAME, {"version": VERSION, "origin": origin_facts(self.origin), "files": facts}
        )
        self._remove(*_OWN_NAMES)

    def close(self) -> None:
        """Let another process go on with what has arrived. If that is nothing, the directory is as new."""
        self._files.pause()
        if {path.name for path in self._directory.iterdir()} <= _OWN_NAMES:
            # The lock's file stays: somebody may have opened it, and another would then lock a new one.
            self._remove(UNFINISHED_NAME)
        self._disk.unlock()

    def _mark(self) -> None:
        _write_json(self._directory, UNFINISHED_NAME, {"version": VERSION, "cluster": self._cluster_id})

    def _remove(self, *names: str) -> None:
        for name in names:
            (self._directory / name).unlink(missing_ok=True)
        fsync_directory(self._directory)


def restore_backup(
    source: Path, data_dir: Path, progress: Callable[[int, int], None], prepare: Callable[[LocalDisk], None]
) -> tuple[int, int]:
    """Copy the files into an empty directory, check them and `prepare` them there. Returns (files, bytes).

    The directory has the file UNFINISHED_RESTORE until everything is on stable storage; no node starts on it before. A
    restore that was killed starts over; one that failed leaves the directory empty. Raises BackupError, DiskFullError
    and the errors of `prepare`.
    """
    files: dict[str, dict[str, int]] = _listed(source)["files"]
    try:
        disk = _locked(data_dir)
    except DiskError as error:
        raise BackupError(f"{data_dir}: {error}") from error
    try:
        try:
            _empty(disk)
            copied = _copied(source, files, disk, progress)
        except DiskFullError:
            raise
        except DiskError as error:
            raise BackupError(f"{data_dir}: {error}") from error
        prepare(disk)
        disk.remove(UNFINISHED_RESTORE)
        disk.fsync_dir("")
    except BaseException:
        # The mark stays if this fails, too; it says so to the node and to the next restore.
        with contextlib.suppress(DiskError):
            _empty(disk)
            disk.remove(UNFINISHED_RESTORE)
        raise
    finally:
        disk.unlock()
    return copied


def _locked(data_dir: Path) -> LocalDisk:
    """A new or empty directory, or that of a restore which was interrupted, locked. Raises BackupError, DiskError."""
    try:
        in_use = (data_dir / LOCK_NAME).exists()
        if not in_use:
            _need_room_in(data_dir, {path.name for path in data_dir.iterdir()} if data_dir.exists() else set())
        made = [path for path in (data_dir, *data_dir.parents) if not path.exists()]
        disk = LocalDisk(data_dir)
        for path in made:
            fsync_directory(path.parent)
    except OSError as error:
        raise BackupError(f"{data_dir}: {error.strerror}") from error
    try:
        disk.lock()
    except DirectoryInUseError:
        raise BackupError(
            f"a node is running on {data_dir}: its data is alive and nothing was changed. To restore all the same, "
            "stop it and move the directory away, or restore on another machine"
        ) from None
    try:
        _need_room_in(data_dir, disk.list(""))
    except BaseException:
        disk.unlock()
        raise
    return disk


def _need_room_in(data_dir: Path, names: Collection[str]) -> None:
    """Raises BackupError if the directory holds anything that no restore has put there."""
    if set(names) - _OF_FILE_SYSTEM and UNFINISHED_RESTORE not in names:
        raise BackupError(f"{data_dir} is not empty: move it away first; what is there is never overwritten")


def _empty(disk: LocalDisk) -> None:
    """Mark the directory as one of an unfinished restore, and remove all else."""
    disk.open(UNFINISHED_RESTORE, create=True).close()
    disk.fsync_dir("")
    for name in set(disk.list("")) - _OF_FILE_SYSTEM - {UNFINISHED_RESTORE}:
        disk.remove(name)


def _copied(
    source: Path, files: dict[str, dict[str, int]], disk: LocalDisk, progress: Callable[[int, int], None]
) -> tuple[int, int]:
    """Copy the files and check them; durable on return. Returns (files, bytes). Raises BackupError, DiskError."""
    for path in files:
        if not in_checkpoint(path):
            raise BackupError(f"a file named {path[:100]!r} is no part of a backup")
    total = sum(item["bytes"] for item in files.values())
    done = 0
    for path, item in files.items():
        target = disk.open(path, create=True)
        crc = size = 0
        try:
            with (source / path).open("rb") as read:
                while size <= item["bytes"] and (block := read.read(BLOCK_BYTES)):  # one that grows never ends
                    target.append(block)
                    crc = google_crc32c.extend(crc, block)
                    size += len(block)
                    done += len(block)
                    progress(done, total)
            target.fsync()
        except OSError as error:
            raise BackupError(f"{source / path}: {error.strerror}") from error
        finally:
            target.close()
        if (size, crc) != (item["bytes"], item["crc32c"]):
            raise BackupError(f"{source / path} is damaged: its size or checksum is not the listed one")
    for directory in sorted({parent_of(path) for path in files}):
        disk.fsync_dir(directory)
    return len(files), total
