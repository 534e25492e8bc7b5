"""ScheduleStream: batches in, receipts out.

A stream reads no further while `stream_batches_max` batches are in work, or ROWS_A_BATCH times as many small ones of
one message: the client's flow control window then fills, so memory stays bounded. Neither does it while the node's
queue is half full and the stream's connection has its share of that: streams are held back where other requests are
refused. One writer sends the receipts in the
order of the batches, all that are ready with one write.
A batch of one message without a producer id is joined with others (joining.py).
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.kernel import not_current, told_by_master
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.schedule.intake import KIND_DUE, KIND_LEVEL, IncomingBatch, Row, from_batch, row_of
from tickwheel.node.core.schedule.joining import RowCaller
from tickwheel.node.core.schedule.publisher import ROWS, BatchOutcome
from tickwheel.node.failure import Failure, RequestError, refuse
from tickwheel.node.server.callers import Caller
from tickwheel.node.server.calls import Calls, owner_of
from tickwheel.node.server.door import RefusedRequestError
from tickwheel.node.server.errors import serialized_status
from tickwheel.node.server.plain import batch_of
from tickwheel.node.state.producers import Sender
from tickwheel.node.state.settings import BOUNDS, Settings
from tickwheel.proto import scheduler_pb2
from tickwheel.proto.access_pb2 import RIGHT_CANCEL, RIGHT_SCHEDULE
from tickwheel.transport.server import ServerStream as Context

ROWS_A_BATCH = 16
"""This many batches of one small message count as one. Otherwise a client that sends such batches would have no more
messages under way than others have batches."""
ROW_BYTES = 4 << 10
"""Size of a small message. A larger one counts as several, in proportion to its size, but at most as a whole batch."""

WIDEST = Settings(batch_messages_max=BOUNDS["batch_messages_max"][1], payload_bytes_max=BOUNDS["payload_bytes_max"][1])
"""Limits that hold a batch whatever the settings were when it was accepted."""
R = TypeVar("R", scheduler_pb2.ScheduleRequest, scheduler_pb2.ScheduleBatch)

_LITTLE_4, _LITTLE_8 = struct.Struct("<I"), struct.Struct("<Q")
_ID = struct.Struct("<2sQ").pack
_ONE_ID = b"\x12\x08"
"""BatchReceipt.ids, of eight bytes."""


def receipt_of(batch: IncomingBatch, outcome: BatchOutcome) -> scheduler_pb2.BatchReceipt:
    """The receipt of a batch. It omits the due times if all are as requested."""
    as_asked = isinstance(batch.kinds, int) and batch.kinds == KIND_DUE and np.array_equal(outcome.due_ms, batch.when)
    receipt = scheduler_pb2.BatchReceipt(
        sequence=batch.sequence,
        ids=outcome.ids.astype("<u8", copy=False).tobytes(),
        due_ms=b"" if as_asked else outcome.due_ms.astype("<i8", copy=False).tobytes(),
        repeated=outcome.repeated,
    )
    if outcome.levels is not None:
        receipt.delay_levels = outcome.levels.levels.astype("<u4", copy=False).tobytes()
        receipt.delay_ms = outcome.levels.delays_ms.astype("<i8", copy=False).tobytes()
    if outcome.keys is not None:
        receipt.key_outcomes = outcome.keys.tobytes()
    return receipt


def receipt_of_row(row: Row, number: int, due_ms: int, level: int, delay_ms: int) -> bytes:
    """As `receipt_of`, for a row's id, due time and level; serialized."""
    if row.kind == KIND_DUE and due_ms == row.when and not row.sequence:
        return _ID(_ONE_ID, number)
    receipt = scheduler_pb2.BatchReceipt(sequence=row.sequence, ids=_LITTLE_8.pack(number))
    if row.kind != KIND_DUE or due_ms != row.when:
        receipt.due_ms = _LITTLE_8.pack(due_ms)
    if row.kind == KIND_LEVEL:
        receipt.delay_levels = _LITTLE_4.pack(level)
        receipt.delay_ms = _LITTLE_8.pack(delay_ms)
    return receipt.SerializeToString()


def _refusal(sequence: int, failure: Failure) -> bytes:
    """The receipt of a batch that was refused."""
    return scheduler_pb2.BatchReceipt(sequence=sequence, error=serialized_status(failure)).SerializeToString()


def may_replace(batch: IncomingBatch, caller: Caller) -> Failure | None:
    """The refusal if messages of a batch may take the place of others, and the caller may not cancel in its topics."""
    return caller.topics(RIGHT_CANCEL, batch.topics) if batch.replaces else None


