"""Rebuilds the state of a stopped node from its journal, if that still holds every entry since the first.

For damage that no other member can repair: to an index in a cluster of one, to heads, or to the files of a checkpoint.
A node's state follows from the log alone, so all of it comes back: ids, due times, cancelled, dispatched and settled
messages. A delay log does not suffice, since it lacks due times, nor does a journal whose beginning a checkpoint has
cut.

This module removes only the manifest, after it has read and checked all that the replay needs: a start without a
manifest begins with the first entry. The caller holds the lock of the directory and owns the disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tickwheel.node.core.checkpoint import JOURNAL_DIRECTORY, MANIFEST_PATH
from tickwheel.node.core.install import install_if_complete
from tickwheel.node.server.identity import owner_of, read_identity
from tickwheel.node.state.schema import read_entry
from tickwheel.replication.entries import REGULAR
from tickwheel.replication.journal import Journal
from tickwheel.replication.journal_files import segment_sequences
from tickwheel.storage.bundle import bundle_path, name_of
from tickwheel.storage.disk import Disk
from tickwheel.storage.errors import CorruptFileError
from tickwheel.storage.manifest import read_manifest

PIECE_BYTES = 1 << 20
"""Bytes of a bundle read at a time."""


class RebuildError(Exception):
    """The state cannot be rebuilt, and nothing was changed; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The amount that the next start replays."""

    entries: int
    bytes: int


def rebuild(disk: Disk, segment_bytes: int) -> Rebuilt:
    """Prepare the rebuild by the next start. `segment_bytes`: the journal's. Raises RebuildError and DiskError."""
    install_if_complete(disk)
    if not segment_sequences(disk.list(JOURNAL_DIRECTORY)):
        raise RebuildError("there is no journal here; nothing was changed")
    owner = owner_of(read_identity(disk))
    journal = Journal.open(disk, JOURNAL_DIRECTORY, segment_bytes=segment_bytes, owner=owner)
    try:
        if not journal.last_index:
            raise RebuildError(
                "the journal holds no entry; nothing was changed. Restore a backup, or go on with the other members"
            )
        if journal.base_index:
            raise RebuildError(
                f"the journal begins behind entry {journal.base_index}: what was before is in the checkpoint alone; "
                "nothing was changed. Restore a backup, or go on with the other members"
            )
        covered = _covered(disk)
        if journal.last_index < covered:
            raise RebuildError(
                f"the journal ends with entry {journal.last_index}, the checkpoint holds more, up to {covered}; "
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
    disk.fsync_dir("")
    return found


def _covered(disk: Disk) -> int:
    """The index up to which the checkpoint holds the log; 0: none that can be read."""
    try:
        manifest = read_manifest(disk)
    except CorruptFileError:
        return 0
    return manifest.applied_index if manifest is not None else 0


def _problem(disk: Disk, name: str) -> str:
    """The fault of a bundle, whose name must be the checksum of its bytes; empty if it is sound."""
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
    """The names of bundles that entries take over. Reads and checks every entry."""
    for index in range(1, journal.last_index + 1):
        _, _, command = journal.entry(index)
        if command[:1] == REGULAR:
            entry = read_entry(command[1:])
            for part in entry.commands if entry is not None else ():
                if part.HasField("ingest"):
                    yield part.ingest.segment_sha256
