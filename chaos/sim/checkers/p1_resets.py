"""P1 of resets: messages due from a group's new place on come (again), and earlier ones do not.

Between the first request for a reset and its answer, the reset may have been carried out, even more than once. In that
time a message must be allowed by the old place or by the new one. Once a message came that only the new place allows,
the reset was carried out and the old place no longer counts. Only whole ticks count. Retries are not judged: they are
messages of their own, with later times.

A reset makes void what is out with consumers: a settlement of an earlier epoch that was sent after a delivery of a
later one must not count.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history_messages import Delivered, ScheduleAcknowledged, ScheduleSent, Settled, SettleSent
from tickwheel.chaos.sim.history_operators import ResetAnswered, ResetAsked

TICK_MS = 1_000
CLOCK_SLACK_MS = 100
"""The cluster's time may be behind the true one by this."""


@dataclass(slots=True)
class _Place:
    """The place of a group: the messages that it forbids."""

    from_ms: int = 0
    """Messages due before this are forbidden."""
    void: set[int] = field(default_factory=set)
    """Messages forbidden by uid: they came before a reset to the next messages."""

    def forbids(self, uid: int, due_ms: int) -> str:
        """The reason why a message must not come; empty if it may."""
        if due_ms < self.from_ms:
            return f"due {self.from_ms - due_ms} ms before the group's place"
        return "which had come before the group was reset to what comes next" if uid in self.void else ""


@dataclass(slots=True)
class _Judged:
    """A group in a topic that was reset."""

    place: _Place = field(default_factory=_Place)
    asked: _Place | None = None
    """The new place by the reset under way."""
    asked_ns: int = 0
    carried_out: bool = False
    """The reset under way has been carried out at least once."""
    owed: set[int] = field(default_factory=set)


class ResetsHold(Checker):
    """Judges each group in each topic in which it is reset."""

    promise = "P1 (reset)"
    what_is_owed = "messages after a reset"

    def __init__(self) -> None:
        self._judged: dict[tuple[str, str], _Judged] = {}
        """By group and topic."""
        self._due_ms: dict[int, int] = {}
        """Due times, in any topic of labelled messages without keys and message group; -1 until acknowledged."""
        self._topics: dict[int, str] = {}
        """The topic of each of them."""
        self._came_ns: dict[tuple[str, str], dict[int, int]] = {}
        """By group and topic, and message: time of the last delivery."""
        self._epochs: dict[tuple[str, str], int] = {}
        """By group and topic: the highest epoch delivered."""
        self._void: dict[tuple[str, int, int, int], bool] = {}
        """By (group, message, attempt, epoch): whether the first settlement of it was sent too late."""

    def _on_settle_sent(self, record: SettleSent) -> None:
        if record.uid in self._topics:
            newest = self._epochs.get((record.group, self._topics[record.uid]), 0)
            settled = (record.group, record.uid, record.attempt, record.epoch)
            self._void.setdefault(settled, record.epoch < newest)

    def _on_settled(self, record: Settled) -> None:
        if self._void.get((record.group, record.uid, record.attempt, record.epoch)):
            self.broken(
                f"message {record.uid} of epoch {record.epoch} is settled for {record.group}; by then it was reset"
            )

    def _on_schedule_sent(self, record: ScheduleSent) -> None:
        label = record.rows[0].label
        if label is not None and label.lane is None and not label.key and not label.unique_key:
            for row in record.rows:
                self._due_ms.setdefault(row.uid, -1)
                self._topics[row.uid] = row.topic

    def _on_schedule_acknowledged(self, record: ScheduleAcknowledged) -> None:
        if record.uids[0] in self._due_ms:
            for uid, due_ms in zip(record.uids, record.due_ms, strict=True):
                self._due_ms[uid] = due_ms

    def _on_reset_asked(self, record: ResetAsked) -> None:
        place = (record.group, record.topic)
        judged = self._judged.setdefault(place, _Judged())
        judged.asked_ns, judged.carried_out = record.at_ns, False
        if record.from_ms < 0:
            judged.asked = _Place(void=set(self._came_ns.get(place, ())))
        else:
            judged.asked = _Place(record.from_ms // TICK_MS * TICK_MS)

    def _on_delivered(self, record: Delivered) -> None:
        if record.uid not in self._due_ms:
            return
        uid, place = record.uid, (record.group, record.topic)
        self._came_ns.setdefault(place, {})[uid] = record.at_ns
        self._epochs[place] = max(record.epoch, self._epochs.get(place, 0))
        judged = self._judged.get(place)
        if judged is None:
            return
        judged.owed.discard(uid)
        if record.attempt > 1:
            return
        before = judged.place.forbids(uid, record.due_ms)
        if judged.asked is None:
            wrong = before
        else:
            wrong = judged.asked.forbids(uid, record.due_ms)
            if not judged.carried_out and not (before and wrong):
                judged.carried_out = bool(before)
                return
        if wrong:
            since = "" if judged.asked is None else f" (a reset is under way since {judged.asked_ns / 1e9:.6f} s)"
            self.broken(f"{record.node} delivers message {uid} to {record.group}, {wrong}{since}")

    def _on_reset_answered(self, record: ResetAnswered) -> None:
        wall_ms = self.now_ms
        place = (record.group, record.topic)
        judged, came_ns = self._judged[place], self._came_ns.get(place, {})
        assert judged.asked is not None, "answered and never asked for"
        judged.place, judged.asked = judged.asked, None
        if record.from_ms < 0:
            judged.owed.clear()
            return
        judged.owed = {
            uid
            for uid, due_ms in self._due_ms.items()
            if self._topics[uid] == record.topic
            and record.from_ms + TICK_MS <= due_ms <= wall_ms - CLOCK_SLACK_MS
            and came_ns.get(uid, 0) < judged.asked_ns
        }

    def owed(self, at_ns: int) -> list[int]:
        return sorted({uid for judged in self._judged.values() for uid in judged.owed})