def may_schedule(batch: IncomingBatch, caller: Caller) -> Failure | None:
    """The refusal if the caller may not schedule a batch in one of its topics."""
    return caller.topics(RIGHT_SCHEDULE, batch.topics) or may_replace(batch, caller)


def state_caller(batch: IncomingBatch, caller: Caller, producer_owner: str) -> None:
    """Note in a batch who sends it."""
    batch.client = caller.name or batch.client
    batch.actor = caller.actor
    batch.connection = caller.connection
    batch.owner = owner_of(caller.name, producer_owner)


def read_batch(
    core: NodeCore, read: Callable[[R, Settings], IncomingBatch], request: R, caller: Caller
) -> IncomingBatch:
    """The batch of a request. Raises RequestError: it is invalid, or beyond the limits that hold now.

    Limits change. A node that does not surely lead may know earlier ones: it leaves the refusal to the master. A batch
    that was accepted under wider limits is returned, for the publisher to give its receipt again.
    """
    try:
        return read(request, core.state.settings)
    except RequestError as error:
        refuse(not_current(core))
        accepted = _accepted_before(core, read, request, caller)
        if accepted is not None:
            return accepted
        told = core.parts.senders.told(Sender(request.producer_id, request.sequence), error.failure)
        raise RequestError(told) from None


def _accepted_before(
    core: NodeCore, read: Callable[[R, Settings], IncomingBatch], request: R, caller: Caller
) -> IncomingBatch | None:
    """The batch of a repeat; None: it is none, or the caller has no right to it."""
    if not request.producer_id:
        return None
    try:
        batch = read(request, WIDEST)
    except RequestError:
        return None
    if caller.topics(RIGHT_SCHEDULE, batch.topics) is not None:
        return None
    state_caller(batch, caller, request.producer_owner)
    return None if core.parts.senders.known(batch.sender, batch.count) is None else batch


class Batches(Protocol):
    """The batches of a stream: each a ScheduleBatch, or a row that was read from its bytes (plain.py)."""

    def now(self) -> Any:
        """The next one, if there is no need to wait for it; else None. Raises as `anext`."""
        ...

    async def __anext__(self) -> Any: ...


@dataclass(slots=True, eq=False)
class Place:
    """The place of one batch's receipt."""

    rows: int
    receipt: bytes | None = None


class ReceiptLine:
    """The receipts of one stream: places are taken in the order of batches, filled in any order, sent in order."""

    def __init__(self, batches_max: int) -> None:
        self._places: deque[Place] = deque()
        self._room_left = batches_max * ROWS_A_BATCH
        """In rows; below 1 nothing more is read."""
        self._changed = asyncio.Event()
        self._ended = False
        self._room = asyncio.Event()
        self._room.set()

    @property
    def full(self) -> bool:
        """Whether no batch may be read for now."""
        return self._room_left <= 0

    async def wait_for_room(self) -> None:
        """Wait until another batch may be read."""
        await self._room.wait()

    def take_place(self, rows: int = ROWS_A_BATCH) -> Place:
        """Take the next place, for a later `fill`. `rows`: what it counts, at most ROWS_A_BATCH."""
        place = Place(rows)
        self._places.append(place)
        self._room_left -= rows
        if self._room_left <= 0:
            self._room.clear()
        return place

    def fill(self, place: Place, receipt: bytes) -> None:
        """Put a receipt into a place; further receipts for the place are ignored."""
        if place.receipt is not None:
            return
        place.receipt = receipt
        if self._places and self._places[0] is place:
            self._changed.set()

    def end(self) -> None:
        """No more places will be taken."""
        self._ended = True
        self._changed.set()

    async def next(self) -> list[bytes]:
        """The next receipts in order, all that are there; empty once all were returned after `end`."""
        receipts: list[bytes] = []
        while True:
            while self._places and (receipt := self._places[0].receipt) is not None:
                receipts.append(receipt)
                self._room_left += self._places.popleft().rows
            if receipts:
                if self._room_left > 0:
                    self._room.set()
                return receipts
            if self._ended and not self._places:
                return receipts
            self._changed.clear()
            await self._changed.wait()


