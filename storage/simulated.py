"""The disk port in memory, with a power switch: changes that were not fsynced may be lost.

Owns: a tree of directories and files as a process sees it, and the part of it that is on stable storage.
Invariants:
- `File.fsync` covers that file's bytes only, `fsync_dir` that directory's entries (and those that
  lead to it) only.
- After `crash` a file holds at least what was fsynced; of the rest any page may have reached the
  disk. Of the directory operations that were not fsynced a prefix is kept, in order (or, if the crash is to be
  `scattered`, any of them).
- The same calls with the same `rng` have the same results.

The object outlives crashes: a restarted node opens it again. Handles and mapped views from before the crash
belong to the dead process; such handles raise. Single-threaded, as the simulation is.

Called by the simulation and by tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from tickwheel.storage.disk import Buffer, DirectoryInUseError, DiskError, DiskFullError, FsyncFailedError, path_parts

PAGE_BYTES = 4096
"""Unit in which a kernel writes back."""
SECTOR_BYTES = 512
"""Unit that a disk writes whole or not at all: a torn page is cut between two of them."""


class PagedContent:
    """Content of one file: its bytes as written, and those that a power loss would leave.

    Owns the old content of every page changed since the last fsync. `size_bytes` counts reserved space too, which reads
    as zeros.

    Invariants:
    - `old_pages` has, for each page that begins below `durable_bytes` and was changed since the last fsync, what is on
      stable storage; a page that is not there is on stable storage as it is now.
    - Whatever lies beyond `durable_bytes` is not on stable storage.
    - A write costs time for the pages it touches, never for the file.
    """

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


UNLIMITED_BYTES = 1 << 50
PathTest = Callable[[str], bool]


class PowerLost(BaseException):
    """The power failed in the middle of a call. Only the code that cut the power may catch this."""


class _Directory:
    """A directory: its entries as seen, and those on stable storage."""

    __slots__ = ("durable", "entries")

    def __init__(self) -> None:
        self.entries: dict[str, _Node] = {}
        self.durable: dict[str, _Node] = {}


_Node = _Directory | PagedContent
_Change = tuple[_Directory, str, _Node | None]
_Changes = list[_Change]


@dataclass(slots=True)
class DiskCounters:
    """Counts of a disk's calls, and evidence of the faults that took effect."""

    bytes_written: int = 0
    writes: int = 0
    reads: int = 0
    fsyncs: int = 0
    fsyncs_failed: int = 0
    fsyncs_ignored: int = 0
    reads_failed: int = 0
    writes_refused: int = 0
    pages_lost: int = 0
    pages_written_back: int = 0
    dir_changes_lost: int = 0


class SimulatedFile:
    """An open file of a SimulatedDisk; see `storage.disk.File`."""

    __slots__ = ("_closed", "_content", "_disk", "_life", "_path", "_reserved_end")

    def __init__(self, disk: SimulatedDisk, path: str, content: PagedContent) -> None:
        self._disk = disk
        self._path = path
        self._content = content
        self._life = disk.life
        self._closed = False
        self._reserved_end: int | None = None

    @property
    def path(self) -> str:
        return self._path

    def size(self) -> int:
        self._check_open()
        return self._content.size_bytes if self._reserved_end is None else self._reserved_end

    def append(self, data: Buffer) -> int:
        return self.append_many((data,))

    def append_many(self, parts: Sequence[Buffer]) -> int:
        start = self.size()
        self._write(start, [memoryview(part).cast("B") for part in parts if len(part)])
        return start

    def write_at(self, offset: int, data: Buffer) -> None:
        self._check_open()
        self._write(offset, [memoryview(data).cast("B")])

    def read_at(self, offset: int, size: int) -> bytes:
        end = min(offset + size, self.size())
        self._disk.note_read(self._path)
        return self._content.read(offset, end)

    def truncate(self, size: int) -> None:
        self._check_open()
        self._disk.take_space(self._path, size - self._content.size_bytes)
        self._content.truncate(size)
        self._reserved_end = None

    def preallocate(self, size: int) -> None:
        end = self.size()
        if size <= end:
            return
        self._disk.take_space(self._path, max(0, size - self._content.size_bytes))
        self._content.reserve(size)
        self._reserved_end = end

    def map(self) -> memoryview:
        """A copy: the port does not promise that later writes show in a view."""
        return memoryview(self._content.read(0, self.size()))

    def fsync(self) -> None:
        self._check_open()
        self._disk.fsync_content(self._path, self._content)

    def close(self) -> None:
        self._closed = True

    def _write(self, offset: int, parts: Sequence[memoryview]) -> None:
        size = sum(map(len, parts))
        content = self._content
        end = offset + size
        self._disk.note_write(self._path, size, max(0, end - content.size_bytes))
        if size:
            content.write(offset, parts, size)
            if self._reserved_end is not None:
                self._reserved_end = max(self._reserved_end, end)

    def _check_open(self) -> None:
        if self._closed:
            raise DiskError(f"file {self._path!r} is closed")
        if self._life != self._disk.life:
            raise DiskError(f"file {self._path!r} was opened by a process that is gone")


