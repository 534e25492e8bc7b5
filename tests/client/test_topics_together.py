"""A consumer of many topics: a batch of several topics comes to callers as batches of one each, and acknowledgements of
the same moment leave as one settlement. With an older node everything goes topic by topic."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.client.fake_node import FakeNode
from tickwheel.client import AsyncClient
from tickwheel.client import consumer as consumer_module
from tickwheel.client.consumer import Consumer
from tickwheel.client.delivery import DeliveredBatch
from tickwheel.client.errors import PermissionRefused

TOPICS = ("a", "b", "c")


async def scheduled(client: AsyncClient) -> None:
    """Two messages in each topic."""
    for payload in (b"1", b"2"):
        for topic in TOPICS:
            await client.schedule(topic, topic.encode() + payload, delay_ms=0)


async def batches(consumer: Consumer, messages: int) -> list[DeliveredBatch]:
    """The next batches, up to so many messages."""
    found: list[DeliveredBatch] = []
    async for batch in consumer.batches():
        found.append(batch)
        if sum(map(len, found)) == messages:
            return found
    raise AssertionError("the consumer ended")


async def test_batches_have_one_topic_and_settle_together(nodes: list[FakeNode]) -> None:
    """Each batch has its own receipt, though one settlement carried them all."""
    nodes[0].mixes = True
    async with AsyncClient(nodes[0].address) as client:
        await scheduled(client)
        async with client.consumer("g", TOPICS) as consumer:
            found = await batches(consumer, 6)
            assert [(batch.topic, batch.payloads()) for batch in found] == [
                (topic, [topic.encode() + b"1", topic.encode() + b"2"]) for topic in TOPICS
            ]
            receipts = await asyncio.gather(*(batch.ack() for batch in found))
    assert [(receipt.settled, receipt.stale) for receipt in receipts] == [(2, 0)] * 3
    (settle,) = nodes[0].settles
    assert list(settle.topics) == list(TOPICS) and not settle.topic
    assert np.frombuffer(settle.topic_counts, "<u4").tolist() == [2, 2, 2]
    assert len(nodes[0].state.settled) == 6


async def test_single_acknowledgements_share_it_too(nodes: list[FakeNode]) -> None:
    nodes[0].mixes = True
    async with AsyncClient(nodes[0].address) as client:
        await scheduled(client)
        async with client.consumer("g", TOPICS) as consumer:
            found = await batches(consumer, 6)
            await asyncio.gather(*(delivery.ack() for batch in found for delivery in batch))
    assert len(nodes[0].settles) == 1 and len(nodes[0].state.settled) == 6


async def test_so_many_single_acknowledgements_leave_together(
    nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than a node accepts in one settlement, however many messages a program acknowledges at once."""
    monkeypatch.setattr(consumer_module, "ACKS_AT_ONCE_MAX", 4)
    async with AsyncClient(nodes[0].address) as client:
        for number in range(10):
            await client.schedule("a", b"%d" % number, delay_ms=0)
        async with client.consumer("g", "a") as consumer:
            found = await batches(consumer, 10)
            receipts = await asyncio.gather(*(delivery.ack() for batch in found for delivery in batch))
    assert [len(settle.ids) // 8 for settle in nodes[0].settles] == [4, 4, 2]
    assert [receipt.settled for receipt in receipts] == [4] * 8 + [2] * 2
    assert len(nodes[0].state.settled) == 10


async def test_an_older_node_is_never_sent_what_it_does_not_know(nodes: list[FakeNode]) -> None:
    """The fake node of before refuses the new fields as a real one does."""
    async with AsyncClient(nodes[0].address) as client:
        await scheduled(client)
        async with client.consumer("g", TOPICS) as consumer:
            found = await batches(consumer, 6)
            receipts = await asyncio.gather(*(batch.ack() for batch in found))
    assert [receipt.settled for receipt in receipts] == [len(batch) for batch in found]
    assert {settle.topic for settle in nodes[0].settles} == set(TOPICS)


async def test_an_older_master_gets_an_unanswered_settlement_topic_by_topic(nodes: list[FakeNode]) -> None:
    """In a rolling upgrade: the answer to a settlement of several topics is lost, and the next master is older."""
    nodes[0].mixes = True
    nodes[0].drop_answers = 1
    async with AsyncClient([node.address for node in nodes]) as client:
        await scheduled(client)
        async with client.consumer("g", TOPICS) as consumer:
            found = await batches(consumer, 6)
            acks = [batch.ack() for batch in found]
            nodes[1].lead(knows_leases=True)
            receipts = await asyncio.gather(*acks)
    assert [receipt.settled for receipt in receipts] == [2, 2, 2]
    assert sorted(settle.topic for settle in nodes[1].settles) == list(TOPICS)


async def test_a_refusal_of_one_topic_fails_no_acknowledgement_of_another(nodes: list[FakeNode]) -> None:
    """A node refuses a settlement as a whole, for example if the right to one of its topics was taken away."""
    nodes[0].mixes = True
    nodes[0].forbidden = "b"
    async with AsyncClient(nodes[0].address) as client:
        await scheduled(client)
        async with client.consumer("g", TOPICS) as consumer:
            found = await batches(consumer, 6)
            answers = await asyncio.gather(*(batch.ack() for batch in found), return_exceptions=True)
    refused = {batch.topic for batch, answer in zip(found, answers, strict=True) if isinstance(answer, Exception)}
    assert refused == {"b"} and isinstance(answers[1], PermissionRefused)
    assert len(nodes[0].state.settled) == 4


async def test_what_a_busy_node_refuses_stays_together(nodes: list[FakeNode]) -> None:
    """A settlement that it wants later comes again as one, not topic by topic."""
    nodes[0].mixes = True
    nodes[0].busy_settles = 2
    async with AsyncClient(nodes[0].address) as client:
        await scheduled(client)
        async with client.consumer("g", TOPICS) as consumer:
            found = await batches(consumer, 6)
            receipts = await asyncio.gather(*(batch.ack() for batch in found))
    assert [receipt.settled for receipt in receipts] == [2] * 3
    assert [list(settle.topics) for settle in nodes[0].settles] == [list(TOPICS)] * 3
