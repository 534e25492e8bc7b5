"""The audit: what became of every message, joined from the events that all nodes noted.

Reports messages that are lost, delivered early or delivered twice under one attempt, lateness by topic and hour, and
the time without a master. Nodes note the same entries each, so rows are made distinct first; deliveries are noted by
the master alone. Events that nodes left out (LOST) are counted: with any, what seems lost may only be unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

HOUR_MS = 3_600_000
PERCENTILES = (0.5, 0.9, 0.99, 1.0)
SAMPLES_MAX = 20


@dataclass(frozen=True, slots=True)
class AuditConfig:
    """What to judge."""

    until_ms: int
    """Messages due later are not judged as lost: they may be on their way."""
    early_ms: int = 0
    """So much before its due time a delivery is not yet called early: the error of the clocks."""


@dataclass(frozen=True, slots=True)
class Audit:
    """The answer. Frames stay with Spark until they are collected or written, and are worked out once."""

    scheduled: int
    delivered: int
    lost: DataFrame
    """id, topic, due_ms, group: due, not cancelled, and neither delivered to a group that had others of its topic nor
    settled for it; where no group had any (null), not even dispatched."""
    early: DataFrame
    """id, topic, group, due_ms, at_ms."""
    duplicated: DataFrame
    """id, topic, group, attempt, times, of the same unit."""
    lateness: DataFrame
    """topic, hour_ms, messages, p50_ms, p90_ms, p99_ms, max_ms: first deliveries by the hour of their due time."""
    without_master: list[tuple[int, int, int]]
    """Term, from and until, milliseconds since 1970: between the last sign of one master and the next one's first."""
    events_left_out: int


def _kind(events: DataFrame, name: str, *columns: str) -> DataFrame:
    return events.where(F.col("kind") == name).select(*columns)


def audit(events: DataFrame, config: AuditConfig) -> Audit:
    """Judge what `export_events` wrote."""
    scheduled = _kind(events, "SCHEDULED", "id", "due_ms", "topic").distinct()
    newest = Window.partitionBy("id").orderBy(F.desc("log_index"))
    moved = (
        _kind(events, "MOVED", "id", "due_ms", "log_index")
        .withColumn("place", F.row_number().over(newest))
        .where("place = 1")
        .select("id", F.col("due_ms").alias("moved_due_ms"))
    )
    cancelled = _kind(events, "CANCELLED", "id").distinct()
    messages = (
        scheduled.join(moved, "id", "left")
        .select("id", "topic", F.coalesce("moved_due_ms", "due_ms").alias("due_ms"))
        .join(cancelled, "id", "left_anti")
        .cache()
    )
    units = _kind(events, "DISPATCHED", "id", "unit").distinct()
    deliveries = _kind(events, "DELIVERED", "id", "topic", "group", "attempt", "due_ms", "at_ms")
    settled = _kind(events, "SETTLED", "unit", "topic", "group").distinct().join(units, "unit").select(
        "id", "topic", "group"
    )  # fmt: skip
    handled = deliveries.select("id", "topic", "group").union(settled).distinct()
    groups = handled.select("topic", "group").distinct()
    due = messages.where(F.col("due_ms") <= config.until_ms)
    of_groups = (
        due.join(groups, "topic")
        .join(handled.select("id", "group", F.lit(True).alias("seen")), ["id", "group"], "left")
        .where(F.col("seen").isNull())
    )
    unheard = due.join(groups, "topic", "left_anti").join(units.select("id"), "id", "left_anti")
    columns = ("id", "topic", "due_ms", "group")
    lost = of_groups.select(*columns).union(unheard.withColumn("group", F.lit(None).cast("string")).select(*columns))
    early = deliveries.where(F.col("at_ms") + config.early_ms < F.col("due_ms")).select(
        "id", "topic", "group", "due_ms", "at_ms"
    )
    duplicated = (
        deliveries.groupBy("id", "topic", "group", "attempt", "due_ms")
        .agg(F.count("*").alias("times"))
        .where("times > 1")
        .drop("due_ms")
    )
    first = deliveries.groupBy("id", "topic", "group").agg(F.min(F.struct("at_ms", "due_ms")).alias("f"))
    late: Column = F.col("f.at_ms") - F.col("f.due_ms")
    lateness = (
        first.select("topic", (F.floor(F.col("f.due_ms") / HOUR_MS) * HOUR_MS).cast("bigint").alias("hour_ms"),
                     late.alias("late_ms"))
        .groupBy("topic", "hour_ms")
        .agg(F.count("*").alias("messages"), F.percentile("late_ms", list(PERCENTILES)).alias("p"))
        .select("topic", "hour_ms", "messages",
                *(F.col("p")[place].alias(name) for place, name in enumerate(("p50_ms", "p90_ms", "p99_ms", "max_ms"))))
        .orderBy("topic", "hour_ms")
    )  # fmt: skip
    left_out = events.where("kind = 'LOST'").agg(F.sum("count")).first()
    return Audit(
        scheduled=scheduled.count(),
        delivered=deliveries.select("id").distinct().count(),
        lost=lost.cache(),
        early=early.cache(),
        duplicated=duplicated.cache(),
        lateness=lateness.cache(),
        without_master=_without_master(events),
        events_left_out=int(left_out[0] or 0) if left_out is not None else 0,
    )


