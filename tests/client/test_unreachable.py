"""A client that reaches no node says why, and within two seconds: a call by its error, a stream by its log."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator

import pytest

from tests.client.fake_node import FakeNode
from tickwheel.client import AsyncClient, ClusterUnavailable
from tickwheel.client import cluster as cluster_module
from tickwheel.client.backoff import Deadline
from tickwheel.client.cluster import Cluster

LONG_S = 60.0
"""A deadline that no test waits for."""
SAID_S = 2.0 + 10.0
"""What docs/CLIENT.md promises, and what a loaded machine adds."""


class Said(logging.Handler):
    """What the client logs, to wait for."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: asyncio.Queue[logging.LogRecord] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        if "reached" in record.getMessage() or "knows a master" in record.getMessage():
            self.records.put_nowait(record)


@pytest.fixture
def said() -> Iterator[asyncio.Queue[logging.LogRecord]]:
    """The client's lines on reaching nodes and a master, as they come."""
    logger, handler = logging.getLogger("tickwheel.client"), Said()
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler.records
    logger.removeHandler(handler)
    logger.setLevel(before)


@pytest.fixture
def addresses() -> Iterator[dict[str, str]]:
    """`refused`: nobody listens there. `unreachable`: a listener whose backlog is full answers no further attempt."""
    waiting: list[socket.socket] = []
    with socket.socket() as closed, socket.socket() as full:
        for one in (closed, full):
            one.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(full.getsockname())
        yield {name: f"127.0.0.1:{one.getsockname()[1]}" for name, one in (("refused", closed), ("unreachable", full))}
    for one in waiting:
        one.close()


async def produce(client: AsyncClient) -> None:
    """Until the message is accepted."""
    async with client.producer() as producer:
        await producer.schedule("t", b"x", delay_ms=60_000)


async def consume(client: AsyncClient) -> None:
    """Until a message comes."""
    async with client.consumer("g", "t") as consumer:
        await anext(aiter(consumer))


WORDS = [("refused", "connection refused"), ("unreachable", "unreachable: no answer to the attempt to connect")]


@pytest.mark.parametrize(("port", "words"), WORDS)
async def test_a_call_fails_with_the_reason(addresses: dict[str, str], port: str, words: str) -> None:
    """Long before its own deadline."""
    async with AsyncClient(addresses[port], timeout_s=LONG_S) as client, asyncio.timeout(SAID_S):
        with pytest.raises(ClusterUnavailable, match=f"{addresses[port]}: {words}"):
            await client.schedule("t", b"x", delay_ms=1)


@pytest.mark.parametrize("stream", [produce, consume])
@pytest.mark.parametrize(("port", "words"), WORDS)
async def test_a_stream_keeps_trying_and_logs_the_reason(
    addresses: dict[str, str],
    said: asyncio.Queue[logging.LogRecord],
    port: str,
    words: str,
    stream: Callable[[AsyncClient], Awaitable[None]],
) -> None:
    """A program that starts before its cluster does not hang without a word."""
    async with AsyncClient(addresses[port]) as client:
        streaming = asyncio.ensure_future(stream(client))
        async with asyncio.timeout(SAID_S):
            record = await said.get()
        assert record.levelno == logging.WARNING
        assert f"{addresses[port]}: {words}" in record.getMessage()
        assert not streaming.done()
        streaming.cancel()
        await asyncio.gather(streaming, return_exceptions=True)


@pytest.mark.parametrize("stream", [produce, consume])
async def test_a_stream_without_a_master_says_so_though_nodes_answer(
    nodes: list[FakeNode],
    said: asyncio.Queue[logging.LogRecord],
    monkeypatch: pytest.MonkeyPatch,
    stream: Callable[[AsyncClient], Awaitable[None]],
) -> None:
    """As when a majority is lost: an operator who waits must not think that nothing is due."""
    monkeypatch.setattr(cluster_module, "NO_MASTER_S", 0.2)
    nodes[0].state.master = None
    async with AsyncClient(nodes[0].address) as client, asyncio.timeout(LONG_S):
        streaming = asyncio.ensure_future(stream(client))
        record = await said.get()
        assert record.levelno == logging.WARNING
        assert f"{nodes[0].address}: answers, and knows no master" in record.getMessage()
        nodes[0].lead()
        assert nodes[0].address in (await said.get()).getMessage()
        assert said.empty()
        streaming.cancel()
        await asyncio.gather(streaming, return_exceptions=True)


async def test_an_outage_is_told_once_a_minute_and_its_end_once(
    nodes: list[FakeNode], said: asyncio.Queue[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many streams one client has; also when a node was reached before."""
    looks: asyncio.Queue[None] = asyncio.Queue()
    tell = Cluster._tell_unreachable

    def look(cluster: Cluster, no_master: bool) -> None:
        tell(cluster, no_master)
        looks.put_nowait(None)

    monkeypatch.setattr(Cluster, "_tell_unreachable", look)
    node = nodes[0]
    async with AsyncClient(node.address) as client, asyncio.timeout(LONG_S):
        await client.schedule("t", b"x", delay_ms=60_000)
        for one in nodes:
            await one.stop()
        streaming = [asyncio.ensure_future(stream(client)) for stream in (produce, produce, consume)]
        assert "connection refused" in (await said.get()).getMessage()
        for _ in range(10):
            await looks.get()
        assert said.empty()
        client.cluster._told = Deadline(0.0)
        assert (await said.get()).levelno == logging.WARNING
        await node.start()
        again = await said.get()
        assert again.levelno == logging.INFO and node.address in again.getMessage()
        await asyncio.gather(*streaming[:2])
        assert said.empty()
        streaming[2].cancel()
        await asyncio.gather(streaming[2], return_exceptions=True)


async def test_a_call_that_waits_with_others_says_what_is_wrong_with_the_nodes(nodes: list[FakeNode]) -> None:
    """Its deadline comes before that of the batch with which it travels."""
    async with AsyncClient(nodes[0].address) as client, asyncio.timeout(LONG_S):
        await client.schedule("t", b"x", delay_ms=60_000)
        for one in nodes:
            await one.stop()
        patient = asyncio.ensure_future(client.schedule("t", b"patient", delay_ms=60_000, timeout_s=LONG_S))
        with pytest.raises(ClusterUnavailable) as caught:
            await client.schedule("t", b"hasty", delay_ms=60_000, timeout_s=1.0)
        assert str(caught.value).startswith("not accepted within 1 s (")
        assert f"{nodes[0].address}: connection refused" in str(caught.value)
        assert not patient.done()
        patient.cancel()


async def test_a_member_without_an_address_is_passed_over() -> None:
    """A cluster may have one from a version that took any text: the others serve, and it can be removed."""
    cluster = Cluster(["127.0.0.1:1"])
    for address in ("y", "host:", ":7700", "host:0", "host:65536", "host:\u0663", "host:" + "9" * 5_000):
        cluster.add(address)
    cluster.add("127.0.0.1:2")
    assert cluster.addresses == ["127.0.0.1:1", "127.0.0.1:2"]
    await cluster.close()
