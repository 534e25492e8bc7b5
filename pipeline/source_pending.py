"""The batch source: what is pending, by due hours, all of it as of one applied index.

The driver pins on one node (a slave, if one serves) what is pending after one entry of the log, and every task reads
its hours from there, whatever is scheduled, delivered or cancelled meanwhile. Topics and times are filtered
by the node.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)

from tickwheel.pipeline.options import TOPIC, Connection, OptionError, Options, connection_of
from tickwheel.pipeline.source_columns import CONTENT, CONTENT_FIELDS, content_columns, id_column
from tickwheel.proto.snapshot_pb2 import PinnedPage

OPTIONS = frozenset({"topic", "due_ms_min", "due_ms_max", "content", "read_from", "pushdown"})
DUE_MS_LIMIT = 1 << 50
HOURS_AHEAD = 8
"""Hours of a partition whose first pages are asked for together; a page is at most 4 MiB, or one message."""
PARTITIONS = 128
"""Up to so many hours are a partition each; of more, neighbours share one, by what there is to read in them."""
HEAD = (
    "id string, topic string, due_ms bigint, due_requested_ms bigint, scheduled_ms bigint, target_group int, "
    "applied_index bigint"
)
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


def _config(options: Options) -> PendingConfig:
    topics = tuple(part.strip() for part in options.text("topic").split(",") if part.strip())
    for name in topics:
        if TOPIC.fullmatch(name) is None:
            raise OptionError("topic", name, "1 to 127 characters of [A-Za-z0-9_-.%], not starting with a dot")
    return PendingConfig(
        connection_of(options, timeout_s=15.0),
        topics,
        options.number("due_ms_min", 0, 0, DUE_MS_LIMIT),
        options.number("due_ms_max", 0, 0, DUE_MS_LIMIT),
        options.choice("content", "true", ("true", "false")) == "true",
        options.choice("read_from", "slave", ("slave", "master")),
    )


def schema_of(options: Options) -> str:
    """Columns of what is read."""
    content = options.choice("content", "true", ("true", "false")) == "true"
    return f"{HEAD}, {CONTENT}" if content else HEAD


def reader_of(options: Options) -> DataSourceReader:
    """With filters of the query, if the option asks: defining that method makes every read fail where Spark is not set
    up for it."""
    pushdown = options.choice("pushdown", "false", ("true", "false")) == "true"
    return FilteredPendingReader(_config(options)) if pushdown else PendingReader(_config(options))


@dataclass
class PendingHours(InputPartition):
    """Hours of a pin, rising."""

    address: str
    pin_id: int
    applied_index: int
    hours: tuple[int, ...]
    topics: dict[int, str]


class PendingReader(DataSourceReader):
    """See the module."""

    def __init__(self, config: PendingConfig) -> None:
        self._config = config

    def partitions(self) -> list[PendingHours]:
        """Pin what is pending. Raises ClusterUnavailable with the addresses."""
        config = self._config
        with config.connection.open() as client:
            pin = client.wait(
                client.asynchronous.snapshot.pin(
                    config.topics,
                    due_ms_min=config.due_ms_min,
                    due_ms_max=config.due_ms_max,
                    reader=config.read_from,
                )
            )
        if config.topics and not pin.topics:
            return []
        return [
            PendingHours(pin.address, pin.pin_id, pin.applied_index, hours, pin.topics)
            for hours in shared_out(pin.hours, pin.units or (0,) * len(pin.hours))
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """A task: the pages of its hours. Without any partition Spark reads one that is None."""
        if not isinstance(partition, PendingHours):
            return
        content = self._config.content
        with replace(self._config.connection, endpoints=(partition.address,)).open() as client:
            snapshot = client.asynchronous.snapshot
            for first in range(0, len(partition.hours), HOURS_AHEAD):
                hours = [
                    snapshot.pages(partition.address, partition.pin_id, hour, content=content)
                    for hour in partition.hours[first : first + HOURS_AHEAD]
                ]
                for page, pages in zip(client.wait(_first_of(hours)), hours, strict=True):
                    following: PinnedPage | None = page
                    while following is not None:
                        if following.ids:
                            yield _batch(following, partition, content)
                        following = client.wait(_next(pages))


class FilteredPendingReader(PendingReader):
    """The same, with filters on topic and due_ms taken over from the query."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Takes what a node can sort out; gives back what Spark must."""
        low, high = self._config.due_ms_min, self._config.due_ms_max or DUE_MS_LIMIT
        topics = set(self._config.topics) or None
        for item in filters:
            if isinstance(item, EqualTo) and item.attribute == ("topic",):
                topics = {item.value} if topics is None else topics & {item.value}
            elif isinstance(item, In) and item.attribute == ("topic",):
                topics = set(item.value) if topics is None else topics & set(item.value)
            elif isinstance(item, GreaterThanOrEqual) and item.attribute == ("due_ms",):
                low = max(low, item.value)
            elif isinstance(item, GreaterThan) and item.attribute == ("due_ms",):
                low = max(low, item.value + 1)
            elif isinstance(item, LessThan) and item.attribute == ("due_ms",):
                high = min(high, item.value)
            elif isinstance(item, LessThanOrEqual) and item.attribute == ("due_ms",):
                high = min(high, item.value + 1)
            else:
                yield item
        # A name that no topic can have stands for "none of them".
        names = None if topics is None else tuple(sorted(topics)) or (".",)
        low, high = min(max(low, 0), DUE_MS_LIMIT), min(max(high, 1), DUE_MS_LIMIT)
        self._config = replace(self._config, topics=names or (), due_ms_min=low, due_ms_max=high)


