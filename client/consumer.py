"""A consumer: receives the deliveries of one group from the master and sends their settlements back.

Owns the Consume stream and the settlements without a receipt; `held.py` owns the held deliveries and the credits.
Invariant: a settlement is repeated on every new stream until a node has answered it. After a change of master a stream
is opened at the new one. The leases of held deliveries are renewed over the open stream.

A node that says so in Opened sends batches of several topics, and acknowledgements of one pass of the loop go to it as
one settlement, whatever their topics. Inside and for callers a batch has one topic and each settlement its own receipt.
So a stream to an older node differs only in the number of its messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
from numpy.typing import NDArray

from tickwheel.client.backoff import Backoff, Deadline
from tickwheel.client.cluster import Cluster
from tickwheel.client.coming import Coming, Iteration
from tickwheel.client.delivery import DeliveredBatch, Delivery, SettleReceipt, columns_of
from tickwheel.client.errors import (
    Fault,
    OutcomeUnknown,
    TickwheelError,
    error_of,
    fault_of_call,
    fault_of_status,
    unforeseen,
)
from tickwheel.client.filtering import mismatches
from tickwheel.client.held import HeldBatch, HeldDeliveries
from tickwheel.client.ids import id_text
from tickwheel.client.master_stream import MasterStream
from tickwheel.client.settling import ACK, Settling, joint, terms_of, together
from tickwheel.client.tasks import start_task
from tickwheel.client.timing import sleep
from tickwheel.proto import consumer_pb2
from tickwheel.proto.consumer_pb2_grpc import ConsumerStub
from tickwheel.transport.channel import END_OF_STREAM

if TYPE_CHECKING:
    from tickwheel.client.tracing import Tracing

CREDITS = 4_096
UNKNOWN_TRIES_MAX = 20
"""Tries of a settlement that a new master gets before it has applied the dispatch."""
UNAVAILABLE_S_MAX = 60.0
"""After this long without a master the iterator raises ClusterUnavailable."""
CLOSE_S = 5.0
HOLD_S_MAX = 3_600.0
"""Default of `hold_max`: a delivery's lease is renewed until this long after it came."""
RENEW_MESSAGES_MAX = 10_000
"""Messages in one renewal; a node accepts no more."""
ACKS_AT_ONCE_MAX = 10_000
"""Single acknowledgements that leave together; a node accepts ten times as many in a settlement."""
RENEW_PAUSE_S_MIN = 0.03
"""Least pause between two looks for leases that must be renewed, or are over."""
IDS_SHOWN_MAX = 5
SETTLEMENT_NAMES = {consumer_pb2.ACK: "ack", consumer_pb2.RETRY: "nack", consumer_pb2.DEAD: "dead"}
"""Of the settlements that a program asks for, as traces show them."""

_log = logging.getLogger(__name__)


