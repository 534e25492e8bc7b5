"""Batches as their readers see them."""

from __future__ import annotations

from time import process_time

import numpy as np
from numpy.typing import NDArray

from tickwheel.client.delivery import Columns, DeliveredBatch, columns_of
from tickwheel.client.filtering import mismatches
from tickwheel.client.settling import ACK, Settling
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


def read(wire: consumer_pb2.DeliverBatch) -> tuple[Columns, DeliveredBatch]:
    """A batch of one topic."""
    (columns,) = columns_of(wire)
    return columns, DeliveredBatch(columns, None)  # type: ignore[arg-type]


def settled(batch: DeliveredBatch, rows: NDArray[np.int64] | None) -> consumer_pb2.SettleBatch:
    return Settling([(batch, rows)], ACK, None).message().settle  # type: ignore[arg-type]


def test_deliveries_say_what_was_sent() -> None:
    """Each column, by row and at once; and a settlement of some rows."""
    wire = batch_of(5, 4)
    _, batch = read(wire)
    assert len(batch) == 5
    for row, delivery in enumerate(batch):
        assert (delivery.id64, delivery.attempt, delivery.due_ms) == (row + 7, row % 3 + 1, row + 1_000)
        assert (delivery.payload, delivery.key, delivery.tags) == (row.to_bytes(4, "big"), "k", ["a"])
        assert delivery.headers == {"h": "v"}
    assert batch.payloads() == [row.to_bytes(4, "big") for row in range(5)]
    settle = settled(batch, np.array([1, 3]))
    assert np.frombuffer(settle.ids, "<u8").tolist() == [8, 10]
    assert np.frombuffer(settle.positions, "<u8").tolist() == [51, 53]
    whole = settled(batch, None)
    assert (whole.ids, whole.attempts, whole.positions) == (wire.ids, wire.attempts, wire.positions)


def test_a_meta_that_cannot_be_decoded_counts_as_none() -> None:
    """Nobody checks the metas in a bundle that was built outside. One such message ended the stream of a consumer with
    a filter, whenever it came. It is delivered: its tags may be those that are wanted."""
    meta = b"\x0a\x01\xff"  # a key that is not UTF-8
    wire = batch_of(3, 4)
    ours = META.SerializeToString()
    wire.meta_sizes = np.array([len(ours), len(meta), len(ours)], "<u4").tobytes()
    wire.sizes = np.array([len(ours) + 4, len(meta) + 4, len(ours) + 4], "<u4").tobytes()
    wire.records = ours + b"\0\0\0\0" + meta + b"\0\0\0\1" + ours + b"\0\0\0\2"
    columns, batch = read(wire)
    odd = batch.delivery(1)
    assert (odd.payload, odd.key, odd.tags, odd.headers) == (b"\0\0\0\1", "", [], {})
    assert mismatches("a", columns).tolist() == [] and mismatches("b", columns).tolist() == [0, 2]


def test_a_batch_of_several_topics_is_each_of_them() -> None:
    """Rows, bytes and epochs are cut at the same places; what a message does not have costs nothing."""
    wire = batch_of(6, 4)
    wire.topics.extend(["a", "b", "c"])
    wire.topic_counts, wire.epochs = (np.array(column, "<u4").tobytes() for column in ((1, 3, 2), (7, 8, 9)))
    parts = columns_of(wire)
    assert [(part.topic, part.epoch, part.ids.tolist()) for part in parts] == [
        ("a", 7, [7]),
        ("b", 8, [8, 9, 10]),
        ("c", 9, [11, 12]),
    ]
    payloads = [DeliveredBatch(part, None).payloads() for part in parts]  # type: ignore[arg-type]
    assert payloads == [[row.to_bytes(4, "big") for row in rows] for rows in ((0,), (1, 2, 3), (4, 5))]
    wire.meta_sizes = wire.positions = b""
    assert [(part.meta_sizes.tolist(), len(part.positions)) for part in columns_of(wire)] == [
        ([0] * count, 0) for count in (1, 3, 2)
    ]


def test_what_a_filter_does_not_want_is_cut_out() -> None:
    """The other rows keep their numbers and bytes."""
    wire = batch_of(4, 4)
    (columns,) = columns_of(wire)
    assert not len(mismatches("", columns)) and not len(mismatches("a", columns))
    assert mismatches("b", columns).tolist() == [0, 1, 2, 3]
    rest = DeliveredBatch(columns.without(np.array([0, 2])), None)  # type: ignore[arg-type]
    assert rest.ids.tolist() == [8, 10] and rest.positions.tolist() == [51, 53] and rest.attempts.tolist() == [2, 1]
    assert rest.payloads() == [row.to_bytes(4, "big") for row in (1, 3)] and rest.delivery(1).key == "k"


def test_a_large_batch_is_read_in_one_pass() -> None:
    """Protobuf copies a field of bytes at each look; one for each message took 15 s for these ten megabytes."""
    wire = batch_of(10_000, 1_000)
    before = process_time()
    columns, batch = read(wire)
    assert sum(len(delivery.payload) for delivery in batch) == 10_000_000
    assert all(delivery.attempt and delivery.due_ms and delivery.id64 and delivery.key for delivery in batch)
    assert len(columns.without(np.arange(100)).ids) == 9_900
    assert process_time() - before < 2
