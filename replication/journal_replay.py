"""Reads the journal at a start: decides which records count, and repairs a torn end.

Invariants:
- Every record that an fsync had covered is read, or CorruptJournalError is raised: no fsynced record is cut away.
- On return the end is cut durably: only zeros follow it, on stable storage too. So new records can never mix with
  the remains of old ones.
- On return all records read are on stable storage, even those that a killed process had not fsynced.
- At most PIECE_BYTES of a segment, or one record, is in memory at once, besides the commands that the caller keeps.

Called by `journal.py`. The restore of a checkpoint calls `entries_cut`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from tickwheel.replication.journal_segment import (
    FLAG_RESET,
    FORMAT_VERSION,
    PIECE_BYTES,
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    CorruptJournalError,
    RecordHeader,
    Segment,
    SegmentHeader,
    SegmentReader,
    fsynced_beyond,
    may_be_torn,
    record_may_be_torn,
    scan,
    segment_path,
    segment_sequences,
)
from tickwheel.storage.disk import Disk
from tickwheel.storage.errors import UnknownVersionError

OnSegment = Callable[[SegmentHeader, str], None]
OnRecord = Callable[[SegmentHeader, str, int, RecordHeader, bytes], None]


def replay(disk: Disk, directory: str, on_segment: OnSegment, on_record: OnRecord) -> list[Segment]:
    """Call back for each segment and record that counts, in order. Returns the segments, repaired and open.

    Raises CorruptJournalError, UnknownVersionError.
    """
    found = segment_sequences(disk.list(directory))
    void, found = _split_at_reset(disk, directory, found)
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
        _judge_end(disk, directory, segments, unusable)
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


def _judge_end(disk: Disk, directory: str, segments: Sequence[Segment], unusable: Sequence[int]) -> None:
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
            beyond = fsynced_beyond(SegmentReader(file), sequence, 0, position)
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
