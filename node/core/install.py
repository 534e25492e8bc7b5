"""Copies a checkpoint of another member: receives it aside, checks it, then puts it in place of this node's own.

Steps, each safe to die in: chunks go to `staging/`, every file is synced, then the marker
`staging/complete` is written. Only with the marker does a start (or this process) go on: own wheel, state
and manifest are replaced by the received ones, received bundles join the own, and once that is durable the marker is
removed. Before, every step can be repeated in any state that a crash leaves. The journal is brought in line when the
node is built again (`Journal.reset_to`).

Without the marker, the files in `staging/` are what a broken copy left. Only the next try reads them, and it keeps what
the sender finds right. The node's host removes them when its log has grown without a checkpoint.

A checkpoint that is behind what this node has by now is never put in place: while it was copied, the log may have come
from another master, and the journal may already be cut above it.
"""

from __future__ import annotations

import google_crc32c

from tickwheel.node.core.checkpoint import MANIFEST_PATH, STATE_DIRECTORY, WHEEL_DIRECTORY
from tickwheel.node.state.snapshot import parts
from tickwheel.proto.peer_pb2 import CheckpointChunk, HeldFile
from tickwheel.storage.bundle import DIRECTORY
from tickwheel.storage.disk import Disk, DiskError, DiskFullError, File
from tickwheel.storage.manifest import read_manifest
from tickwheel.storage.paths import parent_of
from tickwheel.storage.whole_file import file_crc, read_whole, write_whole

STAGING = "staging"
COMPLETE = f"{STAGING}/complete"
_RECEIVED_MANIFEST = f"{STAGING}/{MANIFEST_PATH}"
_ALLOWED = (f"{WHEEL_DIRECTORY}/", f"{STATE_DIRECTORY}/", f"{DIRECTORY}/")


class CopyError(Exception):
    """The copy is not a whole checkpoint. Fetch it again."""


class CheckpointCopy:
    """Takes the chunks of one checkpoint, in order and in as many tries as that needs. `finish` makes it installable.

    A try that broke leaves its files, synced or not. The next try names them to the sender with their checksums, and
    the sender leaves out what is right. A file that differs is received anew: the receiver may have lost power, or the
    sender may have another checkpoint by then.
    """

    def __init__(self, disk: Disk) -> None:
        """Reads what an earlier process left, so it belongs in a worker. Raises DiskError."""
        self._disk = disk
        self._held: dict[str, HeldFile] = {}
        """Contents of the files below STAGING, by their paths below it."""
        self._file: File | None = None
        self._path = ""
        self._paths: dict[str, None] = {}
        """Received in this try, in order."""
        self._directories: set[str] = set()
        self.index = 0
        """Up to where it goes; known when `finish` has returned."""
        self.bytes = 0
        """Received in this try."""
        if disk.exists(COMPLETE):
            discard(disk)
        try:
            for path in disk.files(STAGING):
                name = path.removeprefix(f"{STAGING}/")
                self._held[name] = HeldFile(path=name, bytes=disk.size(path), crc32c=file_crc(disk, path))
        except DiskFullError:
            raise
        except DiskError:  # a copy is worth no more than the time that it takes
            discard(disk)
            self._held.clear()

    def begin(self) -> list[HeldFile]:
        """Begin a try; what is held of the earlier ones, the most bytes first."""
        self._end_file()
        self._path = ""
        self._paths.clear()
        self._directories.clear()
        self.bytes = 0
        held = [file for file in self._held.values() if file.bytes and file.path.startswith(_ALLOWED)]
        return sorted(held, key=lambda file: (-file.bytes, file.path))

    def take(self, chunk: CheckpointChunk) -> None:
        """One chunk. Raises CopyError, DiskError."""
        if chunk.path != MANIFEST_PATH and (not chunk.path.startswith(_ALLOWED) or ".." in chunk.path.split("/")):
            raise CopyError(f"a checkpoint does not hold a file {chunk.path!r}")
        if google_crc32c.value(chunk.data) != chunk.crc32c:
            raise CopyError(f"{chunk.path} at {chunk.offset}: checksum does not match")
        if self._path != chunk.path:
            self._end_file()
            self._begin_file(chunk)
        assert self._file is not None
        held = self._held[chunk.path]
        if held.bytes != chunk.offset:
            raise CopyError(f"{chunk.path}: chunk at {chunk.offset}, expected {held.bytes}")
        self._file.append(chunk.data)
        held.bytes += len(chunk.data)
        held.crc32c = google_crc32c.extend(held.crc32c, chunk.data)
        self.bytes += len(chunk.data)

    def _begin_file(self, chunk: CheckpointChunk) -> None:
        path = f"{STAGING}/{chunk.path}"
        self._path = chunk.path
        self._file = self._disk.open(path, create=True)
        if path in self._paths:
            return
        self._paths[path] = None
        if chunk.path != MANIFEST_PATH:  # its directory is the marker's, which is synced last
            self._directories.add(parent_of(path))
        if not chunk.offset or chunk.path not in self._held:
            self._file.truncate(0)
            self._held[chunk.path] = HeldFile(path=chunk.path)

    def _end_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def pause(self) -> None:
        """The try broke; the next one goes on with what was received."""
        self._end_file()

    def finish(self) -> None:
        """All chunks are there: sync everything and set the marker; in a worker. Raises CopyError, DiskError.

        ImpossibleStateError: it is of a version that this one must not start from; what this node has stays as it is.
        """
        self._end_file()
        if _RECEIVED_MANIFEST not in self._paths:
            raise CopyError("the checkpoint came without its manifest")
        for path in self._disk.files(STAGING):
            if path not in self._paths:  # of another checkpoint, by an earlier try
                self._disk.remove(path)
                self._directories.add(parent_of(path))
        for path in self._paths:
            file = self._disk.open(path)
            try:
                file.fsync()
            finally:
                file.close()
        for directory in sorted(self._directories):
            self._disk.fsync_dir(directory)
        manifest = read_manifest(self._disk, _RECEIVED_MANIFEST)
        assert manifest is not None, "it was received"
        parts(self._disk, manifest.state, below=f"{STAGING}/")
        self.index = manifest.applied_index
        write_whole(self._disk, COMPLETE, b"complete")

    def abandon(self) -> None:
        """Give up what was received."""
        self._end_file()
        self._held.clear()
        discard(self._disk)


