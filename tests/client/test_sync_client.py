"""The synchronous client, against fake nodes on a loop of another thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.client.fake_node import FakeNode, FakeState
from tickwheel.client import Client, RequestRefused


@pytest.fixture
def address() -> Iterator[str]:
    """One fake node that is master."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> FakeNode:
        node = await FakeNode(FakeState(), "n1").start()
        node.lead()
        return node

    node = asyncio.run_coroutine_threadsafe(start(), loop).result()
    yield node.address
    asyncio.run_coroutine_threadsafe(node.stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_schedule_consume_and_list(address: str) -> None:
    """Calls wait; the consumer is an iterator; nothing within the time is None."""
    with Client(address) as client:
        ids = [client.schedule("t", f"{number}", delay_ms=0).id for number in range(5)]
        assert [message.id for message in client.list_pending()] == ids
        assert client.cancel(ids[4]) == "CANCELLED"
        seen = []
        with client.consumer("g", "t") as consumer:
            for delivery in consumer:
                delivery.ack()
                seen.append(delivery.id)
                if len(seen) == 4:
                    break
            assert consumer.next(timeout_s=0.05) is None
        assert seen == ids[:4]


@pytest.mark.parametrize(
    "wrong", [{}, {"due_ms": 1, "level": 2}, {"delay_ms": -1}, {"due_ms": "soon"}, {"due_ms": 1.5}]
)
def test_wrong_times_are_refused_before_they_travel(address: str, wrong: dict[str, Any]) -> None:
    """Exactly one way to say when, a whole number within bounds: the error names the field."""
    with Client(address) as client:
        with pytest.raises(RequestRefused) as caught:
            client.schedule("t", b"x", **wrong)
        assert caught.value.field in {"when", "delay_ms", "due_ms"}
        assert caught.value.limit


def test_a_wrong_address_is_refused() -> None:
    """host:port, or a sentence; no thread stays behind."""
    before = threading.active_count()
    with pytest.raises(RequestRefused, match="host:port"):
        Client("nowhere")
    assert threading.active_count() == before
