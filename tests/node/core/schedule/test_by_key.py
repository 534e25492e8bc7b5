"""Unique keys on three simulated nodes: what callers are told, by each call, through repeats and a change of master."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pytest

from tests.node.core.test_when import schedule
from tests.node.core.trio import Client, Node, World, digests
from tickwheel.node.core.requests import everybody
from tickwheel.node.core.schedule import flow
from tickwheel.node.core.schedule.intake import from_message
from tickwheel.node.core.schedule.publisher import BatchOutcome
from tickwheel.node.failure import Failure
from tickwheel.node.server import handlers
from tickwheel.node.server.callers import EVERYBODY, Caller
from tickwheel.node.server.schedule_stream import may_replace
from tickwheel.node.state import unique_keys
from tickwheel.node.state.rights import AccessControl
from tickwheel.node.state.settings import Settings
from tickwheel.node.state.unique_keys import UNIQUE_KEYS_MAX
from tickwheel.proto import common_pb2, scheduler_pb2, schedules_pb2
from tickwheel.proto.common_pb2 import (
    KEY_CONFLICT_REFUSE,
    KEY_CONFLICT_REPLACE,
    KEY_CONFLICT_USE_EXISTING,
    KEY_FREE,
    KEY_REFUSED,
    KEY_REPLACED,
    KEY_USED_EXISTING,
    Message,
    MessageMeta,
    TopicKey,
)

HOUR_MS = 3_600_000
A = TypeVar("A")


def keyed(
    key: str, rule: common_pb2.KeyConflict.ValueType = KEY_CONFLICT_REFUSE, *, payload: bytes = b"x", **fields: Any
) -> Message:
    """A message with a unique key, due in an hour unless said otherwise."""
    when = fields if {"due_ms", "delay_ms"} & set(fields) else {"delay_ms": HOUR_MS, **fields}
    return Message(topic="t", payload=payload, meta=MessageMeta(unique_key=key), on_key_conflict=rule, **when)


def call(message: Message, sequence: int = 0) -> scheduler_pb2.ScheduleRequest:
    """A unary call; with a sequence, of producer `p`."""
    return scheduler_pb2.ScheduleRequest(message=message, producer_id="p" if sequence else "", sequence=sequence)


def batch(*messages: Message, sequence: int = 0) -> scheduler_pb2.ScheduleBatch:
    """A batch of rows."""
    rows = scheduler_pb2.RowBatch(messages=messages)
    return scheduler_pb2.ScheduleBatch(rows=rows, producer_id="p" if sequence else "", sequence=sequence)


def told(
    node: Node, request: scheduler_pb2.ScheduleRequest | scheduler_pb2.ScheduleBatch
) -> tuple[list[int], list[int]]:
    """Ids and key outcomes of what was scheduled."""
    outcome = schedule(node, request)
    assert isinstance(outcome, BatchOutcome), outcome
    keys = [KEY_FREE] * len(outcome.ids) if outcome.keys is None else outcome.keys.tolist()
    return outcome.ids.tolist(), keys


def ask(node: Node, answer: Coroutine[Any, None, A]) -> A | Failure:
    """What a handler answers."""
    assert node.host is not None
    answers: list[A | Failure] = []
    node.host.core.serving.start(answer, answers.append)
    node.wake()
    node.world.run_until(lambda: bool(answers))
    return answers[0]


def cancel(node: Node, key: str, sequence: int = 0) -> scheduler_pb2.CancelResponse:
    """Cancel by key."""
    assert node.host is not None
    request = scheduler_pb2.CancelRequest(key=TopicKey(topic="t", unique_key=key))
    if sequence:
        request.producer_id, request.sequence = "p", sequence
    answer = ask(node, handlers.cancel(node.host.core, request, EVERYBODY))
    assert isinstance(answer, scheduler_pb2.CancelResponse), answer
    return answer


def move(node: Node, key: str, delay_ms: int, sequence: int = 0) -> scheduler_pb2.RescheduleResponse:
    """Reschedule by key."""
    assert node.host is not None
    request = scheduler_pb2.RescheduleRequest(key=TopicKey(topic="t", unique_key=key), delay_ms=delay_ms)
    if sequence:
        request.producer_id, request.sequence = "p", sequence
    answer = ask(node, handlers.reschedule(node.host.core, request, EVERYBODY))
    assert isinstance(answer, scheduler_pb2.RescheduleResponse), answer
    return answer


def get(node: Node, key: str) -> scheduler_pb2.GetResponse | Failure:
    """Look up by key."""
    assert node.host is not None
    request = scheduler_pb2.GetRequest(key=TopicKey(topic="t", unique_key=key), content=True)
    return ask(node, handlers.get(node.host.core, request, EVERYBODY))


def number(message_id: common_pb2.MessageId) -> int:
    """As one integer."""
    return message_id.hour << 32 | message_id.index


@pytest.fixture
def world() -> World:
    """Three nodes that know of each other what they understand."""
    world = World(91)
    world.elect()
    world.run(300)
    return world


def test_each_rule_says_what_became_of_a_message(world: World) -> None:
    """Refused, dropped, or instead of the other; the same key of another topic is another key."""
    master = world.elect()
    (first,), outcomes = told(master, call(keyed("k", payload=b"one")))
    assert outcomes == [KEY_FREE]
    assert told(master, call(keyed("k"))) == ([first], [KEY_REFUSED])
    assert told(master, call(keyed("k", KEY_CONFLICT_USE_EXISTING))) == ([first], [KEY_USED_EXISTING])
    (second,), outcomes = told(master, call(keyed("k", KEY_CONFLICT_REPLACE, payload=b"two", delay_ms=60_000)))
    assert outcomes == [KEY_REPLACED] and second != first
    found = get(master, "k")
    assert isinstance(found, scheduler_pb2.GetResponse)
    assert (number(found.message.id), found.message.payload) == (second, b"two")
    assert found.message.meta.unique_key == "k"
    other = keyed("k")
    other.topic = "u"
    assert told(master, call(other))[1] == [KEY_FREE]
    world.run(200)
    assert len(digests(world)) == 1


def test_a_batch_keeps_its_rows_apart(world: World) -> None:
    """A refused row leaves the others alone; of two rows with one key the second meets the first."""
    master = world.elect()
    (first,), _ = told(master, call(keyed("a")))
    plain = Message(topic="t", payload=b"p", delay_ms=HOUR_MS)
    rows = [keyed("a"), plain, keyed("b"), keyed("b", KEY_CONFLICT_REPLACE, payload=b"z", delay_ms=90_000), keyed("b")]
    request = batch(*rows, sequence=1)
    ids, outcomes = told(master, request)
    assert outcomes == [KEY_REFUSED, KEY_FREE, KEY_FREE, KEY_REPLACED, KEY_REFUSED]
    assert ids[0] == first and ids[4] == ids[3] and len(set(ids)) == 4
    again = schedule(master, request)
    assert isinstance(again, BatchOutcome) and again.repeated and again.keys is not None
    assert (again.ids.tolist(), again.keys.tolist()) == (ids, outcomes)
    assert master.host is not None and master.host.core.wheel.pending == 3


def test_what_is_replaced_never_comes_and_its_successor_comes_once(world: World) -> None:
    """Delivered with the new payload at the new time; the key is free then."""
    client = Client(world)
    master = world.elect()
    client.consume()
    told(master, call(keyed("k", payload=b"old", delay_ms=500)))
    told(master, call(keyed("k", KEY_CONFLICT_REPLACE, payload=b"new", delay_ms=1_500)))
    world.run_until(lambda: bool(client.got), 5_000)
    world.run(1_500)
    assert [record.endswith(b"new") for record in client.got] == [True]
    assert len(next(iter(client.got.values()))) == 1
    assert told(master, call(keyed("k")))[1] == [KEY_FREE]


def test_a_key_may_be_held_until_its_message_is_settled(world: World) -> None:
    """Delivered but not settled: refused, not to be replaced, ALREADY_DISPATCHED by key; free once settled."""
    client = Client(world)
    client.settle = False
    master = world.elect()
    client.consume(lease_ms=30_000)
    (first,), _ = told(master, call(keyed("k", key_until_settled=True, delay_ms=500)))
    assert told(master, call(keyed("k")))[1] == [KEY_REFUSED]
    world.run_until(lambda: bool(client.got), 3_000)
    for rule in (KEY_CONFLICT_REFUSE, KEY_CONFLICT_REPLACE):
        assert told(master, call(keyed("k", rule))) == ([first], [KEY_REFUSED])
    assert cancel(master, "k").outcome == scheduler_pb2.ALREADY_DISPATCHED
    assert move(master, "k", 5).outcome == scheduler_pb2.RESCHEDULE_ALREADY_DISPATCHED
    assert len(client.got) == 1
    client.settle = True
    world.run_until(lambda: len(next(iter(client.got.values()))) == 2, 60_000)
    world.run(100)
    assert told(master, call(keyed("k")))[1] == [KEY_FREE]


def test_by_key_reaches_what_holds_it_now(world: World) -> None:
    """Reschedule and cancel; by the first id too; then nothing has the key."""
    master = world.elect()
    assert master.host is not None
    assert cancel(master, "k").outcome == scheduler_pb2.NOT_FOUND
    assert move(master, "k", 5).outcome == scheduler_pb2.RESCHEDULE_NOT_FOUND
    missing = get(master, "k")
    assert isinstance(missing, Failure)
    assert (missing.reason, missing.metadata["value"]) == (common_pb2.UNKNOWN_NAME, "k")
    (first,), _ = told(master, call(keyed("k")))
    moved = move(master, "k", 2 * HOUR_MS)
    assert moved.outcome == scheduler_pb2.RESCHEDULED and number(moved.id) != first
    assert told(master, call(keyed("k"))) == ([number(moved.id)], [KEY_REFUSED])
    (second,), outcomes = told(master, call(keyed("k", KEY_CONFLICT_REPLACE)))
    assert outcomes == [KEY_REPLACED]
    done = cancel(master, "k")
    assert (done.outcome, number(done.id)) == (scheduler_pb2.CANCELLED, second)
    by_id = scheduler_pb2.CancelRequest(id=common_pb2.MessageId(hour=first >> 32, index=first & 0xFFFF_FFFF))
    answer = ask(master, handlers.cancel(master.host.core, by_id, EVERYBODY))
    assert isinstance(answer, scheduler_pb2.CancelResponse) and answer.outcome == scheduler_pb2.CANCELLED
    assert cancel(master, "k").outcome == scheduler_pb2.NOT_FOUND
    assert told(master, call(keyed("k")))[1] == [KEY_FREE]


@pytest.mark.parametrize("change_master", [False, True])
def test_a_repeat_by_key_does_not_meet_the_next_message(world: World, change_master: bool) -> None:
    """The first answer again, also from the next master; another sender's request does what it says."""
    master = world.elect()
    (first,), _ = told(master, call(keyed("k")))
    done = cancel(master, "k", sequence=1)
    assert done.remembered and number(done.id) == first
    (second,), outcomes = told(master, call(keyed("k")))
    assert outcomes == [KEY_FREE]
    moved = move(master, "k", 2 * HOUR_MS, sequence=2)
    assert moved.remembered
    if change_master:
        world.run(200)
        master.kill()
        master = world.elect()
    again = cancel(master, "k", sequence=1)
    assert (again.outcome, number(again.id)) == (scheduler_pb2.CANCELLED, first)
    assert move(master, "k", 2 * HOUR_MS, sequence=2) == moved
    found = get(master, "k")
    assert isinstance(found, scheduler_pb2.GetResponse) and found.state == scheduler_pb2.PENDING
    assert number(found.message.id) == number(moved.id) != second


