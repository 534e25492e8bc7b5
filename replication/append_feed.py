"""The master's feed of entries to its slaves: what to send next, and how much is under way to whom.

Owns, for each peer, the messages with entries that are not acknowledged, and when it was told of which commit index.
Where a peer's next entry is, is pysyncobj's to know: it is an argument, and the answer.

Invariants:
- Nothing is sent twice that one connection has carried, unless the peer asked for it (`restart`).
- Bytes and messages under way to a peer are bounded; a message has at least one entry and is bounded too (the view).
- A peer that lacks what the journal no longer holds gets heartbeats alone: it needs a checkpoint.

Only the seam uses this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tickwheel.replication.config import RaftConfig
from tickwheel.replication.journal_view import Journal, JournalView, Row
from tickwheel.replication.ports import Clock


@dataclass(slots=True)
class _Flight:
    """What is under way to one peer: (last index, bytes) of each message with entries."""

    messages: deque[tuple[int, int]] = field(default_factory=deque)
    bytes: int = 0
    commit_told: int = 0
    told_ns: int = 0

    def sent(self, last_index: int, size: int) -> None:
        self.messages.append((last_index, size))
        self.bytes += size

    def acknowledged(self, index: int) -> None:
        while self.messages and self.messages[0][0] <= index:
            self.bytes -= self.messages.popleft()[1]

    def clear(self) -> None:
        self.messages.clear()
        self.bytes = 0


class AppendFeed:
    """See the module."""

    def __init__(
        self,
        config: RaftConfig,
        journal: Journal,
        view: JournalView,
        clock: Clock,
        outbound: Callable[[str, dict[str, Any]], bool],
    ) -> None:
        self._config = config
        self._journal = journal
        self._view = view
        self._clock = clock
        self._outbound = outbound
        self._flights: dict[str, _Flight] = {}

    def begin_reign(self) -> None:
        """This node has become master: nothing is under way, nobody was told of a commit index in this term."""
        for flight in self._flights.values():
            flight.clear()
            flight.commit_told = 0

    def restart(self, peer_id: str) -> None:
        """What is under way to a peer counts no more: its connection is gone or new, or it asks to begin elsewhere."""
        self._flight(peer_id).clear()

    def acknowledged(self, peer_id: str, index: int) -> None:
        """A peer holds everything up to this entry."""
        self._flight(peer_id).acknowledged(index)

    def send(self, peer_id: str, following: int, term: int, commit: int, *, heartbeat: bool) -> int:
        """Send entries from `following` on, as many as there is room for; returns the index that follows them.

        `heartbeat`: if that is none, send a message without entries.
        """
        journal, flight = self._journal, self._flight(peer_id)
        if following <= journal.base_index:
            if heartbeat and self._outbound(
                peer_id, {"type": "append_entries", "term": term, "commit_index": commit, "serialized": None}
            ):
                flight.told_ns = self._clock.monotonic_ns()
            return following
        while following <= journal.last_index and self._has_room(flight):
            rows = self._view.rows(following, journal.last_index - following + 1)
            if not self._send_rows(peer_id, flight, following, rows, term, commit):
                return following
            heartbeat = False
            following = rows[-1][1] + 1
            flight.sent(rows[-1][1], sum(len(row[0]) for row in rows))
        if heartbeat:
            self._send_rows(peer_id, flight, following, [], term, commit)
        return following

    def notice_due_ns(self, peer_id: str, commit: int, notice_ns: int) -> int | None:
        """When a peer is to be told of this commit index: `notice_ns` after what it was told last; None: it knows."""
        flight = self._flight(peer_id)
        return flight.told_ns + notice_ns if flight.commit_told < commit else None

    def _flight(self, peer_id: str) -> _Flight:
        flight = self._flights.get(peer_id)
        if flight is None:
            flight = self._flights[peer_id] = _Flight()
        return flight

    def _has_room(self, flight: _Flight) -> bool:
        return flight.bytes < self._config.window_bytes_max and len(flight.messages) < self._config.window_messages_max

    def _send_rows(self, peer_id: str, flight: _Flight, first: int, rows: list[Row], term: int, commit: int) -> bool:
        sent = self._outbound(
            peer_id,
            {
                "type": "append_entries",
                "term": term,
                "commit_index": commit,
                "entries": rows,
                "prevLogIdx": first - 1,
                "prevLogTerm": self._journal.term_at(first - 1),
            },
        )
        if sent:
            flight.commit_told, flight.told_ns = commit, self._clock.monotonic_ns()
        return sent
