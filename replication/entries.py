"""The entries of the log: their format, and the voters that they list.

An entry is one byte for its kind, then the body of that kind:

- REGULAR: a command of the node.
- NO_OP: no body; pysyncobj writes one when a master is elected.
- VOTERS: the ids of all voters from this entry on, as a u16 length and a sorted list with commas; then a command.

Every reader of a journal, the running log or an offline tool, takes the command out with `command_of`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from tickwheel.replication.journal import Journal

REGULAR = b"\x00"
NO_OP = b"\x01"
VOTERS = b"\x10"
"""Beyond pysyncobj's own kinds, which are 0 to 3."""

_LENGTH = struct.Struct("<H")


def naming(voters: Sequence[str], command: bytes) -> bytes:
    """An entry that lists all voters after the change, and holds the command of the change."""
    names = ",".join(sorted(voters)).encode()
    return VOTERS + _LENGTH.pack(len(names)) + names + command


def split(entry: bytes) -> tuple[tuple[str, ...], bytes]:
    """(voters, command) of a VOTERS entry. Raises ValueError for another kind or a damaged list."""
    if entry[:1] != VOTERS or len(entry) < 1 + _LENGTH.size:
        raise ValueError("the entry names no voters")
    begin = 1 + _LENGTH.size
    end = begin + _LENGTH.unpack_from(entry, 1)[0]
    if end > len(entry):
        raise ValueError("the list of voters is longer than its entry")
    names = entry[begin:end].decode()
    return tuple(names.split(",")) if names else (), entry[end:]


def command_of(entry: bytes) -> bytes:
    """The node's command in an entry; empty if it has none. Raises ValueError for a kind that this log never writes."""
    kind = entry[:1]
    if kind == REGULAR:
        return entry[1:]
    if kind == VOTERS:
        return split(entry)[1]
    if kind == NO_OP:
        return b""
    raise ValueError(f"a command of kind {kind!r}, which this log never writes")


SCAN_ENTRIES = 256
"""Entries read at a time when a start looks for entries that list voters."""


class Voters:
    """The voters by the log of `node_id`: those in the newest entry that lists voters, from when it is written here.

    An entry that changes the voters lists all voters after the change, before its command. They count on each node as
    soon as the entry is in its log, committed or not. If the entry is cut off again, the voters before it count again.
    Only so do the majorities of two neighbouring sets of voters always meet (D. Ongaro, Consensus: Bridging Theory and
    Practice, 2014, section 4.1). There is one change at a time, and none before an entry of the master's own term has
    committed.

    `ids`: all voters, sorted. `others`: without this node, in the same order. `counts`: this node is a voter.
    `changing`: a change is written and not applied yet, so no other may be proposed.
    """

    def __init__(self, node_id: str, applied: Sequence[str]) -> None:
        self._node_id = node_id
        self._applied = tuple(applied)
        self._written: list[tuple[int, tuple[str, ...]]] = []
        self.ids: tuple[str, ...] = ()
        self.others: tuple[str, ...] = ()
        self.counts = False
        self.changing = False
        self._update()

    def find_written(self, journal: Journal, applied_index: int, bytes_max: int) -> None:
        """At a start: find the changes after `applied_index`, reading the journal in pieces of about `bytes_max`."""
        index = applied_index + 1
        while index <= journal.last_index:
            for found, _term, entry in journal.slice(index, SCAN_ENTRIES, bytes_max):
                if entry[:1] == VOTERS:
                    self.written(found, split(entry)[0])
                index = found + 1

    def written(self, index: int, ids: Sequence[str]) -> None:
        """The entry at `index`, which lists these voters, is now in the log."""
        self._written.append((index, tuple(ids)))
        self._update()

    def cut_from(self, index: int) -> None:
        """The log has been cut and now ends before entry `index`."""
        while self._written and self._written[-1][0] >= index:
            self._written.pop()
        self._update()

    def applied(self, index: int) -> None:
        """Entries up to `index` are applied. `set_applied` has been called before with the voters that result."""
        while self._written and self._written[0][0] <= index:
            self._written.pop(0)
        self._update()

    def set_applied(self, ids: Sequence[str]) -> None:
        """Set the voters by the entries applied so far."""
        self._applied = tuple(ids)
        self._update()

    def _update(self) -> None:
        self.ids = tuple(sorted(self._written[-1][1] if self._written else self._applied))
        self.others = tuple(voter for voter in self.ids if voter != self._node_id)
        self.counts = self._node_id in self.ids
        self.changing = bool(self._written)