async def _first_of(hours: Sequence[AsyncIterator[PinnedPage]]) -> list[PinnedPage]:
    return await asyncio.gather(*(anext(pages) for pages in hours))


async def _next(pages: AsyncIterator[PinnedPage]) -> PinnedPage | None:
    return await anext(pages, None)


def shared_out(hours: Sequence[int], units: Sequence[int]) -> list[tuple[int, ...]]:
    """Hours by partition: each alone while there are few, else neighbours together. In all at most 2 * PARTITIONS."""
    if len(hours) <= PARTITIONS:
        return [(hour,) for hour in hours]
    hours_most, units_most = -(-len(hours) // PARTITIONS), -(-sum(units) // PARTITIONS)
    found: list[tuple[int, ...]] = []
    first = gathered = 0
    for place, count in enumerate(units):
        gathered += count
        if place + 1 - first >= hours_most or gathered >= max(1, units_most):
            found.append(tuple(hours[first : place + 1]))
            first, gathered = place + 1, 0
    return found if first == len(hours) else [*found, tuple(hours[first:])]


def _batch(page: PinnedPage, partition: PendingHours, content: bool) -> pa.RecordBatch:
    ids = np.frombuffer(page.ids, "<u8")
    count = len(ids)
    topic_ids = np.frombuffer(page.topic_ids, "<u4")
    used, codes = np.unique(topic_ids, return_inverse=True)
    names = pa.array([partition.topics.get(number, "") for number in used.tolist()], pa.string())
    columns: list[pa.Array] = [
        id_column(ids),
        names.take(pa.array(codes.reshape(-1))),
        *(pa.array(np.frombuffer(data, "<i8")) for data in (page.due_ms, page.due_requested_ms, page.scheduled_ms)),
        pa.array(np.frombuffer(page.target_groups, "<i4")),
        pa.array(np.full(count, partition.applied_index, np.int64)),
    ]
    if not content:
        return pa.record_batch(columns, schema=pa.schema(_HEAD_FIELDS))
    sizes, meta_sizes = np.frombuffer(page.sizes, "<u4"), np.frombuffer(page.meta_sizes, "<u4")
    columns += content_columns(page.records, sizes, meta_sizes)
    return pa.record_batch(columns, schema=pa.schema([*_HEAD_FIELDS, *CONTENT_FIELDS]))