def test_two_rescheduling_by_key_at_once_both_move_it(world: World) -> None:
    """The one whose record was read before the other's move reads it anew."""
    master = world.elect()
    assert master.host is not None
    told(master, call(keyed("k")))
    core = master.host.core
    answers: list[Any] = []
    for delay_ms in (HOUR_MS, 2 * HOUR_MS):
        request = scheduler_pb2.RescheduleRequest(key=TopicKey(topic="t", unique_key="k"), delay_ms=delay_ms)
        core.serving.start(handlers.reschedule(core, request, EVERYBODY), answers.append)
    master.wake()
    world.run_until(lambda: len(answers) == 2)
    assert [answer.outcome for answer in answers] == [scheduler_pb2.RESCHEDULED] * 2
    assert core.wheel.pending == 1


def test_columns_carry_keys(world: World) -> None:
    """One rule for the batch, for the rows whose metas have a key."""
    master = world.elect()
    metas = [MessageMeta(unique_key="k"), MessageMeta(key="no unique one"), MessageMeta(unique_key="k")]
    serialized = [meta.SerializeToString() for meta in metas]
    columns = scheduler_pb2.ColumnBatch(
        topic="t",
        delay_ms=np.full(3, HOUR_MS, "<i8").tobytes(),
        payload_sizes=np.ones(3, "<u4").tobytes(),
        payloads=b"abc",
        meta_sizes=np.array([len(meta) for meta in serialized], "<u4").tobytes(),
        metas=b"".join(serialized),
        on_key_conflict=KEY_CONFLICT_REPLACE,
    )
    ids, outcomes = told(master, scheduler_pb2.ScheduleBatch(columns=columns))
    assert outcomes == [KEY_FREE, KEY_FREE, KEY_REPLACED] and len(set(ids)) == 3
    assert master.host is not None and master.host.core.wheel.pending == 2


