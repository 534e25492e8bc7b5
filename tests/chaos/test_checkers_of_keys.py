"""The checker of unique keys catches hand-made bad histories and lets their good twins pass; and its search takes every
history that can have happened, and no other."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.judging import Case, is_caught, judge
from tickwheel.chaos.sim.checkers.key_search import Doubtful, Event, Facts, Kind, Operation, Put, What, explain
from tickwheel.chaos.sim.checkers.p1_no_loss import NoLoss
from tickwheel.chaos.sim.checkers.p13_keys import KeysHeld
from tickwheel.chaos.sim.history import Record, RunBegan
from tickwheel.chaos.sim.history_keys import KeyAnswered, KeyAsked, KeyedAnswered, KeyedSeen, KeysUsed, KeyUndone
from tickwheel.chaos.sim.history_messages import (
    Delivered,
    Label,
    Row,
    ScheduleAcknowledged,
    ScheduleRefused,
    ScheduleSent,
    SessionOpened,
    Settled,
    SettleSent,
)
from tickwheel.chaos.sim.world import HOUR_MS, MS

WALL_MS = 500_000 * HOUR_MS
BEGAN = RunBegan(0, WALL_MS, ("kill",), ("g",))
USED = KeysUsed(0, "t", ("g",), reset=False)
RULES = ("KEY_CONFLICT_REFUSE", "KEY_CONFLICT_USE_EXISTING", "KEY_CONFLICT_REPLACE")


def id_of(number: int, hour: int = 0) -> int:
    return 500_000 + hour << 32 | number


def sent(
    uid: int, at_ms: int, due_ms: int = 5_000, rule: str = "REFUSE", *, tag: str = "", held: bool = False
) -> Record:
    """A batch of one message, of a producer of its own."""
    tags = (tag,) if tag else ()
    label = Label(tags=tags, unique_key="k", on_conflict=f"KEY_CONFLICT_{rule}", until_settled=held)
    return ScheduleSent(at_ms * MS, f"p{uid}", 1, "n1", (Row(uid, "t", WALL_MS + due_ms, None, label),))


def receipt(uid: int, at_ms: int, outcome: str = "FREE", due_ms: int = 5_000, *, named: int = 0) -> KeyedAnswered:
    return KeyedAnswered(
        at_ms * MS, f"p{uid}", 1, (uid,), (f"KEY_{outcome}",), (id_of(named or uid),), (WALL_MS + due_ms,)
    )


def put(
    uid: int, at_ms: int, outcome: str = "FREE", due_ms: int = 5_000, *, rule: str = "", named: int = 0
) -> list[Record]:
    """A message with its receipt 20 ms later."""
    rule = rule or {"REPLACED": "REPLACE", "USED_EXISTING": "USE_EXISTING"}.get(outcome, "REFUSE")
    return [sent(uid, at_ms, due_ms, rule), receipt(uid, at_ms + 20, outcome, due_ms, named=named)]


def call(
    number: int, at_ms: int, what: str, outcome: str, *, named: int = 0, uid: int = 0, due_ms: int = 0
) -> list[Record]:
    """A call by key, or by the id of a message, with its answer 20 ms later."""
    due_ms = WALL_MS + due_ms if due_ms else 0
    answer = KeyAnswered((at_ms + 20) * MS, number, outcome, id_of(named) if named else 0, named, due_ms)
    return [KeyAsked(at_ms * MS, number, what, "t", "k", uid, due_ms), answer]


def came(uid: int, at_ms: int, number: int = 0) -> Delivered:
    return Delivered(
        at_ms * MS, "n1", 1, 1, "g", "t", 1, id_of(number or uid), uid, 1, WALL_MS + at_ms, WALL_MS + 90_000
    )


def settled(uid: int, at_ms: int) -> list[Record]:
    return [
        SettleSent(at_ms * MS, "g", id_of(uid), uid, 1, "ACK"),
        Settled((at_ms + 20) * MS, "g", id_of(uid), uid, 1, "ACK"),
    ]


def seen(uid: int, at_ms: int, state: str, now: int = 0) -> KeyedSeen:
    return KeyedSeen(at_ms * MS, uid, id_of(uid), (at_ms - 10) * MS, state, now or uid, id_of(uid), WALL_MS + 5_000)


def keys(*records: Record | list[Record], group_seen_ms: int = 0) -> Case:
    flat: list[Record] = [BEGAN, USED, SessionOpened(group_seen_ms * MS, "g", 1)]
    for record in records:
        flat += record if isinstance(record, list) else [record]
    return KeysHeld, flat


def remembered(records: list[Record]) -> list[Record]:
    return [replace(record, remembered=True) if isinstance(record, KeyAnswered) else record for record in records]


LATE = [
    sent(1, 100, 31 * HOUR_MS),
    replace(receipt(1, 120, due_ms=31 * HOUR_MS), ids=(id_of(1, 31),)),
]
"""A message due in 31 hours."""
HELD = [sent(1, 100, 300, held=True), receipt(1, 120, due_ms=300), came(1, 310)]

GOOD: dict[str, Case] = {
    "free since it was dispatched before its group was made": keys(
        HELD, put(2, 400), settled(1, 500), group_seen_ms=150
    ),
    "refused while it is held": keys(put(1, 100), put(2, 200, "REFUSED", named=1)),
    "free once it is due": keys(put(1, 100, due_ms=300), put(2, 400, due_ms=900), came(1, 310), came(2, 910)),
    "still held a moment after that": keys(put(1, 100, due_ms=300), put(2, 305, "REFUSED", 300, named=1)),
    "replaced, and the other one comes": keys(put(1, 100), put(2, 200, "REPLACED", 600), came(2, 610)),
    "used by a second one": keys(
        put(1, 100), put(2, 200, "USED_EXISTING", named=1), call(1, 300, "get", "FOUND", named=1)
    ),
    "cancelled, and free": keys(put(1, 100), call(1, 200, "cancel", "CANCELLED", named=1), put(2, 300)),
    "the id of one that was replaced": keys(
        put(1, 100),
        put(2, 200, "REPLACED"),
        call(1, 300, "cancel", "CANCELLED", uid=1),
        call(2, 400, "move", "RESCHEDULE_CANCELLED", uid=1),
        put(3, 500, "REFUSED", named=2),
    ),
    "not found by its id once its hour is gone": keys(
        put(1, 100),
        call(1, 200, "cancel", "CANCELLED", named=1),
        call(2, 3 * HOUR_MS, "cancel", "NOT_FOUND", uid=1),
        call(3, 3 * HOUR_MS, "move", "RESCHEDULE_NOT_FOUND", uid=1),
    ),
    "moved to an earlier hour, which is gone": keys(
        LATE,
        call(1, 200, "move", "RESCHEDULED", uid=1, due_ms=300),
        replace(seen(1, 3 * HOUR_MS, "NOT_FOUND"), id=id_of(1, 31), now_id=id_of(1, 31)),
    ),
    "held by a retry, and its hour is gone": keys(
        HELD, put(2, 400, "REFUSED", 300, named=1), call(1, 3 * HOUR_MS, "cancel", "NOT_FOUND", uid=1)
    ),
    "two at once, one of them refused": keys(
        sent(1, 100), sent(2, 101), receipt(2, 150), receipt(1, 160, "REFUSED", named=2)
    ),
    "moved": keys(
        put(1, 100, due_ms=300),
        call(1, 150, "move", "RESCHEDULED", named=7, due_ms=900),
        put(2, 500, "REFUSED", 900, named=7),
        came(1, 910, 7),
    ),
    "held until it is settled": keys(
        HELD, put(2, 400, "REFUSED", 300, rule="REPLACE", named=1), settled(1, 500), put(3, 600)
    ),
    "accepted without a receipt": keys(
        sent(1, 100), put(2, 200, "REFUSED", named=9), call(1, 300, "cancel", "CANCELLED", named=9), put(3, 400)
    ),
    "a try without an answer cancelled it": keys(
        put(1, 100), KeyAsked(200 * MS, 1, "cancel", "t", "k"), put(2, 300), seen(1, 9_000, "MESSAGE_CANCELLED")
    ),
    "the first try of two cancelled it": keys(
        put(1, 100), KeyAsked(200 * MS, 1, "cancel", "t", "k"), call(1, 1_200, "cancel", "NOT_FOUND"), put(2, 1_300)
    ),
    "a sweep cancelled it": keys(
        sent(1, 100, tag="x"),
        receipt(1, 120),
        KeyAsked(200 * MS, 1, "sweep", "t", ""),
        put(2, 300),
        KeyAnswered(400 * MS, 1),
        seen(1, 9_000, "MESSAGE_CANCELLED"),
    ),
    "its topic was deleted": keys(
        put(1, 100), KeyAsked(200 * MS, 1, "delete", "t", ""), put(2, 250), KeyAnswered(400 * MS, 1), put(3, 410)
    ),
    "a repeat with the same receipt": keys(put(1, 100), receipt(1, 300)),
    "found replaced at the end": keys(
        put(1, 100), put(2, 200, "REPLACED"), seen(1, 9_000, "MESSAGE_CANCELLED"), came(2, 9_100)
    ),
}

BAD: dict[str, Case] = {
    "two hold it": keys(put(1, 100), put(2, 200)),
    "two of one batch hold it": keys(
        ScheduleSent(
            100 * MS, "p", 1, "n1", tuple(Row(uid, "t", WALL_MS + 5_000, None, Label(unique_key="k")) for uid in (1, 2))
        ),
        KeyedAnswered(150 * MS, "p", 1, (1, 2), ("KEY_FREE",) * 2, (id_of(1), id_of(2)), (WALL_MS + 5_000,) * 2),
    ),
    "free before it is due": keys(put(1, 100, due_ms=3_000), put(2, 2_000), came(1, 3_010)),
    "refused when it was dispatched": keys(put(1, 100, due_ms=300), came(1, 310), put(2, 400, "REFUSED", 300, named=1)),
    "refused for one that was cancelled": keys(
        put(1, 100), call(1, 200, "cancel", "CANCELLED", named=1), put(2, 300, "REFUSED", named=1)
    ),
    "refused for one of another key": keys(
        put(1, 100), put(2, 200, "REFUSED", named=1), put(3, 300, "REFUSED", named=2)
    ),
    "refused with another due time": keys(put(1, 100), put(2, 200, "REFUSED", 6_000, named=1)),
    "replaced, and it comes": keys(put(1, 100, due_ms=600), put(2, 200, "REPLACED", 900), came(1, 610)),
    "refused, and it comes": keys(put(1, 100), put(2, 200, "REFUSED", named=1), came(2, 300)),
    "came, and then it is refused": keys(put(1, 100), sent(2, 200), came(2, 210), receipt(2, 220, "REFUSED", named=1)),
    "nothing found while it is held": keys(put(1, 100), call(1, 200, "get", "NOT_FOUND")),
    "the wrong one found": keys(put(1, 100), put(2, 200, "REPLACED"), call(1, 300, "get", "FOUND", named=1)),
    "not cancelled while it is held": keys(put(1, 100), call(1, 200, "cancel", "NOT_FOUND")),
    "not found by its id while its hour is there": keys(
        put(1, 100), call(1, 200, "cancel", "CANCELLED", named=1), call(2, 300, "cancel", "NOT_FOUND", uid=1)
    ),
    "cancelled twice": keys(
        put(1, 100), call(1, 200, "cancel", "CANCELLED", named=1), call(2, 300, "cancel", "CANCELLED", named=1)
    ),
    "cancelled, and it comes": keys(
        put(1, 100, due_ms=600), call(1, 200, "cancel", "CANCELLED", named=1), came(1, 610)
    ),
    "moved when nothing holds it": keys(call(1, 200, "move", "RESCHEDULED", named=7, due_ms=900)),
    "dispatched at its old time": keys(
        put(1, 100, due_ms=300), call(1, 150, "move", "RESCHEDULED", named=7, due_ms=2_900), put(2, 1_500)
    ),
    "free before it is settled": keys(HELD, put(2, 400)),
    "kept when it was settled": keys(HELD, settled(1, 400), put(2, 500, "REFUSED", 300, named=1)),
    "another receipt for a repeat": keys(put(1, 100), put(2, 200, "REFUSED", named=1), receipt(2, 300, "FREE")),
    "another answer for a repeat": keys(
        put(1, 100),
        remembered(call(1, 200, "cancel", "CANCELLED", named=1)),
        put(2, 300),
        remembered(call(1, 400, "cancel", "CANCELLED", named=2)),
    ),
    "a refused try cancelled it": keys(
        put(1, 100), KeyAsked(200 * MS, 1, "cancel", "t", "k"), KeyUndone(210 * MS, 1), put(2, 300)
    ),
    "a refused batch was accepted": keys(
        sent(1, 100), ScheduleRefused(120 * MS, "p1", 1, "NOT_MASTER"), put(2, 200, "REFUSED", named=9)
    ),
    "a sweep cancelled what it does not mean": keys(
        put(1, 100), KeyAsked(200 * MS, 1, "sweep", "t", ""), put(2, 300), KeyAnswered(400 * MS, 1)
    ),
    "held although its topic was deleted": keys(
        put(1, 100), KeyAsked(200 * MS, 1, "delete", "t", ""), KeyAnswered(400 * MS, 1), put(2, 410, "REFUSED", named=1)
    ),
    "gone at the end, and nobody cancelled it": keys(put(1, 100), seen(1, 9_000, "MESSAGE_CANCELLED")),
    "its id names another one": keys(put(1, 100), put(2, 200, "REPLACED"), seen(1, 9_000, "PENDING", 2)),
    "pending although it was replaced": keys(put(1, 100), put(2, 200, "REPLACED"), seen(1, 9_000, "PENDING")),
    "the replaced one is cancelled, and the other one is gone": keys(
        put(1, 100), put(2, 200, "REPLACED"), call(1, 300, "cancel", "CANCELLED", uid=1), put(3, 400)
    ),
    "not found at the end": keys(put(1, 100), seen(1, 9_000, "NOT_FOUND")),
    "not found though nobody moved it to an earlier hour": keys(
        LATE, replace(seen(1, 3 * HOUR_MS, "NOT_FOUND"), id=id_of(1, 31), now_id=id_of(1, 31))
    ),
    "comes after it was found replaced": keys(
        put(1, 100), put(2, 200, "REPLACED"), seen(1, 9_000, "MESSAGE_CANCELLED"), came(1, 9_100)
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_sound_histories_pass(name: str) -> None:
    """Else a broken promise would prove nothing."""
    judge(GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_broken_promises_are_caught(name: str) -> None:
    """Each sentence of P13."""
    is_caught(BAD[name])


def test_a_replaced_message_is_not_owed_and_what_replaced_it_is() -> None:
    """The account of all messages follows what the cluster says of one with a key; p13_keys judges that."""
    taken = [ScheduleAcknowledged(1, f"p{uid}", 1, (uid,), (id_of(uid),), (WALL_MS + 100,), False) for uid in (1, 2)]
    replaced = seen(1, 500, "MESSAGE_CANCELLED")
    judge((NoLoss, [BEGAN, *taken, replaced, came(2, 600)]))
    is_caught((NoLoss, [BEGAN, *taken, replaced]))
    waits = replace(replaced, state="PENDING", due_ms=WALL_MS + 100)
    is_caught((NoLoss, [BEGAN, *taken, waits, came(2, 600)]))


# -- the search, against a plain model


@dataclass
class Model:
    """A key, carried out step by step at moments in ms; every operation with its call and answer."""

    rng: Random
    spread: int
    """How long before and after its moment an operation is called and answered at most."""
    now_ms: int = 0
    holder: int = 0
    due_ms: int = 0
    dispatched: bool = False
    uids: int = 0
    facts: Facts = field(default_factory=lambda: Facts(start_wall_ms=0))
    events: list[Event] = field(default_factory=list)

    def step(self, far: bool) -> None:
        """Time passes and something is done; `far`: nothing becomes due."""
        rng = self.rng
        self.now_ms += rng.randrange(1, 40)
        if self.holder and not self.dispatched and self.due_ms <= self.now_ms and rng.random() < 0.7:
            self._dispatch()
        elif self.dispatched and rng.random() < 0.3:
            self.facts.settled_from_ns[self.holder] = self.now_ms * MS
            self.events.append(Event(self.now_ms * MS, What.SETTLED, uid=self.holder))
            self.holder, self.dispatched = 0, False
        due_ms = self.now_ms + (10**6 if far else rng.randrange(80))
        kind = rng.choice((Kind.SCHEDULE, Kind.SCHEDULE, Kind.SCHEDULE, Kind.CANCEL, Kind.MOVE, Kind.GET))
        if kind is Kind.SCHEDULE:
            operation = self._schedule(due_ms)
        elif kind is Kind.GET:
            operation = Operation(kind, "FOUND" if self.holder else "NOT_FOUND", uid=self.holder)
        else:
            operation = self._change(kind, due_ms)
        ended_ms = self.now_ms + rng.randint(0, self.spread)
        unknown = kind is not Kind.GET and self.spread and rng.random() < 0.1
        if unknown:
            operation.outcome, operation.id = "", 0
            operation.puts = tuple(row._replace(outcome="", id=0) for row in operation.puts)
        began_ns = (self.now_ms - rng.randint(0, self.spread)) * MS
        self.events.append(Event(began_ns, What.BEGINS, operation))
        if not unknown:
            self.events.append(Event(ended_ms * MS + 1, What.ENDS, operation))

    def _dispatch(self) -> None:
        self.facts.delivered.add(self.holder)
        self.events.append(Event(self.now_ms * MS, What.DELIVERED, uid=self.holder))
        self.dispatched = self.holder in self.facts.until_settled
        self.holder *= self.dispatched

    def _schedule(self, due_ms: int) -> Operation:
        puts = []
        for rule in self.rng.choices(RULES, k=self.rng.choice((1, 1, 2, 3))):
            self.uids += 1
            uid, named, told_ms = self.uids, self.holder, self.due_ms
            if not self.holder:
                outcome = "KEY_FREE"
            elif rule == "KEY_CONFLICT_USE_EXISTING":
                outcome = "KEY_USED_EXISTING"
            else:
                replaces = rule == "KEY_CONFLICT_REPLACE" and not self.dispatched
                outcome = "KEY_REPLACED" if replaces else "KEY_REFUSED"
            if outcome in ("KEY_FREE", "KEY_REPLACED"):
                self.holder, self.due_ms, self.dispatched = uid, due_ms, False
                named, told_ms = uid, due_ms
                self.facts.names[id_of(uid)] = uid
                if self.rng.random() < 0.4:
                    self.facts.until_settled.add(uid)
            puts.append(Put(uid, rule, told_ms, outcome, id_of(named)))
        return Operation(Kind.SCHEDULE, "answered", tuple(puts))

    def _change(self, kind: Kind, due_ms: int) -> Operation:
        prefix = "RESCHEDULE_" if kind is Kind.MOVE else ""
        if not self.holder:
            return Operation(kind, f"{prefix}NOT_FOUND", due_ms=due_ms)
        if self.dispatched:
            return Operation(kind, f"{prefix}ALREADY_DISPATCHED", due_ms=due_ms)
        number = id_of(self.holder)
        if kind is Kind.MOVE:
            self.due_ms = due_ms
            return Operation(kind, "RESCHEDULED", id=number, due_ms=due_ms)
        self.holder = 0
        return Operation(kind, "CANCELLED", id=number)

    def explained(self) -> str:
        """What the search says of the whole."""
        ordered = sorted(self.events, key=lambda event: event.at_ns)
        try:
            return explain(ordered, self.facts)
        except Doubtful:
            return ""


@given(st.randoms(use_true_random=False), st.integers(1, 16), st.sampled_from((0, 30, 60)))
def test_what_happened_is_explained(rng: Random, steps: int, spread: int) -> None:
    """Whatever overlaps, whatever has no answer: no false alarm."""
    model = Model(rng, spread)
    for _ in range(steps):
        model.step(far=False)
    assert model.explained() == ""


OUTCOMES = {
    Kind.CANCEL: ("CANCELLED", "ALREADY_DISPATCHED", "NOT_FOUND"),
    Kind.MOVE: ("RESCHEDULED", "RESCHEDULE_ALREADY_DISPATCHED", "RESCHEDULE_NOT_FOUND"),
}


@given(st.randoms(use_true_random=False), st.integers(1, 12))
def test_an_answer_that_was_not_given_is_not(rng: Random, steps: int) -> None:
    """One call after the other, and nothing becomes due: there is one answer to each, and any other one is caught."""
    model = Model(rng, 0)
    for _ in range(steps):
        model.step(far=True)
    assert model.explained() == ""
    operation = rng.choice([event.operation for event in model.events if event.operation is not None])
    if operation.puts:
        at = rng.randrange(len(operation.puts))
        row = operation.puts[at]
        others = {"KEY_FREE", "KEY_REFUSED", "KEY_USED_EXISTING", "KEY_REPLACED"} - {row.outcome}
        changed = row._replace(outcome=rng.choice(sorted(others)))
        operation.puts = (*operation.puts[:at], changed, *operation.puts[at + 1 :])
    elif operation.kind is Kind.GET:
        operation.uid += 1
    else:
        operation.outcome = rng.choice([text for text in OUTCOMES[operation.kind] if text != operation.outcome])
    assert model.explained()
