"""Streams in and out: the sink writes a micro-batch once however often it is replayed, the source loses nothing."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as f

from tests.pipeline.running import RunningCluster
from tickwheel.node.local_cluster import free_ports
from tickwheel.pipeline.options import Options
from tickwheel.pipeline.source_stream import OPTIONS, NothingDeliveredError, TickwheelStreamReader, stream_config

FILES = 2
ROWS = 200


def run_sink(spark: SparkSession, cluster: RunningCluster, folder: Path, topic: str) -> None:
    """All files that are there, one a micro-batch."""
    rows = (
        spark.readStream.schema("due_ms long, payload string")
        .option("maxFilesPerTrigger", "1")
        .parquet(str(folder / "in"))
    )
    query = (
        rows.writeStream.format("tickwheel")
        .options(addresses=cluster.addresses, topic=topic, bad_rows="fail")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def add_files(spark: SparkSession, folder: Path, first: int) -> None:
    """FILES more of ROWS rows."""
    due_ms = time.time_ns() // 1_000_000 + 3_600_000
    for number in range(first, first + FILES):
        rows = spark.range(number * ROWS, (number + 1) * ROWS, 1, 2).select(
            (f.lit(due_ms) + f.col("id")).alias("due_ms"),
            f.concat(f.lit("s-"), f.col("id").cast("string")).alias("payload"),
        )
        rows.coalesce(1).write.mode("append").parquet(str(folder / "in"))


def test_a_replayed_micro_batch_is_written_once(spark: SparkSession, cluster: RunningCluster, tmp_path: Path) -> None:
    """A query that dies between the sink's commit and its own log replays the batch under the same number."""
    add_files(spark, tmp_path, 0)
    run_sink(spark, cluster, tmp_path, "stream-sink")
    expected = Counter(f"s-{n}" for n in range(FILES * ROWS))
    assert cluster.payloads("stream-sink") == expected
    commits = tmp_path / "checkpoint" / "commits"
    last = max(int(path.name) for path in commits.iterdir() if path.name.isdecimal())
    for path in (commits / str(last), commits / f".{last}.crc"):
        path.unlink(missing_ok=True)
    add_files(spark, tmp_path, FILES)
    run_sink(spark, cluster, tmp_path, "stream-sink")
    assert cluster.payloads("stream-sink") == Counter(f"s-{n}" for n in range(2 * FILES * ROWS))


def schedule(cluster: RunningCluster, topic: str, count: int, *, unique: bool = False) -> None:
    """Messages that are due now, with unique keys if asked."""

    async def go() -> None:
        due_ms = time.time_ns() // 1_000_000
        asked = [
            cluster.client.schedule(
                topic,
                f"m-{n}",
                due_ms=due_ms,
                key=f"k-{n}",
                tags=["a"],
                message_group=f"g-{n}",
                unique_key=f"u-{n}" if unique else None,
            )
            for n in range(count)
        ]
        await asyncio.gather(*asked)

    cluster.wait(go())


class Collected:
    """What a stream brought."""

    def __init__(self) -> None:
        self.payloads: list[str] = []
        self.rows: list[Row] = []
        self.fails = False

    def take(self, batch: DataFrame, number: int) -> None:
        """As foreachBatch calls it."""
        rows = batch.collect()
        if self.fails and rows:
            raise RuntimeError("planned")
        self.rows += rows
        self.payloads += [bytes(row.payload).decode() for row in rows]


