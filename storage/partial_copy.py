"""Files that arrive from another machine in chunks, in as many tries as that takes.

A broken try leaves its files, fsynced or not. The next try names them with their checksums, and the sender leaves out
those that match. A file that differs is received again from its beginning: the receiver may have lost power, or the
sender may have another version by then. So a file never mixes bytes of two versions unchecked.

What the files mean, and when they take effect, is the owner's business: a checkpoint that is installed, or a backup.
One thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import google_crc32c

from tickwheel.proto.common_pb2 import HeldFile
from tickwheel.storage.disk import Disk, File, parent_of
from tickwheel.storage.whole_file import file_crc


class CopyError(Exception):
    """Other data arrived than was asked for; the text is for people."""


class PartialCopy:
    """The files below one directory of a disk that are being received."""

    def __init__(
        self,
        disk: Disk,
        root: str,
        belongs: Callable[[str], bool],
        read: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Reads what an earlier process left below `root`; "" is the whole disk. Raises DiskError.

        `belongs`: whether a path below `root` may be received; other files there are left alone. `read` is called with
        the size of each file that has been read.
        """
        self._disk = disk
        self._below = f"{root}/" if root else ""
        self._belongs = belongs
        self._held: dict[str, HeldFile] = {}
        self._file: File | None = None
        self._path = ""
        self._paths: dict[str, None] = {}
        """Received in this try, in order."""
        self.bytes = 0
        """Received in this try,"""
        self.whole_bytes = 0
        """and together with what the sender left out of the same files."""
        for path in disk.files(root):
            name = path.removeprefix(self._below)
            if belongs(name):
                self._held[name] = HeldFile(path=name, bytes=disk.size(path), crc32c=file_crc(disk, path))
                read(self._held[name].bytes)

    @property
    def held_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self._held.values())

    def begin(self) -> list[HeldFile]:
        """Begin a try. Returns what is held of the earlier ones, the most bytes first."""
        self.pause()
        self._path = ""
        self._paths.clear()
        self.bytes = self.whole_bytes = 0
        return sorted((file for file in self._held.values() if file.bytes), key=lambda file: (-file.bytes, file.path))

    def take(self, path: str, offset: int, data: bytes, crc32c: int) -> None:
        """One chunk of a file. Raises CopyError, DiskError."""
        if not self._belongs(path):
            raise CopyError(f"a checkpoint does not hold a file {path!r}")
        if google_crc32c.value(data) != crc32c:
            raise CopyError(f"{path} at {offset}: checksum does not match")
        if self._path != path:
            self._begin_file(path, offset)
        assert self._file is not None
        held = self._held[path]
        if held.bytes != offset:
            raise CopyError(f"{path}: chunk at {offset}, expected {held.bytes}")
        self._file.append(data)
        held.bytes += len(data)
        held.crc32c = google_crc32c.extend(held.crc32c, data)
        self.bytes += len(data)
        self.whole_bytes += len(data)

    def _begin_file(self, path: str, offset: int) -> None:
        self.pause()
        self._file = self._disk.open(self._below + path, create=True)
        self._path = path
        if path in self._paths:
            return
        self._paths[path] = None
        if not offset or path not in self._held:
            self._file.truncate(0)
            self._held[path] = HeldFile(path=path)
        self.whole_bytes += self._held[path].bytes

    def pause(self) -> None:
        """The try has broken, or ended; the next one goes on with what was received."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def received(self) -> list[HeldFile]:
        """The files that this try has named, in their order, whether they are whole or not."""
        return [self._held[path] for path in self._paths]

    def fsync(self) -> None:
        """Make the files that this try has named durable, and remove the others: they are of another version.

        The directory itself is left to the owner, who marks it then. Raises DiskError.
        """
        self.pause()
        others = [name for name in self._held if name not in self._paths]
        for name in others:
            self._disk.remove(self._below + name)
            del self._held[name]
        for name in self._paths:
            file = self._disk.open(self._below + name)
            try:
                file.fsync()
            finally:
                file.close()
        for directory in sorted({parent_of(name) for name in (*self._paths, *others)} - {""}):
            self._disk.fsync_dir(self._below + directory)
