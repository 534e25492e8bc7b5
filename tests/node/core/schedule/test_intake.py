"""What a unary call schedules is read as a batch of one row is, by a shorter way."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import cycle, islice, product
from string import ascii_letters
from time import process_time
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.counting import calls_of
from tickwheel.node.core.schedule.intake import (
    DUE_MS_LIMIT,
    KEY_LENGTH_MAX,
    SEQUENCE_MAX,
    IncomingBatch,
    MetaColumns,
    from_batch,
    from_message,
)
from tickwheel.node.failure import Failure, RequestError
from tickwheel.node.state.settings import Settings
from tickwheel.proto import common_pb2, scheduler_pb2

SETTINGS = Settings()

TIMES = st.one_of(
    st.integers(0, 1 << 45), st.sampled_from([-1, 0, DUE_MS_LIMIT, DUE_MS_LIMIT + 1, -DUE_MS_LIMIT, -DUE_MS_LIMIT - 1])
)
WHENS = st.one_of(
    st.just({}),
    st.builds(lambda value: {"due_ms": value}, TIMES),
    st.builds(lambda value: {"delay_ms": value}, TIMES),
    st.builds(lambda value: {"delay_level": value}, st.integers(0, 30)),
)
METAS = st.one_of(st.none(), st.builds(common_pb2.MessageMeta, key=st.sampled_from(["", "k"])))


@st.composite
def messages(draw: Any) -> common_pb2.Message:
    """Sound ones and others."""
    fields: dict[str, Any] = dict(draw(WHENS))
    meta = draw(METAS)
    if meta is not None:
        fields["meta"] = meta
    return common_pb2.Message(
        topic=draw(st.sampled_from(["orders", "", ".no", "a" * 128])),
        payload=draw(st.sampled_from([b"", b"x", bytes(300), bytes(SETTINGS.payload_bytes_max + 1)])),
        jitter_ms=draw(st.sampled_from([0, 0, 5, (1 << 32) - 1])),
        **fields,
    )


def read(what: Any) -> dict[str, Any] | Failure:
    """What becomes of it, comparable."""
    try:
        batch = what()
    except RequestError as error:
        return error.failure
    assert isinstance(batch, IncomingBatch)
    values = {name: getattr(batch, name) for name in IncomingBatch.__dataclass_fields__}
    metas = values.pop("metas")
    for name in MetaColumns.__dataclass_fields__:
        values[f"metas.{name}"] = None if metas is None else getattr(metas, name)
    return {
        name: (value.dtype, value.tolist()) if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }


@given(
    messages(),
    st.sampled_from(["", "p-1", "no spaces", "p" * 65]),
    st.sampled_from([0, 1, 7]),
    st.sampled_from(["", "me", "x" * 200]),
)
def test_one_message_is_read_as_a_row_is(
    message: common_pb2.Message, producer_id: str, sequence: int, client: str
) -> None:
    """Same columns, same refusals in the same words: or who calls without a stream would be held to other rules."""
    fields: dict[str, Any] = {"producer_id": producer_id, "sequence": sequence, "client_name": client}
    request = scheduler_pb2.ScheduleRequest(message=message, **fields)
    rows = scheduler_pb2.RowBatch(messages=[message])
    batch = scheduler_pb2.ScheduleBatch(rows=rows, **fields)
    assert read(lambda: from_message(request, SETTINGS)) == read(lambda: from_batch(batch, SETTINGS))


def test_rows_of_one_kind_of_time_share_it() -> None:
    """A column of kinds for rows that are all delays would send each batch the long way to its due times."""
    row = {"topic": "t", "payload": b"x"}
    alike = scheduler_pb2.RowBatch(messages=[common_pb2.Message(delay_ms=n, **row) for n in range(3)])  # type: ignore[arg-type]
    assert isinstance(from_batch(scheduler_pb2.ScheduleBatch(rows=alike), SETTINGS).kinds, int)
    mixed = scheduler_pb2.RowBatch(
        messages=[common_pb2.Message(delay_ms=5, **row), common_pb2.Message(delay_level=2, **row)]  # type: ignore[arg-type]
    )
    kinds = from_batch(scheduler_pb2.ScheduleBatch(rows=mixed), SETTINGS).kinds
    assert isinstance(kinds, np.ndarray) and kinds.tolist() == [1, 2]


def test_sequences_have_a_bound() -> None:
    """The last one of 64 bits made every checkpoint fail from then on."""
    message = common_pb2.Message(topic="orders", payload=b"x", delay_ms=1)
    for sequence in (0, SEQUENCE_MAX + 1, (1 << 64) - 1):
        unary = scheduler_pb2.ScheduleRequest(message=message, producer_id="p", sequence=sequence)
        rows = scheduler_pb2.RowBatch(messages=[message])
        batch = scheduler_pb2.ScheduleBatch(rows=rows, producer_id="p", sequence=sequence)
        for what in (lambda: from_message(unary, SETTINGS), lambda: from_batch(batch, SETTINGS)):  # noqa: B023  # called here
            refused = read(what)
            assert isinstance(refused, Failure) and refused.metadata["field"] == "sequence"
    last = scheduler_pb2.ScheduleRequest(message=message, producer_id="p", sequence=SEQUENCE_MAX)
    assert isinstance(read(lambda: from_message(last, SETTINGS)), dict)


def test_metas_in_columns_are_looked_through_as_requests_are() -> None:
    """They are bytes to the door, and stored as they are: what is in them must be known here."""
    one = np.array([1], "<u4").tobytes()
    for meta in (b"\xff", b"\xa3\x38\xa4\x38", b"\x0a\x01k" + b"\xa3\x38" * 97 + b"\xa4\x38" * 97):
        columns = scheduler_pb2.ColumnBatch(
            topic="orders",
            delay_ms=np.array([1], "<i8").tobytes(),
            payload_sizes=one,
            payloads=b"x",
            meta_sizes=np.array([len(meta)], "<u4").tobytes(),
            metas=meta,
        )
        batch = scheduler_pb2.ScheduleBatch(columns=columns)
        refused = read(lambda: from_batch(batch, SETTINGS))  # noqa: B023  # called here
        assert isinstance(refused, Failure) and refused.metadata["field"] == "metas[0]"


META = st.builds(
    common_pb2.MessageMeta,
    key=st.sampled_from(["", "k", "ключ"]),
    tags=st.lists(st.sampled_from(["a", "b", "été"]), max_size=3),
    headers=st.dictionaries(st.sampled_from("ab"), st.just("x"), max_size=2),
)


def columns_of(metas: Sequence[common_pb2.MessageMeta], **fields: Any) -> scheduler_pb2.ScheduleBatch:
    """A batch of columns, a message of one byte with each meta."""
    blobs = [meta.SerializeToString(deterministic=True) for meta in metas]
    columns = scheduler_pb2.ColumnBatch(
        topic="orders",
        delay_ms=np.ones(len(metas), "<i8").tobytes(),
        payload_sizes=np.ones(len(metas), "<u4").tobytes(),
        payloads=b"x" * len(metas),
        meta_sizes=np.array([*map(len, blobs)], "<u4").tobytes(),
        metas=b"".join(blobs),
    )
    return scheduler_pb2.ScheduleBatch(columns=columns, **fields)


@given(st.lists(META, min_size=1, max_size=5))
def test_metas_are_indexed_in_columns_as_in_rows_as_alone(metas: list[common_pb2.MessageMeta]) -> None:
    """Codes and masks of tags, codes of keys."""
    messages = [common_pb2.Message(topic="orders", delay_ms=1, payload=b"x", meta=meta) for meta in metas]
    in_rows = scheduler_pb2.ScheduleBatch(rows=scheduler_pb2.RowBatch(messages=messages))
    rows, columns = read(lambda: from_batch(in_rows, SETTINGS)), read(lambda: from_batch(columns_of(metas), SETTINGS))
    calls = [scheduler_pb2.ScheduleRequest(message=message) for message in messages]
    alone = [read(partial(from_message, call, SETTINGS)) for call in calls]
    assert isinstance(rows, dict) and isinstance(columns, dict)
    for name in ("metas.sizes", "metas.tag_hashes", "metas.tag_masks", "metas.key_hashes", "records"):
        parts = [found[name] for found in alone if isinstance(found, dict)]
        if any(meta.ByteSize() for meta in metas) or name == "records":
            assert columns[name] == rows[name]
        if name != "records":
            assert columns[name][1] == [part[1][0] for part in parts]


def test_a_batch_with_large_metas_is_read_once() -> None:
    """Each look at a field of bytes copies it: a look for every message copied thirty gigabytes."""
    header = common_pb2.MessageMeta(headers={"h": "x" * 300})
    batch = columns_of([header] * 10_000)
    before = process_time()
    from_batch(batch, SETTINGS)
    assert process_time() - before < 1


def test_hostile_tags_and_keys_are_looked_at_together() -> None:
    """Half a million tags took the node's loop two seconds, keys of 32 KB nearly one."""
    names = cycle(map("".join, product(ascii_letters, repeat=3)))
    tags = [common_pb2.MessageMeta(tags=islice(names, 50)) for _ in range(10_000)]
    keys = [common_pb2.MessageMeta(key="k" * KEY_LENGTH_MAX)] * 1_000
    for batch in (columns_of(tags), columns_of(keys)):
        assert calls_of(partial(from_batch, batch, SETTINGS)) < 20 * 10_000


