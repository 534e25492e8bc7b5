"""Received batches, whose messages are decoded when they are read, and the single deliveries in them.

A column is copied from the received message once, for all topics: protobuf copies a field of bytes at each look. To
settle a whole batch sends its columns back unchanged.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tickwheel.client.errors import refused
from tickwheel.client.ids import id_text
from tickwheel.client.messages import read_meta
from tickwheel.client.moments import moment_of, span_ms_of
from tickwheel.client.payloads import Carrier, content_type_of
from tickwheel.proto import common_pb2, consumer_pb2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SettleReceipt:
    """What became of deliveries that were settled together. It is committed."""

    settled: int
    """Settled by this, or before with the same outcome."""
    stale: int = 0
    """Came too late: another attempt is out, or the message was settled otherwise."""
    unknown: int = 0
    """The master did not know of their dispatch."""


class Settler(Protocol):
    """The consumer that received a batch, as its deliveries use it."""

    def settle_rows(
        self,
        batch: DeliveredBatch,
        rows: NDArray[np.int64] | None,
        outcome: consumer_pb2.Outcome.ValueType,
        *,
        delay_ms: int = 0,
        delay_level: int = 0,
        reason: str = "",
    ) -> Awaitable[SettleReceipt]: ...

    def settle_one(self, batch: DeliveredBatch, row: int) -> Awaitable[SettleReceipt]: ...

    def extend_rows(self, batch: DeliveredBatch, rows: NDArray[np.int64] | None, lease_ms: int) -> Awaitable[int]: ...


class Columns(NamedTuple):
    """Deliveries of one topic as a node sent them: what they share, a column for each number, and their records."""

    group: str
    term: int
    lease_until_ms: int
    topic: str
    epoch: int
    ids: NDArray[np.uint64]
    attempts: NDArray[np.uint32]
    positions: NDArray[np.uint64]
    """Empty if the node did not say."""
    due_ms: NDArray[np.int64]
    meta_sizes: NDArray[np.uint32]
    sizes: NDArray[np.uint32]
    records: bytes

    def named(self, rows: NDArray[np.int64] | None) -> tuple[bytes, bytes, bytes]:
        """Ids, attempts and positions of rows, as a node is told them; None: of all rows."""
        if rows is None:
            return self.ids.tobytes(), self.attempts.tobytes(), self.positions.tobytes()
        positions = self.positions[rows] if len(self.positions) else self.positions
        return self.ids[rows].tobytes(), self.attempts[rows].tobytes(), positions.tobytes()

    def without(self, rows: NDArray[np.int64]) -> Columns:
        """All but some of the rows."""
        rest = np.delete(np.arange(len(self.ids)), rows)
        ends = list(accumulate(self.sizes.tolist(), initial=0))
        return self._replace(
            ids=self.ids[rest],
            attempts=self.attempts[rest],
            positions=self.positions[rest] if len(self.positions) else self.positions,
            due_ms=self.due_ms[rest],
            meta_sizes=self.meta_sizes[rest],
            sizes=self.sizes[rest],
            records=b"".join([self.records[ends[row] : ends[row + 1]] for row in rest.tolist()]),
        )


def columns_of(wire: consumer_pb2.DeliverBatch) -> list[Columns]:
    """A received batch, topic by topic."""
    ids, attempts = np.frombuffer(wire.ids, "<u8"), np.frombuffer(wire.attempts, "<u4")
    positions, due_ms = np.frombuffer(wire.positions, "<u8"), np.frombuffer(wire.due_ms, "<i8")
    meta_sizes = np.frombuffer(wire.meta_sizes or bytes(4 * len(ids)), "<u4")
    sizes, records = np.frombuffer(wire.sizes, "<u4"), wire.records
    head = wire.group, wire.term, wire.lease_until_ms
    if not wire.topics:
        columns = ids, attempts, positions, due_ms, meta_sizes, sizes
        return [Columns(*head, wire.topic, wire.epoch, *columns, records)]
    counts, epochs = (np.frombuffer(column, "<u4").tolist() for column in (wire.topic_counts, wire.epochs))
    ends = list(accumulate(sizes.tolist(), initial=0))
    found: list[Columns] = []
    first = 0
    for topic, count, epoch in zip(wire.topics, counts, epochs, strict=True):
        last = first + count
        rows = slice(first, last)
        columns = ids[rows], attempts[rows], positions[rows], due_ms[rows], meta_sizes[rows], sizes[rows]
        found.append(Columns(*head, topic, epoch, *columns, records[ends[first] : ends[last]]))
        first = last
    return found


class DeliveredBatch:
    """Deliveries of one topic, under one lease."""

    def __init__(self, columns: Columns, settler: Settler) -> None:
        self.columns = columns
        self._settler = settler
        self.unsettled = len(columns.ids)
        """Number of deliveries without ack or nack; updated by the consumer."""
        self._held: NDArray[np.bool_] | None = None
        """Marks the unsettled rows; None while all or none are unsettled."""

    def __len__(self) -> int:
        return len(self.columns.ids)

    def leave(self, rows: NDArray[np.int64] | None) -> int:
        """Mark rows (None: all) as no longer held. Returns how many of them were. For the consumer."""
        before = self.unsettled
        if rows is None or len(self) == 1:
            self.unsettled = 0
        elif before:
            if self._held is None:
                self._held = np.ones(len(self), bool)
            self._held[rows] = False
            self.unsettled = int(np.count_nonzero(self._held))
        return before - self.unsettled

    def held_rows(self) -> NDArray[np.int64]:
        """Rows without ack or nack whose lease may still hold. For the consumer."""
        if not self.unsettled:
            return np.zeros(0, np.int64)
        return np.arange(len(self)) if self._held is None else np.flatnonzero(self._held)

    @property
    def topic(self) -> str:
        return self.columns.topic

    @property
    def term(self) -> int:
        """Term of the master that delivered."""
        return self.columns.term

    @property
    def lease_until_ms(self) -> int:
        """When the lease ends, by the cluster's clock."""
        return self.columns.lease_until_ms

    @property
    def lease_until(self) -> datetime:
        """When the lease ends, by the cluster's clock, in UTC."""
        return moment_of(self.columns.lease_until_ms)

    @property
    def ids(self) -> NDArray[np.uint64]:
        return self.columns.ids

    @property
    def attempts(self) -> NDArray[np.uint32]:
        return self.columns.attempts

    @property
    def positions(self) -> NDArray[np.uint64]:
        """Where the messages stand in their topic; empty if the node did not say."""
        return self.columns.positions

    @property
    def due_ms(self) -> NDArray[np.int64]:
        return self.columns.due_ms

    @property
    def sizes(self) -> NDArray[np.uint32]:
        """Bytes of meta and payload together, of each message."""
        return self.columns.sizes

    @property
    def meta_sizes(self) -> NDArray[np.uint32]:
        """Bytes of meta of each message; 0 without meta."""
        return self.columns.meta_sizes

    @cached_property
    def _offsets(self) -> list[int]:
        return list(accumulate(self.columns.sizes.tolist(), initial=0))

    def payload(self, row: int) -> bytes:
        """The payload of one message."""
        return self.columns.records[self._offsets[row] + int(self.meta_sizes[row]) : self._offsets[row + 1]]

    def meta(self, row: int) -> bytes:
        """The serialized meta of one message; `delivery(row)` reads key, tags and headers from it."""
        start = self._offsets[row]
        return self.columns.records[start : start + int(self.meta_sizes[row])]

    def payloads(self) -> list[bytes]:
        """All payloads."""
        return [self.payload(row) for row in range(len(self))]

    def delivery(self, row: int) -> Delivery:
        """One row as a Delivery."""
        return Delivery(self, row, self._settler)

    def __iter__(self) -> Iterator[Delivery]:
        return (Delivery(self, row, self._settler) for row in range(len(self)))

    def ack(self) -> Awaitable[SettleReceipt]:
        """Acknowledge all rows in one settlement. Sent at once; await it for the committed receipt."""
        return self._settler.settle_rows(self, None, consumer_pb2.ACK)

    def nack(self, *, delay: timedelta | None = None, level: int = 0) -> Awaitable[SettleReceipt]:
        """Return all rows, to be delivered again."""
        return self._settler.settle_rows(self, None, consumer_pb2.RETRY, delay_ms=_delay_ms(delay), delay_level=level)

    def extend(self, lease: timedelta) -> Awaitable[int]:
        """Extend the leases of all rows, from now. Returns how many were extended."""
        return self._settler.extend_rows(self, None, _delay_ms(lease))


