"""The batch source: all pending messages, by due hours, as of one applied index.

A pin on one node (a slave, if one serves) holds the messages pending after one entry of the log. Every task of a query
reads its hours from the pin, whatever is scheduled, delivered or cancelled meanwhile. The first task of a query makes
the pin, and the replicated log records which pin it was. The driver cannot make it: Spark asks for partitions once for
all queries over one `load()`, so all of them would read the same old pin. The node filters topics and times.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceReader, InputPartition

from tickwheel.client import Client
from tickwheel.client.snapshot import Pin, PinnedPage
from tickwheel.pipeline.options import Connection, OptionError, Options, connection_of
from tickwheel.pipeline.source_columns import CONTENT_FIELDS, content_columns, ddl_of, id_column

OPTIONS = frozenset({"topic", "due_ms_min", "due_ms_max", "content", "read_from", "asof", "pushdown"})
DUE_MS_LIMIT = 1 << 50
SPANS_AHEAD = 8
"""Spans of hours whose first pages a task requests together; a page has at most 4 MiB, or one message."""
EXECUTION_ID = "spark.sql.execution.id"
PARTITIONS_MIN = 2
"""Least number of partitions, since more may be pending when the frame is read again."""
PARTITIONS = 128
"""Neighbouring hours share a partition, so that there are at most this many and one more."""
HOUR_COST = 25
"""Opening an hour takes as long as reading this many messages."""
PARTITION_COST = 25_000
"""Least work for a task, in messages: a task costs a tenth of a second by itself, before it reads anything."""
_HEAD_FIELDS = [
    pa.field("id", pa.string()),
    pa.field("topic", pa.string()),
    *(pa.field(name, pa.int64()) for name in ("due_ms", "due_requested_ms", "scheduled_ms")),
    pa.field("target_group", pa.int32()),
    pa.field("applied_index", pa.int64()),
]


@dataclass(frozen=True, slots=True)
class PendingConfig:
    """The reader's options, checked."""

    connection: Connection
    topics: tuple[str, ...]
    due_ms_min: int
    due_ms_max: int
    content: bool
    read_from: str
    as_of: str
    """The handle of a pin; empty: each query makes its own."""


def _config(options: Options) -> PendingConfig:
    as_of = options.text("asof")
    for name in ("topic", "due_ms_min", "due_ms_max", "read_from"):
        if as_of and options.text(name):
            raise OptionError(name, options.text(name), "not with asOf: the pin has its own")
    return PendingConfig(
        connection_of(options, timeout_s=15.0),
        options.topics(),
        options.number("due_ms_min", 0, 0, DUE_MS_LIMIT),
        options.number("due_ms_max", 0, 0, DUE_MS_LIMIT),
        options.choice("content", "true", ("true", "false")) == "true",
        options.choice("read_from", "slave", ("slave", "master")),
        as_of,
    )


def _fields(content: bool) -> list[pa.Field]:
    return [*_HEAD_FIELDS, *CONTENT_FIELDS] if content else _HEAD_FIELDS


def schema_of(options: Options) -> str:
    """The columns that are read, as DDL."""
    content = options.choice("content", "true", ("true", "false")) == "true"
    return ddl_of(_fields(content))


def reader_of(options: Options) -> DataSourceReader:
    """A reader that takes no filters of the query. Spark 4.3 keeps the filters pushed last for all queries over one
    `load()`, so a query without a filter would get the rows of another."""
    if options.choice("pushdown", "false", ("true", "false")) == "true":
        limit = (
            "Spark gives what one query pushes to the others over the same load(); say topic, due_ms_min, due_ms_max"
        )
        raise OptionError("pushdown", "true", limit)
    return PendingReader(_config(options))


@dataclass
class PendingPart(InputPartition):
    """One part of the pending messages; the query's pin determines its hours."""

    load_id: str
    number: int
    parts: int


