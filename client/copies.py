"""The pieces of a backup, as a node sends them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from tickwheel.client.answers import reader
from tickwheel.proto import admin_pb2, common_pb2


@dataclass(frozen=True, slots=True)
class BackupOrigin:
    """Where a backup comes from."""

    cluster_id: str
    node_id: str
    applied_index: int
    """It holds what was applied up to this entry of the log."""
    made: datetime
    """When it was begun, by the cluster's clock, in UTC."""
    lag_entries: int
    """Committed entries that the node knew of and that the copy does not hold."""
    stale_reason: str
    """Why the copy may be old; empty: it is as new as its time."""
    version: str
    """Of the node's program."""


@dataclass(frozen=True, slots=True)
class BackupChunk:
    """A piece of one file."""

    path: str
    """Name of the file, relative to the data directory."""
    offset: int
    """Where the piece begins in its file."""
    data: bytes
    crc32c: int
    """Of `data`."""
    file_bytes: int
    """Size of the whole file."""
    total_bytes: int
    """Size of the whole copy."""
    last: bool
    """The copy is complete with this piece."""
    comparing: bool
    """This is no piece: the node still compares what the caller holds."""
    origin: BackupOrigin | None
    """With the first chunk; None with the others, and from a node of an earlier version."""


@dataclass(frozen=True, slots=True)
class HeldFile:
    """The beginning of a file that an earlier try has brought."""

    path: str
    """As the node named it."""
    bytes: int
    crc32c: int
    """Of these bytes."""


chunk_of = reader(BackupChunk, admin_pb2.BackupChunk)


def held_messages(held: Sequence[HeldFile]) -> list[common_pb2.HeldFile]:
    """What is held, for a node."""
    return [common_pb2.HeldFile(path=file.path, bytes=file.bytes, crc32c=file.crc32c) for file in held]
