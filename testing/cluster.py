"""A cluster in the memory of a test: the code of a real node, with a clock that the test moves.

Clients are the real ones. They are given `address`, by the test or by the program under test, and open no socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from types import TracebackType

from tickwheel.client import AsyncClient, Client, Delivery, SyncDelivery, SyncWorker, Worker
from tickwheel.testing.clock import Clock, SyncClock, milliseconds_of
from tickwheel.testing.node import MemoryNode

TAKEN_BY = "taken-by-test"


def _node(start: datetime | None, seed: int) -> MemoryNode:
    return MemoryNode(milliseconds_of("start", start or datetime.now(UTC)), seed)


async def _taken(client: AsyncClient, node: MemoryNode, topic: str, group: str) -> list[Delivery]:
    taken: list[Delivery] = []

    async def acknowledge() -> None:
        async for batch in consumer.batches():
            taken.extend(batch)
            await batch.ack()

    async with client.consumer(group, topic) as consumer:
        taking = asyncio.ensure_future(acknowledge())
        await Clock(node).advance()
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
    return taken


class FakeCluster:
    """For tests with a loop. It may be made and closed without one."""

    def __init__(self, *, start: datetime | None = None, seed: int = 0) -> None:
        """`start`: its time at first; None: now. `seed`: of its random numbers."""
        self._node = _node(start, seed)
        self._client: AsyncClient | None = None
        self.address = self._node.address
        """For clients in this process, of either kind."""
        self.clock = Clock(self._node)

    @property
    def client(self) -> AsyncClient:
        """A client of this cluster, always the same."""
        if self._client is None:
            self._client = AsyncClient(self.address)
        return self._client

    async def take(self, topic: str, group: str = TAKEN_BY) -> list[Delivery]:
        """Acknowledge all that a group can get of a topic now, and return it. A group that is new gets all that was
        ever due."""
        return await _taken(self.client, self._node, topic, group)

    @asynccontextmanager
    async def running(self, worker: Worker) -> AsyncIterator[Worker]:
        """Run a worker inside, and end it in order. Its errors raise at the end."""
        running = asyncio.ensure_future(worker.run())
        try:
            yield worker
        finally:
            worker.stop()
            await running

    def close(self) -> None:
        """End it: its clients find nobody any more. Idempotent."""
        self._node.close()

    async def __aenter__(self) -> FakeCluster:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.close()
        self.close()


class SyncFakeCluster:
    """As FakeCluster, for tests without a loop."""

    def __init__(self, *, start: datetime | None = None, seed: int = 0) -> None:
        self._node = _node(start, seed)
        self._client: Client | None = None
        self.address = self._node.address
        """For clients in this process, of either kind."""
        self.clock = SyncClock(self._node)

    @property
    def client(self) -> Client:
        """A client of this cluster, always the same."""
        if self._client is None:
            self._client = Client(self.address)
        return self._client

    def take(self, topic: str, group: str = TAKEN_BY) -> list[SyncDelivery]:
        """As `FakeCluster.take`."""
        taken = self.client.wait(_taken(self.client.asynchronous, self._node, topic, group))
        return [SyncDelivery(self.client, delivery) for delivery in taken]

    @contextmanager
    def running(self, worker: SyncWorker) -> Iterator[SyncWorker]:
        """As `FakeCluster.running`."""
        running = worker.runner.begin(worker.inner.run())
        try:
            yield worker
        finally:
            worker.stop()
            running.result()

    def close(self) -> None:
        """End it and its client. Idempotent."""
        if self._client is not None:
            self._client.close()
        self._node.close()

    def __enter__(self) -> SyncFakeCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
