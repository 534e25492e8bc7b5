"""Copying a checkpoint of another member: received aside, checked, then put in place of one's own.

Steps, each safe to die in: chunks go to `staging/`, every file is synced, then the marker
`staging/complete` is written. Only with the marker does a start (or this process) go on: own wheel, state
and manifest are replaced by the staged ones, staged bundles join the own, and once that is durable the marker is
removed. Before, every step can be repeated in any state that a crash leaves. The journal is brought in line when the
node is built again (`Journal.reset_to`).

A checkpoint that is behind what this node has by now is never put in place: while it was copied, the log may have come
from another master, and the journal may already be cut above it.
"""

from __future__ import annotations

import google_crc32c

from tickwheel.node.core.checkpoint import MANIFEST_PATH, STATE_DIRECTORY, WHEEL_DIRECTORY
from tickwheel.node.state.snapshot import parts
from tickwheel.proto.peer_pb2 import CheckpointChunk
from tickwheel.storage.bundle import DIRECTORY
from tickwheel.storage.disk import Disk, DiskError, File
from tickwheel.storage.manifest import read_manifest
from tickwheel.storage.whole_file import read_whole, write_whole

STAGING = "staging"
COMPLETE = f"{STAGING}/complete"
_STAGED_MANIFEST = f"{STAGING}/{MANIFEST_PATH}"
_ALLOWED = (f"{WHEEL_DIRECTORY}/", f"{STATE_DIRECTORY}/", f"{DIRECTORY}/")


class CopyError(Exception):
    """What arrived is not a whole checkpoint; fetch it again."""


class CheckpointCopy:
    """Takes the chunks of one checkpoint, in order. `finish` makes it installable."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._file: File | None = None
        self._path = ""
        self._paths: list[str] = []
        self._directories: set[str] = set()
        self._manifest_seen = False
        self.index = 0
        """Up to where it goes; known when `finish` has returned."""
        self.bytes = 0
        disk.remove(STAGING)

    def take(self, chunk: CheckpointChunk) -> None:
        """One chunk. Raises CopyError, DiskError."""
        if chunk.path != MANIFEST_PATH and (not chunk.path.startswith(_ALLOWED) or ".." in chunk.path.split("/")):
            raise CopyError(f"a checkpoint does not hold a file {chunk.path!r}")
        if google_crc32c.value(chunk.data) != chunk.crc32c:
            raise CopyError(f"{chunk.path} at {chunk.offset}: checksum does not match")
        if self._path != chunk.path:
            self._end_file()
            self._path = chunk.path
            self._paths.append(f"{STAGING}/{chunk.path}")
            self._file = self._disk.open(self._paths[-1], create=True)
            if chunk.path != MANIFEST_PATH:  # its directory is the marker's, which is synced last
                self._directories.add(f"{STAGING}/{chunk.path}".rpartition("/")[0])
            self._manifest_seen = self._manifest_seen or chunk.path == MANIFEST_PATH
        assert self._file is not None
        if self._file.size() != chunk.offset:
            raise CopyError(f"{chunk.path}: chunk at {chunk.offset}, expected {self._file.size()}")
        self._file.append(chunk.data)
        self.bytes += len(chunk.data)

    def _end_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def finish(self) -> None:
        """All chunks are there: sync everything and set the marker; in a worker. Raises CopyError, DiskError.

        ImpossibleStateError: it is of a version that this one must not start from; what this node has stays as it is.
        """
        self._end_file()
        if not self._manifest_seen:
            raise CopyError("the checkpoint came without its manifest")
        for path in self._paths:
            file = self._disk.open(path)
            try:
                file.sync()
            finally:
                file.close()
        for directory in sorted(self._directories):
            self._disk.sync_dir(directory)
        manifest = read_manifest(self._disk, _STAGED_MANIFEST)
        assert manifest is not None, "it was received"
        parts(self._disk, manifest.state, below=f"{STAGING}/")
        self.index = manifest.applied_index
        write_whole(self._disk, COMPLETE, b"complete")

    def abandon(self) -> None:
        """Give up what was received."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._disk.remove(STAGING)


def install_if_complete(disk: Disk) -> bool:
    """Put a completely received checkpoint in place; also finishes an installation that was interrupted."""
    if read_whole(disk, COMPLETE) is None:
        if disk.exists(STAGING):
            disk.remove(STAGING)
        return False
    staged = _STAGED_MANIFEST
    if _is_behind(disk):
        disk.remove(STAGING)
        return False
    for directory in (WHEEL_DIRECTORY, STATE_DIRECTORY):
        source = f"{STAGING}/{directory}"
        if disk.exists(source):
            disk.remove(directory)
            disk.rename(source, directory)
        elif disk.exists(staged):
            # Either already moved by an interrupted installation, or the checkpoint has none.
            disk.make_dir(directory)
    # Bundles never change: those that are here already stay, and so do others, which the log may still claim.
    for name in disk.list(f"{STAGING}/{DIRECTORY}"):
        disk.make_dir(DIRECTORY)
        disk.rename(f"{STAGING}/{DIRECTORY}/{name}", f"{DIRECTORY}/{name}")
    if disk.exists(DIRECTORY):
        disk.sync_dir(DIRECTORY)
    if disk.exists(staged):
        disk.rename(staged, MANIFEST_PATH)
    disk.sync_dir("")
    if read_manifest(disk) is None:
        raise DiskError(f"{MANIFEST_PATH}: missing after a checkpoint was installed; fetch it again")
    disk.remove(STAGING)
    return True


def _is_behind(disk: Disk) -> bool:
    """Whether the own manifest is further than the one received; once that is in place there is none received."""
    received, own = read_manifest(disk, _STAGED_MANIFEST), read_manifest(disk)
    return received is not None and own is not None and received.applied_index < own.applied_index
