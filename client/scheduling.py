"""Concurrent `schedule` calls of one client travel together: as one batch under one sequence.

Owns the messages whose callers wait. Invariants:
- A batch has the (producer id, sequence) of a lane, and its content stays the same while it may have been accepted.
  Before each try of a batch that was certainly not accepted, the messages of callers that are gone are taken out.
- A message that is refused because of its unique key has its answer; its neighbours in the batch are scheduled.
- A batch that is refused, for good or for the moment, is cut into halves until a message is alone. Only the refusal of
  a message alone is its caller's. So nobody gets a refusal for another caller's message, except that a caller at its
  deadline learns of the last limit that held its batch up.
- Each caller has a deadline. At it, the error is OutcomeUnknown only if the batch may have been accepted.

Nodes before ScheduleMany get a batch over a ScheduleStream of one batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Sequence
from typing import Any

import grpc

from tickwheel.client.backoff import TRY_S_MIN, Backoff
from tickwheel.client.cluster import Cluster
from tickwheel.client.errors import (
    ClientClosed,
    ClusterUnavailable,
    Fault,
    LimitReached,
    NotFound,
    OutcomeUnknown,
    RequestRefused,
    TickwheelError,
    fault_of_call,
    fault_of_status,
)
from tickwheel.client.ids import text_of
from tickwheel.client.lanes import Doubt, Lane
from tickwheel.client.line import Line
from tickwheel.client.messages import Receipt, Row, batch_of, receipt_of, receipts_of
from tickwheel.client.numbered import Invoke, Numbered
from tickwheel.client.tries import TryFailedError
from tickwheel.client.unique_keys import KeyTaken, key_taken_of, outcome_of
from tickwheel.client.versions import OlderNodes
from tickwheel.proto import scheduler_pb2
from tickwheel.proto.scheduler_pb2_grpc import SchedulerStub
from tickwheel.transport.channel import END_OF_STREAM

UNDER_WAY_MAX = 2
"""Batches under way at a time: while the nodes write one, the client makes the next."""
CALLS_MAX = 1_000
BYTES_MAX = 1 << 20
ROW_BYTES = 64
"""Approximate bytes of a message besides payload and meta."""
_OF_MESSAGES = (RequestRefused, NotFound, LimitReached)
"""Errors that may be about one message of a batch."""


class _Call:
    """One caller's message."""

    __slots__ = ("batch", "deadline_s", "future", "refusal", "row", "timeout_s")

    def __init__(self, row: Row, future: asyncio.Future[Receipt], deadline_s: float, timeout_s: float) -> None:
        self.row = row
        self.future = future
        self.deadline_s = deadline_s
        self.timeout_s = timeout_s
        self.batch: _Batch | None = None
        """The batch under way with this message."""
        self.refusal: TickwheelError | None = None
        """The last refusal of a batch with this message, if waiting might have helped."""

    @property
    def size(self) -> int:
        return len(self.row.payload) + len(self.row.meta) + ROW_BYTES

    @property
    def gone(self) -> bool:
        """Whether its caller waits no more: it has an answer, was cancelled or has reached its deadline."""
        return self.future.done()


class _Batch:
    """Messages under way together."""

    __slots__ = ("calls", "deadline_s", "doubt", "sent", "task")

    def __init__(self, calls: list[_Call]) -> None:
        self.calls = calls
        self.deadline_s = max(call.deadline_s for call in calls)
        self.doubt: Doubt | None = None
        self.sent: list[_Call] = calls
        """The calls whose messages are in the last request, in its order."""
        self.task: asyncio.Task[None] | None = None

    @property
    def in_doubt(self) -> bool:
        """Whether it may have been accepted."""
        return self.doubt is not None and self.doubt.exists


