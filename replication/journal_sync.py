"""One sync of the journal, as work for an executor, and the space reserved ahead of it.

`SyncWork` touches only what the loop leaves alone meanwhile: syncs of files that it may go on
appending to, the removal of segments that it has let go, and the file of the next segment, which
the loop takes up in `Journal.finish_sync`.
"""

from __future__ import annotations

from tickwheel.storage.disk import Disk, DiskError, DiskFullError, File, SyncFailedError


class SyncWork:
    """One group commit: what was written before `begin_sync` goes to stable storage. Made by the journal."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        files: list[File],
        *,
        sync_dir: bool,
        last_index: int,
        position: int,
        doomed: list[str],
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._files = files
        self._sync_dir = sync_dir
        self._doomed = doomed
        self.last_index = last_index
        self.position = position
        self.reserve_path = ""
        self.reserve_bytes = 0
        self.reserve: File | None = None
        self.done = False
        self.error: SyncFailedError | None = None

    def run(self) -> None:
        """In any thread. Raises SyncFailedError; hand the work to `finish_sync` all the same."""
        try:
            for file in self._files:
                file.sync()
            if self._sync_dir:
                self._disk.sync_dir(self._directory)
            # The oldest first, and no sync of the directory: what a power loss brings back is the end of what was
            # removed, in front of what is held, and a start reads it again (the checkpoint covers it). Should a file
            # system keep a later removal and lose an earlier one (ext4, XFS and Btrfs do not), there is a gap, and
            # the start is refused: nothing wrong is ever read.
            for path in self._doomed:
                self._disk.remove(path)
            if self.reserve_path:
                self.reserve = reserved_file(self._disk, self.reserve_path, self.reserve_bytes)
        except SyncFailedError as error:
            self.error = error
            raise
        except DiskError as error:
            self.error = SyncFailedError(str(error))
            raise self.error from error
        self.done = True


def reserved_file(disk: Disk, path: str, size: int) -> File | None:
    """A new file with its space reserved, or None if there is no room for it, or not even for its name."""
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