def run_source(
    spark: SparkSession, cluster: RunningCluster, folder: Path, into: Collected, topic: str, **options: object
) -> None:
    """All that is there now."""
    reader = spark.readStream.format("tickwheel").option("addresses", cluster.addresses)
    for name, value in {"group": topic, "topic": topic, "wait_ms": 1_500, **options}.items():
        reader = reader.option(name, str(value))
    query = (
        reader.load()
        .writeStream.foreachBatch(into.take)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def unsettled(cluster: RunningCluster, group: str) -> int:
    """Messages of a group that are not settled."""
    groups = cluster.wait(cluster.client.admin.groups())
    return next(int(g.backlog) for g in groups if g.name == group)


def test_messages_come_in_limited_micro_batches_and_are_settled(
    spark: SparkSession, cluster: RunningCluster, tmp_path: Path
) -> None:
    """All once without faults, and the group has nothing left, the last micro-batch included."""
    schedule(cluster, "stream-in", 250, unique=True)
    got = Collected()
    run_source(spark, cluster, tmp_path, got, "stream-in", max_messages=100)
    assert Counter(got.payloads) == Counter(f"m-{n}" for n in range(250))
    assert {(bytes(row.payload), row.message_group, row.unique_key) for row in got.rows} == {
        (b"m-%d" % n, f"g-{n}", f"u-{n}") for n in range(250)
    }
    offsets = [path for path in (tmp_path / "checkpoint" / "offsets").iterdir() if path.name.isdecimal()]
    assert len(offsets) >= 3
    assert unsettled(cluster, "stream-in") == 0


def stream_reader(cluster: RunningCluster, **options: object) -> TickwheelStreamReader:
    """As Spark has it on the driver."""
    given = {"addresses": cluster.addresses, **{name: str(value) for name, value in options.items()}}
    return TickwheelStreamReader(stream_config(Options(given, OPTIONS)))


def available(reader: TickwheelStreamReader) -> Iterator[list[Row]]:
    """The micro-batches of a query with `availableNow`, as Spark drives it."""
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    while (end := reader.latestOffset(start, reader.getDefaultReadLimit())) != start:
        yield [
            row for part in reader.partitions(start, end) for batch in reader.read(part) for row in batch.to_pylist()
        ]
        start = end
    reader.commit(start)
    reader.stop()


def test_all_that_is_available_comes_of_every_topic(cluster: RunningCluster) -> None:
    """Although one topic has later messages all the time, and a pull that does not wait brings nothing at first."""
    for topic, count in (("stream-old", 900), ("stream-new", 1)):
        schedule(cluster, topic, count)
    reader = stream_reader(
        cluster, group="two", topic="stream-new,stream-old", wait_ms=0, max_messages=100, timeout_s=20
    )
    came: Counter[str] = Counter()
    for rows in available(reader):
        came.update(row["topic"] for row in rows)
        schedule(cluster, "stream-new", 5)
    assert came["stream-old"] == 900 and came["stream-new"] >= 1


def test_all_that_is_available_comes_of_a_topic_that_the_group_gets_now(cluster: RunningCluster) -> None:
    """The group exists with another topic: what the option adds is not left for the next run."""
    schedule(cluster, "stream-added", 5)
    cluster.wait(cluster.client.admin.create_group("grows", ["stream-old-one"]))
    reader = stream_reader(cluster, group="grows", topic="stream-old-one,stream-added", wait_ms=0, timeout_s=20)
    assert sum(map(len, available(reader))) == 5


def test_what_is_available_and_not_delivered_fails_the_query(cluster: RunningCluster) -> None:
    """It must not end as if there were nothing."""
    schedule(cluster, "stream-held", 3)
    cluster.wait(cluster.client.admin.create_group("held", ["stream-held"]))
    cluster.wait(cluster.client.admin.pause_group("held"))
    reader = stream_reader(cluster, group="held", wait_ms=0, timeout_s=2)
    with pytest.raises(NothingDeliveredError, match="3 messages of stream-held are due"):
        list(available(reader))
    reader.stop()


def test_a_micro_batch_has_a_limit_of_bytes(cluster: RunningCluster) -> None:
    """Few large messages are as much for the driver as many small ones; one that is larger comes alone."""

    async def go() -> None:
        due_ms = time.time_ns() // 1_000_000
        for _ in range(4):
            await cluster.client.schedule("stream-large", b"x" * (3 << 20), due_ms=due_ms)

    cluster.wait(go())
    reader = stream_reader(cluster, group="large", topic="stream-large", max_bytes=1 << 20, timeout_s=20)
    sizes = [[len(row["payload"]) for row in rows] for rows in available(reader)]
    assert sizes and sum(map(len, sizes)) == 4 and max(map(len, sizes)) <= 2


def test_a_micro_batch_that_failed_comes_again(spark: SparkSession, cluster: RunningCluster, tmp_path: Path) -> None:
    """Its offset is in the log, its rows are not done: the next run gives them back and gets them again, soon."""
    schedule(cluster, "stream-fail", 120)
    got = Collected()
    got.fails = True
    with pytest.raises(Exception, match="planned"):
        run_source(spark, cluster, tmp_path, got, "stream-fail", max_messages=50)
    assert not got.payloads
    got.fails = False
    run_source(spark, cluster, tmp_path, got, "stream-fail", max_messages=50)
    run_source(spark, cluster, tmp_path, got, "stream-fail", max_messages=50)
    assert set(got.payloads) == {f"m-{n}" for n in range(120)}
    assert unsettled(cluster, "stream-fail") == 0


def test_an_unreachable_cluster_ends_a_stream_with_its_address(spark: SparkSession, tmp_path: Path) -> None:
    """In both directions, once `timeout_s` is over."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    add_files(spark, tmp_path, 0)
    connection = {"addresses": address, "timeout_s": "1"}
    read = spark.readStream.format("tickwheel").options(group="g", topic="t", **connection).load().writeStream
    rows = spark.readStream.schema("due_ms long, payload string").parquet(str(tmp_path / "in"))
    write = rows.writeStream.format("tickwheel").options(topic="t", **connection)
    for name, stream in (("read", read.foreachBatch(lambda batch, number: None)), ("write", write)):
        query = stream.option("checkpointLocation", str(tmp_path / name)).trigger(availableNow=True).start()
        with pytest.raises(StreamingQueryException, match=address):
            query.awaitTermination(30)
