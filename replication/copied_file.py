"""One file of a checkpoint on its way to a receiver, a peer or a backup, that may hold the beginning of it already.

What the receiver holds is read here, too, and compared by its checksum; only what is behind it is sent. So a copy that
broke resumes, and no file is ever put together from two versions: one that differs is sent from its beginning.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import google_crc32c

from tickwheel.proto.common_pb2 import HeldFile

CHUNK_BYTES = 1 << 20
COMPARED_BYTES_PER_S = 256 << 20
"""Data that the receiver holds is compared instead of sent, which is faster: it needs only this node's disk."""
HELD_FILES_MAX = 20_000
"""Named by a receiver, about 2 MB; the smallest of more are sent again."""
HELD_PATH_BYTES_MAX = 1_024
"""Of the path of one; those of checkpoints have less than 100."""


class CopiedFile(Protocol):
    """One file of a checkpoint; its first `bytes` bytes belong to the checkpoint."""

    @property
    def path(self) -> str: ...

    @property
    def bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a file: compared with what the receiver holds, or to be sent."""

    offset: int
    data: bytes
    compared: bool


async def pieces(
    copied: CopiedFile, held: HeldFile | None, read: Callable[[int, int], Awaitable[bytes]]
) -> AsyncIterator[Piece]:
    """The pieces of a file: first those that are compared, then those to send. At least one to send, perhaps empty.

    `read(offset, size)` returns exactly `size` bytes, or raises.
    """
    offset = 0
    if held is not None and held.bytes <= copied.bytes:
        crc32c = at = 0
        while at < held.bytes:
            data = await read(at, min(CHUNK_BYTES, held.bytes - at))
            crc32c = google_crc32c.extend(crc32c, data)
            yield Piece(at, data, compared=True)
            at += len(data)
        if crc32c == held.crc32c:
            offset = held.bytes
    while True:
        data = await read(offset, min(CHUNK_BYTES, copied.bytes - offset))
        yield Piece(offset, data, compared=False)
        offset += len(data)
        if offset >= copied.bytes:
            return