class Scheduling:
    """The `schedule` calls of one client."""

    def __init__(self, cluster: Cluster, numbered: Numbered, client_name: str) -> None:
        self._cluster = cluster
        self._numbered = numbered
        self._client_name = client_name
        self._older = OlderNodes()
        self._line: Line[_Call] = Line(
            lambda call: call.size,
            lambda call: call.gone,
            under_way_max=UNDER_WAY_MAX,
            calls_max=CALLS_MAX,
            bytes_max=BYTES_MAX,
        )
        self._calls: set[_Call] = set()
        """All calls whose callers wait."""
        self._batches: set[_Batch] = set()
        self._backoffs: dict[_Call, Backoff] = {}
        """The pauses of calls that were refused for the moment."""
        self._pauses: set[asyncio.TimerHandle] = set()
        self._sending: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def schedule(self, row: Row, timeout_s: float) -> Receipt:
        """Schedule one message. Returns once it is on stable storage of a majority."""
        self._cluster.check_open()
        loop = asyncio.get_running_loop()
        call = _Call(row, loop.create_future(), loop.time() + timeout_s, timeout_s)
        self._calls.add(call)
        self._line.add(call)
        if self._sending is None:
            # Callers of the same pass of the loop come along.
            self._sending = loop.call_soon(self._send)
        if self._timer is None or call.deadline_s < self._timer.when():
            self._watch(call.deadline_s)
        try:
            return await call.future
        finally:
            self._calls.discard(call)
            self._backoffs.pop(call, None)
            if call.batch is not None:
                self._end_if_left(call.batch)

    def close(self) -> None:
        """End all calls. Idempotent."""
        for handle in (self._timer, self._sending, *self._pauses):
            if handle is not None:
                handle.cancel()
        self._timer = self._sending = None
        self._pauses.clear()
        for call in list(self._calls):
            if not call.gone:
                error = ClientClosed()
                in_doubt = call.batch is not None and call.batch.in_doubt
                call.future.set_exception(
                    OutcomeUnknown(str(error), "OUTCOME_UNKNOWN", error.metadata) if in_doubt else error
                )
        for batch in self._batches:
            if batch.task is not None:
                batch.task.cancel()

    # -- batches

    def _send(self) -> None:
        self._sending = None
        while calls := self._line.take():
            batch = _Batch(calls)
            for call in calls:
                call.batch = batch
            self._batches.add(batch)
            batch.task = asyncio.ensure_future(self._run(batch))

    async def _run(self, batch: _Batch) -> None:
        loop = asyncio.get_running_loop()
        try:
            receipts = await self._numbered.call(
                lambda lane, doubt: self._tries(batch, lane, doubt), batch.deadline_s - loop.time(), divisible=True
            )
            for call, receipt in zip(batch.sent, receipts, strict=True):
                if call.gone:
                    continue
                if isinstance(receipt, KeyTaken):
                    call.future.set_exception(receipt)
                else:
                    call.future.set_result(receipt)
        except TickwheelError as error:
            self._refused(batch, error, loop.time())
        except Exception as error:  # a mistake of this client: nobody may wait for ever
            self._answer(batch.calls, error)
        finally:
            for call in batch.calls:
                if call.batch is batch:
                    call.batch = None
            self._batches.discard(batch)
            self._line.ended()
            self._send()

    def _refused(self, batch: _Batch, error: TickwheelError, now_s: float) -> None:
        calls = [call for call in batch.calls if not call.gone]
        fault = Fault(error.reason, str(error), error.metadata)
        may_be_of_one = isinstance(error, _OF_MESSAGES) or error.reason == "RIGHT_REQUIRED"
        if batch.in_doubt or isinstance(error, OutcomeUnknown) or not (may_be_of_one or fault.later):
            self._answer(calls, error)
            return
        if len(batch.sent) == 1 and not fault.later:
            self._answer(calls, error)
            return
        for call in calls:
            call.refusal = error if fault.later or isinstance(error, LimitReached) else None
            if call.deadline_s <= now_s:
                call.future.set_exception(self._late(call))
        calls = [call for call in calls if not call.gone]
        half = (len(calls) + 1) // 2
        for part in (calls[:half], calls[half:]):
            if part and fault.later:
                self._pause(part, fault.retry_after_s)
            elif part:
                self._line.add_apart(part)

    def _pause(self, calls: list[_Call], least_s: float) -> None:
        """Send these calls, by themselves, after a pause."""
        backoff = self._backoffs.get(calls[0]) or Backoff()
        for call in calls:
            self._backoffs[call] = copy.copy(backoff)

        def over() -> None:
            self._pauses.discard(handle)
            latest_s = asyncio.get_running_loop().time() + TRY_S_MIN
            # The others get their refusal at their deadline.
            again = [call for call in calls if call.deadline_s >= latest_s]
            if again:
                self._line.add_apart(again)
                self._send()

        handle = asyncio.get_running_loop().call_later(backoff.next_s(least_s), over)
        self._pauses.add(handle)

    @staticmethod
    def _answer(calls: Sequence[_Call], error: Exception) -> None:
        for call in calls:
            if not call.gone:
                call.future.set_exception(error)

    # -- requests

    def _tries(self, batch: _Batch, lane: Lane, doubt: Doubt) -> Invoke[list[Receipt | KeyTaken]]:
        batch.doubt = doubt
        request: scheduler_pb2.ScheduleRequest | scheduler_pb2.ScheduleBatch | None = None

        async def invoke(channel: grpc.aio.Channel, try_s: float) -> list[Receipt | KeyTaken]:
            nonlocal request
            if request is None or not doubt.earlier:
                batch.sent = [call for call in batch.calls if not call.gone]
                request = self._request([call.row for call in batch.sent])
                request.client_name = self._client_name
                request.producer_owner = self._numbered.owner
                request.producer_id, request.sequence = lane.producer_id, lane.sequence
            if isinstance(request, scheduler_pb2.ScheduleRequest):
                return [await self._try_alone(channel, request, try_s)]
            return receipts_of(
                receipt_of(await self._try_batch(channel, request, try_s)), [call.row for call in batch.sent]
            )

        return invoke

    @staticmethod
    def _request(rows: list[Row]) -> scheduler_pb2.ScheduleRequest | scheduler_pb2.ScheduleBatch:
        if len(rows) == 1:
            request = scheduler_pb2.ScheduleRequest()
            rows[0].fill(request.message)
            return request
        return batch_of(rows)

    async def _try_alone(
        self, channel: grpc.aio.Channel, request: scheduler_pb2.ScheduleRequest, try_s: float
    ) -> Receipt | KeyTaken:
        try:
            receipt = await self._cluster.stub(SchedulerStub, channel).Schedule(request, timeout=try_s)
        except grpc.aio.AioRpcError as error:
            message = request.message
            taken = key_taken_of(fault_of_call(error), message.topic, message.meta.unique_key)
            if taken is None:
                raise
            return taken  # an answer like a receipt: the sequence counts, and a repeat gets it again
        return Receipt(
            text_of(receipt.id), receipt.due_ms, receipt.delay_level, receipt.delay_ms, outcome_of(receipt.key_outcome)
        )

    async def _try_batch(
        self, channel: grpc.aio.Channel, request: scheduler_pb2.ScheduleBatch, try_s: float
    ) -> scheduler_pb2.BatchReceipt:
        stub = self._cluster.stub(SchedulerStub, channel)
        if not self._older.lacks(channel):
            try:
                return await stub.ScheduleMany(request, timeout=try_s)
            except grpc.aio.AioRpcError as error:
                if not self._older.note(channel, error):
                    raise
        return await _over_stream(stub, request, try_s)

    # -- callers that leave

    @staticmethod
    def _end_if_left(batch: _Batch) -> None:
        """End a batch under way for which nobody waits."""
        if batch.task is not None and all(call.gone for call in batch.calls):
            batch.task.cancel()

    def _watch(self, deadline_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(deadline_s, self._look)

    def _look(self) -> None:
        """Answer the callers whose deadline has come. A batch sees to the last of its own deadlines itself."""
        now_s = asyncio.get_running_loop().time()
        self._timer = None
        next_s: float | None = None
        for call in self._calls:
            if call.gone:
                continue
            if call.deadline_s > now_s:
                next_s = min(next_s or call.deadline_s, call.deadline_s)
            elif call.batch is None or call.deadline_s < call.batch.deadline_s:
                call.future.set_exception(self._late(call))
        if next_s is not None:
            self._watch(next_s)

    def _late(self, call: _Call) -> TickwheelError:
        """The error of a call at its deadline."""
        if call.batch is not None and call.batch.in_doubt:
            text = self._cluster.with_faults(f"no answer within {call.timeout_s:g} s")
            return OutcomeUnknown(text, "OUTCOME_UNKNOWN")
        if call.refusal is not None:
            return call.refusal
        return ClusterUnavailable(self._cluster.with_faults(f"not accepted within {call.timeout_s:g} s"), "NO_MASTER")


async def _over_stream(stub: Any, request: scheduler_pb2.ScheduleBatch, try_s: float) -> scheduler_pb2.BatchReceipt:
    """Send one batch over a stream of its own."""
    call = stub.ScheduleStream(timeout=try_s)
    try:
        with contextlib.suppress(grpc.aio.AioRpcError):  # `read` raises the reason
            await call.write(request)
            await call.done_writing()
        receipt: Any = await call.read()
    finally:
        call.cancel()
    if receipt is END_OF_STREAM:
        raise TryFailedError(Fault("UNAVAILABLE", "the node ended the stream without a receipt"))
    if receipt.error:
        raise TryFailedError(fault_of_status(receipt.error))
    assert isinstance(receipt, scheduler_pb2.BatchReceipt)
    return receipt
