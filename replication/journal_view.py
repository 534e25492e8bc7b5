"""The journal as pysyncobj wants to see it: a list of (command, index, term) that starts at the base.

Position 0 is not a stored entry but the journal's base, the last entry a checkpoint covers (0, 0 in a
new log); so pysyncobj's rule that the first entry is never sent holds by itself, and a rebuilt node
starts from any index. What is read at once is bounded, however long the log. Only the seam uses this.

Invariants: term and vote are durable when `setCurrentTerm` returns; the last entry's index and term
are read without touching its command.
"""

from __future__ import annotations

from typing import Protocol, overload

from tickwheel.replication.journal_sync import SyncWork

Row = tuple[bytes, int, int]

BASE_COMMAND = b"\x01"
"""Stands for the entries below the base: a no-op of pysyncobj."""


class Journal(Protocol):
    """What the log asks of `journal.Journal`."""

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
    def begin_sync(self) -> SyncWork: ...
    def finish_sync(self, work: SyncWork) -> None: ...
    def set_hard_state(self, term: int, voted_for: str) -> None: ...
    def note_commit(self, index: int) -> None: ...
    def compact(self, index: int, term: int) -> None: ...
    def reset_to(self, index: int, term: int) -> None: ...
    def bytes_after(self, index: int) -> int: ...
    def base_before(self, index: int, tail_bytes_max: int) -> int: ...
    def close(self) -> None: ...


class ViewListener(Protocol):
    """Hears of every change that pysyncobj makes to the journal."""

    def written(self, index: int, entry: bytes) -> None:
        """This entry is in the journal, not yet durable."""
        ...

    def before_cut(self, index: int) -> None:
        """The entries from this one on are about to go. An exception keeps them."""
        ...

    def cut(self, index: int) -> None:
        """They are gone."""
        ...


class JournalView:
    """Methods are named as pysyncobj calls them."""

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
            # One large entry has filled the bounds. That anything follows it must be seen all the same: by that
            # pysyncobj knows that there is something to cut before it appends.
            index, term, command = journal.entry(rows[0][1] + 1)
            rows.append((command, index, term))
        return rows

    def rows(self, first: int, count_max: int) -> list[Row]:
        """Entries from index `first` on, bounded in number and bytes, at least one if there is one."""
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
        """Nothing: what must be durable is durable when it is said."""

    def _destroy(self) -> None:
        """Nothing: the node closes its journal."""
