"""The journal: the Raft log of one node on its disk, and its term and vote.

Owns a directory of segments (`journal_files.py`) and the file of the hard state.

Invariants:
- Entries have indexes without gaps: base_index < first_index .. last_index. Terms never fall.
- Entries at or below `durable_index` survive a power loss, unchanged. It rises only by an fsync that
  began after they were written, and falls when entries are truncated.
- Segments are only ever appended to. A truncation is a record too. So an fsync of new entries also covers the
  truncation before them, and replaced entries never count as durable without it.
- A hard state counts when `set_hard_state` has returned, and never goes back.
- After a write or an fsync that failed for any reason but a full disk, every call that writes raises
  JournalFailedError. What is held can still be read.
- The space of the next segment is reserved ahead (`reserve_ready`), so a disk that fills up leaves room to stop.

Called by the replicated log on the node's one thread; only `FsyncWork.run` runs in a worker, one at
a time, while appends go on.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import google_crc32c

from tickwheel.replication.journal_files import (
    FLAG_RESET,
    KIND_ENTRY,
    KIND_MARK,
    KIND_TRUNCATE,
    NEWEST_FILE,
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    CorruptJournalError,
    JournalFailedError,
    RecordHeader,
    Segment,
    SegmentHeader,
    check_segments,
    pack_record,
    read_newest,
    record_newest,
    replay,
    segment_path,
    unpack_record,
)
from tickwheel.storage.disk import Disk, DiskError, DiskFullError, File, FsyncFailedError
from tickwheel.storage.errors import CorruptFileError, UnknownVersionError
from tickwheel.storage.owner import NOBODY, Owner
from tickwheel.storage.whole_file import read_whole, write_whole

__all__ = ["HARD_STATE_FILE", "CorruptJournalError", "FsyncWork", "Journal", "JournalFailedError", "check_owner"]

SEGMENT_BYTES = 64 << 20
CACHE_BYTES_MAX = 64 << 20

Entry = tuple[int, int, bytes]


class Journal:
    """The entries, term and vote of one node on disk. Create it with `open`."""

    def __init__(self, disk: Disk, directory: str, segment_bytes: int, cache_bytes_max: int, owner: Owner) -> None:
        """Called by `open` only."""
        self._disk = disk
        self._owner = owner
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._hard_state = HardState(disk, directory, owner)
        self._entries = JournalEntries(cache_bytes_max)
        self._segments: list[Segment] = []
        self._based = False
        self.durable_index = 0
        self.commit_hint = 0
        """The highest index given to `note_commit`, at most last_index; a start finds the one before the last fsync."""
        self._commit_written = 0
        # Files written to since the last fsync began.
        self._dirty: list[File] = []
        self._dir_dirty = False
        # On record (`record_newest`); it is behind the newest segment until an fsync covers that, or on a full disk.
        self._newest_recorded = 0
        self._reserve: File | None = None
        self._doomed: list[str] = []
        self._work: FsyncWork | None = None
        # The fsync under way makes no entry above this durable: later ones have been truncated since it began.
        self._fsync_index_max = 0
        self._retired: list[File] = []
        self._fsynced_position = 0
        self._failure = ""
        self._closed = False

    @classmethod
    def open(
        cls,
        disk: Disk,
        directory: str,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        cache_bytes_max: int = CACHE_BYTES_MAX,
        owner: Owner = NOBODY,
    ) -> Journal:
        """Read the journal in `directory`, or begin a new one. Cuts a torn end and fsyncs the rest.

        Raises CorruptJournalError, CorruptFileError (hard state), UnknownVersionError; ForeignFileError for files of
        another than `owner`.
        """
        disk.make_dir(directory)
        check_owner(disk, directory, owner)
        journal = cls(disk, directory, segment_bytes, cache_bytes_max, owner)
        journal._segments = replay(disk, directory, journal._replay_segment, journal._replay_record)
        if journal._segments:
            active = journal._segments[-1]
            journal._fsynced_position = active.end_position
            journal._reserve_rest(active.file)
        else:
            disk.remove(f"{directory}/{NEWEST_FILE}")  # of segments that are gone; the caller has judged that
            journal._begin_segment(journal._new_segment_file(1), 1)
            journal._fsync_now()
        journal._newest_recorded = read_newest(disk, directory)
        newest = journal._segments[-1].header.sequence
        if newest > journal._newest_recorded and record_newest(disk, directory, newest, owner):
            journal._newest_recorded = newest
        journal.durable_index = journal.last_index
        journal.commit_hint = journal._commit_written = min(journal.commit_hint, journal.last_index)
        journal.restore_reserve()
        return journal

    @property
    def base_index(self) -> int:
        """Index of the last entry that a checkpoint covers; 0 in a new log."""
        return self._entries.base_index

    @property
    def base_term(self) -> int:
        return self._entries.base_term

    @property
    def first_index(self) -> int:
        """Index of the first entry held; last_index + 1 if there is none."""
        return self._entries.base_index + 1

    @property
    def last_index(self) -> int:
        return self._entries.last_index

    @property
    def last_term(self) -> int:
        return self._entries.last_term

    @property
    def term(self) -> int:
        return self._hard_state.term

    @property
    def voted_for(self) -> str:
        return self._hard_state.voted_for

    @property
    def newest_path(self) -> str:
        """Path of the segment that is written to."""
        return self._segments[-1].file.path

    @property
    def reserve_ready(self) -> bool:
        """Whether the space of the next segment is reserved. False while no fsync is under way: the disk is full."""
        return self._reserve is not None

    @property
    def needs_fsync(self) -> bool:
        """Whether anything was written or let go since the last fsync began."""
        return bool(self._dirty) or self._dir_dirty or bool(self._doomed)

    # Writing.

    def append(self, index: int, term: int, command: bytes) -> None:
        """Write an entry, which is not yet durable. On DiskFullError nothing has changed."""
        assert index == self.last_index + 1, f"append of {index} after {self.last_index}"
        assert term >= self.last_term, f"entry {index} has term {term}, below {self.last_term}"
        self._entries.add(term, command, self._write_record(KIND_ENTRY, index, term, command))

    def truncate_from(self, index: int) -> None:
        """Drop the entries from `index` on. On DiskFullError nothing has changed."""
        self._check_usable()
        assert index > self.base_index, f"truncation at {index} reaches below the base {self.base_index}"
        if index > self.last_index:
            return
        self._write_record(KIND_TRUNCATE, index, self.term_at(index - 1), b"")
        self._drop_from(index)

    def note_commit(self, index: int) -> None:
        """Note a commit index, as a hint for the next start; the next fsync writes it."""
        self.commit_hint = max(self.commit_hint, min(index, self.last_index))

    def set_hard_state(self, term: int, voted_for: str) -> None:
        """Durable on return. Raises DiskFullError (nothing has changed); any other DiskError ends the journal."""
        with self._writing():
            self._hard_state.store(term, voted_for)

    def has_room_for_votes(self) -> bool:
        """Whether the disk has room to store a term or a vote; writes the present ones once more."""
        try:
            with self._writing():
                self._hard_state.store_again()
        except DiskFullError:
            return False
        return True

    # Fsyncing.

    def begin_fsync(self) -> FsyncWork:
        """An fsync of all that was written so far, to run in an executor. One at a time; end it with `finish_fsync`."""
        self._check_usable()
        assert self._work is None, "an fsync is in flight already"
        self._write_mark()
        work = FsyncWork(
            self._disk,
            self._directory,
            self._dirty,
            fsync_dir=self._dir_dirty,
            last_index=self.last_index,
            position=self._segments[-1].end_position,
            doomed=self._doomed,
            owner=self._owner,
        )
        if self._segments[-1].header.sequence > self._newest_recorded:
            work.newest = self._segments[-1].header.sequence
        if self._reserve is None:
            work.reserve_path = self._next_path()
            work.reserve_bytes = self._segment_bytes
        self._doomed = []
        self._dirty = []
        self._dir_dirty = False
        self._fsync_index_max = self.last_index
        self._work = work
        return work

    def finish_fsync(self, work: FsyncWork) -> None:
        """Called on the loop once `work.run()` has ended: moves durable_index up. Raises FsyncFailedError."""
        assert work is self._work, "not the fsync in flight"
        if not work.done:
            self._failure = str(work.error or "the fsync was not run to its end")
            raise FsyncFailedError(self._failure)
        self._work = None
        for file in self._retired:
            file.close()
        self._retired.clear()
        self.durable_index = max(self.durable_index, min(work.last_index, self._fsync_index_max))
        self._fsynced_position = max(self._fsynced_position, work.position)
        if work.newest_recorded:
            self._newest_recorded = work.newest
        if work.reserve is not None:
            if work.reserve_path == self._next_path():
                self._reserve = work.reserve
            else:
                work.reserve.close()
                self._doomed.append(work.reserve_path)

    def restore_reserve(self) -> bool:
        """Try to reserve the next segment once space was freed. True: it is reserved now."""
        if self._reserve is None and self._work is None:
            for path in self._doomed:
                self._disk.remove(path)
            self._doomed.clear()
            self._reserve = reserved_file(self._disk, self._next_path(), self._segment_bytes)
        return self._reserve is not None

    # Reading.

    def entry(self, index: int) -> Entry:
        """(index, term, command) of one entry. Outside the cache it is read from disk and its checksums are compared.

        Raises CorruptJournalError.
        """
        command = self._entries.cache.get(index)
        if command is not None:
            return index, self._entries.term(index), command
        position, length = self._entries.position(index), self._entries.length(index)
        segment = self._segments[
            bisect_right(self._segments, position, key=lambda item: item.header.start_position) - 1
        ]
        offset = position - segment.header.start_position
        data = segment.file.read_at(offset, RECORD_HEADER_BYTES + length)
        record = unpack_record(data, 0, segment.header.sequence, offset)
        command = data[RECORD_HEADER_BYTES:]
        if record is None or record.index != index or record.length != len(command):
            raise CorruptJournalError(segment.file.path, offset, f"the record of entry {index} fails its check")
        if google_crc32c.value(command) != record.crc32c:
            raise CorruptJournalError(segment.file.path, offset, f"the command of entry {index} fails its check")
        return index, record.term, command

    def term_at(self, index: int) -> int:
        """Term of an entry or of the base."""
        return self._entries.term(index)

    def slice(self, first: int, count_max: int, bytes_max: int) -> list[Entry]:
        """Entries from `first` on within both bounds, but at least one if it exists. Raises like `entry`."""
        assert first > self.base_index, f"entry {first} is no longer held, the first is {self.first_index}"
        found: list[Entry] = []
        size = 0
        for index in range(first, min(self.last_index, first + max(count_max, 1) - 1) + 1):
            size += self._entries.length(index)
            if found and size > bytes_max:
                break
            found.append(self.entry(index))
        return found

    def bytes_after(self, index: int) -> int:
        """Bytes of journal after entry `index`, which a restart with a checkpoint there would replay."""
        entries = self._entries
        index = max(index, entries.base_index)
        if index >= entries.last_index:
            return 0
        return self._segments[-1].end_position - entries.position(index + 1)

    # Cutting the beginning.

    def base_before(self, index: int, tail_bytes_max: int) -> int:
        """The base to `compact` to so that at most `tail_bytes_max` bytes of the entries up to `index` stay."""
        covered = self.bytes_after(index)
        low, high = self.base_index, index
        while low < high:
            middle = (low + high) // 2
            if self.bytes_after(middle) - covered <= tail_bytes_max:
                high = middle
            else:
                low = middle + 1
        return low

    def compact(self, index: int, term: int) -> None:
        """Move the base to `index`, which a durable checkpoint covers. The next fsync removes segments below it."""
        self._check_usable()
        if index <= self.base_index:
            return
        assert self.term_at(index) == term, f"entry {index} has term {self.term_at(index)}, the checkpoint {term}"
        self._entries.move_base(index, term)
        end = self._segments[-1].end_position
        keep_from = self._entries.position(index + 1) if index < self.last_index else end
        while len(self._segments) > 1:
            start = self._segments[1].header.start_position
            # The next start must find the segment's successor, so the successor must have been fsynced.
            if start > keep_from or self._fsynced_position < start + SEGMENT_HEADER_BYTES:
                break
            self._retire(self._segments.pop(0))

    def reset_to(self, index: int, term: int) -> None:
        """Fit the journal to an installed checkpoint up to (index, term).

        Keeps the entries after it if the journal holds that entry, else drops all entries and starts there, which
        blocks for two fsyncs. Durable on return. On DiskFullError nothing has changed.
        """
        self._check_usable()
        assert index >= self.base_index, f"checkpoint {index} is older than the base {self.base_index}"
        if index <= self.last_index and self.term_at(index) == term:
            self.compact(index, term)
            return
        sequence = self._segments[-1].header.sequence + 1
        if self._reserve is not None:
            file, self._reserve = self._reserve, None
        else:
            # An fsync under way may be creating the file of the next number.
            sequence += self._work is not None
            file = self._new_segment_file(sequence)
        position = self._segments[-1].end_position
        self._open_segment(file, SegmentHeader(sequence, index, term, position, self._fsynced_position, FLAG_RESET))
        self._fsync_now()
        self._drop_from(self.base_index + 1)
        self._entries.begin_at(index, term)
        self.durable_index = index
        while len(self._segments) > 1:
            self._retire(self._segments.pop(0))

    def close(self) -> None:
        """Close the files. Idempotent. Fsyncs nothing: writes since the last fsync may be lost."""
        if self._closed:
            return
        self._closed = True
        for file in [segment.file for segment in self._segments] + self._retired:
            file.close()
        if self._reserve is not None:
            self._reserve.close()

    # Replay.

    def _replay_segment(self, header: SegmentHeader, path: str) -> None:
        if not self._based:
            self._based = True
            self._entries.begin_at(header.base_index, header.base_term)
        if (header.base_index, header.base_term) != (self.last_index, self.last_term):
            cause = f"the segment follows entry {header.base_index}, the one before ends at {self.last_index}"
            raise CorruptJournalError(path, 0, cause)

    def _replay_record(
        self, header: SegmentHeader, path: str, offset: int, record: RecordHeader, command: bytes
    ) -> None:
        if record.kind == KIND_MARK:
            self.commit_hint = max(self.commit_hint, record.index)
        elif record.kind == KIND_TRUNCATE:
            if record.index > self.base_index:
                self._drop_from(record.index)
            else:
                # The entry before it lay in a segment that is gone.
                self._entries.begin_at(record.index - 1, record.term)
        elif record.index != self.last_index + 1 or record.term < self.last_term:
            raise CorruptJournalError(path, offset, f"entry {record.index} stands behind entry {self.last_index}")
        else:
            self._entries.add(record.term, command, header.start_position + offset)

    # Inside.

    def _check_usable(self) -> None:
        error = self._work.error if self._work is not None else None
        if self._failure or error is not None:
            raise JournalFailedError(f"the journal stopped after a failed write: {self._failure or error}")
        if self._closed:
            raise JournalFailedError("the journal is closed")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Writes and fsyncs: after an error, unless the disk was full, nothing is known of what is on the disk."""
        self._check_usable()
        try:
            yield
        except DiskFullError:
            raise
        except DiskError as error:
            self._failure = str(error)
            raise

    def _write_record(self, kind: int, index: int, term: int, command: bytes) -> int:
        """Append a record; returns its position. On DiskFullError nothing has changed."""
        with self._writing():
            segment = self._segment_for(RECORD_HEADER_BYTES + len(command))
            offset = segment.end
            record = pack_record(segment.header.sequence, offset, kind, index, term, command, self._fsynced_position)
            start = segment.file.append_many((record, command))
        assert start == offset, f"append to {segment.file.path} at {start} instead of {offset}"
        segment.end = offset + len(record) + len(command)
        if segment.file not in self._dirty:
            self._dirty.append(segment.file)
        return segment.header.start_position + offset

    def _write_mark(self) -> None:
        if self.commit_hint <= self._commit_written:
            return
        try:
            self._write_record(KIND_MARK, self.commit_hint, 0, b"")
        except DiskFullError:
            # The mark is only a hint: a full disk must not keep written entries from being fsynced.
            return
        self._commit_written = self.commit_hint

    def _segment_for(self, size: int) -> Segment:
        """The segment for the next record of `size` bytes; begins a new segment if the active one is full."""
        active = self._segments[-1]
        if active.end + size <= self._segment_bytes or active.end == SEGMENT_HEADER_BYTES:
            return active
        if self._reserve is None and self._work is not None:
            # The fsync under way is creating the next segment. Until then this one may exceed its size a little.
            return active
        sequence = active.header.sequence + 1
        file, self._reserve = self._reserve or self._new_segment_file(sequence), None
        self._begin_segment(file, sequence)
        return self._segments[-1]

    def _begin_segment(self, file: File, sequence: int) -> None:
        position = self._segments[-1].end_position if self._segments else 0
        header = SegmentHeader(sequence, self.last_index, self.last_term, position, self._fsynced_position)
        self._open_segment(file, header)

    def _open_segment(self, file: File, header: SegmentHeader) -> None:
        header = replace(header, owner_tag=self._owner.tag)
        try:
            file.append(header.pack())
        except DiskFullError:
            file.close()
            raise
        segment = Segment(header, file, SEGMENT_HEADER_BYTES)
        self._segments.append(segment)
        self._dirty.append(file)
        self._dir_dirty = True

    def _new_segment_file(self, sequence: int) -> File:
        """An empty file for a segment, with its space reserved if the disk has room."""
        file = self._disk.open(segment_path(self._directory, sequence), create=True)
        file.truncate(0)
        self._reserve_rest(file)
        return file

    def _reserve_rest(self, file: File) -> None:
        try:
            file.preallocate(self._segment_bytes)
        except DiskFullError:
            # Appends will raise the error; there may still be room for a few.
            return

    def _fsync_now(self) -> None:
        """Fsync the last segment and its directory entry at once, when a journal begins."""
        segment = self._segments[-1]
        with self._writing():
            segment.file.fsync()
            self._disk.fsync_dir(self._directory)
        self._dirty = []
        self._dir_dirty = False
        self._fsynced_position = segment.end_position

    def _drop_from(self, index: int) -> None:
        self._entries.drop_from(index)
        last = index - 1
        self.durable_index = min(self.durable_index, last)
        self._fsync_index_max = min(self._fsync_index_max, last)
        self.commit_hint = min(self.commit_hint, last)
        self._commit_written = min(self._commit_written, last)

    def _next_path(self) -> str:
        return segment_path(self._directory, self._segments[-1].header.sequence + 1)

    def _retire(self, segment: Segment) -> None:
        """Remove a segment's file with the next fsync, since an fsync under way may still use it."""
        self._doomed.append(segment.file.path)
        if self._work is not None:
            self._retired.append(segment.file)
        else:
            segment.file.close()


