"""The bytes of the journal: segment headers and records, and how a damaged one is judged.

A segment is a file: header, records one after the other, zeros (space reserved ahead). A place in
the journal is a *position*: bytes since its beginning, counted through all segments that ever were;
offset 0 of a segment is at its `start_position`.

Every header and record says up to which position the journal was on stable storage when it was
written (`synced_position`). That tells a crash from damage. Behind the last sync any page may be
missing, even with whole pages after it; below a position that was synced nothing may be. So a
record that fails its check is
- damage, if anything further on says that this place had been synced;
- damage, if each of its sectors holds something: what a crash leaves out is zeros, as the space was
  reserved as zeros and is never used twice;
- else the torn end.

The check of a record is seeded with the segment's number and the record's offset, so a record that
stands in the wrong place is none. Called by `journal.py` and `journal_replay.py` only.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import google_crc32c

from tickwheel.storage.disk import DiskError, File
from tickwheel.storage.errors import ADVICE, CorruptFileError

FORMAT_VERSION = 1
SECTOR_BYTES = 512
"""A disk writes a sector whole or not at all."""
PIECE_BYTES = 1 << 20
"""A start reads so much of a segment at once, or one record if that is longer."""

KIND_ENTRY = 1
KIND_TRUNCATE = 2
"""Entries from `index` on are gone; `term` is that of the entry before."""
KIND_MARK = 3
"""`index` is the commit index known when it was written."""

FLAG_RESET = 1
"""The journal begins anew with this segment: earlier ones are void."""

_SEGMENT_MAGIC = b"TWJOURNL"
_SEGMENT = struct.Struct("<8sIIQQQQQII")
SEGMENT_HEADER_BYTES = _SEGMENT.size
_RECORD_MAGIC = b"\xc3TWr"
_CHECKED = struct.Struct("<IIIIQQQ")
_PLACE = struct.Struct("<QQ")
RECORD_HEADER_BYTES = 8 + _CHECKED.size
_KINDS = frozenset({KIND_ENTRY, KIND_TRUNCATE, KIND_MARK})


class CorruptJournalError(CorruptFileError):
    """The journal is damaged where no crash can have damaged it."""

    def __init__(self, path: str, offset: int, cause: str) -> None:
        super().__init__(path, offset, cause, ADVICE)


class JournalFailedError(DiskError):
    """The journal refuses work because a sync has failed before: the process must stop."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """First bytes of a segment: `base` is the last entry before it."""

    sequence: int
    base_index: int
    base_term: int
    start_position: int
    synced_position: int
    flags: int = 0
    version: int = FORMAT_VERSION

    def pack(self) -> bytes:
        body = _SEGMENT.pack(
            _SEGMENT_MAGIC,
            self.version,
            self.flags,
            self.sequence,
            self.base_index,
            self.base_term,
            self.start_position,
            self.synced_position,
            0,
            0,
        )[:-4]
        crc32c: int = google_crc32c.value(body)
        return body + crc32c.to_bytes(4, "little")

    @classmethod
    def unpack(cls, data: bytes, sequence: int) -> SegmentHeader | None:
        """None if these are not the bytes of a header of that segment."""
        if len(data) < SEGMENT_HEADER_BYTES:
            return None
        fields = _SEGMENT.unpack_from(data)
        if fields[0] != _SEGMENT_MAGIC or fields[3] != sequence:
            return None
        if google_crc32c.value(data[: SEGMENT_HEADER_BYTES - 4]) != fields[9]:
            return None
        return cls(
            sequence=sequence,
            base_index=fields[4],
            base_term=fields[5],
            start_position=fields[6],
            synced_position=fields[7],
            flags=fields[2],
            version=fields[1],
        )


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """What stands before a record's command. `crc32c` is the command's."""

    kind: int
    length: int
    crc32c: int
    index: int
    term: int
    synced_position: int


@dataclass(slots=True)
class Segment:
    """An open segment: its records end at `end`."""

    header: SegmentHeader
    file: File
    end: int

    @property
    def end_position(self) -> int:
        return self.header.start_position + self.end


def segment_path(directory: str, sequence: int) -> str:
    return f"{directory}/{sequence:016d}.segment"


def segment_sequences(names: list[str]) -> list[int]:
    """Numbers of the segments among the names of a directory, ascending."""
    return sorted(int(stem) for stem, dot, kind in (name.partition(".") for name in names) if kind == "segment")


def pack_record(
    sequence: int, offset: int, kind: int, index: int, term: int, command: bytes, synced_position: int
) -> bytes:
    """The header that goes before `command` at `offset` of a segment."""
    checked = _CHECKED.pack(kind, len(command), google_crc32c.value(command), 0, index, term, synced_position)
    crc32c: int = google_crc32c.value(_PLACE.pack(sequence, offset) + checked)
    return _RECORD_MAGIC + crc32c.to_bytes(4, "little") + checked


def unpack_record(data: bytes, at: int, sequence: int, offset: int) -> RecordHeader | None:
    """The header at `data[at:]`, which stands at `offset` of its segment; None if there is none that is whole."""
    checked = data[at + 8 : at + RECORD_HEADER_BYTES]
    if len(checked) < _CHECKED.size or data[at : at + 4] != _RECORD_MAGIC:
        return None
    crc32c = google_crc32c.value(_PLACE.pack(sequence, offset) + checked)
    if crc32c != int.from_bytes(data[at + 4 : at + 8], "little"):
        return None
    kind, length, command_crc32c, _, index, term, synced_position = _CHECKED.unpack(checked)
    if kind not in _KINDS:
        return None
    return RecordHeader(kind, length, command_crc32c, index, term, synced_position)


class SegmentReader:
    """The bytes of a segment's file, read in pieces: what is held at once is bounded, however long the segment."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._piece = b""
        self._piece_start = 0
        self.size = file.size()
        """Bytes of the file; it must not change meanwhile."""

    def read(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes (fewer at the end of the file). Cheap for places that rise by less than a piece."""
        at = offset - self._piece_start
        wanted = min(size, self.size - offset)
        if at < 0 or at + wanted > len(self._piece):
            self._piece = b""  # not held beside the next one
            self._piece = self._file.read_at(offset, max(size, PIECE_BYTES))
            self._piece_start = offset
            at = 0
        return self._piece[at : at + size]


def scan(reader: SegmentReader, sequence: int) -> Iterator[tuple[int, RecordHeader, bytes]]:
    """The whole records of a segment in order: offset, header, command. Ends at the first that is not whole."""
    offset = SEGMENT_HEADER_BYTES
    while (header := record_header(reader, sequence, offset)) is not None:
        start = offset + RECORD_HEADER_BYTES
        if start + header.length > reader.size:
            return
        command = reader.read(start, header.length)
        if google_crc32c.value(command) != header.crc32c:
            return
        yield offset, header, command
        offset = start + header.length


def record_header(reader: SegmentReader, sequence: int, offset: int) -> RecordHeader | None:
    """The header at this place; None if there is none that is whole."""
    return unpack_record(reader.read(offset, RECORD_HEADER_BYTES), 0, sequence, offset)


def record_may_be_torn(reader: SegmentReader, sequence: int, offset: int) -> bool:
    """Whether a crash can have left what stands at `offset` instead of a whole record (or nothing)."""
    header = record_header(reader, sequence, offset)
    size = RECORD_HEADER_BYTES + (header.length if header is not None else 0)
    return may_be_torn(reader, offset, offset + size)


def may_be_torn(reader: SegmentReader, start: int, end: int) -> bool:
    """Whether some sector's part of these bytes is missing or all zeros."""
    if end > reader.size:
        return True
    while start < end:
        piece_end = min(end, (start // SECTOR_BYTES + 1) * SECTOR_BYTES)
        piece = reader.read(start, piece_end - start)
        if piece.count(0) == len(piece):
            return True
        start = piece_end
    return False


def synced_beyond(reader: SegmentReader, sequence: int, start: int, position: int) -> bool:
    """Whether anything whole at or behind offset `start` says that more than `position` had been synced."""
    if start < SEGMENT_HEADER_BYTES:
        segment_header = SegmentHeader.unpack(reader.read(0, SEGMENT_HEADER_BYTES), sequence)
        if segment_header is not None and segment_header.synced_position > position:
            return True
    # The pieces overlap, so that each header that begins in one of them (but the overlap) lies in it whole.
    overlap = RECORD_HEADER_BYTES - 1
    while start < reader.size:
        piece = reader.read(start, PIECE_BYTES)
        at = piece.find(_RECORD_MAGIC)
        while at >= 0:
            header = unpack_record(piece, at, sequence, start + at)
            if header is not None and header.synced_position > position:
                return True
            at = piece.find(_RECORD_MAGIC, at + 1)
        start += PIECE_BYTES - overlap
    return False