class ScheduleStreams:
    """The schedule streams of a node."""

    def __init__(self, calls: Calls, stream_batches_max: int) -> None:
        self._calls = calls
        self._stream_batches_max = stream_batches_max
        self.open_streams = 0
        self._turn = asyncio.Lock()
        """Of the stream that is let in next while the queue is crowded."""
        self._place: asyncio.Future[None] | None = None
        """Room that was asked for. A stream that ends while it waits leaves it to the next, or streams that come and go
        would leave ever more of them in the core."""

    async def serve(self, batches: Batches, caller: Caller, context: Context) -> None:
        """Serve one stream to its end."""
        line = ReceiptLine(self._stream_batches_max)
        reader = asyncio.ensure_future(self._read(batches, line, caller))
        self.open_streams += 1
        try:
            while receipts := await line.next():
                await context.write_serialized(receipts)
            await reader
        finally:
            self.open_streams -= 1
            reader.cancel()

    async def _read(self, batches: Batches, line: ReceiptLine, caller: Caller) -> None:
        try:
            while True:
                try:
                    batch = batches.now()
                    if batch is None:
                        batch = await anext(batches)
                except StopAsyncIteration:
                    return
                except RefusedRequestError as error:
                    if not isinstance(error.message, scheduler_pb2.ScheduleBatch):
                        raise
                    self._refuse(error.message, error.failure, line.take_place(), line)
                else:
                    row, settings = batch, self._calls.core.state.settings
                    if type(batch) is not Row:
                        row = row_of(batch, settings)
                    elif len(batch.payload) > settings.payload_bytes_max:
                        row, batch = None, batch_of(batch)
                    if self._crowded(caller.connection if row is None else ROWS):
                        await self._wait_for_intake()
                    if row is None:
                        self._take(batch, line, caller)
                    else:
                        self._take_row(row, line, caller)
                if line.full:
                    await line.wait_for_room()
        finally:
            line.end()

    def _crowded(self, flow: str) -> bool:
        """Whether the node's queue is crowded for a flow. A mistake in the core is left to the batch to run into."""
        try:
            return self._calls.core.parts.publisher.crowded(flow)
        except Exception as error:
            self._calls.fault(error)
            return False

    async def _wait_for_intake(self) -> None:
        """Wait while the node's queue is crowded. One stream after the other is let in: all at once would fill it."""
        async with self._turn:
            if self._place is None or self._place.done():
                self._place = asyncio.ensure_future(self._ask_for_room())
            await asyncio.shield(self._place)

    async def _ask_for_room(self) -> None:
        # A node that serves no more refuses the batch itself.
        with suppress(RequestError):
            await self._calls.answer(lambda core: core.parts.publisher.room())

    def _refuse(self, request: scheduler_pb2.ScheduleBatch, failure: Failure, place: Place, line: ReceiptLine) -> None:
        told = self._calls.core.parts.senders.told(Sender(request.producer_id, request.sequence), failure)
        line.fill(place, _refusal(request.sequence, told))

    def _take(self, request: scheduler_pb2.ScheduleBatch, line: ReceiptLine, caller: Caller) -> None:
        sequence, place = request.sequence, line.take_place()
        try:
            batch = read_batch(self._calls.core, from_batch, request, caller)
        except RequestError as error:
            line.fill(place, _refusal(sequence, error.failure))
            return
        refusal = told_by_master(self._calls.core, may_schedule(batch, caller))
        if refusal is not None:
            line.fill(place, _refusal(sequence, refusal))
            return
        state_caller(batch, caller, request.producer_owner)

        def done(outcome: BatchOutcome) -> None:
            line.fill(place, receipt_of(batch, outcome).SerializeToString())

        def fail(failure: Failure) -> None:
            line.fill(place, _refusal(sequence, failure))

        calls = self._calls
        calls.serve_for_log(fail, lambda: calls.core.parts.publisher.schedule(batch, Reply(done, fail)))

    def _take_row(self, row: Row, line: ReceiptLine, caller: Caller) -> None:
        place = line.take_place(min(ROWS_A_BATCH, 1 + len(row.payload) // ROW_BYTES))

        def fail(failure: Failure) -> None:
            line.fill(place, _refusal(row.sequence, failure))

        def placed(number: int, due_ms: int, level: int, delay_ms: int) -> None:
            line.fill(place, receipt_of_row(row, number, due_ms, level, delay_ms))

        free = caller.free
        refusal = None if free else told_by_master(self._calls.core, caller.topic(RIGHT_SCHEDULE, row.topic))
        if refusal is not None:
            fail(refusal)
            return
        calls, client, actor = self._calls, caller.name or row.client_name, "" if free else caller.name
        whom = RowCaller(placed, fail, caller.connection)
        calls.serve_for_log(fail, calls.core.parts.publisher.schedule_row, row, client, actor, whom)
