"""Unique keys against plain models: the table, and what apply decides through moves, dispatches, crashes, removals."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numpy.typing import NDArray

from tests.counting import calls_of
from tests.node.state.solo import Solo
from tickwheel.node.state import key_holders, unique_keys
from tickwheel.node.state.groups import Groups, owed, owed_many, unsettled
from tickwheel.node.state.keyed_append import UNTIL_SETTLED
from tickwheel.node.state.ports import WheelPort
from tickwheel.node.state.ready import ReadyLog
from tickwheel.node.state.results import CancelResult, PublishResult, RescheduleResult
from tickwheel.node.state.unique_keys import (
    SHARDS,
    Held,
    HeldColumns,
    KeyColumns,
    KeyOf,
    Rows,
    UniqueKeys,
    contents,
    digest_of,
    key_of,
    keys_of,
)
from tickwheel.proto.common_pb2 import (
    KEY_CONFLICT_REFUSE,
    KEY_CONFLICT_REPLACE,
    KEY_CONFLICT_USE_EXISTING,
    KEY_FREE,
    KEY_REFUSED,
    KEY_REPLACED,
    KEY_USED_EXISTING,
)
from tickwheel.proto.log_pb2 import Cancel, Command, Publish, PublishRequest, Reschedule
from tickwheel.proto.scheduler_pb2 import ALREADY_DISPATCHED, CANCELLED, NOT_FOUND, RESCHEDULED
from tickwheel.wheel.units import HOUR_MS, Ids

RULES = (KEY_CONFLICT_REFUSE, KEY_CONFLICT_USE_EXISTING, KEY_CONFLICT_REPLACE)
KEYS = ("a", "b", "c")


# -- the table


PUT = st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 2), st.integers(0, 9), st.booleans())


class OneByOne:
    """The rows of the table if each key is put alone: a new one goes before those of an equal half."""

    def __init__(self) -> None:
        self.shards: dict[int, list[tuple[int, KeyOf, Held]]] = {}

    def put(self, key: KeyOf, held: Held) -> None:
        """Replace the key's row, or insert one."""
        rows = self.shards.setdefault(key.mixed % SHARDS, [])
        at = next((at for at, row in enumerate(rows) if row[1] == key), None)
        if at is not None:
            rows[at] = (key.mixed, key, held)
        else:
            rows.insert(bisect_left(rows, key.mixed, key=lambda row: row[0]), (key.mixed, key, held))

    def contents(self) -> list[tuple[int, bytes]]:
        """As the table's own."""
        return [
            (
                shard,
                b"".join(
                    struct.pack(
                        "<QQQII",
                        mixed,
                        key.low,
                        held.id,
                        held.due_ms % HOUR_MS | held.until_settled << 31,
                        key.topic_id,
                    )
                    for mixed, key, held in rows
                ),
            )
            for shard, rows in sorted(self.shards.items())
        ]


def columns(keys: Iterable[KeyOf]) -> KeyColumns:
    """At least one key."""
    topic_ids, high, low = zip(*keys, strict=True)
    digests = np.array([*zip(high, low, strict=True)], unique_keys.DIGEST)
    return keys_of(np.array(topic_ids, np.uint32), digests)


def put(table: UniqueKeys, taken: dict[KeyOf, Held]) -> None:
    """Together."""
    if taken:
        ids, due_ms, until_settled = zip(*taken.values(), strict=True)
        held = HeldColumns(np.array(ids, np.uint64), np.array(due_ms, np.int64), np.array(until_settled))
        table.put_many(columns(taken), held)


def get_many(table: UniqueKeys, keys: Sequence[KeyOf]) -> list[Held | None]:
    """Together."""
    found, held = table.get_many(columns(keys))
    rows = zip(*(column.tolist() for column in held), strict=True)
    return [Held(*row) if known else None for known, row in zip(found.tolist(), rows, strict=True)]


