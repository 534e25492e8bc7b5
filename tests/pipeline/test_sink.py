"""The batch sink against three real nodes: every row once, bad rows with reasons, errors that say what to do."""

from __future__ import annotations

import datetime
import threading
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from tests.pipeline.running import RunningCluster
from tickwheel.client import Client
from tickwheel.client.errors import LimitReached
from tickwheel.client.moments import span_of
from tickwheel.client.staging import StagedJob, staged_job_of
from tickwheel.node.local_cluster import free_ports
from tickwheel.pipeline.options import CONNECTION, Connection, OptionError, Options, connection_of
from tickwheel.pipeline.sink import (
    JOB_MEMORY_MS,
    OPTIONS,
    DiscardedRowsError,
    Run,
    StagedMessage,
    TickwheelWriter,
    sink_config,
)
from tickwheel.pipeline.sink_rows import SchemaError, check_schema
from tickwheel.proto import staging_pb2

DAY_MS = 86_400_000


def ahead(hours: int = 1) -> int:
    """A due time."""
    return time.time_ns() // 1_000_000 + hours * 3_600_000


def frame(spark: SparkSession, count: int, partitions: int = 2) -> DataFrame:
    """Rows named by their number, spread over a day."""
    numbers = spark.range(0, count, 1, partitions)
    return numbers.select(
        (f.lit(ahead()) + f.col("id") * 7_919 % DAY_MS).alias("due_ms"),
        f.concat(f.lit("row-"), f.col("id").cast("string")).alias("payload"),
    )


def write(rows: DataFrame, cluster: RunningCluster, **options: object) -> None:
    """Through the sink."""
    writer = rows.write.format("tickwheel").option("addresses", cluster.addresses).option("bad_rows", "fail")
    for name, value in options.items():
        writer = writer.option(name, str(value))
    writer.mode("append").save()


def expected(count: int) -> Counter[str]:
    """Each row once."""
    return Counter(f"row-{number}" for number in range(count))


def test_every_row_is_scheduled_once_as_it_was_asked_for(spark: SparkSession, cluster: RunningCluster) -> None:
    """Due times, keys, tags and properties arrive, for two topics in one frame."""
    due = ahead()
    rows = [
        ("sink-a", due, b"one", "k1", ["red", "blue"], {"source": "test"}),
        ("sink-b", due + 5, b"two", None, None, None),
        ("sink-a", due + 1, b"three", "", [], {}),
    ]
    schema = "topic string, due_ms long, payload binary, key string, tags array<string>, properties map<string,string>"
    write(spark.createDataFrame(rows, schema).coalesce(1), cluster)
    first, third = sorted(cluster.messages("sink-a"), key=lambda m: m.due_ms)
    assert (first.payload, first.due_ms, first.key, first.tags) == (b"one", due, "k1", ("red", "blue"))
    assert first.headers == {"source": "test"}
    assert (third.payload, third.due_ms, third.key, third.tags) == (b"three", due + 1, "", ())
    assert [m.payload for m in cluster.messages("sink-b")] == [b"two"]


def test_many_rows_in_several_tasks(spark: SparkSession, cluster: RunningCluster) -> None:
    """More than a block each; the nodes agree afterwards."""
    write(frame(spark, 50_000, 4), cluster, topic="sink-many")
    assert cluster.payloads("sink-many") == expected(50_000)
    cluster.check_agreement()


def test_a_timestamp_is_taken_in_utc_and_never_early(spark: SparkSession, cluster: RunningCluster) -> None:
    """Spark has microseconds: a fraction of a millisecond is rounded up."""
    moment = datetime.datetime.now(datetime.UTC).replace(microsecond=1_001) + datetime.timedelta(days=30)
    rows = spark.createDataFrame([(moment, "x")], "due_at timestamp, payload string")
    write(rows, cluster, topic="sink-at")
    assert [m.due_ms for m in cluster.messages("sink-at")] == [int(moment.timestamp()) * 1_000 + 2]


