"""Reading the journal at start: which records count, and the repair of a torn end.

Invariants:
- Everything that was ever on stable storage is read, or CorruptJournalError is raised: nothing is
  cut away that a sync had covered.
- On return the end is durably cut: behind it there are only zeros, on stable storage too, so that
  what is written next can never mix with what was there.
- On return all that was read is on stable storage, even what a killed process had not synced.
- Of a segment no more than PIECE_BYTES, or one record, is in memory at once: what is kept are the commands alone.

Called by `journal.py`; `entries_cut` by who restores a checkpoint.
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
    may_be_torn,
    record_may_be_torn,
    scan,
    segment_path,
    segment_sequences,
    synced_beyond,
)
from tickwheel.storage.disk import Disk
from tickwheel.storage.errors import UnknownVersionError

OnSegment = Callable[[SegmentHeader, str], None]
OnRecord = Callable[[SegmentHeader, str, int, RecordHeader, bytes], None]


def replay(disk: Disk, directory: str, on_segment: OnSegment, on_record: OnRecord) -> list[Segment]:
    """Hand each segment and record that counts to the callbacks, in order; returns the segments, repaired and open.

    Raises CorruptJournalError, UnknownVersionError.
    """
    found = segment_sequences(disk.list(directory))
    void, found = _split_at_reset(disk, directory, found)
    segments: list[Segment] = []
    synced_position = 0
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
            synced_position = max(synced_position, header.synced_position)
            for offset, record, command in scan(reader, sequence):
                on_record(header, path, offset, record, command)
                synced_position = max(synced_position, record.synced_position)
                end = offset + RECORD_HEADER_BYTES + record.length
            segments.append(Segment(header, file, end))
        _judge_end(disk, directory, segments, unusable)
        _repair(disk, directory, segments, void, unusable, synced_position)
        opened.pop_all()
    return segments


def entries_cut(disk: Disk, directory: str) -> int:
    """How many entries at the beginning are not in the journal any more, or never were; 0 for one that is not there.

    Says nothing of damage: `replay` does."""
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
    """What lies before the last segment that begins the journal anew, and the rest."""
    for place in range(len(sequences) - 1, 0, -1):
        header = _header(disk, directory, sequences[place])
        if header is not None and header.flags & FLAG_RESET:
            return list(sequences[:place]), list(sequences[place:])
    return [], list(sequences)


def _judge_end(disk: Disk, directory: str, segments: Sequence[Segment], unusable: Sequence[int]) -> None:
    """Raise CorruptJournalError unless a crash can have ended the journal where its whole records end."""
    position = 0
    path, offset = (segment_path(directory, unusable[0]), 0) if unusable else (directory, 0)
    if segments:
        last = segments[-1]
        sequence = last.header.sequence
        position, path, offset = last.end_position, last.file.path, last.end
        reader = SegmentReader(last.file)
        if not record_may_be_torn(reader, sequence, offset):
            raise CorruptJournalError(path, offset, "the record fails its check, and no crash leaves it like this")
        if synced_beyond(reader, sequence, offset, position):
            raise CorruptJournalError(path, offset, "the record fails its check, and it had been synced")
    for sequence in unusable:
        file = disk.open(segment_path(directory, sequence))
        try:
            beyond = synced_beyond(SegmentReader(file), sequence, 0, position)
        finally:
            file.close()
        if beyond:
            raise CorruptJournalError(
                path, offset, "what follows here is missing or fails its check, and it had been synced"
            )


def _repair(
    disk: Disk,
    directory: str,
    segments: Sequence[Segment],
    void: Sequence[int],
    unusable: Sequence[int],
    synced_position: int,
) -> None:
    """Cut the end, remove what does not count, and bring all the rest to stable storage.

    What nobody has said was synced is written again first: after a failed fdatasync the kernel may hold
    such pages as clean though they never reached the disk, and no later fdatasync would write them.
    """
    # The last one first: what a crash leaves of this is again a journal with a torn end.
    for sequence in reversed(unusable):
        disk.remove(segment_path(directory, sequence))
    for sequence in void:
        disk.remove(segment_path(directory, sequence))
    if segments:
        segments[-1].file.truncate(segments[-1].end)
    for segment in segments:
        if segment.end_position > synced_position:
            start = max(0, synced_position - segment.header.start_position)
            for offset in range(start, segment.end, PIECE_BYTES):
                piece = segment.file.read_at(offset, min(PIECE_BYTES, segment.end - offset))
                segment.file.write_at(offset, piece)
    for segment in segments:
        segment.file.sync()
    disk.sync_dir(directory)
