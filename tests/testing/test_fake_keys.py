"""Unique keys through the Python clients, on the node's core in memory: how long they hold, and who may what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest

from tickwheel.client import (
    AsyncClient,
    CancelOutcome,
    Grant,
    KeyConflict,
    KeyOutcome,
    KeyTaken,
    MessageState,
    NotFound,
    PermissionRefused,
    Receipt,
    RequestRefused,
    RescheduleOutcome,
    Right,
)
from tickwheel.client.unique_keys import KEYED_MAX
from tickwheel.proto import common_pb2
from tickwheel.testing import FakeCluster, SyncFakeCluster

START = datetime(2030, 3, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    """A fresh one."""
    async with FakeCluster(start=START) as made:
        yield made


async def test_each_conflict(cluster: FakeCluster) -> None:
    """Refused with the holder, the holder used, the holder cancelled; another topic is free."""
    client = cluster.client
    first = await client.schedule("t", "1", delay=HOUR, unique_key="k", key="search")
    assert first.key_outcome is KeyOutcome.FREE
    with pytest.raises(KeyTaken) as caught:
        await client.schedule("t", "2", delay=2 * HOUR, unique_key="k")
    assert (caught.value.id, caught.value.due) == (first.id, START + HOUR)
    assert (caught.value.topic, caught.value.unique_key) == ("t", "k")
    used = await client.schedule("t", "3", delay=HOUR, unique_key="k", on_key_conflict=KeyConflict.USE_EXISTING)
    assert used == Receipt(first.id, first.due_ms, key_outcome=KeyOutcome.USED_EXISTING)
    last = await client.schedule("t", "4", delay=3 * HOUR, unique_key="k", on_key_conflict=KeyConflict.REPLACE)
    assert last.key_outcome is KeyOutcome.REPLACED and last.due == START + 3 * HOUR
    assert (await client.schedule("u", "5", delay=HOUR, unique_key="k")).key_outcome is KeyOutcome.FREE
    shown = [m async for m in client.list_pending("t", content=True)]
    assert [(m.id, m.payload, m.unique_key, m.key) for m in shown] == [(last.id, b"4", "k", "")]
    of_first = await client.get(first.id, content=True)
    assert (of_first.state, of_first.payload) == (MessageState.CANCELLED, b"1"), "an id keeps its content"
    assert await client.cancel(first.id) is CancelOutcome.CANCELLED
    assert await client.reschedule(first.id, delay=HOUR) == (RescheduleOutcome.CANCELLED, None)
    await cluster.clock.advance(hours=4)
    assert [(d.payload, d.unique_key) for d in await cluster.take("t")] == [(b"4", "k")]


async def test_a_key_is_free_when_its_time_has_come(cluster: FakeCluster) -> None:
    """Dispatched, not settled: the key is free. Cancelled: free. Moved: held."""
    client = cluster.client
    await client.schedule("t", "1", delay=HOUR, unique_key="k")
    await cluster.clock.advance(minutes=59)
    with pytest.raises(KeyTaken):
        await client.schedule("t", "2", delay=HOUR, unique_key="k")
    await cluster.clock.advance(minutes=1)
    second = await client.schedule("t", "3", delay=HOUR, unique_key="k")
    assert await client.cancel(second.id) is CancelOutcome.CANCELLED
    third = await client.schedule("t", "4", delay=HOUR, unique_key="k")
    outcome, moved = await client.reschedule(third.id, delay=2 * HOUR)
    assert outcome is RescheduleOutcome.RESCHEDULED and moved is not None
    with pytest.raises(KeyTaken) as caught:
        await client.schedule("t", "5", delay=HOUR, unique_key="k")
    assert (caught.value.id, caught.value.due_ms) == (moved.id, moved.due_ms)


async def test_a_key_held_until_it_is_settled(cluster: FakeCluster) -> None:
    """Through a retry, by every group. The message cannot be replaced, moved or cancelled any more meanwhile."""
    client = cluster.client
    for group in ("a", "b"):
        await client.admin.create_group(group, ["t"])
    held = await client.schedule("t", "1", delay=HOUR, unique_key="k", key_until_settled=True)
    async with client.consumer("a", "t") as first, client.consumer("b", "t") as second:
        of_first, of_second = aiter(first), aiter(second)
        await cluster.clock.advance(hours=1)
        await (await anext(of_second)).ack()
        await (await anext(of_first)).nack()
        for conflict in (KeyConflict.REFUSE, KeyConflict.REPLACE):
            with pytest.raises(KeyTaken) as caught:
                await client.schedule("t", "2", delay=HOUR, unique_key="k", on_key_conflict=conflict)
            assert caught.value.id == held.id
        assert (await client.cancel_by_key("t", "k")).outcome is CancelOutcome.ALREADY_DISPATCHED
        assert (await client.reschedule_by_key("t", "k", delay=HOUR)).outcome is RescheduleOutcome.ALREADY_DISPATCHED
        await cluster.clock.advance(minutes=1)
        delivery = await anext(of_first)
        assert delivery.attempt == 2
        await delivery.ack()
        await cluster.clock.advance(minutes=1)
        assert (await client.schedule("t", "3", delay=HOUR, unique_key="k")).key_outcome is KeyOutcome.FREE


async def test_by_key(cluster: FakeCluster) -> None:
    """Found, moved, cancelled; then nobody holds it. A key of another topic, and one that there never was."""
    client = cluster.client
    receipt = await client.schedule("t", "x", delay=HOUR, unique_key="order/7 ä")
    found = await client.get_by_key("t", "order/7 ä", content=True)
    assert (found.id, found.payload, found.unique_key) == (receipt.id, b"x", "order/7 ä")
    assert found.state is MessageState.PENDING and (await client.get_by_key("t", "order/7 ä")).payload is None
    assert (await client.get_by_key("t", "order/7 ä")).unique_key == "order/7 ä"
    outcome, moved = await client.reschedule_by_key("t", "order/7 ä", at=START + 5 * HOUR)
    assert outcome is RescheduleOutcome.RESCHEDULED and moved is not None and moved.due == START + 5 * HOUR
    assert (await client.get_by_key("t", "order/7 ä")).due == START + 5 * HOUR
    assert (await client.get(receipt.id)).due == START + 5 * HOUR
    for topic, key in (("u", "order/7 ä"), ("t", "other")):
        assert await client.cancel_by_key(topic, key) == (CancelOutcome.NOT_FOUND, "")
        assert await client.reschedule_by_key(topic, key, delay=HOUR) == (RescheduleOutcome.NOT_FOUND, None)
        with pytest.raises(NotFound):
            await client.get_by_key(topic, key)
    assert await client.cancel_by_key("t", "order/7 ä") == (CancelOutcome.CANCELLED, moved.id)
    assert (await client.get(receipt.id)).state is MessageState.CANCELLED
    assert await client.cancel_by_key("t", "order/7 ä") == (CancelOutcome.NOT_FOUND, "")
    assert await client.reschedule_by_key("t", "order/7 ä", delay=HOUR) == (RescheduleOutcome.NOT_FOUND, None)
    with pytest.raises(NotFound):
        await client.get_by_key("t", "order/7 ä")


async def test_many_at_once(cluster: FakeCluster) -> None:
    """Concurrent callers, a producer's rows, columns: each message has its own outcome, in order."""
    client = cluster.client
    results = await asyncio.gather(
        *(client.schedule("t", str(n), delay=HOUR, unique_key=f"k{n % 3}") for n in range(9)), return_exceptions=True
    )
    assert [type(result) for result in results] == [Receipt] * 3 + [KeyTaken] * 6
    holders = [result.id for result in results if isinstance(result, Receipt)]
    assert [result.id for result in results if isinstance(result, KeyTaken)] == holders * 2
    async with client.producer() as producer:
        sent = [
            await producer.send("t", "a", delay=HOUR, unique_key="k0"),
            await producer.send("t", "b", delay=HOUR, unique_key="new"),
            await producer.send("t", "c", delay=HOUR, unique_key="new", on_key_conflict="replace"),
            await producer.send("t", "d", delay=HOUR),
        ]
        refused, *others = await asyncio.gather(*sent, return_exceptions=True)
        assert isinstance(refused, KeyTaken) and refused.id == holders[0]
        assert [o.key_outcome for o in others if isinstance(o, Receipt)] == ["FREE", "REPLACED", "FREE"]
        metas = [common_pb2.MessageMeta(unique_key=key).SerializeToString() for key in ("k1", "", "newer", "newer")]
        due_ms = [round((START + HOUR).timestamp() * 1_000)] * 4
        sizes = [len(meta) for meta in metas]
        for conflict, wanted in (
            (None, ["REFUSED", "FREE", "FREE", "REFUSED"]),
            ("use_existing", ["USED_EXISTING", "FREE", "USED_EXISTING", "USED_EXISTING"]),
            ("replace", ["REPLACED", "FREE", "REPLACED", "REPLACED"]),
        ):
            columns = await producer.schedule_columns(
                "t", due_ms, [1] * 4, b"wxyz", meta_sizes=sizes, metas=b"".join(metas), on_key_conflict=conflict
            )
            receipt = await columns
            assert receipt.outcomes() == wanted
            if conflict is None:
                assert receipt.texts()[0] == holders[1] and receipt.texts()[2] == receipt.texts()[3]
    keys = [message.unique_key async for message in client.list_pending("t", meta=True) if message.unique_key]
    assert sorted(keys) == ["k0", "k1", "k2", "new", "newer"]
    moved = await asyncio.gather(*(client.reschedule_by_key("t", key, delay=2 * HOUR) for key in [*keys, "none"]))
    assert [outcome for outcome, _ in moved] == [RescheduleOutcome.RESCHEDULED] * 5 + [RescheduleOutcome.NOT_FOUND]
    cancelled = await asyncio.gather(*(client.cancel_by_key("t", key) for key in [*keys, "none"]))
    assert [message_id for _, message_id in cancelled[:5]] == [receipt.id for _, receipt in moved if receipt]
    assert cancelled[5] == (CancelOutcome.NOT_FOUND, "")


