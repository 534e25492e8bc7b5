"""P6: the cursor, once exposed, never moves back; the synced pair is monotone within a term, whose number never falls.

Nothing is scheduled behind the cursor either: a late message becomes due where the cursor stands. The due times of
staged and bundled messages are not told to anyone: they show at delivery.
"""

from __future__ import annotations

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history_machines import CursorSeen, DiskWiped, SyncedSeen
from tickwheel.chaos.sim.history_messages import Delivered, ScheduleAcknowledged, ScheduleSent


class Monotone(Checker):
    """Per node, across its boots and all terms; a node that says it is recovering exposes nothing."""

    promise = "P6"

    def __init__(self) -> None:
        self._cursor: dict[str, tuple[int, int]] = {}
        self._wiped: set[str] = set()
        """Nodes that have forgotten what they showed."""
        self._synced: dict[tuple[str, int, int], tuple[int, int]] = {}
        self._synced_term: dict[tuple[str, int], int] = {}
        self._farthest_ms = -1
        self._farthest_at_sending_ms: dict[tuple[str, int], int] = {}
        self._farthest_before_ms: dict[int, int] = {}
        """The same of each message of which nobody is told when it is due."""

    def _on_cursor_seen(self, record: CursorSeen) -> None:
        if record.recovering or record.node in self._wiped:
            return
        now, before = (record.due_ms, record.index), self._cursor.get(record.node, (-1, -1))
        if now < before:
            self.broken(f"{record.node} in boot {record.boot} shows cursor {now}, had shown {before}")
        self._cursor[record.node] = now
        self._farthest_ms = max(self._farthest_ms, record.due_ms)

    def _on_disk_wiped(self, record: DiskWiped) -> None:
        self._wiped.add(record.node)

    def _on_delivered(self, record: Delivered) -> None:
        cursor_ms = self._farthest_before_ms.get(record.uid, -1)
        if record.due_ms < cursor_ms and record.attempt == 1:
            self.broken(
                f"message {record.uid} is due at {record.due_ms}, behind the cursor {cursor_ms} that was shown "
                "before it was sent"
            )

    def _on_schedule_sent(self, record: ScheduleSent) -> None:
        self._farthest_at_sending_ms.setdefault((record.producer, record.sequence), self._farthest_ms)
        if not record.node:
            for row in record.rows:
                self._farthest_before_ms.setdefault(row.uid, self._farthest_ms)

    def _on_schedule_acknowledged(self, record: ScheduleAcknowledged) -> None:
        cursor_ms = self._farthest_at_sending_ms.get((record.producer, record.sequence), -1)
        earliest_ms = min(record.due_ms, default=cursor_ms)
        if earliest_ms < cursor_ms:
            self.broken(
                f"batch {record.producer}/{record.sequence} is due at {earliest_ms}, "
                f"behind the cursor {cursor_ms} that was shown before it was sent"
            )

    def _on_synced_seen(self, record: SyncedSeen) -> None:
        term = self._synced_term.get((record.node, record.boot), 0)
        if record.term < term:
            self.broken(f"{record.node} shows what term {record.term} synced, had shown term {term}")
        self._synced_term[record.node, record.boot] = record.term
        key = (record.node, record.boot, record.term)
        pair, known = (record.tick, record.local_index), self._synced.get(key, (-1, -1))
        if pair < known:
            self.broken(f"{record.node} shows synced {pair} in term {record.term}, had shown {known}")
        self._synced[key] = pair
