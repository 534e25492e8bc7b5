"""Rows into blocks: none is lost, doubled or mixed up, no block is too large, bad ones have a reason. Without Spark."""

from __future__ import annotations

import datetime
import itertools
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyspark.sql.types import LongType, StringType, StructField, StructType

from tickwheel.client.messages import KEY_LENGTH_MAX, TAG_LENGTH_MAX, TAGS_MAX, is_tag
from tickwheel.client.staging import Rows, rows_message
from tickwheel.client.unique_keys import KEYED_MAX, rule_of
from tickwheel.node.core.bulk.staging import BLOCK_BYTES_MAX
from tickwheel.node.core.metas import surplus_headers
from tickwheel.node.core.schedule.intake import from_batch
from tickwheel.node.state.settings import Settings
from tickwheel.pipeline import sink_rows
from tickwheel.pipeline.bundling import with_hashes
from tickwheel.pipeline.meta_column import KEYED_META_COLUMNS, META_COLUMNS
from tickwheel.pipeline.sink_rows import RowGatherer, RowLimits, SchemaError, check_schema
from tickwheel.pipeline.source_columns import CONTENT_FIELDS, content_columns
from tickwheel.proto.common_pb2 import MessageMeta
from tickwheel.proto.scheduler_pb2 import ScheduleBatch

LIMITS = RowLimits(batch_messages_max=7, payload_bytes_max=50, due_ms_max=10**6)
SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("due_ms", pa.int64()),
        ("payload", pa.binary()),
        ("key", pa.string()),
        ("tags", pa.list_(pa.string())),
    ]
)
Row = tuple[str | None, int | None, bytes | None, str | None, list[str | None] | None]
ROWS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", "a", None, ".x", "%DLQ%a"]),
        st.one_of(st.integers(-5, 10**6 + 5), st.none()),
        st.one_of(st.binary(max_size=55), st.none()),
        st.one_of(st.none(), st.text(max_size=3)),
        st.one_of(st.none(), st.lists(st.one_of(st.text(max_size=2), st.none()), max_size=2)),
    ),
    max_size=60,
)


def good(row: Row) -> bool:
    """Whether it can be a message."""
    topic, due_ms, payload, _, tags = row
    return (
        topic in ("a", "b", "c")
        and due_ms is not None
        and 0 <= due_ms <= LIMITS.due_ms_max
        and payload is not None
        and 0 < len(payload) <= LIMITS.payload_bytes_max
        and all(tag is not None and is_tag(tag) for tag in tags or ())
    )


def read_back(block: Rows) -> list[tuple[str, int, bytes, str, tuple[str, ...]]]:
    """The messages of a block, as a node would take it apart."""
    found = []
    at = meta_at = 0
    meta_sizes = [0] * len(block.sizes) if block.meta_sizes is None else block.meta_sizes.tolist()
    for due_ms, size, meta_size in zip(block.due_ms.tolist(), block.sizes.tolist(), meta_sizes, strict=True):
        meta = MessageMeta.FromString(block.metas[meta_at : meta_at + meta_size])
        found.append((block.topic, due_ms, block.payloads[at : at + size], meta.key, tuple(meta.tags)))
        at, meta_at = at + size, meta_at + meta_size
    assert at == len(block.payloads) and meta_at == len(block.metas)
    return found


@given(ROWS, st.integers(1, 20), st.integers(1, 200), st.integers(1, 200))
@example([("a", 0, b"x", None, None), ("a", 0, b"x", "k", None), ("a", 0, b"x", None, None)], 1, 200, 200)
def test_every_row_is_in_one_block_or_rejected(
    rows: list[Row], batch_rows: int, block_bytes: int, gathered_bytes: int
) -> None:
    """Whatever the batches and bounds, sliced batches included."""
    whole = pa.RecordBatch.from_arrays([pa.array(column) for column in _columns(rows)], schema=SCHEMA)
    patch = pytest.MonkeyPatch()
    patch.setattr(sink_rows, "BLOCK_BYTES", block_bytes)
    patch.setattr(sink_rows, "GATHERED_BYTES_MAX", gathered_bytes)
    with patch.context():
        gatherer = RowGatherer("", LIMITS)
        blocks = [
            block for at in range(0, len(rows), batch_rows) for block in gatherer.take(whole.slice(at, batch_rows))
        ]
        blocks += gatherer.rest()
    patch.undo()
    expected = Counter((t, d, p, k or "", tuple(tags or ())) for t, d, p, k, tags in filter(good, rows))
    assert Counter(message for block in blocks for message in read_back(block)) == expected
    assert sum(part.num_rows for part in gatherer.rejected) == sum(not good(row) for row in rows)
    for block in blocks:
        assert 1 <= len(block.sizes) <= LIMITS.batch_messages_max
        assert len(block.payloads) <= 2 * max(block_bytes, LIMITS.payload_bytes_max)


