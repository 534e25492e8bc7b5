"""A producer: many messages a second, in batches, over one stream.

Fills batches by size and linger, and bounds the bytes under way: at the bound callers wait, which is the back-pressure.
Order is kept; `batch_stream` repeats batches. `schedule_columns` does no work per message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tickwheel.client.batch_stream import Batch, BatchStream
from tickwheel.client.cluster import Cluster
from tickwheel.client.errors import ClientClosed, TickwheelError, check_names, refused, unforeseen
from tickwheel.client.messages import (
    BatchReceipt,
    KeyOptions,
    MessageOptions,
    Receipt,
    Row,
    batch_of,
    jitter_ms_of,
    receipts_of,
    row_of,
)
from tickwheel.client.moments import ms_of
from tickwheel.client.numbered import new_producer_id
from tickwheel.client.payloads import Payload
from tickwheel.client.unique_keys import KEYED_MAX, KeyTaken, check_no_rule, rule_of
from tickwheel.proto import common_pb2, scheduler_pb2

if TYPE_CHECKING:
    from tickwheel.client.tracing import Tracing

BATCH_MESSAGES_MAX = 1_000
BATCH_BYTES_MAX = 1 << 20
LINGER_MS = 5
BUFFER_BYTES_MAX = 64 << 20
IN_FLIGHT_MAX = 32
TIMEOUT_S = 60.0
ROW_BYTES = 64
"""Approximate bytes of a message besides payload and meta."""


class Producer:
    """Made by `AsyncClient.producer`. As an async context manager it flushes at its end."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        producer_id: str | None = None,
        batch_messages_max: int = BATCH_MESSAGES_MAX,
        batch_bytes_max: int = BATCH_BYTES_MAX,
        linger_ms: float = LINGER_MS,
        buffer_bytes_max: int = BUFFER_BYTES_MAX,
        in_flight_max: int = IN_FLIGHT_MAX,
        timeout_s: float = TIMEOUT_S,
        closed: Callable[[Producer], None] | None = None,
        client_name: str = "",
        owner: str = "",
        tracing: Tracing | None = None,
    ) -> None:
        self.producer_id = producer_id or new_producer_id()
        self._batch_messages_max = batch_messages_max
        self._batch_bytes_max = batch_bytes_max
        self._linger_s = linger_ms / 1_000
        self._buffer_bytes_max = buffer_bytes_max
        self._closed_hook = closed
        self._tracing = tracing
        self._stream = BatchStream(
            cluster,
            self.producer_id,
            in_flight_max=in_flight_max,
            timeout_s=timeout_s,
            answered=self._answered,
            client_name=client_name,
            owner=owner,
        )
        self._rows: list[Row] = []
        self._row_futures: list[asyncio.Future[Receipt]] = []
        self._rows_bytes = 0
        self._rows_keyed = 0
        self._timer: asyncio.TimerHandle | None = None
        self._bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    @property
    def bytes_under_way(self) -> int:
        """Bytes accepted from callers and not yet answered."""
        return self._bytes

    @property
    def reconnects(self) -> int:
        """Number of times the stream was opened anew after a fault."""
        return self._stream.reconnects

    # -- one by one, batched behind the scenes

    async def send(self, topic: str, payload: Payload, **options: Unpack[MessageOptions]) -> asyncio.Future[Receipt]:
        """Add a message to the next batch; waits only for room. The future gets the receipt or a TickwheelError."""
        if self._tracing is None:
            row = row_of(topic, payload, **options)
            size = _size_of(row)
            if not self._take_room(size):
                await self._wait_for_room(size)
            return self._add(row, size)
        span = self._tracing.sending(topic, options)
        try:
            row = row_of(topic, payload, **span.options)
            await self._wait_for_room(_size_of(row))
            receipt = self._add(row, _size_of(row))
        except BaseException as error:
            span.failed(error)
            raise
        span.watch(receipt)
        return receipt

    def _add(self, row: Row, size: int) -> asyncio.Future[Receipt]:
        """Add a row, for which room of this size was taken."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Receipt] = loop.create_future()
        if self._rows_bytes + size > self._batch_bytes_max:
            self._send_rows()
        self._rows.append(row)
        self._row_futures.append(future)
        self._rows_bytes += size
        if row.unique_key:
            self._rows_keyed += 1
        if len(self._rows) >= self._batch_messages_max or self._rows_keyed >= KEYED_MAX:
            self._send_rows()
        elif self._timer is None:
            self._timer = loop.call_later(self._linger_s, self._send_rows)
        return future

    async def schedule(self, topic: str, payload: Payload, **options: Unpack[MessageOptions]) -> Receipt:
        """Send a message and wait for its receipt."""
        return await (await self.send(topic, payload, **options))

    # -- many at once

    async def schedule_many(
        self, topic: str, messages: Iterable[tuple[int | datetime, bytes]]
    ) -> list[asyncio.Future[BatchReceipt]]:
        """Send messages of one topic, given as (due time, payload), in batches. Returns a future for each batch.

        A due time is milliseconds since the Unix epoch, or an aware datetime.
        """
        futures: list[asyncio.Future[BatchReceipt]] = []
        due: list[int | datetime] = []
        payloads: list[bytes] = []
        total = 0
        for when, payload in messages:
            if due and (len(due) >= self._batch_messages_max or total + len(payload) > self._batch_bytes_max):
                futures.append(await self._send_payloads(topic, due, payloads))
                due, payloads, total = [], [], 0
            due.append(when)
            payloads.append(payload)
            total += len(payload)
        if due:
            futures.append(await self._send_payloads(topic, due, payloads))
        return futures

    async def _send_payloads(
        self, topic: str, due: list[int | datetime], payloads: list[bytes]
    ) -> asyncio.Future[BatchReceipt]:
        sizes = np.fromiter(map(len, payloads), "<u4", len(payloads))
        due_ms = np.array(due)
        if due_ms.dtype.kind == "O":  # some are datetimes, or no times at all
            due_ms = np.array([ms_of("at", when) if isinstance(when, datetime) else when for when in due])
        return await self.schedule_columns(topic, due_ms, sizes, b"".join(payloads))

    async def schedule_columns(
        self,
        topic: str,
        due_ms: ArrayLike | None,
        payload_sizes: ArrayLike,
        payloads: bytes,
        *,
        delay_ms: ArrayLike | None = None,
        delay_levels: ArrayLike | None = None,
        meta_sizes: ArrayLike | None = None,
        metas: bytes = b"",
        jitter: timedelta | None = None,
        **keys: Unpack[KeyOptions],
    ) -> asyncio.Future[BatchReceipt]:
        """Send n messages as one batch of columns. Waits for room; the future gets the receipt.

        Give int64[n] due times or delays, or uint32[n] levels. `payload_sizes` is uint32[n], `payloads` the payloads
        one after the other; serialized MessageMeta likewise. The jitter window holds for all messages. `keys`
        (on_key_conflict, key_until_settled) holds for all whose meta has a unique key; the receipt has each outcome.
        """
        if sum(column is not None for column in (due_ms, delay_ms, delay_levels)) != 1:
            raise refused("due_ms", "several or none", "exactly one of due_ms, delay_ms and delay_levels")
        check_names(keys, KeyOptions)
        on_key_conflict, key_until_settled = keys.get("on_key_conflict"), keys.get("key_until_settled", False)
        if not metas:
            check_no_rule(on_key_conflict, key_until_settled, "metas that have unique keys")
        rule = rule_of(on_key_conflict, key_until_settled, common_pb2.KEY_CONFLICT_UNSPECIFIED)
        columns = scheduler_pb2.ColumnBatch(
            topic=topic,
            payload_sizes=_column("payload_sizes", payload_sizes, "<u4"),
            payloads=payloads,
            metas=metas,
            jitter_ms=jitter_ms_of(jitter),
            on_key_conflict=rule.conflict,
            key_until_settled=rule.until_settled,
        )
        if due_ms is not None:
            columns.due_ms = _column("due_ms", due_ms, "<i8")
        elif delay_ms is not None:
            columns.delay_ms = _column("delay_ms", delay_ms, "<i8")
        elif delay_levels is not None:
            columns.delay_levels = _column("delay_levels", delay_levels, "<u4")
        if meta_sizes is not None:
            columns.meta_sizes = _column("meta_sizes", meta_sizes, "<u4")
        self._send_rows()
        return await self._put(scheduler_pb2.ScheduleBatch(columns=columns))

    async def flush(self) -> None:
        """Wait until all messages accepted so far are answered."""
        self._send_rows()
        await self._idle.wait()

    async def close(self) -> None:
        """Flush and end. Idempotent."""
        if not self._closed:
            await self.flush()
        await self.abandon()

    async def abandon(self) -> None:
        """End at once. Messages without a receipt end with OutcomeUnknown."""
        self._closed = True
        self._send_rows()
        await self._stream.close()
        if self._closed_hook is not None:
            self._closed_hook(self)

    async def __aenter__(self) -> Producer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.close()
        else:
            await self.abandon()

    # -- inside

    def _take_room(self, size: int) -> bool:
        """Take room for so many bytes, if it is there. Raises ClientClosed."""
        if self._closed:
            raise ClientClosed("the producer")
        if self._bytes and self._bytes + size > self._buffer_bytes_max:
            return False
        if not self._bytes:
            self._idle.clear()
        self._bytes += size
        return True

    async def _wait_for_room(self, size: int) -> None:
        """Take room as soon as it is there."""
        while not self._take_room(size):
            self._send_rows()
            self._room.clear()
            await self._room.wait()

    def _give_room(self, size: int) -> None:
        self._bytes -= size
        self._room.set()
        if self._bytes == 0:
            self._idle.set()

    async def _put(self, request: scheduler_pb2.ScheduleBatch) -> asyncio.Future[BatchReceipt]:
        batch = Batch(request, asyncio.get_running_loop().create_future())
        await self._wait_for_room(batch.bytes)
        batch.future.add_done_callback(_seen)
        self._stream.put(batch)
        return batch.future

    def _send_rows(self) -> None:
        """Send the collected rows as a batch."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._rows:
            return
        rows, futures, size = self._rows, self._row_futures, self._rows_bytes
        self._rows, self._row_futures, self._rows_bytes, self._rows_keyed = [], [], 0, 0
        batch = Batch(batch_of(rows), asyncio.get_running_loop().create_future())
        self._bytes += batch.bytes - size
        batch.future.add_done_callback(lambda done: _spread(done, futures, rows))
        self._stream.put(batch)

    def _answered(self, batch: Batch) -> None:
        self._give_room(batch.bytes)


