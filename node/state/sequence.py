"""An append-only list of equal records, numbered from 0: buffered in memory, written in large pieces to files.

What the ready queues, their tick indexes and dead letters are made of. It lies in files of SEGMENT_BYTES each
(`<path>.0`, `<path>.1`, ...), laid out in blocks with checksums (storage/blocks.py), so that its head can go.

Invariants:
- A record never changes; its number says in which file it lies, and where. The files hold a prefix of the
  sequence (without what was dropped), the buffer at least the rest from the start of a block on, and of the
  prefix the newest `keep` records.
- `crc` is the CRC32C of all records' bytes from the first on, dropped ones included, whatever has been written. It is
  computed when it is read, or before records leave the memory.
- Between `begin_flush` and `finish_flush` only the flush writes to files.
- Writing cuts a file to where it goes on, so it can be repeated; after a restart replay regrows the same bytes.
- What `drop_below` drops is never read again; its files go once no checkpoint names them.

Files are opened for each piece and closed again: thousands of topics hold no descriptors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from tickwheel.node.state.results import ImpossibleStateError
from tickwheel.proto.log_pb2 import ManifestFile
from tickwheel.proto.state_pb2 import SequenceSnapshot
from tickwheel.storage.blocks import BLOCK_BYTES, BlockLayout
from tickwheel.storage.disk import Disk, DiskFullError
from tickwheel.storage.errors import ADVICE, CorruptFileError

Records = NDArray[Any]

SEGMENT_BYTES = 16 << 20
"""Bytes of one file: two million ids. A multiple of a block; part of the format."""
KEEP_BYTES = 8 << 20
"""Bytes of the newest records kept in memory: a million ids, as many as the default window of a group."""
PIECE_BYTES = 1 << 20
"""A write starts when this many bytes have gathered."""
CAPACITY_LEAST = 256


class _Piece(NamedTuple):
    path: str
    offset: int
    data: bytes

    def write(self, disk: Disk) -> None:
        file = disk.open(self.path, create=True)
        try:
            if file.size() > self.offset:
                file.truncate(self.offset)
            if file.size() < self.offset:
                raise CorruptFileError(self.path, file.size(), f"{self.offset} bytes of it were written", ADVICE)
            file.append(self.data)
        finally:
            file.close()


class Flush:
    """The write and sync that a worker does; made by `begin_flush`."""

    def __init__(self, disk: Disk, pieces: list[_Piece], to_sync: list[str]) -> None:
        self._disk = disk
        self._pieces = pieces
        self.paths = to_sync

    def run(self) -> None:
        """Write the rest and sync. Any thread may call it. Raises DiskError."""
        for piece in self._pieces:
            piece.write(self._disk)
        for path in self.paths:
            file = self._disk.open(path)
            try:
                file.fsync()
            finally:
                file.close()


class Sequence:
    def __init__(
        self,
        disk: Disk,
        path: str,
        dtype: np.dtype[Any],
        restored: SequenceSnapshot | None = None,
        *,
        keep_bytes: int | None = None,
    ) -> None:
        """`restored`: from the checkpoint. Raises CorruptFileError if the files are shorter or hold other bytes."""
        snapshot = restored or SequenceSnapshot()
        self._disk = disk
        self.path = path
        self._dtype = dtype
        self._size = dtype.itemsize
        self._layout = BlockLayout(self._size)
        self._per_file = self._layout.per_block * (SEGMENT_BYTES // BLOCK_BYTES)
        self._keep = (KEEP_BYTES if keep_bytes is None else keep_bytes) // self._size
        self.count = snapshot.count
        self._crc, self._summed = snapshot.crc32c, self.count
        """`crc` of the records below this number."""
        self.first = snapshot.first
        """Records below this number were dropped."""
        self._first_file = self.first // self._per_file
        self._written = self._synced = self.count
        self._retry_at = 0
        self._flushing: int | None = None
        self._first = self._layout.start_of_block(self.count)
        """Number of the first record in the buffer."""
        self._buffer: Records = np.empty(CAPACITY_LEAST, dtype)
        for file in self.files():
            found = disk.size(file.path) if disk.exists(file.path) else 0
            if found < file.bytes:
                raise CorruptFileError(file.path, found, f"the checkpoint counts {file.bytes} bytes of it", ADVICE)
        self._check_blocks()
        if self._first < self.count:
            self._restore_tail(snapshot.tail_crc32c)

    def _check_blocks(self) -> None:
        """Check every full block once: damage must stop a start, not the running node later. A gigabyte, 130 million
        ids, takes about a second."""
        for file in self.files():
            blocks = file.bytes // BLOCK_BYTES
            if not blocks:
                continue
            opened = self._disk.open(file.path)
            step = max(1, PIECE_BYTES // BLOCK_BYTES)
            try:
                for at in range(0, blocks, step):
                    self._layout.check(opened, at, min(blocks, at + step))
            finally:
                opened.close()

    def _restore_tail(self, crc: int) -> None:
        number, inside = divmod(self._first, self._per_file)
        path = self._path(number)
        file = self._disk.open(path)
        try:
            data = file.read_at(self._layout.offset(inside), (self.count - self._first) * self._size)
        finally:
            file.close()
        if google_crc32c.value(data) != crc:
            raise CorruptFileError(path, self._layout.offset(inside), "its last block is not the checkpoint's", ADVICE)
        tail = np.frombuffer(data, self._dtype)
        self._buffer = np.empty(max(CAPACITY_LEAST, 2 * len(tail)), self._dtype)
        self._buffer[: len(tail)] = tail

    def _path(self, number: int) -> str:
        return f"{self.path}.{number}"

    def append(self, records: Records) -> int:
        """Append records; returns the number of the first. Never fails: a full disk shows at the flush."""
        first, added = self.count, len(records)
        self._make_room(added)
        self._buffer[first - self._first : first - self._first + added] = records
        self._took(added)
        return first

    def append_one(self, record: object) -> int:
        """`append` of a single record (a tuple, if it has fields): a quarter of the cost of an array of it."""
        first = self.count
        if first - self._first >= len(self._buffer):
            self._make_room(1)
        self._buffer[first - self._first] = record
        self._took(1)
        return first

    @property
    def crc(self) -> int:
        """CRC32C of all records so far."""
        self._sum()
        return self._crc

    def _sum(self) -> None:
        if self._summed < self.count:
            data = self._buffer[self._summed - self._first : self.count - self._first].tobytes()
            self._crc, self._summed = google_crc32c.extend(self._crc, data), self.count

    def _took(self, added: int) -> None:
        self.count += added
        unwritten = self.count - max(self._written, self._retry_at)
        if self._flushing is None and unwritten * self._size >= PIECE_BYTES:
            self._write()

    def _make_room(self, added: int) -> None:
        used = self.count - self._first
        if used + added <= len(self._buffer):
            return
        self._sum()
        written = self._layout.start_of_block(self._written)
        drop = max(0, min(written, self.count - self._keep) - self._first)
        wanted = used - drop + added
        capacity = len(self._buffer)
        while capacity < 2 * wanted and capacity < 2 * self._keep:
            capacity *= 2
        buffer = np.empty(max(capacity, wanted), self._dtype)
        buffer[: used - drop] = self._buffer[drop:used]
        self._buffer = buffer
        self._first += drop

    def _write(self) -> None:
        self._sum()
        try:
            for piece in self._pieces():
                piece.write(self._disk)
        except DiskFullError:
            # The records are still in memory; the checkpoint will report the full disk.
            self._retry_at = self.count
            return
        self._written = self.count

    def _pieces(self) -> Iterator[_Piece]:
        """Pieces not yet written, file by file."""
        at = self._written
        while at < self.count:
            number = at // self._per_file
            base = number * self._per_file
            end = min(self.count, base + self._per_file)
            start = self._layout.start_of_block(at)
            data = self._buffer[start - self._first : end - self._first].tobytes()
            encoded = self._layout.encode(start - base, at - base, data)
            yield _Piece(self._path(number), self._layout.offset(at - base), encoded)
            at = end

    def read(self, first: int, count: int) -> Records:
        """Records `first` to `first + count - 1` (fewer at the end). A view or a copy: do not write to it."""
        last = min(first + count, self.count)
        if first >= last:
            return self._buffer[:0]
        if first >= self._first:
            return self._buffer[first - self._first : last - self._first]
        if first < self.first:
            raise ImpossibleStateError(f"{self.path}: record {first} was asked for, those below {self.first} are gone")
        parts = [np.frombuffer(data, self._dtype) for data in self._read_files(first, min(last, self._first))]
        if last > self._first:
            parts.append(self._buffer[: last - self._first])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def held(self) -> tuple[int, Records]:
        """(number of the first record in memory, all records from there on). Do not write to them."""
        first = max(self._first, self.first)
        return first, self._buffer[first - self._first : self.count - self._first]

    def _read_files(self, first: int, last: int) -> Iterator[bytes]:
        while first < last:
            number = first // self._per_file
            base = number * self._per_file
            end = min(last, base + self._per_file)
            file = self._disk.open(self._path(number))
            try:
                yield self._layout.read(file, first - base, end - base)
            finally:
                file.close()
            first = end

    def gather(self, numbers: NDArray[np.int64]) -> Records:
        """Records with these numbers, all below `count`."""
        if len(numbers) == 1 and int(numbers[0]) >= self._first:
            return self._buffer[numbers - self._first]  # the usual case over many topics, at a third of the cost
        if not len(numbers):
            return self._buffer[:0]
        least, most = int(numbers.min()), int(numbers.max())
        if least >= self._first:
            return self._buffer[numbers - self._first]
        if most - least < self._keep:
            return self.read(least, most - least + 1)[numbers - least]
        order = np.argsort(numbers, kind="stable")
        ordered = numbers[order]
        found = np.empty(len(numbers), self._dtype)
        cuts = [0, *(np.flatnonzero(np.diff(ordered) > PIECE_BYTES // self._size) + 1).tolist(), len(ordered)]
        for start, end in itertools.pairwise(cuts):
            low = int(ordered[start])
            found[order[start:end]] = self.read(low, int(ordered[end - 1]) - low + 1)[ordered[start:end] - low]
        return found

    # -- the head

    def drop_below(self, first: int) -> None:
        """Records below are no longer needed; files that hold only such records go with the next durable checkpoint."""
        self.first = max(self.first, first)
        floor = self.first // self._per_file * self._per_file
        self._written, self._synced = max(self._written, floor), max(self._synced, floor)

    def dropped_paths(self) -> list[str]:
        """Files that hold only dropped records. Remove them once no checkpoint names them, then call
        `forget_dropped`."""
        return [self._path(number) for number in range(self._first_file, self.first // self._per_file)]

    def forget_dropped(self, count: int) -> None:
        """Forget the first `count` of the dropped files: they are removed, or will be."""
        self._first_file += count

    # -- checkpoints

    def files(self) -> list[ManifestFile]:
        """The files that hold the current records, with their lengths as after a flush."""
        if not self.count:
            return []
        last, inside = divmod(self.count, self._per_file)
        whole = self._layout.offset(self._per_file)
        found = [
            ManifestFile(path=self._path(number), bytes=whole) for number in range(self.first // self._per_file, last)
        ]
        if inside:
            found.append(ManifestFile(path=self._path(last), bytes=self._layout.offset(inside)))
        return found

    def paths(self) -> list[str]:
        """Every file that may exist."""
        return [self._path(number) for number in range(self._first_file, self.count // self._per_file + 1)]

    def snapshot(self) -> SequenceSnapshot:
        """A snapshot for the constructor's `restored`."""
        if not self.count:
            return SequenceSnapshot()
        tail = self._buffer[self._layout.start_of_block(self.count) - self._first : self.count - self._first]
        return SequenceSnapshot(
            count=self.count, crc32c=self.crc, first=self.first, tail_crc32c=google_crc32c.value(tail.tobytes())
        )

    def needs_flush(self) -> bool:
        """Whether some records are not known to be on stable storage."""
        return self._synced < self.count

    def begin_flush(self) -> Flush:
        """A flush of all records so far; one at a time."""
        if self._flushing is not None:
            raise ImpossibleStateError(f"{self.path}: a second flush was begun before the first ended")
        self._flushing = self.count
        numbers = range(self._synced // self._per_file, -(-self.count // self._per_file))
        return Flush(self._disk, list(self._pieces()), [self._path(number) for number in numbers])

    def finish_flush(self, ran: bool) -> None:
        """The flush has ended. `ran` False: it failed (the disk was full), so its records are written again."""
        if self._flushing is None:
            return
        if ran:
            self._written, self._synced = max(self._written, self._flushing), max(self._synced, self._flushing)
            self._retry_at = 0
        self._flushing = None