def test_rows_are_the_same_as_columns_with_the_same_rule(world: World) -> None:
    """A repeat by other means is a repeat; with another rule it is other content."""
    master = world.elect()
    told(master, batch(keyed("k"), sequence=1))
    assert told(master, call(keyed("k"), sequence=1))[1] == [KEY_FREE]
    other = schedule(master, call(keyed("k", KEY_CONFLICT_REPLACE), sequence=1))
    assert isinstance(other, Failure) and other.reason == common_pb2.SEQUENCE_TAKEN


BAD = [
    (Message(topic="t", payload=b"x", delay_ms=1, on_key_conflict=KEY_CONFLICT_REPLACE), "on_key_conflict[0]"),
    (Message(topic="t", payload=b"x", delay_ms=1, key_until_settled=True), "key_until_settled[0]"),
    (keyed("k" * 256), "meta[0].unique_key"),
    (keyed("ä" * 128), "meta[0].unique_key"),
]


@pytest.mark.parametrize(("message", "field"), BAD)
def test_bad_keys_are_refused_by_name(world: World, message: Message, field: str) -> None:
    """With the field, and what is allowed."""
    refused = schedule(world.elect(), call(message))
    assert isinstance(refused, Failure)
    assert (refused.reason, refused.metadata["field"]) == (common_pb2.INVALID_FIELD, field)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (scheduler_pb2.CancelRequest(key=TopicKey(topic="t")), "key.unique_key"),
        (scheduler_pb2.CancelRequest(key=TopicKey(topic="/", unique_key="k")), "key.topic"),
        (scheduler_pb2.CancelRequest(key=TopicKey(topic="t", unique_key="k" * 256)), "key.unique_key"),
        (scheduler_pb2.CancelRequest(id=common_pb2.MessageId(), key=TopicKey(topic="t", unique_key="k")), "key"),
        (scheduler_pb2.CancelRequest(id=common_pb2.MessageId(), producer_id="p", sequence=1), "producer_id"),
    ],
)
def test_bad_requests_by_key_are_refused_by_name(
    world: World, request_: scheduler_pb2.CancelRequest, field: str
) -> None:
    """Before anything is looked up."""
    master = world.elect()
    assert master.host is not None
    refused = ask(master, handlers.cancel(master.host.core, request_, EVERYBODY))
    assert isinstance(refused, Failure)
    assert (refused.reason, refused.metadata["field"]) == (common_pb2.INVALID_FIELD, field)


