"""What is pending as a frame: complete, of one applied index, filtered where the messages are."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from tests.pipeline.running import RunningCluster
from tickwheel.node.local_cluster import free_ports
from tickwheel.pipeline import source_stream
from tickwheel.pipeline.options import OptionError, Options
from tickwheel.pipeline.source_pending import (
    HOUR_COST,
    OPTIONS,
    PARTITION_COST,
    PARTITIONS,
    PARTITIONS_MIN,
    reader_of,
    shared_out,
)

HOUR_MS = 3_600_000
FIRST_MS = (time.time_ns() // 1_000_000 // HOUR_MS + 100) * HOUR_MS
"""The start of an hour that no other test schedules for."""
COUNT = 600


def read(spark: SparkSession, cluster: RunningCluster, **options: object) -> DataFrame:
    """What is pending."""
    reader = spark.read.format("tickwheel").option("addresses", cluster.addresses)
    for name, value in options.items():
        reader = reader.option(name, str(value))
    return reader.load()


@pytest.fixture(scope="module")
def scheduled(cluster: RunningCluster) -> dict[str, int]:
    """Payload to due time, in three hours of two topics; every tenth one is cancelled."""

    async def go() -> dict[str, int]:
        client = cluster.client
        kept: dict[str, int] = {}
        asked = []
        for number in range(COUNT):
            due_ms = FIRST_MS + (number % 3) * HOUR_MS + number
            kept[f"p-{number}"] = due_ms
            meta = {"key": f"k{number}", "tags": ["a", "b"], "headers": {"n": str(number)}} if number % 2 else {}
            topic = "pending-a" if number % 2 else "pending-b"
            asked.append(client.schedule(topic, f"p-{number}", due_ms=due_ms, **meta))  # type: ignore[arg-type]
        receipts = await asyncio.gather(*asked)
        gone = range(0, COUNT, 10)
        outcomes = await asyncio.gather(*(client.cancel(receipts[number].id) for number in gone))
        assert set(outcomes) == {"CANCELLED"}
        for number in gone:
            del kept[f"p-{number}"]
        return kept

    return cluster.wait(go())


def test_everything_that_is_pending_is_there_once(
    spark: SparkSession, cluster: RunningCluster, scheduled: dict[str, int]
) -> None:
    """With content, all of one applied index; cancelled ones are not there."""
    frame = read(spark, cluster, topic="pending-a,pending-b")
    rows = frame.collect()
    assert {bytes(row.payload).decode(): row.due_ms for row in rows} == scheduled
    assert len(rows) == len(scheduled)
    assert len({row.applied_index for row in rows}) == 1
    row = next(row for row in rows if bytes(row.payload) == b"p-1")
    assert (row.topic, row.key, row.tags, row.properties) == ("pending-a", "k1", ["a", "b"], {"n": "1"})
    assert row.id in {message.id for message in cluster.messages("pending-a")}


def test_without_content_only_the_times_are_read(
    spark: SparkSession, cluster: RunningCluster, scheduled: dict[str, int]
) -> None:
    """What a forecast needs."""
    span = {"due_ms_min": FIRST_MS, "due_ms_max": FIRST_MS + 3 * HOUR_MS}
    frame = read(spark, cluster, topic="pending-b", content="false", **span)
    assert "payload" not in frame.columns
    assert frame.count() == sum(int(name[2:]) % 2 == 0 for name in scheduled)


def test_times_are_sorted_out_by_the_node(
    spark: SparkSession, cluster: RunningCluster, scheduled: dict[str, int]
) -> None:
    """From and below; hours outside are no partitions."""
    low, high = FIRST_MS + HOUR_MS + 10, FIRST_MS + HOUR_MS + 300
    frame = read(spark, cluster, due_ms_min=low, due_ms_max=high)
    assert frame.rdd.getNumPartitions() == PARTITIONS_MIN
    wanted = {name for name, due_ms in scheduled.items() if low <= due_ms < high}
    # Other tests' messages may be due in the same hour.
    rows = frame.collect()
    assert all(low <= row.due_ms < high for row in rows)
    found = [row for row in rows if row.topic in ("pending-a", "pending-b")]
    assert {bytes(row.payload).decode() for row in found} == wanted
    read_from_master = read(spark, cluster, due_ms_min=low, due_ms_max=high, read_from="master")
    assert read_from_master.where(f.col("topic").isin("pending-a", "pending-b")).count() == len(wanted)


def test_queries_over_one_load_keep_their_own_filters(
    spark: SparkSession, cluster: RunningCluster, scheduled: dict[str, int]
) -> None:
    """Spark would give what one of them pushes down to all of them, so nothing is pushed down."""
    frame = read(spark, cluster, content="false", due_ms_min=FIRST_MS, due_ms_max=FIRST_MS + 3 * HOUR_MS)
    odd = frame.where(f.col("topic") == "pending-a")
    even = frame.where("topic IN ('pending-b', NULL)")
    assert odd.select("topic").distinct().union(even.select("topic").distinct()).count() == 2
    counts = Counter(int(name[2:]) % 2 for name in scheduled)
    assert (odd.count(), even.count()) == (counts[1], counts[0])
    assert frame.where("topic LIKE 'pending-%'").count() == len(scheduled)
    with pytest.raises(Exception, match="option pushdown: 'true': Spark gives what one query pushes to the others"):
        read(spark, cluster, pushdown="true").where("topic = 'pending-a'").count()


def test_a_read_sees_everything_that_was_acknowledged_before_it(spark: SparkSession, cluster: RunningCluster) -> None:
    """Although it reads from a slave."""
    for number in range(3):
        cluster.wait(cluster.client.schedule("pending-fresh", f"x{number}", due_ms=FIRST_MS))
        rows = read(spark, cluster, topic="pending-fresh", due_ms_min=FIRST_MS, due_ms_max=FIRST_MS + 1).collect()
        assert Counter(bytes(row.payload) for row in rows) == Counter(b"x%d" % n for n in range(number + 1))


@given(st.lists(st.integers(0, 1_000_000), max_size=2_000))
@example([3] * 17_000)
def test_many_hours_share_partitions(units: list[int]) -> None:
    """A task costs more than hours with a few messages: two years of them are a few tasks. No hour is left out."""
    hours = [500_000 + 3 * place for place in range(len(units))]
    found = shared_out(hours, units)
    assert [hour for part in found for hour in part] == hours
    assert all(found)
    assert len(found) <= PARTITIONS + 1
    assert (len(found) - 1) * PARTITION_COST <= sum(units) + HOUR_COST * len(units)


def test_tables_of_the_catalog_are_refused_and_views_work(spark: SparkSession, cluster: RunningCluster) -> None:
    """Spark hands a table's options to nobody: what reads or fills one says so. `saveAsTable` schedules its rows."""
    options = f"OPTIONS (addresses '{cluster.addresses}', topic 'pending-table', content 'false')"
    said = "messages cannot be a table. To read: CREATE TEMPORARY VIEW"
    with pytest.raises(Exception, match=said):
        spark.sql(f"CREATE TABLE pending_t1 USING tickwheel {options}")
    spark.sql(f"CREATE TABLE pending_t2 (due_ms bigint, payload string) USING tickwheel {options}")
    rows = spark.createDataFrame([(FIRST_MS, "x")], "due_ms long, payload string")
    try:
        for words in ("SELECT * FROM pending_t2", f"INSERT INTO pending_t2 VALUES ({FIRST_MS}, 'x')"):
            with pytest.raises(Exception, match=said):
                spark.sql(words).collect()
        writer = rows.write.format("tickwheel").options(addresses=cluster.addresses, topic="pending-table")
        writer.mode("append").saveAsTable("pending_t3")
        with pytest.raises(Exception, match=said):
            spark.sql("SELECT * FROM pending_t3").collect()
        spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW pending_view USING tickwheel {options}")
        assert spark.sql("SELECT due_ms FROM pending_view").collect() == [(FIRST_MS,)]
    finally:
        for number in (2, 3):
            spark.sql(f"DROP TABLE IF EXISTS pending_t{number}")


