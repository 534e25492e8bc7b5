"""The sinks: schedule a frame, or the micro-batches of a stream, exactly once.

Tasks stage their rows under (job, run, partition, attempt) in the cluster's replicated state. The driver's commit names
the attempts that count, and only then are their rows scheduled. So a retried task, a speculative copy, a failed or
cancelled job and a change of master leave nothing behind and repeat nothing. Channels are opened only in `write`,
`commit` and `abort`: they survive neither a fork nor a pickle.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from tickwheel.client import Client, KeyConflict
from tickwheel.client.errors import LimitReached
from tickwheel.client.messages import TOPIC, TOPIC_RULE
from tickwheel.client.moments import ms_of, span_of
from tickwheel.client.staging import Rows, StagedAttempt, StagedAttemptWriter, StagedState
from tickwheel.client.unique_keys import NO_RULE, KeyRule, rule_of
from tickwheel.pipeline import sink_rejected
from tickwheel.pipeline.options import NAME, Connection, OptionError, Options, connection_of
from tickwheel.pipeline.sink_rejected import RejectedFile
from tickwheel.pipeline.sink_rows import RowGatherer, RowLimits, SchemaError, check_schema, told

OPTIONS = frozenset(
    {
        "topic",
        "job_id",
        "batch_id",
        "job_memory_ms",
        "rate_limit",
        "bad_rows",
        "discarded_rows",
        "on_key_conflict",
        "key_until_settled",
        "rejected_path",
        "commit_timeout_s",
        "connect_timeout_s",
        "in_flight",
    }
)
OF_KEYS = ("on_key_conflict", "key_until_settled")
"""Options of a frame with the column unique_key."""
OF_BATCHES = ("job_id", "batch_id")
"""Options of a batch write. In a stream the query is the job, and Spark numbers its micro-batches."""
OF_NAMED_JOBS = ("batch_id", "job_memory_ms")
"""Options of a batch write that need a job_id."""
DAY_MS = 86_400_000
JOB_MEMORY_MS = 30 * DAY_MS
JOB_MEMORY_MS_MAX = 3_650 * DAY_MS
BATCH_ID_MAX = (1 << 62) - 1
QUERY_ID = "sql.streaming.queryId"
BATCH_ID = "streaming.sql.batchId"
_COMMITTED = (StagedState.PUBLISHING, StagedState.PUBLISHED)
NO_ROOM = (
    "The rows that all jobs have staged fill it. Those of a killed job go after staging_expiry_ms, or when the job is "
    "run again ten minutes later. A partition that has a row counts 64 KiB at least: write fewer partitions "
    "(coalesce), fewer rows at a time, or raise staging_bytes_max"
)
log = logging.getLogger(__name__)

PERMANENT_NAME = "1 to 64 characters of [A-Za-z0-9_-.]"


class BadRowError(ValueError):
    """A row cannot be a message, and the option `bad_rows` makes that fail the write."""


class RejectedRowsError(RuntimeError):
    """All good rows of a write are scheduled, but the files of its bad rows could not be moved into place."""


class DiscardedRowsError(RuntimeError):
    """Rows were not scheduled: their topic was deleted after they were staged, or their unique key was taken."""


@dataclass(frozen=True, slots=True)
class SinkConfig:
    """The sink's options, checked."""

    connection: Connection
    topic: str
    job_id: str
    batch_id: int
    named: bool
    """Whether the user named the job: it may be run again, and must then have the same rows."""
    job_memory_ms: int
    """How long the cluster remembers the job: one that the user named, or a stream's query. Else 0."""
    rate_limit: int
    fail_on_bad_rows: bool
    fail_on_discarded_rows: bool
    key_rule: KeyRule
    rejected_path: str
    commit_timeout_s: float
    connect_timeout_s: float
    in_flight: int


def sink_config(options: Options, *, stream: bool) -> SinkConfig:
    """Raises OptionError."""
    job_id = options.matching("job_id", NAME, "", PERMANENT_NAME)
    for name in OF_BATCHES if stream else OF_NAMED_JOBS:
        if options.text(name) and stream:
            raise OptionError(
                name, options.text(name), "not for streams: the query is the job, and Spark numbers its micro-batches"
            )
        if options.text(name) and not job_id:
            raise OptionError(name, options.text(name), "needs job_id")
    remembered = bool(job_id) or stream
    return SinkConfig(
        connection=connection_of(options, timeout_s=60.0),
        topic=options.matching("topic", TOPIC, "", TOPIC_RULE),
        job_id=job_id or f"spark-{secrets.token_hex(12)}",
        batch_id=options.number("batch_id", 0, 0, BATCH_ID_MAX),
        named=bool(job_id),
        job_memory_ms=options.number("job_memory_ms", JOB_MEMORY_MS, 60_000, JOB_MEMORY_MS_MAX) if remembered else 0,
        rate_limit=options.number("rate_limit", 0, 0, 1_000_000_000),
        fail_on_bad_rows=options.choice("bad_rows", "reject", ("reject", "fail")) == "fail",
        fail_on_discarded_rows=options.choice("discarded_rows", "fail", ("report", "fail")) == "fail",
        key_rule=_key_rule(options),
        rejected_path=sink_rejected.absolute(options.text("rejected_path", "_rejected")),
        commit_timeout_s=options.number("commit_timeout_s", 3_600.0, 1.0, 86_400.0),
        connect_timeout_s=options.number("connect_timeout_s", 10.0, 0.1, 3_600.0),
        in_flight=options.number("in_flight", 4, 1, 64),
    )


