"""Turns Arrow record batches into blocks to stage, by topic, and collects rows that cannot be messages with reasons.

All work is on arrays. Nothing here contacts the cluster; its limits are an argument.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from tickwheel.client.messages import TOPIC, TOPIC_RULE
from tickwheel.client.staging import Rows
from tickwheel.client.unique_keys import KEYED_MAX, NO_RULE, KeyRule
from tickwheel.pipeline.meta_column import KEYED_META_COLUMNS, meta_column

BLOCK_BYTES = 1 << 20
"""A block is sent once its rows reach this size, which is about that of one entry of the log. It has twice as much at
most, or a single row: a node refuses a block of several times that."""
BLOCK_METAS_BYTES_MAX = 1_000_000
"""Bytes of metas in a block: with them it has at most 200,000 headers, since one takes at least 5 bytes. A node refuses
more."""
BLOCK_ROWS = 8_192
SHOWN_MAX = 60
"""Characters of a field of a rejected row in an error."""
GATHERED_BYTES_MAX = 16 << 20
"""Bytes collected in all topics together before the largest block is sent although it is small."""

COLUMNS: dict[str, tuple[tuple[type[DataType], ...], str]] = {
    "topic": ((StringType,), "string"),
    "due_ms": ((LongType, IntegerType), "bigint: milliseconds since 1970"),
    "due_at": ((TimestampType,), "timestamp (with time zone)"),
    "payload": ((BinaryType, StringType), "binary or string"),
    "key": ((StringType,), "string"),
    "tags": ((ArrayType,), "array<string>"),
    "properties": ((MapType,), "map<string,string>"),
    "message_group": ((StringType,), "string"),
    "unique_key": ((StringType,), "string"),
}


class SchemaError(ValueError):
    """The frame's columns do not fit; the text names the column."""


def check_schema(schema: StructType, topic: str, *, keyed: bool = False) -> None:
    """Raise SchemaError if the columns do not fit. `topic`: the option, for frames without the column. `keyed`:
    messages may have unique keys."""
    types = {item.name: item.dataType for item in schema.fields}
    if len(types) < len(schema.fields):
        twice = next(name for name in types if schema.fieldNames().count(name) > 1)
        raise SchemaError(f"column {twice}: it is there more than once")
    for name, found in types.items():
        if name == "unique_key" and not keyed:
            raise SchemaError(f"column {name}: finished files hold no unique keys; drop it, or write with the sink")
        if name not in COLUMNS:
            raise SchemaError(f"column {name}: unknown; drop it (known are {', '.join(COLUMNS)})")
        allowed, text = COLUMNS[name]
        good = isinstance(found, allowed)
        if good and isinstance(found, ArrayType):
            good = isinstance(found.elementType, StringType)
        if good and isinstance(found, MapType):
            good = isinstance(found.keyType, StringType) and isinstance(found.valueType, StringType)
        if not good:
            raise SchemaError(f"column {name}: it is {found.simpleString()}, but must be {text}")
    if "payload" not in types:
        raise SchemaError("column payload: missing (binary or string)")
    if ("due_ms" in types) == ("due_at" in types):
        raise SchemaError("column due_ms: there must be exactly one of due_ms (bigint) and due_at (timestamp)")
    if "topic" not in types and not topic:
        raise SchemaError("column topic: missing, and the option topic is not set")
    if topic and TOPIC.fullmatch(topic) is None:
        raise SchemaError(f"option topic: {topic!r}: {TOPIC_RULE}")


@dataclass(frozen=True, slots=True)
class RowLimits:
    """The cluster's limits for a row."""

    batch_messages_max: int
    payload_bytes_max: int
    due_ms_max: int


@dataclass(slots=True)
class _Pending:
    due_ms: list[NDArray[np.int64]] = field(default_factory=list)
    sizes: list[NDArray[np.uint32]] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    metas: list[bytes] = field(default_factory=list)
    meta_sizes: list[NDArray[np.uint32]] = field(default_factory=list)
    rows: int = 0
    bytes: int = 0
    meta_bytes: int = 0
    """Those of `bytes` that are metas."""


