"""The master's feed of entries to its slaves, with a bound on what is under way to each.

Owns, for each peer, the unacknowledged messages with entries, and which commit index it was told of and when.
pysyncobj keeps the index of a peer's next entry: `send` takes it and returns the new one.

Invariants:
- No entry is sent twice on one connection, unless the peer asked for it (`restart`).
- Bytes and messages under way to a peer are bounded. Each message is bounded too (by the view), but has at least one
  entry.
- A peer that needs entries the journal no longer holds gets heartbeats only: it needs a checkpoint. So does one that
  needs entries which cannot be read: `damaged` hears of it, and another node must lead.

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
from tickwheel.storage.disk import DiskError
from tickwheel.storage.errors import is_damage


@dataclass(slots=True)
class _Flight:
    """The messages under way to one peer: (last index, bytes) of each one with entries."""

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
    """Sends entries through `outbound`, which returns False if a message could not be queued."""

    def __init__(
        self,
        config: RaftConfig,
        journal: Journal,
        view: JournalView,
        clock: Clock,
        outbound: Callable[[str, dict[str, Any]], bool],
        damaged: Callable[[DiskError], None],
    ) -> None:
        self._config = config
        self._journal = journal
        self._view = view
        self._clock = clock
        self._outbound = outbound
        self._damaged = damaged
        self._flights: dict[str, _Flight] = {}

    def begin_mastership(self) -> None:
        """This node has become master: in this term nothing is under way and no peer knows a commit index."""
        for flight in self._flights.values():
            flight.clear()
            flight.commit_told = 0

    def restart(self, peer_id: str) -> None:
        """Forget the messages under way to a peer: its connection is gone or new, or it asks for other entries."""
        self._flight(peer_id).clear()

    def acknowledged(self, peer_id: str, index: int) -> None:
        """A peer has acknowledged all entries up to `index`."""
        self._flight(peer_id).acknowledged(index)

    def send(self, peer_id: str, following: int, term: int, commit: int, *, heartbeat: bool) -> int:
        """Send entries from `following` on while the window has room. Returns the index after the last one sent.

        `heartbeat`: if no entry can be sent, send a message without entries.
        """
        journal, flight = self._journal, self._flight(peer_id)
        if following <= journal.base_index:
            if heartbeat and self._outbound(
                peer_id, {"type": "append_entries", "term": term, "commit_index": commit, "serialized": None}
            ):
                flight.told_ns = self._clock.monotonic_ns()
            return following
        while following <= journal.last_index and self._has_room(flight):
            try:
                rows = self._view.rows(following, journal.last_index - following + 1)
            except DiskError as error:
                if not is_damage(error):
                    raise
                self._damaged(error)
                break
            if not self._send_rows(peer_id, flight, following, rows, term, commit):
                return following
            heartbeat = False
            following = rows[-1][1] + 1
            flight.sent(rows[-1][1], sum(len(row[0]) for row in rows))
        if heartbeat:
            self._send_rows(peer_id, flight, following, [], term, commit)
        return following

    def notice_due_ns(self, peer_id: str, commit: int, notice_ns: int) -> int | None:
        """When to tell a peer of this commit index: `notice_ns` after the last message to it; None if it knows."""
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