def test_a_rejected_row_keeps_its_columns() -> None:
    """It can be corrected and written again; what a build adds beside them is not among them."""
    row = {"due_at": datetime.datetime(2030, 1, 1, 0, 0, 0, 1, datetime.UTC), "payload": "", "tags": ["a", None]}
    row |= {"key": "k", "properties": [("a", "b")], "message_group": "g"}
    types = {"tags": pa.list_(pa.string()), "properties": pa.map_(pa.string(), pa.string())}
    types["due_at"] = pa.timestamp("us", "UTC")
    batch = pa.RecordBatch.from_pydict({name: pa.array([value], types.get(name)) for name, value in row.items()})
    gatherer = RowGatherer("t", RowLimits(7, 50, 10**13))
    assert list(gatherer.take(with_hashes(batch))) == []
    [rejected] = gatherer.rejected
    [found] = rejected.to_pylist()
    assert found.pop("reason") == "payload: empty"
    assert found == row | {"topic": "t", "payload": b"", "due_ms": int(row["due_at"].timestamp()) * 1_000 + 1}  # type: ignore[attr-defined]


def test_a_unique_key_travels_with_its_rule() -> None:
    """A null is none; an empty one and one that is too long make the row bad. The block has the rule."""
    keys = ["k", None, "", "ä" * 128, "ä" * 127 + "b"]
    batch = pa.RecordBatch.from_pydict(
        {"due_ms": pa.array([1, 2, 3, 4, 5]), "payload": list("abcde"), "unique_key": pa.array(keys, pa.string())}
    )
    rule = rule_of("replace", True)
    gatherer = RowGatherer("t", LIMITS, rule)
    assert list(gatherer.take(batch)) == []
    [block] = gatherer.rest()
    columns = rows_message(block)
    assert (columns.on_key_conflict, columns.key_until_settled) == rule
    assert block.payloads == b"abe" and block.meta_sizes is not None
    ends = np.cumsum(block.meta_sizes).tolist()
    metas = [MessageMeta.FromString(block.metas[a:b]) for a, b in itertools.pairwise([0, *ends])]
    assert [meta.unique_key for meta in metas] == ["k", "", "ä" * 127 + "b"]
    [rejected] = gatherer.rejected
    assert rejected.column("reason").to_pylist() == ["unique_key: not 1 to 255 bytes of UTF-8"] * 2
    assert rejected.column("unique_key").to_pylist() == ["", "ä" * 128]


def test_blocks_with_unique_keys_are_small() -> None:
    """A node takes fewer messages with keys at once."""
    count = 3 * KEYED_MAX + 1
    columns = {"due_ms": pa.array(range(count)), "payload": pa.array(["x"] * count)}
    for keyed in (False, True):
        keys = {"unique_key": pa.array([f"{number}" for number in range(count)])} if keyed else {}
        gatherer = RowGatherer("t", RowLimits(10_000, 50, 10**6))
        blocks = [*gatherer.take(pa.RecordBatch.from_pydict(columns | keys)), *gatherer.rest()]
        assert sum(len(block.sizes) for block in blocks) == count
        assert max(len(block.sizes) for block in blocks) == (KEYED_MAX if keyed else count)


def test_a_block_has_no_more_headers_than_a_node_takes() -> None:
    """However few bytes they take: 240,000 of them fit the bytes of a block."""
    count, headers = 2_000, 120
    places = pa.array(range(0, count * headers + 1, headers), pa.int32())
    names = pa.array([f"{number:x}" for number in range(headers)] * count)
    columns = {
        "due_ms": pa.array(range(count)),
        "payload": pa.array(["x"] * count),
        "properties": pa.MapArray.from_arrays(places, names, pa.repeat("", count * headers)),
    }
    gatherer = RowGatherer("t", RowLimits(10_000, 50, 10**6))
    blocks = [*gatherer.take(pa.RecordBatch.from_pydict(columns)), *gatherer.rest()]
    assert sum(len(block.sizes) for block in blocks) == count and not gatherer.rejected
    assert [surplus_headers(block.metas) for block in blocks] == [0] * len(blocks)


