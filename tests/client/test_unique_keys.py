"""Unique keys in the clients: what travels, what each caller is told, and that a lost answer changes none of it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.client.fake_node import FakeNode, Refusal, messages_of
from tickwheel.client import (
    AsyncClient,
    KeyConflict,
    KeyOutcome,
    KeyTaken,
    LimitReached,
    OutcomeUnknown,
    Receipt,
    RequestRefused,
    TickwheelError,
)
from tickwheel.client.errors import Fault
from tickwheel.client.ids import id64_of_text
from tickwheel.client.messages import batch_of, receipts_of, row_of
from tickwheel.client.messages import receipt_of as batch_receipt_of
from tickwheel.client.unique_keys import key_taken_of
from tickwheel.proto import common_pb2, scheduler_pb2

LONG_S = 60.0
LATER = timedelta(hours=1)
NUMBERS = {
    None: common_pb2.KEY_CONFLICT_REFUSE,
    KeyConflict.REFUSE: common_pb2.KEY_CONFLICT_REFUSE,
    KeyConflict.USE_EXISTING: common_pb2.KEY_CONFLICT_USE_EXISTING,
    KeyConflict.REPLACE: common_pb2.KEY_CONFLICT_REPLACE,
}

KEYS = st.one_of(st.none(), st.text(st.characters(codec="utf-8"), min_size=1, max_size=60))
RULES = st.tuples(st.sampled_from([None, *KeyConflict]), st.booleans())


@given(st.lists(st.tuples(KEYS, RULES, st.sampled_from(["t", "u"]), st.sampled_from(["", "k"])), min_size=1))
def test_keys_and_rules_arrive_with_their_messages(
    given: list[tuple[str | None, tuple[KeyConflict | None, bool], str, str]],
) -> None:
    """As rows or as columns, beside messages without a key: each with its own key and rule, and no other."""
    rows = [
        row_of(
            topic,
            b"x",
            due_ms=number,
            key=key,
            unique_key=unique_key,
            on_key_conflict=conflict if unique_key is not None else None,
            key_until_settled=until_settled and unique_key is not None,
        )
        for number, (unique_key, (conflict, until_settled), topic, key) in enumerate(given)
    ]
    batch = scheduler_pb2.ScheduleBatch.FromString(batch_of(rows).SerializeToString())
    for message, row, (unique_key, (conflict, until_settled), _, key) in zip(
        messages_of(batch), rows, given, strict=True
    ):
        assert message.meta.unique_key == (unique_key or "") and message.meta.key == key
        if unique_key is not None:
            assert message.on_key_conflict == NUMBERS[conflict] and message.key_until_settled == until_settled
            alone = row.fill(common_pb2.Message())
            assert (alone.on_key_conflict, alone.meta) == (message.on_key_conflict, message.meta)


@given(st.lists(st.sampled_from(list(common_pb2.KeyOutcome.values())), min_size=1))
def test_a_receipt_tells_each_message_what_became_of_it(outcomes: list[common_pb2.KeyOutcome.ValueType]) -> None:
    """A refused one gets an error with the holder; its neighbours get receipts."""
    rows = [row_of("t", b"x", due_ms=1, unique_key=f"k{number}") for number in range(len(outcomes))]
    wire = scheduler_pb2.BatchReceipt(
        ids=b"".join((7 << 32 | number).to_bytes(8, "little") for number in range(len(outcomes))),
        due_ms=b"".join((1_000 + number).to_bytes(8, "little") for number in range(len(outcomes))),
        key_outcomes=bytes(outcomes),
    )
    receipt = batch_receipt_of(wire)
    names = [common_pb2.KeyOutcome.Name(number).removeprefix("KEY_") for number in outcomes]
    assert receipt.outcomes() == names
    for number, (got, name) in enumerate(zip(receipts_of(receipt, rows), names, strict=True)):
        assert (got.id, got.due_ms) == (f"0-7-{number}", 1_000 + number)
        if name == "REFUSED":
            assert isinstance(got, KeyTaken) and (got.topic, got.unique_key) == ("t", f"k{number}")
        else:
            assert isinstance(got, Receipt) and got.key_outcome == name


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"unique_key": ""}, "unique_key"),
        ({"unique_key": "ä" * 128}, "unique_key"),
        ({"unique_key": "\ud800"}, "unique_key"),
        ({"unique_key": 7}, "unique_key"),
        ({"unique_key": b"k"}, "unique_key"),
        ({"unique_key": "k", "on_key_conflict": "ignore"}, "on_key_conflict"),
        ({"unique_key": "k", "key_until_settled": "no"}, "key_until_settled"),
        ({"on_key_conflict": "refuse"}, "on_key_conflict"),
        ({"key_until_settled": True}, "key_until_settled"),
    ],
)
async def test_wrong_keys_are_refused_before_they_travel(
    nodes: list[FakeNode], options: dict[str, Any], field: str
) -> None:
    """1 to 255 bytes of UTF-8; a rule only with a key. By a schedule, a producer and a look-up."""
    async with AsyncClient(nodes[0].address) as client, client.producer() as producer:
        calls: list[Any] = [client.schedule, producer.send]
        for call in calls:
            with pytest.raises(RequestRefused) as caught:
                await call("t", b"x", delay=LATER, **options)
            assert caught.value.field == field and caught.value.limit
        if field != "unique_key":
            with pytest.raises(RequestRefused) as caught:
                await producer.schedule_columns(
                    "t", [1], [1], b"x", **{name: value for name, value in options.items() if name != "unique_key"}
                )
            assert caught.value.field == field
            return
        by_key: list[Any] = [client.get_by_key, client.cancel_by_key]
        for call in by_key:
            with pytest.raises(RequestRefused) as caught:
                await call("t", options["unique_key"])
            assert caught.value.field == "unique_key"
    assert not nodes[0].sequences


async def test_each_outcome(nodes: list[FakeNode]) -> None:
    """Free; refused with the holder; the holder used; the holder replaced."""
    state = nodes[0].state
    async with AsyncClient(nodes[0].address) as client:
        first = await client.schedule("t", b"1", delay=LATER, unique_key="k")
        assert first.key_outcome is KeyOutcome.FREE
        with pytest.raises(KeyTaken) as caught:
            await client.schedule("t", b"2", delay=LATER, unique_key="k")
        taken = caught.value
        assert (taken.topic, taken.unique_key, taken.id, taken.due_ms) == ("t", "k", first.id, first.due_ms)
        assert taken.due == first.due and taken.reason == "KEY_TAKEN"
        assert (taken.field, taken.value) == ("meta.unique_key", "k") and taken.limit
        used = await client.schedule("t", b"3", delay=LATER, unique_key="k", on_key_conflict=KeyConflict.USE_EXISTING)
        assert (used.id, used.due_ms, used.key_outcome) == (first.id, first.due_ms, "USED_EXISTING")
        last = await client.schedule("t", b"4", delay=LATER, unique_key="k", on_key_conflict="replace")
        assert last.key_outcome is KeyOutcome.REPLACED and last.id != first.id
        assert (await client.schedule("u", b"5", delay=LATER, unique_key="k")).key_outcome is KeyOutcome.FREE
    assert [message.payload for message, _ in state.messages.values()] == [b"1", b"4", b"5"]


@pytest.mark.parametrize("older", [False, True])
async def test_a_taken_key_is_its_callers_alone(nodes: list[FakeNode], *, older: bool) -> None:
    """Of many callers of one batch two share a key: one of them has it, the other is told, all others are scheduled."""
    node = nodes[0]
    node.older = older
    async with AsyncClient(node.address) as client:
        results = await asyncio.gather(
            *(
                client.schedule("t", f"{number}", delay=LATER, unique_key=f"k{number % 19}" if number % 2 else None)
                for number in range(40)
            ),
            return_exceptions=True,
        )
    refused = [number for number, result in enumerate(results) if isinstance(result, KeyTaken)]
    assert refused == [39]
    taken, holder = results[39], results[1]
    assert isinstance(taken, KeyTaken) and isinstance(holder, Receipt) and taken.id == holder.id
    assert all(isinstance(result, Receipt) for result in results[:39])
    assert len(node.state.order) == 39
    assert len({producer for producer, _ in node.sequences}) <= 2, "nothing was sent again"


async def test_a_taken_key_counts_as_an_answer(nodes: list[FakeNode]) -> None:
    """The next call of the lane has the next sequence: one that was used for a refusal is never used again."""
    node = nodes[0]
    async with AsyncClient(node.address) as client:
        await client.schedule("t", b"1", delay=LATER, unique_key="k")
        for _ in range(3):
            with pytest.raises(KeyTaken):
                await client.schedule("t", b"2", delay=LATER, unique_key="k")
        await client.schedule("t", b"3", delay=LATER)
    assert [sequence for _, sequence in node.sequences] == [1, 2, 3, 4, 5]
    assert len({producer for producer, _ in node.sequences}) == 1


@pytest.mark.parametrize("callers", [1, 3])
async def test_a_lost_answer_changes_no_outcome(nodes: list[FakeNode], callers: int) -> None:
    """The repeat gets the first outcome, at the new master too: a refusal stays one, although the key is free by then;
    what was scheduled is not refused for the key that it holds itself."""
    state = nodes[0].state
    async with AsyncClient([node.address for node in nodes], timeout_s=LONG_S) as client:
        held = await client.schedule("t", b"held", delay=LATER, unique_key="k0")
        for node in nodes:
            node.drop_answers = 1
        calls = [
            asyncio.ensure_future(client.schedule("t", f"{number}", delay=LATER, unique_key=f"k{number}"))
            for number in range(callers)
        ]
        await state.changed.wait()
        del state.keys["t", "k0"]
        nodes[1].lead()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(results[0], KeyTaken) and results[0].id == held.id
        for number, result in enumerate(results[1:], 1):
            assert isinstance(result, Receipt) and result.key_outcome is KeyOutcome.FREE
            assert state.messages[id64_of_text(result.id)][0].payload == b"%d" % number
        assert state.repeats
        await client.schedule("t", b"next", delay=LATER)
    assert len(state.order) == callers + 1


async def test_a_producer_tells_each_message(nodes: list[FakeNode]) -> None:
    """Rows and columns; a refused message leaves its batch alone and the stream open, through a lost answer."""
    node = nodes[0]
    async with AsyncClient(node.address) as client, client.producer(linger_ms=0) as producer:
        first = await producer.schedule("t", b"1", delay=LATER, unique_key="k")
        node.drop_answers = 1
        futures = [
            await producer.send("t", b"2", delay=LATER, unique_key="k"),
            await producer.send("t", b"3", delay=LATER),
            await producer.send("t", b"4", delay=LATER, unique_key="k", on_key_conflict="use_existing"),
        ]
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert isinstance(results[0], KeyTaken) and results[0].id == first.id
        assert isinstance(results[1], Receipt) and results[1].key_outcome is KeyOutcome.FREE
        assert isinstance(results[2], Receipt) and results[2].id == first.id
        metas = [common_pb2.MessageMeta(unique_key=key).SerializeToString() for key in ("k", "new", "")]
        columns = await producer.schedule_columns(
            "t",
            [1, 2, 3],
            [1, 1, 1],
            b"567",
            meta_sizes=[len(meta) for meta in metas],
            metas=b"".join(metas),
            on_key_conflict=KeyConflict.REPLACE,
        )
        receipt = await columns
        assert receipt.outcomes() == [KeyOutcome.REPLACED, KeyOutcome.FREE, KeyOutcome.FREE]
        plain = await producer.schedule_columns("t", [1, 2], [1, 1], b"89")
        assert (await plain).outcomes() == [KeyOutcome.FREE, KeyOutcome.FREE]
    stored = [message.payload for message, _ in node.state.messages.values()]
    assert stored == [b"1", b"3", b"5", b"6", b"7", b"8", b"9"]


async def test_a_refusal_that_is_not_about_the_key_stays_one(nodes: list[FakeNode]) -> None:
    """Too many keys: the callers wait for room, and are told the limit at their deadline."""
    node = nodes[0]
    full = {"field": "unique_keys_max", "limit": "2000000", "accepted_sequence": "0"}
    async with AsyncClient(node.address) as client:
        await client.schedule("t", b"first", delay=LATER)  # connected: the deadline is for the refusals alone
        # The last one for longer than the deadline: no try is under way then.
        for retry_after_ms in ("10", "10", "10", "60000"):
            refusal = Refusal(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT_REACHED", "full", retry_after_ms=retry_after_ms, **full
            )
            node.refusals.append(refusal)
        with pytest.raises(LimitReached) as caught:
            await client.schedule("t", b"x", delay=LATER, unique_key="k", timeout_s=1.0)
        assert caught.value.metadata["field"] == "unique_keys_max" and not node.refusals


async def test_no_try_is_sent_whose_answer_would_come_too_late(nodes: list[FakeNode]) -> None:
    """Nobody would know whether it was carried out: the caller is told the refusal instead."""
    node = nodes[0]
    full = Refusal(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT_REACHED", "full", field="unique_keys_max", limit="2000000",
        retry_after_ms="995", accepted_sequence="0",
    )  # fmt: skip
    async with AsyncClient(node.address) as client:
        await client.schedule("t", b"first", delay=LATER)
        node.refusals.extend([full] * 10)
        with pytest.raises(LimitReached):
            await client.schedule("t", b"x", delay=LATER, unique_key="k", timeout_s=1.0)
        assert len(node.refusals) == 9


async def test_cancel_by_key_never_meets_the_next_message(nodes: list[FakeNode]) -> None:
    """Its answer is lost, and somebody schedules another message under the key before the repeat comes."""
    state = nodes[0].state
    async with AsyncClient([node.address for node in nodes], timeout_s=LONG_S) as client:
        first = await client.schedule("t", b"1", delay=LATER, unique_key="k")
        nodes[0].drop_answers = 1
        call = asyncio.ensure_future(client.cancel_by_key("t", "k"))
        await state.changed.wait()
        state.keys["t", "k"] = state._place(common_pb2.Message(topic="t", payload=b"2", due_ms=1))
        outcome, message_id = await call
        assert (outcome, message_id) == ("CANCELLED", first.id)
        assert state.keys["t", "k"] not in state.cancelled
        outcome, second = await client.cancel_by_key("t", "k")
        assert outcome == "CANCELLED" and second != first.id
        assert await client.cancel_by_key("t", "k") == ("NOT_FOUND", "")
        assert await client.cancel_by_key("t", "k") == ("NOT_FOUND", ""), "what is not remembered uses no sequence"
        await client.schedule("t", b"3", delay=LATER, unique_key="k")
        assert (await client.cancel_by_key("t", "k")).outcome == "CANCELLED"


def test_the_error_of_a_taken_key_can_be_read_by_people_and_programs() -> None:
    """It says who holds the key, and survives what other versions put into its fields."""
    due_ms = int(datetime(2030, 1, 1, tzinfo=UTC).timestamp() * 1_000)
    taken = key_taken_of(Fault("KEY_TAKEN", "node", {"id": "0-1-2", "due_ms": str(due_ms)}), "orders", "order-7")
    assert taken is not None
    assert str(taken) == (
        "unique key 'order-7' of topic orders is held by message 0-1-2, due 2030-01-01T00:00:00.000+00:00"
    )
    odd = key_taken_of(Fault("KEY_TAKEN", "node", {"due_ms": "soon"}), "orders", "order-7")
    assert odd is not None and odd.due_ms == 0
    assert key_taken_of(Fault("NAME_TAKEN", "node"), "orders", "order-7") is None
    assert issubclass(KeyTaken, TickwheelError) and not issubclass(KeyTaken, OutcomeUnknown)
