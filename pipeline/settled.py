"""What consumer groups are done with, as frames: messages that a group has settled, and its dead letters.

The driver pins on one node what a group has settled after one entry of the log, and tasks read pieces of it. A message
counts as settled if the last position it has for the group is: one that waits for a retry, or whose retry is out, does
not, nor does a dead letter. Dead letters are listed by the driver after the pin and read by the tasks, from the master.
The pin says how many there were: if one was replayed or purged before it could be listed, the driver pins again, so no
message is taken for settled that lay in the queue of the dead, nor one for dead that is delivered again. Positions
whose hours go before a task comes to them are passed over, and told.

Frames are to be used soon: a pin is forgotten ten minutes after it was last read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark import Accumulator, AccumulatorParam
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from tickwheel.client import AsyncClient
from tickwheel.client.dead import DeadLetter
from tickwheel.client.errors import RequestRefused
from tickwheel.client.filtering import tags_of
from tickwheel.client.snapshot import SettledPin, SettledTopic
from tickwheel.pipeline.options import Connection
from tickwheel.pipeline.source_columns import CONTENT, CONTENT_FIELDS, content_columns, id_column
from tickwheel.proto.snapshot_pb2 import SettledPage

SETTLED, DEAD = "settled", "dead"
ACKED, SKIPPED, PASSED = "acked", "skipped", "passed"
SCHEMA = (
    "kind string, how string, group string, id string, topic string, due_ms bigint, last_due_ms bigint, "
    "scheduled_ms bigint, attempts int, cause string, error string, died_ms bigint, applied_index bigint, "
    f"{CONTENT}"
)
"""`how` it ended for the group: `acked`, `skipped` (its filter), `passed` (dispatched before the group began), `dead`;
null: the node cannot tell (the group broadcasts; or was reset, got another filter, had dead letters purged, after the
message was dispatched). `due_ms`: when it was due first; `scheduled_ms`: null where a retry was the last delivery, and
of dead letters; attempts, cause, error and died_ms are those of dead letters, null otherwise; `applied_index`: of the
pin."""
_HEAD = [
    *(pa.field(name, pa.string()) for name in ("kind", "how", "group", "id", "topic")),
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
PINS = 8
"""Tried while dead letters go in between."""

Item = TypeVar("Item")
Piece = SettledTopic
"""A topic, and some positions of it."""
Gone = frozenset[tuple[int, int, int]]
"""Of a topic's id, positions from and below."""


class LettersGoingError(Exception):
    """Dead letters of a group were replayed or purged whenever they were looked at; the text names it."""


class _Union(AccumulatorParam[Gone]):
    """However often a task tells the same."""

    def zero(self, value: Gone) -> Gone:
        return frozenset()

    def addInPlace(self, value1: Gone, value2: Gone) -> Gone:
        return value1 | value2


@dataclass(frozen=True, slots=True)
class Done:
    """What a group is done with."""

    frame: DataFrame
    """SCHEMA."""
    pin: SettledPin
    _passed_over: Accumulator[Gone]

    @property
    def passed_over(self) -> Gone:
        """What was removed while tasks read. Complete once all of the frame was computed."""
        return self._passed_over.value


def done_with(spark: SparkSession, connection: Connection, group: str, due_ms_min: int = 0) -> Done:
    """What a group has settled of what the cluster still keeps, and its dead letters, each message once.

    `due_ms_min`: only messages whose last delivery was due, or that died, at or after it. Raises RequestRefused if
    there is no such group, ClusterUnavailable, LettersGoingError.
    """
    with connection.open() as client:
        pin, numbers, ids = client.wait(_pinned(client.asynchronous, group, due_ms_min))
    pieces = [
        replace(topic, first=at, end=min(at + POSITIONS, topic.end))
        for topic in pin.topics
        for at in range(topic.first, topic.end, POSITIONS)
    ]
    there = replace(connection, endpoints=(pin.address,))
    passed_over = spark.sparkContext.accumulator(Gone(), _Union())
    rows = _of_each(spark, pieces, _settled_reader(there, pin, group, passed_over), f"{SCHEMA}, position bigint")
    retries = _of_each(spark, pieces, _retries_reader(there, pin), _PLACES)
    newest = retries.groupBy("id").agg(F.max("position").alias("newest"))
    buried = spark.createDataFrame([(id,) for id in ids], "id string")
    settled = (
        rows.join(newest, "id", "left")
        .where(F.col("newest").isNull() | (F.col("newest") == F.col("position")))
        .join(buried, "id", "left_anti")
        .where(F.col("last_due_ms") >= due_ms_min)
        .withColumn("how", _how(pin.filter))
        .select(*_ARROW.names)
    )
    chunks = [numbers[at : at + LETTERS] for at in range(0, len(numbers), LETTERS)]
    dead = _of_each(spark, chunks, _dead_reader(connection, pin, group), SCHEMA)
    return Done(settled.unionByName(dead.where(F.col("died_ms") >= due_ms_min)), pin, passed_over)


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