@pytest.mark.parametrize("given", ["", " , "])
def test_an_option_that_names_no_topic_is_refused(given: str) -> None:
    """A variable that is empty by mistake must not mean all topics."""
    for known, read in ((OPTIONS, reader_of), (source_stream.OPTIONS, source_stream.stream_config)):
        asked = {"addresses": "h:1", "topic": given} | ({"group": "g"} if read is source_stream.stream_config else {})
        with pytest.raises(OptionError, match=r"option topic: .*one or more names"):
            read(Options(asked, known))


def test_an_unknown_topic_is_empty(spark: SparkSession, cluster: RunningCluster) -> None:
    """No error: it may come into being."""
    assert read(spark, cluster, topic="pending-none").count() == 0


def test_each_query_reads_what_is_pending_when_it_runs(spark: SparkSession, cluster: RunningCluster) -> None:
    """Over one `load()`, the very same frame included, which Spark plans once. A pin is read as long as it is held, by
    any frame, and then not silently anew."""
    topic = "pending-later"

    def schedule(*hours: int) -> None:
        for hour in hours:
            cluster.wait(cluster.client.schedule(topic, "x", due_ms=FIRST_MS + hour * HOUR_MS))

    schedule(0, 1)
    # Other tests leave much behind in other hours: without bounds each query would read all of it.
    frame = read(spark, cluster, topic=topic, due_ms_min=FIRST_MS, due_ms_max=FIRST_MS + 10 * HOUR_MS)
    pin = cluster.wait(cluster.client.snapshot.pin([topic], due_ms_max=FIRST_MS + 10 * HOUR_MS))
    counts, rows = [frame.count()], [len(frame.collect())]
    schedule(1, 2, 3, 4)
    counts.append(frame.count())
    found = frame.collect()
    rows.append(len(found))
    assert counts == rows == [2, 6]
    assert len({row.applied_index for row in found}) == 1
    assert frame.join(frame.withColumnRenamed("id", "other"), f.col("id") == f.col("other")).count() == 6
    assert len(frame.tail(2)) == 2 and len(list(frame.toLocalIterator())) == 6
    for _ in range(2):
        assert {row.applied_index for row in read(spark, cluster, asOf=pin.handle).collect()} == {pin.applied_index}
    held = read(spark, cluster, asOf=pin.handle)
    assert held.count() == held.count() == 2
    cluster.wait(cluster.client.snapshot.unpin(pin.address, pin.pin_id))
    with pytest.raises(Exception, match=f"pin {pin.handle} is gone"):
        held.count()
    with pytest.raises(Exception, match="option topic: 'pending-later': not with asOf"):
        read(spark, cluster, asOf=pin.handle, topic=topic).count()


def test_an_unreachable_cluster_is_named(spark: SparkSession) -> None:
    """With its address, soon."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    frame = spark.read.format("tickwheel").option("addresses", address).option("timeout_s", "1")
    with pytest.raises(Exception, match=address):
        frame.load().count()
