"""Builds a consumer's requests about deliveries: settlements and lease extensions. Pure.

Rows are places in a batch; None means all rows. Ids, attempts and positions are sent as they were received.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tickwheel.client.delivery import DeliveredBatch
from tickwheel.proto import consumer_pb2

Rows = NDArray[np.int64]


def _positions(batch: DeliveredBatch, rows: Rows | None) -> bytes:
    wire = batch.wire
    if not wire.positions or rows is None:
        return wire.positions
    return np.frombuffer(wire.positions, "<u8")[rows].tobytes()


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
    wire = batch.wire
    return consumer_pb2.SettleBatch(
        group=wire.group,
        topic=wire.topic,
        outcome=outcome,
        ids=wire.ids if rows is None else batch.ids[rows].tobytes(),
        attempts=wire.attempts if rows is None else batch.attempts[rows].tobytes(),
        delay_ms=delay_ms,
        delay_level=delay_level,
        reason=reason,
        epoch=wire.epoch,
        positions=_positions(batch, rows),
    )


def acknowledge(parts: Sequence[tuple[DeliveredBatch, Rows]]) -> consumer_pb2.SettleBatch:
    """One request that acknowledges rows of several batches of the same topic and epoch."""
    return consumer_pb2.SettleBatch(outcome=consumer_pb2.ACK, **_columns(parts))


def extend(parts: Sequence[tuple[DeliveredBatch, Rows]], lease_ms: int) -> consumer_pb2.ExtendBatch:
    """One request that extends leases to `lease_ms` from now, for rows of several batches of one topic and epoch."""
    return consumer_pb2.ExtendBatch(lease_ms=lease_ms, **_columns(parts))


def _columns(parts: Sequence[tuple[DeliveredBatch, Rows]]) -> dict[str, Any]:
    wire = parts[0][0].wire
    with_positions = all(batch.wire.positions for batch, _ in parts)
    return {
        "group": wire.group,
        "topic": wire.topic,
        "ids": b"".join([batch.ids[rows].tobytes() for batch, rows in parts]),
        "attempts": b"".join([batch.attempts[rows].tobytes() for batch, rows in parts]),
        "epoch": wire.epoch,
        "positions": b"".join([_positions(batch, rows) for batch, rows in parts]) if with_positions else b"",
    }


def extend_batch(batch: DeliveredBatch, rows: Rows | None, lease_ms: int) -> consumer_pb2.ExtendBatch:
    """The request that extends leases of rows of one batch to `lease_ms` from now."""
    wire = batch.wire
    return consumer_pb2.ExtendBatch(
        group=wire.group,
        topic=wire.topic,
        lease_ms=lease_ms,
        ids=wire.ids if rows is None else batch.ids[rows].tobytes(),
        attempts=wire.attempts if rows is None else batch.attempts[rows].tobytes(),
        epoch=wire.epoch,
        positions=_positions(batch, rows),
    )
