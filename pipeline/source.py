"""The data source `tickwheel` as Spark sees it: reads and writes batches and streams.

Spark finds it by itself (package `pyspark_tickwheel`); `spark.dataSource.register(TickwheelSource)` does the same.
The modules behind it are imported on first use.
"""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
)
from pyspark.sql.types import StructType

from tickwheel.pipeline import sink, source_pending, source_stream
from tickwheel.pipeline.options import Options


class TickwheelSource(DataSource):
    """Messages to and from a tickwheel cluster.

    Connection (all of them):

    - `addresses`: host:port of one or more nodes, separated by commas; required. Any node will do.
    - `ca_file`, `cert_file`, `key_file`, `server_name`: TLS, PEM files that every machine of Spark has; default: none.
    - `token`: says who the caller is, on a cluster with rights; Spark hides it where it shows options; default: none.
    - `timeout_s`: seconds one call may take, including retries and changes of master; a stream or a reader gives up
      after this time without an answer, and names the addresses; default 60, or 15 for reading a batch.

    **Writing** a batch: `df.write.format("tickwheel").options(...).mode("append").save()`, exactly once.

    Columns: `topic` (string; or the option), `due_ms` (bigint, milliseconds since 1970) or `due_at` (timestamp),
    `payload` (binary or string), and, if wanted, `key` (string), `tags` (array<string>), `properties`
    (map<string,string>), `message_group` (string), `unique_key` (string; null: none).

    - `topic`: for frames without the column; default: none.
    - `job_id`: names a job whose rows must be scheduled exactly once. A job that runs again under the same name, after
      any failure, adds nothing twice; with other rows it is refused. 1 to 64 characters of [A-Za-z0-9_-.]; default: a
      new name for each write. Not for streams: there the query is the job.
    - `job_memory_ms`: how long a job with a `job_id`, or the query of a stream, is recognised after it was published,
      however many others come; at least `staging_expiry_ms` (6 hours); default 2592000000, 30 days.
    - `batch_id`: for `foreachBatch`: the number that Spark gives, beside a `job_id` that names the query. Batches are
      scheduled in rising order, each once, and all of them are one job. A query that starts over with another
      checkpoint counts from 0 and needs another `job_id`: otherwise its first batches are not scheduled, and a warning
      says so. Default 0.
    - `rate_limit`: rows a second, of all tasks together (the master paces them); default 0: as fast as possible.
    - `in_flight`: blocks of about 1 MiB that a task has in flight; default 4.
    - `bad_rows`: what becomes of rows that cannot be messages (a null, an illegal name, too large, too far ahead):
      `reject` (default) writes them to `rejected_path`, `fail` fails the write.
    - `discarded_rows`: what becomes of the write if rows were not scheduled because their topic was deleted after they
      were staged, or because another message holds their unique key: `fail` (default) fails it, although the other rows
      are scheduled; `report` logs a warning.
    - `on_key_conflict`: what becomes of a row whose unique key another message holds when the job is committed:
      `refuse` (default) discards the row, `use_existing` silently leaves it out, `replace` cancels the other message.
    - `key_until_settled`: `true`: rows hold their keys until every group has settled them; default `false`: until they
      are due.
    - `rejected_path`: folder, as the driver sees it, or a URI; the rows are in `<rejected_path>/<job_id>/*.parquet`
      with all their columns and `reason`; default `_rejected`.
    - `connect_timeout_s`: seconds after which a cluster that does not answer fails the write of a batch; default 10.
    - `commit_timeout_s`: seconds the commit may take to schedule all rows; default 3600.

    **Reading** what is pending: `spark.read.format("tickwheel").options(...).load()`. Each query reads what is pending
    when it runs, all of it as of one applied index (column `applied_index`), from a slave if one serves. Partitions are
    due hours; neighbouring hours share one until it is worth a task.

    Columns: `id`, `topic`, `due_ms`, `due_requested_ms`, `scheduled_ms` (bigint), `target_group` (int: the group that a
    retry goes to; 0: all), `applied_index`; with content also `payload`, `key`, `tags`, `properties`,
    `message_group`, `unique_key`.

    - `topic`: one or more, separated by commas; default: all.
    - `due_ms_min`, `due_ms_max`: from (inclusive) and to (exclusive), milliseconds since 1970; default 0: no limit.
    - `content`: `false` leaves the content out (and is much faster); default `true`.
    - `asOf`: handle of a pin (the `handle` of what `client.snapshot.pin(...)` returns). All queries with it, also over
      other frames and after `cache()`, read what was pending then, with the topics and times of the pin. A pin ends
      when it has not been read for ten minutes, or its node restarts; then the read fails and says so. Default: none.
    - `read_from`: `slave` (default; the master if no slave serves) or `master`.

    **Reading** a stream of delivered messages: `spark.readStream.format("tickwheel").options(...).load()`, as a
    consumer group: at least once. The messages of a micro-batch are acknowledged after Spark has committed it. Those of
    one that never finished are given back and come again later.

    Columns: `id`, `topic`, `due_ms`, `attempt` (int), `payload`, `key`, `tags`, `properties`, `message_group`,
    `unique_key`.

    - `group`: the consumer group; required. It is created if it does not exist.
    - `topic`: one or more, separated by commas; required if the group is new. Topics that the group does not have are
      added to it; the stream brings all topics of the group.
    - `start_from`: where a new group starts: `earliest` (default) or `latest`.
    - `max_messages`: messages of a micro-batch at most; default 10000.
    - `max_bytes`: bytes of payloads and metas after which a micro-batch takes no more; default 67108864 (64 MiB).
    - `lease_ms`: how long a message belongs to this stream, in milliseconds; must be longer than a micro-batch takes;
      default 300000.
    - `wait_ms`: milliseconds a micro-batch waits for its first message; default 200.

    With `trigger(availableNow=True)` the query ends once the messages of every topic that were due when it began have
    come. If none of them is delivered for `timeout_s` (the group is paused, say), it fails.

    **Writing** a stream: `df.writeStream.format("tickwheel")`, the same columns and options, exactly once by query and
    micro-batch: keep the checkpoint location.
    """

    @classmethod
    def name(cls) -> str:
        """The name for `format(...)`."""
        return "tickwheel"

    def schema(self) -> str:
        """The columns that are read, as DDL."""
        if "group" in self.options:
            return source_stream.SCHEMA
        return source_pending.schema_of(Options(self.options, source_pending.OPTIONS))

    def reader(self, schema: StructType) -> DataSourceReader:
        return source_pending.reader_of(Options(self.options, source_pending.OPTIONS))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return source_stream.TickwheelStreamReader(
            source_stream.stream_config(Options(self.options, source_stream.OPTIONS))
        )

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        _only_append(overwrite)
        return sink.TickwheelWriter(sink.sink_config(Options(self.options, sink.OPTIONS), stream=False), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        _only_append(overwrite)
        return sink.TickwheelStreamWriter(sink.sink_config(Options(self.options, sink.OPTIONS), stream=True), schema)


def _only_append(overwrite: bool) -> None:
    if overwrite:
        raise ValueError('messages can only be added: use .mode("append")')
