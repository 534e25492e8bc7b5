"""The streaming source: messages delivered to a consumer group, in micro-batches, at least once.

The driver pulls messages under a lease and plans them into a micro-batch; tasks get them within their partitions. An
offset holds the handles that settle the micro-batch ending there, so that another process can settle it too.

Invariants:
- Deliveries are acknowledged when Spark has committed their micro-batch, or when a stream continues from its end, and
  never before.
- If another process than the one that pulled a micro-batch plans it again, it has no rows. Its deliveries are returned
  first and come in a later micro-batch, as a later attempt, on which an acknowledgement of the old one has no effect.
- Messages that are pulled and never planned are delivered again when their lease is over.
"""

from __future__ import annotations

import base64
import logging
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from tickwheel.client import Client, Settlement, StartFrom
from tickwheel.client.moments import ms_of, span_of
from tickwheel.client.pulling import PulledBatch
from tickwheel.pipeline.options import TOPIC, TOPIC_RULE, Connection, OptionError, Options, connection_of
from tickwheel.pipeline.source_columns import CONTENT_FIELDS, content_columns, ddl_of, id_column

OPTIONS = frozenset({"group", "topic", "start_from", "max_messages", "max_bytes", "lease_ms", "wait_ms"})
_ARROW = pa.schema(
    [
        pa.field("id", pa.string()),
        pa.field("topic", pa.string()),
        pa.field("due_ms", pa.int64()),
        pa.field("attempt", pa.int32()),
        *CONTENT_FIELDS,
    ]
)
SCHEMA = ddl_of(_ARROW)
PULL_MESSAGES_MAX = 1_024
PARTITION_MESSAGES = 4_096
PARTITION_BYTES = 16 << 20
MAX_BYTES = 64 << 20
MAX_BYTES_MAX = 1 << 30
"""Greatest `max_bytes`: the driver holds several copies of a micro-batch while it plans it."""
ALL_MESSAGES_MAX = 100_000
"""Messages in a micro-batch that Spark requests without a limit."""
QUIET_S = 3.0
"""With `availableNow`: how long to wait for messages that other consumers of the group may hold."""
POLL_S = 0.1
"""With `availableNow`: pause between two questions about what is left, if no message came."""
GIVE_BACK_DELAY = timedelta(milliseconds=1)
"""Deliver again at once; 0 would mean the group's policy."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """The source's options, checked."""

    connection: Connection
    group: str
    topics: tuple[str, ...]
    latest: bool
    max_messages: int
    max_bytes: int
    lease_ms: int
    wait_ms: int


def stream_config(options: Options) -> StreamConfig:
    """Raises OptionError."""
    group = options.matching("group", TOPIC, "", TOPIC_RULE)
    if not group:
        raise OptionError("group", "", "the name of a consumer group")
    return StreamConfig(
        connection_of(options, timeout_s=60.0),
        group,
        options.topics(),
        options.choice("start_from", "earliest", ("earliest", "latest")) == "latest",
        options.number("max_messages", 10_000, 1, ALL_MESSAGES_MAX),
        options.number("max_bytes", MAX_BYTES, 1, MAX_BYTES_MAX),
        options.number("lease_ms", 300_000, 1_000, 43_200_000),
        options.number("wait_ms", 200, 0, 20_000),
    )


class NothingDeliveredError(RuntimeError):
    """A group has due messages, but the query gets none of them."""


@dataclass
class Delivered(InputPartition):
    """The deliveries of one partition."""

    batches: list[PulledBatch]


class TickwheelStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of one query. It lives on the driver as long as the query; tasks call `read` of copies."""

    def __init__(self, config: StreamConfig) -> None:
        self._config = config
        self._client: Client | None = None
        self._pulled: dict[int, list[PulledBatch]] = {}
        """The batches pulled, by the end sequence of their micro-batch."""
        self._settled_through = 0
        self._until_ms = 0
        self._topics_left: list[str] | None = None
        """With `availableNow`: topics that may still bring messages due when the query began."""
        self._delivered = False

    # -- planning, on the driver

    def initialOffset(self) -> dict[str, Any]:
        """The offset of a new query."""
        return {"seq": 0, "settle": ""}

    def getDefaultReadLimit(self) -> ReadLimit:
        """The option `max_messages`."""
        return ReadMaxRows(self._config.max_messages)

    def prepareForTriggerAvailableNow(self) -> None:
        """End this query once all messages due now have come."""
        client = self._open()
        # By the cluster's time, since the driver's clock may differ.
        now = client.admin.master_status().clock
        self._until_ms = ms_of("clock", now) if now is not None else 0
        of_group = [
            topic for group in client.admin.groups() if group.name == self._config.group for topic in group.topics
        ]
        # The first pull gives the group the topics that it does not have yet.
        self._topics_left = list(dict.fromkeys([*of_group, *self._config.topics]))

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Pull the next micro-batch and return its end; `start` if there is no message."""
        # Spark continues from here, so the micro-batch that ends here is committed.
        self._settle(start)
        ready = [seq for seq in self._pulled if seq > start["seq"]]
        if ready:
            return _offset(min(ready), self._pulled[min(ready)])
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else ALL_MESSAGES_MAX
        batches = self._pull(most) if self._topics_left is None else self._pull_available(self._topics_left, most)
        if not batches:
            return start
        self._delivered = True
        seq = start["seq"] + sum(map(len, batches))
        self._pulled[seq] = batches
        return _offset(seq, batches)

    def _pull(self, most: int, topic: str = "") -> list[PulledBatch]:
        """Pull at most `most` messages, of one topic or any. The bytes may exceed their bound by one pull."""
        config, client = self._config, self._open()
        found: list[PulledBatch] = []
        room = config.max_bytes
        while most > 0 and room > 0:
            batch = client.pulling.pull(
                config.group,
                config.topics,
                topic=topic,
                messages_max=min(most, PULL_MESSAGES_MAX),
                wait=span_of(0 if found else config.wait_ms),
                lease=span_of(config.lease_ms),
                start_from=StartFrom.LATEST if config.latest else StartFrom.EARLIEST,
            )
            if not len(batch):
                break
            found.append(batch)
            most -= len(batch)
            room -= len(batch.records)
            if self._topics_left is not None and _due_last(batch) > self._until_ms:
                break
        return found

    def _pull_available(self, topics: list[str], most: int) -> list[PulledBatch]:
        """The next messages of one remaining topic; empty once all messages due when the query began have come.

        A topic is finished when a later message comes, or when the cluster has nothing left to deliver of it. A pull
        that brings nothing in time proves nothing: the node may be busy. Raises NothingDeliveredError if the query got
        no message at all.
        """
        quiet_since = time.monotonic()
        while topics:
            for topic in list(topics):
                found = self._pull(most, topic)
                if found and _due_last(found[-1]) > self._until_ms:
                    topics.remove(topic)
                if found:
                    return found
            waiting, elsewhere = self._undelivered(topics)
            topics[:] = [topic for topic in topics if waiting[topic]]
            total, quiet_s = sum(waiting.values()), time.monotonic() - quiet_since
            if total <= elsewhere and quiet_s >= QUIET_S:
                if total:
                    log.warning(
                        "group %s: %d due messages of %s are left to other consumers of the group, which hold them",
                        self._config.group,
                        total,
                        ", ".join(topics),
                    )
                topics.clear()
            elif total > elsewhere and quiet_s >= self._config.connection.timeout_s:
                text = (
                    f"group {self._config.group}: {total} messages of {', '.join(topics)} are due, {elsewhere} "
                    f"are with other consumers, and none was delivered for {quiet_s:.0f} s: is the group or a topic "
                    "paused, or does a retry hold up what must come in order?"
                )
                if not self._delivered:
                    raise NothingDeliveredError(text)
                log.warning("%s", text)
                topics.clear()
            elif topics:
                time.sleep(POLL_S)
        return []

    def _undelivered(self, topics: list[str]) -> tuple[dict[str, int], int]:
        """(unsettled dispatched messages by topic; messages of all topics now leased to consumers)."""
        client = self._open()
        snapshot, group = client.snapshot, self._config.group
        groups = client.admin.groups()
        elsewhere = next((int(item.in_flight) for item in groups if item.name == group), 0)
        pin = snapshot.pin_settled(group, reader="master")
        snapshot.unpin(pin.address, pin.pin_id)
        waiting = {topic.name: topic.open for topic in pin.topics}
        return {topic: waiting.get(topic, 0) for topic in topics}, elsewhere

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The micro-batch between two offsets; without rows if another process pulled it."""
        if start["seq"] == end["seq"]:
            return []
        batches = self._pulled.get(end["seq"])
        if batches is None:
            client = self._open()
            client.pulling.settle(_handles(end), Settlement.RETRY, delay=GIVE_BACK_DELAY)
            self._settled_through = max(self._settled_through, end["seq"])
            return []
        planned: list[InputPartition] = []
        rows, size = PARTITION_MESSAGES, 0
        for batch in batches:
            if rows >= PARTITION_MESSAGES or size >= PARTITION_BYTES:
                planned.append(Delivered([]))
                rows = size = 0
            part = planned[-1]
            assert isinstance(part, Delivered)
            part.batches.append(batch)
            rows += len(batch)
            size += len(batch.records)
        return planned

    def commit(self, end: dict[str, Any]) -> None:
        """Spark has committed everything up to `end`: acknowledge it."""
        self._settle(end)

    def _settle(self, offset: dict[str, Any]) -> None:
        seq = offset["seq"]
        if seq <= self._settled_through:
            return
        handles = _handles(offset)
        for number in sorted(number for number in self._pulled if number < seq):
            handles += [batch.handle for batch in self._pulled[number]]
        if handles:
            client = self._open()
            client.pulling.settle(handles)
        self._settled_through = seq
        self._pulled = {number: batches for number, batches in self._pulled.items() if number > seq}

    def _open(self) -> Client:
        if self._client is None:
            self._client = self._config.connection.open()
        return self._client

    def stop(self) -> None:
        """The query has ended; messages of uncommitted micro-batches are delivered again."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    # -- reading, in tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """A task: the rows of its partition."""
        if isinstance(partition, Delivered):
            yield from map(_rows, partition.batches)


def _due_last(batch: PulledBatch) -> int:
    return int(batch.due_ms.max())


def _offset(seq: int, batches: Sequence[PulledBatch]) -> dict[str, Any]:
    handles = b"".join(len(batch.handle).to_bytes(4, "little") + batch.handle for batch in batches)
    return {"seq": seq, "settle": base64.b64encode(zlib.compress(handles)).decode()}


def _handles(offset: dict[str, Any]) -> list[bytes]:
    found: list[bytes] = []
    data = zlib.decompress(base64.b64decode(offset["settle"])) if offset["settle"] else b""
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        found.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return found


def _rows(batch: PulledBatch) -> pa.RecordBatch:
    columns = [
        id_column(batch.ids),
        pa.array([batch.topic] * len(batch), pa.string()),
        pa.array(batch.due_ms),
        pa.array(batch.attempts.view(np.int32)),
        *content_columns(batch.records, batch.sizes, batch.meta_sizes),
    ]
    return pa.record_batch(columns, schema=_ARROW)