class JournalEntries:
    """Position, length and term of each entry that the journal holds, and a cache of the newest commands. Does no I/O.

    Invariants: the arrays (20 bytes an entry) cover base_index + 1 .. last_index without gaps. The cache, bounded in
    bytes, covers the newest of these without gaps, and always holds the last one.
    """

    def __init__(self, cache_bytes_max: int) -> None:
        self._cache_bytes_max = cache_bytes_max
        self._positions = array("Q")
        self._lengths = array("I")
        self._terms = array("Q")
        self.cache: dict[int, bytes] = {}
        self._cache_bytes = 0
        self._cache_first = 1
        self.base_index = 0
        self.base_term = 0
        self.last_index = 0
        self.last_term = 0

    def add(self, term: int, command: bytes, position: int) -> None:
        """Add the entry after `last_index`, whose record begins at `position`."""
        self._positions.append(position)
        self._lengths.append(len(command))
        self._terms.append(term)
        self.last_index += 1
        self.last_term = term
        self.cache[self.last_index] = command
        self._cache_bytes += len(command)
        while self._cache_bytes > self._cache_bytes_max and len(self.cache) > 1:
            self._drop_first_cached()

    def position(self, index: int) -> int:
        """The position at which the record of a held entry begins."""
        return self._positions[self._place(index)]

    def length(self, index: int) -> int:
        """Bytes of the command of a held entry."""
        return self._lengths[self._place(index)]

    def term(self, index: int) -> int:
        """Term of a held entry or of the base."""
        return self.base_term if index == self.base_index else self._terms[self._place(index)]

    def drop_from(self, index: int) -> None:
        """Drop the entries from `index` on."""
        for gone in range(max(index, self._cache_first), self.last_index + 1):
            self._cache_bytes -= len(self.cache.pop(gone))
        self._cache_first = min(self._cache_first, index)
        place = index - self.base_index - 1
        del self._positions[place:], self._lengths[place:], self._terms[place:]
        self.last_index = index - 1
        self.last_term = self._terms[-1] if self._terms else self.base_term

    def move_base(self, index: int, term: int) -> None:
        """Drop the entries up to `index`, a held one, which becomes the base."""
        count = index - self.base_index
        del self._positions[:count], self._lengths[:count], self._terms[:count]
        while self._cache_first <= index:
            self._drop_first_cached()
        self.base_index, self.base_term = index, term

    def begin_at(self, index: int, term: int) -> None:
        """Drop all entries and set the base."""
        self.drop_from(self.base_index + 1)
        self.base_index = self.last_index = index
        self.base_term = self.last_term = term
        self._cache_first = index + 1

    def _place(self, index: int) -> int:
        assert self.base_index < index <= self.last_index, f"no entry {index}"
        return index - self.base_index - 1

    def _drop_first_cached(self) -> None:
        self._cache_bytes -= len(self.cache.pop(self._cache_first, b""))
        self._cache_first += 1