class RowGatherer:
    """Takes the record batches of one task and yields blocks of rows."""

    def __init__(
        self, topic: str, limits: RowLimits, key_rule: KeyRule = NO_RULE, *, texts_checked: bool = True
    ) -> None:
        """`topic`: for frames without the column. `key_rule`: of rows with a unique key. `texts_checked` False: the
        rows are messages already."""
        self._topic = topic
        self._texts_checked = texts_checked
        self._key_rule = key_rule
        self._limits = limits
        self._block_rows = min(BLOCK_ROWS, limits.batch_messages_max)
        self._pending: dict[str, _Pending] = {}
        self._bytes = 0
        self.rejected: list[pa.RecordBatch] = []
        """Rows that cannot be messages, with all columns and `reason`; the caller empties the list."""

    def take(self, batch: pa.RecordBatch) -> Iterator[Rows]:
        """Add a batch; yields the blocks that are full."""
        if "unique_key" in batch.schema.names:
            self._block_rows = min(self._block_rows, KEYED_MAX)
        batch = self.good_rows(batch)
        if not batch.num_rows:
            return
        for topic, part in self._by_topic(batch):
            pending = self._pending.setdefault(topic, _Pending())
            for piece, size, meta_size in self._pieces(part):
                full = (
                    pending.rows + piece.num_rows > self._block_rows
                    or pending.bytes + size > 2 * BLOCK_BYTES
                    or pending.meta_bytes + meta_size > BLOCK_METAS_BYTES_MAX
                )
                if pending.rows and full:
                    yield self._give(topic)
                    pending = self._pending.setdefault(topic, _Pending())
                self._add(pending, piece)
                if pending.rows >= self._block_rows or pending.bytes >= BLOCK_BYTES:
                    yield self._give(topic)
                    pending = self._pending.setdefault(topic, _Pending())
        while self._bytes > GATHERED_BYTES_MAX:
            yield self._give(max(self._pending, key=lambda name: self._pending[name].bytes))

    def rest(self) -> Iterator[Rows]:
        """Yield the blocks that are not full, at the end."""
        for topic in list(self._pending):
            if self._pending[topic].rows:
                yield self._give(topic)

    # -- which rows are messages

    def good_rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows that can be messages, with `due_ms` and, if any row has it, `meta` instead of its columns."""
        reasons = _Reasons(batch.num_rows)
        names = batch.schema.names
        given = batch
        batch = self._with_due_ms(batch)
        if "topic" in names:
            _note_topics(reasons, batch.column("topic"))
        due = batch.column("due_ms")
        reasons.note(pc.is_null(due), "due: null")
        times = pc.fill_null(due, 0).to_numpy(zero_copy_only=False)
        reasons.note(times < 0, "due: before 1970")
        limit = self._limits.due_ms_max
        reasons.note(times > limit, f"due: further ahead than the cluster takes ({limit} ms since 1970)")
        payload = batch.column("payload")
        reasons.note(pc.is_null(payload), "payload: null")
        sizes = pc.fill_null(pc.binary_length(payload), 1).to_numpy(zero_copy_only=False)
        reasons.note(sizes == 0, "payload: empty")
        most = self._limits.payload_bytes_max
        reasons.note(sizes > most, f"payload: more than {most} bytes")
        metas = [name for name in KEYED_META_COLUMNS if name in names]
        if metas:
            columns = {name: batch.column(name) for name in metas}
            meta, wrong = meta_column(columns, batch.num_rows, checked=self._texts_checked)
            for mask, text in wrong:
                reasons.note(mask, text)
            batch = batch.drop_columns(metas)
            if meta is not None:
                batch = batch.append_column("meta", meta)
        if reasons.bad.any():
            self._reject(given, batch.column("due_ms"), reasons)
            batch = batch.filter(pa.array(~reasons.bad))
        return batch

    def _reject(self, given: pa.RecordBatch, due_ms: pa.Array, reasons: _Reasons) -> None:
        """Keep bad rows as they came, for correction and another write; with `due_ms` besides `due_at`."""
        names = given.schema.names
        columns = {name: given.column(name) for name in COLUMNS if name in names} | {"due_ms": due_ms}
        columns.setdefault("topic", pa.array([self._topic] * given.num_rows, pa.string()))
        columns["payload"] = given.column("payload").cast(pa.binary())
        bad = pa.RecordBatch.from_pydict(columns).filter(pa.array(reasons.bad))
        reason = pa.array(reasons.of_bad(), pa.string())
        order = [name for name in COLUMNS if name in columns]
        self.rejected.append(pa.RecordBatch.from_arrays([reason, *(bad.column(n) for n in order)], ["reason", *order]))

    @staticmethod
    def _with_due_ms(batch: pa.RecordBatch) -> pa.RecordBatch:
        names = batch.schema.names
        if "due_ms" in names:
            due = batch.column("due_ms")
            if pa.types.is_int64(due.type):
                return batch
            return batch.set_column(names.index("due_ms"), "due_ms", due.cast(pa.int64()))
        micros = batch.column("due_at").cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        # Rounded up: no message may be delivered before the requested time.
        values = micros.to_numpy(zero_copy_only=False) if not micros.null_count else None
        if values is None:
            values = pc.fill_null(micros, 0).to_numpy(zero_copy_only=False)
        millis = pa.array(-(-values // 1_000), pa.int64(), mask=pc.is_null(micros).to_numpy(zero_copy_only=False))
        return batch.set_column(names.index("due_at"), "due_ms", millis)

    # -- into blocks

    def _by_topic(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        """The rows of each topic, sorted by due time so that a master need not sort them."""
        order = pc.sort_indices(batch.column("due_ms"))
        batch = batch.take(order)
        if "topic" not in batch.schema.names:
            yield self._topic, batch
            return
        coded = batch.column("topic").dictionary_encode()
        names = coded.dictionary.to_pylist()
        if len(names) == 1:
            yield names[0], batch
            return
        codes = coded.indices.to_numpy(zero_copy_only=False)
        for code, name in enumerate(names):
            yield name, batch.take(pa.array(np.flatnonzero(codes == code)))

    def _pieces(self, batch: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, int, int]]:
        """The batch in pieces no larger than a block, with their bytes and those of their metas."""
        sizes = pc.binary_length(batch.column("payload")).to_numpy(zero_copy_only=False).astype(np.int64)
        meta_sizes = np.zeros(len(sizes), np.int64)
        if "meta" in batch.schema.names:
            meta_sizes += pc.binary_length(batch.column("meta")).to_numpy(zero_copy_only=False)
        ends = np.append(0, np.cumsum(sizes + meta_sizes))
        meta_ends = np.append(0, np.cumsum(meta_sizes))
        at = 0
        while at < batch.num_rows:
            end = int(np.searchsorted(ends, ends[at] + BLOCK_BYTES, side="right")) - 1
            end = min(end, int(np.searchsorted(meta_ends, meta_ends[at] + BLOCK_METAS_BYTES_MAX, side="right")) - 1)
            end = min(max(end, at + 1), at + self._block_rows)
            yield batch.slice(at, end - at), int(ends[end] - ends[at]), int(meta_ends[end] - meta_ends[at])
            at = end

    def _add(self, pending: _Pending, piece: pa.RecordBatch) -> None:
        payload, sizes = _joined(piece.column("payload"))
        pending.due_ms.append(piece.column("due_ms").to_numpy(zero_copy_only=False))
        pending.sizes.append(sizes)
        pending.payloads.append(payload)
        added = len(payload)
        if "meta" in piece.schema.names:
            if not pending.meta_sizes:
                pending.meta_sizes.append(np.zeros(pending.rows, np.uint32))  # those before have none
            metas, meta_sizes = _joined(piece.column("meta"))
            pending.metas.append(metas)
            pending.meta_sizes.append(meta_sizes)
            pending.meta_bytes += len(metas)
            added += len(metas)
        elif pending.meta_sizes:
            pending.meta_sizes.append(np.zeros(piece.num_rows, np.uint32))
        pending.rows += piece.num_rows
        pending.bytes += added
        self._bytes += added

    def _give(self, topic: str) -> Rows:
        pending = self._pending.pop(topic)
        self._bytes -= pending.bytes
        return Rows(
            topic,
            np.concatenate(pending.due_ms),
            np.concatenate(pending.sizes),
            b"".join(pending.payloads),
            np.concatenate(pending.meta_sizes) if pending.meta_sizes else None,
            b"".join(pending.metas),
            self._key_rule,
        )


def told(bad: pa.RecordBatch) -> str:
    """The first of some rejected rows: its reason, and what it can be found by. No payload: the text ends in logs."""
    named = ("reason", "topic", "due_ms", "due_at", "key", "unique_key")
    names = [name for name in named if name in bad.schema.names]
    row = {name: _value(bad.column(name)) for name in names}
    names.remove("reason")
    found = [f"{name} {_short(row[name])}" for name in names if name == "topic" or row[name] is not None]
    return f"{row['reason']} ({', '.join(found)})"


def _value(column: pa.Array) -> Any:
    """The first one, even if it is a text that is none."""
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return column[0].as_py()
    data = column[:1].cast(pa.binary())[0].as_py()
    return data if data is None else data.decode(errors="backslashreplace")


def _short(value: Any) -> str:
    if not isinstance(value, str):
        return str(value)
    return repr(value) if len(value) <= SHOWN_MAX else f"{value[:SHOWN_MAX]!r}..."


class _Reasons:
    """The reasons why rows cannot be messages; the first reason of a row counts."""

    def __init__(self, rows: int) -> None:
        self.bad = np.zeros(rows, np.bool_)
        self._texts: NDArray[Any] | None = None

    def note(self, mask: Any, text: str) -> None:
        """Give a reason to the rows of a numpy or Arrow mask."""
        if not (mask.any() if isinstance(mask, np.ndarray) else mask.true_count):
            return
        found = mask if isinstance(mask, np.ndarray) else mask.to_numpy(zero_copy_only=False)
        if self._texts is None:
            self._texts = np.full(len(self.bad), "", dtype=object)
        self._texts[found & ~self.bad] = text
        self.bad |= found

    def of_bad(self) -> NDArray[Any]:
        """The reason of each bad row."""
        assert self._texts is not None
        return self._texts[self.bad]


def _note_topics(reasons: _Reasons, column: pa.Array) -> None:
    reasons.note(pc.is_null(column), "topic: null")
    coded = column.dictionary_encode()
    names = coded.dictionary.cast(pa.binary()).to_pylist()
    wrong = [TOPIC.fullmatch(name.decode(errors="replace")) is None for name in names]
    if any(wrong):
        codes = pc.fill_null(coded.indices, len(wrong)).to_numpy(zero_copy_only=False)
        reasons.note(np.array([*wrong, False])[codes], f"topic: not {TOPIC_RULE}")


def _joined(column: pa.Array) -> tuple[bytes, NDArray[np.uint32]]:
    """(all values, one after the other; their sizes). The column has no nulls."""
    if not pa.types.is_binary(column.type):
        column = column.cast(pa.binary())
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    data = column.buffers()[2]
    low, high = int(offsets[0]), int(offsets[-1])
    joined = b"" if data is None else data.slice(low, high - low).to_pybytes()
    return joined, np.diff(offsets).astype(np.uint32)
