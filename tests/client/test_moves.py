"""A stream that is left for another master while it is still being opened: the old address may never answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.client.fake_node import FakeNode
from tickwheel.client import AsyncClient
from tickwheel.client import cluster as cluster_module
from tickwheel.client.backoff import Backoff
from tickwheel.client.cluster import Cluster
from tickwheel.proto import common_pb2

SOON_S = 30.0


@pytest.fixture
async def silent() -> AsyncIterator[str]:
    """A node that is stopped: the kernel takes connections, nobody says a word."""
    held: list[asyncio.StreamWriter] = []

    def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    for writer in held:
        writer.transport.abort()


def _point_at(cluster: Cluster, address: str, term: int) -> None:
    """As an answer of a node does."""
    cluster.learn(address, term)


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 20])
async def test_a_consumer_leaves_a_master_that_is_still_being_dialled(
    nodes: list[FakeNode], silent: str, turns: int
) -> None:
    """Wherever in its opening the news reaches it, it goes to the new master. It must neither wait for ever for the old
    one nor end without a word."""
    async with AsyncClient([nodes[0].address, silent]) as client:
        await client.schedule("t", b"x", delay_ms=0)
        _point_at(client.cluster, silent, 10)
        consumer = client.consumer("g", "t")
        coming = asyncio.ensure_future(anext(consumer.batches()))
        for _ in range(turns):
            await asyncio.sleep(0)
        if turns > 3:
            await asyncio.sleep(0.1)
        nodes[0].state.term = 11
        _point_at(client.cluster, nodes[0].address, 11)
        batch = await asyncio.wait_for(coming, SOON_S)
        assert batch.payloads() == [b"x"]
        await batch.ack()


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 20])
async def test_a_producer_leaves_a_master_that_is_still_being_dialled(
    nodes: list[FakeNode], silent: str, turns: int
) -> None:
    """The same for what is to be scheduled: it is scheduled at the new master, and its caller hears of it."""
    async with AsyncClient([nodes[0].address, silent]) as client:
        _point_at(client.cluster, silent, 10)
        producer = client.producer()
        sent = await producer.send("t", b"x", delay_ms=60_000)
        for _ in range(turns):
            await asyncio.sleep(0)
        if turns > 3:
            await asyncio.sleep(0.1)
        nodes[0].state.term = 11
        _point_at(client.cluster, nodes[0].address, 11)
        assert (await asyncio.wait_for(sent, SOON_S)).id


@pytest.mark.parametrize("older", [False, True])
async def test_a_consumer_leaves_a_master_that_hangs(nodes: list[FakeNode], *, older: bool) -> None:
    """Its stream stays open and nothing comes. The other nodes tell who leads now, also nodes that have to be asked
    again and again."""
    for node in nodes:
        node.older = older
    async with AsyncClient([node.address for node in nodes]) as client:
        await client.schedule("t", b"x", delay_ms=0)
        consumer = client.consumer("g", "t")
        batches = consumer.batches()
        await (await asyncio.wait_for(anext(batches), SOON_S)).ack()
        nodes[0].hangs = True
        nodes[1].lead()
        await client.schedule("t", b"y", delay_ms=0)
        assert (await asyncio.wait_for(anext(batches), SOON_S)).payloads() == [b"y"]


async def questions_left_open(nodes: list[FakeNode]) -> None:
    """Return once a question for another master waits at each node."""

    async def wait() -> None:
        while any(node.left_open == 0 for node in nodes):  # noqa: ASYNC110  # it only counts
            await asyncio.sleep(0.001)

    await asyncio.wait_for(wait(), SOON_S)


@pytest.mark.parametrize(("stated_ms", "least_ms", "most_ms"), [(600_000, 300_000, 600_000), (0, 30_000, 60_000)])
async def test_a_question_waits_as_long_as_the_node_allows(
    nodes: list[FakeNode], stated_ms: int, least_ms: int, most_ms: int
) -> None:
    """A node of an earlier version states nothing, and refuses more than a minute."""
    for node in nodes:
        node.wait_ms_max = stated_ms
    async with AsyncClient([node.address for node in nodes]) as client:
        client.cluster.watch("test", lambda address: None)
        await questions_left_open(nodes)
    for first_ms, *later_ms in (node.waits_ms for node in nodes):
        assert 30_000 <= first_ms <= 60_000
        assert later_ms
        assert all(least_ms <= wait_ms <= most_ms for wait_ms in later_ms)


async def test_a_call_that_waits_for_a_master_goes_on_at_once(
    nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node tells of the new master. The call does not sleep through that until its next look."""
    monkeypatch.setattr(Backoff, "next_s", lambda self, least_s=0.0: 60.0)
    nodes[0].state.master = None
    async with AsyncClient([node.address for node in nodes]) as client:
        waiting = asyncio.ensure_future(client.schedule("t", b"x", delay_ms=60_000))
        await questions_left_open(nodes)
        nodes[1].lead()
        await asyncio.wait_for(waiting, SOON_S)


async def test_watching_asks_each_node_once_while_nothing_changes(
    nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many consumers there are, and however long they wait; a change is told without another question."""
    monkeypatch.setattr(cluster_module, "WATCH_PERIOD_S", 0.001)
    # Not by a call, which might have watched for a while.
    nodes[0].state.publish("", 0, [common_pb2.Message(topic="t", payload=b"x", delay_ms=0)])
    async with AsyncClient([node.address for node in nodes]) as client:
        streams = [client.consumer(f"g{number}", "t").batches() for number in range(5)]
        for stream in streams:
            await (await asyncio.wait_for(anext(stream), SOON_S)).ack()
        await questions_left_open(nodes)
        asked = [node.asked for node in nodes]
        for _ in range(20):
            await client.schedule("u", b"z", delay_ms=0)
        assert [node.asked for node in nodes] == asked
        assert [node.left_open for node in nodes] == [1, 1, 1]
        moved = asyncio.Event()
        client.cluster.watch("test", lambda address: moved.set())
        nodes[1].lead()
        await asyncio.wait_for(moved.wait(), SOON_S)