@dataclass(slots=True, eq=False)
class FsyncWork:
    """One group commit of everything written before `Journal.begin_fsync`, which creates it.

    `run` fsyncs the files, to which the loop may keep appending meanwhile, records a new segment, removes segments that
    the loop no longer uses, and creates the file of the next segment for `Journal.finish_fsync` to take.
    """

    disk: Disk
    directory: str
    files: list[File]
    fsync_dir: bool
    last_index: int
    position: int
    """End of what is fsynced."""
    doomed: list[str]
    owner: Owner
    newest: int = 0
    """Number of the newest segment, to be recorded; 0: it is on record."""
    newest_recorded: bool = False
    reserve_path: str = ""
    reserve_bytes: int = 0
    reserve: File | None = None
    done: bool = False
    error: FsyncFailedError | None = None

    def run(self) -> None:
        """Run in any thread. Raises FsyncFailedError; `finish_fsync` must be called with the work all the same."""
        try:
            for file in self.files:
                file.fsync()
            if self.fsync_dir:
                self.disk.fsync_dir(self.directory)
            if self.newest:
                self.newest_recorded = record_newest(self.disk, self.directory, self.newest, self.owner)
            # The oldest first, and without an fsync of the directory. A power loss can then bring back only the newest
            # of the removed segments, in front of those still held. A start reads them again, which is harmless: the
            # checkpoint covers them. A file system that kept a later removal but lost an earlier one (ext4, XFS and
            # Btrfs do not) would leave a gap; the start is then refused, so wrong entries are never read.
            for path in self.doomed:
                self.disk.remove(path)
            if self.reserve_path:
                self.reserve = reserved_file(self.disk, self.reserve_path, self.reserve_bytes)
        except FsyncFailedError as error:
            self.error = error
            raise
        except DiskError as error:
            self.error = FsyncFailedError(str(error))
            raise self.error from error
        self.done = True


