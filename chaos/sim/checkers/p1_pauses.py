"""P1 of pauses: after a pause of a topic or group is confirmed, nothing is delivered until it is resumed.

Consumers may settle the messages in their hands. Other checkers judge that a pause loses nothing: every due message
comes after it.
"""

from __future__ import annotations

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history_messages import Delivered
from tickwheel.chaos.sim.history_operators import PauseAnswered, PauseAsked


class PausesHold(Checker):
    """Judges the time from the answer to a pause until a client asks to resume."""

    promise = "P1 (pause)"

    def __init__(self) -> None:
        self._since_ns: dict[tuple[str, str], int] = {}

    def _on_delivered(self, record: Delivered) -> None:
        if self._since_ns:
            self._judge(record, ("topic", record.topic))
            self._judge(record, ("group", record.group))

    def _on_pause_asked(self, record: PauseAsked) -> None:
        if not record.paused:
            self._since_ns.pop((record.kind, record.name), None)

    def _on_pause_answered(self, record: PauseAnswered) -> None:
        if record.paused:
            self._since_ns[record.kind, record.name] = record.at_ns

    def _judge(self, record: Delivered, place: tuple[str, str]) -> None:
        since_ns = self._since_ns.get(place)
        if since_ns is not None:
            self.broken(
                f"{record.node} delivers message {record.uid} of {record.topic} to {record.group}; "
                f"{' '.join(place)} is paused since {since_ns / 1e9:.6f} s"
            )
