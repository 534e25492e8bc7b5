"""Columns that the sources share: ids as text, and the content of records (payload, and the fields of the meta)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql.pandas.types import from_arrow_type

from tickwheel.client.messages import read_meta
from tickwheel.proto.common_pb2 import MessageMeta

CONTENT_FIELDS = [
    pa.field("payload", pa.binary()),
    pa.field("key", pa.string()),
    pa.field("tags", pa.list_(pa.string())),
    pa.field("properties", pa.map_(pa.string(), pa.string())),
    pa.field("message_group", pa.string()),
    pa.field("unique_key", pa.string()),
]


def ddl_of(fields: Iterable[pa.Field]) -> str:
    """The columns as Spark's DDL."""
    return ", ".join(f"{field.name} {from_arrow_type(field.type).simpleString()}" for field in fields)


def id_column(ids: NDArray[np.uint64]) -> pa.Array:
    """Ids as text, "group-hour-index"."""
    return pa.array([f"0-{number >> 32}-{number & 0xFFFF_FFFF}" for number in ids.tolist()], pa.string())


def content_columns(records: bytes, sizes: NDArray[np.uint32], meta_sizes: NDArray[np.uint32]) -> list[pa.Array]:
    """The CONTENT_FIELDS of n records that follow one another, each its meta and then its payload.

    If no record has a meta, no work is done row by row.
    """
    count = len(sizes)
    if not meta_sizes.any():
        offsets = np.zeros(count + 1, np.int32)
        np.cumsum(sizes, out=offsets[1:])
        buffers = [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(records)]
        payloads = pa.Array.from_buffers(pa.binary(), count, buffers)
        return [payloads, *(pa.nulls(count, field.type) for field in CONTENT_FIELDS[1:])]
    parts: list[bytes] = []
    metas: list[MessageMeta] = []
    at = 0
    for size, meta_size in zip(sizes.tolist(), meta_sizes.tolist(), strict=True):
        metas.append(read_meta(records[at : at + meta_size]) or MessageMeta())
        parts.append(records[at + meta_size : at + size])
        at += size
    return [
        pa.array(parts, pa.binary()),
        pa.array([meta.key or None for meta in metas], pa.string()),
        pa.array([list(meta.tags) or None for meta in metas], pa.list_(pa.string())),
        pa.array([list(meta.headers.items()) or None for meta in metas], pa.map_(pa.string(), pa.string())),
        pa.array([meta.message_group or None for meta in metas], pa.string()),
        pa.array([meta.unique_key or None for meta in metas], pa.string()),
    ]
