"""ScheduleStream: receipts in the order of the batches, also of those that were joined with others' messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.node.core.trio import World
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.schedule.intake import Row, from_batch, row_of
from tickwheel.node.core.schedule.publisher import ROWS, AppliedLevels, BatchOutcome
from tickwheel.node.server.callers import EVERYBODY
from tickwheel.node.server.calls import Calls
from tickwheel.node.server.plain import plain_batch
from tickwheel.node.server.schedule_stream import (
    ROW_BYTES,
    ROWS_A_BATCH,
    ScheduleStreams,
    receipt_of,
    receipt_of_row,
)
from tickwheel.node.state.settings import Settings
from tickwheel.proto import common_pb2, scheduler_pb2

WORLD = World(80)
HOUR_MS = 3_600_000


class Batches:
    """A stream of requests of which every other one is there at once."""

    def __init__(self, requests: AsyncIterator[scheduler_pb2.ScheduleBatch | Row]) -> None:
        self._requests = requests
        self._ready: scheduler_pb2.ScheduleBatch | Row | None = None

    def now(self) -> scheduler_pb2.ScheduleBatch | Row | None:
        ready, self._ready = self._ready, None
        return ready

    async def __anext__(self) -> scheduler_pb2.ScheduleBatch | Row:
        request = await anext(self._requests)
        self._ready = await anext(self._requests, None)
        return request


class Context:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.writes: list[list[scheduler_pb2.BatchReceipt]] = []

    async def write_serialized(self, receipts: Sequence[bytes]) -> None:
        self.writes.append(list(map(scheduler_pb2.BatchReceipt.FromString, receipts)))

    @property
    def receipts(self) -> list[scheduler_pb2.BatchReceipt]:
        return [receipt for written in self.writes for receipt in written]


def batch(sequence: int, *payloads: bytes, topic: str = "t", producer: str = "") -> scheduler_pb2.ScheduleBatch:
    due_ms = WORLD.now_ms + HOUR_MS
    rows = [common_pb2.Message(topic=topic, payload=payload, due_ms=due_ms) for payload in payloads]
    return scheduler_pb2.ScheduleBatch(
        producer_id=producer, sequence=sequence, rows=scheduler_pb2.RowBatch(messages=rows)
    )


def begun(
    streams: ScheduleStreams, requests: AsyncIterator[scheduler_pb2.ScheduleBatch | Row], context: Context
) -> asyncio.Task[None]:
    """A stream of these requests."""
    return asyncio.ensure_future(streams.serve(Batches(requests), EVERYBODY, cast(Any, context)))


async def served(batches: Sequence[scheduler_pb2.ScheduleBatch | Row], room: int) -> Context:
    """What one stream of these batches is told, with at most `room` of them in work."""
    master = WORLD.elect()
    calls = Calls(lambda: cast(Any, master.host).core, master.wake, lambda wait_ms: master.wake(), lambda error: None)
    context = Context()

    async def requests() -> AsyncIterator[scheduler_pb2.ScheduleBatch | Row]:
        for one in batches:
            yield one

    task = begun(ScheduleStreams(calls, room), requests(), context)
    while not task.done():
        for _ in range(5):
            await asyncio.sleep(0)
        WORLD.run(20)
    await task
    return context


BATCHES = st.lists(
    st.tuples(st.sampled_from(["t", "u", "no good"]), st.lists(st.sampled_from([b"x", b"yy", b""]), max_size=2)),
    max_size=30,
)


@given(BATCHES, st.sampled_from([1, 7, 64]))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_each_batch_has_its_receipt_in_its_place(drawn: list[tuple[str, list[bytes]]], room: int) -> None:
    """Good and bad ones, one message or several: as many ids as messages, or its own error."""
    batches = [batch(number, *payloads, topic=topic) for number, (topic, payloads) in enumerate(drawn)]
    receipts = asyncio.run(served(batches, room)).receipts
    assert [receipt.sequence for receipt in receipts] == list(range(len(batches)))
    seen: list[int] = []
    for (topic, payloads), receipt in zip(drawn, receipts, strict=True):
        good = topic != "no good" and bool(payloads) and b"" not in payloads
        assert bool(receipt.error) != good
        ids = np.frombuffer(receipt.ids, "<u8").tolist()
        assert len(ids) == (len(payloads) if good else 0)
        seen += ids
    assert len(set(seen)) == len(seen)


async def test_a_row_is_answered_as_its_batch() -> None:
    """One that the settings refuse gets the same refusal."""
    sent = [batch(number, b"x" if number % 3 else bytes((4 << 20) + 1)) for number in range(7)]
    rows = [plain_batch(one.SerializeToString()) for one in sent]
    as_rows = await served([row for row in rows if row is not None], 64)
    as_batches = await served(sent, 64)
    for mine, other in zip(as_rows.receipts, as_batches.receipts, strict=True):
        assert (mine.sequence, mine.error, len(mine.ids)) == (other.sequence, other.error, len(other.ids))
    assert [bool(receipt.error) for receipt in as_rows.receipts] == [True, False, False] * 2 + [True]


async def test_what_is_ready_is_written_at_once() -> None:
    """Receipts of one entry leave with one write, whatever their number; a producer's sequences stay in order."""
    await served([batch(0, b"x")], 64)  # creates the topic
    context = await served([batch(number, b"x") for number in range(50)], 64)
    assert len(context.receipts) == 50 and len(context.writes) <= 5
    context = await served([batch(number, b"x") for number in range(2 * ROWS_A_BATCH)], 2)
    assert len(context.writes) <= 2, "as many as fill the room of two batches are in work at a time"
    context = await served([batch(number, bytes(ROWS_A_BATCH * ROW_BYTES)) for number in range(8)], 2)
    assert len(context.writes) >= 4, "large ones count as whole batches"
    context = await served([batch(number, b"x", producer="p") for number in range(1, 40)], 64)
    assert [bool(receipt.error) for receipt in context.receipts] == [False] * 39


