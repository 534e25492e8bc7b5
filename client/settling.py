"""Builds a consumer's requests about deliveries: settlements and lease extensions. Pure.

Rows are places in a batch; None means all rows. Ids, attempts and positions are sent as they were received.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tickwheel.client.delivery import DeliveredBatch
from tickwheel.proto import consumer_pb2

Rows = NDArray[np.int64]


def _some(column: NDArray[Any], rows: Rows | None) -> bytes:
    return (column if rows is None else column[rows]).tobytes()


def settle_batch(
    batch: DeliveredBatch,
    rows: Rows | None,
    outcome: consumer_pb2.Outcome.ValueType,
    *,
    delay_ms: int = 0,
    delay_level: int = 0,
    reason: str = "",
) -> consumer_pb2.SettleBatch:
    """The request that settles rows of one batch."""
    columns = _columns([(batch, rows)])
    # The text of an error may hold a name of a file whose bytes are no UTF-8. That must not keep it from being settled.
    reason = reason.encode(errors="replace").decode()
    return consumer_pb2.SettleBatch(
        outcome=outcome, delay_ms=delay_ms, delay_level=delay_level, reason=reason, **columns
    )


def acknowledge(parts: Sequence[tuple[DeliveredBatch, Rows]]) -> consumer_pb2.SettleBatch:
    """One request that acknowledges rows of several batches of the same topic and epoch."""
    return consumer_pb2.SettleBatch(outcome=consumer_pb2.ACK, **_columns(parts))


def extend(parts: Sequence[tuple[DeliveredBatch, Rows | None]], lease_ms: int) -> consumer_pb2.ExtendBatch:
    """One request that extends leases to `lease_ms` from now, for rows of several batches of one topic and epoch."""
    return consumer_pb2.ExtendBatch(lease_ms=lease_ms, **_columns(parts))


JOINT_TOPICS_MAX = 512
"""Topics in one settlement: as many as a node accepts."""
JOINT_MESSAGES_MAX = 10_000
"""Messages in one settlement of several topics; a node accepts ten times as many."""


@dataclass(frozen=True, slots=True)
class Together:
    """Acknowledgements that leave as one: the request without its sequence, and the sequences of its parts in order."""

    batch: consumer_pb2.SettleBatch
    sequences: list[int]


def together(acknowledgements: Sequence[consumer_pb2.SettleBatch]) -> Iterator[Together]:
    """Acknowledgements of one group, each of one topic, as few settlements of several topics."""
    some: list[consumer_pb2.SettleBatch] = []
    count = 0
    for batch in acknowledgements:
        rows = len(batch.ids) // 8
        full = len(some) == JOINT_TOPICS_MAX or count + rows > JOINT_MESSAGES_MAX
        if some and full:
            yield _joined(some)
            some, count = [], 0
        some.append(batch)
        count += rows
    if some:
        yield _joined(some)


def _joined(some: Sequence[consumer_pb2.SettleBatch]) -> Together:
    batch = consumer_pb2.SettleBatch(
        group=some[0].group,
        outcome=consumer_pb2.ACK,
        ids=b"".join([part.ids for part in some]),
        attempts=b"".join([part.attempts for part in some]),
        positions=b"".join([part.positions for part in some]),
        topics=[part.topic for part in some],
        topic_counts=np.array([len(part.ids) // 8 for part in some], "<u4").tobytes(),
        epochs=np.array([part.epoch for part in some], "<u4").tobytes(),
    )
    return Together(batch, [part.sequence for part in some])


def receipts(receipt: consumer_pb2.SettleReceipt, sequences: Sequence[int]) -> list[consumer_pb2.SettleReceipt]:
    """The receipt of a settlement of several topics as one for each of its parts."""
    if receipt.error:
        return [consumer_pb2.SettleReceipt(sequence=sequence, error=receipt.error) for sequence in sequences]
    counts = np.frombuffer(receipt.parts, "<u4").reshape(-1, 3).tolist()
    return [
        consumer_pb2.SettleReceipt(sequence=sequence, settled=settled, stale=stale, unknown=unknown)
        for sequence, (settled, stale, unknown) in zip(sequences, counts, strict=True)
    ]


def by_topic(wire: consumer_pb2.DeliverBatch) -> list[consumer_pb2.DeliverBatch]:
    """A batch of several topics as batches of one each."""
    counts, epochs = (np.frombuffer(column, "<u4").tolist() for column in (wire.topic_counts, wire.epochs))
    ends = np.cumsum(np.frombuffer(wire.sizes, "<u4"), dtype=np.int64)
    ids, attempts, positions, due_ms = wire.ids, wire.attempts, wire.positions, wire.due_ms
    meta_sizes, sizes, records = wire.meta_sizes, wire.sizes, wire.records
    parts = []
    first = start = 0
    for topic, count, epoch in zip(wire.topics, counts, epochs, strict=True):
        last = first + count
        end = int(ends[last - 1])
        eights, fours = slice(8 * first, 8 * last), slice(4 * first, 4 * last)
        parts.append(
            consumer_pb2.DeliverBatch(
                topic=topic,
                group=wire.group,
                term=wire.term,
                ids=ids[eights],
                attempts=attempts[fours],
                positions=positions[eights],
                due_ms=due_ms[eights],
                meta_sizes=meta_sizes[fours],
                sizes=sizes[fours],
                records=records[start:end],
                lease_until_ms=wire.lease_until_ms,
                filter=wire.filter,
                epoch=epoch,
            )
        )
        first, start = last, end
    return parts


def _columns(parts: Sequence[tuple[DeliveredBatch, Rows | None]]) -> dict[str, Any]:
    wire = parts[0][0].wire
    with_positions = all(len(batch.positions) for batch, _ in parts)
    return {
        "group": wire.group,
        "topic": wire.topic,
        "ids": b"".join([_some(batch.ids, rows) for batch, rows in parts]),
        "attempts": b"".join([_some(batch.attempts, rows) for batch, rows in parts]),
        "epoch": wire.epoch,
        "positions": b"".join([_some(batch.positions, rows) for batch, rows in parts]) if with_positions else b"",
    }