@given(st.lists(st.lists(PUT, max_size=30), max_size=6), st.integers(0, 3 * SHARDS))
def test_the_table_keeps_the_last_message_of_each_key(
    commands: list[list[tuple[int, int, int, int, bool]]], prunes: int
) -> None:
    """Of few halves, so that keys differ in one of them only. The keys of a command are put together, and the table is
    to the byte what one after the other makes of it; captured and restored, it is the same."""
    table, model, rows_of = UniqueKeys(), dict[KeyOf, Held](), OneByOne()
    for puts in commands:
        taken: dict[KeyOf, Held] = {}
        for topic_id, high, low, hour, until_settled in puts:
            taken[KeyOf(topic_id, high, low)] = Held(hour << 32 | 7, hour * HOUR_MS + 3_599_999, until_settled)
        put(table, taken)
        model.update(taken)
        for key, held in taken.items():
            rows_of.put(key, held)
        assert list(contents(table.capture())) == rows_of.contents()
    captured = table.capture()
    copy = UniqueKeys()
    copy.restore(contents(captured), table.next_shard)
    for found in (table, copy):
        assert found.count == len(model)
        assert {key: found.get(key) for key in model} == model
        assert found.get(KeyOf(9, 9, 9)) is None
        asked = [*model, *(key._replace(low=9) for key in model), KeyOf(9, 9, 9)]
        assert get_many(found, asked) == [model.get(key) for key in asked]
    assert [*copy.digest_in_turns()] == [*table.digest_in_turns()]
    for number in range(prunes):
        rows = table.next_rows()
        table.keep(np.full(len(rows.high), number % 2 == 0))
    gone = {key for number, key in ((key.mixed % SHARDS, key) for key in model) if number % 2 and number < prunes}
    assert table.count == len(model) - len(gone)
    assert {key for key in model if table.get(key) is None} == gone
    copy.restore(contents(captured), 0)
    assert copy.count == len(model), "what was captured has not changed"


def test_a_command_copies_a_shard_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of its keys lie in it: keys can be made to."""
    monkeypatch.setattr(unique_keys, "SHARDS", 1)
    solo = Solo(9)
    solo.create()
    copied: list[int] = []

    def counting(high: memoryview[int], rest: bytes) -> Rows:
        copied.append(len(high))
        return Rows(high, rest)

    monkeypatch.setattr(unique_keys, "Rows", counting)
    for call in range(2):
        rows = [Row(10, f"k{call}-{number}", KEY_CONFLICT_REFUSE, False) for number in range(2_000)]
        solo.apply(publish([solo.now_ms + 10] * 2_000, rows, [PublishRequest(count=2_000)]))
    assert solo.state.unique_keys.count == 4_000
    assert sum(copied) == 6_000


@pytest.mark.parametrize("settle", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_keys_of_a_command_are_decided_together(monkeypatch: pytest.MonkeyPatch, rule: int, settle: bool) -> None:
    """New, held by pending messages, held by dispatched ones: twice the keys take hardly more calls, whatever was moved
    before. Ten thousand decided one by one, on three nodes at once, took a second and cost the master its role."""
    monkeypatch.setattr(unique_keys, "SHARDS", 1)

    def calls(count: int) -> list[int]:
        solo = Solo(9)
        solo.create("g")
        moved = solo.publish([solo.now_ms + 20_000] * 3, b"m")
        for id in moved:
            solo.apply(
                Command(reschedule=Reschedule(id=id, due_ms=solo.now_ms + 20_000, new_due_ms=solo.now_ms + 30_000))
            )
        rows = [Row(10, f"k{number}", rule, settle) for number in range(count)]
        found = []
        for step in range(4):
            command = publish([solo.now_ms + 10 + step] * count, rows, [PublishRequest(count=count)])
            found.append(calls_of(partial(solo.apply, command)))
            if step == 1:
                solo.dispatch(solo.now_ms + 100)
        return found

    for few, many in zip(calls(1_000), calls(2_000), strict=True):
        assert many < few + 200


def test_equal_keys_of_two_topics_lie_apart() -> None:
    """And those of two names."""


def test_a_shard_is_full_until_it_is_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that are in it may be taken anew, those of other shards and topics that do not exist as before."""
    monkeypatch.setattr(unique_keys, "SHARD_ROWS_MAX", 3)
    table = UniqueKeys()
    keys = [KeyOf(1, number * SHARDS, 5) for number in range(4)]
    topic_ids = np.ones(4, np.uint32)

    def no_room(table: UniqueKeys, *wanted: KeyOf) -> int | None:
        return table.no_room(topic_ids[: len(wanted)], np.array([key[1:] for key in wanted], unique_keys.DIGEST))

    for number, key in enumerate(keys[:3]):
        assert not table.crowded and no_room(table, *keys) is None
        put(table, {key: Held(7, 7, False)})
        assert table.count == number + 1
    assert len({key.mixed % SHARDS for key in keys}) == 1
    copy = UniqueKeys()
    copy.restore(contents(table.capture()), 0)
    for found in (table, copy):
        assert found.crowded
        assert no_room(found, *keys) == 3 and no_room(found, *keys[:3]) is None
        assert no_room(found, keys[0], KeyOf(1, 1, 5), KeyOf(1, 0, 0)) is None
        assert found.no_room(np.zeros(1, np.uint32), np.array([keys[3][1:]], unique_keys.DIGEST)) is None
    table.next_shard = keys[0].mixed % SHARDS
    table.keep(np.array([True, False, True]))
    assert not table.crowded and no_room(table, *keys) is None and copy.crowded
    copy.restore([], 0)
    assert not copy.crowded


