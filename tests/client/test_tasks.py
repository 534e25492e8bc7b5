"""An unforeseen error in a task that nobody awaits is logged, and ends what depends on the task."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from tests.client.fake_node import FakeNode
from tickwheel.client import AsyncClient, TickwheelError, Worker
from tickwheel.client.batch_stream import BatchStream
from tickwheel.client.cluster import Cluster
from tickwheel.client.consumer import Consumer
from tickwheel.client.delivery import Delivery

SOON_S = 30.0


async def broken(*_: Any) -> None:
    """What a task does that has a mistake."""
    raise ValueError("a mistake")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The errors in the log that have a traceback."""
    return [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR and one.exc_info is not None]


@pytest.mark.parametrize("method", ["_write", "_renew_while_open", "_run"])
async def test_a_consumer_ends_with_the_error_of_each_of_its_tasks(
    nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """Else it would stay open, and settle or renew nothing."""
    monkeypatch.setattr(Consumer, method, broken)
    async with AsyncClient(nodes[0].address) as client, client.consumer("g", "t") as consumer:
        with pytest.raises(TickwheelError, match="a mistake") as caught:
            await asyncio.wait_for(anext(consumer.batches()), SOON_S)
    assert caught.value.reason == "UNFORESEEN"
    assert told(caplog)


@pytest.mark.parametrize("method", ["_write", "_run"])
async def test_a_producers_batches_fail_with_the_error_of_its_tasks(
    nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """Nobody waits for ever, and the next batch is sent."""
    async with AsyncClient(nodes[0].address) as client, client.producer() as producer:
        with monkeypatch.context() as patched:
            patched.setattr(BatchStream, method, broken)
            with pytest.raises(TickwheelError, match="a mistake"):
                await asyncio.wait_for(producer.schedule("t", b"x", delay_ms=60_000), SOON_S)
        assert told(caplog)
        await asyncio.wait_for(producer.schedule("t", b"x", delay_ms=60_000), SOON_S)


async def test_a_worker_ends_with_an_error_beside_its_handlers(
    nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its message is given back, while a worker that went on would keep it."""

    def unsettled(*_: object) -> None:
        raise ValueError("a mistake")

    async def handler(delivery: Delivery) -> None:
        pass

    monkeypatch.setattr(Worker, "_settle_once", unsettled)
    async with AsyncClient(nodes[0].address) as client:
        await client.schedule("t", b"x", delay_ms=0)
        with pytest.raises(ValueError, match="a mistake"):
            await asyncio.wait_for(Worker(client, "g", {"t": handler}).run(), SOON_S)
        assert not client._consumers
    assert told(caplog)


async def test_nodes_are_asked_for_the_master_again_after_an_error(
    nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So who watches still hears of the next one."""
    monkeypatch.setattr("tickwheel.client.cluster.TOLD_AGAIN_S", 0.0)
    channel, mistakes = Cluster.channel, ["one for each node"] * len(nodes)

    def once_broken(self: Cluster, address: str) -> Any:
        task = asyncio.current_task()
        if mistakes and getattr(task and task.get_coro(), "__qualname__", "") == "Cluster._follow":
            mistakes.pop()
            raise ValueError("a mistake")
        return channel(self, address)

    monkeypatch.setattr(Cluster, "channel", once_broken)
    moved: asyncio.Queue[str] = asyncio.Queue()
    async with AsyncClient([node.address for node in nodes]) as client:
        await client.schedule("t", b"x", delay_ms=0)
        client.cluster.watch(moved, moved.put_nowait)
        nodes[1].lead()
        while await asyncio.wait_for(moved.get(), SOON_S) != nodes[1].address:
            pass
    assert len(told(caplog)) == len(nodes) and not mistakes
