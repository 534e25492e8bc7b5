"""Schedules messages of an archive again: selects them by an SQL condition and writes them through the sink, once for
each job.

Topic, payload, key, tags, properties and message group stay the same. The property `REPLAY_OF` holds the id of the
original message. Unique keys are kept only on request: an archive may have many messages with one key, and at most one
of them can be scheduled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, LongType, TimestampType

from tickwheel.client import KeyConflict
from tickwheel.client.moments import duration_of, span_ms_of
from tickwheel.pipeline.options import Connection

REPLAY_OF = "tickwheel.replay-of"


class ReplayError(ValueError):
    """A replay is not possible; the text names the option, and the column if one is wrong."""


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """The messages to schedule again, and their new due times."""

    where: str = "true"
    """A condition in Spark's SQL over the columns of the archive."""

    shift: str = ""
    """The new due time as a distance from the first one: 90s, 2h, 1d12h, 52w. Alternatively `due`."""

    due: str = ""
    """The new due time as a Spark SQL expression over the columns: bigint (milliseconds since 1970) or timestamp."""

    topic: str = ""
    """Topic for all messages; by default each keeps its own."""

    on_key_conflict: str = ""
    """Keep the unique keys; what becomes of a message whose key another one holds is `refuse`, `use_existing` or
    `replace`, as for the sink. Empty: no message has one."""


def shift_ms(text: str) -> int:
    """A duration in milliseconds. Raises ReplayError."""
    try:
        return span_ms_of("shift", duration_of(text))
    except ValueError as error:
        raise ReplayError(f"shift: {text!r}: {error}") from None


def selected(archive: DataFrame, config: ReplayConfig) -> DataFrame:
    """The selected messages, each once, with the columns of the sink. Raises ReplayError."""
    if bool(config.shift) == bool(config.due):
        raise ReplayError("shift, due: exactly one of them must be given")
    if config.on_key_conflict and config.on_key_conflict not in list(KeyConflict):
        raise ReplayError(f"on_key_conflict: {config.on_key_conflict!r}: one of {', '.join(KeyConflict)}")
    chosen = _checked("where", archive, lambda: archive.where(config.where)).dropDuplicates(["id"])
    due = F.col("due_ms") + shift_ms(config.shift) if config.shift else F.expr(config.due)
    named = _checked("due", archive, lambda: chosen.withColumn("new_due", due))
    kind = named.schema["new_due"].dataType
    when: Column = F.col("new_due").cast("bigint")
    if isinstance(kind, TimestampType):
        when = F.ceil(F.unix_micros("new_due") / 1_000)
    elif not isinstance(kind, LongType | IntegerType):
        raise ReplayError(
            f"due: it is {kind.simpleString()}, but must be bigint (milliseconds since 1970) or timestamp"
        )
    none = F.create_map().cast("map<string,string>")
    others = F.map_filter(F.coalesce("properties", none), lambda name, _: name != REPLAY_OF)
    return named.select(
        (F.lit(config.topic) if config.topic else F.col("topic")).alias("topic"),
        when.alias("due_ms"),
        "payload",
        "key",
        "tags",
        F.map_concat(others, F.create_map(F.lit(REPLAY_OF), F.col("id"))).alias("properties"),
        "message_group",
        *(["unique_key"] if config.on_key_conflict else []),
    )


def _checked(option: str, archive: DataFrame, make: Callable[[], DataFrame]) -> DataFrame:
    try:
        made = make()
        made.schema  # noqa: B018  # analysed now
        return made
    except ParseException as error:
        raise ReplayError(f"{option}: {str(error).strip().splitlines()[0]}") from None
    except AnalysisException as error:
        raise ReplayError(f"{option}: {_explained(error, archive)}") from None


def _explained(error: AnalysisException, archive: DataFrame) -> str:
    if (error.getCondition() or "").startswith("UNRESOLVED_COLUMN"):
        name = (error.getMessageParameters() or {}).get("objectName", "").strip("`")
        return f"there is no column {name}; the columns are {', '.join(archive.columns)}"
    return str(error).strip().splitlines()[0]


def replay(archive: DataFrame, connection: Connection, job_id: str, config: ReplayConfig) -> int:
    """Schedule the selected messages again. Returns their number.

    A repeat under the same job id schedules nothing twice, whatever ended the last run. A message that cannot be
    scheduled fails the whole job. One that is refused because of its unique key fails it once the others are scheduled.
    Raises ReplayError, and what the sink raises.
    """
    rows = selected(archive, config).persist()
    try:
        count = rows.count()
        writer = rows.write.format("tickwheel").options(**sink_options(connection))
        if config.on_key_conflict:
            writer = writer.option("on_key_conflict", config.on_key_conflict)
        writer.option("job_id", job_id).option("bad_rows", "fail").mode("append").save()
    finally:
        rows.unpersist()
    return count


def sink_options(connection: Connection) -> dict[str, str]:
    """A connection as options of the data source."""
    options = {"addresses": ",".join(connection.addresses), "timeout_s": str(connection.timeout_s)}
    if connection.tls is not None:
        tls = connection.tls
        names = {"ca_file": tls.ca_file, "cert_file": tls.cert_file, "key_file": tls.key_file}
        options |= {name: str(value) for name, value in names.items() if value}
        if tls.server_name:
            options["server_name"] = tls.server_name
    if connection.token:
        options["token"] = connection.token
    return options


def summary(rows: DataFrame) -> str:
    """The messages that would be scheduled, by topic, as text."""
    found = rows.groupBy("topic").agg(F.count("*"), F.min("due_ms"), F.max("due_ms")).orderBy("topic").collect()
    lines = [f"{sum(row[1] for row in found):,} messages would be scheduled"]
    for topic, count, first, last in found:
        lines.append(f"  {topic:24} {count:>12,}  due {_time(first)} to {_time(last)}")
    return "\n".join(lines)


def _time(at_ms: int) -> str:
    return f"{datetime.fromtimestamp(at_ms / 1_000, UTC):%Y-%m-%d %H:%M:%S} UTC"
