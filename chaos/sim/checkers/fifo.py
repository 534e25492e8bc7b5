"""FIFO: one message of a message group is in flight at a time, and they come in order.

For each group of consumers and message group: the next message comes only after a consumer settled the one in flight
(a nack settles nothing, so the message group waits for the retry); no older message comes after a newer one, first or
again; and no message acknowledged before is passed over. The order is that of due times, then of ids.
"""

from __future__ import annotations

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history_messages import SETTLING, Delivered, ScheduleAcknowledged, ScheduleSent, SettleSent

Lane = tuple[str, str]
"""(topic, message group)"""
Place = tuple[int, int]
"""(due_ms, id)"""


class InOrder(Checker):
    """Judges messages sent with a message group, an empty one too."""

    promise = "FIFO"

    def __init__(self) -> None:
        self._lanes: dict[int, Lane] = {}
        self._waiting: dict[tuple[str, Lane], dict[int, Place]] = {}
        """Acknowledged and never delivered, by group of consumers and lane."""
        self._out: dict[tuple[str, Lane], tuple[int, Place]] = {}
        """Last message delivered, by group of consumers and lane."""
        self._settled: set[tuple[str, int]] = set()
        self._delivered: set[tuple[str, int]] = set()

    def _on_delivered(self, record: Delivered) -> None:
        lane = self._lanes.get(record.uid)
        if lane is not None:
            self._judge(record, lane)

    def _on_settle_sent(self, record: SettleSent) -> None:
        if record.uid in self._lanes and record.outcome in SETTLING:
            self._settled.add((record.group, record.uid))

    def _on_schedule_sent(self, record: ScheduleSent) -> None:
        for row in record.rows:
            if row.label is not None and row.label.lane is not None:
                self._lanes[row.uid] = (row.topic, row.label.lane)

    def _on_schedule_acknowledged(self, record: ScheduleAcknowledged) -> None:
        if record.uids[0] not in self._lanes:
            return
        for uid, due_ms, id_ in zip(record.uids, record.due_ms, record.ids, strict=True):
            for group in record.groups:
                if (group, uid) not in self._delivered:
                    self._waiting.setdefault((group, self._lanes[uid]), {})[uid] = (due_ms, id_)

    def _judge(self, record: Delivered, lane: Lane) -> None:
        key = (record.group, lane)
        place = (record.due_ms, record.id)
        name = f"message {record.uid} of {lane[0]}/{lane[1] or '(none)'} to {record.group}"
        before = self._out.get(key)
        if before is not None and before[0] != record.uid:
            uid, last = before
            if (record.group, uid) not in self._settled:
                self.broken(f"{name} comes from {record.node} while message {uid} is not settled")
            if place < last:
                self.broken(f"{name} comes from {record.node} after message {uid}, which is behind it")
        waiting = self._waiting.setdefault(key, {})
        waiting.pop(record.uid, None)
        self._delivered.add((record.group, record.uid))
        for uid, other in waiting.items():
            if other < place:
                self.broken(f"{name} comes from {record.node} before message {uid}, which is due first")
        self._out[key] = (record.uid, place)
