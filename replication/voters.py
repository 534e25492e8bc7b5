"""Who counts in this log: the voters that the newest entry naming them names, from when it is written here.

A change of the voters is an entry of a kind of its own: the voters that result from it stand before its command.
They count on each node as soon as the entry is in its log, committed or not, and no longer if it is cut off again
(D. Ongaro, Consensus: Bridging Theory and Practice, 2014, section 4.1: only so do the majorities of two neighbouring
sets of voters always meet). One change at a time, and none before an entry of the master's own term has committed.

Owns which of such entries are written and not applied yet; their form is entries.py's. Used by raft.py and
conversation.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from tickwheel.replication.entries import VOTERS, split
from tickwheel.replication.journal_view import Journal

SCAN_ENTRIES = 256
"""Entries read at once when a start looks for changes."""


class Voters:
    """The voters by the log, as `node_id` sees them: `ids` all of them, sorted, `others` without itself."""

    def __init__(self, node_id: str, applied: Sequence[str]) -> None:
        self._node_id = node_id
        self._applied = tuple(applied)
        self._written: list[tuple[int, tuple[str, ...]]] = []
        self.ids: tuple[str, ...] = ()
        self.others: tuple[str, ...] = ()
        self._update()

    @property
    def counts(self) -> bool:
        """Whether this node is one of them."""
        return self._node_id in self.ids

    @property
    def changing(self) -> bool:
        """A change is written and not applied: no other may be proposed."""
        return bool(self._written)

    def find_written(self, journal: Journal, applied_index: int, bytes_max: int) -> None:
        """At a start: what the log names behind what is applied, read in pieces of about `bytes_max`."""
        index = applied_index + 1
        while index <= journal.last_index:
            for found, _term, entry in journal.slice(index, SCAN_ENTRIES, bytes_max):
                if entry[:1] == VOTERS:
                    self.written(found, split(entry)[0])
                index = found + 1

    def written(self, index: int, ids: Sequence[str]) -> None:
        """An entry that names these is in the log."""
        self._written.append((index, tuple(ids)))
        self._update()

    def cut_from(self, index: int) -> None:
        """The log ends before this entry now."""
        while self._written and self._written[-1][0] >= index:
            self._written.pop()
        self._update()

    def applied(self, index: int) -> None:
        """What was written up to this entry is applied; `set_applied` has told what came of it."""
        while self._written and self._written[0][0] <= index:
            self._written.pop(0)
        self._update()

    def set_applied(self, ids: Sequence[str]) -> None:
        """The voters by what is applied."""
        self._applied = tuple(ids)
        self._update()

    def _update(self) -> None:
        self.ids = tuple(sorted(self._written[-1][1] if self._written else self._applied))
        self.others = tuple(voter for voter in self.ids if voter != self._node_id)
