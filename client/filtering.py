"""The exact check of a group's filter: nodes go by hashes of tags, which collide; here the tags themselves are read.

Pure. A batch almost always passes as it came; what does not belong to the group is cut out of it, to be settled as
skipped.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tickwheel.proto import common_pb2, consumer_pb2


@lru_cache(maxsize=256)
def tags_of(filter: str) -> frozenset[str]:
    """The tags of a normalized expression; a message needs any one of them."""
    return frozenset(filter.split(" || "))


def mismatches(wire: consumer_pb2.DeliverBatch) -> NDArray[np.int64]:
    """The rows of a batch whose messages have none of the filter's tags."""
    if not wire.filter:
        return np.zeros(0, np.int64)
    wanted = tags_of(wire.filter)
    count = len(wire.ids) // 8
    ends = np.cumsum(np.frombuffer(wire.sizes, "<u4"), dtype=np.int64).tolist()
    meta_sizes = np.frombuffer(wire.meta_sizes, "<u4").tolist() if wire.meta_sizes else [0] * count
    records, rows, start = wire.records, [], 0
    for row, (end, meta_size) in enumerate(zip(ends, meta_sizes, strict=True)):
        if wanted.isdisjoint(common_pb2.MessageMeta.FromString(records[start : start + meta_size]).tags):
            rows.append(row)
        start = end
    return np.array(rows, np.int64)


def without(wire: consumer_pb2.DeliverBatch, rows: NDArray[np.int64]) -> consumer_pb2.DeliverBatch:
    """The batch without some of its rows."""
    count = len(wire.ids) // 8
    keep = np.ones(count, np.bool_)
    keep[rows] = False
    ends = np.cumsum(np.frombuffer(wire.sizes, "<u4"), dtype=np.int64)
    starts = ends - np.frombuffer(wire.sizes, "<u4")
    rest = consumer_pb2.DeliverBatch()
    rest.CopyFrom(wire)
    for name, dtype in (
        ("ids", "<u8"), ("attempts", "<u4"), ("positions", "<u8"), ("due_ms", "<i8"), ("meta_sizes", "<u4"),
        ("sizes", "<u4"),
    ):  # fmt: skip
        column: bytes = getattr(wire, name)
        if column:
            setattr(rest, name, np.frombuffer(column, dtype)[keep].tobytes())
    bounds, records = zip(starts[keep].tolist(), ends[keep].tolist(), strict=True), wire.records
    rest.records = b"".join([records[start:end] for start, end in bounds])
    return rest
