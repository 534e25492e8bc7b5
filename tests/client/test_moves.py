"""A stream that is left for another master while it is still being opened: the old address may never answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.client.fake_node import FakeNode
from tickwheel.client import AsyncClient
from tickwheel.client.cluster import Cluster

SOON_S = 10.0


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