def test_a_job_that_is_run_again_writes_nothing_twice(spark: SparkSession, cluster: RunningCluster) -> None:
    """`job_id` is what makes a whole job repeatable: after the driver died nobody knows whether it had committed."""
    rows = frame(spark, 3_000)
    for part in (rows, rows.repartition(3)):
        write(part, cluster, topic="sink-again", job_id="again-1")
    assert cluster.payloads("sink-again") == expected(3_000)
    with pytest.raises(Exception, match="job again-1 has been committed with other rows"):
        write(rows.withColumn("key", f.lit("k")), cluster, topic="sink-again", job_id="again-1")
    write(rows, cluster, topic="sink-again", job_id="again-2")
    assert cluster.payloads("sink-again").total() == 6_000


def test_batches_of_one_job_are_written_once_each(spark: SparkSession, cluster: RunningCluster) -> None:
    """As `foreachBatch` writes them, however often it is called with the same number."""
    rows = frame(spark, 10, 1)
    for number in (4, 4, 5, 4):
        write(
            rows.withColumn("key", f.lit(str(number))), cluster, topic="sink-batches", job_id="batches", batch_id=number
        )
    assert Counter(message.key for message in cluster.messages("sink-batches")) == Counter({"4": 10, "5": 10})


def test_rows_of_a_deleted_topic_fail_the_write(spark: SparkSession, cluster: RunningCluster) -> None:
    """Also when it is repeated; or are reported, if so wanted: they are gone, and the commit must not keep that to
    itself."""
    rows = [("sink-stays", ahead(), b"a"), ("sink-goes", ahead(), b"b")]
    frame = spark.createDataFrame(rows, "topic string, due_ms long, payload binary")
    for wanted in ("fail", "report"):
        options = {"addresses": cluster.addresses, "job_id": f"deleted-{wanted}", "discarded_rows": wanted}
        writer = TickwheelWriter(sink_config(Options(options, OPTIONS), stream=False), frame.schema)
        message = writer.write(iter(frame.toArrow().to_batches()))
        cluster.wait(cluster.client.admin.delete_topic("sink-goes"))
        for _ in range(2):
            if wanted == "report":
                writer.commit([message])
                continue
            with pytest.raises(DiscardedRowsError, match="1 of 2 rows were not scheduled"):
                writer.commit([message])
    assert cluster.payloads("sink-stays") == Counter({"a": 2})


def direct(cluster: RunningCluster, frame: DataFrame, **options: object) -> None:
    """A batch write in this process, so that its warnings are seen."""
    given = {"addresses": cluster.addresses, **{name: str(value) for name, value in options.items()}}
    writer = TickwheelWriter(sink_config(Options(given, OPTIONS), stream=False), frame.schema)
    writer.commit([writer.write(iter(frame.toArrow().to_batches()))])