def test_a_batch_has_a_limit_of_keys(world: World) -> None:
    """A batch is applied in one piece."""
    refused = schedule(world.elect(), batch(*[keyed(f"k{number}") for number in range(2_001)]))
    assert isinstance(refused, Failure)
    assert (refused.metadata["field"], refused.metadata["value"]) == ("unique_keys", "2001")


def test_there_is_a_limit_on_keys(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """At it, messages with keys are refused until some are free; others are not."""
    master = world.elect()
    told(master, call(keyed("k", delay_ms=300)))
    monkeypatch.setattr(flow, "UNIQUE_KEYS_MAX", 1)
    full = schedule(master, call(keyed("l")))
    assert isinstance(full, Failure)
    assert (full.reason, full.metadata["field"]) == (common_pb2.LIMIT_REACHED, "unique_keys_max")
    plain = Message(topic="t", payload=b"p", delay_ms=HOUR_MS)
    assert told(master, call(plain))[1] == [KEY_FREE]
    assert UNIQUE_KEYS_MAX >= 1_000_000


def test_keys_that_were_searched_for_one_shard_are_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is full, with the row and the limit. What holds its key there may still be replaced."""
    master = world.elect()
    for module in (unique_keys, flow):
        monkeypatch.setattr(module, "SHARD_ROWS_MAX", 2)
    monkeypatch.setattr(unique_keys, "SHARDS", 1)
    told(master, batch(keyed("a"), keyed("b"), keyed("c")))
    full = schedule(master, batch(keyed("a"), keyed("d"), sequence=2))
    assert isinstance(full, Failure) and full.reason == common_pb2.LIMIT_REACHED
    assert full.metadata["field"] == "unique_keys_shard_max"
    assert (full.metadata["value"], full.metadata["limit"]) == ("meta[1].unique_key", "2")
    assert int(full.metadata["retry_after_ms"]) > 0
    assert told(master, batch(keyed("a", KEY_CONFLICT_REPLACE), sequence=2))[1] == [KEY_REPLACED]
    plain = Message(topic="t", payload=b"p", delay_ms=HOUR_MS)
    assert told(master, call(plain))[1] == [KEY_FREE]


def test_no_key_is_taken_while_a_member_would_not_know_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a member would stop at the entry. By key nothing is found, without an entry."""
    master = world.elect()
    assert master.host is not None
    core = master.host.core
    monkeypatch.setattr(core.parts.sync, "understands", lambda level, peer: level < 3)
    refused = schedule(master, call(keyed("k")))
    assert isinstance(refused, Failure) and refused.reason == common_pb2.RECOVERING
    assert cancel(master, "k").outcome == scheduler_pb2.NOT_FOUND


def test_the_first_key_is_taken_though_the_first_master_is_dead(world: World) -> None:
    """Its syncs have said that it knows keys; it never answers one."""
    first = world.elect()
    world.run(200)
    first.kill()
    master = world.elect()
    assert master is not first
    world.run(200)
    assert told(master, call(keyed("k")))[1] == [KEY_FREE]


@dataclass(frozen=True)
class Allowed(Caller):
    """A caller with the right to schedule only."""

    def topic(self, right: int, name: str) -> Failure | None:
        """None for scheduling."""
        return None if right == 1 else Failure(common_pb2.RIGHT_REQUIRED, "no", {"field": str(right), "value": name})

    def topics(self, right: int, names: Any) -> Failure | None:
        """By name."""
        return next((refusal for name in names if (refusal := self.topic(right, name)) is not None), None)


def test_replacing_needs_the_right_to_cancel() -> None:
    """The other rules do not."""
    caller = Allowed("u", "token", False, AccessControl(), lambda: True)
    refused = may_replace(from_message(call(keyed("k", KEY_CONFLICT_REPLACE)), Settings()), caller)
    assert refused is not None and refused.reason == common_pb2.RIGHT_REQUIRED
    assert may_replace(from_message(call(keyed("k")), Settings()), caller) is None


def test_a_recurring_schedule_has_no_unique_key(world: World) -> None:
    """It makes a message for each planned time."""
    master = world.elect()
    assert master.host is not None
    definition = schedules_pb2.ScheduleDefinition(
        name="s", topic="t", payload=b"x", meta=MessageMeta(unique_key="k"),
        spec=schedules_pb2.ScheduleSpec(interval_ms=60_000),
    )  # fmt: skip
    request = schedules_pb2.PutScheduleRequest(definition=definition)
    refused = ask(master, master.host.core.parts.schedules.put(request, "", everybody))
    assert isinstance(refused, Failure) and refused.metadata["field"] == "definition.meta.unique_key"
