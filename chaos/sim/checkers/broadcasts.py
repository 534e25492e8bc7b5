"""Broadcasting: each consumer gets each message once, whatever it answers, and never a retry.

Judged by session: messages that become due after a session was opened come in it, if it lasts to the end. Other
checkers judge messages that a session misses because it ended (P1: some consumer of the group gets them).
"""

from __future__ import annotations

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history_messages import (
    Delivered,
    ScheduleAcknowledged,
    SessionClosed,
    SessionOpened,
    SessionOver,
)

AFTER_MS = 100
"""A session is owed only messages due more than this after its opening. Includes the error of the clock."""


class Broadcasts(Checker):
    """Judges only deliveries marked as broadcast."""

    promise = "broadcast"
    what_is_owed = "broadcast messages (session, message)"

    def __init__(self) -> None:
        self._groups: set[str] = set()
        """Groups seen to be broadcasting."""
        self._opened_ms: dict[int, tuple[str, int]] = {}
        """By open session: (group, time of opening)."""
        self._came: dict[int, set[int]] = {}
        self._due_ms: dict[str, dict[int, int]] = {}
        """By group: the due times of the messages it is to get."""

    def _on_schedule_acknowledged(self, record: ScheduleAcknowledged) -> None:
        for group in record.groups:
            self._due_ms.setdefault(group, {}).update(zip(record.uids, record.due_ms, strict=True))

    def _on_session_opened(self, record: SessionOpened) -> None:
        self._opened_ms[record.session] = (record.group, self.now_ms)

    def _on_session_closed_or_session_over(self, record: SessionClosed | SessionOver) -> None:
        self._opened_ms.pop(record.session, None)

    def _on_delivered(self, record: Delivered) -> None:
        if not record.broadcast:
            return
        self._groups.add(record.group)
        name = f"{record.node} delivers message {record.uid} to session {record.session} of {record.group}"
        came = self._came.setdefault(record.session, set())
        if record.uid in came:
            self.broken(f"{name} again")
        if record.attempt != 1:
            self.broken(f"{name} as attempt {record.attempt}: a retry")
        came.add(record.uid)

    def owed(self, at_ns: int) -> list[tuple[int, int]]:
        wall_ms = self.wall_ms(at_ns)
        owed = []
        for session, (group, opened_ms) in self._opened_ms.items():
            if group not in self._groups:
                continue
            came = self._came.get(session, set())
            for uid, due_ms in self._due_ms.get(group, {}).items():
                if opened_ms + AFTER_MS < due_ms <= wall_ms and uid not in came:
                    owed.append((session, uid))
        return owed
