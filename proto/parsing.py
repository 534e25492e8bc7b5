"""Bytes as a message, with want of memory told from bytes that are no message.

protobuf raises DecodeError for both. Where an entry of the log, a block or a file that no version can decode is passed
over or counts as damaged, a node that only lacks memory must not take that way.
"""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

M = TypeVar("M", bound=Message)

_NO_MEMORY = "Arena alloc failed"
"""In the text of the error, the status of protobuf's decoder in C."""


def parsed(kind: type[M], data: bytes) -> M:
    """The message. Raises DecodeError for bytes that are no message of this kind, and MemoryError."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        if _NO_MEMORY in str(error):
            raise MemoryError(f"no memory to decode {len(data)} bytes") from error
        raise
