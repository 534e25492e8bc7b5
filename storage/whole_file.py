"""Small files that are written and read whole: after a crash, a file is either the old one or the new one.

Layout: magic `TWWHOLE1`, u32 format version, u32 CRC32C of the content, u64 its length, content.
A write has four steps, and none may be left out: write aside, fsync, rename into place, fsync the directory.
So a file with a wrong checksum is always damage, never the trace of a crash.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import google_crc32c

from tickwheel.storage.disk import Buffer, Disk, parent_of
from tickwheel.storage.errors import ADVICE, CorruptFileError, UnknownVersionError

FORMAT_VERSION = 1
CHECK_BYTES = 1 << 20
"""Bytes read at a time for a checksum."""
ASIDE_SUFFIX = ".new"
"""Suffix of the file that an unfinished write leaves; the next write of the same file replaces it."""

_MAGIC = b"TWWHOLE1"
_HEADER = struct.Struct("<8sIIQ")


def write_whole(disk: Disk, path: str, content: Buffer) -> None:
    """Replace `path` by `content`; durable on return. After an error the old file is still in place."""
    write_pieces(disk, path, [content])


def write_pieces(disk: Disk, path: str, pieces: Iterable[Buffer]) -> None:
    """`write_whole` of the joined pieces, which are never in memory together."""
    aside = path + ASIDE_SUFFIX
    file = disk.open(aside, create=True)
    try:
        file.truncate(0)
        file.append(bytes(_HEADER.size))
        crc32c = length = 0
        for piece in pieces:
            data = bytes(piece)
            file.append(data)
            crc32c, length = google_crc32c.extend(crc32c, data), length + len(data)
        file.write_at(0, _HEADER.pack(_MAGIC, FORMAT_VERSION, crc32c, length))
        file.fsync()
    finally:
        file.close()
    disk.rename(aside, path)
    disk.fsync_dir(parent_of(path))


def file_crc(disk: Disk, path: str) -> int:
    """CRC32C of a file's bytes including the header, read in pieces."""
    file = disk.open(path)
    try:
        crc32c = 0
        for offset in range(0, file.size(), CHECK_BYTES):
            crc32c = google_crc32c.extend(crc32c, file.read_at(offset, CHECK_BYTES))
        return crc32c
    finally:
        file.close()


def read_whole(disk: Disk, path: str, *, advice: str = ADVICE) -> bytes | None:
    """The content, or None if there is no such file. Raises CorruptFileError, UnknownVersionError."""
    if not disk.exists(path):
        return None
    file = disk.open(path)
    try:
        data = file.read_at(0, file.size())
    finally:
        file.close()
    if len(data) < _HEADER.size:
        raise CorruptFileError(path, 0, f"{len(data)} bytes are too few for a header", advice)
    magic, version, crc32c, length = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise CorruptFileError(path, 0, f"it does not begin with {_MAGIC.decode()}", advice)
    if version > FORMAT_VERSION:
        raise UnknownVersionError(path, version, FORMAT_VERSION)
    content = data[_HEADER.size :]
    if len(content) != length:
        raise CorruptFileError(path, 16, f"its content has {len(content)} bytes, but {length} were written", advice)
    if google_crc32c.value(content) != crc32c:
        raise CorruptFileError(path, _HEADER.size, "its checksum does not match", advice)
    return content