class Delivery(Carrier):
    """One message, delivered to this consumer under a lease."""

    __slots__ = ("_read", "_settler", "batch", "row")

    def __init__(self, batch: DeliveredBatch, row: int, settler: Settler) -> None:
        self.batch = batch
        self._settler = settler
        self.row = row
        self._read: common_pb2.MessageMeta | None = None

    def __repr__(self) -> str:
        return f"Delivery({self.topic} {self.id}, attempt {self.attempt}, due {self.due_ms})"

    @property
    def topic(self) -> str:
        return self.batch.topic

    @property
    def id64(self) -> int:
        """The id as one integer."""
        return int(self.batch.ids[self.row])

    @property
    def id(self) -> str:
        """The id that `schedule` returned, `group-hour-index`; the same at every attempt."""
        return id_text(self.id64)

    @property
    def attempt(self) -> int:
        """1 for the first delivery."""
        return int(self.batch.attempts[self.row])

    @property
    def term(self) -> int:
        """Term of the master that delivered."""
        return self.batch.term

    @property
    def due_ms(self) -> int:
        """Its due time in milliseconds since the Unix epoch."""
        return int(self.batch.due_ms[self.row])

    @property
    def due(self) -> datetime:
        """Its due time in UTC."""
        return moment_of(self.due_ms)

    @property
    def payload(self) -> bytes:
        return self.batch.payload(self.row)

    @property
    def _meta(self) -> common_pb2.MessageMeta:
        if self._read is None:
            self._read = read_meta(self.batch.meta(self.row)) or common_pb2.MessageMeta()
        return self._read

    @property
    def key(self) -> str:
        return self._meta.key

    @property
    def tags(self) -> list[str]:
        return list(self._meta.tags)

    @property
    def headers(self) -> dict[str, str]:
        return dict(self._meta.headers)

    @property
    def message_group(self) -> str:
        return self._meta.message_group

    @property
    def unique_key(self) -> str:
        """Empty without one."""
        return self._meta.unique_key

    @property
    def content_type(self) -> str:
        """The content type of its payload; empty without one."""
        return content_type_of(self._meta.headers)

    def _rows(self) -> NDArray[np.int64]:
        return np.array([self.row], np.int64)

    def ack(self) -> Awaitable[SettleReceipt]:
        """Acknowledge. Acknowledgements of the same moment are sent together; await it for the committed receipt."""
        return self._settler.settle_one(self.batch, self.row)

    def nack(self, *, delay: timedelta | None = None, level: int = 0, reason: str = "") -> Awaitable[SettleReceipt]:
        """Deliver again: at the group's pace, after `delay`, or at a delay level."""
        return self._settler.settle_rows(
            self.batch,
            self._rows(),
            consumer_pb2.RETRY,
            delay_ms=_delay_ms(delay),
            delay_level=level,
            reason=reason[:1_024],
        )

    def dead(self, reason: str = "") -> Awaitable[SettleReceipt]:
        """Move the message to the dead letters, without further attempts."""
        return self._settler.settle_rows(self.batch, self._rows(), consumer_pb2.DEAD, reason=reason[:1_024])

    async def extend(self, lease: timedelta) -> bool:
        """Extend the lease, from now. False: the lease is over or the message is settled."""
        return await self._settler.extend_rows(self.batch, self._rows(), _delay_ms(lease)) == 1


def _delay_ms(delay: timedelta | None) -> int:
    if delay is None:
        return 0
    delay_ms = span_ms_of("delay", delay)
    if delay_ms < 0:
        raise refused("delay", delay, "not negative")
    return delay_ms
