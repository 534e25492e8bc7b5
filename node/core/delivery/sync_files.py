"""What a node keeps on disk of the sync, for a restart: where the cursor was, and which leases run.

Both files are soft. `synced` is shown until the next sync arrives, but moves no cursor and skips no message. `leases`
counts if all nodes stop at once: a starting node treats it as if a sync had told of it, and without it messages out
with consumers are delivered once more. Each node writes both: a master what it told, slaves what they heard. A file
that cannot be read counts as missing, and so does one of leases from another data directory: in another cluster the
same positions are other messages.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from tickwheel.proto.parsing import parsed
from tickwheel.proto.peer_pb2 import LeaseRange, Sync
from tickwheel.replication.ports import Executor
from tickwheel.storage.disk import Disk, DiskError
from tickwheel.storage.whole_file import read_whole, write_whole

SYNCED_PATH = "synced"
LEASES_PATH = "leases"
LEASES_BYTES_MAX = 1 << 20
"""Size of the file, about 30,000 ranges. It is written every second, so it must cost little beside the journal. If
there is more, the groups share it evenly, and of each the leases that end first are left out."""
_SYNCED = struct.Struct("<QqQ")


class SoftFile:
    """Owns one file, which a worker replaces whole if its content has changed; one write at a time."""

    def __init__(self, disk: Disk, executor: Executor, path: str, written: bytes | None) -> None:
        """`written`: what a reader finds in the file now; None: unknown."""
        self._disk = disk
        self._executor = executor
        self._path = path
        self._written = written
        self.writing = False
        self.failures = 0

    def write(self, content: bytes | Callable[[], bytes]) -> None:
        """Start writing, unless this is on disk already or a write is under way. A function is called in the worker: it
        may read only data that never changes."""
        if self.writing or content == self._written:
            return
        self.writing = True
        written = self._written

        def work() -> bytes:
            made = content if isinstance(content, bytes) else content()
            if made != written:
                write_whole(self._disk, self._path, made)
            return made

        def done(made: bytes | None, error: BaseException | None) -> None:
            self.writing = False
            if error is None:
                self._written = made
            else:
                # The journal reacts to a full or failing disk; the node can do without this file.
                self.failures += 1

        self._executor.submit(work, done)


@dataclass(frozen=True, slots=True)
class Synced:
    """A term, and in it the tick and local index of the cursor."""

    term: int = 0
    tick: int = 0
    local_index: int = 0

    def pack(self) -> bytes:
        """Content of the file."""
        return _SYNCED.pack(self.term, self.tick, self.local_index)


def read_synced(disk: Disk) -> Synced:
    """The last values written; zeros if the file is missing or cannot be read."""
    try:
        content = read_whole(disk, SYNCED_PATH)
    except DiskError:
        return Synced()
    if content is None or len(content) != _SYNCED.size:
        return Synced()
    return Synced(*_SYNCED.unpack(content))


def read_leases(disk: Disk, disk_uuid: str = "") -> list[LeaseRange]:
    """The last ranges written; empty if the file is missing, cannot be read, or was written on another disk than that
    of `disk_uuid` (empty: whatever disk)."""
    try:
        content = read_whole(disk, LEASES_PATH)
        kept = parsed(Sync, content) if content else Sync()
    except (DiskError, DecodeError):
        return []
    foreign = kept.disk_uuid and disk_uuid and kept.disk_uuid != disk_uuid
    return [] if foreign else list(kept.leases)


def pack_leases(groups: Iterable[Iterable[LeaseRange]], disk_uuid: str = "") -> bytes:
    """Content of the file for the ranges of each group, which begin with those that end last. Takes one of each group
    in turn, and no more than fit."""
    kept = Sync(disk_uuid=disk_uuid)
    size = kept.ByteSize()
    left = deque(map(iter, groups))
    while left:
        ranges = left.popleft()
        r = next(ranges, None)
        if r is None:
            continue
        left.append(ranges)
        size += r.ByteSize() + 4
        if size > LEASES_BYTES_MAX:
            break
        kept.leases.append(r)
    return kept.SerializeToString()
