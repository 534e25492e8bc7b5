"""P4: acknowledged messages come soon: within seconds once all faults have ended, at once where there were none.

In a run without faults a message counts as waiting only while its group could have been handed it: while it has an open
session with credit left, neither topic nor group is paused, and the group is not being reset: a reset may bring
messages that an earlier one had skipped. Moved, ordered and broadcast messages are left to other checkers. With a limit
of what a group has out, or with a small window, messages may wait for consumers that think, or for leases to end: such
a run is not judged.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history import Healed
from tickwheel.chaos.sim.history_messages import (
    CreditGiven,
    Delivered,
    RescheduleSent,
    ScheduleAcknowledged,
    ScheduleSent,
    SessionClosed,
    SessionOpened,
    SessionOver,
)
from tickwheel.chaos.sim.history_operators import PauseAnswered, PauseAsked, ResetAnswered, ResetAsked
from tickwheel.chaos.sim.world import MS, SECOND

LATE_NS_HEALED_MOST = 5 * SECOND
"""Most lateness after the heal: consumers find the master again, and leases of dead ones run out."""
LATE_NS_CALM_MOST = 500 * MS
"""Most lateness in a run without faults."""
RESET = "reset"
"""Kind of an entry for a group under reset, beside the kinds of pauses."""
CALM_FROM_NS = 2 * SECOND
"""By then nodes have booted, elected and agreed on the time."""


@dataclass(slots=True)
class _Served:
    """Whether a group could be handed something, and since when. `credits` is by session."""

    credits: dict[int, int] = field(default_factory=dict)
    since_ns: int = -1
    """Time since which it could; below 0: it cannot."""

    def change(self, at_ns: int, session: int, by: int | None) -> None:
        """Credit of a session came or went; None: the session is over."""
        if by is None:
            self.credits.pop(session, None)
        elif session in self.credits:
            self.credits[session] += by
        if not any(credit > 0 for credit in self.credits.values()):
            self.since_ns = -1
        elif self.since_ns < 0:
            self.since_ns = at_ns


class Soon(Checker):
    """First deliveries only, counted from the due time or the acknowledgement, whichever is later.

    `latest_ns` is how late the latest was that counts in a run without faults.
    """

    promise = "P4"

    def __init__(self) -> None:
        self.latest_ns = 0
        self._healed = False
        self._awaited: dict[int, tuple[int, bool]] = {}  # uid -> (expected at ns, acknowledged after the heal)
        self._in_order: set[int] = set()
        self._moved: set[int] = set()
        self._seen: set[tuple[str, int]] = set()
        self._served: dict[str, _Served] = {}
        self._paused: set[tuple[str, str]] = set()
        self._unpaused_ns: dict[tuple[str, str], int] = {}

    @property
    def _calm(self) -> bool:
        """Nothing delays messages."""
        return not self.run.faults and not self.run.slow_work and not self._held_back

    @property
    def _held_back(self) -> bool:
        """Messages wait for the settlement of others."""
        return bool(self.run.in_flight_max or self.run.window_messages)

    def _on_schedule_acknowledged(self, record: ScheduleAcknowledged) -> None:
        for uid, due_ms in zip(record.uids, record.due_ms, strict=True):
            self._awaited.setdefault(uid, (max(self.true_ns(due_ms), record.at_ns), self._healed))

    def _on_schedule_sent(self, record: ScheduleSent) -> None:
        label = record.rows[0].label
        if label is not None and label.lane is not None:
            self._in_order.update(row.uid for row in record.rows)

    def _on_credit_given(self, record: CreditGiven) -> None:
        if self._calm:
            self._group(record.group).change(record.at_ns, record.session, record.count)

    def _on_session_opened(self, record: SessionOpened) -> None:
        if self._calm:
            served = self._group(record.group)
            credit = served.credits.setdefault(record.session, 0)  # below 0: something came before the word
            served.change(record.at_ns, record.session, record.credits)
            assert credit <= 0, "a session opens once"

    def _on_session_over_or_session_closed(self, record: SessionOver | SessionClosed) -> None:
        if self._calm:
            self._group(record.group).change(record.at_ns, record.session, None)

    def _on_reschedule_sent(self, record: RescheduleSent) -> None:
        self._moved.add(record.uid)

    def _on_pause_asked(self, record: PauseAsked) -> None:
        if record.paused:
            self._paused.add((record.kind, record.name))

    def _on_pause_answered(self, record: PauseAnswered) -> None:
        if not record.paused:
            self._paused.discard((record.kind, record.name))
            self._unpaused_ns[record.kind, record.name] = record.at_ns

    def _on_reset_asked(self, record: ResetAsked) -> None:
        self._paused.add((RESET, record.group))

    def _on_reset_answered(self, record: ResetAnswered) -> None:
        self._paused.discard((RESET, record.group))
        self._unpaused_ns[RESET, record.group] = record.at_ns

    def _on_healed(self, record: Healed) -> None:
        self._healed = True

    def _group(self, name: str) -> _Served:
        return self._served.setdefault(name, _Served())

    def _on_delivered(self, record: Delivered) -> None:
        since_ns = -1
        if self._calm:
            served = self._group(record.group)
            since_ns = served.since_ns
            served.credits.setdefault(record.session, 0)
            served.change(record.at_ns, record.session, -1)
        key = (record.group, record.uid)
        if key in self._seen:
            return
        self._seen.add(key)
        expected_ns, after_heal = self._awaited.get(record.uid, (record.at_ns, False))
        late_ns = record.at_ns - expected_ns
        if (late_ns <= LATE_NS_CALM_MOST and not self._calm) or record.uid in self._in_order:
            return
        if after_heal and late_ns > LATE_NS_HEALED_MOST and not self._held_back:
            self.broken(f"message {record.uid} reaches {record.group} {late_ns / SECOND:.3f} s late, long healed")
        if since_ns >= 0 and not record.broadcast and record.uid not in self._moved:
            self._judge_calm(record, max(expected_ns, since_ns, CALM_FROM_NS))

    def _judge_calm(self, record: Delivered, from_ns: int) -> None:
        places = [("topic", record.topic), ("group", record.group), (RESET, record.group)]
        if any(place in self._paused for place in places):
            return
        late_ns = record.at_ns - max(from_ns, *(self._unpaused_ns.get(place, 0) for place in places))
        self.latest_ns = max(self.latest_ns, late_ns)
        if late_ns > LATE_NS_CALM_MOST:
            self.broken(
                f"message {record.uid} reaches {record.group} {late_ns / SECOND:.3f} s late, without any fault and "
                "though a consumer has had credit"
            )
