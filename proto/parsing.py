"""Want of memory, told from bytes that are no message and from mistakes.

protobuf raises DecodeError for the first two. Where an entry of the log, a block or a file that no version can decode
is passed over or counts as damaged, a node that only lacks memory must not take that way: `parsed`. It raises
EncodeError for a message that it has no memory to encode or to copy: `wants_memory`.
"""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, EncodeError, Message

M = TypeVar("M", bound=Message)

_NO_MEMORY = "Arena alloc failed"
"""In the text of the error, the status of protobuf's decoder in C."""


def parsed(kind: type[M], data: bytes) -> M:
    """The message. Raises DecodeError for bytes that are no message of this kind, and MemoryError."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        if wants_memory(error):
            raise MemoryError(f"no memory to decode {len(data)} bytes") from error
        raise


def wants_memory(error: BaseException | None) -> bool:
    """Whether an error is that of a process without memory. Messages of ours can be encoded: they have no required
    fields, and none nests deep."""
    return isinstance(error, (MemoryError, EncodeError)) or (
        isinstance(error, DecodeError) and _NO_MEMORY in str(error)
    )
