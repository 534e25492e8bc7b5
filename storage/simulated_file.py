"""The content of a simulated file: its bytes as written, and those that a power loss would leave.

Owns: one file's content and the old content of every page changed since the last fsync.
Invariants:
- `old_pages` has, for each page that begins below `durable_bytes` and was changed since the last
  fsync, what is on stable storage; a page that is not there is on stable storage as it is now.
- Whatever lies beyond `durable_bytes` is not on stable storage.
- A write costs time for the pages it touches, never for the file.

Called by `simulated.py` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tickwheel.storage.disk import Buffer

PAGE_BYTES = 4096
"""Unit in which a kernel writes back."""
SECTOR_BYTES = 512
"""Unit that a disk writes whole or not at all: a torn page is cut between two of them."""


class PagedContent:
    """Content of one file. `size_bytes` counts reserved space too, which reads as zeros."""

    __slots__ = ("data", "durable_bytes", "lost_pages", "old_pages", "size_bytes")

    def __init__(self) -> None:
        self.data = bytearray()
        self.size_bytes = 0
        self.durable_bytes = 0
        self.old_pages: dict[int, bytes] = {}
        # Pages of a failed fsync: the kernel calls them clean, yet they never reached the disk.
        self.lost_pages: dict[int, bytes] = {}

    def write(self, offset: int, parts: Sequence[Buffer], size: int) -> None:
        """Write `parts`, together `size` bytes, at `offset`."""
        data = self.data
        if offset > len(data):
            self._keep_old(len(data), offset)
            data.extend(bytes(offset - len(data)))
        self._keep_old(offset, offset + size)
        for part in parts:
            if offset == len(data):
                data += part
            else:
                data[offset : offset + len(part)] = part
            offset += len(part)
        self.size_bytes = max(self.size_bytes, offset)

    def read(self, offset: int, end: int) -> bytes:
        """The bytes from `offset` to `end`. The caller keeps both within the file."""
        if end <= offset:
            return b""
        return bytes(memoryview(self.data)[offset:end]).ljust(end - offset, b"\0")

    def truncate(self, size: int) -> None:
        """Cut the file, or lengthen it with zeros; reserved space beyond `size` goes."""
        if size < len(self.data):
            self._keep_old(size, len(self.data))
            del self.data[size:]
        self.size_bytes = size

    def reserve(self, size: int) -> None:
        self.size_bytes = max(self.size_bytes, size)

    def fsync(self) -> None:
        """Bring everything to stable storage, except pages that a failed fsync has given up."""
        self.old_pages.clear()
        self.durable_bytes = self.size_bytes

    def fail_fsync(self) -> None:
        """Fail an fdatasync: the bytes it covered are lost, and a later fsync will not write them."""
        self.lost_pages.update(self._changed_pages())
        self.fsync()

    def flip(self, offset: int, mask: int) -> None:
        """Change a byte like a decaying medium: in memory and on stable storage."""
        if offset >= len(self.data):
            self.data.extend(bytes(offset + 1 - len(self.data)))
        self.data[offset] ^= mask
        page, place = divmod(offset, PAGE_BYTES)
        if page in self.old_pages:
            old = bytearray(self.old_pages[page].ljust(place + 1, b"\0"))
            old[place] ^= mask
            self.old_pages[page] = bytes(old)

    def crash(self, rng: Random) -> tuple[int, int]:
        """Lose power: each changed page is old, new or torn. Returns the numbers of (lost, kept) pages."""
        written_back_share = rng.choice((0.0, 0.0, 0.5, 0.9, 1.0))
        size = self._size_after_crash(rng)
        pages = self._changed_pages()
        data_end = len(self.data)
        lost = kept = 0
        for page in sorted(pages):
            cut_off = page * PAGE_BYTES >= data_end
            if not cut_off and rng.random() < written_back_share:
                kept += 1
                continue
            new_bytes = 0
            if not cut_off and written_back_share and rng.random() < 0.3:
                new_bytes = rng.randrange(1, PAGE_BYTES // SECTOR_BYTES) * SECTOR_BYTES
            else:
                lost += 1
            self._put_back(page, pages[page], new_bytes)
        for page, old in self.lost_pages.items():
            if page not in pages:
                self._put_back(page, old, 0)
                lost += 1
        del self.data[size:]
        self.size_bytes = self.durable_bytes = size
        self.old_pages.clear()
        self.lost_pages.clear()
        return lost, kept

    def _size_after_crash(self, rng: Random) -> int:
        low, high = sorted((self.durable_bytes, self.size_bytes))
        if low == high:
            return low
        if self.size_bytes < self.durable_bytes:
            return rng.choice((low, high))
        return rng.choice((low, high, rng.randint(low, high)))

    def _changed_pages(self) -> dict[int, bytes]:
        """Page number -> content on stable storage, for each page that differs from it."""
        pages = dict(self.old_pages)
        end = len(self.data)
        if end > self.durable_bytes:
            first, inside = divmod(self.durable_bytes, PAGE_BYTES)
            if inside:
                pages.setdefault(first, bytes(self.data[first * PAGE_BYTES : self.durable_bytes]))
                first += 1
            for page in range(first, -(-end // PAGE_BYTES)):
                pages.setdefault(page, b"")
        return pages

    def _put_back(self, page: int, old: bytes, new_bytes: int) -> None:
        """Restore a page's content on stable storage, except its first `new_bytes`."""
        start = page * PAGE_BYTES
        data = self.data
        if len(data) < start + PAGE_BYTES:
            data.extend(bytes(start + PAGE_BYTES - len(data)))
        data[start + new_bytes : start + PAGE_BYTES] = old.ljust(PAGE_BYTES, b"\0")[new_bytes:]

    def _keep_old(self, start: int, end: int) -> None:
        """Keep the stable content of the pages from `start` to `end` before they change."""
        end = min(end, self.durable_bytes)
        if start >= end:
            return
        old_pages = self.old_pages
        for page in range(start // PAGE_BYTES, -(-end // PAGE_BYTES)):
            if page not in old_pages:
                at = page * PAGE_BYTES
                lost = self.lost_pages.pop(page, None) if self.lost_pages else None
                old_pages[page] = (
                    bytes(self.data[at : min(at + PAGE_BYTES, self.durable_bytes)]) if lost is None else lost
                )