def _key_rule(options: Options) -> KeyRule:
    """The rule of unique keys; NO_RULE if nothing is said about them."""
    if not any(options.text(name) for name in OF_KEYS):
        return NO_RULE
    return rule_of(
        KeyConflict(options.choice("on_key_conflict", KeyConflict.REFUSE, tuple(KeyConflict))),
        options.choice("key_until_settled", "false", ("true", "false")) == "true",
    )


def check_frame(schema: StructType, config: SinkConfig) -> None:
    """Raise SchemaError if the columns do not fit, or not with the options."""
    check_schema(schema, config.topic, keyed=True)
    if config.key_rule != NO_RULE and "unique_key" not in schema.fieldNames():
        raise SchemaError(f"column unique_key: missing, but there is an option {' or '.join(OF_KEYS)}")


@dataclass
class StagedMessage(WriterCommitMessage):
    """A task's report to the driver: the attempt that counts, of which run."""

    job_id: str
    batch: int
    run_id: str
    partition: int
    attempt: int
    blocks: int
    rows: int
    rejected_rows: int
    rejected_file: str
    published_before: bool
    fingerprint: int


@dataclass(frozen=True, slots=True)
class Run:
    """One try of a job, or of one of its batches. `folder`: for its rejected rows."""

    config: SinkConfig
    job_id: str
    batch: int
    run_id: str
    folder: str

    def write(self, batches: Iterator[pa.RecordBatch]) -> StagedMessage:
        """Stage a partition's rows, as one attempt."""
        config, named = self.config, self.config.named
        context = TaskContext.get()
        partition = context.partitionId() if context is not None else 0
        with _explaining_room(), config.connection.open() as client:
            job = client.staging.job(self.job_id, self.batch)
            limits = RowLimits(job.batch_messages_max, job.payload_bytes_max, ms_of("now", job.now + job.delay_max))
            gatherer = RowGatherer(config.topic, limits, config.key_rule)
            attempt = client.asynchronous.staging.attempt(
                self.job_id, self.run_id, partition, self.batch, in_flight_max=config.in_flight, fingerprinted=named
            )
            attempt.published_before = job.state in _COMMITTED
            with RejectedFile(self.folder, sink_rejected.file_name(partition, attempt.attempt)) as rejected:
                # Rows of a named job are read even if it is published, to check that they are the same rows.
                if named or not attempt.published_before:
                    for item in batches:
                        _send(client, attempt, gatherer.take(item), config.rate_limit)
                        _reject(config, gatherer, rejected)
                        if attempt.published_before and not named:
                            break
                    _send(client, attempt, gatherer.rest(), config.rate_limit)
                staged = client.wait(attempt.finish())
            return StagedMessage(
                job_id=self.job_id,
                batch=self.batch,
                run_id=self.run_id,
                partition=partition,
                attempt=attempt.attempt,
                blocks=staged.blocks,
                rows=staged.rows,
                rejected_rows=rejected.rows,
                rejected_file=rejected.file,
                published_before=attempt.published_before,
                fingerprint=attempt.fingerprint,
            )

    def commit(self, messages: Sequence[StagedMessage]) -> None:
        """Schedule what the tasks have staged. Returns once all of it is scheduled."""
        config, job_id = self.config, self.job_id
        attempts = [
            StagedAttempt(partition=m.partition, attempt=m.attempt, blocks=m.blocks, rows=m.rows)
            for m in messages
            if m.blocks
        ]
        fingerprint = 0
        if config.named:
            # 0 would mean no fingerprint, and the sum of no rows is 0.
            fingerprint = sum(m.fingerprint for m in messages) % (1 << 64) or 1
        rejected = sum(m.rejected_rows for m in messages)
        repeated = any(m.published_before for m in messages)
        with config.connection.open() as client:
            # Another run of the job may have been faster: the tasks of this one had staged all by then.
            late = bool(config.named and rejected) and client.staging.job(job_id, self.batch).state in _COMMITTED
            job = client.staging.commit(
                job_id,
                self.run_id,
                attempts,
                self.batch,
                publish_timeout_s=config.commit_timeout_s,
                memory=span_of(config.job_memory_ms),
                fingerprint=fingerprint,
            )
            if repeated and client.staging.job(job_id, self.batch + 1).state in _COMMITTED:
                log.warning(
                    "job %s: a later micro-batch than %d was scheduled before, so the rows of this one are not "
                    "scheduled; if the stream has started over with another checkpoint, give it another job_id",
                    job_id,
                    self.batch,
                )
        try:
            # All rows of a named job were read again, so its bad rows take the place of those of its first run.
            replace = config.named and (repeated or late)
            sink_rejected.publish(self.folder, [m.rejected_file for m in messages], replace=replace)
        except (OSError, pa.ArrowException) as error:
            raise RejectedRowsError(
                f"job {job_id} is done: all rows that can be messages are scheduled, so do not write them again. The "
                f"{rejected} others are in {self.folder} or in its {sink_rejected.TEMPORARY}, with the reasons; moving "
                f"their files into place failed: {error}"
            ) from error
        if rejected:
            log.warning("%d rows could not be messages; they are in %s with the reasons", rejected, self.folder)
        if job.rows_discarded:
            text = (
                f"job {job_id}: {job.rows_discarded} of {job.rows} rows were not scheduled, because their topic was "
                "deleted after they were staged, or another message holds their unique key; all others were, and the "
                "job is done (with discarded_rows=report this is only a warning)"
            )
            if config.fail_on_discarded_rows:
                raise DiscardedRowsError(text)
            log.warning("%s", text)

    def abort(self, messages: Sequence[StagedMessage]) -> None:
        """Drop the run's staged rows and its rejected ones, and refuse blocks that its tasks still send.

        Spark also calls this when the commit raised. If the cluster has committed the run, its rejected rows are kept.
        """
        with self.config.connection.open() as client:
            job = client.staging.abort(self.job_id, self.run_id, self.batch)
        files = [m.rejected_file for m in messages]
        if job.state in _COMMITTED and not any(m.published_before for m in messages):
            sink_rejected.publish(self.folder, files)
        else:
            sink_rejected.discard(self.folder, files)


