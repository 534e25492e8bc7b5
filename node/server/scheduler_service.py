"""The Scheduler service: schedule, cancel, reschedule, look up.

Thin: a request becomes an IncomingBatch or goes to the core unchanged. A ScheduleStream reads no further while
`stream_batches_max` batches are in work: the client's flow control window then fills, so memory stays bounded. One
writer sends the receipts in the order of the batches.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np

from tickwheel.node.core.failure import Failure, Permitted, RequestError
from tickwheel.node.core.intake import KIND_DUE, IncomingBatch, from_batch, from_message
from tickwheel.node.core.publisher import BatchOutcome
from tickwheel.node.server.callers import Caller
from tickwheel.node.server.calls import Calls, id64_of, message_id_of, owner_of
from tickwheel.node.server.door import RefusedRequestError
from tickwheel.node.server.errors import abort, serialized_status
from tickwheel.node.server.gate import caller
from tickwheel.proto import scheduler_pb2
from tickwheel.proto.access_pb2 import RIGHT_CANCEL, RIGHT_READ, RIGHT_SCHEDULE, Right
from tickwheel.proto.scheduler_pb2_grpc import SchedulerServicer

Context = grpc.aio.ServicerContext[Any, Any]


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


def _may(right: Right.ValueType) -> Permitted:
    """The check of the current caller's right to a message, by the message's topic."""
    who = caller()
    return lambda topic: who.topic(right, topic)


class SchedulerService(SchedulerServicer):
    def __init__(self, calls: Calls, stream_batches_max: int) -> None:
        self._calls = calls
        self._stream_batches_max = stream_batches_max
        self.open_streams = 0

    async def Schedule(self, request: scheduler_pb2.ScheduleRequest, context: Context) -> scheduler_pb2.ScheduleReceipt:
        calls = self._calls
        try:
            batch = from_message(request, calls.core.settings)
        except RequestError as error:
            await abort(context, calls.core.refused(request.producer_id, request.sequence, error.failure))
        batch.client = caller().name or batch.client
        batch.actor = caller().actor
        batch.owner = owner_of(caller().name, request.producer_owner)
        outcome: BatchOutcome = await calls.answer(context, lambda done: calls.core.schedule(batch, done))
        receipt = scheduler_pb2.ScheduleReceipt(id=message_id_of(int(outcome.ids[0])), due_ms=int(outcome.due_ms[0]))
        if outcome.levels is not None:
            receipt.delay_level = int(outcome.levels.levels[0])
            receipt.delay_ms = int(outcome.levels.delays_ms[0])
        return receipt

    async def ScheduleStream(  # type: ignore[override]  # writes through the context
        self, request_iterator: AsyncIterator[scheduler_pb2.ScheduleBatch], context: Context
    ) -> None:
        line = ReceiptLine(self._stream_batches_max)
        reader = asyncio.ensure_future(self._read(request_iterator, line, caller()))
        self.open_streams += 1
        try:
            while (receipt := await line.next()) is not None:
                await context.write(receipt)
            await reader
        finally:
            self.open_streams -= 1
            reader.cancel()

    async def _read(self, batches: AsyncIterator[scheduler_pb2.ScheduleBatch], line: ReceiptLine, who: Caller) -> None:
        try:
            while True:
                try:
                    batch = await anext(batches)
                except StopAsyncIteration:
                    return
                except RefusedRequestError as error:
                    if not isinstance(error.message, scheduler_pb2.ScheduleBatch):
                        raise
                    producer_id, sequence = error.message.producer_id, error.message.sequence
                    failure = self._calls.core.refused(producer_id, sequence, error.failure)
                    refused = scheduler_pb2.BatchReceipt(sequence=sequence, error=serialized_status(failure))
                    line.fill(line.take_place(), refused)
                else:
                    self._take(batch, line, who)
                await line.wait_for_room()
        finally:
            line.end()

    def _take(self, request: scheduler_pb2.ScheduleBatch, line: ReceiptLine, who: Caller) -> None:
        place = line.take_place()
        sequence = request.sequence
        try:
            batch = from_batch(request, self._calls.core.settings)
        except RequestError as error:
            failure = self._calls.core.refused(request.producer_id, sequence, error.failure)
            line.fill(place, scheduler_pb2.BatchReceipt(sequence=sequence, error=serialized_status(failure)))
            return
        refusal = who.topics(RIGHT_SCHEDULE, batch.topics)
        if refusal is not None:
            line.fill(place, scheduler_pb2.BatchReceipt(sequence=sequence, error=serialized_status(refusal)))
            return
        batch.client = who.name or batch.client
        batch.actor = who.actor
        batch.owner = owner_of(who.name, request.producer_owner)

        def done(outcome: BatchOutcome | Failure) -> None:
            if isinstance(outcome, Failure):
                receipt = scheduler_pb2.BatchReceipt(sequence=sequence, error=serialized_status(outcome))
            else:
                receipt = receipt_of(batch, outcome)
            line.fill(place, receipt)

        self._calls.serve(done, lambda: self._calls.core.schedule(batch, done))
        self._calls.wake()

    async def Cancel(self, request: scheduler_pb2.CancelRequest, context: Context) -> scheduler_pb2.CancelResponse:
        core = self._calls.core
        return await self._calls.answer(
            context, lambda done: core.cancel(id64_of(request.id), done, _may(RIGHT_CANCEL))
        )

    async def Reschedule(
        self, request: scheduler_pb2.RescheduleRequest, context: Context
    ) -> scheduler_pb2.RescheduleResponse:
        core = self._calls.core
        owner = owner_of(caller().name, request.producer_owner)
        return await self._calls.answer(context, lambda done: core.reschedule(request, done, _may(RIGHT_CANCEL), owner))

    async def Get(self, request: scheduler_pb2.GetRequest, context: Context) -> scheduler_pb2.GetResponse:
        core = self._calls.core
        number, content = id64_of(request.id), request.content
        return await self._calls.answer(context, lambda done: core.get(number, content, done, _may(RIGHT_READ)))

    async def ListPending(
        self, request: scheduler_pb2.ListPendingRequest, context: Context
    ) -> scheduler_pb2.ListPendingResponse:
        core = self._calls.core
        return await self._calls.answer(context, lambda done: core.list_pending(request, done))

    async def CountPending(
        self, request: scheduler_pb2.CountPendingRequest, context: Context
    ) -> scheduler_pb2.CountPendingResponse:
        core = self._calls.core
        return await self._calls.answer(context, lambda done: core.count_pending(request, done))

    async def BeginSweep(self, request: scheduler_pb2.BeginSweepRequest, context: Context) -> scheduler_pb2.Sweep:
        core = self._calls.core
        return await self._calls.answer(context, lambda done: core.begin_sweep(request, done))

    async def GetSweep(self, request: scheduler_pb2.GetSweepRequest, context: Context) -> scheduler_pb2.Sweep:
        core = self._calls.core
        return await self._calls.answer(context, lambda done: core.get_sweep(request.job_id, done))

    async def ListSweeps(
        self, request: scheduler_pb2.ListSweepsRequest, context: Context
    ) -> scheduler_pb2.ListSweepsResponse:
        who = caller()
        answer: scheduler_pb2.ListSweepsResponse = await self._calls.answer(context, self._calls.core.list_sweeps)
        return scheduler_pb2.ListSweepsResponse(
            sweeps=[sweep for sweep in answer.sweeps if who.topic(RIGHT_CANCEL, sweep.selection.topic) is None]
        )

    async def StopSweep(self, request: scheduler_pb2.StopSweepRequest, context: Context) -> scheduler_pb2.Sweep:
        core = self._calls.core
        return await self._calls.answer(context, lambda done: core.stop_sweep(request.job_id, done))
