"""P6: the cursor, once exposed, never moves back; the synced pair is monotone within a term."""

from __future__ import annotations

from typing import ClassVar

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history import CursorSeen, Record, SyncedSeen


class Monotone(Checker):
    """Per node, across its boots and all terms; a node that says it is recovering exposes nothing."""

    promise: ClassVar[str] = "P6"
    kinds: ClassVar[tuple[type[Record], ...]] = (CursorSeen, SyncedSeen)

    def __init__(self) -> None:
        self._cursor: dict[str, tuple[int, int]] = {}
        self._synced: dict[tuple[str, int, int], tuple[int, int]] = {}

    def observe(self, record: Record) -> None:
        match record:
            case CursorSeen():
                if record.recovering:
                    return
                now, before = (record.due_ms, record.index), self._cursor.get(record.node, (-1, -1))
                if now < before:
                    self.broken(
                        record.at_ns, f"{record.node} in boot {record.boot} shows cursor {now}, had shown {before}"
                    )
                self._cursor[record.node] = now
            case SyncedSeen():
                key = (record.node, record.boot, record.term)
                pair, known = (record.tick, record.local_index), self._synced.get(key, (-1, -1))
                if pair < known:
                    self.broken(
                        record.at_ns, f"{record.node} shows synced {pair} in term {record.term}, had shown {known}"
                    )
                self._synced[key] = pair
