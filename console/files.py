"""Files that somebody else may have put there: opened without waiting for a pipe, looked at once open, read to a limit.

Every function raises OSError.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

PIECE_BYTES = 1 << 20


@contextlib.contextmanager
def opened(path: str | Path, flags: int = 0, dir_fd: int | None = None) -> Iterator[int]:
    """The descriptor of a file or directory; `path` is below `dir_fd` if that is given."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags, dir_fd=dir_fd)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def is_file(found: os.stat_result) -> bool:
    """Whether it is a plain file, no directory, pipe or device."""
    return stat.S_ISREG(found.st_mode)


def content_of(descriptor: int, bytes_max: int) -> bytes | None:
    """The whole content; None: it is larger than `bytes_max`."""
    content = bytearray()
    while part := os.read(descriptor, PIECE_BYTES):
        content += part
        if len(content) > bytes_max:
            return None
    return bytes(content)