def test_a_digest_is_never_that_of_no_key() -> None:
    """Sixteen bytes, different for different keys and in different topics."""
    assert len(digest_of("a")) == 16 and any(digest_of("a"))
    assert key_of(1, digest_of("a")) != key_of(2, digest_of("a")) != key_of(2, digest_of("b"))


# -- what apply decides


@dataclass(frozen=True)
class Row:
    """A message to schedule: `delay` after the cursor."""

    delay: int
    key: str
    rule: int
    until_settled: bool


def publish(due_ms: list[int], rows: list[Row], requests: list[PublishRequest]) -> Command:
    """As a master writes it: sorted by due time, with the row of each unit."""
    order = np.argsort(np.array(due_ms, np.int64), kind="stable")
    digests = [digest_of(row.key) if row.key else bytes(16) for row in rows]
    rules = [row.rule | (UNTIL_SETTLED if row.until_settled else 0) if row.key else 0 for row in rows]
    return Command(
        publish=Publish(
            requests=requests,
            due_ms=np.array(due_ms, "<i8")[order].tobytes(),
            rows=order.astype("<u4").tobytes(),
            topic_ids=np.array([1], "<u4").tobytes(),
            sizes=np.full(len(rows), 2, "<u4").tobytes(),
            records=b"".join(b"%02d" % (row % 100) for row in order.tolist()),
            unique_keys=b"".join(digests[row] for row in order.tolist()),
            key_rules=bytes(rules[row] for row in order.tolist()),
        )
    )


@dataclass
class Message:
    """What the model knows of a message, under each id that it ever had."""

    id: int
    due_ms: int
    until_settled: bool = False
    cancelled: bool = False
    settled: bool = False
    retry_ms: int = 0
    """When its newest attempt is due; 0: it has its first only."""
    record: bytes = b""

    @property
    def last_ms(self) -> int:
        """When its newest attempt is due."""
        return self.retry_ms or self.due_ms