def _how(filter: str) -> Column:
    """What was delivered was acknowledged in the end; what the filter does not want was not delivered. Exactly so: the
    node goes by hashes of tags."""
    if not filter:
        return F.col("how")
    none = F.array().cast("array<string>")
    wanted = F.arrays_overlap(F.coalesce("tags", none), F.array(*map(F.lit, sorted(tags_of(filter)))))
    return F.when((F.col("how") == ACKED) & ~wanted, F.lit(SKIPPED)).otherwise(F.col("how"))


async def _pinned(client: AsyncClient, group: str, due_ms_min: int) -> tuple[SettledPin, list[int], list[str]]:
    """A pin, and numbers and ids of the dead letters that there were at that moment."""
    for _ in range(PINS):
        pin = await client.snapshot.pin_settled(group, due_ms_min=due_ms_min)
        found = [
            (letter.number, letter.id) async for letter in client.dead.list(group) if letter.number < pin.dead_next
        ]
        # Numbers are never used again: if there are as many as there were, they are the same.
        if len(found) == pin.dead_count:
            return pin, [number for number, _ in found], [id for _, id in found]
    raise LettersGoingError(
        f"group {group}: dead letters were replayed or purged each of {PINS} times that they were looked at; "
        "try again when that is over"
    )


# -- in tasks


async def _next(pages: AsyncIterator[SettledPage]) -> SettledPage | None:
    return await anext(pages, None)


def _settled_reader(
    connection: Connection, pin: SettledPin, group: str, passed_over: Accumulator[Gone]
) -> Callable[[Piece], Iterator[pa.RecordBatch]]:
    def read(piece: Piece) -> Iterator[pa.RecordBatch]:
        with connection.open() as client:
            snapshot = client.asynchronous.snapshot
            pages = snapshot.settled_pages(
                pin.address, pin.pin_id, piece.topic_id, piece.first, piece.end, content=True
            )
            first = piece.first
            while (page := client.wait(_next(pages))) is not None:
                if page.removed:
                    passed_over.add(Gone([(piece.topic_id, first, first + page.removed)]))
                if page.ids:
                    yield _settled_batch(page, pin, group, piece)
                first = page.next

    return read


def _retries_reader(connection: Connection, pin: SettledPin) -> Callable[[Piece], Iterator[pa.RecordBatch]]:
    def read(piece: Piece) -> Iterator[pa.RecordBatch]:
        with connection.open() as client:
            pages = client.asynchronous.snapshot.settled_pages(
                pin.address, pin.pin_id, piece.topic_id, piece.first, piece.end, content=False, retries=True
            )
            while (page := client.wait(_next(pages))) is not None:
                columns = [id_column(np.frombuffer(page.ids, "<u8")), pa.array(_numbers(page.positions))]
                yield pa.record_batch(columns, schema=_PLACES_ARROW)

    return read


def _numbers(column: bytes) -> NDArray[np.int64]:
    return np.frombuffer(column, "<i8")


def _settled_batch(page: SettledPage, pin: SettledPin, group: str, topic: SettledTopic) -> pa.RecordBatch:
    ids = np.frombuffer(page.ids, "<u8")
    count = len(ids)
    scheduled, positions = _numbers(page.scheduled_ms), _numbers(page.positions)
    passed, known = positions < topic.began, positions >= topic.judged_from
    head = [
        pa.repeat(pa.scalar(SETTLED), count),
        pa.array(np.where(passed, PASSED, ACKED), pa.string(), mask=~(passed | known)),
        pa.repeat(pa.scalar(group), count),
        id_column(ids),
        pa.repeat(pa.scalar(topic.name), count),
        pa.array(_numbers(page.due_ms)),
        pa.array(_numbers(page.last_due_ms)),
        pa.array(scheduled, mask=scheduled == 0),
        *(pa.nulls(count, field.type) for field in _HEAD[8:12]),
        pa.array(np.full(count, pin.applied_index, np.int64)),
    ]
    sizes, meta_sizes = np.frombuffer(page.sizes, "<u4"), np.frombuffer(page.meta_sizes, "<u4")
    content = content_columns(page.records, sizes, meta_sizes)
    return pa.record_batch([*head, *content, pa.array(positions)], schema=_WITH_PLACE)


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
        "how": DEAD,
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
        "message_group": meta.message_group or None,
    }