def test_an_earlier_batch_that_is_not_scheduled_is_told(
    spark: SparkSession, cluster: RunningCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """A query that begins anew with another checkpoint, and the same job id, counts from 0. Repeating the last batch is
    an ordinary replay."""
    rows = frame(spark, 3, 1)
    for number in (6, 7, 7):
        direct(cluster, rows, topic="sink-anew", job_id="anew", batch_id=number)
    assert not caplog.records
    direct(cluster, rows, topic="sink-anew", job_id="anew", batch_id=0)
    assert "job anew: a later micro-batch than 0 was scheduled before" in caplog.text
    assert cluster.payloads("sink-anew").total() == 6


def test_a_write_that_finds_no_room_says_what_to_do(spark: SparkSession, cluster: RunningCluster) -> None:
    """Each topic has a block of its own, and each partition too, which take 64 KiB at least."""
    admin = cluster.client.admin
    before = cluster.wait(admin.settings()).staging_bytes_max or 0
    schema = "topic string, due_ms long, payload string"
    rows = spark.createDataFrame([(f"sink-room-{n}", ahead(), "x") for n in range(20)], schema)
    options = Options({"addresses": cluster.addresses, "timeout_s": "0.5"}, OPTIONS)
    writer = TickwheelWriter(sink_config(options, stream=False), rows.schema)
    cluster.wait(admin.update_settings(staging_bytes_max=1 << 20))
    try:
        with pytest.raises(LimitReached, match=r"staging_bytes_max: limit 1048576 reached.*write fewer partitions"):
            writer.write(iter(rows.toArrow().to_batches()))
        writer.abort([])
    finally:
        cluster.wait(admin.update_settings(staging_bytes_max=before))


def test_bad_rows_of_a_job_that_is_run_again_are_there_once(
    spark: SparkSession, cluster: RunningCluster, tmp_path: Path
) -> None:
    """Who corrects and writes them would otherwise schedule them twice. Other files stay."""
    rows = spark.createDataFrame([(ahead(), "good"), (ahead(), "")], "due_ms long, payload string")
    for _ in range(2):
        direct(cluster, rows, topic="sink-bad-again", job_id="bad-again", rejected_path=tmp_path)
        (tmp_path / "bad-again" / "mine.parquet").touch()
    [found] = (tmp_path / "bad-again").glob("part-*.parquet")
    assert pq.read_table(found).num_rows == 1
    assert (tmp_path / "bad-again" / "mine.parquet").exists()


def test_a_stream_is_remembered_by_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise other jobs would make the cluster forget a query that rests, and its last batch would be scheduled once
    more when Spark replays it. Its rows need not be the same."""
    asked: list[dict[str, object]] = []

    class Cluster:
        """A client that notes commits."""

        staging = property(lambda self: self)

        def __enter__(self) -> Cluster:
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing to close."""

        def commit(self, *_: object, **more: object) -> StagedJob:
            asked.append(more)
            return staged_job_of(staging_pb2.StagedJob())

    monkeypatch.setattr(Connection, "open", lambda _: Cluster())
    for stream, given in ((True, {}), (True, {"job_memory_ms": "90000"}), (False, {}), (False, {"job_id": "j"})):
        config = sink_config(Options({"addresses": "h:1", "topic": "t", **given}, OPTIONS), stream=stream)
        Run(config, "job", 0, "run", "").commit([StagedMessage("job", 0, "run", 0, 1, 1, 1, 0, "", False, 7)])
    wanted = [
        (span_of(ms), fingerprint) for ms, fingerprint in ((JOB_MEMORY_MS, 0), (90_000, 0), (0, 0), (JOB_MEMORY_MS, 7))
    ]
    assert [(more["memory"], more["fingerprint"]) for more in asked] == wanted


@pytest.mark.parametrize(
    ("conflict", "left", "discarded"), [("refuse", "old", 1), ("use_existing", "old", 0), ("replace", "new", 0)]
)
def test_unique_keys_of_rows(
    spark: SparkSession, cluster: RunningCluster, conflict: str, left: str, discarded: int
) -> None:
    """A key that is held as the job is committed: its row is discarded, left out, or takes the other's place. The other
    rows are scheduled, with their keys."""
    topic, due = f"sink-keys-{conflict}", ahead()
    cluster.wait(cluster.client.schedule(topic, "old", due_ms=due, unique_key="held"))
    rows = spark.createDataFrame(
        [(due, "new", "held"), (due, "free", "k"), (due, "none", None)],
        "due_ms long, payload string, unique_key string",
    )
    options = {"topic": topic, "on_key_conflict": conflict, "job_id": f"keys-{conflict}"}
    if discarded:
        with pytest.raises(Exception, match=r"1 of 3 rows were not scheduled.*unique key"):
            write(rows.coalesce(1), cluster, **options)
    write(rows.coalesce(1), cluster, **options, discarded_rows="report")
    assert cluster.payloads(topic) == Counter([left, "free", "none"])
    assert {m.payload: m.unique_key for m in cluster.messages(topic)} == {
        left.encode(): "held", b"free": "k", b"none": "",
    }  # fmt: skip
    with pytest.raises(Exception, match="column unique_key: missing"):
        write(rows.drop("unique_key"), cluster, **options)


def test_an_empty_frame_is_a_write_too(spark: SparkSession, cluster: RunningCluster) -> None:
    """No rows, no error."""
    write(frame(spark, 0, 1), cluster, topic="sink-empty")


def test_bad_rows_go_aside_with_their_reasons(spark: SparkSession, cluster: RunningCluster, tmp_path: Path) -> None:
    """The others are scheduled."""
    due = ahead()
    rows = [
        ("sink-bad", due, "good", ["a"], {"a": "b"}),
        (None, due, "x", None, None),
        (".hidden", due, "x", None, None),
        ("sink-bad", None, "x", None, None),
        ("sink-bad", -1, "x", None, None),
        ("sink-bad", due + 40 * 365 * DAY_MS, "x", None, None),
        ("sink-bad", due, None, None, None),
        ("sink-bad", due, "", None, None),
        ("sink-bad", due, "x", ["a", None], None),
        ("sink-bad", due, "x", None, {"a": None}),
        ("sink-bad", due, "x", None, {"a": "t" * 40_000}),
        ("sink-bad", due, "x", ["a|b"], None),
    ]
    schema = "topic string, due_ms long, payload string, tags array<string>, properties map<string,string>"
    bad = spark.createDataFrame(rows, schema).coalesce(2)
    write(bad, cluster, job_id="bad-1", bad_rows="reject", rejected_path=tmp_path)
    assert cluster.payloads("sink-bad") == Counter({"good": 1})
    found = spark.read.parquet(str(tmp_path / "bad-1"))
    reasons = [row.reason.partition(":")[0] for row in found.collect()]
    assert Counter(reasons) == Counter(
        {"topic": 2, "due": 3, "payload": 2, "tags": 2, "properties": 1, "key, tags, properties, message_group": 1}
    )
    assert not list((tmp_path / "bad-1").glob("_*"))


def test_bad_rows_fail_the_write_if_so_wanted(spark: SparkSession, cluster: RunningCluster) -> None:
    """And nothing of it is scheduled."""
    rows = frame(spark, 2_000).withColumn(
        "due_ms", f.when(f.col("payload") == "row-1500", None).otherwise(f.col("due_ms"))
    )
    with pytest.raises(Exception, match="due: null"):
        write(rows, cluster, topic="sink-fail")
    cluster.wait(cluster.client.schedule("sink-fail", "good", due_ms=ahead()))
    assert cluster.payloads("sink-fail") == Counter({"good": 1})


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("payload string", "column due_ms"),
        ("due_ms long", "column payload: missing"),
        ("due_ms string, payload string", "column due_ms: it is string"),
        ("due_ms long, payload string, color string", "column color: unknown"),
        ("due_ms long, due_at timestamp, payload string", "exactly one of due_ms"),
        ("due_at timestamp_ntz, payload string", "column due_at: it is timestamp_ntz"),
        ("due_ms long, payload string, tags array<int>", "column tags: it is array<int>"),
        ("due_ms long, payload string, properties map<string,int>", "column properties: it is map<string,int>"),
        ("due_ms long, payload string, key string, key string", "column key: it is there more than once"),
    ],
)
def test_a_wrong_schema_names_the_column(spark: SparkSession, columns: str, said: str) -> None:
    """And what it must be."""
    with pytest.raises(SchemaError, match=said):
        check_schema(spark.createDataFrame([], columns).schema, "sink-schema")


