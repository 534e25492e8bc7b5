"""The newest tick and local index that this node knows of, kept on disk for the time after a restart.

Owns the whole file `synced`, written in a worker at most once a second and only when it has changed. It is soft: it
is shown until the next sync arrives, moves no cursor and skips no message, so a file that cannot be read is taken
for none. Written by both sides of the sync: slaves write what they heard, the master what it said.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tickwheel.replication.ports import Executor
from tickwheel.storage.disk import Disk, DiskError
from tickwheel.storage.whole_file import read_whole, write_whole

PATH = "synced"
_CONTENT = struct.Struct("<QqQ")


@dataclass(frozen=True, slots=True)
class Synced:
    """Term, and in it the tick and local index of the cursor; compares by all three."""

    term: int = 0
    tick: int = 0
    local_index: int = 0


def read_synced(disk: Disk) -> Synced:
    """What was written last; nothing if there is none or it cannot be read."""
    try:
        content = read_whole(disk, PATH)
    except DiskError:
        return Synced()
    if content is None or len(content) != _CONTENT.size:
        return Synced()
    return Synced(*_CONTENT.unpack(content))


class SyncedFile:
    """The writer. One per node."""

    def __init__(self, disk: Disk, executor: Executor, written: Synced) -> None:
        self._disk = disk
        self._executor = executor
        self._written = written
        self._writing = False
        self.failures = 0

    def write(self, synced: Synced) -> None:
        """Have it on disk soon, unless it is there already or a write is under way."""
        if self._writing or synced == self._written:
            return
        self._writing = True

        def work() -> None:
            write_whole(self._disk, PATH, _CONTENT.pack(synced.term, synced.tick, synced.local_index))

        def done(_: object, error: BaseException | None) -> None:
            self._writing = False
            if error is None:
                self._written = synced
            else:
                # A full or failing disk is the journal's to notice; this file can be missed.
                self.failures += 1

        self._executor.submit(work, done)