def _new_run_id() -> str:
    return f"run-{secrets.token_hex(12)}"


@contextmanager
def _explaining_room() -> Iterator[None]:
    """Says what to do if there was no room for staged rows."""
    try:
        yield
    except LimitReached as error:
        if error.metadata.get("field") != "staging_bytes_max":
            raise
        raise LimitReached(f"{error}. {NO_ROOM}", error.reason, error.metadata) from error


def _send(client: Client, attempt: StagedAttemptWriter, blocks: Iterator[Rows], rate_limit: int) -> None:
    for rows in blocks:
        if rate_limit and not attempt.published_before:
            time.sleep(client.staging.reserve(attempt.job_id, len(rows.due_ms), rate_limit))
        client.wait(attempt.write(rows))


def _reject(config: SinkConfig, gatherer: RowGatherer, rejected: RejectedFile) -> None:
    bad, gatherer.rejected = gatherer.rejected, []
    if bad and config.fail_on_bad_rows:
        raise BadRowError(told(bad[0]))
    rejected.write(bad)


def _given(messages: Sequence[WriterCommitMessage | None]) -> list[StagedMessage]:
    """The reports of tasks that finished."""
    return [message for message in messages if isinstance(message, StagedMessage)]


class TickwheelWriter(DataSourceArrowWriter):
    """A batch write. Made once on the driver and copied to every task, with the run that it is."""

    def __init__(self, config: SinkConfig, schema: StructType) -> None:
        """Raises SchemaError; ClusterUnavailable, which names the addresses."""
        check_frame(schema, config)
        folder = f"{config.rejected_path}/{config.job_id}"
        if config.batch_id:
            folder += f"/{config.batch_id}"
        self._run = Run(config, config.job_id, config.batch_id, _new_run_id(), folder)
        with config.connection.open() as client:  # rather than find nobody once all rows were computed
            client.staging.job(config.job_id, timeout_s=config.connect_timeout_s)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """A task: stage its rows."""
        return self._run.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """All tasks have succeeded."""
        self._run.commit(_given(messages))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """The job failed or was cancelled."""
        self._run.abort(_given(messages))


class TickwheelStreamWriter(DataSourceStreamArrowWriter):
    """The sink of a stream: the query is the job, its micro-batches are the job's batches.

    Spark makes another one for each commit, so what belongs together travels in the tasks' messages: they name query,
    batch and run.
    """

    def __init__(self, config: SinkConfig, schema: StructType) -> None:
        check_frame(schema, config)
        self._config = config
        self._run_id = _new_run_id()

    def _run(self, query_id: str, batch: int, run_id: str) -> Run:
        return Run(self._config, query_id, batch, run_id, f"{self._config.rejected_path}/{query_id}/{batch}")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """A task: stage its rows under query and batch."""
        context = TaskContext.get()
        query_id = context.getLocalProperty(QUERY_ID) if context is not None else None
        batch = context.getLocalProperty(BATCH_ID) if context is not None else None
        if not query_id or batch is None:
            raise RuntimeError("this Spark does not tell tasks their query and batch: exactly once is not possible")
        return self._run(query_id, int(batch), self._run_id).write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Schedule the batch, once even if Spark replays it."""
        if given := _given(messages):
            self._run(given[0].job_id, batchId, given[0].run_id).commit(given)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Drop the staged rows of finished tasks; those of others expire or are dropped with the next commit."""
        if given := _given(messages):
            self._run(given[0].job_id, batchId, given[0].run_id).abort(given)