def _without_master(events: DataFrame) -> list[tuple[int, int, int]]:
    """Gaps between terms. The sign of a master is what it noted as delivered, or stamped when it proposed it."""
    signs = events.where("kind in ('DELIVERED', 'SCHEDULED', 'LEADS') and term > 0").select(
        "term", F.when(F.col("stamped_ms") > 0, F.col("stamped_ms")).otherwise(F.col("at_ms")).alias("at_ms")
    )
    rows = signs.groupBy("term").agg(F.min("at_ms").alias("first"), F.max("at_ms").alias("last")).orderBy("term")
    found: list[tuple[int, int, int]] = []
    last: int | None = None
    for term, begins, ends in rows.collect():
        if last is not None and begins > last:
            found.append((int(term), last, int(begins)))
        last = int(ends) if last is None else max(last, int(ends))
    return found


def report(found: Audit, folder: str | Path) -> str:
    """Write faults and lateness as Parquet and `audit.html` with a plot into a folder; returns the text of it."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    lines = [f"{found.scheduled:,} messages scheduled, {found.delivered:,} delivered"]
    for name in ("lost", "early", "duplicated"):
        frame: DataFrame = getattr(found, name)
        frame.coalesce(1).write.mode("overwrite").parquet(str(target / name))
        written = frame.sparkSession.read.parquet(str(target / name))
        lines.append(f"{name}: {written.count():,}")
        lines += [f"  {row.asDict()}" for row in written.orderBy("id").limit(SAMPLES_MAX).collect()]
    if found.events_left_out:
        lines.append(f"{found.events_left_out:,} events were left out by nodes: what seems lost may only be unknown")
    total_ms = sum(until - begin for _, begin, until in found.without_master)
    lines.append(f"without a master: {len(found.without_master)} times, {total_ms / 1_000:.3f} s in all")
    rows = found.lateness.collect()
    lines += [
        f"  {row.topic:24} {_hour_text(row.hour_ms)}  {row.messages:>10,}  p50 {row.p50_ms:,.0f}  "
        f"p90 {row.p90_ms:,.0f}  p99 {row.p99_ms:,.0f}  max {row.max_ms:,.0f} ms"
        for row in rows
    ]
    found.lateness.coalesce(1).write.mode("overwrite").parquet(str(target / "lateness"))
    figure, axes = plt.subplots(figsize=(12, 4), layout="constrained")
    for topic in sorted({row.topic for row in rows}):
        part = [row for row in rows if row.topic == topic]
        axes.plot([row.hour_ms / HOUR_MS for row in part], [row.p99_ms for row in part], marker="o", label=topic)
    axes.set_xlabel("hour since 1970")
    axes.set_ylabel("lateness p99, ms")
    if rows:
        axes.legend()
    figure.savefig(target / "lateness.png", dpi=110)
    plt.close(figure)
    text = "\n".join(lines)
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    (target / "audit.html").write_text(
        "<!doctype html><meta charset=utf-8><title>tickwheel: audit</title>"
        "<style>body{font:15px sans-serif;max-width:75em;margin:2em auto}img{max-width:100%}</style>"
        f"<h1>What became of every message</h1><pre>{escaped}</pre><img src=lateness.png alt='lateness by hour'>\n",
        encoding="utf-8",
    )
    return text


def _hour_text(hour_ms: int) -> str:
    """The start of an hour as people read it."""
    return f"{datetime.fromtimestamp(hour_ms / 1_000, UTC):%Y-%m-%d %H:%M} UTC"
