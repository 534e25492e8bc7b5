"""Whether a node has, since its start, applied everything that it had applied before it stopped.

What it had applied was committed. So the commit index of a master covers that, once an entry of the master's own term
is committed too. Until then the node's cursor may be behind one that it has shown to clients before.
"""

from __future__ import annotations


class CaughtUp:
    """`done` turns true once and stays true."""

    def __init__(self, applied_term: int) -> None:
        self._applied_term = applied_term
        self._first_heard: tuple[int, int] = (-1, 0)
        """(term, the commit index in the first append_entries of that term)."""
        self.done = False

    def heard(self, frame_term: int, commit_index: int) -> None:
        """The master of term `frame_term` has reported its commit index."""
        if not self.done and self._first_heard[0] != frame_term:
            self._first_heard = (frame_term, commit_index)

    def applied(self, entry_term: int) -> None:
        """An entry of term `entry_term` was applied."""
        self._applied_term = entry_term

    def look(self, term: int, applied_index: int, *, leads: bool) -> None:
        """Update `done`. It needs an applied entry of the current `term`, and all that its master first reported."""
        if not self.done:
            heard_term, commit_index = self._first_heard
            heard = heard_term == term and applied_index >= commit_index
            self.done = self._applied_term == term and (leads or heard)
