"""The journal's files: their format, and how a start reads them (`replay`) and tells damage from a torn end.

A segment is a file: a header, records one after the other, then zeros (space reserved ahead). A *position* counts
bytes since the beginning of the journal, through all segments that ever were. Offset 0 of a segment is at its
`start_position`.

Every header and record states up to which position the journal was on stable storage when it was written
(`fsynced_position`). That tells a crash from damage: after the last fsync any page may be missing, even with intact
pages behind it, but nothing below an fsynced position may be missing. So a record that fails its check is
- damage, if a later header or record states that this place had been fsynced;
- damage, if each of its sectors holds data: a crash leaves zeros where it loses data, since the space was reserved as
  zeros and is never used twice;
- the torn end otherwise.

A directory without its last files looks like a crash, too. So the file `newest` has the number of the newest segment
that an fsync has covered. It is durable before an entry of that segment counts as durable, unless the disk is full.

The checksum of a record covers the segment's number and the record's offset too, so a record in the wrong place fails
its check.

Invariants of `replay`:
- Every record that an fsync had covered is read, or CorruptJournalError is raised: no fsynced record is cut away.
- On return the end is cut durably: only zeros follow it, on stable storage too. So new records can never mix with
  the remains of old ones.
- On return all records read are on stable storage, even those that a killed process had not fsynced.
- At most PIECE_BYTES of a segment, or one record, is in memory at once, besides the commands that the caller keeps.

Called by `journal.py`. The restore of a checkpoint calls `entries_cut`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise

import google_crc32c

from tickwheel.storage.disk import Disk, DiskError, DiskFullError, File
from tickwheel.storage.errors import ADVICE, CorruptFileError, UnknownVersionError
from tickwheel.storage.owner import NOBODY, Owner
from tickwheel.storage.whole_file import read_whole, write_whole

FORMAT_VERSION = 1
SECTOR_BYTES = 512
"""A disk writes a sector whole or not at all."""
PIECE_BYTES = 1 << 20
"""A start reads this much of a segment at a time, or one record if that is longer."""

KIND_ENTRY = 1
KIND_TRUNCATE = 2
"""The entries from `index` on are dropped; `term` is that of the entry before."""
KIND_MARK = 3
"""`index` is the commit index that was known when the record was written."""

FLAG_RESET = 1
"""The journal starts again with this segment; earlier segments do not count."""

_SEGMENT_MAGIC = b"TWJOURNL"
_SEGMENT = struct.Struct("<8sIIQQQQQII")
SEGMENT_HEADER_BYTES = _SEGMENT.size
_RECORD_MAGIC = b"\xc3TWr"
_CHECKED = struct.Struct("<IIIIQQQ")
_PLACE = struct.Struct("<QQ")
RECORD_HEADER_BYTES = 8 + _CHECKED.size
_KINDS = frozenset({KIND_ENTRY, KIND_TRUNCATE, KIND_MARK})

NEWEST_FILE = "newest"
_NEWEST = struct.Struct("<Q")


class CorruptJournalError(CorruptFileError):
    """The journal is damaged where no crash can have damaged it."""

    def __init__(self, path: str, offset: int, cause: str) -> None:
        super().__init__(path, offset, cause, ADVICE)


class JournalFailedError(DiskError):
    """A write or an fsync has failed before, or the journal is closed: it takes no more work."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The first bytes of a segment. `base_index` and `base_term` are those of the last entry before it."""

    sequence: int
    base_index: int
    base_term: int
    start_position: int
    fsynced_position: int
    flags: int = 0
    version: int = FORMAT_VERSION
    owner_tag: int = 0
    """`Owner.tag` of the directory that the segment was written in; 0 in segments of earlier versions."""

    def pack(self) -> bytes:
        body = _SEGMENT.pack(
            _SEGMENT_MAGIC,
            self.version,
            self.flags,
            self.sequence,
            self.base_index,
            self.base_term,
            self.start_position,
            self.fsynced_position,
            self.owner_tag,
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
            fsynced_position=fields[7],
            flags=fields[2],
            version=fields[1],
            owner_tag=fields[8],
        )


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """The header of a record, before its command. `crc32c` and `length` are those of the command."""

    kind: int
    length: int
    crc32c: int
    index: int
    term: int
    fsynced_position: int


