"""Departures from New York in 2013 as a frame of reminders, moved into the future by whole weeks.

Scheduled departures are in New York time; a reminder is due `REMINDER_MIN` minutes before. Weekdays stay the same.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tickwheel.node.demo.flights import flights_csv

REMINDER_MIN = 30
WEEK_MS = 7 * 86_400_000
FIRST_DAY = date(2013, 1, 1)
COLUMNS = "year int, month int, day int, sched_dep_time int, carrier string, flight int, origin string, dest string"


def shift_ms(now: datetime) -> int:
    """Whole weeks from 2013 on, so that the first day begins tomorrow or up to a week later."""
    first = datetime(FIRST_DAY.year, FIRST_DAY.month, FIRST_DAY.day, tzinfo=UTC)
    weeks = -(-(now + timedelta(days=1) - first) // timedelta(weeks=1))
    return weeks * WEEK_MS


def reminders(spark: SparkSession, folder: Path, moved_ms: int, days: int) -> DataFrame:
    """Columns of the sink, for the first `days` days of the year. Leaves `flights.csv` in the folder.

    Raises FlightsMissingError.
    """
    path = folder / "flights.csv"
    path.write_text(flights_csv(), encoding="utf-8")
    table = spark.read.option("header", True).csv(str(path)).selectExpr(*(_cast(item) for item in COLUMNS.split(", ")))
    departs = F.make_timestamp(
        "year", "month", "day", F.expr("sched_dep_time div 100"), F.expr("sched_dep_time % 100"), F.lit(0),
        F.lit("America/New_York"),
    )  # fmt: skip
    departs_ms = (F.unix_millis(departs) + moved_ms).alias("departs_ms")
    number = F.concat("carrier", F.col("flight").cast("string"))
    rows = table.where(F.make_date("year", "month", "day") < F.lit(FIRST_DAY + timedelta(days=days)))
    return rows.select("*", departs_ms, number.alias("number")).select(
        F.concat(F.lit("reminders."), "origin").alias("topic"),
        (F.col("departs_ms") - REMINDER_MIN * 60_000).alias("due_ms"),
        F.to_json(
            F.struct(
                F.col("number").alias("flight"),
                "origin",
                "dest",
                F.date_format(F.timestamp_millis("departs_ms"), "yyyy-MM-dd'T'HH:mm'Z'").alias("departs"),
            )
        ).alias("payload"),
        F.col("number").alias("key"),
        F.array("carrier").alias("tags"),
        F.create_map(F.lit("dest"), F.col("dest")).alias("properties"),
    )


def _cast(item: str) -> str:
    """The column as SQL. The file writes whole numbers as decimals."""
    name, kind = item.split()
    return f"cast(cast({name} AS double) AS int) AS {name}" if kind == "int" else name


def squeezed(day: DataFrame, topic: str, start_ms: int, span_ms: int) -> DataFrame:
    """A day's reminders as one topic, from `start_ms` on within `span_ms`, in the rhythm they had."""
    bounds = day.agg(F.min("due_ms").alias("first"), F.max("due_ms").alias("last")).first()
    assert bounds is not None
    scale = span_ms / max(1, bounds["last"] - bounds["first"])
    due = F.lit(start_ms) + F.round((F.col("due_ms") - bounds["first"]) * scale)
    return day.withColumn("topic", F.lit(topic)).withColumn("due_ms", due.cast("bigint"))
