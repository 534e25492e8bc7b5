"""The audit: follows every message through the events that all nodes noted, and reports broken promises.

Reports messages that are lost, or were delivered early, twice under one attempt, after a cancel, or without ever being
scheduled; also lateness by topic and hour, and times without a master. All nodes note the same log entries, so
duplicate rows are removed first; only the master notes deliveries. Each move gives a rescheduled message another id,
and the audit maps these to its first id. Events that nodes left out (LOST) are counted: if there are any, a message
that seems lost may have been delivered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import nan
from pathlib import Path

from pyspark.sql import Column, DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as F

from tickwheel.pipeline.plot_style import OTHERS_COLOUR, legend_beside, time_axis, topic_colours, write_page
from tickwheel.pipeline.report_folder import write_plot
from tickwheel.storage.events import FROM_NOW_MS, GroupChange

HOUR_MS = 3_600_000
PERCENTILES = (0.5, 0.9, 0.99, 1.0)
SAMPLES_MAX = 20
TITLES = {
    "lost": "lost",
    "early": "early",
    "duplicated": "duplicated",
    "cancelled": "cancelled yet delivered",
    "unscheduled": "delivered, never scheduled",
}
"""The titles of the findings, by the names of their fields and folders."""
LATENESS = "lateness"
PAGE = "audit.html"


@dataclass(frozen=True, slots=True)
class AuditConfig:
    """The bounds of an audit."""

    until_ms: int
    """Messages due later do not count as lost: they may still be under way."""
    early_ms: int = 0
    """A delivery up to this long before its due time is not early: allows for the error of the clocks."""


@dataclass(frozen=True, slots=True)
class Audit:
    """The result. Spark computes the frames when they are collected or written, once."""

    scheduled: int
    delivered: int
    lost: DataFrame
    """id, topic, due_ms, group: messages that were due and not cancelled, and neither delivered to a group that must
    get them nor settled for it; if the topic has no group (null), not even dispatched. A group must get the messages
    dispatched after it began, and those that it began with. If nobody noted where it began, it must get the messages
    dispatched after the first one that it got of the topic."""
    early: DataFrame
    """id, topic, group, due_ms, at_ms."""
    duplicated: DataFrame
    """id, topic, group, attempt, times, terms of the same unit. More times than terms breaks a promise, since a master
    knows its own deliveries within a term."""
    cancelled: DataFrame
    """id, topic, group, at_ms: delivered although a cancel was answered CANCELLED."""
    unscheduled: DataFrame
    """id, topic, group, at_ms: delivered, and never scheduled. Only ids after the first one of their hour that the
    events still contain are judged."""
    lateness: DataFrame
    """topic, hour_ms, messages, p50_ms, p90_ms, p99_ms, max_ms: first deliveries by the hour of their due time."""
    without_master: list[tuple[int, int, int]]
    """(term, from, until) in milliseconds since 1970, from the last sign of one master to the first of the next."""
    events_left_out: int
    filtered: list[str]
    """Groups that had a filter. Their lost messages are unknown, since nodes do not note what a filter skips."""
    broadcasting: list[str]
    """Groups that broadcast. Their lost messages and duplicates are not judged."""

    def broken(self) -> dict[str, int]:
        """The number of breaks of each promise, for broken promises only."""
        counts = {name: getattr(self, name).count() for name in ("lost", "early", "cancelled", "unscheduled")}
        counts["duplicated"] = self.duplicated.where("times > terms").count()
        return {name: count for name, count in counts.items() if count}


@dataclass(frozen=True, slots=True)
class _Begin:
    """Where a group begins in a topic: which of its messages it must get."""

    log_index: int
    """It must get messages that were dispatched after this entry,"""
    due_ms: int
    """and of those dispatched before, the ones due from this time on. FROM_NOW_MS: none of them."""


def _kind(events: DataFrame, name: str, *columns: str) -> DataFrame:
    return events.where(F.col("kind") == name).select(*columns)


def _roots(events: DataFrame) -> DataFrame:
    """id, root: for each id that a move made, the first id of the message."""
    moves = _kind(events, "MOVED", "id", "new_id").distinct().where("id != new_id")
    roots = moves.select(F.col("new_id").alias("id"), F.col("id").alias("root")).localCheckpoint()
    while not roots.isEmpty():
        further = roots.select(F.col("id").alias("root"), F.col("root").alias("further"))
        roots = roots.join(further, "root", "left").select("id", F.coalesce("further", "root").alias("root"), "further")
        roots = roots.localCheckpoint()
        ended = roots.where("further IS NOT NULL").isEmpty()
        roots = roots.select("id", "root")
        if ended:
            break
    return roots


class _Groups:
    """What nodes noted about groups: their kind, and where they start in each topic."""

    def __init__(self, events: DataFrame) -> None:
        self.begins: dict[tuple[str, str], _Begin] = {}
        """By topic and group."""
        self.resets: list[tuple[str, str, int]] = []
        """Topic, group and time."""
        self.filtered: set[str] = set()
        self.broadcasting: set[str] = set()
        self.deleted: set[tuple[str, str]] = set()
        """Topic and group; no group: the topic itself; no topic: the group with all of its topics."""
        self._kept_from_ms = 0
        changes = _kind(events, "GROUP", "log_index", "detail", "group", "filter", "topic", "due_ms", "at_ms")
        places = changes.groupBy("log_index", "detail", "group", "filter", "topic", "due_ms").agg(F.min("at_ms"))
        for row in places.orderBy("log_index", "detail").collect():
            self._take(*row)

    def _take(self, log_index: int, detail: int, group: str, filter: str, topic: str, due_ms: int, at_ms: int) -> None:
        pair = (topic, group)
        if filter:
            self.filtered.add(group)
        if detail == GroupChange.RESET:
            self.resets.append((topic, group, at_ms))
        if detail == GroupChange.RESET or (detail == GroupChange.SUBSCRIBED and pair not in self.begins):
            self.begins[pair] = _Begin(log_index, max(due_ms, self._kept_from_ms))
            self.deleted -= {pair, (topic, "")}
        elif detail == GroupChange.REMOVED:
            self._kept_from_ms = max(self._kept_from_ms, due_ms)
        elif detail == GroupChange.BROADCASTING:
            self.broadcasting.add(group)
        elif detail == GroupChange.DELETED:
            gone = {
                known
                for known in self.begins
                if known == pair or (not group and known[0] == topic) or (not topic and known[1] == group)
            }
            self.deleted |= {pair, *gone}
            self.begins = {known: begin for known, begin in self.begins.items() if known not in gone}

    def owed(self, spark: SparkSession, first_ms: dict[tuple[str, str], int]) -> DataFrame:
        """topic, group, judged, from_due_ms, from_index, from_ms: the messages of each topic that each group must get.

        `first_ms`: the time of each one's first delivery.
        """
        unjudged = self.filtered | self.broadcasting
        rows: list[tuple[str, str, bool, int | None, int | None, int | None]] = [
            (topic, group, group not in unjudged, begin.due_ms, begin.log_index, None)
            for (topic, group), begin in self.begins.items()
        ]
        for (topic, group), at_ms in first_ms.items():
            if not {(topic, group), (topic, "")} & {*self.begins, *self.deleted}:
                rows.append((topic, group, group not in unjudged, None, None, at_ms))
        # A deleted topic gets a group that is not judged, since nobody misses its pending messages.
        rows += [(topic, "", False, None, None, None) for topic, group in self.deleted if not group]
        schema = "topic string, group string, judged boolean, from_due_ms bigint, from_index bigint, from_ms bigint"
        return spark.createDataFrame(rows, schema)

    def epoch(self) -> Column:
        """The number of resets of a group before a delivery: attempts restart at each."""
        is_later = [
            (F.col("topic") == topic) & (F.col("group") == group) & (F.col("at_ms") >= at_ms)
            for topic, group, at_ms in self.resets
        ]
        return sum((later.cast("int") for later in is_later), F.lit(0))


@dataclass(frozen=True, slots=True)
class _Notes:
    """What nodes noted, each message under its first id."""

    noted: DataFrame
    """id, due_ms, topic, detail: every SCHEDULED note."""
    scheduled: DataFrame
    """id, topic, due_ms: messages, with the newest due time of those that were moved."""
    cancelled: DataFrame
    """id, detail."""
    dispatches: DataFrame
    """id, unit, log_index, at_ms."""
    deliveries: DataFrame
    """id, topic, group, attempt, due_ms, at_ms, term."""
    settlements: DataFrame
    """unit, topic, group, at_ms."""

    @staticmethod
    def of(events: DataFrame) -> _Notes:
        """Read the notes; dispatches and deliveries are cached."""
        roots = _roots(events)
        unmoved = roots.isEmpty()

        def rooted(frame: DataFrame) -> DataFrame:
            """The frame with each id replaced by the first id of its message."""
            if unmoved:
                return frame
            found = frame.join(roots, "id", "left").withColumn("id", F.coalesce("root", "id"))
            return found.drop("root")

        noted = _kind(events, "SCHEDULED", "id", "due_ms", "topic", "detail").distinct()
        newest = Window.partitionBy("id").orderBy(F.desc("log_index"))
        moved = (
            rooted(_kind(events, "MOVED", "id", "due_ms", "log_index").distinct())
            .withColumn("place", F.row_number().over(newest))
            .where("place = 1")
            .select("id", F.col("due_ms").alias("moved_due_ms"))
        )
        scheduled = noted.where("detail = 0").join(moved, "id", "left")
        delivered = _kind(events, "DELIVERED", "id", "topic", "group", "attempt", "due_ms", "at_ms", "term")
        return _Notes(
            noted,
            scheduled.select("id", "topic", F.coalesce("moved_due_ms", "due_ms").alias("due_ms")),
            rooted(_kind(events, "CANCELLED", "id", "detail").distinct()),
            rooted(_kind(events, "DISPATCHED", "id", "unit", "log_index", "at_ms")).cache(),
            rooted(delivered).cache(),
            _kind(events, "SETTLED", "unit", "topic", "group", "at_ms"),
        )

    def first_signs(self) -> dict[tuple[str, str], int]:
        """When each (topic, group) first got or settled a message, ms."""
        columns = ("topic", "group", "at_ms")
        signs = self.deliveries.select(*columns).union(self.settlements.select(*columns))
        rows = signs.groupBy("topic", "group").agg(F.min("at_ms")).collect()
        return {(topic, group): at_ms for topic, group, at_ms in rows}


def audit(events: DataFrame, config: AuditConfig) -> Audit:
    """Judge what `export_events` wrote."""
    if "filter" not in events.columns:  # exported by an earlier version
        events = events.withColumn("filter", F.lit(None).cast("string"))
    groups, notes = _Groups(events), _Notes.of(events)
    left_out = events.where("kind = 'LOST'").agg(F.sum("count")).first()
    return Audit(
        scheduled=notes.noted.where("detail = 0").count(),
        delivered=notes.deliveries.select("id").distinct().count(),
        lost=_lost(notes, groups, config.until_ms).cache(),
        early=_early(notes, config.early_ms).cache(),
        duplicated=_duplicated(notes, groups).cache(),
        cancelled=_cancelled(notes).cache(),
        unscheduled=_unscheduled(notes).cache(),
        lateness=_lateness(notes).cache(),
        without_master=_without_master(events),
        events_left_out=int(left_out[0] or 0) if left_out is not None else 0,
        filtered=sorted(groups.filtered),
        broadcasting=sorted(groups.broadcasting),
    )


def _lost(notes: _Notes, groups: _Groups, until_ms: int) -> DataFrame:
    """`Audit.lost`."""
    owed = groups.owed(notes.scheduled.sparkSession, notes.first_signs())
    dispatched = notes.dispatches.groupBy("id").agg(
        F.min("log_index").alias("dispatched"), F.min("at_ms").alias("entered_ms")
    )
    messages = notes.scheduled.join(notes.cancelled, "id", "left_anti").cache()
    due = messages.where(F.col("due_ms") <= until_ms).join(dispatched, "id", "left")
    settled = notes.settlements.select("unit", "topic", "group").distinct()
    settled = settled.join(notes.dispatches.select("id", "unit").distinct(), "unit").select("id", "topic", "group")
    handled = notes.deliveries.select("id", "topic", "group").union(settled).distinct()
    is_owed = (
        F.col("dispatched").isNull()
        | (F.col("due_ms") >= F.col("from_due_ms"))
        | ((F.col("from_due_ms") == FROM_NOW_MS) & (F.col("dispatched") > F.col("from_index")))
        | (F.col("entered_ms") >= F.col("from_ms"))
    )
    of_groups = (
        due.join(owed.where("judged"), "topic")
        .where(is_owed)
        .join(handled.select("id", "group", F.lit(True).alias("seen")), ["id", "group"], "left")
        .where(F.col("seen").isNull())
    )
    without_group = due.join(owed, "topic", "left_anti").where("dispatched IS NULL")
    columns = ("id", "topic", "due_ms", "group")
    nobody = F.lit(None).cast("string")
    return of_groups.select(*columns).union(without_group.withColumn("group", nobody).select(*columns))


def _early(notes: _Notes, early_ms: int) -> DataFrame:
    """`Audit.early`. The later one counts of the due time noted with the delivery and that of the message."""
    wanted = notes.scheduled.select("id", F.col("due_ms").alias("asked_ms"))
    return (
        notes.deliveries.join(wanted, "id", "left")
        .withColumn("due_ms", F.greatest("due_ms", "asked_ms"))
        .where(F.col("at_ms") + early_ms < F.col("due_ms"))
        .select("id", "topic", "group", "due_ms", "at_ms")
    )


def _duplicated(notes: _Notes, groups: _Groups) -> DataFrame:
    """`Audit.duplicated`."""
    return (
        notes.deliveries.where(~F.col("group").isin(sorted(groups.broadcasting)))
        .groupBy("id", "topic", "group", "attempt", "due_ms", groups.epoch().alias("epoch"))
        .agg(F.count("*").alias("times"), F.countDistinct("term").alias("terms"))
        .where("times > 1")
        .drop("due_ms", "epoch")
    )


def _cancelled(notes: _Notes) -> DataFrame:
    """`Audit.cancelled`."""
    cancelled = notes.cancelled.where("detail = 0").select("id").distinct()
    return notes.deliveries.select("id", "topic", "group", "at_ms").join(cancelled, "id", "left_semi")


def _unscheduled(notes: _Notes) -> DataFrame:
    """`Audit.unscheduled`."""
    hour, index = F.shiftrightunsigned("id", 32).alias("hour"), F.col("id").bitwiseAND(0xFFFF_FFFF).alias("index")
    first_noted = notes.noted.select(hour, index).groupBy("hour").agg(F.min("index").alias("first"))
    return (
        notes.deliveries.select("id", "topic", "group", "at_ms")
        .join(notes.noted, "id", "left_anti")
        .select("*", hour, index)
        .join(first_noted, "hour")
        .where(F.col("index") > F.col("first"))
        .select("id", "topic", "group", "at_ms")
    )


def _lateness(notes: _Notes) -> DataFrame:
    """`Audit.lateness`."""
    first = notes.deliveries.groupBy("id", "topic", "group").agg(F.min(F.struct("at_ms", "due_ms")).alias("f"))
    late: Column = F.col("f.at_ms") - F.col("f.due_ms")
    hour_ms = (F.floor(F.col("f.due_ms") / HOUR_MS) * HOUR_MS).cast("bigint").alias("hour_ms")
    names = ("p50_ms", "p90_ms", "p99_ms", "max_ms")
    return (
        first.select("topic", hour_ms, late.alias("late_ms"))
        .groupBy("topic", "hour_ms")
        .agg(F.count("*").alias("messages"), F.percentile("late_ms", list(PERCENTILES)).alias("p"))
        .select("topic", "hour_ms", "messages", *(F.col("p")[n].alias(name) for n, name in enumerate(names)))
        .orderBy("topic", "hour_ms")
    )


def _without_master(events: DataFrame) -> list[tuple[int, int, int]]:
    """The gaps between terms. Signs of a master are its noted deliveries and the time stamps of its proposals."""
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
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    lines = [f"{found.scheduled:,} messages scheduled, {found.delivered:,} delivered"]
    for name, title in TITLES.items():
        frame: DataFrame = getattr(found, name)
        frame.coalesce(1).write.mode("overwrite").parquet(str(target / name))
        written = frame.sparkSession.read.parquet(str(target / name))
        lines.append(f"{title}: {written.count():,}")
        lines += [f"  {row.asDict()}" for row in written.orderBy("id").limit(SAMPLES_MAX).collect()]
    if found.filtered:
        lines.append(f"not judged as lost, since they had a filter: {', '.join(found.filtered)}")
    if found.broadcasting:
        lines.append(f"not judged as lost or duplicated, since they broadcast: {', '.join(found.broadcasting)}")
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
    found.lateness.coalesce(1).write.mode("overwrite").parquet(str(target / LATENESS))
    _plot(rows, found.without_master, target / "lateness.png")
    text = "\n".join(lines)
    picture = ("lateness.png", "lateness by hour")
    write_page(target / PAGE, "audit", "What became of every message", text, picture)
    return text


def _by_hour(values: Mapping[int, float]) -> tuple[list[float], list[float]]:
    """The hours as a date axis takes them, with their values. An hour without messages after one with some is nan, so
    that no line crosses the gap."""
    times, shown = [], []
    for hour_ms in sorted(values):
        times.append(_hour(hour_ms))
        shown.append(values[hour_ms])
        if hour_ms + HOUR_MS not in values:
            times.append(_hour(hour_ms + HOUR_MS))
            shown.append(nan)
    return times, shown


def _plot(rows: Sequence[Row], without_master: Sequence[tuple[int, int, int]], path: Path) -> None:
    """Draw the lateness by hour and topic, and mark when there was no master. `rows`: of `Audit.lateness`."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(12, 4), layout="constrained")
    sizes: Counter[str] = Counter()
    for row in rows:
        sizes[row.topic] += row.messages
    chosen = topic_colours(sizes)
    for topic, colour in chosen.colours.items():
        part = {row.hour_ms: row.p99_ms for row in rows if row.topic == topic}
        axes.plot(*_by_hour(part), marker="o", color=colour, label=topic)
    if chosen.others:
        worst: dict[int, float] = {}
        for row in rows:
            if row.topic in chosen.others:
                worst[row.hour_ms] = max(worst.get(row.hour_ms, 0.0), row.p99_ms)
        label = f"worst of {len(chosen.others)} others"
        axes.plot(*_by_hour(worst), marker="o", color=OTHERS_COLOUR, label=label)
    for place, (_, begin_ms, until_ms) in enumerate(without_master):
        label = "no master" if place == 0 else "_"
        axes.axvspan(_hour(begin_ms), _hour(until_ms), color="tab:red", alpha=0.5, label=label)
    time_axis(axes)
    if len({row.hour_ms for row in rows}) == 1:
        axes.set_xlim(_hour(rows[0].hour_ms - HOUR_MS), _hour(rows[0].hour_ms + HOUR_MS))
    axes.set_title("How late messages came: p99 of each hour")
    axes.set_xlabel("hour of the due time, UTC")
    axes.set_ylabel("lateness p99, ms")
    axes.set_ylim(bottom=min([0.0, *(row.p99_ms for row in rows)]))
    if rows:
        legend_beside(axes)
    write_plot(figure, path)
    plt.close(figure)


def _hour(hour_ms: int) -> float:
    """The hour in the unit of a date axis, days since 1970."""
    return hour_ms / (24 * HOUR_MS)


def _hour_text(hour_ms: int) -> str:
    """The start of an hour as people read it."""
    return f"{datetime.fromtimestamp(hour_ms / 1_000, UTC):%Y-%m-%d %H:%M} UTC"