@dataclass(slots=True)
class Segment:
    """An open segment. Its records end at offset `end`."""

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
    stems = (name.removesuffix(".segment") for name in names if name.endswith(".segment"))
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def pack_record(
    sequence: int, offset: int, kind: int, index: int, term: int, command: bytes, fsynced_position: int
) -> bytes:
    """The header for `command` in a record at `offset` of segment `sequence`."""
    checked = _CHECKED.pack(kind, len(command), google_crc32c.value(command), 0, index, term, fsynced_position)
    crc32c: int = google_crc32c.value(_PLACE.pack(sequence, offset) + checked)
    return _RECORD_MAGIC + crc32c.to_bytes(4, "little") + checked


def unpack_record(data: bytes, at: int, sequence: int, offset: int) -> RecordHeader | None:
    """The header at `data[at:]`, read from `offset` of its segment; None if it is cut short or fails its check."""
    checked = data[at + 8 : at + RECORD_HEADER_BYTES]
    if len(checked) < _CHECKED.size or data[at : at + 4] != _RECORD_MAGIC:
        return None
    crc32c = google_crc32c.value(_PLACE.pack(sequence, offset) + checked)
    if crc32c != int.from_bytes(data[at + 4 : at + 8], "little"):
        return None
    kind, length, command_crc32c, _, index, term, fsynced_position = _CHECKED.unpack(checked)
    if kind not in _KINDS:
        return None
    return RecordHeader(kind, length, command_crc32c, index, term, fsynced_position)


class SegmentReader:
    """Reads a segment's file in pieces, so that the memory in use does not grow with the segment."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._piece = b""
        self._piece_start = 0
        self.size = file.size()
        """Bytes of the file, which must not change while this reader is in use."""

    def read(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes, fewer at the end of the file. Cheap for ascending offsets."""
        at = offset - self._piece_start
        wanted = min(size, self.size - offset)
        if at < 0 or at + wanted > len(self._piece):
            self._piece = b""  # not held beside the next one
            self._piece = self._file.read_at(offset, max(size, PIECE_BYTES))
            self._piece_start = offset
            at = 0
        return self._piece[at : at + size]


def scan(reader: SegmentReader, sequence: int) -> Iterator[tuple[int, RecordHeader, bytes]]:
    """(offset, header, command) of each intact record in order. Ends before the first record that is not intact."""
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
    """The record header at `offset`; None if there is no intact one."""
    return unpack_record(reader.read(offset, RECORD_HEADER_BYTES), 0, sequence, offset)


def record_may_be_torn(reader: SegmentReader, sequence: int, offset: int) -> bool:
    """Whether a crash can explain that no intact record begins at `offset`."""
    header = record_header(reader, sequence, offset)
    size = RECORD_HEADER_BYTES + (header.length if header is not None else 0)
    return may_be_torn(reader, offset, offset + size)


