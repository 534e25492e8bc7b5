"""P9 of deletions: once a topic is gone by the answer, none of its messages is delivered, and what it had pending was
cancelled.

Pending for certain is what was accepted before anybody asked for the deletion and is not due until a while after its
answer. Nobody else cancels these messages, so the deletion counts at least as many. Messages accepted later are not
judged, nor deleted groups: a late request may make a topic or group of the same name. So a repeat of the deletion may
delete that one: only the first answer is judged.
"""

from __future__ import annotations

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history_operators import DeletionAnswered, DeletionAsked, PassingAccepted, PassingDelivered

SURELY_MS = 500
"""What is due this long after the answer, besides clock error and dispatching ahead, was not dispatched before it."""


class DeletionsHold(Checker):
    """Judges topics that stewards delete."""

    promise = "P9 (deletion)"

    def __init__(self) -> None:
        self._accepted: dict[str, dict[int, int]] = {}
        """By topic: ids of what was accepted before its deletion was asked for, and their due times."""
        self._asked: set[str] = set()
        self._gone_ns: dict[str, int] = {}
        """By topic: time of the answer."""

    def _on_passing_accepted(self, record: PassingAccepted) -> None:
        if record.topic not in self._asked:
            rows = zip(record.ids, record.due_ms, strict=True)
            self._accepted.setdefault(record.topic, {}).update(rows)

    def _on_deletion_asked(self, record: DeletionAsked) -> None:
        if record.kind == "topic":
            self._asked.add(record.name)

    def _on_deletion_answered(self, record: DeletionAnswered) -> None:
        if record.kind == "topic" and record.name not in self._gone_ns:
            self._gone_ns[record.name] = record.at_ns
            self._counted(record)

    def _on_passing_delivered(self, record: PassingDelivered) -> None:
        if record.topic not in self._gone_ns:
            return
        gone = sorted(self._accepted.get(record.topic, {}).keys() & set(record.ids))
        if gone:
            self.broken(
                f"{record.node} delivers message {gone[0]:#x} of topic {record.topic}, which is gone since "
                f"{self._gone_ns[record.topic] / 1e9:.6f} s"
            )

    def _counted(self, record: DeletionAnswered) -> None:
        now_ms = self.now_ms
        surely_ms = now_ms + self.run.dispatch_ahead_ms + SURELY_MS + record.clock_error_ms
        pending = sum(due_ms > surely_ms for due_ms in self._accepted.get(record.name, {}).values())
        if record.cancelled < pending:
            self.broken(
                f"topic {record.name} is gone with {pending} pending messages, of which its deletion has cancelled "
                f"{record.cancelled}"
            )