def test_every_field_of_a_message_is_a_column() -> None:
    """Of the sink, in its meta, and of what the sources read: a new field of a message must not get lost on the way.
    Only the sink takes a unique key; what builds files refuses it."""
    fields = {"properties" if name == "headers" else name for name in MessageMeta.DESCRIPTOR.fields_by_name}
    text = StringType()
    columns = StructType(
        [StructField("payload", text), StructField("due_ms", LongType()), StructField("unique_key", text)]
    )
    check_schema(columns, "t", keyed=True)
    with pytest.raises(SchemaError, match="column unique_key: finished files hold no unique keys"):
        check_schema(columns, "t")
    assert set(KEYED_META_COLUMNS) == fields == {*META_COLUMNS, "unique_key"}
    assert fields < set(sink_rows.COLUMNS)
    assert [field.name for field in CONTENT_FIELDS] == ["payload", *KEYED_META_COLUMNS]


NO_TEXT = b"a\xff"


def texts(*values: bytes) -> pa.Array:
    """As Spark hands them over: nobody has looked whether they are UTF-8."""
    return pa.array(values, pa.binary()).view(pa.string())


def check_by_node(blocks: list[Rows]) -> int:
    """A node takes every block; returns how many rows they have."""
    for block in blocks:
        taken = from_batch(ScheduleBatch(columns=rows_message(block)), Settings())
        assert taken.bytes <= BLOCK_BYTES_MAX
    return sum(len(block.sizes) for block in blocks)


@pytest.mark.parametrize(
    ("column", "good", "bad", "reason"),
    [
        ("topic", texts(b"t"), texts(b"%DLQ%g"), "topic: not 1 to 127"),
        ("topic", texts(b"t"), texts(NO_TEXT), "topic: not 1 to 127"),
        ("key", texts(b"k"), texts(NO_TEXT), "key: not UTF-8"),
        ("key", texts("ä".encode() * KEY_LENGTH_MAX), texts(b"k" * (KEY_LENGTH_MAX + 1)), "key: more than 4096"),
        ("message_group", texts(b"g"), texts(NO_TEXT), "message_group: not UTF-8"),
        ("tags", ["x"] * TAGS_MAX, ["x"] * (TAGS_MAX + 1), "tags: more than 64"),
        *(("tags", ["x", "y z"], ["x", tag], "tags: one is not 1 to 128") for tag in ("", "a|b", "*", " a", "\n")),
        ("tags", ["ä" * TAG_LENGTH_MAX], ["ä" * (TAG_LENGTH_MAX + 1)], "tags: one is not 1 to 128"),
        ("tags", ["x"], texts(b"x", NO_TEXT), "tags: one is not 1 to 128"),
        ("properties", (texts(b"a"), texts(b"b")), (texts(NO_TEXT), texts(b"b")), "properties: a name or value is not"),
        ("properties", (texts(b"a"), texts(b"b")), (texts(b"a"), texts(NO_TEXT)), "properties: a name or value is not"),
    ],
)
def test_what_a_node_would_refuse_makes_a_row_bad(column: str, good: object, bad: object, reason: str) -> None:
    """A node refuses the whole block, and with it the write: a stream would stand still at its micro-batch. Bundles no
    node looks into: consumers would get what they cannot read."""

    def column_of(value: object) -> pa.Array:
        if column == "tags":
            values = value if isinstance(value, pa.Array) else pa.array(value, pa.string())
            return pa.ListArray.from_arrays([0, len(values)], values)
        return pa.MapArray.from_arrays([0, 1], *value) if isinstance(value, tuple) else value

    gatherer = RowGatherer("t", RowLimits(7, 50, 10**6))
    blocks: list[Rows] = []
    for value in (good, bad, good):
        columns = {"due_ms": pa.array([1]), "payload": pa.array([b"p"]), column: column_of(value)}
        blocks += gatherer.take(with_hashes(pa.RecordBatch.from_pydict(columns)))
    assert check_by_node([*blocks, *gatherer.rest()]) == 2
    [rejected] = gatherer.rejected
    assert rejected.column("reason").to_pylist()[0].startswith(reason)
    assert sink_rows.told(rejected).startswith(reason), "even if it is named by a text that is none"


