"""The disk port over a directory of the machine.

Owns: one directory below which every path lies, the lock on it, and open files' descriptors.
Invariants:
- A short write is continued until all is written; a write that fails half way is cut off again.
- Once `fsync_dir` of a directory has returned, the directory itself survives a crash too: its ancestors
  below the root are fsynced with it the first time.
- An error of the system reaches the caller as a DiskError that names the path and the cause.

Any thread may read and fsync a handle; appends to one handle come from one thread at a time.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from tickwheel.storage.descriptors import DescriptorReserve
from tickwheel.storage.disk import (
    LOCK_NAME,
    Buffer,
    DirectoryInUseError,
    DiskError,
    DiskFullError,
    FsyncFailedError,
    NoDescriptorError,
    parent_of,
    path_parts,
)

_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_DESCRIPTOR_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE})
_ADVICE = {
    errno.EROFS: "; mount the file system writable",
    errno.EACCES: "; a node's files belong to the user that it runs as",
    errno.EFBIG: "; raise the limit of file sizes of the process (ulimit -f, LimitFSIZE), or use another file system",
    errno.EIO: "; the disk is failing: look at the system's log (dmesg)",
}
_WRITE_PARTS_MAX = 1024
"""IOV_MAX of Linux: the most buffers for one pwritev."""

FILE_MODE, DIR_MODE = 0o600, 0o700
"""Only the user that the node runs as may read payloads."""


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _translated(error: OSError, action: str, path: str) -> DiskError:
    kind = DiskFullError if error.errno in _FULL_ERRNOS else DiskError
    if error.errno in _NO_DESCRIPTOR_ERRNOS:
        kind = NoDescriptorError
    return kind(f"cannot {action} {path!r}: {_why(error)}")


def _why(error: OSError) -> str:
    return f"{error.strerror or error}{_ADVICE.get(error.errno or 0, '')}"


class LocalFile:
    """An open file of a LocalDisk; see `storage.disk.File`."""

    def __init__(self, path: str, descriptor: int, descriptors: DescriptorReserve) -> None:
        self._path = path
        self._descriptors = descriptors
        self._descriptor = descriptor
        # Set while space is reserved beyond the end: the file is longer for the system than for us.
        self._reserved_end: int | None = None
        self._views: list[tuple[memoryview, mmap.mmap]] = []

    @property
    def path(self) -> str:
        return self._path

    def size(self) -> int:
        if self._reserved_end is not None:
            return self._reserved_end
        try:
            return os.fstat(self._open_descriptor()).st_size
        except OSError as error:
            raise _translated(error, "examine", self._path) from error

    def append(self, data: Buffer) -> int:
        return self.append_many((data,))

    def append_many(self, parts: Sequence[Buffer]) -> int:
        start = self.size()
        try:
            end = self._write(start, parts)
        except OSError as error:
            if error.errno != errno.EROFS:  # then nothing was written
                self._cut_back(start)
            raise _translated(error, "append to", self._path) from error
        if self._reserved_end is not None:
            self._reserved_end = end
        return start

    def write_at(self, offset: int, data: Buffer) -> None:
        try:
            end = self._write(offset, (data,))
        except OSError as error:
            raise _translated(error, "write to", self._path) from error
        if self._reserved_end is not None:
            self._reserved_end = max(self._reserved_end, end)

    def read_at(self, offset: int, size: int) -> bytes:
        if self._reserved_end is not None:
            size = max(0, min(size, self._reserved_end - offset))
        descriptor = self._open_descriptor()
        try:
            data = os.pread(descriptor, size, offset)
            if len(data) == size or not data:
                return data
            parts = [data]
            got = len(data)
            while got < size:
                data = os.pread(descriptor, size - got, offset + got)
                if not data:
                    break
                parts.append(data)
                got += len(data)
        except OSError as error:
            raise _translated(error, "read", self._path) from error
        return b"".join(parts)

    def truncate(self, size: int) -> None:
        try:
            os.ftruncate(self._open_descriptor(), size)
        except OSError as error:
            raise _translated(error, "truncate", self._path) from error
        self._reserved_end = None

    def preallocate(self, size: int) -> None:
        # The length known to the system grows as well: a later fdatasync then has no new length to write.
        end = self.size()
        if size <= end:
            return
        descriptor = self._open_descriptor()
        try:
            before = os.fstat(descriptor).st_size
        except OSError as error:
            raise _translated(error, "examine", self._path) from error
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            self._cut_back(before)
            raise _translated(error, "reserve space for", self._path) from error
        self._reserved_end = end

    def map(self) -> memoryview:
        size = self.size()
        if size == 0:
            return memoryview(b"")
        try:
            # It keeps a descriptor of its own.
            descriptor = self._open_descriptor()
            mapped = self._descriptors.run(lambda: mmap.mmap(descriptor, size, access=mmap.ACCESS_READ))
        except OSError as error:
            raise _translated(error, "map", self._path) from error
        view = memoryview(mapped)
        self._views.append((view, mapped))
        return view

    def fsync(self) -> None:
        try:
            os.fdatasync(self._open_descriptor())
        except OSError as error:
            raise FsyncFailedError(f"fdatasync of {self._path!r} failed: {_why(error)}") from error

    def close(self) -> None:
        if self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)
        for view, mapped in self._views:
            try:
                view.release()
                mapped.close()
            except BufferError:
                # An array still refers to the mapping, which ends with the last such array.
                continue
        self._views.clear()

    def _open_descriptor(self) -> int:
        if self._descriptor < 0:
            raise DiskError(f"file {self._path!r} is closed")
        return self._descriptor

    def _write(self, offset: int, parts: Sequence[Buffer]) -> int:
        """Write the parts one after the other from `offset` on; returns the end offset."""
        descriptor = self._open_descriptor()
        waiting = iter([memoryview(part).cast("B") for part in parts if len(part)])
        while batch := list(islice(waiting, _WRITE_PARTS_MAX)):
            while batch:
                written = os.pwritev(descriptor, batch, offset)
                offset += written
                done = 0
                while done < len(batch) and written >= len(batch[done]):
                    written -= len(batch[done])
                    done += 1
                del batch[:done]
                if written:
                    batch[0] = batch[0][written:]
        return offset

    def _cut_back(self, size: int) -> None:
        """Undo a failed write: no part of it may stay, not even in reserved space."""
        try:
            os.ftruncate(self._descriptor, size)
        except OSError as error:
            raise DiskError(f"cannot cut {self._path!r} back to {size} bytes: {error.strerror}") from error
        self._reserved_end = None


class LocalDisk:
    """A directory of the machine; see `storage.disk.Disk`.

    `space_left` leaves out `space_reserve` bytes, so that a caller that heeds it stops while there is still room to
    stop in order. `descriptors`: reserve for opening files when no other descriptor is left.
    """

    def __init__(
        self, root: str | Path, *, space_reserve: int = 0, descriptors: DescriptorReserve | None = None
    ) -> None:
        self._root = Path(root)
        self._path = str(root)
        self._descriptors = descriptors or DescriptorReserve()
        self._space_reserve_bytes = space_reserve
        self._lock_descriptor = -1
        self._anchored: set[str] = set()
        try:
            self._root.mkdir(DIR_MODE, parents=True, exist_ok=True)
        except OSError as error:
            raise _translated(error, "make the directory", str(root)) from error

    def open(self, path: str, *, create: bool = False) -> LocalFile:
        target = self._below_root(path)
        if not path:
            raise DiskError("cannot open '': it is the root")
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            if create:
                target.parent.mkdir(DIR_MODE, parents=True, exist_ok=True)
                flags |= os.O_CREAT
            descriptor = self._descriptors.run(lambda: os.open(target, flags, FILE_MODE))
            return LocalFile(path, descriptor, self._descriptors)
        except OSError as error:
            raise _translated(error, "open", path) from error

    def exists(self, path: str) -> bool:
        try:
            os.stat(self._below_root(path))  # Path.exists of Python 3.14 takes any error for an absent file
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise _translated(error, "examine", path) from error
        return True

    def size(self, path: str) -> int:
        try:
            return self._below_root(path).stat().st_size
        except OSError as error:
            raise _translated(error, "examine", path) from error

    def files(self, path: str) -> list[str]:
        def walk() -> list[str]:
            found = os.walk(self._below_root(path), onerror=_raise_unless_missing)
            return sorted(
                (Path(directory) / name).relative_to(self._root).as_posix()
                for directory, _, names in found
                for name in names
            )

        try:
            paths = self._descriptors.run_briefly(walk)
        except OSError as error:
            raise _translated(error, "list", path or self._path) from error
        return [found for found in paths if found != LOCK_NAME]

    def list(self, path: str) -> list[str]:
        try:
            names = self._descriptors.run_briefly(lambda: sorted(os.listdir(self._below_root(path))))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _translated(error, "list", path or self._path) from error
        return names if path else [name for name in names if name != LOCK_NAME]

    def make_dir(self, path: str) -> None:
        try:
            self._below_root(path).mkdir(DIR_MODE, parents=True, exist_ok=True)
        except OSError as error:
            raise _translated(error, "make the directory", path) from error

    def remove(self, path: str) -> None:
        target = self._below_root(path)
        if not path:
            raise DiskError("cannot remove '': it is the root")
        try:
            if target.is_dir() and not target.is_symlink():
                self._anchored.clear()
                self._descriptors.run_briefly(lambda: shutil.rmtree(target))
            else:
                target.unlink(missing_ok=True)
        except OSError as error:
            raise _translated(error, "remove", path) from error

    def rename(self, source: str, target: str) -> None:
        if not source or not target:
            raise DiskError("cannot rename '': it is the root")
        origin = self._below_root(source)
        try:
            if origin.is_dir():
                self._anchored.clear()
            origin.replace(self._below_root(target))
        except OSError as error:
            raise _translated(error, f"rename to {target!r}", source) from error

    def fsync_dir(self, path: str) -> None:
        self._fsync_one_dir(path)
        # A killed process may have left directories whose parents are not fsynced yet.
        while path and path not in self._anchored:
            parent = parent_of(path)
            self._fsync_one_dir(parent)
            self._anchored.add(path)
            path = parent

    def space_left(self) -> int:
        try:
            state = os.statvfs(self._root)
        except OSError as error:
            raise _translated(error, "examine", self._path) from error
        return max(0, state.f_bavail * state.f_frsize - self._space_reserve_bytes)

    def space_total(self) -> int:
        try:
            state = os.statvfs(self._root)
        except OSError as error:
            raise _translated(error, "examine", self._path) from error
        # Space reserved for the administrator does not count.
        return (state.f_blocks - state.f_bfree + state.f_bavail) * state.f_frsize

    def lock(self) -> None:
        if self._lock_descriptor >= 0:
            return
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            descriptor = self._descriptors.run(lambda: os.open(self._root / LOCK_NAME, flags, FILE_MODE))
        except OSError as error:
            raise _translated(error, "open the lock of", self._path) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise DirectoryInUseError(f"directory {self._path!r} is in use by another process") from error
        except OSError as error:
            os.close(descriptor)
            raise _translated(error, "lock", self._path) from error
        self._lock_descriptor = descriptor

    def stay(self) -> None:
        """From now on work in the directory as it is, even if it is moved or something is mounted over it. By its path,
        a node would write its next file where nobody looks for it, or among the files of another disk."""
        try:
            flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
            descriptor = self._descriptors.run(lambda: os.open(self._root, flags))
        except OSError as error:
            raise _translated(error, "open the directory", self._path) from error
        self._root = Path(f"/proc/self/fd/{descriptor}")

    def unlock(self) -> None:
        """Unlock the directory before the process ends. Idempotent."""
        if self._lock_descriptor >= 0:
            descriptor, self._lock_descriptor = self._lock_descriptor, -1
            os.close(descriptor)

    def _below_root(self, path: str) -> Path:
        return self._root.joinpath(*path_parts(path))

    def _fsync_one_dir(self, path: str) -> None:
        target = self._below_root(path)
        shown = path or self._path

        def fsync() -> None:
            descriptor = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            except OSError as error:
                raise FsyncFailedError(f"fsync of directory {shown!r} failed: {_why(error)}") from error
            finally:
                os.close(descriptor)

        try:
            self._descriptors.run_briefly(fsync)
        except OSError as error:
            raise _translated(error, "open the directory", shown) from error
