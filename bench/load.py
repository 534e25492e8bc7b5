"""Load generator and consumer of the benchmark, over the public client."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tickwheel.client import AsyncClient

TOPIC = "bench"
GROUP = "bench"
PAYLOAD_BYTES = 256
WAITING_MAX = 16


def now_ms() -> int:
    """Wall clock, as the nodes of this machine have it."""
    return time.time_ns() // 1_000_000


@dataclass(slots=True)
class Scheduled:
    """What the generator got acknowledged."""

    messages: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Acknowledged messages a second."""
        return self.messages / self.seconds if self.seconds else 0.0


async def schedule_columns(
    client: AsyncClient,
    seconds: float,
    batch: int,
    due: Callable[[np.random.Generator, int, int], NDArray[np.int64]],
    rate: float = 0.0,
) -> Scheduled:
    """Stream column batches for so long; `due(rng, now_ms, n)` gives their times; rate 0: as fast as it goes."""
    rng = np.random.default_rng(1)
    payloads, sizes = bytes(PAYLOAD_BYTES * batch), np.full(batch, PAYLOAD_BYTES, np.uint32)
    result = Scheduled()
    waiting: deque[asyncio.Future[object]] = deque()
    async with client.producer() as producer:
        began = time.perf_counter()
        sent = 0
        while (elapsed := time.perf_counter() - began) < seconds:
            if rate and sent / rate > elapsed:
                await asyncio.sleep(sent / rate - elapsed)
            future = await producer.schedule_columns(TOPIC, due(rng, now_ms(), batch), sizes, payloads)
            waiting.append(future)  # type: ignore[arg-type]
            sent += batch
            while len(waiting) > WAITING_MAX:
                await waiting.popleft()
        while waiting:
            await waiting.popleft()
        result.messages, result.seconds = sent, time.perf_counter() - began
    return result


@dataclass(slots=True)
class Consumed:
    """What the consumer saw and had settled."""

    settled: int = 0
    late_ms: list[NDArray[np.int64]] = field(default_factory=list)
    ids: list[NDArray[np.uint64]] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    last_settled_s: float = 0.0

    def lateness(self) -> NDArray[np.int64]:
        """Of every delivery."""
        return np.concatenate(self.late_ms) if self.late_ms else np.zeros(0, np.int64)

    def repeats(self) -> int:
        """Deliveries of a message beyond its first."""
        ids = np.concatenate(self.ids) if self.ids else np.zeros(0, np.uint64)
        return len(ids) - len(np.unique(ids))


async def consume(client: AsyncClient, consumed: Consumed) -> None:
    """Take batches and acknowledge them until cancelled."""
    settling: set[asyncio.Task[None]] = set()

    async def settle(batch: object, count: int) -> None:
        receipt = await batch.ack()  # type: ignore[attr-defined]
        consumed.settled += receipt.settled
        consumed.last_settled_s = time.perf_counter()
        assert receipt.settled <= count

    async with client.consumer(GROUP, [TOPIC], credits=40_000, batch_messages_max=4_096) as consumer:
        async for batch in consumer.batches():
            consumed.late_ms.append(now_ms() - batch.due_ms)
            consumed.ids.append(np.frombuffer(batch.wire.ids, "<u8"))
            consumed.arrivals_s.append(time.perf_counter())
            task = asyncio.create_task(settle(batch, len(batch)))
            settling.add(task)
            task.add_done_callback(settling.discard)