@pytest.mark.parametrize("value", [2_000, 30_000])
def test_blocks_with_large_metas_are_cut_too(value: int) -> None:
    """By payloads alone a block of 8,192 rows had 16 MB and more, which no node takes."""
    count = 9_000 if value == 2_000 else 600
    properties = pa.array([[("a", "x" * value)]] * count, pa.map_(pa.string(), pa.string()))
    columns = {"due_ms": pa.array(range(count)), "payload": pa.array([b"p"] * count), "properties": properties}
    gatherer = RowGatherer("t", RowLimits(10_000, 50, 10**6))
    assert check_by_node([*gatherer.take(pa.RecordBatch.from_pydict(columns)), *gatherer.rest()]) == count


def test_a_large_row_does_not_join_a_block() -> None:
    """The largest payload of all, behind a block that is nearly full, was more than a small `request_bytes_max`."""
    gatherer = RowGatherer("t", RowLimits(10_000, 4 << 20, 10**6))
    blocks: list[Rows] = []
    for size in ((1 << 20) - 1, 4 << 20, 1):
        columns = {"due_ms": pa.array([1]), "payload": pa.array([b"p" * size])}
        blocks += gatherer.take(pa.RecordBatch.from_pydict(columns))
    assert [len(block.payloads) for block in [*blocks, *gatherer.rest()]] == [(1 << 20) - 1, 4 << 20, 1]


def test_rows_of_a_cold_tier_are_taken_as_they_are() -> None:
    """They are messages already: an earlier version looked at fewer of their texts."""
    columns = {"topic": texts(b"t"), "due_ms": pa.array([1]), "payload": pa.array([b"p"]), "key": texts(NO_TEXT)}
    gatherer = RowGatherer("", LIMITS, texts_checked=False)
    assert gatherer.good_rows(pa.RecordBatch.from_pydict(columns)).num_rows == 1 and not gatherer.rejected


def _columns(rows: list[Row]) -> list[pa.Array]:
    if not rows:
        return [pa.array([], field.type) for field in SCHEMA]
    return [pa.array(list(column), field.type) for column, field in zip(zip(*rows, strict=True), SCHEMA, strict=True)]


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=9), st.text(max_size=3)), min_size=1, max_size=20))
def test_content_is_read_as_it_was_written(items: list[tuple[bytes, str]]) -> None:
    """With and without metas."""
    metas = [MessageMeta(key=key, unique_key=key * 2).SerializeToString() for _, key in items]
    records = b"".join(meta + payload for meta, (payload, _) in zip(metas, items, strict=True))
    meta_sizes = np.array([len(meta) for meta in metas], np.uint32)
    sizes = meta_sizes + np.array([len(payload) for payload, _ in items], np.uint32)
    payload, key, tags, properties, group, unique_key = content_columns(records, sizes, meta_sizes)
    assert payload.to_pylist() == [p for p, _ in items]
    assert key.to_pylist() == [k or None for _, k in items]
    assert unique_key.to_pylist() == [k * 2 or None for _, k in items]
    # Bundles that earlier versions built may hold metas that nobody can decode: it is as if there were none.
    torn = np.ones(1, np.uint32)
    assert [column.to_pylist() for column in content_columns(b"\x0ap", torn + torn, torn)[:2]] == [[b"p"], [None]]
    assert tags.null_count == properties.null_count == group.null_count == len(items)


def test_a_rejected_row_is_named_by_what_it_can_be_found_by() -> None:
    """By topic and time alone nobody found it. A payload is not for logs."""

    def told(**changed: object) -> str:
        gatherer = RowGatherer("t", LIMITS)
        columns = {"topic": "t", "due_ms": 7, "payload": b"", "key": "order-7", "tags": ["x"]} | changed
        gatherer.good_rows(pa.RecordBatch.from_pylist([columns], SCHEMA))
        return sink_rows.told(gatherer.rejected[0])

    assert told() == "payload: empty (topic 't', due_ms 7, key 'order-7')"
    assert told(topic=None, key=None, payload=b"x") == "topic: null (topic None, due_ms 7)"
    assert told(due_ms=None, payload=b"\xff") == "due: null (topic 't', key 'order-7')"
    long = told(payload=b"y" * 51, key="k" * 400)
    assert long == f"payload: more than 50 bytes (topic 't', due_ms 7, key {'k' * 60!r}...)"
    gatherer = RowGatherer("t", LIMITS)
    at = datetime.datetime(1969, 12, 31, tzinfo=datetime.UTC)
    gatherer.good_rows(pa.RecordBatch.from_pylist([{"due_at": at, "payload": "p"}]))
    assert sink_rows.told(gatherer.rejected[0]).startswith("due: before 1970 (topic 't', due_ms -86400000")
