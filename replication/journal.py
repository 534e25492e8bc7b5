"""The journal: the Raft log of one node on its disk, and its term and vote.

Owns: a directory of segments (`journal_segment.py`) and the hard state (`hard_state.py`).
Invariants:
- Entries have indexes without gaps: base_index < first_index .. last_index. Terms never fall.
- Entries at or below `durable_index` survive a power loss, unchanged. It rises only by a sync that
  began after they were written, and falls when entries are truncated.
- Segments are only ever appended to. A truncation is a record too, so whatever a sync covers, it
  covers the truncations before it: replaced entries never count as durable without it.
- A hard state counts when `set_hard_state` has returned, and never goes back.
- After a failed sync nothing is done any more: JournalFailedError.
- The next segment is reserved ahead (`reserve_ready`), so a disk that fills up leaves room to stop.

Called by the replicated log on the node's one thread; only `SyncWork.run` runs in a worker, one at
a time, while appends go on.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right

import google_crc32c

from tickwheel.replication.hard_state import HardState
from tickwheel.replication.journal_replay import replay
from tickwheel.replication.journal_segment import (
    FLAG_RESET,
    KIND_ENTRY,
    KIND_MARK,
    KIND_TRUNCATE,
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    CorruptJournalError,
    JournalFailedError,
    RecordHeader,
    Segment,
    SegmentHeader,
    pack_record,
    segment_path,
    unpack_record,
)
from tickwheel.storage.disk import Disk, DiskError, DiskFullError, File, SyncFailedError

__all__ = ["CorruptJournalError", "Journal", "JournalFailedError", "SyncWork"]

SEGMENT_BYTES = 64 << 20
CACHE_BYTES_MAX = 64 << 20

Entry = tuple[int, int, bytes]


class SyncWork:
    """One group commit: what was written before `begin_sync` goes to stable storage. Made by the journal."""

    def __init__(
        self, disk: Disk, directory: str, files: list[File], sync_dir: bool, last_index: int, position: int
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._files = files
        self._sync_dir = sync_dir
        self.last_index = last_index
        self.position = position
        self.reserve_path = ""
        self.reserve_bytes = 0
        self.reserve: File | None = None
        self.doomed: list[str] = []
        self.done = False
        self.error: SyncFailedError | None = None

    def run(self) -> None:
        """In any thread. Raises SyncFailedError; hand the work to `finish_sync` all the same."""
        try:
            for file in self._files:
                file.sync()
            if self._sync_dir:
                self._disk.sync_dir(self._directory)
            for path in self.doomed:
                self._disk.remove(path)
            if self.reserve_path:
                self.reserve = _reserved_file(self._disk, self.reserve_path, self.reserve_bytes)
        except SyncFailedError as error:
            self.error = error
            raise
        except DiskError as error:
            self.error = SyncFailedError(str(error))
            raise self.error from error
        self.done = True


class Journal:
    """See the module. Make one with `open`."""

    base_index: int
    base_term: int
    last_index: int
    last_term: int
    durable_index: int

    def __init__(self, disk: Disk, directory: str, segment_bytes: int, cache_bytes_max: int) -> None:
        """For `open` only."""
        self._disk = disk
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._cache_bytes_max = cache_bytes_max
        self.base_index = self.base_term = self.last_index = self.last_term = self.durable_index = 0
        self.commit_hint = 0
        """The highest index that `note_commit` was told before a sync, at most the durable end."""
        # Of each entry, from first_index on: where its record begins, its length, its term.
        self._positions = array("Q")
        self._lengths = array("I")
        self._terms = array("Q")
        self._segments: list[Segment] = []
        self._cache: dict[int, bytes] = {}
        self._cache_bytes = 0
        self._cache_first = 1
        self._dirty: list[Segment] = []
        self._dir_dirty = False
        self._reserve: File | None = None
        self._doomed: list[str] = []
        self._retired: list[File] = []
        self._work: SyncWork | None = None
        self._sync_index_max = 0
        self._synced_position = 0
        self._commit_written = 0
        self._failure = ""
        self._closed = False
        self._based = False
        self._hard_state: HardState

    @classmethod
    def open(
        cls,
        disk: Disk,
        directory: str,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        cache_bytes_max: int = CACHE_BYTES_MAX,
    ) -> Journal:
        """Read what is there, cut a torn end, bring all of it to stable storage.

        Raises CorruptJournalError, CorruptFileError (hard state), UnknownVersionError.
        """
        journal = cls(disk, directory, segment_bytes, cache_bytes_max)
        disk.make_dir(directory)
        journal._hard_state = HardState(disk, directory)
        journal._segments = replay(disk, directory, journal._replay_segment, journal._replay_record)
        if journal._segments:
            active = journal._segments[-1]
            journal._synced_position = active.end_position
            journal._reserve_rest(active.file)
        else:
            journal._begin_segment(journal._new_segment_file(1), 1)
            journal._sync_now()
        journal.durable_index = journal.last_index
        journal.commit_hint = min(journal.commit_hint, journal.last_index)
        journal._commit_written = journal.commit_hint
        journal.restore_reserve()
        return journal

    @property
    def first_index(self) -> int:
        """Index of the first entry held; last_index + 1 if there is none."""
        return self.base_index + 1

    @property
    def term(self) -> int:
        return self._hard_state.term

    @property
    def voted_for(self) -> str:
        return self._hard_state.voted_for

    @property
    def reserve_ready(self) -> bool:
        """Whether the next segment's space is there. While not, the disk is full: stop taking commands."""
        return self._reserve is not None

    @property
    def needs_sync(self) -> bool:
        """Whether a sync has anything to do that none has been begun for."""
        return bool(self._dirty) or self._dir_dirty or bool(self._doomed)

    # Writing.

    def append(self, index: int, term: int, command: bytes) -> None:
        """Write an entry; not yet durable. On DiskFullError nothing has changed."""
        self._check_usable()
        assert index == self.last_index + 1, f"append of {index} after {self.last_index}"
        assert term >= self.last_term, f"entry {index} has term {term}, below {self.last_term}"
        position = self._write_record(KIND_ENTRY, index, term, command)
        self._hold(index, term, command, position)

    def truncate_from(self, index: int) -> None:
        """Drop the entries from `index` on. On DiskFullError nothing has changed."""
        self._check_usable()
        assert index > self.base_index, f"truncation at {index} reaches below the base {self.base_index}"
        if index > self.last_index:
            return
        self._write_record(KIND_TRUNCATE, index, self.term_at(index - 1), b"")
        self._forget_from(index)

    def note_commit(self, index: int) -> None:
        """A hint for the next start; goes to disk with the next sync."""
        self.commit_hint = max(self.commit_hint, min(index, self.last_index))

    def set_hard_state(self, term: int, voted_for: str) -> None:
        """Durable on return. Raises SyncFailedError (fatal), DiskFullError (nothing has changed)."""
        self._check_usable()
        try:
            self._hard_state.store(term, voted_for)
        except SyncFailedError as error:
            self._failure = str(error)
            raise

    # Syncing.

    def begin_sync(self) -> SyncWork:
        """What has been written so far, as one work for an executor. One at a time."""
        self._check_usable()
        assert self._work is None, "a sync is in flight already"
        self._write_mark()
        work = SyncWork(
            self._disk,
            self._directory,
            [segment.file for segment in self._dirty],
            self._dir_dirty,
            self.last_index,
            self._segments[-1].end_position,
        )
        if self._reserve is None:
            work.reserve_path = segment_path(self._directory, self._segments[-1].header.sequence + 1)
            work.reserve_bytes = self._segment_bytes
        work.doomed, self._doomed = self._doomed, []
        self._dirty = []
        self._dir_dirty = False
        self._sync_index_max = self.last_index
        self._work = work
        return work

    def finish_sync(self, work: SyncWork) -> None:
        """On the loop, after `work.run()` has ended: raises durable_index. Raises SyncFailedError if it failed."""
        assert work is self._work, "not the sync in flight"
        if not work.done:
            self._failure = str(work.error or "the sync was not run to its end")
            raise SyncFailedError(self._failure)
        self._work = None
        for file in self._retired:
            file.close()
        self._retired.clear()
        # Entries truncated since have lowered _sync_index_max, so that their successors are not covered.
        self.durable_index = max(self.durable_index, min(work.last_index, self._sync_index_max))
        self._synced_position = max(self._synced_position, work.position)
        if work.reserve is not None:
            if work.reserve_path == segment_path(self._directory, self._segments[-1].header.sequence + 1):
                self._reserve = work.reserve
            else:
                work.reserve.close()
                self._doomed.append(work.reserve_path)

    def restore_reserve(self) -> bool:
        """Try to reserve the next segment, after space was freed; tells whether it is there now."""
        if self._reserve is None and self._work is None:
            for path in self._doomed:
                self._disk.remove(path)
            self._doomed.clear()
            path = segment_path(self._directory, self._segments[-1].header.sequence + 1)
            self._reserve = _reserved_file(self._disk, path, self._segment_bytes)
        return self._reserve is not None

    # Reading.

    def entry(self, index: int) -> Entry:
        """One entry; from disk if the cache no longer has it (then checked). Raises CorruptJournalError."""
        command = self._cache.get(index)
        if command is not None:
            return index, self._terms[index - self.base_index - 1], command
        assert self.base_index < index <= self.last_index, f"no entry {index}"
        place = index - self.base_index - 1
        position, length = self._positions[place], self._lengths[place]
        segment = self._segments[self._segment_at(position)]
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
        if index == self.base_index:
            return self.base_term
        assert self.base_index < index <= self.last_index, f"no entry {index}"
        return self._terms[index - self.base_index - 1]

    def slice(self, first: int, count_max: int, bytes_max: int) -> list[Entry]:
        """Entries from `first` on, as many as both bounds allow, but one at least if it exists."""
        assert first > self.base_index, f"entry {first} is no longer held, the first is {self.first_index}"
        entries: list[Entry] = []
        size = 0
        for index in range(first, min(self.last_index, first + max(count_max, 1) - 1) + 1):
            size += self._lengths[index - self.base_index - 1]
            if entries and size > bytes_max:
                break
            entries.append(self.entry(index))
        return entries

    def bytes_after(self, index: int) -> int:
        """Bytes of journal that a restart would replay after this entry."""
        if index >= self.last_index:
            return 0
        return self._segments[-1].end_position - self._positions[max(index, self.base_index) - self.base_index]

    # Cutting the beginning.

    def compact(self, index: int, term: int) -> None:
        """A durable checkpoint covers everything up to `index`: the base moves there, whole segments below go."""
        self._check_usable()
        if index <= self.base_index:
            return
        assert self.term_at(index) == term, f"entry {index} has term {self.term_at(index)}, the checkpoint {term}"
        self._move_base(index, term)
        keep_from = self._positions[0] if self._positions else self._segments[-1].end_position
        while len(self._segments) > 1:
            start = self._segments[1].header.start_position
            # Its successor must be found at the next start, so it must have been synced.
            if start > keep_from or self._synced_position < start + SEGMENT_HEADER_BYTES:
                break
            self._retire(self._segments.pop(0))

    def reset_to(self, index: int, term: int) -> None:
        """A checkpoint from elsewhere was installed: keep what follows (index, term), or begin anew there.

        Durable on return, which blocks for two syncs when the journal begins anew.
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
            # A sync in flight may be making the file of the next number.
            sequence += self._work is not None
            file = self._new_segment_file(sequence)
        position = self._segments[-1].end_position
        self._open_segment(file, SegmentHeader(sequence, index, term, position, self._synced_position, FLAG_RESET))
        self._sync_now()
        self._forget_from(self.base_index + 1)
        self.base_index = self.last_index = self.durable_index = index
        self.base_term = self.last_term = term
        self._cache_first = index + 1
        while len(self._segments) > 1:
            self._retire(self._segments.pop(0))

    def close(self) -> None:
        """Idempotent. Syncs nothing; what was not synced may be lost."""
        if self._closed:
            return
        self._closed = True
        for segment in self._segments:
            segment.file.close()
        for file in self._retired:
            file.close()
        if self._reserve is not None:
            self._reserve.close()

    # Replay.

    def _replay_segment(self, header: SegmentHeader, path: str) -> None:
        if not self._based:
            self._based = True
            self.base_index = self.last_index = header.base_index
            self.base_term = self.last_term = header.base_term
            self._cache_first = header.base_index + 1
        if (header.base_index, header.base_term) != (self.last_index, self.last_term):
            raise CorruptJournalError(
                path, 0, f"the segment follows entry {header.base_index}, the one before ends at {self.last_index}"
            )

    def _replay_record(
        self, header: SegmentHeader, path: str, offset: int, record: RecordHeader, command: bytes
    ) -> None:
        if record.kind == KIND_MARK:
            self.commit_hint = max(self.commit_hint, record.index)
        elif record.kind == KIND_TRUNCATE:
            if record.index > self.base_index:
                self._forget_from(record.index)
            else:
                # The entry before it lay in a segment that is gone.
                self._forget_from(self.base_index + 1)
                self.base_index = self.last_index = record.index - 1
                self.base_term = self.last_term = record.term
                self._cache_first = record.index
        elif record.index != self.last_index + 1 or record.term < self.last_term:
            raise CorruptJournalError(path, offset, f"entry {record.index} stands behind entry {self.last_index}")
        else:
            self._hold(record.index, record.term, command, header.start_position + offset)

    # Inside.

    def _check_usable(self) -> None:
        if self._failure:
            raise JournalFailedError(f"the journal stopped after a failed sync: {self._failure}")
        if self._work is not None and self._work.error is not None:
            raise JournalFailedError(f"the journal stopped after a failed sync: {self._work.error}")

    def _write_record(self, kind: int, index: int, term: int, command: bytes) -> int:
        segment = self._segment_for(RECORD_HEADER_BYTES + len(command))
        offset = segment.end
        record = pack_record(segment.header.sequence, offset, kind, index, term, command, self._synced_position)
        start = segment.file.append_many((record, command))
        assert start == offset, f"append to {segment.file.path} at {start} instead of {offset}"
        segment.end = offset + len(record) + len(command)
        if segment not in self._dirty:
            self._dirty.append(segment)
        return segment.header.start_position + offset

    def _segment_for(self, size: int) -> Segment:
        """The segment that the next record goes to."""
        active = self._segments[-1]
        if active.end + size <= self._segment_bytes or active.end == SEGMENT_HEADER_BYTES:
            return active
        sequence = active.header.sequence + 1
        if self._reserve is not None:
            self._begin_segment(self._reserve, sequence)
            self._reserve = None
        elif self._work is not None:
            # The sync in flight is making the next segment: this one grows a little until it is there.
            return active
        else:
            self._begin_segment(self._new_segment_file(sequence), sequence)
        return self._segments[-1]

    def _new_segment_file(self, sequence: int) -> File:
        """An empty file for a segment, with its space if there is any."""
        path = segment_path(self._directory, sequence)
        file = self._disk.open(path, create=True)
        file.truncate(0)
        self._reserve_rest(file)
        return file

    def _reserve_rest(self, file: File) -> None:
        try:
            file.preallocate(self._segment_bytes)
        except DiskFullError:
            # Appends will say so; until then there may be room for a few.
            return

    def _begin_segment(self, file: File, sequence: int) -> None:
        position = self._segments[-1].end_position if self._segments else 0
        header = SegmentHeader(sequence, self.last_index, self.last_term, position, self._synced_position)
        self._open_segment(file, header)

    def _open_segment(self, file: File, header: SegmentHeader) -> None:
        try:
            file.append(header.pack())
        except DiskFullError:
            file.close()
            raise
        segment = Segment(header, file, SEGMENT_HEADER_BYTES)
        self._segments.append(segment)
        self._dirty.append(segment)
        self._dir_dirty = True

    def _sync_now(self) -> None:
        """Sync the last segment and its directory entry before going on: when a journal begins."""
        segment = self._segments[-1]
        try:
            segment.file.sync()
            self._disk.sync_dir(self._directory)
        except SyncFailedError as error:
            self._failure = str(error)
            raise
        self._dirty = []
        self._dir_dirty = False
        self._synced_position = segment.end_position

    def _write_mark(self) -> None:
        if self.commit_hint <= self._commit_written:
            return
        try:
            self._write_record(KIND_MARK, self.commit_hint, 0, b"")
        except DiskFullError:
            # Only a hint: a full disk must not keep what was written from being synced.
            return
        self._commit_written = self.commit_hint

    def _hold(self, index: int, term: int, command: bytes, position: int) -> None:
        self._positions.append(position)
        self._lengths.append(len(command))
        self._terms.append(term)
        self.last_index, self.last_term = index, term
        self._cache[index] = command
        self._cache_bytes += len(command)
        while self._cache_bytes > self._cache_bytes_max and len(self._cache) > 1:
            self._uncache_first()

    def _uncache_first(self) -> None:
        command = self._cache.pop(self._cache_first, None)
        if command is not None:
            self._cache_bytes -= len(command)
        self._cache_first += 1

    def _forget_from(self, index: int) -> None:
        for gone in range(max(index, self._cache_first), self.last_index + 1):
            self._cache_bytes -= len(self._cache.pop(gone))
        self._cache_first = min(self._cache_first, index)
        place = index - self.base_index - 1
        del self._positions[place:], self._lengths[place:], self._terms[place:]
        self.last_index = index - 1
        self.last_term = self._terms[-1] if self._terms else self.base_term
        self.durable_index = min(self.durable_index, index - 1)
        self._sync_index_max = min(self._sync_index_max, index - 1)
        self.commit_hint = min(self.commit_hint, index - 1)
        self._commit_written = min(self._commit_written, index - 1)

    def _move_base(self, index: int, term: int) -> None:
        count = index - self.base_index
        del self._positions[:count], self._lengths[:count], self._terms[:count]
        while self._cache_first <= index:
            self._uncache_first()
        self.base_index, self.base_term = index, term

    def _segment_at(self, position: int) -> int:
        return bisect_right(self._segments, position, key=lambda segment: segment.header.start_position) - 1

    def _retire(self, segment: Segment) -> None:
        """Its file goes with the next sync; a sync in flight may still be at it."""
        self._doomed.append(segment.file.path)
        if segment in self._dirty:
            self._dirty.remove(segment)
        if self._work is not None:
            self._retired.append(segment.file)
        else:
            segment.file.close()


def _reserved_file(disk: Disk, path: str, size: int) -> File | None:
    """A new file with its space reserved, or None if there is no room for it."""
    file = disk.open(path, create=True)
    try:
        file.truncate(0)
        file.preallocate(size)
    except DiskFullError:
        file.close()
        disk.remove(path)
        return None
    return file