class SimulatedDisk:
    """A disk in memory; see `storage.disk.Disk`. `rng` decides what a crash leaves."""

    def __init__(self, rng: Random, *, capacity_bytes: int = UNLIMITED_BYTES) -> None:
        self._rng = rng
        self._root = _Directory()
        self._pending: dict[int, _Changes] = {}
        """Number -> change of a directory that is not durable yet, in order."""
        self._pending_in: dict[int, set[int]] = {}
        """Id of a directory -> numbers of its pending changes. Directories named in `_pending` stay alive."""
        self._changes_made = 0
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._locked = False
        self._counters = DiskCounters()
        self._fsync_failures_left = 0
        self._fsync_fails_for: PathTest = lambda _path: True
        self._write_failures_left = 0
        self._write_fails_for: PathTest = lambda _path: True
        self._fsync_ignored_for: PathTest | None = None
        self._dir_fsync_ignored_for: PathTest | None = None
        self._unreadable: set[str] = set()
        self._steps_left = -1
        self._steps_begin: PathTest | None = None
        self.life = 0
        """Number of the process that uses the disk; handles of earlier processes raise."""

    # The port.

    def open(self, path: str, *, create: bool = False) -> SimulatedFile:
        parts = path_parts(path)
        if not parts:
            raise DiskError("cannot open '': it is the root")
        if create:
            directory = self._make_dirs(parts[:-1], path)
        else:
            found = self._find(parts[:-1])
            if not isinstance(found, _Directory):
                raise DiskError(f"cannot open {path!r}: No such file or directory")
            directory = found
        node = directory.entries.get(parts[-1])
        if isinstance(node, _Directory):
            raise DiskError(f"cannot open {path!r}: Is a directory")
        if node is None:
            if not create:
                raise DiskError(f"cannot open {path!r}: No such file or directory")
            node = PagedContent()
            self._change([(directory, parts[-1], node)], path)
        return SimulatedFile(self, path, node)

    def exists(self, path: str) -> bool:
        return self._find(path_parts(path)) is not None

    def size(self, path: str) -> int:
        node = self._find(path_parts(path))
        if not isinstance(node, PagedContent):
            raise DiskError(f"cannot examine {path!r}: no such file")
        return node.size_bytes

    def files(self, path: str) -> list[str]:
        found = []
        for name in self.list(path):
            below = f"{path}/{name}" if path else name
            found += self.files(below) if isinstance(self._find(path_parts(below)), _Directory) else [below]
        return sorted(found)

    def list(self, path: str) -> list[str]:
        node = self._find(path_parts(path))
        if node is None:
            return []
        if not isinstance(node, _Directory):
            raise DiskError(f"cannot list {path!r}: Not a directory")
        return sorted(node.entries)

    def make_dir(self, path: str) -> None:
        self._make_dirs(path_parts(path), path)

    def remove(self, path: str) -> None:
        parts = path_parts(path)
        if not parts:
            raise DiskError("cannot remove '': it is the root")
        parent = self._find(parts[:-1])
        if isinstance(parent, _Directory) and parts[-1] in parent.entries:
            self._used_bytes -= _bytes_of(parent.entries[parts[-1]])
            self._change([(parent, parts[-1], None)], path)

    def rename(self, source: str, target: str) -> None:
        source_parts, target_parts = path_parts(source), path_parts(target)
        if not source_parts or not target_parts:
            raise DiskError("cannot rename '': it is the root")
        origin, destination = self._find(source_parts[:-1]), self._find(target_parts[:-1])
        if not isinstance(origin, _Directory) or source_parts[-1] not in origin.entries:
            raise DiskError(f"cannot rename to {target!r} {source!r}: No such file or directory")
        if not isinstance(destination, _Directory):
            raise DiskError(f"cannot rename to {target!r} {source!r}: No such file or directory")
        node, replaced = origin.entries[source_parts[-1]], destination.entries.get(target_parts[-1])
        if node is replaced:
            return
        if isinstance(replaced, _Directory) and (replaced.entries or not isinstance(node, _Directory)):
            raise DiskError(f"cannot rename to {target!r} {source!r}: a directory is there")
        if isinstance(replaced, PagedContent):
            if isinstance(node, _Directory):
                raise DiskError(f"cannot rename to {target!r} {source!r}: Not a directory")
            self._used_bytes -= replaced.size_bytes
        self._change([(origin, source_parts[-1], None), (destination, target_parts[-1], node)], target)

    def fsync_dir(self, path: str) -> None:
        parts = path_parts(path)
        directory = self._find(parts)
        if not isinstance(directory, _Directory):
            raise DiskError(f"cannot open the directory {path!r}: No such file or directory")
        self._take_step(path)
        self._fail_fsync_if_told(path, None)
        if self._dir_fsync_ignored_for is not None and self._dir_fsync_ignored_for(path):
            self._counters.fsyncs_ignored += 1
            return
        above = self._root
        for part in parts:
            self._settle(above, part)
            above = above.entries[part]  # type: ignore[assignment]
        self._settle(directory)

    def space_left(self) -> int:
        return max(0, self._capacity_bytes - self._used_bytes)

    def space_total(self) -> int:
        return self._capacity_bytes

    def lock(self) -> None:
        if self._locked:
            raise DirectoryInUseError("the simulated disk is in use by another process")
        self._locked = True

    # Faults.

    def crash(self, rng: Random | None = None, *, scattered: bool = False) -> None:
        """Lose power. Each page that was not fsynced, and each such directory change from some point on, may be lost.

        `scattered`: any choice of directory changes is kept instead of a prefix; only changes of one entry keep their
        order. Journalling file systems do better; nothing should depend on it.
        """
        rng = rng or self._rng
        pending = list(self._pending.values())
        if scattered:
            kept = _scattered(pending, rng)
        else:
            kept = pending[: rng.choice((0, len(pending), rng.randint(0, len(pending))))]
        self._counters.dir_changes_lost += len(pending) - len(kept)
        for changes in kept:
            _apply_durably(changes)
        self._pending.clear()
        self._pending_in.clear()
        self._lose_volatile(self._root, rng)
        self._used_bytes = _bytes_of(self._root)
        self._steps_left = -1
        self.kill()

    def wipe(self) -> None:
        """Replace the disk by an empty one; the counters go on."""
        self._pending.clear()
        self._pending_in.clear()
        self._unreadable.clear()
        self._root = _Directory()
        self._used_bytes = 0
        self._steps_left = -1
        self.kill()

    def forget(self, path: str) -> None:
        """Let a durable file be gone for good, as if it had never been written."""
        parts = path_parts(path)
        directory = self._find(parts[:-1])
        if isinstance(directory, _Directory) and parts[-1] in directory.entries:
            self._used_bytes -= _bytes_of(directory.entries.pop(parts[-1]))
            directory.durable.pop(parts[-1], None)

    def lose_power_after(self, steps: int, begins: PathTest | None = None) -> None:
        """After the next `steps` changes and fsyncs raise PowerLost instead of each further one, until `crash`. Below
        0: do not. `begins`: the steps are counted from the first one at such a path on."""
        self._steps_left = steps
        self._steps_begin = begins

    def kill(self) -> None:
        """End the process that uses the disk (SIGKILL, or a clean stop): all written bytes stay."""
        self.life += 1
        self._locked = False

    def fail_fsync(self, times: int = 1, matches: PathTest = lambda _path: True) -> None:
        """Let the next `times` fsyncs of matching files or directories fail; the bytes they covered are lost for
        good."""
        self._fsync_failures_left = times
        self._fsync_fails_for = matches

    def fail_write(self, times: int = 1, matches: PathTest = lambda _path: True) -> None:
        """Let the next `times` writes to matching files fail with an error of the device; they write nothing."""
        self._write_failures_left = times
        self._write_fails_for = matches

    def ignore_fsync(self, matches: PathTest | None) -> None:
        """Let fsyncs of matching files do nothing and report success: a test that needs the fsyncs must then fail."""
        self._fsync_ignored_for = matches

    def ignore_fsync_dir(self, matches: PathTest | None) -> None:
        """As `ignore_fsync`, for directories."""
        self._dir_fsync_ignored_for = matches

    def fill(self, bytes_left: int) -> None:
        """Leave room for `bytes_left` bytes, as if others had used the rest."""
        self._capacity_bytes = self._used_bytes + bytes_left

    def make_room(self) -> None:
        """End a shortage of space."""
        self._capacity_bytes = UNLIMITED_BYTES

    def read_error(self, path: str) -> None:
        """Let every read of this file fail until `heal_reads`."""
        self._unreadable.add(path)

    @property
    def unreadable(self) -> frozenset[str]:
        """Files whose reads fail."""
        return frozenset(self._unreadable)

    def paths(self) -> Sequence[str]:
        """All files as a process sees them, sorted."""
        return _paths_below(self._root, "")

    def heal_reads(self) -> None:
        self._unreadable.clear()

    def flip(self, path: str, offset: int, mask: int = 0xFF) -> None:
        """Change one byte unnoticed."""
        node = self._find(path_parts(path))
        if not isinstance(node, PagedContent) or offset >= node.size_bytes:
            raise DiskError(f"no byte {offset} in {path!r} to flip")
        node.flip(offset, mask)

    def counters(self) -> DiskCounters:
        """A snapshot of the counts."""
        return replace(self._counters)

    # Called by files.

    def note_write(self, path: str, size: int, growth: int) -> None:
        if self._write_failures_left > 0 and self._write_fails_for(path):
            self._write_failures_left -= 1
            raise DiskError(f"cannot write to {path!r}: Input/output error")
        self.take_space(path, growth)
        self._counters.writes += 1
        self._counters.bytes_written += size

    def note_read(self, path: str) -> None:
        if self._unreadable and path in self._unreadable:
            self._counters.reads_failed += 1
            raise DiskError(f"cannot read {path!r}: Input/output error")
        self._counters.reads += 1

    def take_space(self, path: str, growth: int) -> None:
        self._take_step(path)
        if growth > 0 and self._used_bytes + growth > self._capacity_bytes:
            self._counters.writes_refused += 1
            raise DiskFullError(f"cannot write to {path!r}: No space left on device")
        self._used_bytes += growth

    def fsync_content(self, path: str, content: PagedContent) -> None:
        self._take_step(path)
        self._counters.fsyncs += 1
        self._fail_fsync_if_told(path, content)
        if self._fsync_ignored_for is not None and self._fsync_ignored_for(path):
            self._counters.fsyncs_ignored += 1
            return
        content.fsync()

    # The tree.

    def _find(self, parts: Sequence[str]) -> _Node | None:
        node: _Node | None = self._root
        for part in parts:
            if not isinstance(node, _Directory):
                return None
            node = node.entries.get(part)
        return node

    def _make_dirs(self, parts: Sequence[str], path: str) -> _Directory:
        directory = self._root
        for part in parts:
            node = directory.entries.get(part)
            if node is None:
                node = _Directory()
                self._change([(directory, part, node)], path)
            elif not isinstance(node, _Directory):
                raise DiskError(f"cannot make the directories of {path!r}: {part!r} is a file")
            directory = node
        return directory

    def _take_step(self, path: str) -> None:
        if self._steps_left < 0 or not (self._steps_begin is None or self._steps_begin(path)):
            return
        self._steps_begin = None
        if self._steps_left == 0:
            raise PowerLost
        self._steps_left -= 1

    def _change(self, changes: _Changes, path: str) -> None:
        self._take_step(path)
        for directory, name, node in changes:
            if node is None:
                directory.entries.pop(name, None)
            else:
                directory.entries[name] = node
        self._pending[self._changes_made] = changes
        for directory, _, _ in changes:
            self._pending_in.setdefault(id(directory), set()).add(self._changes_made)
        self._changes_made += 1

    def _settle(self, directory: _Directory, name: str | None = None) -> None:
        """Make pending changes of a directory, or of one entry, durable; also pending changes of entries that they
        touch."""
        pending = self._pending
        open_now = [
            number
            for number in self._pending_in.get(id(directory), ())
            if name is None or any(at is directory and entry == name for at, entry, _ in pending[number])
        ]
        taken = set(open_now)
        while open_now:
            for at, entry, _ in pending[open_now.pop()]:
                for number in self._pending_in[id(at)]:
                    if number not in taken and any(d is at and n == entry for d, n, _ in pending[number]):
                        taken.add(number)
                        open_now.append(number)
        for number in sorted(taken):
            changes = pending.pop(number)
            _apply_durably(changes)
            for at, _, _ in changes:
                self._pending_in[id(at)].discard(number)

    def _lose_volatile(self, directory: _Directory, rng: Random) -> None:
        directory.entries = dict(directory.durable)
        for name in sorted(directory.entries):
            node = directory.entries[name]
            if isinstance(node, _Directory):
                self._lose_volatile(node, rng)
            else:
                lost, kept = node.crash(rng)
                self._counters.pages_lost += lost
                self._counters.pages_written_back += kept

    def _fail_fsync_if_told(self, path: str, content: PagedContent | None) -> None:
        if self._fsync_failures_left > 0 and self._fsync_fails_for(path):
            self._fsync_failures_left -= 1
            self._counters.fsyncs_failed += 1
            if content is not None:
                content.fail_fsync()
            raise FsyncFailedError(f"fdatasync of {path!r} failed: Input/output error")


def _scattered(pending: list[_Changes], rng: Random) -> list[_Changes]:
    """Any choice of changes, but of each entry a prefix."""
    lost: set[tuple[int, str]] = set()
    kept: list[_Changes] = []
    for changes in pending:
        entries = {(id(directory), name) for directory, name, _ in changes}
        if entries & lost or rng.random() < 0.5:
            lost |= entries
        else:
            kept.append(changes)
    return kept


def _apply_durably(changes: Sequence[_Change]) -> None:
    for directory, name, node in changes:
        if node is None:
            directory.durable.pop(name, None)
        else:
            directory.durable[name] = node


def _paths_below(directory: _Directory, prefix: str) -> list[str]:
    found: list[str] = []
    for name, node in sorted(directory.entries.items()):
        if isinstance(node, _Directory):
            found += _paths_below(node, f"{prefix}{name}/")
        else:
            found.append(prefix + name)
    return found


def _bytes_of(node: _Node) -> int:
    if isinstance(node, PagedContent):
        return node.size_bytes
    return sum(_bytes_of(child) for child in node.entries.values())
