"""P13: at most one pending message of a topic holds a unique key, and every answer about the key is true of a moment
between question and answer.

Judged from what clients were told, what came, and what the cluster says of the rest at the end. While the run goes on,
only what needs no search is judged: what came although it was refused or replaced, and repeats with another answer. At
the end `key_search` looks for an order of events that explains all answers about a key, one key at a time. In
push-first a delivery does not prove that its dispatch was committed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.checkers.key_search import Doubtful, Event, Facts, Kind, Operation, Put, What, explain
from tickwheel.chaos.sim.checkers.p9_cancels import DISPATCH_SLACK_MS
from tickwheel.chaos.sim.history_keys import KeyAnswered, KeyAsked, KeyedAnswered, KeyedSeen, KeysUsed, KeyUndone
from tickwheel.chaos.sim.history_messages import (
    SETTLING,
    Delivered,
    Row,
    ScheduleRefused,
    ScheduleSent,
    SessionOpened,
    Settled,
    SettleSent,
)
from tickwheel.chaos.sim.world import HOUR_MS

LOST = "OUTCOME_UNKNOWN"
"""The only refusal after which a request may still take effect."""
NOT_SCHEDULED = ("KEY_REFUSED", "KEY_USED_EXISTING")

_Place = tuple[str, str]
"""(topic, key)"""


@dataclass(slots=True)
class _Batch:
    """A batch with unique keys."""

    sent_ns: int
    sent_ms: int
    rows: tuple[Row, ...]
    sent: int = 0
    refused: int = 0
    answer: KeyedAnswered | None = None

    @property
    def void(self) -> bool:
        """Every try was refused without effect."""
        return self.answer is None and self.sent == self.refused


@dataclass(slots=True)
class _Call:
    """Calls about keys; `asked` are the times of its tries that may have an effect, `answered` those of its answers."""

    first: KeyAsked
    asked: list[int] = field(default_factory=list)
    answered: KeyAnswered | None = None


@dataclass(slots=True)
class _Message:
    topic: str
    key: str
    until_settled: bool
    tagged: bool
    sent_ns: int
    id: int = 0
    came_ns: int = -1
    settling_ns: dict[str, int] = field(default_factory=dict)
    """By group: first settlement sent."""
    settled_ns: dict[str, int] = field(default_factory=dict)
    """By group: first settlement that was confirmed."""
    seen: list[KeyedSeen] = field(default_factory=list)


class KeysHeld(Checker):
    """`judged` counts the keys that were searched, `doubtful` those of which nothing can be said."""

    promise = "P13"

    def __init__(self) -> None:
        self.doubtful = 0
        self.judged = 0
        self._batches: dict[tuple[str, int], _Batch] = {}
        self._calls: dict[int, _Call] = {}
        self._messages: dict[int, _Message] = {}
        self._not_scheduled: dict[int, str] = {}
        self._names: dict[int, int] = {}
        self._moves: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
        """By topic and key: least ids of the hours that somebody asked to move a message to."""
        self._used: dict[str, KeysUsed] = {}
        self._gone_ns = 0
        """When retention first removed an hour."""
        self._groups: dict[str, int] = {}
        """When a session of each group was first open: since then at the latest the group exists."""

    def _on_session_opened(self, record: SessionOpened) -> None:
        self._groups.setdefault(record.group, record.at_ns)

    def _on_settle_sent(self, record: SettleSent) -> None:
        message = self._messages.get(record.uid)
        if message is not None and record.outcome in SETTLING:
            message.settling_ns.setdefault(record.group, record.at_ns)

    def _on_settled(self, record: Settled) -> None:
        message = self._messages.get(record.uid)
        if message is not None and record.outcome in SETTLING:
            message.settled_ns.setdefault(record.group, record.at_ns)

    def _on_schedule_sent(self, record: ScheduleSent) -> None:
        label = record.rows[0].label
        if label is not None and label.unique_key:
            self._sent(record)

    def _on_schedule_refused(self, record: ScheduleRefused) -> None:
        batch = self._batches.get((record.producer, record.sequence))
        if batch is not None and record.reason != LOST:
            batch.refused += 1

    def _on_key_asked(self, record: KeyAsked) -> None:
        self._calls.setdefault(record.call, _Call(record)).asked.append(record.at_ns)
        if record.what == "move":
            self._moves[record.topic, record.key].add(record.due_ms // HOUR_MS << 32)

    def _on_key_undone(self, record: KeyUndone) -> None:
        self._calls[record.call].asked.pop()

    def _on_keyed_seen(self, record: KeyedSeen) -> None:
        self._messages[record.uid].seen.append(record)
        self._names.setdefault(record.now_id, record.uid)
        if record.now_uid != record.uid:
            self.broken(f"id {record.id:#x} of message {record.uid} names {record.now_uid} now")
        gone = self._an_hour_may_be_gone(record.uid, record.at_ns)
        if record.state == "NOT_FOUND" and not gone:
            self.broken(f"message {record.uid} was acknowledged as {record.id:#x}; not found")

    def _on_keys_used(self, record: KeysUsed) -> None:
        self._used[record.topic] = record

    def _an_hour_may_be_gone(self, uid: int, at_ns: int) -> bool:
        """Whether the hour of an id that the message has, had before a move, or may have after one, may be removed."""
        message = self._messages[uid]
        ids = [id_ for id_, named in self._names.items() if named == uid]
        ids += self._moves.get((message.topic, message.key), ())
        return any(self.hour_may_be_gone(id_, at_ns) for id_ in ids)

    def _an_hour_is_gone(self, uid: int) -> bool:
        """Whether retention has removed the hour of one of its ids: it is settled by that."""
        return any(self.is_gone(id_) for id_, named in self._names.items() if named == uid)

    def forget_gone(self) -> None:
        self._gone_ns = self._gone_ns or self.history.newest_ns

    def _sent(self, record: ScheduleSent) -> None:
        name = (record.producer, record.sequence)
        batch = self._batches.get(name)
        if batch is None:
            batch = self._batches[name] = _Batch(record.at_ns, self.now_ms, record.rows)
            for row in record.rows:
                label = row.label
                assert label is not None and label.unique_key, "all messages of such a batch have keys"
                self._messages[row.uid] = _Message(
                    row.topic, label.unique_key, label.until_settled, bool(label.tags), record.at_ns
                )
        batch.sent += 1

    def _on_keyed_answered(self, record: KeyedAnswered) -> None:
        batch = self._batches[record.producer, record.sequence]
        before = batch.answer
        if before is not None:
            if (before.outcomes, before.ids, before.due_ms) != (record.outcomes, record.ids, record.due_ms):
                self.broken(
                    f"batch {record.producer}/{record.sequence} is answered with {_shown(record)}; before with "
                    f"{_shown(before)}"
                )
            return
        batch.answer = record
        for uid, outcome, id_ in zip(record.uids, record.outcomes, record.ids, strict=True):
            if outcome in NOT_SCHEDULED:
                self._not_scheduled[uid] = outcome
                if self._messages[uid].came_ns >= 0:
                    self.broken(f"message {uid} came, and its receipt says {outcome}")
                continue
            self._messages[uid].id = id_
            self._names[id_] = uid

    def _on_delivered(self, record: Delivered) -> None:
        if record.uid not in self._messages:
            return
        message = self._messages[record.uid]
        self._names.setdefault(record.id, record.uid)
        if record.uid in self._not_scheduled:
            why = self._not_scheduled[record.uid]
            self.broken(f"{record.node} delivers message {record.uid}, whose receipt says {why}")
        if message.came_ns >= 0:
            return
        message.came_ns = record.at_ns
        for seen in message.seen:
            if not seen.owed and seen.state != "NOT_FOUND" and not self.run.push_first:
                self.broken(
                    f"{record.node} delivers message {record.uid}, which was {seen.state} at {seen.at_ns / 1e9:.6f} s"
                )

    def _on_key_answered(self, record: KeyAnswered) -> None:
        call = self._calls[record.call]
        before = call.answered
        if before is None:
            call.answered = record
        elif (before.outcome, before.id, before.due_ms) != (record.outcome, record.id, record.due_ms):
            self.broken(
                f"{call.first.what} of key {call.first.key!r} is answered with {record.outcome} {record.id:#x}, under "
                f"the same sequence as {before.outcome} {before.id:#x} before"
            )

    # -- the search

    def settle_accounts(self, at_ns: int) -> None:
        places = {(message.topic, message.key) for message in self._messages.values()}
        places |= {(call.first.topic, call.first.key) for call in self._calls.values() if call.first.key}
        for place in sorted(places):
            self.judged += 1
            try:
                wrong = explain(self._events(place), self._facts(place, at_ns))
            except Doubtful:
                self.doubtful += 1
                continue
            if wrong:
                self.broken(f"key {place[1]!r} of topic {place[0]}: nothing explains that {wrong}")

    def _of(self, place: _Place) -> dict[int, _Message]:
        return {uid: message for uid, message in self._messages.items() if (message.topic, message.key) == place}

    def _facts(self, place: _Place, at_ns: int) -> Facts:
        messages, used = self._of(place), self._used[place[0]]
        groups = set(used.groups)
        ahead_ms = self.run.dispatch_ahead_ms + DISPATCH_SLACK_MS
        facts = Facts(names=self._names, start_wall_ms=self.run.start_wall_ms, ahead_ms=ahead_ms)
        facts.asked = {call.first.uid for call in self._calls.values()} & set(messages)
        for uid, message in messages.items():
            if message.came_ns >= 0 and not self.run.push_first:
                facts.delivered.add(uid)
            if message.until_settled and groups:
                facts.until_settled.add(uid)
                if used.reset or any(message.sent_ns < self._groups.get(group, at_ns) for group in groups):
                    # A message that was dispatched before its groups were made is settled until then.
                    facts.settled_from_ns[uid] = 0
                    facts.returning.add(uid)
                elif groups <= set(message.settling_ns):
                    facts.settled_from_ns[uid] = max(message.settling_ns[group] for group in groups)
                if self._an_hour_is_gone(uid):
                    facts.settled_from_ns[uid] = min(self._gone_ns, facts.settled_from_ns.get(uid, self._gone_ns))
            if message.tagged:
                facts.tagged.add(uid)
            for seen in message.seen:
                facts.asked.add(uid)
                if seen.state == "MESSAGE_CANCELLED":
                    facts.cancelled.add(uid)
        return facts

    def _events(self, place: _Place) -> list[Event]:
        """All that is known of a key, by time; what begins comes before what ends."""
        events: list[Event] = []
        for batch in self._batches.values():
            events += self._scheduling(batch, place)
        for call in self._calls.values():
            if call.first.topic == place[0] and call.first.key in ("", place[1]):
                events += self._call(call)
        used = self._used[place[0]]
        for uid, message in self._of(place).items():
            if message.came_ns >= 0 and not self.run.push_first:
                events.append(Event(message.came_ns, What.DELIVERED, uid=uid))
                if used.groups and set(used.groups) <= set(message.settled_ns) and not used.reset:
                    settled_ns = max(message.settled_ns[group] for group in used.groups)
                    events.append(Event(settled_ns, What.SETTLED, uid=uid))
            for seen in message.seen:
                gone = self._an_hour_may_be_gone(uid, seen.at_ns)
                look = Operation(Kind.LOOK, seen.state, uid=uid, hour_gone=gone)
                events += _while(look, seen.asked_ns, seen.at_ns)
        return sorted(events, key=lambda event: (event.at_ns, event.what is not What.BEGINS))

    def _scheduling(self, batch: _Batch, place: _Place) -> Iterable[Event]:
        if batch.void or batch.rows[0].topic != place[0]:
            return
        puts = []
        for number, row in enumerate(batch.rows):
            assert row.label is not None
            if row.label.unique_key != place[1]:
                continue
            asked_ms = row.due_ms if row.due_ms is not None else batch.sent_ms + (row.delay_ms or 0)
            put = Put(row.uid, row.label.on_conflict, asked_ms)
            if batch.answer is not None:
                answer = batch.answer
                put = put._replace(outcome=answer.outcomes[number], id=answer.ids[number], due_ms=answer.due_ms[number])
            puts.append(put)
        if puts:
            outcome = "answered" if batch.answer is not None else ""
            operation = Operation(Kind.SCHEDULE, outcome, tuple(puts))
            yield from _while(operation, batch.sent_ns, batch.answer.at_ns if batch.answer is not None else None)

    def _call(self, call: _Call) -> Iterable[Event]:
        first, answer = call.first, call.answered
        if not call.asked:
            return
        match first.what:
            case "sweep":
                sweep = Operation(Kind.SWEEP, due_ms=first.due_ms)
                yield from _while(sweep, call.asked[0], answer.at_ns if answer else None)
                return
            case "delete":
                yield from _while(Operation(Kind.DELETE), call.asked[0], answer.at_ns if answer else None)
                return
            case "get":
                if answer is not None:
                    found = Operation(Kind.GET, answer.outcome, uid=answer.uid)
                    yield from _while(found, call.asked[-1], answer.at_ns)
                return
        kind = Kind.CANCEL if first.what == "cancel" else Kind.MOVE
        if answer is not None:
            gone = first.uid > 0 and self._an_hour_may_be_gone(first.uid, answer.at_ns)
            due_ms = answer.due_ms or first.due_ms
            operation = Operation(kind, answer.outcome, (), first.uid, answer.id, due_ms, gone)
            yield from _while(operation, call.asked[0] if answer.remembered else call.asked[-1], answer.at_ns)
        if answer is None or (len(call.asked) > 1 and not answer.remembered):
            # A try without an answer may have an effect of its own.
            yield Event(call.asked[0], What.BEGINS, Operation(kind, uid=first.uid, due_ms=first.due_ms))


def _while(operation: Operation, began_ns: int, ended_ns: int | None) -> Iterable[Event]:
    yield Event(began_ns, What.BEGINS, operation)
    if ended_ns is not None:
        yield Event(ended_ns, What.ENDS, operation)


def _shown(receipt: KeyedAnswered) -> str:
    return ", ".join(f"{outcome} {id_:#x}" for outcome, id_ in zip(receipt.outcomes, receipt.ids, strict=True))
