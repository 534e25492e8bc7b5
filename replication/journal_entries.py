"""The index of the journal's entries: position, length and term of each, and a cache of the newest commands.

Owns three arrays (20 bytes an entry) and a cache of commands bounded in bytes.
Invariants: the arrays cover base_index + 1 .. last_index without gaps. The cache covers the newest of these without
gaps, and always holds the last one. Called by `journal.py` only.
"""

from __future__ import annotations

from array import array


class JournalEntries:
    """The entries that the journal holds, by index. Does no I/O."""

    def __init__(self, cache_bytes_max: int) -> None:
        self._cache_bytes_max = cache_bytes_max
        self._positions = array("Q")
        self._lengths = array("I")
        self._terms = array("Q")
        self._cache: dict[int, bytes] = {}
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
        self._cache[self.last_index] = command
        self._cache_bytes += len(command)
        while self._cache_bytes > self._cache_bytes_max and len(self._cache) > 1:
            self._drop_first_cached()

    def cached(self, index: int) -> bytes | None:
        return self._cache.get(index)

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
            self._cache_bytes -= len(self._cache.pop(gone))
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
        self._cache_bytes -= len(self._cache.pop(self._cache_first, b""))
        self._cache_first += 1
