"""An append-only file of equal records, numbered from 0: buffered in memory, written in large pieces.

What the ready queues, their tick indexes and dead letters are made of.

Invariants:
- A record never changes; record n lies at n * itemsize. The file holds a prefix of the sequence, the
  buffer at least the rest, and of the prefix the newest `keep` records.
- `crc` is the CRC32C of all records' bytes from the first on, whatever has been written.
- Between `begin_flush` and `finish_flush` only the flush writes to the file.
- After a restart the file is cut to the checkpoint's length; replay regrows it to the same bytes.

Files are opened for each piece and closed again: thousands of topics hold no descriptors.
"""

from __future__ import annotations

import itertools
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from tickwheel.node.state.results import ImpossibleStateError
from tickwheel.storage.disk import Disk

Records = NDArray[Any]

KEEP_BYTES = 8 << 20
"""Newest records kept in memory: a million ids, as large as the default window of a group."""
PIECE_BYTES = 1 << 20
"""Written at once when so much has gathered."""
CAPACITY_LEAST = 256


class Flush:
    """What a worker writes and syncs; made by `begin_flush`."""

    def __init__(self, disk: Disk, path: str, data: bytes, bytes_after: int) -> None:
        self._disk = disk
        self.path = path
        self._data = data
        self.bytes_after = bytes_after

    def run(self) -> None:
        """Write the rest and sync; any thread. Raises DiskError."""
        file = self._disk.open(self.path, create=True)
        try:
            if self._data:
                file.append(self._data)
            file.sync()
        finally:
            file.close()


class Sequence:
    """See the module."""

    def __init__(self, disk: Disk, path: str, dtype: np.dtype[Any], *, count: int = 0, crc: int = 0) -> None:
        """`count` and `crc` as of the checkpoint (0, 0: new; a file left from before is emptied)."""
        self._disk = disk
        self.path = path
        self._dtype = dtype
        self._size = dtype.itemsize
        self._keep = KEEP_BYTES // self._size
        self._buffer: Records = np.empty(CAPACITY_LEAST, dtype)
        self._first = count
        """Number of the first record in the buffer."""
        self.count = count
        self.crc = crc
        self._written = count
        self._synced = count
        self._flushing: int | None = None
        wanted = count * self._size
        found = disk.size(path) if disk.exists(path) else 0
        if found < wanted:
            raise ImpossibleStateError(
                f"{path}: {found} bytes, the checkpoint counts {wanted}: the file was damaged; "
                "remove this node's data and let it fetch the state from another node"
            )
        if found > wanted:
            file = disk.open(path)
            try:
                file.truncate(wanted)
            finally:
                file.close()

    def append(self, records: Records) -> int:
        """Add records at the end; returns the number of the first."""
        first = self.count
        added = len(records)
        self._make_room(added)
        start = first - self._first
        self._buffer[start : start + added] = records
        self.count = first + added
        self.crc = google_crc32c.extend(self.crc, self._buffer[start : start + added].tobytes())
        if self._flushing is None and (self.count - self._written) * self._size >= PIECE_BYTES:
            self._write()
        return first

    def _make_room(self, added: int) -> None:
        used = self.count - self._first
        if used + added <= len(self._buffer):
            return
        drop = max(0, min(self._written, self.count - self._keep) - self._first)
        wanted = used - drop + added
        capacity = len(self._buffer)
        while capacity < 2 * wanted and capacity < 2 * self._keep:
            capacity *= 2
        buffer = np.empty(max(capacity, wanted), self._dtype)
        buffer[: used - drop] = self._buffer[drop:used]
        self._buffer = buffer
        self._first += drop

    def _write(self) -> None:
        data = self._buffer[self._written - self._first : self.count - self._first].tobytes()
        file = self._disk.open(self.path, create=True)
        try:
            file.append(data)
        finally:
            file.close()
        self._written = self.count

    def read(self, first: int, count: int) -> Records:
        """Records `first` to `first + count - 1` (fewer at the end); a view or copy not to be written to."""
        last = min(first + count, self.count)
        if first >= last:
            return self._buffer[:0]
        if first >= self._first:
            return self._buffer[first - self._first : last - self._first]
        split = min(last, self._first)
        wanted = (split - first) * self._size
        file = self._disk.open(self.path)
        try:
            data = file.read_at(first * self._size, wanted)
        finally:
            file.close()
        if len(data) != wanted:
            raise ImpossibleStateError(f"{self.path}: {len(data)} bytes read at record {first}, expected {wanted}")
        old = np.frombuffer(data, self._dtype)
        return old if split == last else np.concatenate((old, self._buffer[: last - self._first]))

    def gather(self, numbers: NDArray[np.int64]) -> Records:
        """Records with these numbers, all below `count`."""
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

    @property
    def length(self) -> int:
        """Bytes of all records."""
        return self.count * self._size

    def needs_flush(self) -> bool:
        """Whether anything is not yet known to be on stable storage."""
        return self._synced < self.count

    def begin_flush(self) -> Flush:
        """What brings everything up to now to stable storage; one at a time."""
        if self._flushing is not None:
            raise ImpossibleStateError(f"{self.path}: a second flush was begun before the first ended")
        self._flushing = self.count
        data = self._buffer[self._written - self._first : self.count - self._first].tobytes()
        return Flush(self._disk, self.path, data, self.count * self._size)

    def finish_flush(self, ran: bool) -> None:
        """The flush ended; `ran` is False if it failed (the disk was full)."""
        if self._flushing is None:
            return
        if ran:
            self._written = self._synced = self._flushing
        else:
            size = self._disk.size(self.path) if self._disk.exists(self.path) else 0
            self._written = max(self._written, min(self._flushing, size // self._size))
        self._flushing = None
