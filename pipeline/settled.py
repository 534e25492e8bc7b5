"""The messages that a consumer group has settled, and its dead letters, as frames.

The driver pins the group's settled messages on one node, after one entry of the log, and tasks read pieces of the pin.
A message counts as settled if its last position for the group is settled. A message that waits for a retry, or whose
retry is being delivered, does not count, and neither does a dead letter.

The driver lists the dead letters after the pin, and tasks read them from the master. The pin states their number. If
one was replayed or purged before the driver could list it, the driver pins again. So no dead letter is taken for
settled, and no message that is delivered again is taken for dead. Positions whose hours are removed before a task reads
them are skipped and reported.

Use a frame soon: a node drops a pin ten minutes after the last read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import pyarrow as pa
from pyspark import Accumulator, AccumulatorParam
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from tickwheel.client import AsyncClient
from tickwheel.client.dead import DeadLetter
from tickwheel.client.errors import RequestRefused
from tickwheel.client.filtering import tags_of
from tickwheel.client.snapshot import SettledPage, SettledPin, SettledTopic
from tickwheel.pipeline.options import Connection
from tickwheel.pipeline.source_columns import CONTENT_FIELDS, content_columns, ddl_of, id_column

SETTLED, DEAD = "settled", "dead"
ACKED, SKIPPED, PASSED = "acked", "skipped", "passed"
_HEAD = [
    *(pa.field(name, pa.string()) for name in ("kind", "how", "group", "id", "topic")),
    *(pa.field(name, pa.int64()) for name in ("due_ms", "last_due_ms", "scheduled_ms")),
    pa.field("attempts", pa.int32()),
    *(pa.field(name, pa.string()) for name in ("cause", "error")),
    *(pa.field(name, pa.int64()) for name in ("died_ms", "applied_index")),
]
_ARROW = pa.schema([*_HEAD, *CONTENT_FIELDS])
SCHEMA = ddl_of(_ARROW)
"""`how` it ended for the group: `acked`, `skipped` (by its filter), `passed` (dispatched before the group began),
`dead`. Null: the node cannot tell, because the group broadcasts; or because after the dispatch the group was reset, got
another filter, or had dead letters purged. `due_ms`: when it was first due. `scheduled_ms`: null for dead letters, and
if a retry was the last delivery. `attempts`, `cause`, `error` and `died_ms`: null except for dead letters.
`applied_index`: that of the pin."""
_PLACES = pa.schema([pa.field("id", pa.string()), pa.field("position", pa.int64())])
_WITH_PLACE = pa.schema([*_ARROW, pa.field("position", pa.int64())])

POSITIONS = 65_536
"""Positions for each task."""
LETTERS = 2_048
"""Dead letters for each task."""
LETTERS_AHEAD = 32
"""Dead letters requested at the same time."""
PINS = 8
"""Pins tried if dead letters are replayed or purged in between."""

Item = TypeVar("Item")
Piece = SettledTopic
"""A range of positions of one topic."""
Gone = frozenset[tuple[int, int, int]]
"""(topic id, first position, end) of ranges that were removed."""


class LettersGoingError(Exception):
    """Dead letters of the named group were replayed or purged during each of the PINS tries."""


class _Union(AccumulatorParam[Gone]):
    """A union of sets, so that repeated reports of a task do not count twice."""

    def zero(self, value: Gone) -> Gone:
        return frozenset()

    def addInPlace(self, value1: Gone, value2: Gone) -> Gone:
        return value1 | value2


@dataclass(frozen=True, slots=True)
class Done:
    """The settled messages and dead letters of a group."""

    frame: DataFrame
    """SCHEMA."""
    pin: SettledPin
    _passed_over: Accumulator[Gone]

    @property
    def passed_over(self) -> Gone:
        """The ranges that were removed during the reads. Complete once the whole frame was computed."""
        return self._passed_over.value


def done_with(spark: SparkSession, connection: Connection, group: str, due_ms_min: int = 0) -> Done:
    """The settled messages of a group that the cluster still keeps, and its dead letters, each message once.

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
    there = replace(connection, addresses=(pin.address,))
    passed_over = spark.sparkContext.accumulator(Gone(), _Union())
    rows = _of_each(spark, pieces, _settled_reader(there, pin, group, passed_over), _WITH_PLACE)
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
    dead = _of_each(spark, chunks, _dead_reader(connection, pin, group), _ARROW)
    return Done(settled.unionByName(dead.where(F.col("died_ms") >= due_ms_min)), pin, passed_over)


