"""P1 of groups: what their filters, resets, pauses and kinds make of the messages that they get."""

from __future__ import annotations

from dataclasses import dataclass, field

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history_messages import (
    SETTLING,
    Delivered,
    ScheduleAcknowledged,
    ScheduleSent,
    SessionClosed,
    SessionOpened,
    SessionOver,
    Settled,
    SettleSent,
)
from tickwheel.chaos.sim.history_operators import (
    FilterAnswered,
    FilterAsked,
    PauseAnswered,
    PauseAsked,
    ResetAnswered,
    ResetAsked,
)

CLOCK_SLACK_MS = 100
"""The cluster's time may be behind the true one by this."""


@dataclass(slots=True)
class _Filter:
    """`over_ns`: time at which the next filter was confirmed; 0: it is the last."""

    tags: tuple[str, ...]
    over_ns: int = 0

    def takes(self, tags: tuple[str, ...]) -> bool:
        return not self.tags or any(tag in tags for tag in self.tags)


class FiltersHold(Checker):
    """P1 of filters: a group gets every message that its filter lets through, and no other.

    A filter may be in force from the moment a client asks for it. Its answer ends the filters before it. A message is
    owed if it passes every filter that may have been in force since a little before the message was due.

    Judges groups with a recorded filter, and messages labelled without a key or message group.
    """

    promise = "P1 (filter)"
    what_is_owed = "messages (group, message) that every filter lets through"

    def __init__(self) -> None:
        self._filters: dict[str, list[_Filter]] = {}
        self._topics: dict[str, str] = {}
        """The topic of each group with a filter."""
        self._tags: dict[int, tuple[str, ...]] = {}
        self._topic_of: dict[int, str] = {}
        self._due_ms: dict[int, int] = {}
        """Due times of acknowledged messages."""
        self._delivered: dict[str, set[int]] = {}

    def _on_delivered(self, record: Delivered) -> None:
        filters = self._filters.get(record.group)
        if filters is not None:
            self._judge(record, filters)

    def _on_schedule_sent(self, record: ScheduleSent) -> None:
        label = record.rows[0].label
        if self._filters and label is not None and label.lane is None and not label.key:
            for row in record.rows:
                self._tags.setdefault(row.uid, row.label.tags if row.label is not None else ())
                self._topic_of[row.uid] = row.topic

    def _on_schedule_acknowledged(self, record: ScheduleAcknowledged) -> None:
        if record.uids[0] in self._tags:
            self._due_ms.update(zip(record.uids, record.due_ms, strict=True))

    def _on_filter_asked(self, record: FilterAsked) -> None:
        self._filters.setdefault(record.group, []).append(_Filter(record.tags))
        self._topics[record.group] = record.topic

    def _on_filter_answered(self, record: FilterAnswered) -> None:
        for earlier in self._filters[record.group][:-1]:
            earlier.over_ns = earlier.over_ns or record.at_ns

    def _judge(self, record: Delivered, filters: list[_Filter]) -> None:
        self._delivered.setdefault(record.group, set()).add(record.uid)
        tags = self._tags.get(record.uid, ())
        now = [one for one in filters if not one.over_ns]
        if not any(one.takes(tags) for one in now):
            self.broken(
                f"{record.node} delivers message {record.uid} with tags {tags} to {record.group}, which takes "
                f"{' or '.join(str(one.tags) for one in now)}"
            )

    def owed(self, at_ns: int) -> list[tuple[str, int]]:
        wall_ms = self.wall_ms(at_ns)
        owed = []
        for group, filters in self._filters.items():
            delivered = self._delivered.get(group, set())
            for uid, due_ms in self._due_ms.items():
                if uid in delivered or due_ms > wall_ms or self._topic_of[uid] != self._topics[group]:
                    continue
                if self.was_due_in_gone(due_ms):
                    continue
                since_ns = self.true_ns(due_ms - self.ahead_ms)
                if all(one.takes(self._tags[uid]) for one in filters if not one.over_ns or one.over_ns >= since_ns):
                    owed.append((group, uid))
        return owed


TICK_MS = 1_000


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
    """P1 of resets: messages due from a group's new place on come (again), and earlier ones do not.

    Between the first request for a reset and its answer, the reset may have been carried out, even more than once. In
    that time a message must be allowed by the old place or by the new one. Once a message came that only the new place
    allows, the reset was carried out and the old place no longer counts. Only whole ticks count. Retries are not
    judged: they are messages of their own, with later times.

    A reset makes void what is out with consumers: a settlement of an earlier epoch that was sent after a delivery of a
    later one must not count.

    Judges each group in each topic in which it is reset.
    """

    promise = "P1 (reset)"
    what_is_owed = "messages after a reset"

    def __init__(self) -> None:
        self._judged: dict[tuple[str, str], _Judged] = {}
        """By group and topic."""
        self._due_ms: dict[int, int] = {}
        """Due times, in any topic of labelled messages without keys; -1 until acknowledged."""
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
        if label is not None and not label.key and not label.unique_key:
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
        owed = {uid for judged in self._judged.values() for uid in judged.owed}
        return sorted(uid for uid in owed if not self.was_due_in_gone(self._due_ms[uid]))


