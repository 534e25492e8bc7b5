"""Who holds what, kept on disk for the time after a loss of all nodes at once.

Owns the whole file `leases`, written in a worker at most once a second and only when it has changed: by the master what
it gave out, by slaves what they heard of. It is soft: without it, or with a damaged one, what is out with consumers is
delivered once more. A node that starts knows these leases as if it had heard of them in a sync.
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
"""Of the file, about 30,000 ranges: written every second, it must cost little beside the journal. Beyond it those that
end first are left out."""


def read_leases(disk: Disk) -> list[LeaseRange]:
    """What was written last; nothing if there is none or it cannot be read."""
    try:
        content = read_whole(disk, PATH)
        return list(Sync.FromString(content).leases) if content else []
    except (DiskError, DecodeError):
        return []


def encode(ranges: Iterable[LeaseRange]) -> bytes:
    """Content of the file."""
    kept, size = Sync(), 0
    for r in sorted(ranges, key=lambda r: r.until_ms, reverse=True):
        size += r.ByteSize() + 4
        if size > BYTES_MAX:
            break
        kept.leases.append(r)
    return kept.SerializeToString()


class LeaseFile:
    """The writer. One per node."""

    def __init__(self, disk: Disk, executor: Executor) -> None:
        self._disk = disk
        self._executor = executor
        self._written = None if disk.exists(PATH) else b""
        """None: not known."""
        self._writing = False
        self.failures = 0

    def write(self, ranges: Callable[[], Iterable[LeaseRange]]) -> None:
        """Have them on disk soon, unless they are there already or a write is under way. `ranges` is called in a
        worker: it may read only what does not change."""
        if self._writing:
            return
        self._writing = True
        written = self._written

        def work() -> bytes:
            content = encode(ranges())
            if content != written:
                write_whole(self._disk, PATH, content)
            return content

        def done(content: bytes | None, error: BaseException | None) -> None:
            self._writing = False
            if error is None:
                self._written = content
            else:
                # A full or failing disk is the journal's to notice; this file can be missed.
                self.failures += 1

        self._executor.submit(work, done)
