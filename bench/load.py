"""Load generator and consumer of the benchmark, over the public client."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
import numpy as np
from numpy.typing import NDArray

from tickwheel.client import AsyncClient
from tickwheel.proto import common_pb2, scheduler_pb2
from tickwheel.proto.scheduler_pb2_grpc import SchedulerStub

TOPIC = "bench"
GROUP = "bench"
PAYLOAD_BYTES = 256
WAITING_MAX = 16


def now_ms() -> int:
    """Wall clock, as the nodes of this machine have it."""
    return time.time_ns() // 1_000_000


@dataclass(slots=True)
class Scheduled:
    """Messages that the cluster acknowledged to the generator."""

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
    payload_bytes: int = PAYLOAD_BYTES,
    stop: asyncio.Event | None = None,
    messages_max: int = 0,
) -> Scheduled:
    """Stream column batches for so long, or until `stop` or so many messages; `due(rng, now_ms, n)` gives their times.

    Rate 0: as fast as it goes.
    """
    rng = np.random.default_rng(1)
    payloads, sizes = bytes(payload_bytes * batch), np.full(batch, payload_bytes, np.uint32)
    result = Scheduled()
    waiting: deque[asyncio.Future[object]] = deque()
    async with client.producer() as producer:
        began = time.perf_counter()
        sent = 0
        while True:
            elapsed = time.perf_counter() - began
            over = stop.is_set() if stop is not None else elapsed >= seconds
            if over or (messages_max and sent >= messages_max):
                break
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


async def schedule_rows(address: str, seconds: float, batch: int, first_ms: int, width_ms: int) -> Scheduled:
    """Stream row batches for so long to the master itself; the batches are made before, for the node is measured."""
    rng = np.random.default_rng(2)
    result = Scheduled()
    made = []
    for _ in range(32):
        due = now_ms() + first_ms + rng.integers(0, width_ms, batch)
        messages = [common_pb2.Message(topic=TOPIC, payload=bytes(PAYLOAD_BYTES), due_ms=when) for when in due.tolist()]
        made.append(scheduler_pb2.ScheduleBatch(rows=scheduler_pb2.RowBatch(messages=messages)))
    options = [("grpc.max_send_message_length", 64 << 20)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        call = SchedulerStub(channel).ScheduleStream()  # type: ignore[call-arg]  # written to, not iterated over
        waiting = asyncio.Semaphore(WAITING_MAX)

        async def receipts() -> None:
            while isinstance(receipt := await call.read(), scheduler_pb2.BatchReceipt):
                assert not receipt.error, receipt.error
                result.messages += len(receipt.ids) // 8
                waiting.release()

        reading = asyncio.create_task(receipts())
        began = time.perf_counter()
        sent = 0
        while time.perf_counter() - began < seconds:
            await waiting.acquire()
            await call.write(made[sent % len(made)])
            sent += 1
        await call.done_writing()
        await reading
        result.seconds = time.perf_counter() - began
    return result


@dataclass(slots=True)
class Consumed:
    """Deliveries that the consumer saw and settled."""

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
