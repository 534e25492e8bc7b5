"""P1 of producers: one id and sequence accept one content, and a sender of another content is told so.

A sequence accepted with other messages is answered with SEQUENCE_TAKEN: never with a receipt, nor with another refusal
that a program would take as final. A program that does not share its id is never told SEQUENCE_TAKEN.
"""

from __future__ import annotations

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history_messages import ScheduleAcknowledged, ScheduleRefused, ScheduleSent

OTHER_ENDS = ("SEQUENCE_GAP", "SEQUENCE_FORGOTTEN")
"""Refusals for other reasons of the sequence."""

_Key = tuple[str, int]
"""(producer, sequence)"""


class OneContent(Checker):
    """The uid of its first message identifies a content: no message is in two."""

    promise = "P1"

    def __init__(self) -> None:
        self._sent: dict[_Key, dict[int, int]] = {}
        """Contents, and the time at which each was first sent."""
        self._shared: set[str] = set()
        """Ids under which one sequence was sent with several contents."""
        self._accepted: dict[_Key, tuple[int, int]] = {}
        """The content accepted, and the time of its first receipt."""

    def _on_schedule_sent(self, record: ScheduleSent) -> None:
        sent = self._sent.setdefault((record.producer, record.sequence), {})
        sent.setdefault(record.rows[0].uid, record.at_ns)
        if len(sent) > 1:
            self._shared.add(record.producer)

    def _on_schedule_acknowledged(self, record: ScheduleAcknowledged) -> None:
        key = (record.producer, record.sequence)
        content, _ = self._accepted.setdefault(key, (record.uids[0], record.at_ns))
        if content != record.uids[0]:
            self.broken(
                f"sequence {record.sequence} of {record.producer} was acknowledged with message {content}, and "
                f"now with message {record.uids[0]}"
            )

    def _on_schedule_refused(self, record: ScheduleRefused) -> None:
        key = (record.producer, record.sequence)
        if record.reason == "SEQUENCE_TAKEN" and record.producer not in self._shared:
            self.broken(f"{record.producer} is told that its sequence {record.sequence} is taken: by nobody")
        if record.reason == "INVALID_FIELD" and record.uids:
            self.broken(f"sequence {record.sequence} of {record.producer} is refused as no valid request")
        if record.reason not in OTHER_ENDS or not record.uids or key not in self._accepted:
            return
        content, accepted_ns = self._accepted[key]
        if content != record.uids[0] and accepted_ns < self._sent[key][record.uids[0]]:
            self.broken(
                f"{record.producer} is refused sequence {record.sequence} with {record.reason}; it was accepted with "
                f"message {content} before"
            )
