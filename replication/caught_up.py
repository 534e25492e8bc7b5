"""Whether a node that has started has applied all that it had applied before it stopped.

Whatever it had applied was committed, so a master's commit index covers it, once an entry of that master's own term
is committed too. Until then its cursor may be behind one that it has shown before.
"""

from __future__ import annotations


class CaughtUp:
    """True once, then for good."""

    def __init__(self, applied_term: int) -> None:
        self._applied_term = applied_term
        self._first_heard: tuple[int, int] = (-1, 0)
        """(term, commit index) when this node first heard of the master of that term."""
        self.done = False

    def heard(self, frame_term: int, commit_index: int) -> None:
        """A master says how far its log is committed."""
        if not self.done and self._first_heard[0] != frame_term:
            self._first_heard = (frame_term, commit_index)

    def applied(self, entry_term: int) -> None:
        """An entry of this term was applied."""
        self._applied_term = entry_term

    def look(self, term: int, applied_index: int, *, leads: bool) -> None:
        """Judge anew."""
        if not self.done:
            heard_term, commit_index = self._first_heard
            heard = heard_term == term and applied_index >= commit_index
            self.done = self._applied_term == term and (leads or heard)
