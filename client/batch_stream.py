"""Sends batches to the master in order, each again until its receipt arrives.

Owns the order, the sequences and the ScheduleStream. Invariants:
- A batch keeps its (producer id, sequence) while it may have been accepted (`lanes.Doubt`): nodes recognize repeats.
- After a lost connection all unanswered batches are sent again in their old order.
- The first batch of a producer id is sent alone, since a node accepts any sequence as the first.

If a batch is refused for good, the node answers the batches behind it with a gap: they get a new producer id.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc

from tickwheel.client.backoff import Backoff, Deadline
from tickwheel.client.cluster import Cluster
from tickwheel.client.errors import Fault, TickwheelError, fault_of_call, fault_of_status, unforeseen
from tickwheel.client.lanes import Doubt
from tickwheel.client.master_stream import MasterStream
from tickwheel.client.messages import BatchReceipt, receipt_of
from tickwheel.client.tasks import start_task
from tickwheel.proto import scheduler_pb2
from tickwheel.proto.scheduler_pb2_grpc import SchedulerStub
from tickwheel.transport.channel import END_OF_STREAM

STILL_ANSWERING_S = 5.0
"""After a receipt with an error, how long to wait for the other receipts before the stream is opened anew."""

EPOCH_BYTES = 8
"""Random bytes at the end of a new producer id, since another program may use the same name."""
PRODUCER_ID_LENGTH_MAX = 64


class Batch:
    """One batch and the future of its receipt."""

    __slots__ = ("bytes", "doubt", "future", "request")

    def __init__(self, request: scheduler_pb2.ScheduleBatch, future: asyncio.Future[BatchReceipt]) -> None:
        self.request = request
        self.future = future
        self.bytes = request.ByteSize()
        self.doubt = Doubt(0)


class BatchStream:
    """The batches and the stream of one producer."""

    def __init__(
        self,
        cluster: Cluster,
        producer_id: str,
        *,
        in_flight_max: int,
        timeout_s: float,
        answered: Callable[[Batch], None],
        client_name: str = "",
        owner: str = "",
    ) -> None:
        self._cluster = cluster
        self._name = self._producer_id = producer_id
        self._owner = owner
        self._epoch_accepted = False
        self._next_sequence = 1
        self._in_flight_max = in_flight_max
        self._timeout_s = timeout_s
        self._answered = answered
        self._client_name = client_name
        self._pending: deque[Batch] = deque()
        self._to_send: deque[Batch] = deque()
        """Not yet sent on the open stream."""
        self._unanswered: deque[Batch] = deque()
        """Sent on the open stream, without an answer on it."""
        self._halted = False
        self._refused = False
        self._changed = asyncio.Event()
        self._stream = MasterStream(cluster, self._talk)
        self._running: asyncio.Task[None] | None = None
        self._deadline: Deadline | None = None
        self.reconnects = 0

    @property
    def pending(self) -> int:
        """Batches without an answer."""
        return len(self._pending)

    def put(self, batch: Batch) -> None:
        """Send a batch after all others."""
        self._number(batch)
        self._pending.append(batch)
        self._to_send.append(batch)
        self._changed.set()
        if self._running is None:
            self._stream.watch()
            self._running = start_task(self._run(), "the stream of a producer", self._failed)

    async def close(self) -> None:
        """Stop. Batches without an answer end with OutcomeUnknown."""
        self._stream.unwatch()
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        self._fail_all(Fault("OUTCOME_UNKNOWN", "the producer was closed before the answer came"))

    def _number(self, batch: Batch) -> None:
        batch.request.producer_id = self._producer_id
        batch.request.sequence = self._next_sequence
        batch.request.client_name = self._client_name
        batch.request.producer_owner = self._owner
        batch.doubt.sequence = self._next_sequence
        self._next_sequence += 1

    def _new_epoch(self) -> None:
        """Number the batches that were certainly not accepted anew, under a new producer id."""
        ending = "." + secrets.token_hex(EPOCH_BYTES)
        self._producer_id = self._name[: PRODUCER_ID_LENGTH_MAX - len(ending)] + ending
        self._epoch_accepted = False
        self._next_sequence = 1
        self._refused = False
        for batch in self._pending:
            if not batch.doubt.exists:
                self._number(batch)

    # -- the loop

    async def _run(self) -> None:
        backoff = Backoff()
        try:
            while True:
                while not self._pending:
                    self._deadline = None
                    self._changed.clear()
                    await self._changed.wait()
                if self._deadline is None:
                    self._deadline = Deadline(self._timeout_s)
                before = self._pending[0]
                fault = await self._stream_once()
                if self._pending and self._pending[0] is not before:
                    self._deadline = Deadline(self._timeout_s)
                    backoff.reset()
                if fault is None:
                    continue
                self.reconnects += 1
                if self._pending and self._deadline.over:
                    self._fail_all(fault)
                    self._new_epoch()
                elif not backoff.follows(fault.master_address):
                    await backoff.pause(self._deadline, fault.retry_after_s)
        except TickwheelError as error:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        """No stream can be opened; or a mistake of this client, or of the node: nobody may wait for ever."""
        ended = error if isinstance(error, TickwheelError) else unforeseen(error)
        self._running = None
        self._fail_all(Fault(ended.reason, str(ended), ended.metadata))
        self._new_epoch()

    async def _stream_once(self) -> Fault | None:
        """Open a stream at the master and use it until it ends. Returns the fault that ended it, or None."""
        assert self._deadline is not None
        fault = await self._stream.once(self._deadline)
        if fault is not None and not (fault.elsewhere or fault.later):
            # The stream itself was refused, not one batch: all batches fail.
            self._fail_all(fault)
            self._new_epoch()
        if self._refused:
            self._new_epoch()
        return fault

    async def _talk(self, address: str) -> Fault | None:
        """Use one stream to this node until it ends or this task is cancelled, which abandons the stream."""
        call = SchedulerStub(self._cluster.channel(address)).ScheduleStream()  # type: ignore[call-arg]
        self._to_send = deque(self._pending)
        self._unanswered.clear()
        self._halted = False
        self._stream.beside(self._write(call), "the writer of a producer")
        fault: Fault | None = None
        try:
            while True:
                if self._halted and not self._unanswered:
                    break
                async with asyncio.timeout(STILL_ANSWERING_S if self._halted else None):
                    receipt: Any = await call.read()
                if receipt is END_OF_STREAM:
                    fault = fault or Fault("UNAVAILABLE", "the node ended the stream")
                    break
                fault = self._receive(receipt) or fault
        except grpc.aio.AioRpcError as error:
            ended = fault_of_call(error)
            if ended.not_sent:
                for batch in self._unanswered:
                    batch.doubt.refused(ended)
            fault = fault or ended
        except TimeoutError:
            fault = fault or Fault("DEADLINE_EXCEEDED", "the master does not answer")
        finally:
            call.cancel()
        return fault

    async def _write(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):  # whoever reads gets the reason
            while True:
                room = self._in_flight_max if self._epoch_accepted else 1
                if self._to_send and len(self._unanswered) < room and not self._halted:
                    batch = self._to_send.popleft()
                    self._unanswered.append(batch)
                    batch.doubt.sending()
                    await call.write(batch.request)
                else:
                    self._changed.clear()
                    await self._changed.wait()

    def _receive(self, receipt: scheduler_pb2.BatchReceipt) -> Fault | None:
        """Take the receipt of the oldest unanswered batch. Returns a fault if the stream must be repeated for it."""
        if not self._unanswered or self._unanswered[0].request.sequence != receipt.sequence:
            self._halted = True
            return Fault("UNKNOWN", f"a receipt of sequence {receipt.sequence}, which was not next")
        batch = self._unanswered.popleft()
        if self._to_send:  # there is room now
            self._changed.set()
        if not receipt.error:
            answer = receipt_of(receipt)
            batch.doubt.accepted()
            self._epoch_accepted = self._epoch_accepted or batch.request.producer_id == self._producer_id
            self._finish(batch)
            if not batch.future.done():
                batch.future.set_result(answer)
            return None
        fault = fault_of_status(receipt.error)
        batch.doubt.refused(fault)
        self._halted = True
        if fault.reason == "SEQUENCE_GAP":
            if batch is self._pending[0] or batch.request.producer_id != self._producer_id:
                self._refused = True  # no earlier batch can still be accepted
            return None
        if fault.elsewhere or fault.later:
            return fault
        self._refused = True
        self._finish(batch)
        if not batch.future.done():
            batch.future.set_exception(batch.doubt.error(fault))
        return None

    def _finish(self, batch: Batch) -> None:
        if batch is self._pending[0]:
            self._pending.popleft()
        else:
            self._pending.remove(batch)
        self._answered(batch)

    def _fail_all(self, fault: Fault) -> None:
        pending, self._pending = list(self._pending), deque()
        self._to_send.clear()
        self._unanswered.clear()
        for batch in pending:
            self._answered(batch)
            if not batch.future.done():
                batch.future.set_exception(batch.doubt.error(fault))