@pytest.mark.parametrize("topic", ["a b", ".x", "%DLQ%g"])
def test_a_topic_that_nobody_may_send_to_is_named(topic: str) -> None:
    """By `build` and `freeze` too: their files could never be loaded."""
    columns = StructType().add("due_ms", "long").add("payload", "string")
    with pytest.raises(SchemaError, match=f"option topic: '{topic}'"):
        check_schema(columns, topic)
    with pytest.raises(OptionError, match="option topic"):
        sink_config(Options({"addresses": "127.0.0.1:7100", "topic": topic}, OPTIONS), stream=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tpoic": "x"}, "option tpoic"),
        ({"job_id": "a b"}, "option job_id"),
        ({"topic": ".x"}, "option topic"),
        ({"rate_limit": "fast"}, "option rate_limit"),
        ({"in_flight": "0"}, "option in_flight: '0': 1 to 64"),
        ({"bad_rows": "ignore"}, "option bad_rows"),
        ({"addresses": "nowhere"}, "option addresses"),
        ({"addresses": ""}, "option addresses"),
        ({"cert_file": "x"}, "option ca_file"),
        ({"timeout_s": "0"}, "option timeout_s"),
        ({"connect_timeout_s": "x"}, "option connect_timeout_s"),
        ({"commit_timeout_s": "0"}, "option commit_timeout_s"),
        ({"discarded_rows": "ignore"}, "option discarded_rows"),
        ({"on_key_conflict": "ignore"}, "option on_key_conflict"),
        ({"key_until_settled": "perhaps"}, "option key_until_settled"),
        ({"batch_id": "4"}, "option batch_id: '4': needs job_id"),
        ({"job_memory_ms": "4", "job_id": "x"}, "option job_memory_ms: '4': 60000 to"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], said: str) -> None:
    """With what is allowed."""
    with pytest.raises(OptionError, match=said):
        sink_config(Options({"addresses": "127.0.0.1:7100", **options}, OPTIONS), stream=False)