def _size_of(row: Row) -> int:
    return len(row.payload) + len(row.meta) + ROW_BYTES


EXACT_MAX = 1 << 53
"""Floating-point numbers up to this one hold each whole number exactly."""


def _column(field: str, values: ArrayLike, kind: str) -> bytes:
    given = np.asarray(values)
    whole = given.dtype.kind in "iu"
    if given.dtype.kind == "f":  # as numpy.ones makes
        whole = bool(((given == np.floor(given)) & (np.abs(given) <= EXACT_MAX)).all())
    if not whole and given.size:  # numpy would turn fractions and datetimes into some integer
        raise refused(field, f"an array of {given.dtype}", "an array of whole numbers")
    array: NDArray[np.generic] = np.ascontiguousarray(given, dtype=kind)
    return array.tobytes()


def _seen(future: asyncio.Future[BatchReceipt]) -> None:
    """Mark the error of a future as retrieved, so that asyncio does not log it if the caller drops the future."""
    if not future.cancelled():
        future.exception()


def _spread(done: asyncio.Future[BatchReceipt], futures: list[asyncio.Future[Receipt]], rows: list[Row]) -> None:
    error = done.exception() if not done.cancelled() else TickwheelError("cancelled", "CANCELLED")
    told: list[tuple[asyncio.Future[Receipt], Receipt | KeyTaken]] = []
    if error is None:
        try:
            told = list(zip(futures, receipts_of(done.result(), rows), strict=True))
        except Exception as mistake:  # the node has left some out: nobody may wait for ever
            error = unforeseen(mistake)
    if error is not None:
        for future in futures:
            if not future.done():
                future.set_exception(error)
                future.exception()
        return
    for future, receipt in told:
        if future.done():
            continue
        if isinstance(receipt, KeyTaken):
            future.set_exception(receipt)
            future.exception()
        else:
            future.set_result(receipt)
