"""The journal in the form that pysyncobj expects: a list of (command, index, term) that starts at the base.

Position 0 is not a stored entry but the journal's base, the last entry that a checkpoint covers (0, 0 in a new log).
pysyncobj never sends the first entry, so that fits, and a rebuilt node can start from any index. Each read is bounded,
however long the log. Only the seam uses this.

Invariants: term and vote are durable when `setCurrentTerm` returns. To read the last entry's index and term does not
load its command.
"""

from __future__ import annotations

from typing import Protocol, overload

from tickwheel.replication.journal import FsyncWork

Row = tuple[bytes, int, int]

BASE_COMMAND = b"\x01"
"""A no-op of pysyncobj, in place of the base's command."""


class Journal(Protocol):
    """The part of `journal.Journal` that the log uses; its contracts are stated there."""

    @property
    def base_index(self) -> int: ...
    @property
    def base_term(self) -> int: ...
    @property
    def last_index(self) -> int: ...
    @property
    def last_term(self) -> int: ...
    @property
    def durable_index(self) -> int: ...
    @property
    def term(self) -> int: ...
    @property
    def voted_for(self) -> str: ...
    @property
    def commit_hint(self) -> int: ...

    def append(self, index: int, term: int, command: bytes) -> None: ...
    def truncate_from(self, index: int) -> None: ...
    def entry(self, index: int) -> tuple[int, int, bytes]: ...
    def term_at(self, index: int) -> int: ...
    def slice(self, first: int, count_max: int, bytes_max: int) -> list[tuple[int, int, bytes]]: ...
    def begin_fsync(self) -> FsyncWork: ...
    def finish_fsync(self, work: FsyncWork) -> None: ...
    def set_hard_state(self, term: int, voted_for: str) -> None: ...
    def note_commit(self, index: int) -> None: ...
    def compact(self, index: int, term: int) -> None: ...
    def reset_to(self, index: int, term: int) -> None: ...
    def bytes_after(self, index: int) -> int: ...
    def base_before(self, index: int, tail_bytes_max: int) -> int: ...
    def close(self) -> None: ...


class ViewListener(Protocol):
    """Is called at every change that pysyncobj makes to the journal."""

    def written(self, index: int, entry: bytes) -> None:
        """The entry at `index` was written and is not yet durable."""
        ...

    def before_cut(self, index: int) -> None:
        """The entries from `index` on are about to be cut. An exception prevents that."""
        ...

    def cut(self, index: int) -> None:
        """The entries from `index` on have been cut."""
        ...


class JournalView:
    """A journal with the method names that pysyncobj calls."""

    def __init__(
        self, journal: Journal, *, entries_max: int, bytes_max: int, bounded: bool, listener: ViewListener
    ) -> None:
        self._journal = journal
        self._entries_max = entries_max if bounded else 1 << 62
        self._bytes_max = bytes_max if bounded else 1 << 62
        self._listener = listener

    def __len__(self) -> int:
        return self._journal.last_index - self._journal.base_index + 1

    @overload
    def __getitem__(self, position: int) -> Row: ...
    @overload
    def __getitem__(self, position: slice) -> list[Row]: ...

    def __getitem__(self, position: int | slice) -> Row | list[Row]:
        journal = self._journal
        if isinstance(position, int):
            if position == -1:
                return b"", journal.last_index, journal.last_term
            if position == 0:
                return BASE_COMMAND, journal.base_index, journal.base_term
            length = len(self)
            if not -length <= position < length:
                raise IndexError(position)
            index, term, command = journal.entry(journal.base_index + position % length)
            return command, index, term
        start, stop, step = position.indices(len(self))
        if step != 1:
            raise ValueError(f"a slice of the log has step 1, not {step}")
        rows: list[Row] = []
        if start == 0 < stop:
            rows.append((BASE_COMMAND, journal.base_index, journal.base_term))
            start = 1
        if start < stop:
            rows.extend(self.rows(journal.base_index + start, stop - start))
        if len(rows) == 1 < stop - start:
            # One large entry has filled the bounds. The slice must still show that another follows: from that
            # pysyncobj knows that it has to cut before it appends.
            index, term, command = journal.entry(rows[0][1] + 1)
            rows.append((command, index, term))
        return rows

    def rows(self, first: int, count_max: int) -> list[Row]:
        """Entries from index `first` on, bounded in number and bytes, but at least one if it exists."""
        found = self._journal.slice(first, min(count_max, self._entries_max), self._bytes_max)
        return [(command, index, term) for index, term, command in found]

    def add(self, command: bytes, index: int, term: int) -> None:
        self._journal.append(index, term, command)
        self._listener.written(index, command)

    def clear(self) -> None:
        raise AssertionError("pysyncobj wants to clear the journal, which only a checkpoint may")

    def deleteEntriesFrom(self, position: int) -> None:
        index = self._journal.base_index + position
        self._listener.before_cut(index)
        self._journal.truncate_from(index)
        self._listener.cut(index)

    def deleteEntriesTo(self, position: int) -> None:
        raise AssertionError("pysyncobj wants to compact the journal, which only a checkpoint may")

    def setRaftCommitIndex(self, index: int) -> None:
        self._journal.note_commit(index)

    def getRaftCommitIndex(self) -> int:
        return min(self._journal.commit_hint, self._journal.durable_index)

    def setCurrentTerm(self, term: int, voted_for: str | None = None) -> None:
        self._journal.set_hard_state(term, voted_for or "")

    def getCurrentTerm(self) -> int:
        return self._journal.term

    def getVotedForNodeId(self) -> str | None:
        return self._journal.voted_for or None

    def onOneSecondTimer(self) -> None:
        """No effect: durability never depends on a timer here."""

    def _destroy(self) -> None:
        """No effect: the node closes its journal."""