def discard(disk: Disk) -> None:
    """Remove what was received; also safe to die in if it is complete."""
    if disk.exists(COMPLETE):
        # First: what the removal of the rest leaves behind must not be put in place.
        disk.remove(COMPLETE)
        disk.fsync_dir(STAGING)
    disk.remove(STAGING)


def install_if_complete(disk: Disk) -> bool:
    """Put a completely received checkpoint in place; also finishes an installation that was interrupted.

    An incomplete one stays: if this node still needs a checkpoint, the copy resumes.
    """
    if read_whole(disk, COMPLETE) is None:
        return False
    manifest = _RECEIVED_MANIFEST
    if _is_behind(disk):
        discard(disk)
        return False
    for directory in (WHEEL_DIRECTORY, STATE_DIRECTORY):
        source = f"{STAGING}/{directory}"
        if disk.exists(source):
            disk.remove(directory)
            disk.rename(source, directory)
        elif disk.exists(manifest):
            # Either already moved by an interrupted installation, or the checkpoint has none.
            disk.make_dir(directory)
    # Bundles never change: those that are here already stay, and so do others, which the log may still claim.
    for name in disk.list(f"{STAGING}/{DIRECTORY}"):
        disk.make_dir(DIRECTORY)
        disk.rename(f"{STAGING}/{DIRECTORY}/{name}", f"{DIRECTORY}/{name}")
    if disk.exists(DIRECTORY):
        disk.fsync_dir(DIRECTORY)
    if disk.exists(manifest):
        disk.rename(manifest, MANIFEST_PATH)
    disk.fsync_dir("")
    if read_manifest(disk) is None:
        raise DiskError(f"{MANIFEST_PATH}: missing after a checkpoint was installed; fetch it again")
    disk.remove(STAGING)
    return True


def _is_behind(disk: Disk) -> bool:
    """Whether the own manifest is further than the one received; once that is in place there is none received."""
    received, own = read_manifest(disk, _RECEIVED_MANIFEST), read_manifest(disk)
    return received is not None and own is not None and received.applied_index < own.applied_index
