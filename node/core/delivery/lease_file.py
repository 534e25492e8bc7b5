"""Leases kept on disk, for the case that all nodes stop at once.

Owns the whole file `leases`. A worker writes it at most once a second and only if it has changed: a master its own
leases, slaves those they heard of. The file is soft: without it, or if it is damaged, messages out with consumers are
delivered once more. A starting node treats these leases as if a sync had told of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from google.protobuf.message import DecodeError

from tickwheel.proto.peer_pb2 import LeaseRange, Sync
from tickwheel.replication.ports import Executor
from tickwheel.storage.disk import Disk, DiskError
from tickwheel.storage.whole_file import read_whole, write_whole

PATH = "leases"
BYTES_MAX = 1 << 20
"""Size of the file, about 30,000 ranges. It is written every second, so it must cost little beside the journal. If
there is more, leases that end first are left out."""


def read_leases(disk: Disk) -> list[LeaseRange]:
    """The last ranges written; empty if the file is missing or cannot be read."""
    try:
        content = read_whole(disk, PATH)
        return list(Sync.FromString(content).leases) if content else []
    except (DiskError, DecodeError):
        return []


def encode(ranges: Iterable[LeaseRange]) -> bytes:
    """Content of the file for these ranges."""
    kept, size = Sync(), 0
    for r in sorted(ranges, key=lambda r: r.until_ms, reverse=True):
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

    def write(self, ranges: Callable[[], Iterable[LeaseRange]]) -> None:
        """Start writing the ranges, unless they are on disk already or a write is under way. `ranges` is called in a
        worker: it may read only data that never changes."""
        if self.writing:
            return
        self.writing = True
        written = self._written

        def work() -> bytes:
            content = encode(ranges())
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
