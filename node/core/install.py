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

from tickwheel.node.core.checkpoint import MANIFEST_PATH, STATE_DIRECTORY, WHEEL_DIRECTORY, in_checkpoint
from tickwheel.node.state.snapshot import parts
from tickwheel.proto.common_pb2 import HeldFile
from tickwheel.proto.peer_pb2 import CheckpointChunk
from tickwheel.storage.bundle import DIRECTORY
from tickwheel.storage.disk import Disk, DiskError, DiskFullError
from tickwheel.storage.manifest import read_manifest
from tickwheel.storage.partial_copy import CopyError, PartialCopy
from tickwheel.storage.whole_file import read_whole, write_whole

STAGING = "staging"
COMPLETE = f"{STAGING}/complete"
_RECEIVED_MANIFEST = f"{STAGING}/{MANIFEST_PATH}"


class CheckpointCopy:
    """Takes the chunks of one checkpoint, in order, in as many tries as that needs. `finish` makes it installable."""

    def __init__(self, disk: Disk) -> None:
        """Reads what an earlier process left, so it belongs in a worker. Raises DiskError."""
        self._disk = disk
        self.index = 0
        """Up to where it goes; known when `finish` has returned."""
        if disk.exists(COMPLETE):
            discard(disk)
        try:
            self._files = PartialCopy(disk, STAGING, in_checkpoint)
        except DiskFullError:
            raise
        except DiskError:  # a copy is worth no more than the time that it takes
            discard(disk)
            self._files = PartialCopy(disk, STAGING, in_checkpoint)

    def begin(self) -> list[HeldFile]:
        """Begin a try; what is held of the earlier ones, the most bytes first."""
        return self._files.begin()

    def take(self, chunk: CheckpointChunk) -> None:
        """One chunk. Raises CopyError, DiskError."""
        self._files.take(chunk.path, chunk.offset, chunk.data, chunk.crc32c)

    def pause(self) -> None:
        """The try broke; the next one goes on with what was received."""
        self._files.pause()

    def finish(self) -> None:
        """All chunks are there: sync everything and set the marker; in a worker. Raises CopyError, DiskError.

        ImpossibleStateError: it is of a version that this one must not start from; what this node has stays as it is.
        """
        if MANIFEST_PATH not in (file.path for file in self._files.received()):
            raise CopyError("the checkpoint came without its manifest")
        self._files.fsync()
        manifest = read_manifest(self._disk, _RECEIVED_MANIFEST)
        assert manifest is not None, "it was received"
        parts(self._disk, manifest.state, below=f"{STAGING}/")
        self.index = manifest.applied_index
        write_whole(self._disk, COMPLETE, b"complete")

    def abandon(self) -> None:
        """Give up what was received."""
        self._files.pause()
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