class Keys(RuleBasedStateMachine):
    """One topic, one group, three keys."""

    def __init__(self) -> None:
        super().__init__()
        unique_keys.SHARDS = 1  # each dispatch looks through all rows
        self.solo = Solo(7)
        self.solo.create("g")
        self.solo.dispatch(self.solo.now_ms + 1)
        self.cursor = self.solo.now_ms
        self.named: dict[int, Message] = {}
        """By every id."""
        self.taken: dict[str, Message] = {}
        """Key -> the message that took it last."""
        self.sequence = 0

    def teardown(self) -> None:
        """As it was."""
        unique_keys.SHARDS = SHARDS

    def holder(self, key: str) -> Message | None:
        """By the words of the design."""
        message = self.taken.get(key)
        if message is None or message.cancelled:
            return None
        if message.due_ms >= self.cursor:
            return message
        return message if message.until_settled and not message.settled else None

    row = st.builds(
        Row, st.integers(0, 3 * HOUR_MS), st.sampled_from((*KEYS, "")), st.sampled_from(RULES), st.booleans()
    )

    @rule(rows=st.lists(row, min_size=1, max_size=6), producer=st.booleans(), again=st.booleans())
    def schedule(self, rows: list[Row], producer: bool, again: bool) -> None:
        """One request; with a producer id, maybe sent twice."""
        due_ms = [self.cursor + row.delay for row in rows]
        request = PublishRequest(count=len(rows))
        if producer:
            self.sequence += 1
            request = PublishRequest(count=len(rows), producer_id="p", sequence=self.sequence, checksum=len(rows))
        command = publish(due_ms, rows, [request])
        result = self.solo.apply(command)[0]
        assert isinstance(result, PublishResult)
        outcome = result.requests[0]
        assert outcome.failure is None and not outcome.repeated
        keys = [KEY_FREE] * len(rows) if outcome.keys is None else outcome.keys.tolist()
        replaced = []
        for number, (row, id, due, found) in enumerate(
            zip(rows, outcome.ids.tolist(), outcome.due_ms.tolist(), keys, strict=True)
        ):
            holder = self.holder(row.key) if row.key else None
            if holder is not None and (row.rule != KEY_CONFLICT_REPLACE or holder.due_ms < self.cursor):
                wanted = KEY_USED_EXISTING if row.rule == KEY_CONFLICT_USE_EXISTING else KEY_REFUSED
                assert (found, id, due) == (wanted, holder.id, holder.due_ms)
                continue
            record = b"%02d" % number
            assert due == due_ms[number] and id not in self.named
            assert found == (KEY_FREE if holder is None else KEY_REPLACED)
            if holder is not None:
                holder.cancelled = True
                replaced.append(holder.id)
            message = self.named[id] = Message(id, due, row.until_settled, record=record)
            if row.key:
                self.taken[row.key] = message
            self.solo.expected[id] = self.solo.records[id] = record
        assert sorted(result.replaced) == sorted(replaced)
        assert result.scheduled == sum(found in (KEY_FREE, KEY_REPLACED) for found in keys)
        if producer and again:
            before = self.solo.state.digest().parts["unique_keys"]
            second = self.solo.apply(command)[0]
            assert isinstance(second, PublishResult)
            repeat = second.requests[0]
            assert repeat.repeated and not second.scheduled and not second.replaced
            assert repeat.ids.tolist() == outcome.ids.tolist() and repeat.due_ms.tolist() == outcome.due_ms.tolist()
            assert (repeat.keys is None) == (outcome.keys is None)
            assert repeat.keys is None or repeat.keys.tolist() == keys
            assert self.solo.state.digest().parts["unique_keys"] == before

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """By any id that a message ever had."""
        if not self.named:
            return
        id = data.draw(st.sampled_from(sorted(self.named)))
        message = self.named[id]
        result = self.solo.apply(Command(cancel=Cancel(id=id, due_ms=message.due_ms)))[0]
        assert isinstance(result, CancelResult)
        if message.id >> 32 < self.solo.state.hour_min_kept:
            assert result.outcome == NOT_FOUND
        elif message.cancelled or message.due_ms >= self.cursor:
            assert result.outcome == CANCELLED
            message.cancelled = True
        else:
            assert result.outcome == ALREADY_DISPATCHED

    @rule(key=st.sampled_from(KEYS), producer=st.booleans())
    def cancel_by_key(self, key: str, producer: bool) -> None:
        """Once; its repeat gets the same answer although another may hold the key by then."""
        cancel = Cancel(unique_key=digest_of(key), topic_id=1)
        if producer:
            request = PublishRequest(producer_id="p", sequence=self.sequence + 1, count=1, checksum=99)
            cancel.request.CopyFrom(request)
        result = self.solo.apply(Command(cancel=cancel))[0]
        assert isinstance(result, CancelResult)
        holder = self.holder(key)
        if holder is None:
            assert (result.outcome, result.id, result.remembered) == (NOT_FOUND, 0, False)
        elif holder.due_ms < self.cursor:
            assert (result.outcome, result.id) == (ALREADY_DISPATCHED, holder.id)
        else:
            assert (result.outcome, result.id, result.remembered) == (CANCELLED, holder.id, producer)
            holder.cancelled = True
            if producer:
                self.sequence += 1
                self.schedule_one(key)
                second = self.solo.apply(Command(cancel=cancel))[0]
                assert isinstance(second, CancelResult)
                assert (second.outcome, second.id, second.repeated) == (CANCELLED, holder.id, True)
                assert self.holder(key) is not None

    def schedule_one(self, key: str) -> None:
        """Without conflict."""
        command = publish([self.cursor + 1], [Row(1, key, KEY_CONFLICT_REFUSE, False)], [PublishRequest(count=1)])
        result = self.solo.apply(command)[0]
        assert isinstance(result, PublishResult) and result.scheduled == 1
        id = int(result.requests[0].ids[0])
        self.taken[key] = self.named[id] = Message(id, self.cursor + 1, record=b"00")
        self.solo.expected[id] = self.solo.records[id] = b"00"

    @rule(key=st.sampled_from(KEYS), delay=st.integers(0, 2 * HOUR_MS), right=st.booleans())
    def reschedule_by_key(self, key: str, delay: int, right: bool) -> None:
        """With the id that the master found, or with one that no longer holds the key."""
        holder = self.holder(key)
        others = sorted(id for id, message in self.named.items() if message is not holder and id == message.id)
        if holder is not None and holder.due_ms < self.cursor:
            return
        if holder is None or not right:
            if not others:
                return
            id, record = others[0], b"xx"
        else:
            id, record = holder.id, holder.record
        command = Reschedule(
            id=id,
            due_ms=self.named[id].due_ms,
            new_due_ms=self.cursor + delay,
            topic_id=1,
            record=record,
            unique_key=digest_of(key),
        )
        result = self.solo.apply(Command(reschedule=command))[0]
        assert isinstance(result, RescheduleResult)
        if holder is None or not right:
            assert result.stale and not result.new_id
            return
        assert result.outcome == RESCHEDULED
        self.solo.expected.pop(holder.id, None)
        holder.id, holder.due_ms = result.new_id, result.due_ms
        self.named[holder.id] = holder
        self.solo.expected[holder.id] = self.solo.records[holder.id] = record

    @rule(by=st.integers(1, HOUR_MS))
    def dispatch(self, by: int) -> None:
        """Time passes."""
        self.solo.pump()
        self.cursor += by
        self.solo.dispatch(self.cursor)

    @rule()
    def settle(self) -> None:
        """All that the group can get."""
        if self.solo.settle():
            for message in self.named.values():
                message.settled = message.settled or (not message.cancelled and message.last_ms < self.cursor)

    def gets(self, limit: int) -> list[Message]:
        """Messages that the group gets next; not those that came from dead letters."""
        subscription = self.solo.state.subscription(1, 1)
        assert subscription is not None
        positions, _, _ = subscription.deliverable(subscription.floor, limit)
        names = set(subscription.names_of(positions.astype(np.int64)).tolist())
        return [message for id, message in self.named.items() if id in names and id == message.id]

    @rule(limit=st.integers(1, 3))
    def bury(self, limit: int) -> None:
        """Some of what the group gets become dead letters."""
        for message in self.gets(limit):
            message.settled = True
        self.solo.bury(limit)

    @rule(limit=st.integers(1, 3), pause_ms=st.integers(0, HOUR_MS))
    def retry(self, limit: int, pause_ms: int) -> None:
        """Some of what the group gets wait for their next attempt. They hold their keys, unless they were dead."""
        for message in self.gets(limit):
            message.retry_ms = max(self.cursor, self.solo.now_ms + pause_ms)
        self.solo.retry(limit, pause_ms)

    @rule(pause_ms=st.integers(0, HOUR_MS))
    def replay(self, pause_ms: int) -> None:
        """All dead letters: none of them holds its key again."""
        self.solo.replay(pause_ms)

    @rule(hours=st.integers(1, 3), forced=st.booleans())
    def remove_hours(self, hours: int, forced: bool) -> None:
        """Hours before the cursor's. What nobody settled stays, unless its retention is over."""
        self.solo.remove(max(0, self.cursor // HOUR_MS - hours), None if forced else 0)
        kept = self.solo.state.hour_min_kept
        if forced:
            for message in self.named.values():
                message.settled = message.settled or message.last_ms // HOUR_MS < kept

    @rule()
    def checkpoint(self) -> None:
        """Without restart."""
        self.solo.pump()
        self.solo.checkpoint()

    @rule()
    def crash(self) -> None:
        """Start again from the disk and the log; digests, records and ready queues are compared."""
        self.solo.crash()

    @invariant()
    def holders_are_those_of_the_model(self) -> None:
        """Whoever holds each key, by what name."""
        for key in KEYS:
            wanted, found = self.holder(key), self.solo.state.key_holder("t", key)
            assert (wanted is None) == (found is None), key
            if wanted is not None and found is not None:
                assert (found.id, found.due_ms, found.dispatched) == (
                    wanted.id,
                    wanted.due_ms,
                    wanted.due_ms < self.cursor,
                )


TestKeys = Keys.TestCase
TestKeys.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_retry_holds_the_key_when_its_hour_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first delivery failed at the end of an hour. The hour is removed; the message is not settled."""
    monkeypatch.setattr(unique_keys, "SHARDS", 1)
    solo = Solo(6)
    solo.create("g")
    command = publish([solo.now_ms + 10], [Row(10, "k", KEY_CONFLICT_REFUSE, True)], [PublishRequest(count=1)])
    result = solo.apply(command)[0]
    assert isinstance(result, PublishResult)
    id, due_ms = int(result.requests[0].ids[0]), int(result.requests[0].due_ms[0])
    solo.records[id] = b"00"
    solo.dispatch(solo.now_ms + 20)
    assert solo.retry(1, 2 * HOUR_MS) == 1
    solo.dispatch(solo.now_ms + HOUR_MS)
    solo.remove(solo.now_ms // HOUR_MS)
    assert solo.state.hour_min_kept > id >> 32
    groups = solo.state._state.groups
    for _ in range(2):
        solo.dispatch(solo.now_ms + 1)
        holder = solo.state.key_holder("t", "k")
        assert holder is not None and holder.dispatched and holder.id == id
        assert unsettled(groups, solo.wheel, 1, id, due_ms)
    cancelled = solo.apply(Command(cancel=Cancel(unique_key=digest_of("k"), topic_id=1)))[0]
    assert isinstance(cancelled, CancelResult) and cancelled.outcome == ALREADY_DISPATCHED
    solo.pump()
    solo.dispatch(solo.now_ms + 2 * HOUR_MS)
    assert solo.state.key_holder("t", "k") is not None
    assert solo.settle() == 1
    assert solo.state.key_holder("t", "k") is None
    assert not unsettled(groups, solo.wheel, 1, id, due_ms)


@pytest.mark.parametrize("step", ["waits", "waits again", "ready", "after a start"])
def test_a_replayed_dead_letter_holds_no_key(step: str) -> None:
    """Its death freed the key. Neither the replay nor a retry of it takes the key back, nor does it count as a run that
    is not settled; not even while no dispatch has dropped the key's row."""
    solo = Solo(6)
    solo.create("g")
    command = publish([solo.now_ms + 10], [Row(10, "k", KEY_CONFLICT_REFUSE, True)], [PublishRequest(count=1)])
    result = solo.apply(command)[0]
    assert isinstance(result, PublishResult)
    id, due_ms = int(result.requests[0].ids[0]), int(result.requests[0].due_ms[0])
    solo.expected[id] = solo.records[id] = b"00"
    solo.dispatch(solo.now_ms + 20)
    assert solo.state.key_holder("t", "k") is not None
    assert solo.bury(1) == 1 and solo.state.key_holder("t", "k") is None
    assert solo.replay(1_000) == 1
    if step != "waits":
        solo.dispatch(solo.now_ms + 1_001)
    if step == "waits again":
        assert solo.retry(1, 1_000) == 1
    if step == "after a start":
        solo.pump()
        solo.checkpoint()
        solo.crash()
        assert solo.state.marks_replays
    assert solo.state.key_holder("t", "k") is None
    assert not unsettled(solo.state._state.groups, solo.wheel, 1, id, due_ms)


def test_rows_of_freed_keys_go() -> None:
    """A thousand keys, dispatched: their rows go within one round of dispatches, and not before."""
    solo = Solo(3)
    solo.create()
    rows = [Row(10, f"k{number}", KEY_CONFLICT_REFUSE, False) for number in range(1_000)]
    kept = [replace(row, key=f"later{number}", delay=HOUR_MS) for number, row in enumerate(rows[:10])]
    due_ms = [solo.now_ms + row.delay for row in rows + kept]
    solo.apply(publish(due_ms, rows + kept, [PublishRequest(count=1_010)]))
    assert solo.state.unique_keys.count == 1_010
    for number in range(SHARDS + 1):
        solo.dispatch(solo.now_ms + (20 if number == 0 else 1))
    assert solo.state.unique_keys.count == 10
    assert solo.state.key_holder("t", "later3") is not None


def test_a_full_table_is_pruned_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several shards a dispatch while more than half of the room is taken."""
    monkeypatch.setattr(key_holders, "UNIQUE_KEYS_MAX", 100)
    solo = Solo(4)
    solo.create()
    rows = [Row(10, f"k{number}", KEY_CONFLICT_REFUSE, False) for number in range(100)]
    solo.apply(publish([solo.now_ms + 10] * 100, rows, [PublishRequest(count=100)]))
    before = solo.state.unique_keys.next_shard
    solo.dispatch(solo.now_ms + 20)
    assert solo.state.unique_keys.next_shard == before + key_holders.PRUNED_MANY


@pytest.mark.parametrize(("keys", "rules"), [(b"\1" * 15, b"\1"), (b"\1" * 16, b""), (b"\1" * 32, b"\1\1")])
def test_key_columns_that_do_not_fit_are_refused(keys: bytes, rules: bytes) -> None:
    """By a result, as any other column."""
    solo = Solo(5)
    solo.create()
    command = publish([solo.now_ms], [Row(0, "a", KEY_CONFLICT_REFUSE, False)], [PublishRequest(count=1)])
    command.publish.unique_keys, command.publish.key_rules = keys, rules
    result = solo.apply(command)[0]
    assert isinstance(result, PublishResult)
    failure = result.requests[0].failure
    assert failure is not None and failure.metadata["field"] == "unique_keys"
    for wrong in (Cancel(unique_key=b"\1", topic_id=1),):
        refused = solo.apply(Command(cancel=wrong))[0]
        assert isinstance(refused, CancelResult) and refused.failure is not None
    moved = solo.apply(Command(reschedule=Reschedule(id=1, topic_id=1, record=b"x", unique_key=b"\1")))[0]
    assert isinstance(moved, RescheduleResult) and moved.failure is not None


def test_a_row_takes_32_bytes() -> None:
    """As P11 says."""
    assert unique_keys.ROW.itemsize == 32


def test_a_key_that_is_wanted_often_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder that is dispatched and not settled is found in the ready queue: once a command, not once a message."""
    solo = Solo(8)
    solo.create("g")
    rows = [Row(10, "k", KEY_CONFLICT_REFUSE, True)]
    solo.apply(publish([solo.now_ms + 10], rows, [PublishRequest(count=1)]))
    solo.dispatch(solo.now_ms + 20)
    looks: list[int] = []

    def counting(
        groups: Groups, wheel: WheelPort, topic_id: int, ids: Ids, due_ms: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        looks.extend(ids.tolist())
        return owed_many(groups, wheel, topic_id, ids, due_ms)

    monkeypatch.setattr(key_holders, "owed_many", counting)
    command = publish([solo.now_ms + 10] * 50, rows * 50, [PublishRequest(count=50)])
    result = solo.apply(command)[0]
    assert isinstance(result, PublishResult) and not result.scheduled
    assert result.requests[0].keys is not None and set(result.requests[0].keys.tolist()) == {KEY_REFUSED}
    assert len(looks) == 1


@pytest.mark.parametrize("same_tick", [True, False])
def test_a_command_reads_each_tick_once(monkeypatch: pytest.MonkeyPatch, same_tick: bool) -> None:
    """However many of its keys are held by messages of it, and however many groups have settled those or not."""
    solo = Solo(10)
    solo.create("g", "h", "i")
    rows = [Row(10, f"k{number}", KEY_CONFLICT_REFUSE, True) for number in range(200)]
    due_ms = [solo.now_ms + 10 + (0 if same_tick else number % 2 * 1_000) for number in range(200)]
    for key in ("k", "other"):  # the others are no business of the command
        named = [replace(row, key=row.key.replace("k", key)) for row in rows]
        solo.apply(publish(due_ms, named, [PublishRequest(count=200)]))
    solo.dispatch(solo.now_ms + 2_000)
    for group_id, skipped in ((1, 1), (2, 100)):
        subscription = solo.state.subscription(group_id, 1)
        assert subscription is not None
        positions, ids, attempts = subscription.deliverable(0, 10_000)
        solo.settle_some(group_id, ids[skipped:], attempts[skipped:], positions[skipped:])
    assert solo.settle(3, limit=100) == 100
    read: list[int] = []
    original = ReadyLog.read

    def counting(self: ReadyLog, first: int, count: int) -> Ids:
        found = original(self, first, count)
        read.append(len(found))
        return found

    monkeypatch.setattr(ReadyLog, "read", counting)
    command = publish([solo.now_ms + 10] * 200, rows, [PublishRequest(count=200)])
    result = solo.apply(command)[0]
    assert isinstance(result, PublishResult) and result.requests[0].keys is not None
    assert KEY_REFUSED in result.requests[0].keys.tolist()
    assert 0 < sum(read) <= 400


def owed_alone(solo: Solo, id: int) -> bool:
    """By one look at each position of the queue."""
    for subscription in solo.state._state.groups.of_topic(1):
        group = solo.state._state.groups.get(subscription.group_id)
        assert group is not None
        if group.waiting.of(id, solo.wheel.cursor) is not None:
            return True
        names = subscription.newest_targets(1_000)
        places = [int(row["position"]) for row in names if int(row["origin"]) == id]
        first = subscription.first_open
        ids = solo.ready[first:]
        places += [first + place for place, found in enumerate(ids) if found == id]
        if any(place >= first and not subscription.is_settled(np.array([place], np.uint64))[0] for place in places):
            return True
    return False


@given(
    st.lists(
        st.tuples(st.sampled_from(("settle", "some", "retry", "dispatch", "publish", "remove")), st.integers(1, 3)),
        max_size=25,
    ),
    st.integers(0, 1 << 30),
)
@settings(max_examples=60, deadline=None)
def test_who_owes_is_found_for_many_as_for_one(steps: list[tuple[str, int]], seed: int) -> None:
    """Of several ticks, with groups at different places, retries that wait and that came, and removed hours."""
    solo, chance = Solo(seed), Random(seed)
    solo.create("g", "h", "i")
    due_of: dict[int, int] = {}
    for what, group_id in (("publish", 1), ("dispatch", 2), *steps):
        if what == "publish":
            due_ms = sorted(solo.now_ms + chance.choice((5, 900, 1_500, 4_000, HOUR_MS)) for _ in range(12))
            due_of.update(zip(solo.publish(due_ms, b"x"), due_ms, strict=True))
        elif what == "dispatch":
            solo.pump()
            solo.dispatch(solo.now_ms + group_id * chance.choice((500, 1_000, HOUR_MS)))
        elif what == "settle":
            solo.settle(group_id, limit=chance.randrange(1, 20))
        elif what == "some":
            subscription = solo.state.subscription(group_id, 1)
            assert subscription is not None
            positions, ids, attempts = subscription.deliverable(subscription.floor, 20)
            taken = np.array([chance.random() < 0.5 for _ in ids], np.bool_)
            if taken.any():
                solo.settle_some(group_id, ids[taken], attempts[taken], positions[taken])
        elif what == "retry":
            solo.retry(chance.randrange(1, 5), chance.choice((100, 3_000)), group_id)
        else:
            solo.remove(solo.now_ms // HOUR_MS)
        there = [id for id in due_of if due_of[id] < solo.wheel.cursor.due_ms]
        chance.shuffle(there)
        ids, due = np.array(there, np.uint64), np.array([due_of[id] for id in there], np.int64)
        groups = solo.state._state.groups
        found = owed_many(groups, solo.wheel, 1, ids, due).tolist()
        assert found == [owed_alone(solo, id) for id in there]
        assert found == [owed(groups, solo.wheel, 1, id, due_of[id]) for id in there]