def test_the_name_of_the_option_in_the_version_before_is_taken() -> None:
    """`endpoints` are `addresses`; if both are given, the new name counts."""
    for given in ({"endpoints": "h:1"}, {"endpoints": "g:2", "addresses": "h:1"}):
        assert connection_of(Options(given, CONNECTION), 1.0).addresses == ("h:1",)


def test_what_is_wrong_is_told_before_any_row_is_sent(spark: SparkSession, cluster: RunningCluster) -> None:
    """A column, an option, and a topic that neither names: as Spark raises it, and the topic is not made."""
    with pytest.raises(Exception, match="column color: unknown"):
        write(frame(spark, 1).withColumn("color", f.lit("red")), cluster, topic="sink-wrong")
    with pytest.raises(Exception, match="option tpoic"):
        write(frame(spark, 1), cluster, topic="sink-wrong", tpoic="x")
    with pytest.raises(Exception, match="column topic: missing, and the option topic is not set"):
        write(frame(spark, 1), cluster)
    assert "sink-wrong" not in [topic.name for topic in cluster.wait(cluster.client.admin.topics())]


def test_an_unreachable_cluster_fails_soon_with_its_addresses(spark: SparkSession, cluster: RunningCluster) -> None:
    """Not after every task has waited for a minute."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    began = time.monotonic()
    with pytest.raises(Exception, match=address):
        write(frame(spark, 10), cluster, topic="x", addresses=address, connect_timeout_s=1)
    assert time.monotonic() - began < 20


def test_the_rate_is_that_of_all_tasks_together(spark: SparkSession, cluster: RunningCluster) -> None:
    """Two tasks of 8,192 rows each at 8,192 a second: the second block waits for a second, whichever it is."""
    began = time.monotonic()
    write(frame(spark, 2 * 8_192, 2), cluster, topic="sink-paced", rate_limit=8_192)
    assert time.monotonic() - began >= 1.0
    assert cluster.payloads("sink-paced") == expected(2 * 8_192)


def test_rows_are_there_once_although_the_master_dies_in_the_middle(
    spark: SparkSession, cluster: RunningCluster
) -> None:
    """SIGKILL while tasks stage; they go on at the next master, and the commit publishes all."""
    rows = 30_000
    failures: list[BaseException] = []
    spark.createDataFrame([(1,)], "a int").count()

    def run() -> None:
        try:
            spark.createDataFrame([(1,)], "a int")  # a thread must have used the session before it writes
            write(frame(spark, rows), cluster, topic="sink-over", job_id="over-1", rate_limit=10_000, in_flight=2)
        except BaseException as error:
            failures.append(error)

    writing = threading.Thread(target=run)
    writing.start()
    with Client(cluster.addresses) as client:
        staging = client.asynchronous.staging
        while client.wait(staging.job("over-1")).staged_bytes == 0 and writing.is_alive():
            time.sleep(0.02)
    killed = cluster.kill_master()
    assert writing.is_alive(), "the master died too late to matter"
    writing.join(90)
    assert not failures and not writing.is_alive(), failures
    cluster.start(killed)
    assert cluster.payloads("sink-over") == expected(rows)
    cluster.check_agreement()
