"""ScheduleStream: batches in, receipts out.

A stream reads no further while `stream_batches_max` batches are in work: the client's flow control window then fills,
so memory stays bounded. One writer sends the receipts in the order of the batches.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import numpy as np

from tickwheel.node.core.schedule.intake import KIND_DUE, IncomingBatch, from_batch
from tickwheel.node.core.schedule.publisher import BatchOutcome
from tickwheel.node.failure import Failure, RequestError
from tickwheel.node.server.callers import Caller
from tickwheel.node.server.calls import Calls, owner_of
from tickwheel.node.server.door import RefusedRequestError
from tickwheel.node.server.errors import serialized_status
from tickwheel.node.state.producers import Sender
from tickwheel.proto import scheduler_pb2
from tickwheel.proto.access_pb2 import RIGHT_SCHEDULE
from tickwheel.transport.server import ServerStream as Context


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
    return receipt


def state_caller(batch: IncomingBatch, caller: Caller, producer_owner: str) -> None:
    """Note in a batch who sends it."""
    batch.client = caller.name or batch.client
    batch.actor = caller.actor
    batch.owner = owner_of(caller.name, producer_owner)


class ReceiptLine:
    """The receipts of one stream: places are taken in the order of batches, filled in any order, sent in order."""

    def __init__(self, places_max: int) -> None:
        self._places: deque[list[scheduler_pb2.BatchReceipt]] = deque()
        self._places_max = places_max
        self._changed = asyncio.Event()
        self._ended = False
        self._room = asyncio.Event()
        self._room.set()

    async def wait_for_room(self) -> None:
        """Wait until another batch may be read."""
        await self._room.wait()

    def take_place(self) -> list[scheduler_pb2.BatchReceipt]:
        """Take the next place, for a later `fill`."""
        place: list[scheduler_pb2.BatchReceipt] = []
        self._places.append(place)
        if len(self._places) >= self._places_max:
            self._room.clear()
        return place

    def fill(self, place: list[scheduler_pb2.BatchReceipt], receipt: scheduler_pb2.BatchReceipt) -> None:
        """Put a receipt into a place; further receipts for the place are ignored."""
        if place:
            return
        place.append(receipt)
        if self._places and self._places[0] is place:
            self._changed.set()

    def end(self) -> None:
        """No more places will be taken."""
        self._ended = True
        self._changed.set()

    async def next(self) -> scheduler_pb2.BatchReceipt | None:
        """The next receipt in order; None once all were returned after `end`."""
        while True:
            if self._places and self._places[0]:
                receipt = self._places.popleft()[0]
                self._room.set()
                return receipt
            if self._ended and not self._places:
                return None
            self._changed.clear()
            await self._changed.wait()


class ScheduleStreams:
    """The schedule streams of a node."""

    def __init__(self, calls: Calls, stream_batches_max: int) -> None:
        self._calls = calls
        self._stream_batches_max = stream_batches_max
        self.open_streams = 0

    async def serve(
        self, batches: AsyncIterator[scheduler_pb2.ScheduleBatch], caller: Caller, context: Context
    ) -> None:
        """Serve one stream to its end."""
        line = ReceiptLine(self._stream_batches_max)
        reader = asyncio.ensure_future(self._read(batches, line, caller))
        self.open_streams += 1
        try:
            while (receipt := await line.next()) is not None:
                await context.write(receipt)
            await reader
        finally:
            self.open_streams -= 1
            reader.cancel()

    async def _read(
        self, batches: AsyncIterator[scheduler_pb2.ScheduleBatch], line: ReceiptLine, caller: Caller
    ) -> None:
        try:
            while True:
                try:
                    batch = await anext(batches)
                except StopAsyncIteration:
                    return
                except RefusedRequestError as error:
                    if not isinstance(error.message, scheduler_pb2.ScheduleBatch):
                        raise
                    self._refuse(error.message, error.failure, line.take_place(), line)
                else:
                    self._take(batch, line, caller)
                await line.wait_for_room()
        finally:
            line.end()

    def _refuse(
        self,
        request: scheduler_pb2.ScheduleBatch,
        failure: Failure,
        place: list[scheduler_pb2.BatchReceipt],
        line: ReceiptLine,
    ) -> None:
        told = self._calls.core.parts.senders.told(Sender(request.producer_id, request.sequence), failure)
        line.fill(place, scheduler_pb2.BatchReceipt(sequence=request.sequence, error=serialized_status(told)))

    def _take(self, request: scheduler_pb2.ScheduleBatch, line: ReceiptLine, caller: Caller) -> None:
        core, place = self._calls.core, line.take_place()
        sequence = request.sequence
        try:
            batch = from_batch(request, core.state.settings)
        except RequestError as error:
            self._refuse(request, error.failure, place, line)
            return
        refusal = caller.topics(RIGHT_SCHEDULE, batch.topics)
        if refusal is not None:
            line.fill(place, scheduler_pb2.BatchReceipt(sequence=sequence, error=serialized_status(refusal)))
            return
        state_caller(batch, caller, request.producer_owner)

        def done(outcome: BatchOutcome | Failure) -> None:
            if isinstance(outcome, Failure):
                receipt = scheduler_pb2.BatchReceipt(sequence=sequence, error=serialized_status(outcome))
            else:
                receipt = receipt_of(batch, outcome)
            line.fill(place, receipt)

        self._calls.serve(done, lambda: core.parts.requests.schedule(batch, done))
        self._calls.wake()