def may_be_torn(reader: SegmentReader, start: int, end: int) -> bool:
    """Whether the bytes of at least one sector in this range are missing or all zeros."""
    if end > reader.size:
        return True
    while start < end:
        piece_end = min(end, (start // SECTOR_BYTES + 1) * SECTOR_BYTES)
        piece = reader.read(start, piece_end - start)
        if piece.count(0) == len(piece):
            return True
        start = piece_end
    return False


def fsynced_beyond(reader: SegmentReader, sequence: int, start: int, position: int) -> bool:
    """Whether an intact header at or after offset `start` states an fsynced position above `position`."""
    if start < SEGMENT_HEADER_BYTES:
        segment_header = SegmentHeader.unpack(reader.read(0, SEGMENT_HEADER_BYTES), sequence)
        if segment_header is not None and segment_header.fsynced_position > position:
            return True
    # The pieces overlap, so that each header lies wholly within one of them.
    overlap = RECORD_HEADER_BYTES - 1
    while start < reader.size:
        piece = reader.read(start, PIECE_BYTES)
        # One byte is found twenty times as fast as four: mostly this is reserved space, which is zeros.
        at = piece.find(_RECORD_MAGIC[:1])
        at = piece.find(_RECORD_MAGIC, at) if at >= 0 else -1
        while at >= 0:
            header = unpack_record(piece, at, sequence, start + at)
            if header is not None and header.fsynced_position > position:
                return True
            at = piece.find(_RECORD_MAGIC, at + 1)
        start += PIECE_BYTES - overlap
    return False


def read_newest(disk: Disk, directory: str) -> int:
    """Number of the newest segment on record; 0: none is, as in a journal of an earlier version. Raises DiskError."""
    content = _newest(disk, directory)
    sequence: int = _NEWEST.unpack_from(content)[0] if content else 0
    return sequence


def _newest(disk: Disk, directory: str) -> bytes:
    path = f"{directory}/{NEWEST_FILE}"
    content = read_whole(disk, path)
    if content is not None and len(content) < _NEWEST.size:
        raise CorruptJournalError(path, 0, "too short")
    return content or b""


def check_segments(disk: Disk, directory: str, owner: Owner) -> None:
    """Raise ForeignFileError if a file of the journal names another owner. Changes nothing."""
    owner.check(f"{directory}/{NEWEST_FILE}", _newest(disk, directory)[_NEWEST.size :])
    for sequence in segment_sequences(disk.list(directory)):
        header = _header(disk, directory, sequence)
        if header is not None:
            owner.check_tag(segment_path(directory, sequence), header.owner_tag)


def record_newest(disk: Disk, directory: str, sequence: int, owner: Owner = NOBODY) -> bool:
    """Record the newest segment, which an fsync has covered; durable on return. False: the disk is full."""
    try:
        write_whole(disk, f"{directory}/{NEWEST_FILE}", _NEWEST.pack(sequence) + owner.pack())
    except DiskFullError:
        return False
    return True


OnSegment = Callable[[SegmentHeader, str], None]
OnRecord = Callable[[SegmentHeader, str, int, RecordHeader, bytes], None]


def replay(disk: Disk, directory: str, on_segment: OnSegment, on_record: OnRecord) -> list[Segment]:
    """Call back for each segment and record that counts, in order. Returns the segments, repaired and open.

    Raises CorruptJournalError, UnknownVersionError.
    """
    found = segment_sequences(disk.list(directory))
    void, found = _split_at_reset(disk, directory, found)
    newest = read_newest(disk, directory)
    if found and newest > found[-1]:
        raise CorruptJournalError(segment_path(directory, newest), 0, "it was removed")
    for before, after in pairwise(found):
        if after != before + 1:
            raise CorruptJournalError(segment_path(directory, before + 1), 0, "it was removed, and a later one is here")
    segments: list[Segment] = []
    fsynced_position = 0
    unusable: list[int] = []
    with ExitStack() as opened:
        for place, sequence in enumerate(found):
            path = segment_path(directory, sequence)
            file = disk.open(path)
            opened.callback(file.close)
            reader = SegmentReader(file)
            header = SegmentHeader.unpack(reader.read(0, SEGMENT_HEADER_BYTES), sequence)
            if header is not None and header.version > FORMAT_VERSION:
                raise UnknownVersionError(path, header.version, FORMAT_VERSION)
            if header is None and not may_be_torn(reader, 0, SEGMENT_HEADER_BYTES):
                raise CorruptJournalError(path, 0, "the segment's header fails its check")
            if header is None or (segments and header.start_position != segments[-1].end_position):
                file.close()
                unusable = found[place:]
                break
            on_segment(header, path)
            end = SEGMENT_HEADER_BYTES
            fsynced_position = max(fsynced_position, header.fsynced_position)
            for offset, record, command in scan(reader, sequence):
                on_record(header, path, offset, record, command)
                fsynced_position = max(fsynced_position, record.fsynced_position)
                end = offset + RECORD_HEADER_BYTES + record.length
            segments.append(Segment(header, file, end))
        if unusable and not segments and 0 < newest < unusable[0]:  # only space reserved ahead is left
            raise CorruptJournalError(segment_path(directory, newest), 0, "it was removed")
        _judge_end(disk, directory, segments, unusable, newest)
        _repair(disk, directory, segments, void, unusable, fsynced_position)
        opened.pop_all()
    return segments


def entries_cut(disk: Disk, directory: str) -> int:
    """The number of entries before the first one that the journal holds; 0 if there is no journal.

    Does not look for damage: `replay` does.
    """
    _, sequences = _split_at_reset(disk, directory, segment_sequences(disk.list(directory)))
    if not sequences:
        return 0
    header = _header(disk, directory, sequences[0])
    return header.base_index if header is not None else 0


def _header(disk: Disk, directory: str, sequence: int) -> SegmentHeader | None:
    file = disk.open(segment_path(directory, sequence))
    try:
        return SegmentHeader.unpack(file.read_at(0, SEGMENT_HEADER_BYTES), sequence)
    finally:
        file.close()


def _split_at_reset(disk: Disk, directory: str, sequences: Sequence[int]) -> tuple[list[int], list[int]]:
    """(numbers before, numbers from) the last segment that starts the journal over; those before it are void."""
    for place in range(len(sequences) - 1, 0, -1):
        header = _header(disk, directory, sequences[place])
        if header is not None and header.flags & FLAG_RESET:
            return list(sequences[:place]), list(sequences[place:])
    return [], list(sequences)


def _judge_end(disk: Disk, directory: str, segments: Sequence[Segment], unusable: Sequence[int], newest: int) -> None:
    """Raise CorruptJournalError unless a crash can explain that the intact records end where they do."""
    position = 0
    path, offset = (segment_path(directory, unusable[0]), 0) if unusable else (directory, 0)
    if segments:
        last = segments[-1]
        sequence = last.header.sequence
        position, path, offset = last.end_position, last.file.path, last.end
        reader = SegmentReader(last.file)
        if not record_may_be_torn(reader, sequence, offset):
            raise CorruptJournalError(path, offset, "the record fails its check, and no crash leaves it like this")
        if fsynced_beyond(reader, sequence, offset, position):
            raise CorruptJournalError(path, offset, "the record fails its check, and it had been fsynced")
    for sequence in unusable:
        file = disk.open(segment_path(directory, sequence))
        try:
            beyond = sequence <= newest or fsynced_beyond(SegmentReader(file), sequence, 0, position)
        finally:
            file.close()
        if beyond:
            raise CorruptJournalError(
                path, offset, "what follows here is missing or fails its check, and it had been fsynced"
            )


def _repair(
    disk: Disk,
    directory: str,
    segments: Sequence[Segment],
    void: Sequence[int],
    unusable: Sequence[int],
    fsynced_position: int,
) -> None:
    """Cut the torn end, remove the segments that do not count, and fsync the rest.

    Bytes above `fsynced_position` are written again before the fsync. After a failed fdatasync the kernel may hold such
    pages as clean though they never reached the disk, and then no later fdatasync would write them.
    """
    # The last one first: a crash in between again leaves a journal with a torn end.
    for sequence in reversed(unusable):
        disk.remove(segment_path(directory, sequence))
    for sequence in void:
        disk.remove(segment_path(directory, sequence))
    if segments:
        segments[-1].file.truncate(segments[-1].end)
    for segment in segments:
        if segment.end_position > fsynced_position:
            start = max(0, fsynced_position - segment.header.start_position)
            for offset in range(start, segment.end, PIECE_BYTES):
                piece = segment.file.read_at(offset, min(PIECE_BYTES, segment.end - offset))
                segment.file.write_at(offset, piece)
    for segment in segments:
        segment.file.fsync()
    disk.fsync_dir(directory)