def reserved_file(disk: Disk, path: str, size: int) -> File | None:
    """A new file with its space reserved; None if the disk has no room for the space or the directory entry."""
    try:
        file = disk.open(path, create=True)
    except DiskFullError:
        return None
    try:
        file.truncate(0)
        file.preallocate(size)
    except DiskFullError:
        file.close()
        disk.remove(path)
        return None
    return file


_HARD_STATE_VERSION = 1
HARD_STATE_FILE = "hard_state"
_HARD_STATE = struct.Struct("<IIQ")
_HARD_STATE_ADVICE = "This node may have forgotten a vote: remove the member and add it anew under a new id"


def check_owner(disk: Disk, directory: str, owner: Owner) -> None:
    """Raise ForeignFileError if a file of the journal is another owner's. Changes nothing. Raises DiskError."""
    check_segments(disk, directory, owner)
    HardState(disk, directory, owner)


class HardState:
    """Term and vote as they are on stable storage: one small file, replaced whole.

    They never go back: a lower term, or another vote in the same term, is a bug of the caller. Layout of the content:
    u32 version, u32 length of the name, u64 term, name in UTF-8, the owner (`Owner.pack`).
    """

    def __init__(self, disk: Disk, directory: str, owner: Owner) -> None:
        self._disk = disk
        self._owner = owner
        self._path = f"{directory}/{HARD_STATE_FILE}"
        self.term = 0
        self.voted_for = ""
        content = read_whole(disk, self._path, advice=_HARD_STATE_ADVICE)
        if content is None:
            return
        if len(content) < _HARD_STATE.size:
            raise CorruptFileError(self._path, 0, "too short", _HARD_STATE_ADVICE)
        version, name_bytes, self.term = _HARD_STATE.unpack_from(content)
        if version > _HARD_STATE_VERSION:
            raise UnknownVersionError(self._path, version, _HARD_STATE_VERSION)
        name_end = _HARD_STATE.size + name_bytes
        self._owner.check(self._path, content[name_end:])
        self.voted_for = content[_HARD_STATE.size : name_end].decode()

    def store(self, term: int, voted_for: str) -> None:
        """Durable on return. Raises FsyncFailedError (fatal) and DiskFullError (then the old state holds)."""
        if (term, voted_for) == (self.term, self.voted_for):
            return
        assert term >= self.term, f"term would go back from {self.term} to {term}"
        assert term > self.term or not self.voted_for, f"second vote in term {term}: {self.voted_for}, {voted_for}"
        self._write(term, voted_for)
        self.term, self.voted_for = term, voted_for

    def store_again(self) -> None:
        """Store what is stored, to see whether there is room. Raises as `store`."""
        self._write(self.term, self.voted_for)

    def _write(self, term: int, voted_for: str) -> None:
        name = voted_for.encode()
        content = _HARD_STATE.pack(_HARD_STATE_VERSION, len(name), term) + name + self._owner.pack()
        write_whole(self._disk, self._path, content)