class PendingReader(DataSourceReader):
    def __init__(self, config: PendingConfig) -> None:
        self._config = config

    def partitions(self) -> list[PendingPart]:
        """As many parts as the hours pending now need. Which hours each part holds is decided when a query runs, since
        Spark asks once for all queries over one `load()`. Raises ClusterUnavailable with the addresses."""
        with self._config.connection.open() as client:
            pin = self._pin(client, "")
            if not self._config.as_of:
                client.snapshot.unpin(pin.address, pin.pin_id)
        parts = max(PARTITIONS_MIN, len(_shares(pin)))
        load_id = secrets.token_hex(12)
        return [PendingPart(load_id, number, parts) for number in range(parts)]

    def _pin(self, client: Client, name: str) -> Pin:
        config = self._config
        if config.as_of:
            return client.snapshot.held(config.as_of)
        wanted: dict[str, Any] = {
            "due_ms_min": config.due_ms_min,
            "due_ms_max": config.due_ms_max,
            "reader": config.read_from,
        }
        if not name:
            return client.snapshot.pin(config.topics, **wanted)
        return client.snapshot.agreed(name, config.topics, **wanted)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """A task: the pages of its hours. All tasks of a query read one pin, whichever of them comes first."""
        assert isinstance(partition, PendingPart)
        content = self._config.content
        with self._config.connection.open() as client:
            pin = self._pin(client, f"{partition.load_id}.{_query()}")
            if self._config.topics and not pin.topics:
                return
            snapshot = client.asynchronous.snapshot
            shares = _shares(pin)[partition.number :: partition.parts]
            # Neighbours in a share are neighbours in the pin: no other hour of it lies between them.
            spans = [(share[0], share[-1] + 1) for share in shares if pin.spans]
            mine = spans or [(hour, 0) for share in shares for hour in share]
            for first in range(0, len(mine), SPANS_AHEAD):
                hours = [
                    snapshot.pages(pin.address, pin.pin_id, hour, content=content, hour_end=hour_end)
                    for hour, hour_end in mine[first : first + SPANS_AHEAD]
                ]
                for page, pages in zip(client.wait(_first_of(hours)), hours, strict=True):
                    following: PinnedPage | None = page
                    while following is not None:
                        if len(following.ids):
                            yield _batch(following, pin, content)
                        following = client.wait(_next(pages))


def _query() -> str:
    """The query of this task. Work outside a query (`rdd`, `toLocalIterator`) counts as one query, since its parts may
    be separate jobs."""
    context = TaskContext.get()
    return (context.getLocalProperty(EXECUTION_ID) if context is not None else None) or "none"


def _shares(pin: Pin) -> list[tuple[int, ...]]:
    return shared_out(pin.hours, pin.units or (0,) * len(pin.hours))


async def _first_of(hours: Sequence[AsyncIterator[PinnedPage]]) -> list[PinnedPage]:
    return await asyncio.gather(*(anext(pages) for pages in hours))


async def _next(pages: AsyncIterator[PinnedPage]) -> PinnedPage | None:
    return await anext(pages, None)


def shared_out(hours: Sequence[int], units: Sequence[int]) -> list[tuple[int, ...]]:
    """The hours of each partition, balanced by the work of reading them; at most PARTITIONS + 1 partitions."""
    costs = [count + HOUR_COST for count in units]
    enough = max(PARTITION_COST, -(-sum(costs) // PARTITIONS))
    found: list[tuple[int, ...]] = []
    first = gathered = 0
    for place, cost in enumerate(costs):
        gathered += cost
        if gathered >= enough:
            found.append(tuple(hours[first : place + 1]))
            first, gathered = place + 1, 0
    return found if first == len(hours) else [*found, tuple(hours[first:])]


def _batch(page: PinnedPage, pin: Pin, content: bool) -> pa.RecordBatch:
    count = len(page.ids)
    used, codes = np.unique(page.topic_ids, return_inverse=True)
    names = pa.array([pin.topics.get(number, "") for number in used.tolist()], pa.string())
    columns: list[pa.Array] = [
        id_column(page.ids),
        names.take(pa.array(codes.reshape(-1))),
        *map(pa.array, (page.due_ms, page.due_requested_ms, page.scheduled_ms)),
        pa.array(page.target_groups.view(np.int32)),
        pa.array(np.full(count, pin.applied_index, np.int64)),
    ]
    if content:
        columns += content_columns(page.records, page.sizes, page.meta_sizes)
    return pa.record_batch(columns, schema=pa.schema(_fields(content)))
