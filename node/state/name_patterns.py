"""Patterns of topic and group names, and an index that answers which of many patterns a name matches.

Pure. The work for a name grows with its length, hardly with the number of patterns: names without a star are looked up,
other patterns are found by how they begin or end, whichever is longer, and by the further piece that the fewest other
patterns have. Only patterns that share such an end or piece with the name are compared one by one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable

from tickwheel.node.state.names import TOPIC_NAME_LENGTH_MAX

EVERYTHING = "*"
REMEMBERED_MAX = 10_000
"""Names whose answer an index certainly remembers: as many as a batch has topics. It holds twice as many at most."""

Entry = tuple[str, int]
"""A pattern and its bits."""


def matches(pattern: str, name: str) -> bool:
    """Whether a name matches a pattern, in which `*` stands for any characters. Linear, without backtracking."""
    first, *rest = pattern.split(EVERYTHING)
    if not rest:
        return name == pattern
    last = rest.pop()
    if len(name) < len(first) + len(last) or not name.startswith(first) or not name.endswith(last):
        return False
    at, end = len(first), len(name) - len(last)
    for part in rest:
        found = name.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


class NamePatterns:
    """Patterns with bits; a name gets the bits of all patterns that it matches."""

    def __init__(self, patterns: Iterable[Entry]) -> None:
        self._exact: dict[str, int] = {}
        starts: dict[str, _Node] = {}
        ends: dict[str, _Node] = {}
        self._remembers = False
        entries = list(patterns)
        shared = Counter(piece for pattern, _ in entries for piece in set(pattern.split(EVERYTHING)))
        for pattern, bits in entries:
            first, *middle = pattern.split(EVERYTHING)
            if not middle:
                self._exact[pattern] = self._exact.get(pattern, 0) | bits
                continue
            last = middle.pop()
            by_end = len(last) > len(first)
            node = ends.setdefault(last[::-1], _Node()) if by_end else starts.setdefault(first, _Node())
            if not any(middle) and not (first and last):
                node.bits |= bits
            else:
                pieces = filter(None, (first if by_end else last, *middle))
                node.add(min(pieces, key=lambda piece: (shared[piece], -len(piece))), (pattern, bits))
                self._remembers = True
        self._starts = _Index(starts)
        self._ends = _Index(ends)
        self._newer: dict[str, int] = {}
        self._older: dict[str, int] = {}

    def bits(self, name: str) -> int:
        """The bits of all patterns that the name matches, or-ed; 0: it matches none. Of a text that is longer than any
        name may be (TOPIC_NAME_LENGTH_MAX) only the beginning is compared and remembered."""
        name = name[: TOPIC_NAME_LENGTH_MAX + 1]
        if not self._remembers:
            return self._bits(name)
        found = self._newer.get(name)
        if found is None:
            found = self._older.get(name)
            if found is None:
                found = self._bits(name)
            if len(self._newer) >= REMEMBERED_MAX:
                self._older, self._newer = self._newer, {}
            self._newer[name] = found
        return found

    def _bits(self, name: str) -> int:
        found = self._exact.get(name, 0) | self._starts.bits(name, name)
        return found | self._ends.bits(name[::-1], name) if self._ends.keys else found


class _Node:
    """Patterns of one beginning (or end): `bits` of those that ask no more, and the others by length and text of one
    further piece."""

    __slots__ = ("bits", "pieces")

    def __init__(self) -> None:
        self.bits = 0
        self.pieces: dict[int, dict[str, list[Entry]]] = {}

    def add(self, piece: str, entry: Entry) -> None:
        """Add a pattern that asks for more; `piece` is not empty, and each name that matches has it."""
        self.pieces.setdefault(len(piece), {}).setdefault(piece, []).append(entry)

    def found(self, name: str) -> int:
        """The bits of the node's patterns that a name with its beginning matches."""
        found = self.bits
        for length, pieces in self.pieces.items():
            places = len(name) - length + 1
            if len(pieces) <= places:
                held = [piece for piece in pieces if piece in name]
            else:
                held = list({piece for at in range(places) if (piece := name[at : at + length]) in pieces})
            for piece in held:
                for pattern, bits in pieces[piece]:
                    if matches(pattern, name):
                        found |= bits
        return found


class _Index:
    """Nodes by key, of which it finds those whose key a text begins with."""

    def __init__(self, nodes: dict[str, _Node]) -> None:
        self.keys = sorted(nodes)
        self._nodes = [nodes[key] for key in self.keys]
        self._outer: list[int] = []
        """For each key the place of the longest other key that it begins with; -1: there is none."""
        around: list[int] = []
        for place, key in enumerate(self.keys):
            while around and not key.startswith(self.keys[around[-1]]):
                around.pop()
            self._outer.append(around[-1] if around else -1)
            around.append(place)

    def bits(self, text: str, name: str) -> int:
        """The bits of the patterns that the name matches; `text` is the name, or the name from its end."""
        # All keys in order between a beginning of the text and the text begin the same way: the keys looked for are the
        # greatest that is not above the text, and those around it.
        place = bisect_right(self.keys, text) - 1
        found = 0
        while place >= 0:
            if text.startswith(self.keys[place]):
                found |= self._nodes[place].found(name)
            place = self._outer[place]
        return found
