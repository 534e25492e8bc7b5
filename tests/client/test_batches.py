"""Batches as their readers see them."""

from __future__ import annotations

from time import process_time

import numpy as np

from tickwheel.client.delivery import DeliveredBatch
from tickwheel.client.filtering import without
from tickwheel.client.settling import settle_batch
from tickwheel.proto import common_pb2, consumer_pb2

META = common_pb2.MessageMeta(key="k", tags=["a"], headers={"h": "v"})


def batch_of(count: int, size: int) -> consumer_pb2.DeliverBatch:
    """A batch as a node sends it: each message has META and as many bytes as these."""
    meta = META.SerializeToString()
    rows = np.arange(count)
    return consumer_pb2.DeliverBatch(
        topic="orders",
        group="g",
        ids=(rows + 7).astype("<u8").tobytes(),
        attempts=(rows % 3 + 1).astype("<u4").tobytes(),
        positions=(rows + 50).astype("<u8").tobytes(),
        due_ms=(rows + 1_000).astype("<i8").tobytes(),
        sizes=np.full(count, len(meta) + size, "<u4").tobytes(),
        meta_sizes=np.full(count, len(meta), "<u4").tobytes(),
        records=b"".join(meta + row.to_bytes(size, "big") for row in range(count)),
    )


def test_deliveries_say_what_was_sent() -> None:
    """Each column, by row and at once; and a settlement of some rows."""
    batch = DeliveredBatch(batch_of(5, 4), None)  # type: ignore[arg-type]
    assert len(batch) == 5
    for row, delivery in enumerate(batch):
        assert (delivery.id64, delivery.attempt, delivery.due_ms) == (row + 7, row % 3 + 1, row + 1_000)
        assert (delivery.payload, delivery.key, delivery.tags) == (row.to_bytes(4, "big"), "k", ["a"])
        assert delivery.headers == {"h": "v"}
    assert batch.payloads() == [row.to_bytes(4, "big") for row in range(5)]
    settle = settle_batch(batch, np.array([1, 3]), consumer_pb2.ACK)
    assert np.frombuffer(settle.ids, "<u8").tolist() == [8, 10]
    assert np.frombuffer(settle.positions, "<u8").tolist() == [51, 53]
    whole = settle_batch(batch, None, consumer_pb2.ACK)
    assert (whole.ids, whole.attempts, whole.positions) == (batch.wire.ids, batch.wire.attempts, batch.wire.positions)


def test_a_large_batch_is_read_in_one_pass() -> None:
    """Protobuf copies a field of bytes at each look; one for each message took 15 s for these ten megabytes."""
    wire = batch_of(10_000, 1_000)
    before = process_time()
    batch = DeliveredBatch(wire, None)  # type: ignore[arg-type]
    assert sum(len(delivery.payload) for delivery in batch) == 10_000_000
    assert all(delivery.attempt and delivery.due_ms and delivery.id64 and delivery.key for delivery in batch)
    assert len(without(wire, np.arange(100)).ids) == 8 * 9_900
    assert process_time() - before < 2
