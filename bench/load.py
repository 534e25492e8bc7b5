"""Load generator and consumer of the benchmark, over the public client."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tickwheel.bench.figures import NEW_MASTER
from tickwheel.bench.measure import steady_rate
from tickwheel.client import AsyncClient, BatchReceipt, DeliveredBatch, Receipt, TickwheelError
from tickwheel.client.ids import id64_of_text

TOPIC = "bench"
GROUP = "bench"
PAYLOAD_BYTES = 256
CREDITS = 40_000
BATCH_MESSAGES_MAX = 4_096
"""Messages of a batch that a consumer is given, at most."""
WAITING_MAX = 16
"""Batches of columns under way."""
CALLERS = 64
ROWS_AT_ONCE_MAX = 1_000
"""Rows that are sent before the loop does other work."""
ROWS_PERIOD_S = 0.01
"""At a given rate rows are sent this often."""
LOOK_S = 0.01
ROWS_BYTES_MAX = 8 << 20
"""Bytes of rows that wait in the client; with more, the oldest would wait for a second."""

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
BATCH = 4_096
"""Messages in a batch of columns."""

Due = Callable[[np.random.Generator, int, int], NDArray[np.int64]]
"""Due times of n messages: `due(rng, now_ms, n)`, each a drawn time after `now_ms`."""
Metas = Callable[[int], tuple[NDArray[np.uint32], bytes]]
"""Sizes and bytes of the serialized metas of the next n messages."""


def now_ms() -> int:
    """Wall clock, as the nodes of this machine have it."""
    return time.time_ns() // 1_000_000


DRAWN = 1_000
"""Due times that callers of single messages draw at a time."""


def spread(first_ms: int, width_ms: int) -> Due:
    """Due times at random, evenly, from `first_ms` ahead to `width_ms` later."""
    return lambda rng, now, count: now + first_ms + rng.integers(0, width_ms, count)


@dataclass(slots=True)
class Scheduled:
    """Messages that the cluster acknowledged to the generator."""

    messages: int = 0
    failed: int = 0
    """Calls and rows without an acknowledgement. A failed batch of columns ends the run."""
    seconds: float = 0.0
    batches: list[NDArray[np.uint64]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """Ids of messages that were acknowledged one by one."""
    call_ms: list[float] = field(default_factory=list)
    """How long each call took."""

    @property
    def rate(self) -> float:
        """Acknowledged messages a second."""
        return self.messages / self.seconds if self.seconds else 0.0

    def ids(self) -> NDArray[np.uint64]:
        """Of all acknowledged messages."""
        return np.concatenate([*self.batches, np.array([id64_of_text(text) for text in self.texts], np.uint64)])


async def schedule_columns(
    client: AsyncClient,
    seconds: float,
    batch: int,
    due: Due,
    rate: float = 0.0,
    payload_bytes: int = PAYLOAD_BYTES,
    stop: asyncio.Event | None = None,
    messages_max: int = 0,
    topic: str = TOPIC,
    metas: Metas | None = None,
) -> Scheduled:
    """Stream column batches for `seconds`, or until `stop` or `messages_max`. Rate 0: as fast as possible."""
    rng = np.random.default_rng(1)
    payloads, sizes = bytes(payload_bytes * batch), np.full(batch, payload_bytes, np.uint32)
    result = Scheduled()
    waiting: deque[asyncio.Future[BatchReceipt]] = deque()
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
            meta_sizes, meta = metas(batch) if metas is not None else (None, b"")
            due_ms = due(rng, now_ms(), batch)
            future = await producer.schedule_columns(topic, due_ms, sizes, payloads, meta_sizes=meta_sizes, metas=meta)
            waiting.append(future)
            sent += batch
            while len(waiting) > WAITING_MAX:
                result.batches.append((await waiting.popleft()).ids)
        for future in waiting:
            result.batches.append((await future).ids)
        result.messages, result.seconds = sent, time.perf_counter() - began
    return result


async def send_rows(
    client: AsyncClient,
    seconds: float,
    due: Due,
    rate: float = 0.0,
    payload_bytes: int = PAYLOAD_BYTES,
    topics: Sequence[str] = (TOPIC,),
) -> Scheduled:
    """`Producer.send` for each message, to each topic in turn; each message is acknowledged on its own.

    Rate 0: as fast as possible.
    """
    rng = np.random.default_rng(2)
    payload, piece = bytes(payload_bytes), min(ROWS_AT_ONCE_MAX, max(1, round(rate * ROWS_PERIOD_S)))
    if not rate:
        piece = ROWS_AT_ONCE_MAX
    result = Scheduled()
    waiting: deque[asyncio.Future[Receipt]] = deque()

    def take(future: asyncio.Future[Receipt]) -> None:
        if future.exception() is None:
            result.texts.append(future.result().id)
            result.messages += 1
        else:
            result.failed += 1

    async with client.producer(buffer_bytes_max=ROWS_BYTES_MAX) as producer:
        began = time.perf_counter()
        sent = 0
        while (elapsed := time.perf_counter() - began) < seconds:
            await asyncio.sleep(max(0.0, sent / rate - elapsed) if rate else 0.0)
            for number, due_ms in enumerate(due(rng, now_ms(), piece).tolist(), sent):
                waiting.append(await producer.send(topics[number % len(topics)], payload, due_ms=due_ms))
            sent += piece
            while waiting and waiting[0].done():
                take(waiting.popleft())
        for future in waiting:
            with contextlib.suppress(TickwheelError):  # counted by `take`
                await future
            take(future)
        result.seconds = time.perf_counter() - began
    return result


async def call_unary(
    clients: Sequence[AsyncClient],
    seconds: float,
    due: Due,
    rate: float = 0.0,
    payload_bytes: int = PAYLOAD_BYTES,
    callers: int = CALLERS,
    unique_keys: bool = False,
) -> Scheduled:
    """`AsyncClient.schedule` by this many callers at once, spread over the clients; each waits for its answer.

    Rate 0: as fast as possible.
    """
    rng = np.random.default_rng(3)
    payload, result, sent = bytes(payload_bytes), Scheduled(), 0
    drawn: list[int] = []
    began = time.perf_counter()

    def due_ms() -> int:
        if not drawn:  # a draw of one takes a quarter of all the processor time of this program
            drawn.extend(due(rng, 0, DRAWN).tolist())
        return now_ms() + drawn.pop()

    async def call(client: AsyncClient) -> None:
        nonlocal sent
        while time.perf_counter() - began < seconds:
            mine, sent = sent, sent + 1
            if rate and (ahead_s := mine / rate - (time.perf_counter() - began)) > 0:
                await asyncio.sleep(ahead_s)
            key = f"call-{mine}" if unique_keys else None
            at = time.perf_counter()
            try:
                receipt = await client.schedule(TOPIC, payload, due_ms=due_ms(), unique_key=key)
            except TickwheelError:
                result.failed += 1
                continue
            result.call_ms.append((time.perf_counter() - at) * 1_000)
            result.texts.append(receipt.id)

    await asyncio.gather(*(call(clients[number % len(clients)]) for number in range(callers)))
    result.messages, result.seconds = len(result.texts), time.perf_counter() - began
    return result


@dataclass(slots=True)
class Consumed:
    """Deliveries that a consumer group saw and settled."""

    settled: int = 0
    unanswered: int = 0
    """Deliveries whose settlement is under way."""
    late_ms: list[NDArray[np.int64]] = field(default_factory=list)
    ids: list[NDArray[np.uint64]] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    terms: list[int] = field(default_factory=list)
    """The term of the master that sent each batch."""

    def clear(self) -> None:
        """Start counting from zero. Settlements under way stay counted."""
        self.settled = 0
        self.late_ms, self.ids, self.arrivals_s, self.terms = [], [], [], []

    def in_order(self) -> Consumed:
        """A copy with the batches in the order of their arrival, for figures."""
        order = np.argsort(self.arrivals_s, kind="stable").tolist()
        return Consumed(
            late_ms=[self.late_ms[place] for place in order],
            ids=[self.ids[place] for place in order],
            arrivals_s=[self.arrivals_s[place] for place in order],
        )

    def elections(self) -> list[tuple[float, str]]:
        """Marks for a plot: when the first batch of each new master came."""
        later = zip(self.arrivals_s[1:], self.terms, self.terms[1:], strict=False)
        return [(at_s, NEW_MASTER) for at_s, before, term in later if term > before]

    def lateness(self) -> NDArray[np.int64]:
        """The lateness of every delivery, in ms."""
        return np.concatenate(self.late_ms) if self.late_ms else np.zeros(0, np.int64)

    def delivered(self) -> NDArray[np.uint64]:
        """Ids of the different messages that came, in ascending order."""
        return np.unique(np.concatenate(self.ids)) if self.ids else np.zeros(0, np.uint64)

    def repeats(self) -> int:
        """Deliveries of a message beyond its first."""
        return sum(map(len, self.ids)) - len(self.delivered())

    def lost(self, scheduled: Scheduled) -> int:
        """Number of acknowledged messages that did not come."""
        return len(np.setdiff1d(scheduled.ids(), self.delivered()))

    async def drained(self, messages: int, within_s: float) -> bool:
        """Wait until this many different messages have come and every settlement is answered. False: they have not."""
        end_s, wanted = time.perf_counter() + within_s, messages
        while time.perf_counter() < end_s:
            came = sum(map(len, self.ids))
            if came >= wanted and not self.unanswered:
                wanted = messages + self.repeats()
                if came >= wanted:
                    return True
            await asyncio.sleep(LOOK_S)
        return False

    def rate(self) -> float:
        """Deliveries a second, without the ramps at both ends."""
        return steady_rate(np.array(self.arrivals_s), np.array([len(ids) for ids in self.ids], np.int64))


async def consume(
    client: AsyncClient,
    consumed: Consumed,
    *,
    group: str = GROUP,
    topics: Sequence[str] = (TOPIC,),
    credits: int = CREDITS,
    one_by_one: bool = False,
) -> None:
    """Take batches and acknowledge them, whole or message by message, until cancelled."""
    settling: set[asyncio.Task[None]] = set()

    async def settle(batch: DeliveredBatch) -> None:
        if one_by_one:
            # Acknowledgements made at about the same time share a receipt, even across batches.
            await asyncio.gather(*(delivery.ack() for delivery in batch))
            settled = len(batch)
        else:
            settled = (await batch.ack()).settled
        consumed.unanswered -= len(batch)
        assert settled <= len(batch)
        consumed.settled += settled

    async with client.consumer(group, topics, credits=credits, batch_messages_max=BATCH_MESSAGES_MAX) as consumer:
        async for batch in consumer.batches():
            consumed.late_ms.append(now_ms() - batch.due_ms)
            consumed.ids.append(batch.ids)
            consumed.arrivals_s.append(time.perf_counter())
            consumed.terms.append(batch.term)
            consumed.unanswered += len(batch)
            task = asyncio.create_task(settle(batch))
            settling.add(task)
            task.add_done_callback(settling.discard)


@contextlib.asynccontextmanager
async def consuming(
    client: AsyncClient, consumed: Consumed, *, topics: Sequence[str] = (TOPIC,), one_by_one: bool = False
) -> AsyncIterator[asyncio.Task[None]]:
    """Runs a consumer during the block. Its error, if any, is raised at the end."""
    task = asyncio.create_task(consume(client, consumed, topics=topics, one_by_one=one_by_one))
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
