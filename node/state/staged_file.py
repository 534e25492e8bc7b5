"""The file that holds what one job has staged: blocks of bytes, one behind the other, written once.

Invariants:
- A block never changes; its offset is given by the log alone. The file holds whole blocks, the rest is in memory: at
  most PIECE_BYTES and one block, unless the disk is full (then the node takes nothing more on before long).
- Writing cuts the file to where it goes on: replay after a restart regrows the same bytes over what a crash left.
- A checkpoint writes what is in memory on the loop, before a worker syncs: the worker only ever syncs.

Called by `staging.py` alone. Blocks carry no checksum of their own: who reads one compares the CRC32C it kept.
"""

from __future__ import annotations

from tickwheel.proto.log_pb2 import ManifestFile
from tickwheel.storage.disk import Disk, DiskFullError
from tickwheel.storage.errors import ADVICE, CorruptFileError

PIECE_BYTES = 1 << 20
"""A write starts when this many bytes have gathered."""


class StagedSync:
    """Brings the bytes written so far to stable storage; made by `begin_fsync`."""

    def __init__(self, disk: Disk, path: str, bytes_wanted: int, bytes_written: int) -> None:
        self._disk = disk
        self.path = path
        self.bytes = bytes_wanted
        self._written = bytes_written

    def run(self) -> None:
        """Sync. Any thread may call it. Raises DiskError."""
        if self._written < self.bytes:
            raise DiskFullError(f"{self.path}: {self.bytes - self._written} bytes of it found no room")
        file = self._disk.open(self.path)
        try:
            file.fsync()
        finally:
            file.close()


class StagedFile:
    def __init__(self, disk: Disk, path: str, size: int = 0) -> None:
        """`size`: from the checkpoint. Raises CorruptFileError if the file is shorter."""
        self._disk = disk
        self.path = path
        self.bytes = size
        """Bytes of all blocks."""
        self._written = self._synced = size
        self._retry_at = 0
        self._tail: list[bytes] = []
        if size:
            found = disk.size(path) if disk.exists(path) else 0
            if found < size:
                raise CorruptFileError(path, found, f"the checkpoint counts {size} bytes of it", ADVICE)

    def append(self, block: bytes) -> int:
        """Add a block; returns its offset. Never fails: a full disk shows at the checkpoint."""
        offset = self.bytes
        self._tail.append(block)
        self.bytes += len(block)
        if self.bytes - max(self._written, self._retry_at) >= PIECE_BYTES:
            self._write()
        return offset

    def _write(self) -> None:
        if not self._tail:
            return
        try:
            file = self._disk.open(self.path, create=True)
            try:
                if file.size() > self._written:
                    file.truncate(self._written)
                if file.size() < self._written:
                    raise CorruptFileError(self.path, file.size(), f"{self._written} bytes of it were written", ADVICE)
                file.append_many(self._tail)
            finally:
                file.close()
        except DiskFullError:
            # The blocks are still in memory; the checkpoint will report the full disk.
            self._retry_at = self.bytes
            return
        self._written = self.bytes
        self._tail = []

    def read(self, offset: int, size: int) -> bytes:
        """Read one block."""
        if offset >= self._written:
            at = self._written
            for block in self._tail:
                if at == offset:
                    return block
                at += len(block)
            return b""
        file = self._disk.open(self.path)
        try:
            return file.read_at(offset, size)
        finally:
            file.close()

    # -- checkpoints

    def manifest_file(self) -> ManifestFile:
        """The file as it will be after a sync."""
        return ManifestFile(path=self.path, bytes=self.bytes)

    def needs_fsync(self) -> bool:
        """Whether some bytes are not known to be on stable storage."""
        return self._synced < self.bytes

    def begin_fsync(self) -> StagedSync:
        """Write the bytes in memory; returns the sync that a worker must run."""
        self._write()
        return StagedSync(self._disk, self.path, self.bytes, self._written)

    def finish_fsync(self, sync: StagedSync) -> None:
        """The sync ran without an error."""
        self._synced = max(self._synced, sync.bytes)
