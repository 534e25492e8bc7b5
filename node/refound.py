"""Makes a cluster of one from the data of a stopped node: after the loss of a majority, or from a backup.

The caller holds the lock of the directory and owns the disk; nothing else may use it. The result has the content of the
old state, with a new cluster id, one member, a new disk uuid, and no history of members. So it and the nodes of the old
cluster refuse each other.

The order of steps lets an interrupted run be repeated:
1. The manifest of the new cluster.
2. A new journal, which begins after the manifest, in a term above every old one. The old entries would tell a new
   member of the old members. The old journal is renamed before it is removed: half of one could not be read again.
3. The file `identity`. Until this step no node starts on the directory: the manifest and the identity name different
   clusters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from tickwheel.node.config import NodeConfig
from tickwheel.node.core.checkpoint import JOURNAL_DIRECTORY, MANIFEST_PATH, Restored, restore
from tickwheel.node.core.core import SLOT_MS_DEFAULT
from tickwheel.node.core.delivery.sync_files import LEASES_PATH
from tickwheel.node.core.founding import PATH as FOUNDING_PATH
from tickwheel.node.core.install import install_if_complete
from tickwheel.node.server.identity import new_identity, owner_of, read_identity, store_identity
from tickwheel.node.state.schema import read_entry
from tickwheel.proto.log_pb2 import LogEntry
from tickwheel.proto.parsing import wants_memory
from tickwheel.replication.entries import command_of
from tickwheel.replication.journal import Journal, check_owner
from tickwheel.replication.journal_files import segment_sequences
from tickwheel.replication.log import Member
from tickwheel.storage.disk import Disk, DiskError
from tickwheel.storage.errors import CorruptFileError
from tickwheel.storage.whole_file import write_whole

GIVEN_UP_JOURNAL = f"{JOURNAL_DIRECTORY}.old"
"""The old cluster's journal while it is being removed."""


class RefoundError(Exception):
    """The new cluster was not made, and nothing was changed; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Found:
    """The content with which the new cluster starts."""

    old_cluster_id: str
    old_members: tuple[str, ...]
    index: int
    """The index of its last entry."""
    replayed: int
    """Entries applied from the journal, after the last checkpoint."""
    newest_ms: int
    """When the newest of these was written, by its master's clock; 0 if there is none."""
    pending: int
    ready: int
    skipped: tuple[str, ...] = ()
    """Descriptions of the entries left out: those named in `skip`, and those that no node can decode."""
    without_journal: bool = False
    """There was none, as in a backup: what was written after the last checkpoint is not there."""


def refound(disk: Disk, config: NodeConfig, skip: Collection[int] = ()) -> Found:
    """Make the new cluster, without the entries `skip` of the journal.

    Raises RefoundError; DiskError kinds for damaged files, ImpossibleStateError for another version's.
    """
    cluster_id, node_id = config.cluster.id, config.node.id
    identity = read_identity(disk)
    install_if_complete(disk)
    slot_ms = config.seed_settings.slot_ms or SLOT_MS_DEFAULT
    restored = restore(disk, config.core, slot_ms, 0)
    state = restored.state
    old_id = state.cluster_id if identity is None else identity.cluster_id
    # An interrupted run may have removed the journal; the manifest has what it held, without the entries left out.
    interrupted = state.cluster_id not in ("", old_id)
    has_journal = bool(segment_sequences(disk.list(JOURNAL_DIRECTORY)))
    replayed, newest_ms, skipped, term = 0, 0, list[str](), 0
    if has_journal:
        if not interrupted:
            check_owner(disk, JOURNAL_DIRECTORY, owner_of(identity))
        journal = _open_journal(disk, config.core.segment_bytes, restored.applied_index)
        try:
            replayed, newest_ms, skipped = _replay(journal, restored, () if interrupted else skip)
            term = max(journal.term, journal.last_term)
        finally:
            journal.close()
    elif not interrupted:
        # None is begun before the state is the new cluster's: a member of the old one would start on it.
        _check_skip(skip, 1, 0)
    if not state.created or not state.applied_index:
        raise RefoundError("this data directory holds no state of a cluster yet: there is nothing to go on from")
    old_members = tuple(member.node_id for member in state.members())
    if old_id == cluster_id:
        raise RefoundError(
            f"cluster.id is {cluster_id}, as before: give the new cluster an id of its own, so that no node and "
            "no disk of the old one is ever taken for a member"
        )
    new = new_identity(cluster_id, node_id)
    state.refound(cluster_id, Member(node_id, config.peer_address, config.client_address, new.disk_uuid))
    checkpoint = state.begin_checkpoint()
    checkpoint.run()
    write_whole(disk, MANIFEST_PATH, checkpoint.manifest.SerializeToString())
    state.checkpoint_durable(checkpoint)
    term = max(term, state.applied_term, state.lead_term) + 1
    disk.remove(GIVEN_UP_JOURNAL)
    if disk.exists(JOURNAL_DIRECTORY):
        disk.rename(JOURNAL_DIRECTORY, GIVEN_UP_JOURNAL)
        disk.fsync_dir("")
        disk.remove(GIVEN_UP_JOURNAL)
    if disk.exists(LEASES_PATH):
        disk.remove(LEASES_PATH)  # its positions may belong to other messages in the new cluster
    if disk.exists(FOUNDING_PATH):
        disk.remove(FOUNDING_PATH)  # it lists the old cluster's founders and their disks
    disk.fsync_dir("")
    begun = Journal.open(disk, JOURNAL_DIRECTORY, segment_bytes=config.core.segment_bytes, owner=owner_of(new))
    begun.reset_to(state.applied_index, state.applied_term)
    begun.set_hard_state(term, "")
    begun.close()
    store_identity(disk, new)
    return Found(
        old_id,
        old_members,
        state.applied_index,
        replayed,
        newest_ms,
        restored.wheel.pending,
        state.backlog.total,
        tuple(skipped),
        without_journal=not has_journal and not interrupted,
    )