def _of_each(
    spark: SparkSession, items: Sequence[Item], read: Callable[[Item], Iterator[pa.RecordBatch]], schema: pa.Schema
) -> DataFrame:
    """A frame of the batches that `read` returns for each item, with one task for each item."""
    count = len(items)

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from read(items[number])

    return spark.range(0, count, 1, max(1, count)).mapInArrow(run, ddl_of(schema))


def _how(filter: str) -> Column:
    """The end of a settled message: acknowledged if the filter wants it, else skipped.

    The tags themselves are compared, since the node compares only hashes of them.
    """
    if not filter:
        return F.col("how")
    none = F.array().cast("array<string>")
    wanted = F.arrays_overlap(F.coalesce("tags", none), F.array(*map(F.lit, sorted(tags_of(filter)))))
    return F.when((F.col("how") == ACKED) & ~wanted, F.lit(SKIPPED)).otherwise(F.col("how"))


async def _pinned(client: AsyncClient, group: str, due_ms_min: int) -> tuple[SettledPin, list[int], list[str]]:
    """(a pin, numbers, ids of the dead letters that existed at that moment)."""
    for _ in range(PINS):
        pin = await client.snapshot.pin_settled(group, due_ms_min=due_ms_min)
        found = [
            (letter.number, letter.id) async for letter in client.dead.list(group) if letter.number < pin.dead_next
        ]
        # Numbers are never reused: if the count is equal, the letters are the same.
        if len(found) == pin.dead_count:
            return pin, [number for number, _ in found], [id for _, id in found]
    raise LettersGoingError(
        f"group {group}: dead letters were replayed or purged during each of {PINS} tries to read them; "
        "try again when that is over"
    )


# -- in tasks


def _settled_reader(
    connection: Connection, pin: SettledPin, group: str, passed_over: Accumulator[Gone]
) -> Callable[[Piece], Iterator[pa.RecordBatch]]:
    def read(piece: Piece) -> Iterator[pa.RecordBatch]:
        with connection.open() as client:
            pages = client.snapshot.settled_pages(
                pin.address, pin.pin_id, piece.topic_id, piece.first, piece.end, content=True
            )
            first = piece.first
            for page in pages:
                if page.removed:
                    passed_over.add(Gone([(piece.topic_id, first, first + page.removed)]))
                if len(page.ids):
                    yield _settled_batch(page, pin, group, piece)
                first = page.next if page.next is not None else piece.end

    return read


def _retries_reader(connection: Connection, pin: SettledPin) -> Callable[[Piece], Iterator[pa.RecordBatch]]:
    def read(piece: Piece) -> Iterator[pa.RecordBatch]:
        with connection.open() as client:
            pages = client.snapshot.settled_pages(
                pin.address, pin.pin_id, piece.topic_id, piece.first, piece.end, content=False, retries=True
            )
            for page in pages:
                columns = [id_column(page.ids), pa.array(page.positions.view(np.int64))]
                yield pa.record_batch(columns, schema=_PLACES)

    return read


def _settled_batch(page: SettledPage, pin: SettledPin, group: str, topic: SettledTopic) -> pa.RecordBatch:
    count = len(page.ids)
    scheduled, positions = page.scheduled_ms, page.positions.view(np.int64)
    passed, known = positions < topic.began, positions >= topic.judged_from
    head = [
        pa.repeat(pa.scalar(SETTLED), count),
        pa.array(np.where(passed, PASSED, ACKED), pa.string(), mask=~(passed | known)),
        pa.repeat(pa.scalar(group), count),
        id_column(page.ids),
        pa.repeat(pa.scalar(topic.name), count),
        pa.array(page.due_ms),
        pa.array(page.last_due_ms),
        pa.array(scheduled, mask=scheduled == 0),
        *(pa.nulls(count, field.type) for field in _HEAD[8:12]),
        pa.array(np.full(count, pin.applied_index, np.int64)),
    ]
    content = content_columns(page.records, page.sizes, page.meta_sizes)
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
            return None  # replayed or purged after the listing

    return [letter for letter in await asyncio.gather(*map(one, numbers)) if letter is not None]


def _letter_row(letter: DeadLetter, group: str, applied_index: int) -> dict[str, object]:
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
        "key": letter.key or None,
        "tags": list(letter.tags) or None,
        "properties": list(letter.headers.items()) or None,
        "message_group": letter.message_group or None,
        "unique_key": letter.unique_key or None,
    }