async def test_more_keys_than_a_node_takes_at_once(cluster: FakeCluster) -> None:
    """A producer cuts its batches; columns are refused with the limit, and the stream goes on."""
    client, count = cluster.client, KEYED_MAX + 1
    async with client.producer(batch_messages_max=10_000, linger_ms=1_000) as producer:
        sent = [await producer.send("t", b"x", delay=HOUR, unique_key=f"k{number}") for number in range(count)]
        metas = [common_pb2.MessageMeta(unique_key=f"c{number}").SerializeToString() for number in range(count)]
        columns = await producer.schedule_columns(
            "t", None, [1] * count, b"x" * count, delay_ms=[3_600_000] * count,
            meta_sizes=[len(meta) for meta in metas], metas=b"".join(metas),
        )  # fmt: skip
        receipts = await asyncio.gather(*sent)
        assert {receipt.key_outcome for receipt in receipts} == {KeyOutcome.FREE}
        with pytest.raises(RequestRefused) as caught:
            await columns
        assert str(KEYED_MAX) in caught.value.limit and caught.value.value == str(count)
        assert (await producer.schedule("t", b"x", delay=HOUR)).id
    assert (await client.count_pending("t")).total == count + 1


async def test_rights(cluster: FakeCluster) -> None:
    """To replace needs the right to cancel; the others need what they need by id."""
    admin = cluster.client
    everything = Grant((Right.SCHEDULE, Right.CANCEL, Right.READ), topics=("t",))
    for name, grant in (("sender", Grant((Right.SCHEDULE,), topics=("t",))), ("owner", everything)):
        await admin.access.set_role(name, [grant])
        await admin.access.set_user(name, roles=[name])
    await admin.access.set_user("root", roles=["administrator"])
    tokens = {name: (await admin.access.create_token(name)).secret for name in ("sender", "owner", "root")}
    async with AsyncClient(cluster.address, token=tokens["root"]) as root:
        await root.admin.create_topic("t")
        await admin.admin.update_settings(rights=True)
    async with (
        AsyncClient(cluster.address, token=tokens["sender"]) as sender,
        AsyncClient(cluster.address, token=tokens["owner"]) as owner,
    ):
        first = await sender.schedule("t", "1", delay=HOUR, unique_key="k")
        with pytest.raises(KeyTaken):
            await sender.schedule("t", "2", delay=HOUR, unique_key="k")
        results = await asyncio.gather(
            sender.schedule("t", "3", delay=HOUR, unique_key="k", on_key_conflict="replace"),
            sender.schedule("t", "4", delay=HOUR),
            sender.cancel_by_key("t", "k"),
            sender.reschedule_by_key("t", "k", delay=HOUR),
            sender.get_by_key("t", "k"),
            return_exceptions=True,
        )
        assert [type(result) for result in results] == [PermissionRefused, Receipt] + [PermissionRefused] * 3
        assert (await owner.get_by_key("t", "k")).id == first.id
        replaced = await owner.schedule("t", "5", delay=HOUR, unique_key="k", on_key_conflict="replace")
        assert await owner.cancel_by_key("t", "k") == (CancelOutcome.CANCELLED, replaced.id)


