"""P2: only messages that a client tried to schedule are delivered, each under its own id and topic."""

from __future__ import annotations

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history_messages import Delivered, RescheduleAnswered, ScheduleAcknowledged, ScheduleSent


class NoInvention(Checker):
    """Every delivered uid was sent, to that topic; its id is the one its producer was told."""

    promise = "P2"

    def __init__(self) -> None:
        self._topic_of: dict[int, str] = {}
        self._ids_of: dict[int, set[int]] = {}
        self._uid_of: dict[int, int] = {}

    def _on_schedule_sent(self, record: ScheduleSent) -> None:
        for row in record.rows:
            self._topic_of[row.uid] = row.topic

    def _on_schedule_acknowledged(self, record: ScheduleAcknowledged) -> None:
        for uid, id_ in zip(record.uids, record.ids, strict=True):
            self._own(uid, id_)
            self._ids_of.setdefault(uid, set()).add(id_)

    def _on_reschedule_answered(self, record: RescheduleAnswered) -> None:
        if record.outcome == "RESCHEDULED":
            self._own(record.uid, record.new_id)
            self._ids_of.setdefault(record.uid, set()).add(record.new_id)

    def _own(self, uid: int, id_: int) -> None:
        owner = self._uid_of.setdefault(id_, uid)
        if owner != uid:
            self.broken(f"id {id_:#x} names message {owner} and message {uid}")

    def _on_delivered(self, record: Delivered) -> None:
        topic = self._topic_of.get(record.uid)
        if topic is None:
            self.broken(f"{record.node} delivers message {record.uid}, which nobody scheduled")
        if topic != record.topic:
            self.broken(f"message {record.uid} of topic {topic} is delivered in topic {record.topic}")
        self._own(record.uid, record.id)
