"""The newest tick and local index that this node knows of, kept on disk across a restart.

Owns the whole file `synced`. A worker writes it at most once a second and only if it has changed. The file is soft: its
content is shown until the next sync arrives, but moves no cursor and skips no message. An unreadable file counts as
missing. Both sides of the sync write it: slaves what they heard, the master what it told.
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
    """A term, and in it the tick and local index of the cursor; compares by all three."""

    term: int = 0
    tick: int = 0
    local_index: int = 0


def read_synced(disk: Disk) -> Synced:
    """The last values written; zeros if the file is missing or cannot be read."""
    try:
        content = read_whole(disk, PATH)
    except DiskError:
        return Synced()
    if content is None or len(content) != _CONTENT.size:
        return Synced()
    return Synced(*_CONTENT.unpack(content))


class SyncedFile:
    """Writes the file."""

    def __init__(self, disk: Disk, executor: Executor, written: Synced) -> None:
        self._disk = disk
        self._executor = executor
        self._written = written
        self._writing = False
        self.failures = 0

    def write(self, synced: Synced) -> None:
        """Start writing the values, unless they are on disk already or a write is under way."""
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
                # The journal reacts to a full or failing disk; the node can do without this file.
                self.failures += 1

        self._executor.submit(work, done)