async def test_wrong_names(cluster: FakeCluster) -> None:
    """Refused by the node too, with the field."""
    with pytest.raises(RequestRefused) as caught:
        await cluster.client.cancel_by_key("", "k")
    assert "topic" in caught.value.field


def test_the_blocking_client_does_the_same() -> None:
    """Receipts, errors and results are those of the other client."""
    with SyncFakeCluster(start=START) as cluster:
        client = cluster.client
        receipt = client.schedule("t", "1", delay=HOUR, unique_key="k")
        with pytest.raises(KeyTaken) as caught:
            client.schedule("t", "2", delay=HOUR, unique_key="k")
        assert caught.value.id == receipt.id
        assert client.get_by_key("t", "k").id == receipt.id
        outcome, moved = client.reschedule_by_key("t", "k", delay=2 * HOUR)
        assert outcome is RescheduleOutcome.RESCHEDULED and moved is not None
        with client.producer() as producer:
            used = producer.schedule("t", "3", delay=HOUR, unique_key="k", on_key_conflict=KeyConflict.USE_EXISTING)
            assert (used.id, used.key_outcome) == (moved.id, KeyOutcome.USED_EXISTING)
            with pytest.raises(KeyTaken):
                producer.send("t", "4", delay=HOUR, unique_key="k").result(60)
        assert client.cancel_by_key("t", "k") == (CancelOutcome.CANCELLED, moved.id)
        client.schedule("t", "5", delay=HOUR, unique_key="k")
        cluster.clock.advance(hours=1)
        assert [delivery.unique_key for delivery in cluster.take("t")] == ["k"]