class PausesHold(Checker):
    """P1 of pauses: after a pause of a topic or group is confirmed, nothing is delivered until it is resumed.

    Consumers may settle the messages in their hands. Other checkers judge that a pause loses nothing: every due message
    comes after it.

    Judges the time from the answer to a pause until a client asks to resume.
    """

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


AFTER_MS = 100
"""A session is owed only messages due more than this after its opening. Includes the error of the clock."""


class Broadcasts(Checker):
    """Broadcasting: each consumer gets each message once, whatever it answers, and never a retry.

    Judged by session: messages that become due after a session was opened come in it, if it lasts to the end. Other
    checkers judge messages that a session misses because it ended (P1: some consumer of the group gets them).

    Judges only deliveries marked as broadcast.
    """

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
                if opened_ms + AFTER_MS < due_ms <= wall_ms and uid not in came and not self.was_due_in_gone(due_ms):
                    owed.append((session, uid))
        return owed


Lane = tuple[str, str]
"""(topic, message group)"""
Place = tuple[int, int]
"""(due_ms, id)"""
EVERYTHING_MS = 1 << 62
"""A reset is under way: anything may be left out."""


class InOrder(Checker):
    """FIFO: one message of a message group is in flight at a time, and they come in order.

    For each group of consumers and message group: the next message comes only after a consumer settled the one in
    flight (a nack settles nothing, so the message group waits for the retry); no older message comes after a newer one,
    first or again; and no message acknowledged before is passed over. The order is that of due times, then of ids.

    A reset begins a new epoch, in which all of this is judged afresh. It may leave out messages due before its time, or
    all that were acknowledged by then.

    Judges messages sent with a message group, an empty one too.
    """

    promise = "FIFO"

    def __init__(self) -> None:
        self._lanes: dict[int, Lane] = {}
        self._waiting: dict[tuple[str, Lane], dict[int, Place]] = {}
        """Acknowledged and never delivered, by group of consumers and lane."""
        self._out: dict[tuple[str, Lane], tuple[int, Place, int]] = {}
        """Last message delivered and its epoch, by group of consumers and lane."""
        self._settled: set[tuple[str, int, int]] = set()
        """(group, message, epoch)"""
        self._delivered: set[tuple[str, int]] = set()
        self._left_out_ms: dict[tuple[str, str], int] = {}
        """By group and topic that was reset: what is due before may be left out."""

    def _on_delivered(self, record: Delivered) -> None:
        lane = self._lanes.get(record.uid)
        if lane is not None:
            self._judge(record, lane)

    def _on_settle_sent(self, record: SettleSent) -> None:
        if record.uid in self._lanes and record.outcome in SETTLING:
            self._settled.add((record.group, record.uid, record.epoch))

    def _on_reset_asked(self, record: ResetAsked) -> None:
        self._leave_out(record, EVERYTHING_MS)

    def _on_reset_answered(self, record: ResetAnswered) -> None:
        self._leave_out(record, record.from_ms)

    def _leave_out(self, record: ResetAsked | ResetAnswered, before_ms: int) -> None:
        self._left_out_ms[record.group, record.topic] = before_ms
        for (group, lane), waiting in self._waiting.items():
            if (group, lane[0]) == (record.group, record.topic):
                waiting.clear()

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
        if before is not None and before[0] != record.uid and before[2] == record.epoch:
            uid, last, epoch = before
            if (record.group, uid, epoch) not in self._settled and not self.is_gone(last[1]):
                self.broken(f"{name} comes from {record.node} while message {uid} is not settled")
            if place < last:
                self.broken(f"{name} comes from {record.node} after message {uid}, which is behind it")
        waiting = self._waiting.setdefault(key, {})
        waiting.pop(record.uid, None)
        self._delivered.add((record.group, record.uid))
        left_out_ms = self._left_out_ms.get((record.group, lane[0]), 0)
        for uid, other in waiting.items():
            if left_out_ms <= other[0] and other < place and not self.is_gone(other[1]):
                self.broken(f"{name} comes from {record.node} before message {uid}, which is due first")
        self._out[key] = (record.uid, place, record.epoch)
