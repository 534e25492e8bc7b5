"""What consumer groups are done with, as frames: messages that a group has settled, and its dead letters.

The driver pins on one node what a group has settled after one entry of the log, and tasks read pieces of it. A message
counts as settled if the last position it has for the group is: one that waits for a retry, or whose retry is out, does
not, nor does a dead letter. Dead letters are listed by the driver after the pin and read by the tasks, from the master.

Frames are to be used soon: a pin is forgotten ten minutes after it was last read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tickwheel.client import AsyncClient
from tickwheel.client.dead import DeadLetter
from tickwheel.client.errors import RequestRefused
from tickwheel.client.snapshot import SettledPin
from tickwheel.pipeline.options import Connection
from tickwheel.pipeline.source_columns import CONTENT, CONTENT_FIELDS, content_columns, id_column
from tickwheel.proto.snapshot_pb2 import SettledPage

SETTLED, DEAD = "settled", "dead"
SCHEMA = (
    f"kind string, group string, id string, topic string, due_ms bigint, last_due_ms bigint, scheduled_ms bigint, "
    f"attempts int, cause string, error string, died_ms bigint, applied_index bigint, {CONTENT}"
)
"""`due_ms`: when it was due first; `scheduled_ms`: null where a retry was the last delivery, and of dead letters;
attempts, cause, error and died_ms are those of dead letters, null otherwise; `applied_index`: of the pin."""
_HEAD = [
    *(pa.field(name, pa.string()) for name in ("kind", "group", "id", "topic")),
    *(pa.field(name, pa.int64()) for name in ("due_ms", "last_due_ms", "scheduled_ms")),
    pa.field("attempts", pa.int32()),
    *(pa.field(name, pa.string()) for name in ("cause", "error")),
    *(pa.field(name, pa.int64()) for name in ("died_ms", "applied_index")),
]
_ARROW = pa.schema([*_HEAD, *CONTENT_FIELDS])
_PLACES = "id string, position bigint"
_PLACES_ARROW = pa.schema([pa.field("id", pa.string()), pa.field("position", pa.int64())])
_WITH_PLACE = pa.schema([*_ARROW, pa.field("position", pa.int64())])

POSITIONS = 65_536
"""Of a task."""
LETTERS = 2_048
"""Of a task."""
LETTERS_AHEAD = 32
"""Asked for together."""

Item = TypeVar("Item")
Piece = tuple[int, str, int, int]
"""Id and name of a topic, positions from and below."""


def done_with(spark: SparkSession, connection: Connection, group: str, due_ms_min: int = 0) -> DataFrame:
    """SCHEMA: what a group has settled of what the cluster still keeps, and its dead letters, each message once.

    `due_ms_min`: only messages whose last delivery was due, or that died, at or after it. Raises RequestRefused if
    there is no such group, ClusterUnavailable.
    """
    with connection.open() as client:
        pin = client.wait(client.asynchronous.snapshot.pin_settled(group, due_ms_min=due_ms_min))
        numbers, ids = client.wait(_letters(client.asynchronous, group))
    pieces = [
        (topic_id, name, at, min(at + POSITIONS, end))
        for topic_id, name, first, end in pin.topics
        for at in range(first, end, POSITIONS)
    ]
    there = replace(connection, endpoints=(pin.address,))
    rows = _of_each(spark, pieces, _settled_reader(there, pin, group), f"{SCHEMA}, position bigint")
    retries = _of_each(spark, pieces, _retries_reader(there, pin), _PLACES)
    newest = retries.groupBy("id").agg(F.max("position").alias("newest"))
    buried = spark.createDataFrame([(id,) for id in ids], "id string")
    settled = (
        rows.join(newest, "id", "left")
        .where(F.col("newest").isNull() | (F.col("newest") == F.col("position")))
        .join(buried, "id", "left_anti")
        .where(F.col("last_due_ms") >= due_ms_min)
        .select(*_ARROW.names)
    )
    chunks = [numbers[at : at + LETTERS] for at in range(0, len(numbers), LETTERS)]
    dead = _of_each(spark, chunks, _dead_reader(connection, pin, group), SCHEMA)
    return settled.unionByName(dead.where(F.col("died_ms") >= due_ms_min))


def _of_each(
    spark: SparkSession, items: Sequence[Item], read: Callable[[Item], Iterator[pa.RecordBatch]], schema: str
) -> DataFrame:
    """What `read` gives for every item, each in a task of its own."""
    count = len(items)

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from read(items[number])

    return spark.range(0, count, 1, max(1, count)).mapInArrow(run, schema)


async def _letters(client: AsyncClient, group: str) -> tuple[list[int], list[str]]:
    """Numbers and ids of a group's dead letters."""
    found = [(letter.number, letter.id) async for letter in client.dead.list(group)]
    return [number for number, _ in found], [id for _, id in found]


