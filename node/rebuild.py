"""Lets a stopped node make its state anew from its journal, if that still holds every entry since the first.

For damage that no other member can mend: to an index in a cluster of one, to heads, to the files of a checkpoint. What
the state of a node is follows from the log alone, so all of it comes back as it was: ids, due times, what is cancelled,
dispatched and settled. A delay log says too little for that (not when a message is due), and so does a journal whose
beginning a checkpoint has cut.

Only the manifest is removed here, after all that the replay needs was read and checked: a start without one begins
with the first entry. The caller holds the lock of the directory and owns the disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tickwheel.node.core.checkpoint import JOURNAL_DIRECTORY, MANIFEST_PATH
from tickwheel.node.core.install import install_if_complete
from tickwheel.node.state.schema import read_entry
from tickwheel.replication.entries import REGULAR
from tickwheel.replication.journal import Journal
from tickwheel.storage.bundle import bundle_path, name_of
from tickwheel.storage.disk import Disk

PIECE_BYTES = 1 << 20
"""Of a bundle that is read at once."""


class RebuildError(Exception):
    """It cannot be done, and nothing was changed; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What the next start replays."""

    entries: int
    bytes: int


def rebuild(disk: Disk, segment_bytes: int) -> Rebuilt:
    """Do it. `segment_bytes`: of the journal. Raises RebuildError; DiskError kinds for a damaged journal."""
    install_if_complete(disk)
    if not disk.list(JOURNAL_DIRECTORY):
        raise RebuildError("there is no journal here; nothing was changed")
    journal = Journal.open(disk, JOURNAL_DIRECTORY, segment_bytes=segment_bytes)
    try:
        if journal.base_index:
            raise RebuildError(
                f"the journal begins behind entry {journal.base_index}: what was before is in the checkpoint alone; "
                "nothing was changed. Restore a backup, or go on with the other members"
            )
        lacking = [problem for name in sorted(set(_bundles(journal))) if (problem := _problem(disk, name))]
        if lacking:
            raise RebuildError(
                f"{len(lacking)} bundles that were loaded cannot be replayed, the first: {lacking[0]}; nothing was "
                "changed. Put files of these names back (`pipeline build` left them in bundles/ of its output, other "
                "members have them in bulk/), restore a backup, or go on with the other members"
            )
        found = Rebuilt(journal.last_index, journal.bytes_after(0))
    finally:
        journal.close()
    disk.remove(MANIFEST_PATH)
    disk.sync_dir("")
    return found


def _problem(disk: Disk, name: str) -> str:
    """What is wrong with a bundle, whose name is the checksum of its bytes; empty if nothing."""
    path = bundle_path(name)
    if not disk.exists(path):
        return f"{path} is not here any more"
    file = disk.open(path)
    try:
        size = file.size()
        found = name_of(file.read_at(at, min(PIECE_BYTES, size - at)) for at in range(0, size, PIECE_BYTES))
    finally:
        file.close()
    return "" if found == name else f"{path} is damaged"


def _bundles(journal: Journal) -> Iterator[str]:
    """Names of those that entries take over; reads and checks every entry."""
    for index in range(1, journal.last_index + 1):
        _, _, command = journal.entry(index)
        if command[:1] == REGULAR:
            entry = read_entry(command[1:])
            for part in entry.commands if entry is not None else ():
                if part.HasField("ingest"):
                    yield part.ingest.segment_sha256