def _open_journal(disk: Disk, segment_bytes: int, covered: int) -> Journal:
    """The journal. `covered`: index up to which the checkpoint holds the log. Raises DiskError; for damage its text
    says how to go on without the journal."""
    try:
        return Journal.open(disk, JOURNAL_DIRECTORY, segment_bytes=segment_bytes)
    except CorruptFileError as error:
        advice = "Put the file back as it was, or restore a backup"
        if covered:
            advice += (
                f"; or move {JOURNAL_DIRECTORY}/ out of the directory and run the command again: it then goes on from "
                f"the checkpoint of entry {covered}, and what was written later is lost"
            )
        raise CorruptFileError(error.path, error.offset, error.cause, advice) from error


def _replay(journal: Journal, restored: Restored, skip: Collection[int]) -> tuple[int, int, list[str]]:
    """Apply what the journal holds behind the checkpoint; how many entries, when the newest was written, what not.

    All of it, committed or not: this node cannot know, and what was acknowledged is among it.
    """
    state = restored.state
    if not journal.base_index <= state.applied_index <= journal.last_index:
        if journal.base_index > state.applied_index:
            raise RefoundError(
                f"the journal begins behind entry {journal.base_index}, the checkpoint ends at {state.applied_index}: "
                "what lies between is not on this disk; use another one, or a backup"
            )
        _check_skip(skip, journal.last_index + 1, journal.last_index)
        return 0, 0, []  # the journal ends before the checkpoint: it came from a peer or a backup
    first = state.applied_index + 1
    _check_skip(skip, first, journal.last_index)
    newest_ms = 0
    skipped: list[str] = []
    for index in range(first, journal.last_index + 1):
        _, term, written = journal.entry(index)
        try:
            command = command_of(written)
        except ValueError as error:
            raise RefoundError(f"entry {index} of the journal cannot be read by this version: {error}") from error
        if not command:
            state.note_applied(index, term)
            continue
        try:
            entry = read_entry(command)
        except DecodeError as error:
            if index not in skip:
                raise _cannot_apply(index, error) from error
            entry = None
        if entry is None or index in skip:
            skipped.append(f"{index}: {_described(entry, len(command))}")
            state.note_applied(index, term)
            continue
        try:
            state.apply(index, term, entry)
        except DiskError:
            raise
        except Exception as error:
            if wants_memory(error):
                raise MemoryError(f"no memory to apply entry {index}") from error
            raise _cannot_apply(index, error) from error
        newest_ms = max(newest_ms, entry.stamped_ms)
    return journal.last_index + 1 - first, newest_ms, skipped


def _check_skip(skip: Collection[int], first: int, last: int) -> None:
    for index in skip:
        if not first <= index <= last:
            which = f"({first} to {last})" if first <= last else "(there are none)"
            raise RefoundError(f"entry {index} is not among those to be replayed {which}; nothing was changed")


def _cannot_apply(index: int, error: Exception) -> RefoundError:
    return RefoundError(
        f"entry {index} of the journal cannot be applied: {error or type(error).__name__}; nothing was changed. "
        f"What it holds is lost if you go on without it: --skip-entry {index}"
    )


def _described(entry: LogEntry | None, size: int) -> str:
    """A description of an entry for the operator who leaves it out."""
    if entry is None:
        return f"{size} bytes that nobody can decode"
    kinds = Counter(command.WhichOneof("body") or "unknown" for command in entry.commands)
    return f"{size} bytes: " + ", ".join(f"{count} {kind}" for kind, count in kinds.items())