# -- in tasks


async def _next(pages: AsyncIterator[SettledPage]) -> SettledPage | None:
    return await anext(pages, None)


def _settled_reader(connection: Connection, pin: SettledPin, group: str) -> Callable[[Piece], Iterator[pa.RecordBatch]]:
    def read(piece: Piece) -> Iterator[pa.RecordBatch]:
        topic_id, name, first, end = piece
        with connection.open() as client:
            snapshot = client.asynchronous.snapshot
            pages = snapshot.settled_pages(pin.address, pin.pin_id, topic_id, first, end, content=True)
            while (page := client.wait(_next(pages))) is not None:
                if page.ids:
                    yield _settled_batch(page, pin, group, name)

    return read


def _retries_reader(connection: Connection, pin: SettledPin) -> Callable[[Piece], Iterator[pa.RecordBatch]]:
    def read(piece: Piece) -> Iterator[pa.RecordBatch]:
        topic_id, _, first, end = piece
        with connection.open() as client:
            pages = client.asynchronous.snapshot.settled_pages(
                pin.address, pin.pin_id, topic_id, first, end, content=False, retries=True
            )
            while (page := client.wait(_next(pages))) is not None:
                columns = [id_column(np.frombuffer(page.ids, "<u8")), pa.array(_numbers(page.positions))]
                yield pa.record_batch(columns, schema=_PLACES_ARROW)

    return read


def _numbers(column: bytes) -> NDArray[np.int64]:
    return np.frombuffer(column, "<i8")


def _settled_batch(page: SettledPage, pin: SettledPin, group: str, topic: str) -> pa.RecordBatch:
    ids = np.frombuffer(page.ids, "<u8")
    count = len(ids)
    scheduled = _numbers(page.scheduled_ms)
    head = [
        pa.repeat(pa.scalar(SETTLED), count),
        pa.repeat(pa.scalar(group), count),
        id_column(ids),
        pa.repeat(pa.scalar(topic), count),
        pa.array(_numbers(page.due_ms)),
        pa.array(_numbers(page.last_due_ms)),
        pa.array(scheduled, mask=scheduled == 0),
        *(pa.nulls(count, field.type) for field in _HEAD[7:11]),
        pa.array(np.full(count, pin.applied_index, np.int64)),
    ]
    sizes, meta_sizes = np.frombuffer(page.sizes, "<u4"), np.frombuffer(page.meta_sizes, "<u4")
    content = content_columns(page.records, sizes, meta_sizes)
    return pa.record_batch([*head, *content, pa.array(_numbers(page.positions))], schema=_WITH_PLACE)


def _dead_reader(
    connection: Connection, pin: SettledPin, group: str
) -> Callable[[list[int]], Iterator[pa.RecordBatch]]:
    def read(numbers: list[int]) -> Iterator[pa.RecordBatch]:
        with connection.open() as client:
            for at in range(0, len(numbers), LETTERS_AHEAD):
                found = client.wait(_get(client.asynchronous, group, numbers[at : at + LETTERS_AHEAD]))
                rows = [_letter_row(letter, group, pin.applied_index) for letter in found]
                yield pa.RecordBatch.from_pylist(rows, schema=_ARROW)

    return read


async def _get(client: AsyncClient, group: str, numbers: Sequence[int]) -> list[DeadLetter]:
    async def one(number: int) -> DeadLetter | None:
        try:
            return await client.dead.get(group, number)
        except RequestRefused as error:
            if error.reason != "UNKNOWN_NAME":
                raise
            return None  # replayed or purged since it was listed

    return [letter for letter in await asyncio.gather(*map(one, numbers)) if letter is not None]


def _letter_row(letter: DeadLetter, group: str, applied_index: int) -> dict[str, object]:
    meta = letter.meta
    return {
        "kind": DEAD,
        "group": group,
        "id": letter.id,
        "topic": letter.topic,
        "due_ms": letter.first_due_ms,
        "last_due_ms": None,
        "scheduled_ms": None,
        "attempts": letter.attempts,
        "cause": letter.cause,
        "error": letter.error,
        "died_ms": letter.died_ms,
        "applied_index": applied_index,
        "payload": letter.payload,
        "key": meta.key or None,
        "tags": list(meta.tags) or None,
        "properties": list(meta.headers.items()) or None,
    }
