"""Clients with unique keys: programs that claim a few keys of a topic in turn, by all rules, and callers who cancel,
move and look up by key, or by the id of a message that may have been replaced.

Some programs have a producer id and repeat a batch until its receipt comes, now and then once more; others send it
once. Sweeps, resets of a group and the deletion of a topic meet their messages too. A message with a unique key may be
cancelled or moved by whoever names its key: at the end the cluster is asked about each one that did not come.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tickwheel.chaos.sim import couriers
from tickwheel.chaos.sim.asking import AskingClients, succeeded
from tickwheel.chaos.sim.clients import NO_ANSWER, Call, Wires, served
from tickwheel.chaos.sim.consumers import GROUPS
from tickwheel.chaos.sim.history import Record
from tickwheel.chaos.sim.history_keys import KeyAnswered, KeyAsked, KeyedAnswered, KeyedSeen, KeysUsed, KeyUndone
from tickwheel.chaos.sim.history_messages import (
    Delivered,
    Label,
    RescheduleSent,
    Row,
    ScheduleAcknowledged,
    ScheduleRefused,
    ScheduleSent,
)
from tickwheel.chaos.sim.producers import TOPICS, UID, labelled_batch
from tickwheel.chaos.sim.world import HOUR_MS, MS, SECOND
from tickwheel.node.core.message_ids import id_of, message_id_of
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.schedule.publisher import BatchOutcome
from tickwheel.node.failure import Failure
from tickwheel.node.server import handlers
from tickwheel.node.server.callers import EVERYBODY
from tickwheel.proto import common_pb2, scheduler_pb2
from tickwheel.proto.admin_pb2 import DeleteTopicRequest

PASSING = "stalls"
"""A topic without groups that is deleted and made again."""
KEYS = ("a", "b", "c")
TAG = "claimed"
"""Messages that sweeps mean."""
RULES = (
    "KEY_CONFLICT_UNSPECIFIED",
    "KEY_CONFLICT_REFUSE",
    "KEY_CONFLICT_USE_EXISTING",
    "KEY_CONFLICT_REPLACE",
    "KEY_CONFLICT_REPLACE",
)
SCHEDULE_EVERY_NS = 900 * MS
CALL_EVERY_NS = 450 * MS
OPEN_MOST = 4
SOON_MS = 1_000
BEFORE_NS = 100 * MS
"""Calls that are to meet a dispatch leave at most this long before it."""
NEWEST = 12
"""Calls by id name one of this many messages acknowledged last."""
LOOK_EVERY_NS = 300 * MS
LATE_NS = SECOND
"""What did not come this long after it was due is looked up again."""
SCHEDULED = ("KEY_FREE", "KEY_REPLACED")


@dataclass(frozen=True, slots=True)
class _Place:
    """A topic in which keys are claimed."""

    topic: str
    groups: tuple[str, ...]
    """For whom every message is."""
    reset: tuple[str, ...] = ()
    """Groups of it that are reset."""


PLACES = (
    _Place(TOPICS[0], GROUPS),
    _Place(PASSING, ()),
    _Place(couriers.TOPICS[-1], (couriers.GROUP,), (couriers.RESET,)),
)


@dataclass
class _Program:
    """Sends one batch at a time. Without `repeats` it has no producer id, and sends each batch once."""

    name: str
    repeats: bool
    place: _Place = PLACES[0]
    sequence: int = 0
    rows: tuple[Row, ...] = ()
    target: int = 0

    @property
    def sender(self) -> tuple[str, int]:
        """Producer and sequence in the history."""
        return (self.name, self.sequence) if self.repeats else (f"{self.name}-{self.sequence}", 1)


@dataclass(eq=False)
class _Call:
    """A call by key or id. `sender`: the producer id under which it is remembered; empty: none. `tries`: those that may
    have an effect."""

    number: int
    what: str
    topic: str
    key: str
    uid: int = 0
    id: int = 0
    due_ms: int = 0
    sender: str = ""
    repeats: bool = False
    tries: int = 0
    answered: bool = False


@dataclass(slots=True)
class _Message:
    """By the receipt, then by the last report of it."""

    id: int
    due_ms: int
    owed: bool = True
    looked_ns: int = -1
    """Time of that report; below 0: there is none."""


@dataclass(slots=True)
class _Key:
    """What is going on with a key."""

    pending: set[int] = field(default_factory=set)
    """Messages that may be pending with it."""
    moves_ms: list[int] = field(default_factory=list)
    """Times that a call may still move its message to."""


class Claims(AskingClients):
    """`clients.Clients`."""

    def __init__(self, wires: Wires) -> None:
        super().__init__(wires, "claims")
        self._places = list(PLACES[:2])
        self._programs = [_Program("claim-1", True), _Program("claim-2", True), _Program("passer", False)]
        self._keys: dict[tuple[str, str], _Key] = {}
        self._messages: dict[int, _Message] = {}
        """Those that are owed to groups, while they are acknowledged and have not come."""
        self._rows: dict[int, Row] = {}
        self._acknowledged: list[tuple[int, int]] = []
        """(uid, id), in the order of receipts."""
        self._calls = 0
        self._open = 0
        self._shifts_ms: list[int] = []
        """By how much sweeps that run may move messages."""
        self._deleting = False
        self._asked_last: set[tuple[str, str]] = set()
        """Keys that were looked up at the end."""
        wires.history.subscribe((Delivered, ScheduleAcknowledged), self._observe)

    def _begin(self) -> None:
        for place in self._places:
            self._use(place)
        for program in self._programs:
            self._later(self._rng.randrange(SECOND), self._schedule, program)
        self._world.after(SECOND, self._keep, CALL_EVERY_NS, self._act)
        self._world.after(SECOND, self._look)

    def unfinished(self) -> str:
        if any(program.rows and program.repeats for program in self._programs):
            return "receipts of batches with unique keys"
        if self._open or self._asking.open:
            return "answers about unique keys"
        if self._asked_last < set(self._keys):
            return "what holds the unique keys"
        unknown = [uid for uid, message in self._messages.items() if message.looked_ns < 0]
        return f"what became of message {unknown[0]} and its unique key" if unknown else ""

    def _use(self, place: _Place) -> None:
        groups = (*place.groups, *place.reset)
        self._history.note(KeysUsed, place.topic, groups, bool(place.reset))

    def _observe(self, record: Record) -> None:
        match record:
            case Delivered():
                row = self._rows.get(record.uid)
                if row is not None:
                    self._gone(record.uid)
                    self._messages.pop(record.uid, None)
            case ScheduleAcknowledged(producer=couriers.PRODUCER) if len(self._places) < len(PLACES):
                # Its groups exist.
                self._places.append(PLACES[-1])
                self._use(PLACES[-1])

    def _gone(self, uid: int) -> None:
        """The message is not pending."""
        row = self._rows[uid]
        assert row.label is not None
        self._of(row.topic, row.label.unique_key).pending.discard(uid)

    def _of(self, topic: str, key: str) -> _Key:
        return self._keys.setdefault((topic, key), _Key())

    # -- batches

    async def _schedule(self, program: _Program) -> None:
        """Make batches and place one after the other, until faults are over."""
        while not self._wires.winding_down:
            places = [place for place in self._places if not (self._deleting and place.topic == PASSING)]
            program.place = self._rng.choice(places)
            program.sequence += 1
            program.rows = self._new_rows(program.place.topic)
            await self._place(program)
            program.rows = ()
            await self._wires.pause(self._wires.pause_ns(SCHEDULE_EVERY_NS, self._rng))

    def _new_rows(self, topic: str) -> tuple[Row, ...]:
        rng, wall_ms = self._rng, self._world.wall_ms
        rows = []
        key = rng.choice(KEYS)
        for _ in range(rng.choice((1, 1, 1, 2, 2, 4))):
            if rng.random() < 0.4:
                key = rng.choice(KEYS)
            tags = (TAG,) if rng.random() < 0.4 else ()
            label = Label(tags=tags, unique_key=key, on_conflict=rng.choice(RULES), until_settled=rng.random() < 0.3)
            dice = rng.random()
            due_ms: int | None = wall_ms + rng.randrange(100, 2_500)
            delay_ms = None
            if dice < 0.3:
                due_ms = wall_ms + rng.randrange(-500, 300)
            elif dice < 0.36:
                due_ms = wall_ms + HOUR_MS * rng.randrange(1, 40)
            elif dice < 0.45:
                due_ms, delay_ms = None, rng.randrange(1_500)
            rows.append(Row(self._wires.number(), topic, due_ms, delay_ms, label))
        return tuple(rows)

    async def _place(self, program: _Program) -> None:
        """Send a batch until its receipt comes, and now and then once more; without a producer id only once."""
        producer, number = program.sender
        first, answered = True, False
        while True:
            machine = self._wires.machine(program.target)
            self._history.note(ScheduleSent, producer, number, machine.name, program.rows)
            for row in program.rows if first else ():
                self._announce(row)
            first = False
            outcome = await self._wires.answer(machine, self._sending(program), heard=self._heard)
            if outcome is NO_ANSWER:
                program.target += 1
                if not program.repeats:
                    return
                continue
            if isinstance(outcome, Failure):
                reason = common_pb2.ErrorReason.Name(outcome.reason)
                self._history.note(ScheduleRefused, producer, number, reason)
                program.target = self._wires.redirect(outcome, program.target)
                if not program.repeats:
                    return
            else:
                answers = self._receipt(program, outcome)
                if answered:
                    return
                answered = True
                self._take(program, answers, outcome.repeated)
                if not program.repeats or self._rng.random() >= 0.2:
                    return
            await self._wires.pause(self._rng.randrange(20 * MS, 150 * MS))

    def _heard(self) -> bool:
        """Else an answer is lost on the way."""
        return self._rng.random() < 0.93

    def _sending(self, program: _Program) -> Call:
        batch = labelled_batch(
            program.name if program.repeats else "", program.sequence if program.repeats else 0, program.rows
        )
        batch.connection = program.name
        return lambda core, answer: core.parts.publisher.schedule(batch, Reply.either(answer))

    def _announce(self, row: Row) -> None:
        """Tell the checkers that judge by due times where open calls may move a message that may soon be pending."""
        assert row.label is not None
        self._rows[row.uid] = row
        key = self._of(row.topic, row.label.unique_key)
        key.pending.add(row.uid)
        for due_ms in key.moves_ms:
            self._may_move(row.uid, due_ms)
        if row.label.tags and row.topic == TOPICS[0]:
            for shift_ms in self._shifts_ms:
                self._may_shift(row.uid, shift_ms)

    def _may_move(self, uid: int, due_ms: int) -> None:
        self._history.note(RescheduleSent, uid, 0, due_ms)

    def _may_shift(self, uid: int, shift_ms: int) -> None:
        row = self._rows[uid]
        due_ms = row.due_ms if row.due_ms is not None else self._world.wall_ms + (row.delay_ms or 0)
        self._may_move(uid, due_ms + shift_ms)

    def _receipt(self, program: _Program, outcome: BatchOutcome) -> list[tuple[int, int, int, str]]:
        """Write it down. Its rows: uid, id, due time, outcome."""
        uids = tuple(row.uid for row in program.rows)
        keys: list[Any] = [0] * len(uids) if outcome.keys is None else outcome.keys.tolist()
        outcomes = tuple(common_pb2.KeyOutcome.Name(key) for key in keys)
        ids, due_ms = tuple(outcome.ids.tolist()), tuple(outcome.due_ms.tolist())
        self._history.note(KeyedAnswered, *program.sender, uids, outcomes, ids, due_ms)
        return list(zip(uids, ids, due_ms, outcomes, strict=True))

    def _take(self, program: _Program, answers: list[tuple[int, int, int, str]], repeated: bool) -> None:
        """Note what was scheduled, for all checkers of messages."""
        for uid, _, _, outcome in answers:
            if outcome not in SCHEDULED:
                self._gone(uid)
        scheduled = [(uid, id64, due_ms) for uid, id64, due_ms, outcome in answers if outcome in SCHEDULED]
        self._acknowledged += [(uid, id64) for uid, id64, _ in scheduled]
        if not scheduled or not program.place.groups:
            return
        uids, ids, due = zip(*scheduled, strict=True)
        producer, number = program.sender
        groups = () if program.place.groups == GROUPS else program.place.groups
        for uid, id64, due_ms in scheduled:
            row = self._rows[uid]
            assert row.label is not None
            if uid in self._of(row.topic, row.label.unique_key).pending:  # else it has come
                self._messages[uid] = _Message(id64, due_ms)
        self._history.note(ScheduleAcknowledged, producer, number, uids, ids, due, repeated, groups)

    # -- calls by key and by id

    async def _act(self) -> None:
        if self._open >= OPEN_MOST:
            return
        rng = self._rng
        due_ms = self._world.wall_ms + rng.randrange(-200, 3_000)
        dice = rng.random()
        if dice < 0.72:
            wait_ns, topic, key = self._moment()
            for _ in range(rng.choice((1, 1, 1, 2))):
                what = rng.choice(("cancel", "cancel", "move", "get"))
                self._world.after(wait_ns, self._by_key, what, topic, key, due_ms)
        elif dice < 0.92:
            if self._acknowledged:
                uid, id64 = rng.choice(self._acknowledged[-NEWEST:])
                row = self._rows[uid]
                assert row.label is not None
                what = rng.choice(("cancel", "move"))
                self._call(what, row.topic, row.label.unique_key, due_ms=due_ms, uid=uid, id64=id64)
        elif dice < 0.97:
            await self._sweep(0 if rng.random() < 0.5 else rng.randrange(1, 2_000))
        else:
            await self._delete()

    def _moment(self) -> tuple[int, str, str]:
        """How long to wait with a call, and the key: half of them come just when a message with it is dispatched."""
        rng, wall_ms = self._rng, self._world.wall_ms
        soon = [
            (row.due_ms - wall_ms, place)
            for place, key in self._keys.items()
            for row in (self._rows[uid] for uid in sorted(key.pending))
            if row.due_ms is not None and 0 < row.due_ms - wall_ms < SOON_MS
        ]
        if not soon or rng.random() < 0.5:
            return 0, rng.choice(self._places).topic, rng.choice(KEYS)
        left_ms, (topic, key) = rng.choice(soon)
        return left_ms * MS - rng.randrange(BEFORE_NS), topic, key

    def _by_key(self, what: str, topic: str, key: str, due_ms: int) -> None:
        if not self._wires.winding_down:
            self._call(what, topic, key, due_ms=due_ms)

    def _call(self, what: str, topic: str, key: str, *, due_ms: int = 0, uid: int = 0, id64: int = 0) -> None:
        self._calls += 1
        rng = self._rng
        call = _Call(self._calls, what, topic, key, uid, id64, due_ms if what == "move" else 0)
        if what != "get" and not uid and rng.random() < 0.6:
            call.sender = f"call-{self._calls}"
        # What is neither remembered nor by id might be done twice.
        call.repeats = bool(call.sender) or what == "get" or (what == "cancel" and bool(uid))
        self._open += 1
        if what == "move":
            place = self._of(topic, key)
            place.moves_ms.append(due_ms)
            for pending in sorted(place.pending):
                self._may_move(pending, due_ms)
        self._wires.run(self._try(call, rng.randrange(3)))

    async def _try(self, call: _Call, target: int) -> None:
        while True:
            call.tries += 1
            self._history.note(KeyAsked, call.number, call.what, call.topic, call.key, call.uid, call.due_ms)
            answer = await self._wires.answer(self._wires.machine(target), _asking(call), heard=self._heard)
            if answer is NO_ANSWER:
                if not call.repeats:
                    self._over(call, certain=False)
                    return
                target += 1
            elif isinstance(answer, Failure) and not (call.what == "get" and answer.reason == common_pb2.UNKNOWN_NAME):
                if answer.reason != common_pb2.OUTCOME_UNKNOWN:
                    self._history.note(KeyUndone, call.number)
                    call.tries -= 1
                if not call.repeats:
                    self._over(call, certain=not call.tries)
                    return
                target = self._wires.redirect(answer, target)
                await self._wires.pause(100 * MS)
            else:
                record = self._record_of(call, answer)
                self._history.add(record)
                if not record.remembered or call.answered or self._rng.random() >= 0.4:
                    self._over(call, certain=record.remembered or call.tries == 1)
                    return
                call.answered = True
                await self._wires.pause(self._rng.randrange(400 * MS))

    def _record_of(self, call: _Call, answer: Any) -> KeyAnswered:
        record = KeyAnswered(self._world.now_ns, call.number)
        match answer:
            case scheduler_pb2.CancelResponse():
                record.outcome = scheduler_pb2.CancelOutcome.Name(answer.outcome)
                record.id = id_of(answer.id, 0)
                record.remembered = answer.remembered
            case scheduler_pb2.RescheduleResponse():
                record.outcome = scheduler_pb2.RescheduleOutcome.Name(answer.outcome)
                record.id, record.due_ms = id_of(answer.id, 0), answer.due_ms
                record.remembered = answer.remembered
            case scheduler_pb2.GetResponse():
                record.outcome = "FOUND"
                record.id, record.due_ms = id_of(answer.message.id, 0), answer.message.due_ms
                (record.uid,) = UID.unpack_from(answer.message.payload)
            case _:
                record.outcome = "NOT_FOUND"
        return record

    def _over(self, call: _Call, *, certain: bool) -> None:
        """No try of it is under way; `certain`: none has an effect later."""
        self._open -= 1
        if call.what == "move" and certain:
            self._of(call.topic, call.key).moves_ms.remove(call.due_ms)

    async def _sweep(self, shift_ms: int) -> None:
        """Cancel or move what has the tag in the first topic."""
        self._calls += 1
        call = self._calls
        topic = TOPICS[0]
        request = scheduler_pb2.BeginSweepRequest(
            job_id=f"claims-{call}", selection=scheduler_pb2.Selection(topic=topic, tag=TAG)
        )
        if shift_ms:
            request.shift_ms = shift_ms
            self._shifts_ms.append(shift_ms)
            for key in KEYS:
                for uid in sorted(self._of(topic, key).pending):
                    label = self._rows[uid].label
                    if label is not None and label.tags:
                        self._may_shift(uid, shift_ms)
        else:
            request.cancel = True
        self._history.note(KeyAsked, call, "sweep", topic, "", due_ms=shift_ms)

        answer = await self._asking.served(lambda core: core.parts.sweeper.begin_sweep(request))
        while answer.state == scheduler_pb2.SWEEP_RUNNING:
            await self._wires.pause(100 * MS)
            answer = await self._asking.served(lambda core: core.parts.sweeper.get(request.job_id))
        if shift_ms:
            self._shifts_ms.remove(shift_ms)
        self._history.note(KeyAnswered, call)

    async def _delete(self) -> None:
        """Delete the passing topic; the next message makes it again."""
        if self._deleting:
            return
        self._deleting = True
        self._calls += 1
        call = self._calls
        request = DeleteTopicRequest(name=PASSING, cancel_pending=True, request_id=call)
        self._history.note(KeyAsked, call, "delete", PASSING, "")

        def definite(answer: object) -> bool:
            if isinstance(answer, Failure):
                return answer.reason == common_pb2.UNKNOWN_NAME
            return not isinstance(answer, scheduler_pb2.Sweep) or answer.state != scheduler_pb2.SWEEP_RUNNING

        answer = await self._asking.served(lambda core: core.parts.deleter.topic(request), definite)
        if isinstance(answer, scheduler_pb2.Sweep):  # else an earlier try may still find a topic
            self._history.note(KeyAnswered, call)
        self._deleting = False

    # -- what became of them

    def _look(self) -> None:
        self._world.after(LOOK_EVERY_NS, self._look)
        if not self._wires.winding_down or self._open or self._asking.open:
            return
        if any(program.rows for program in self._programs):
            return
        for topic, key in sorted(set(self._keys) - self._asked_last):
            self._asked_last.add((topic, key))
            self._call("get", topic, key)
        now_ns, wall_ms = self._world.now_ns, self._world.wall_ms
        for uid, message in sorted(self._messages.items()):
            late = message.owed and message.due_ms < wall_ms - LATE_NS // MS and message.looked_ns < now_ns - LATE_NS
            if message.looked_ns < 0 or late:
                self._wires.run(self._look_up(uid, message))

    async def _look_up(self, uid: int, message: _Message) -> None:
        asked_ns = self._world.now_ns
        request = scheduler_pb2.GetRequest(id=message_id_of(message.id, 0), content=True)
        answer = await self._asking.served(
            lambda core: handlers.get(core, request, EVERYBODY),
            lambda answer: succeeded(answer) or answer.reason == common_pb2.UNKNOWN_NAME,
        )
        seen = KeyedSeen(self._world.now_ns, uid, message.id, asked_ns, "NOT_FOUND", uid, message.id, 0)
        if isinstance(answer, scheduler_pb2.GetResponse):
            seen.state = scheduler_pb2.MessageState.Name(answer.state)
            (seen.now_uid,) = UID.unpack_from(answer.message.payload)
            seen.now_id, seen.due_ms = id_of(answer.message.id, 0), answer.message.due_ms
        self._history.add(seen)
        message.looked_ns, message.due_ms, message.owed = seen.at_ns, seen.due_ms, seen.owed


def _asking(call: _Call) -> Call:
    """Puts a call to a node."""
    if call.what == "get":
        key = common_pb2.TopicKey(topic=call.topic, unique_key=call.key)
        get = scheduler_pb2.GetRequest(key=key, content=True)
        return served(lambda core: handlers.get(core, get, EVERYBODY))
    if call.what == "cancel":
        cancel = scheduler_pb2.CancelRequest()
        _name(cancel, call)
        return served(lambda core: handlers.cancel(core, cancel, EVERYBODY))
    move = scheduler_pb2.RescheduleRequest(due_ms=call.due_ms)
    _name(move, call)
    return served(lambda core: handlers.reschedule(core, move, EVERYBODY))


def _name(request: scheduler_pb2.CancelRequest | scheduler_pb2.RescheduleRequest, call: _Call) -> None:
    """Say which message is meant, and who asks."""
    if call.uid:
        request.id.CopyFrom(message_id_of(call.id, 0))
        return
    request.key.topic, request.key.unique_key = call.topic, call.key
    if call.sender:
        request.producer_id, request.sequence = call.sender, 1