def test_a_key_has_a_length() -> None:
    """It is named with its row."""
    metas = [common_pb2.MessageMeta(key="k" * length) for length in (KEY_LENGTH_MAX, KEY_LENGTH_MAX + 1)]
    assert isinstance(read(lambda: from_batch(columns_of(metas[:1]), SETTINGS)), dict)
    refused = read(lambda: from_batch(columns_of(metas), SETTINGS))
    assert isinstance(refused, Failure) and refused.metadata["field"] == "meta[1].key"


def test_large_metas_are_refused_unread() -> None:
    """By the number of their headers, and by the sizes that a batch of columns states."""
    meta = common_pb2.MessageMeta(headers={str(number): "" for number in range(400_000)})
    row = common_pb2.Message(topic="orders", delay_ms=1, payload=b"x", meta=meta)
    in_rows = scheduler_pb2.ScheduleBatch(rows=scheduler_pb2.RowBatch(messages=[row]))
    for batch in (in_rows, columns_of([meta])):
        before = process_time()
        refused = read(partial(from_batch, batch, SETTINGS))
        assert process_time() - before < 0.1
        assert isinstance(refused, Failure) and refused.metadata["field"] == "meta[0]"


def test_a_batch_of_columns_has_few_headers() -> None:
    """As rows have, which the door looks at."""
    meta = common_pb2.MessageMeta(headers={f"{number:x}": "" for number in range(3_000)})
    refused = read(partial(from_batch, columns_of([meta] * 80), SETTINGS))
    assert isinstance(refused, Failure) and refused.metadata["field"] == "headers"
    assert isinstance(read(partial(from_batch, columns_of([meta] * 50), SETTINGS)), dict)
    # A name of 26 characters has the byte before it that a header begins with.
    meta = common_pb2.MessageMeta(headers={f"{number:026}": "" for number in range(800)})
    assert isinstance(read(partial(from_batch, columns_of([meta] * 150), SETTINGS)), dict)