@pytest.mark.parametrize("limit", ["requests", "bytes"])
async def test_streams_are_held_back_where_other_requests_are_refused(limit: str) -> None:
    """Far more batches at once than the node takes in: they wait their turn, in the order of each stream, and the queue
    stays below its limit. A message that comes by a call of its own meanwhile still finds room."""
    config = replace(CoreConfig(), segment_bytes=1 << 20)
    if limit == "requests":
        config = replace(config, intake_requests_max=64)
    else:
        config = replace(config, intake_bytes_max=1 << 17)
    world = World(81, config=config)
    master = world.elect()
    assert master.host is not None
    core = master.host.core
    calls = Calls(lambda: cast(Any, master.host).core, master.wake, lambda wait_ms: master.wake(), lambda error: None)
    streams = ScheduleStreams(calls, 64)
    payload = b"x" if limit == "requests" else bytes(4_000)

    async def requests() -> AsyncIterator[scheduler_pb2.ScheduleBatch]:
        for number in range(100):
            yield batch(number, payload)

    contexts = [Context() for _ in range(10)]
    tasks = [
        asyncio.ensure_future(streams.serve(Batches(requests()), EVERYBODY, cast(Any, context))) for context in contexts
    ]
    most, alone = 0, list[object]()
    while not all(task.done() for task in tasks):
        for _ in range(50):
            await asyncio.sleep(0)
        most = max(most, core.parts.publisher.waiting.requests)
        if len(alone) < 5:
            one = from_batch(batch(1, b"y"), core.state.settings)
            core.parts.publisher.schedule(one, Reply.either(alone.append))
        world.run(5)
    await asyncio.gather(*tasks)
    for context in contexts:
        assert [receipt.sequence for receipt in context.receipts] == list(range(100))
        assert not any(receipt.error for receipt in context.receipts)
    assert most > 10 and (limit == "bytes" or most <= 64 // 2 + 10)
    assert len(alone) >= 5 and all(isinstance(answer, BatchOutcome) for answer in alone)


async def test_streams_that_come_and_go_while_the_queue_is_crowded_leave_nothing() -> None:
    """Each waits for room and is cut. Whatever they have left behind, the core has one of it."""
    world = World(83, config=replace(CoreConfig(), segment_bytes=1 << 20, intake_requests_max=16))
    master = world.elect()
    assert master.host is not None
    core = master.host.core
    calls = Calls(lambda: core, lambda: None, lambda wait_ms: None, lambda error: None)  # nothing drains the queue
    streams = ScheduleStreams(calls, 64)

    async def requests() -> AsyncIterator[scheduler_pb2.ScheduleBatch]:
        for number in range(20):
            yield batch(number, b"x")

    for _ in range(30):
        task = begun(streams, requests(), Context())
        for _ in range(50):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert core.parts.publisher.crowded(ROWS) and len(core.parts.publisher._outside) == 1
    master.wake()
    context = Context()
    task = begun(streams, requests(), context)
    while not task.done():
        for _ in range(50):
            await asyncio.sleep(0)
        master.wake()
        world.run(5)
    assert [bool(receipt.error) for receipt in context.receipts] == [False] * 20


async def test_streams_that_wait_hear_that_the_node_leads_no_more() -> None:
    """Nobody waits for a queue that nothing drains."""
    world = World(82, config=replace(CoreConfig(), segment_bytes=1 << 20, intake_requests_max=16))
    master = world.elect()
    calls = Calls(lambda: cast(Any, master.host).core, master.wake, lambda wait_ms: master.wake(), lambda error: None)
    streams, contexts = ScheduleStreams(calls, 64), [Context() for _ in range(5)]
    world.cut_off(master.name)

    async def requests() -> AsyncIterator[scheduler_pb2.ScheduleBatch]:
        for number in range(20):
            yield batch(number, b"x")

    tasks = [
        asyncio.ensure_future(streams.serve(Batches(requests()), EVERYBODY, cast(Any, context))) for context in contexts
    ]
    for _ in range(200):
        for _ in range(50):
            await asyncio.sleep(0)
        world.run(20)
    assert all(task.done() for task in tasks)
    assert all(len(context.receipts) == 20 and context.receipts[-1].error for context in contexts)


@given(
    st.sampled_from(["due_ms", "delay_ms", "delay_level"]),
    st.integers(0, 1 << 50),
    st.integers(0, (1 << 64) - 1),
    st.integers(0, 1 << 50) | st.none(),
    st.sampled_from([0, 7, (1 << 64) - 1]),
)
def test_a_rows_receipt_is_that_of_a_batch(name: str, when: int, number: int, due: int | None, sequence: int) -> None:
    """Byte for byte."""
    due_ms = when if due is None else due
    when = min(when, 99) if name == "delay_level" else when
    fields: dict[str, Any] = {"topic": "t", "payload": b"x", name: when}
    request = scheduler_pb2.ScheduleBatch(
        sequence=sequence, rows=scheduler_pb2.RowBatch(messages=[common_pb2.Message(**fields)])
    )
    incoming, row = from_batch(request, Settings()), row_of(request, Settings())
    assert row is not None
    levels = AppliedLevels(np.array([3], np.uint32), np.array([30_000], np.int64)) if name == "delay_level" else None
    outcome = BatchOutcome(np.array([number], np.uint64), np.array([due_ms], np.int64), False, levels)
    whole = receipt_of(incoming, outcome)
    assert whole.SerializeToString() == receipt_of_row(row, number, due_ms, 3 if levels else 0, 30_000 if levels else 0)
