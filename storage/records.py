"""Record files: a header, then records that are checked one by one; only ever appended to.

Layout: magic `TWRECORD`, u32 format version, u32 CRC32C of these twelve bytes; then per record u32
length, u32 CRC32C of length and payload, payload. Zeros behind the last record (reserved space)
are its end.

A file that a crash cut short ends in a torn record, and reading stops before it. If a whole record
follows a bad one, that is no crash but damage: CorruptFileError. (Who needs more certainty, because
a crash may leave whole pages behind missing ones, keeps what had been synced: see the journal.)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import google_crc32c

from tickwheel.storage.disk import Disk, File
from tickwheel.storage.errors import ADVICE, CorruptFileError, UnknownVersionError

FORMAT_VERSION = 1
RECORD_BYTES_MAX = 64 << 20
"""A length above it is not believed."""
SEARCH_BYTES_MAX = 1 << 20
"""How far behind a bad record a whole one is looked for."""

_MAGIC = b"TWRECORD"
_HEADER = struct.Struct("<8sII")
_RECORD = struct.Struct("<II")
HEADER_BYTES = _HEADER.size


class RecordFile:
    """One record file, open for reading and appending. Opening one that is torn cuts its end."""

    def __init__(self, disk: Disk, path: str) -> None:
        """Open or create. Raises CorruptFileError, UnknownVersionError."""
        self._file: File = disk.open(path, create=True)
        self._end = HEADER_BYTES
        size = self._file.size()
        header = self._file.read_at(0, HEADER_BYTES)
        if len(header) < HEADER_BYTES or not any(header):
            if any(self._file.read_at(HEADER_BYTES, size)):
                raise CorruptFileError(path, 0, "the header is missing", ADVICE)
            self._file.truncate(0)
            body = _HEADER.pack(_MAGIC, FORMAT_VERSION, 0)[:-4]
            self._file.append(body + google_crc32c.value(body).to_bytes(4, "little"))
            return
        magic, version, crc32c = _HEADER.unpack(header)
        if magic != _MAGIC or crc32c != google_crc32c.value(header[:-4]):
            raise CorruptFileError(path, 0, "the header fails its check", ADVICE)
        if version > FORMAT_VERSION:
            raise UnknownVersionError(path, version, FORMAT_VERSION)
        for offset, payload in self.records():
            self._end = offset + _RECORD.size + len(payload)
        if self._end != size:
            self._file.truncate(self._end)

    @property
    def size(self) -> int:
        """Bytes up to the end of the last record."""
        return self._end

    def append(self, payloads: Sequence[bytes]) -> int:
        """Append records; returns the offset of the first. On DiskFullError none was written."""
        parts: list[bytes] = []
        for payload in payloads:
            length = len(payload).to_bytes(4, "little")
            parts += (length, google_crc32c.extend(google_crc32c.value(length), payload).to_bytes(4, "little"), payload)
        start = self._file.append_many(parts)
        self._end = start + sum(map(len, parts))
        return start

    def records(self) -> Iterator[tuple[int, bytes]]:
        """Offset and payload of each record. Raises CorruptFileError for damage that no crash leaves."""
        offset = HEADER_BYTES
        while (payload := self._payload_at(offset)) is not None:
            yield offset, payload
            offset += _RECORD.size + len(payload)
        self._judge_end(offset)

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def _payload_at(self, offset: int) -> bytes | None:
        head = self._file.read_at(offset, _RECORD.size)
        if len(head) < _RECORD.size or not any(head):
            return None
        length, crc32c = _RECORD.unpack(head)
        if length > RECORD_BYTES_MAX:
            return None
        payload = self._file.read_at(offset + _RECORD.size, length)
        if len(payload) < length or google_crc32c.extend(google_crc32c.value(head[:4]), payload) != crc32c:
            return None
        return payload

    def _judge_end(self, offset: int) -> None:
        head = self._file.read_at(offset, _RECORD.size)
        candidates: list[int] = []
        if len(head) == _RECORD.size and any(head):
            candidates.append(offset + _RECORD.size + _RECORD.unpack(head)[0])
        tail = self._file.read_at(offset + 1, SEARCH_BYTES_MAX)
        for at in range(len(tail) - _RECORD.size):
            length = int.from_bytes(tail[at : at + 4], "little")
            # An empty record is eight bytes that chance could bring together; the search passes over those.
            if 0 < length <= len(tail) - at - _RECORD.size:
                candidates.append(offset + 1 + at)
        if any(self._payload_at(candidate) is not None for candidate in candidates):
            raise CorruptFileError(
                self._file.path, offset, "a record fails its check, and whole ones follow it", ADVICE
            )