class Consumer:
    """Made by `AsyncClient.consumer`. Iterate it for deliveries, `batches()` for batches, or `run(handler)`."""

    def __init__(
        self,
        cluster: Cluster,
        opening: consumer_pb2.OpenConsumer,
        *,
        messages_max: int,
        unavailable_s_max: float,
        hold_s_max: float,
        closed: Callable[[Consumer], None],
        tracing: Tracing | None,
    ) -> None:
        self._cluster = cluster
        self._open = opening
        self._unavailable_s_max = unavailable_s_max
        self._closed_hook = closed
        self._tracing = tracing
        self._coming = Coming()
        self._waiting: dict[int, Settling] = {}
        self._next_sequence = 1
        self._outbox: deque[consumer_pb2.ConsumeRequest] = deque()
        self._outbox_changed = asyncio.Event()
        self._time = cluster.time
        self._held = HeldDeliveries(
            opening.credits, self._send_credits, messages_max, hold_s_max, self._time.monotonic_s
        )
        self._has_held = asyncio.Event()
        """Set whenever a batch came."""
        self._mixes = False
        """Whether the node of the open stream takes settlements of several topics."""
        self._gathered: list[Settling] = []
        """Acknowledgements of this pass of the loop, to leave together."""
        self._joint: dict[int, list[Settling]] = {}
        """Sequence of a settlement of several topics on the open stream -> the settlements in it."""
        self._acks: dict[int, tuple[DeliveredBatch, list[int]]] = {}
        self._acks_by_key: dict[tuple[str, int], list[asyncio.Future[SettleReceipt]]] = {}
        """By topic and epoch: the receipts of these acknowledgements. Each caller may cancel its own."""
        self._acks_count = 0
        self._stream = MasterStream(cluster, self._talk)
        self._running: asyncio.Task[None] | None = None
        self._closing = False
        self._ended = False
        self._lease_s = 30.0
        self._generation = 0
        self.term = 0
        """Term of the master of the open stream."""
        self.reconnects = 0
        self.stale = 0
        """Count of settlements that came too late: the message had been delivered again."""
        self.renewed = 0
        """Count of leases extended because their deliveries were still held."""
        self.skipped = 0
        """Count of deliveries that the group's filter does not want; they came because hashes of tags collide."""

    # -- three ways to consume

    def batches(self) -> Iteration[DeliveredBatch]:
        """The batches as they arrive, decoded when read. The rest of a batch that was begun one by one is not among
        them."""
        return Iteration(self._next_batch)

    def __aiter__(self) -> Iteration[Delivery]:
        """One by one. An iteration goes on where the one before was left. Once the consumer has ended, it ends behind
        what has come."""
        return Iteration(self._next_delivery)

    async def _next_batch(self) -> DeliveredBatch | None:
        self._start()
        return await self._coming.batch()

    async def _next_delivery(self) -> Delivery | None:
        self._start()
        return await self._coming.delivery()

    async def run(self, handler: Callable[[Delivery], Awaitable[object]], *, concurrency: int = 16) -> None:
        """Call the handler for each delivery, up to `concurrency` at once.

        A delivery is acknowledged when the handler returns. If it raises, the delivery is nacked and the error logged
        with its traceback. Ends with `close` or after `messages_max`. An error of the cluster ends it too, once the
        running handlers have returned.
        """
        slots = asyncio.Semaphore(concurrency)
        tasks: set[asyncio.Task[None]] = set()

        async def handle(delivery: Delivery) -> None:
            self._time.hold(delivery)
            try:
                if self._tracing is None:
                    await handler(delivery)
                else:
                    with self._tracing.processing(delivery, self._open.group):
                        await handler(delivery)
            except (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit):
                raise
            except BaseException as error:  # raised by the handler; the message is delivered again
                _log.error(
                    "the handler of group %s failed on message %s of topic %s, attempt %d: it comes again",
                    self._open.group, delivery.id, delivery.topic, delivery.attempt, exc_info=error,
                )  # fmt: skip
                await delivery.nack(reason=f"{type(error).__name__}: {error}")
            else:
                await delivery.ack()
            finally:
                self._time.release(delivery)

        def done(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            slots.release()
            if not task.cancelled() and task.exception() is not None and not self._closing:
                self._coming.fail(_as_error(task.exception()))

        try:
            async for delivery in self:
                try:
                    await slots.acquire()
                except asyncio.CancelledError:
                    self._coming.give_back(delivery)
                    raise
                task = asyncio.ensure_future(handle(delivery))
                tasks.add(task)
                task.add_done_callback(done)
            left = set(tasks)
            while left and not self._closing:
                ended, left = await asyncio.wait(left, timeout=CLOSE_S)
                for task in ended:
                    if not task.cancelled() and (error := task.exception()) is not None:
                        raise _as_error(error)
        finally:
            if tasks:
                await asyncio.wait(tasks, timeout=CLOSE_S)
            for task in tasks:
                task.cancel()

    # -- settling, for deliveries and batches

    def settle_rows(
        self,
        batch: DeliveredBatch,
        rows: NDArray[np.int64] | None,
        outcome: consumer_pb2.Outcome.ValueType,
        *,
        delay_ms: int = 0,
        delay_level: int = 0,
        reason: str = "",
    ) -> asyncio.Future[SettleReceipt]:
        """Settle rows of a batch; None: all rows. Sent in this pass of the loop; the future has the receipt."""
        future: asyncio.Future[SettleReceipt] = asyncio.get_running_loop().create_future()
        self._submit(Settling([(batch, rows)], terms_of(outcome, delay_ms, delay_level, reason), future))
        self._held.give_back(batch.leave(rows))
        self._trace(batch, rows, outcome, future)
        return future

    def settle_one(self, batch: DeliveredBatch, row: int) -> asyncio.Future[SettleReceipt]:
        """Acknowledge one row. Acknowledgements of the same pass of the loop are sent as one settlement, up to
        ACKS_AT_ONCE_MAX."""
        loop = asyncio.get_running_loop()
        if not self._acks:
            loop.call_soon(self._send_acks)
        self._acks.setdefault(id(batch), (batch, []))[1].append(row)
        receipt: asyncio.Future[SettleReceipt] = loop.create_future()
        self._acks_by_key.setdefault((batch.topic, batch.columns.epoch), []).append(receipt)
        if self._tracing is not None:
            self._trace(batch, [row], consumer_pb2.ACK, receipt)
        self._acks_count += 1
        if self._acks_count >= ACKS_AT_ONCE_MAX:
            self._send_acks()
        return receipt

    def _trace(
        self,
        batch: DeliveredBatch,
        rows: Sequence[int] | NDArray[np.int64] | None,
        outcome: consumer_pb2.Outcome.ValueType,
        receipt: asyncio.Future[SettleReceipt],
    ) -> None:
        name = SETTLEMENT_NAMES.get(outcome)
        if self._tracing is not None and name is not None:
            message_id = id_text(int(batch.ids[0 if rows is None else rows[0]]))
            self._tracing.settling(name, batch.topic, len(batch if rows is None else rows), message_id, receipt)

    def _send_acks(self) -> None:
        acks, self._acks, self._acks_count = self._acks, {}, 0
        receipts, self._acks_by_key = self._acks_by_key, {}
        by_key: dict[tuple[str, int], list[tuple[DeliveredBatch, NDArray[np.int64]]]] = {}
        for batch, places in acks.values():
            by_key.setdefault((batch.topic, batch.columns.epoch), []).append((batch, np.array(places, np.int64)))
        for key, parts in by_key.items():
            shared: asyncio.Future[SettleReceipt] = asyncio.get_running_loop().create_future()
            shared.add_done_callback(partial(_share, receipts[key]))
            self._submit(Settling(parts, ACK, shared))
            self._held.give_back(sum(batch.leave(rows) for batch, rows in parts))

    async def extend_rows(self, batch: DeliveredBatch, rows: NDArray[np.int64] | None, lease_ms: int) -> int:
        """Extend the leases of rows of a batch; None: of all rows. Returns the number of leases extended."""
        receipt = await self._extend([(batch, rows)], lease_ms)
        if receipt.extended:
            self._held.hold(batch, lease_ms / 1_000 or self._lease_s)
        return int(receipt.extended)

    async def _renew_while_open(self) -> None:
        while True:
            self._held.expire()
            self._renew()
            end_s = self._held.next_end_s
            if end_s is None:
                self._has_held.clear()
                await self._has_held.wait()
            else:
                await sleep(self._time, max(RENEW_PAUSE_S_MIN, min(self._lease_s / 6, end_s)))

    def _renew(self) -> None:
        """Renew the leases of held deliveries, once a third of a lease has passed."""
        due = self._held.to_renew()
        for held in due:
            if held.left_alone:
                first = held.batch.delivery(int(held.batch.held_rows()[0]))
                _log.warning(
                    "%d messages of topic %s, the first %s, attempt %d, have been held by group %s for too long: "
                    "their leases are not renewed any more, and they will come again",
                    held.batch.unsettled, first.topic, first.id, first.attempt, self._open.group,
                )  # fmt: skip
        for part in _together([held for held in due if not held.left_alone]):
            self._renew_part(part)

    def _renew_part(self, part: list[HeldBatch]) -> None:
        rows = [(held.batch, held.batch.held_rows()) for held in part]
        asked_s, lease_s, generation = self._time.monotonic_s(), part[0].lease_s, self._generation
        for held in part:
            held.asked = True

        def answered(future: asyncio.Future[consumer_pb2.ExtendReceipt]) -> None:
            for held in part:
                held.asked = False
            if future.cancelled() or future.exception() is not None:
                return  # asked again while the stream is open
            receipt = future.result()
            self.renewed += receipt.extended
            if receipt.extended:
                # A repeat on another stream was sent later than the first try: count from now to be safe.
                from_s = asked_s if generation == self._generation else self._time.monotonic_s()
                self._held.renewed(part, from_s, lease_s)
            elif any(held.batch.unsettled for held in part):
                for held in part:
                    held.left_alone = True
                _log.info(
                    "leases of %d messages of topic %s are not renewed: the node says that they are over",
                    receipt.refused, rows[0][0].topic,
                )  # fmt: skip

        self._extend(rows, round(lease_s * 1_000)).add_done_callback(answered)

    def _extend(
        self, parts: Sequence[tuple[DeliveredBatch, NDArray[np.int64] | None]], lease_ms: int
    ) -> asyncio.Future[consumer_pb2.ExtendReceipt]:
        future: asyncio.Future[consumer_pb2.ExtendReceipt] = asyncio.get_running_loop().create_future()
        self._submit(Settling(parts, {"lease_ms": lease_ms}, future))
        return future

    def _submit(self, settling: Settling) -> None:
        if self._ended:
            _fail(settling.future, OutcomeUnknown("the consumer has ended: nothing settles any more", "CLOSED"))
            return
        settling.sequence = self._sequence()
        self._hand_in(settling)
        # Only now: a refused argument must not be repeated on each new stream.
        self._waiting[settling.sequence] = settling

    def _hand_in(self, settling: Settling) -> None:
        if self._mixes and settling.acknowledges:
            if not self._gathered:
                asyncio.get_running_loop().call_soon(self._send_gathered)
            self._gathered.append(settling)
        else:
            self._send(settling.message())

    def _sequence(self) -> int:
        sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
        return sequence

    def _send_gathered(self) -> None:
        """Send the acknowledgements of this pass of the loop, as one settlement where the node takes that."""
        gathered, self._gathered = self._gathered, []
        for some in together(gathered) if self._mixes else ([one] for one in gathered):
            if len(some) == 1:
                self._send(some[0].message())
            else:
                sequence = self._sequence()
                self._joint[sequence] = some
                self._send(joint(some, sequence))

    def _send_credits(self, credits: int) -> None:
        self._send(consumer_pb2.ConsumeRequest(credits=credits))

    def _send(self, message: consumer_pb2.ConsumeRequest) -> None:
        self._outbox.append(message)
        self._outbox_changed.set()

    # -- the stream

    def _start(self) -> None:
        if self._running is None and not self._closing:
            self._stream.watch()
            self._running = start_task(self._run(), f"the stream of group {self._open.group}", self._failed)

    def _failed(self, error: BaseException) -> None:
        """A mistake of this client, or of the node: nobody may wait for ever."""
        self._end(unforeseen(error))

    async def _run(self) -> None:
        backoff = Backoff()
        deadline = Deadline(self._unavailable_s_max)
        while not self._closing:
            opened_before = self._generation
            try:
                fault = await self._stream.once(deadline)
            except TickwheelError as error:
                self._end(error)
                return
            assert fault is not None, "a consumer's stream ends by a fault"
            if self._generation != opened_before:
                backoff.reset()
                deadline = Deadline(self._unavailable_s_max)
            if self._closing:
                return
            if not (fault.elsewhere or fault.later) or deadline.over:
                self._end(error_of(fault))
                return
            self.reconnects += 1
            _log.info("the stream of group %s ended (%s): it is opened anew", self._open.group, fault.message)
            if not backoff.follows(fault.master_address):
                await backoff.pause(deadline, fault.retry_after_s)

    def _end(self, error: TickwheelError | None) -> None:
        self._ended = True
        self._stream.unwatch()
        waiting, self._waiting = self._waiting, {}
        for settling in waiting.values():
            _fail(settling.future, OutcomeUnknown("the consumer ended before the receipt came", "OUTCOME_UNKNOWN"))
        self._coming.end(error)

    async def _talk(self, address: str) -> Fault:
        """Use one stream to this node until it ends or this task is cancelled, which abandons the stream."""
        call = ConsumerStub(self._cluster.channel(address)).Consume()  # type: ignore[call-arg]
        fault: Fault
        try:
            await call.write(self._opening())
            while True:
                response: Any = await call.read()
                if response is END_OF_STREAM:
                    fault = Fault("UNAVAILABLE", "the node ended the stream")
                    break
                if response.HasField("deliver"):
                    self._take(response.deliver)
                elif response.HasField("settled"):
                    self._settled(response.settled)
                elif response.HasField("extended"):
                    self._extended(response.extended)
                elif response.HasField("opened"):
                    self._opened(response.opened)
                    self._stream.beside(self._write(call), "the writer of a consumer")
                    self._stream.beside(self._renew_while_open(), "the renewal of leases")
                elif response.HasField("moved"):
                    where = response.moved.master_address
                    fault = Fault("NOT_MASTER", "the master has moved", {"master_address": where})
                    break
        except grpc.aio.AioRpcError as error:
            fault = fault_of_call(error)
        finally:
            call.cancel()
        return fault

    def _opening(self) -> consumer_pb2.ConsumeRequest:
        """The first request of a new stream, with the credits that no held delivery takes."""
        first = consumer_pb2.OpenConsumer()
        first.CopyFrom(self._open)
        first.credits = self._held.opening()
        return consumer_pb2.ConsumeRequest(open=first)

    def _opened(self, opened: consumer_pb2.Opened) -> None:
        self._generation += 1
        self.term = opened.term
        self._lease_s = opened.lease_ms / 1_000
        # The opening carried all waiting credits. Settlements without a receipt are sent again.
        self._outbox.clear()
        self._gathered.clear()
        self._joint.clear()
        self._mixes = opened.mixes
        if opened.mixes:
            self._send(consumer_pb2.ConsumeRequest(mixed=True))
        for settling in self._waiting.values():
            if settling.acknowledges:
                self._gathered.append(settling)
            else:
                self._send(settling.message())
        self._send_gathered()
        self._held.opened()
        self._outbox_changed.set()

    async def _write(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):  # whoever reads gets the reason
            while True:
                if self._outbox:
                    await call.write(self._outbox.popleft())
                else:
                    self._outbox_changed.clear()
                    await self._outbox_changed.wait()

    def _take(self, wire: consumer_pb2.DeliverBatch) -> None:
        batches: list[DeliveredBatch] = []
        skips: list[tuple[DeliveredBatch, NDArray[np.int64]]] = []
        for columns in columns_of(wire):
            foreign = mismatches(wire.filter, columns)
            self._held.came(len(columns.ids), len(foreign))
            if len(foreign):
                skips.append((DeliveredBatch(columns, self), foreign))
                columns = columns.without(foreign)
            if len(columns.ids):
                batches.append(DeliveredBatch(columns, self))
        self._held.take(batches, self._lease_s)
        for batch, foreign in skips:
            self.skipped += len(foreign)
            self.settle_rows(batch, foreign, consumer_pb2.SKIP)
        self._has_held.set()
        self._coming.put(batches)
        if self._held.full:
            self._coming.end(None)

    def _settled(self, receipt: consumer_pb2.SettleReceipt) -> None:
        some = self._joint.pop(receipt.sequence, None)
        if some is not None:
            counts = np.frombuffer(receipt.parts, "<u4").reshape(-1, 3).tolist()
        elif receipt.sequence in self._waiting:
            some = [self._waiting[receipt.sequence]]
            counts = [[receipt.settled, receipt.stale, receipt.unknown]]
        else:
            return
        if receipt.error:
            self._refused(some, fault_of_status(receipt.error))
            return
        early: list[Settling] = []
        for settling, (settled, stale, unknown) in zip(some, counts, strict=True):
            if stale:
                self._note_stale(settling, stale)
            if unknown and settling.tries < UNKNOWN_TRIES_MAX:
                early.append(settling)
            else:
                self._answer(settling, SettleReceipt(settled, stale, unknown))
        if early:
            self._again(early, Fault("NO_MASTER", "not known to be dispatched yet"))

    def _extended(self, receipt: consumer_pb2.ExtendReceipt) -> None:
        settling = self._waiting.get(receipt.sequence)
        if settling is None:
            return
        if receipt.error:
            self._refused([settling], fault_of_status(receipt.error))
        else:
            self._answer(settling, receipt)

    def _note_stale(self, settling: Settling, count: int) -> None:
        self.stale += count
        ids = np.frombuffer(settling.ids, "<u8")
        shown = ", ".join(id_text(id64) for id64 in ids[:IDS_SHOWN_MAX].tolist())
        _log.warning(
            "%d of %d settlements (%s) of group %s, topic %s came too late: the leases were over, or the messages were "
            "settled otherwise (%s%s)",
            count, len(ids), consumer_pb2.Outcome.Name(settling.terms["outcome"]), settling.group, settling.topic,
            shown, ", ..." if len(ids) > IDS_SHOWN_MAX else "",
        )  # fmt: skip

    def _answer(self, settling: Settling, receipt: SettleReceipt | consumer_pb2.ExtendReceipt) -> None:
        self._waiting.pop(settling.sequence, None)
        if not settling.future.done():
            settling.future.set_result(receipt)

    def _refused(self, some: Sequence[Settling], fault: Fault) -> None:
        """A node has refused these, which were sent together."""
        if fault.elsewhere or fault.later:
            self._again(some, fault)
            return
        for settling in some:
            if len(some) > 1:
                # The reason may lie with one of them, a topic without the right to it for example: each asks by itself.
                self._send(settling.message())
            else:
                self._waiting.pop(settling.sequence, None)
                _fail(settling.future, error_of(fault))

    def _again(self, some: Sequence[Settling], fault: Fault) -> None:
        """Repeat these together after a pause if the stream is still the same; a new stream repeats all settlements."""
        for settling in some:
            settling.tries += 1
        generation = self._generation

        def send() -> None:
            if generation == self._generation:
                for settling in some:
                    if settling.sequence in self._waiting:
                        self._hand_in(settling)

        tries = max(settling.tries for settling in some)
        pause_s = max(fault.retry_after_s, min(0.5, 0.02 * 2 ** min(tries, 5)))
        asyncio.get_running_loop().call_later(pause_s, send)

    # -- the end

    def stop_taking(self) -> None:
        """Ask for no more deliveries, while those that have come can still be settled and keep their leases. Some may
        come yet. For a program that ends; there is no way back."""
        self._held.stop()

    async def drain(self, timeout_s: float = CLOSE_S) -> None:
        """Wait until all settlements so far have receipts, at most `timeout_s`."""
        if self._acks:
            self._send_acks()
        if self._gathered:
            self._send_gathered()
        futures = [settling.future for settling in self._waiting.values()]
        if futures and self._running is not None and not self._running.done():
            await asyncio.wait(futures, timeout=timeout_s)

    async def close(self) -> None:
        """Drain, then end. Held deliveries are delivered again elsewhere. Idempotent. If the wait is cancelled, it ends
        all the same."""
        if self._closing:
            return
        try:
            await self.drain()
        finally:
            running = self._end_stream()
        if running is not None:
            await asyncio.gather(running, return_exceptions=True)

    def _end_stream(self) -> asyncio.Task[None] | None:
        """End, without a wait. Returns what ends a moment later."""
        self._closing = True
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
        self._end(None)
        self._closed_hook(self)
        return running

    async def __aenter__(self) -> Consumer:
        self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _together(due: Sequence[HeldBatch]) -> Iterator[list[HeldBatch]]:
    """Batches grouped for one renewal each: of one topic, epoch and lease length, up to RENEW_MESSAGES_MAX messages."""
    by_key: dict[tuple[str, int, float], list[HeldBatch]] = {}
    for held in due:
        by_key.setdefault((held.batch.topic, held.batch.columns.epoch, held.lease_s), []).append(held)
    for some in by_key.values():
        part: list[HeldBatch] = []
        count = 0
        for held in some:
            if part and count + held.batch.unsettled > RENEW_MESSAGES_MAX:
                yield part
                part, count = [], 0
            part.append(held)
            count += held.batch.unsettled
        yield part


def _fail(future: asyncio.Future[Any], error: TickwheelError) -> None:
    """End a future by an error. asyncio does not log it if the caller drops the future."""
    if not future.done():
        future.set_exception(error)
        future.exception()


def _share(receipts: Sequence[asyncio.Future[SettleReceipt]], shared: asyncio.Future[SettleReceipt]) -> None:
    """Tell everybody whose acknowledgements left together what has become of them."""
    error = shared.exception()
    for receipt in receipts:
        if isinstance(error, TickwheelError):
            _fail(receipt, error)
        elif not receipt.done():
            receipt.set_result(shared.result())


def _as_error(error: BaseException | None) -> TickwheelError:
    if isinstance(error, TickwheelError):
        return error
    return TickwheelError(f"{type(error).__name__}: {error}", "HANDLER")
