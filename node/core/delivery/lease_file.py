"""Leases kept on disk, for the case that all nodes stop at once.

Owns the whole file `leases`. A worker writes it at most once a second and only if it has changed: a master its own
leases, slaves those they heard of. The file is soft: without it, or if it is damaged, messages out with consumers are
delivered once more. A starting node treats these leases as if a sync had told of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from google.protobuf.message import DecodeError

from tickwheel.proto.peer_pb2 import LeaseRange, Sync
from tickwheel.replication.ports import Executor
from tickwheel.storage.disk import Disk, DiskError
from tickwheel.storage.whole_file import read_whole, write_whole

PATH = "leases"
BYTES_MAX = 1 << 20
"""Size of the file, about 30,000 ranges. It is written every second, so it must cost little beside the journal. If
there is more, the groups share it evenly, and of each the leases that end first are left out."""


def read_leases(disk: Disk) -> list[LeaseRange]:
    """The last ranges written; empty if the file is missing or cannot be read."""
    try:
        content = read_whole(disk, PATH)
        return list(Sync.FromString(content).leases) if content else []
    except (DiskError, DecodeError):
        return []


def encode(groups: Iterable[Iterable[LeaseRange]]) -> bytes:
    """Content of the file for the ranges of each group, which begin with those that end last. Takes one of each group
    in turn, and no more than fit."""
    kept, size = Sync(), 0
    left = deque(map(iter, groups))
    while left:
        ranges = left.popleft()
        r = next(ranges, None)
        if r is None:
            continue
        left.append(ranges)
        size += r.ByteSize() + 4
        if size > BYTES_MAX:
            break
        kept.leases.append(r)
    return kept.SerializeToString()


class LeaseFile:
    """Writes the file."""

    def __init__(self, disk: Disk, executor: Executor) -> None:
        self._disk = disk
        self._executor = executor
        self._written = None if disk.exists(PATH) else b""
        """Content of the file; None: unknown."""
        self.writing = False
        self.failures = 0

    def write(self, groups: Callable[[], Iterable[Iterable[LeaseRange]]] | None) -> None:
        """Start writing the ranges (as for `encode`; None: there are none), unless they are on disk already or a write
        is under way. `groups` is called in a worker: it may read only data that never changes."""
        if self.writing or (groups is None and self._written == b""):
            return
        self.writing = True
        written = self._written

        def work() -> bytes:
            content = b"" if groups is None else encode(groups())
            if content != written:
                write_whole(self._disk, PATH, content)
            return content

        def done(content: bytes | None, error: BaseException | None) -> None:
            self.writing = False
            if error is None:
                self._written = content
            else:
                # The journal reacts to a full or failing disk; the node can do without this file.
                self.failures += 1

        self._executor.submit(work, done)
