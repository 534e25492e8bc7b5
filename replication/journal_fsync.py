"""One fsync of the journal as work for an executor, and the reservation of the next segment.

`FsyncWork` runs beside the loop, which may keep appending to the files meanwhile. It fsyncs those files, removes
segments that the loop no longer uses, and creates the file of the next segment for `Journal.finish_fsync` to take.
"""

from __future__ import annotations

from tickwheel.storage.disk import Disk, DiskError, DiskFullError, File, FsyncFailedError


class FsyncWork:
    """One group commit of everything written before `Journal.begin_fsync`, which creates it."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        files: list[File],
        *,
        fsync_dir: bool,
        last_index: int,
        position: int,
        doomed: list[str],
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._files = files
        self._fsync_dir = fsync_dir
        self._doomed = doomed
        self.last_index = last_index
        self.position = position
        self.reserve_path = ""
        self.reserve_bytes = 0
        self.reserve: File | None = None
        self.done = False
        self.error: FsyncFailedError | None = None

    def run(self) -> None:
        """Run in any thread. Raises FsyncFailedError; `finish_fsync` must be called with the work all the same."""
        try:
            for file in self._files:
                file.fsync()
            if self._fsync_dir:
                self._disk.fsync_dir(self._directory)
            # The oldest first, and without an fsync of the directory. A power loss can then bring back only the newest
            # of the removed segments, in front of those still held. A start reads them again, which is harmless: the
            # checkpoint covers them. A file system that kept a later removal but lost an earlier one (ext4, XFS and
            # Btrfs do not) would leave a gap; the start is then refused, so wrong entries are never read.
            for path in self._doomed:
                self._disk.remove(path)
            if self.reserve_path:
                self.reserve = reserved_file(self._disk, self.reserve_path, self.reserve_bytes)
        except FsyncFailedError as error:
            self.error = error
            raise
        except DiskError as error:
            self.error = FsyncFailedError(str(error))
            raise self.error from error
        self.done = True


def reserved_file(disk: Disk, path: str, size: int) -> File | None:
    """A new file with its space reserved; None if the disk has no room for the space or the directory entry."""
    try:
        file = disk.open(path, create=True)
    except DiskFullError:
        return None
    try:
        file.truncate(0)
        file.preallocate(size)
    except DiskFullError:
        file.close()
        disk.remove(path)
        return None
    return file
