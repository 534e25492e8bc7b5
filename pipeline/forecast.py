"""Forecasts: the load of pending messages by second, minute and hour, and the effect of a jitter window on it.

Works on any frame with `due_ms` (or `due_at`) and optionally `topic`: the pending messages (from the data source), a
Parquet file before its load, or a union of both. Spark computes the sums. The time span bounds the collected rows: one
for each second that has messages, and one for each minute and topic.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from tickwheel.pipeline.plot_style import OTHERS, OTHERS_COLOUR, legend_beside, time_axis, topic_colours, write_page
from tickwheel.pipeline.report_folder import folder_made, write_plot

SECOND_MS, MINUTE_MS, HOUR_MS, DAY_MS = 1_000, 60_000, 3_600_000, 86_400_000
DAYS_MAX = 60.0
HOT_MAX = 1_000
TOPICS_MAX = 50
"""Topics counted separately; the rest are summed as OTHERS."""
WINDOWS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600)
"""Jitter windows that are tried."""


class ForecastError(ValueError):
    """A forecast cannot be made; the text names the field and what is allowed."""


@dataclass(frozen=True, slots=True)
class ForecastConfig:
    """The span of time and the capacity of a forecast."""

    start_ms: int
    """Begin of the span, milliseconds since 1970."""
    days: float = 7.0
    """Length of the span, at most 60."""
    capacity: float = 10_000.0
    """Messages a second that the cluster delivers: a second with more is hot."""

    def __post_init__(self) -> None:
        if not 0 < self.days <= DAYS_MAX:
            raise ForecastError(f"days: {self.days}: above 0, up to {DAYS_MAX:g}")
        if self.capacity <= 0:
            raise ForecastError(f"capacity: {self.capacity}: above 0")

    @property
    def end_ms(self) -> int:
        """The exclusive end of the span."""
        return self.start_ms + int(self.days * DAY_MS)


@dataclass(frozen=True, slots=True)
class HotSecond:
    """A second that brings more than the capacity."""

    second_ms: int
    messages: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """The result of a forecast."""

    config: ForecastConfig
    messages: int
    """Messages due in the span."""
    seconds: NDArray[np.int64]
    """[n, 2]: second (milliseconds since 1970) and messages, rising; only those that have any."""
    minutes: dict[str, NDArray[np.int64]]
    """By topic, [n, 2] as above."""
    hours: dict[str, NDArray[np.int64]]
    hot: list[HotSecond]
    """The hottest, at most HOT_MAX."""
    hot_count: int
    """Number of all hot seconds."""
    window_s: int | None
    """The shortest window of WINDOWS_S that leaves no hot second. 0: no second is hot; None: no window suffices."""
    backlog_s: float
    """Without jitter, the longest wait of a message at that capacity."""


def _due(frame: DataFrame) -> DataFrame:
    names = frame.columns
    if "due_ms" in names:
        due = F.col("due_ms")
    elif "due_at" in names:
        due = F.ceil(F.unix_micros("due_at") / 1_000)
    else:
        raise ForecastError(f"columns: due_ms or due_at is needed; the columns are {', '.join(names)}")
    topic = F.col("topic") if "topic" in names else F.lit("")
    return frame.select(due.cast("bigint").alias("due_ms"), topic.alias("topic"))


def forecast(frame: DataFrame, config: ForecastConfig) -> Forecast:
    """Compute a forecast. Raises ForecastError."""
    due = _due(frame).where((F.col("due_ms") >= config.start_ms) & (F.col("due_ms") < config.end_ms))
    second = F.floor(F.col("due_ms") / SECOND_MS).cast("bigint").alias("second")
    by_second = due.groupBy("topic", second).count().cache()
    try:
        totals = by_second.groupBy("second").agg(F.sum("count").alias("count"))
        table = totals.orderBy("second").toArrow()
        seconds = np.column_stack(
            [table.column("second").to_numpy() * SECOND_MS, table.column("count").to_numpy()]
        ).astype(np.int64)
        minutes = _by_topic(by_second, MINUTE_MS)
    finally:
        by_second.unpersist()
    above = seconds[seconds[:, 1] > config.capacity]
    hottest = above[np.argsort(-above[:, 1], kind="stable")][:HOT_MAX]
    return Forecast(
        config=config,
        messages=int(seconds[:, 1].sum()),
        seconds=seconds,
        minutes=minutes,
        hours={topic: _coarser(rows, HOUR_MS) for topic, rows in minutes.items()},
        hot=[HotSecond(int(at), int(count)) for at, count in hottest.tolist()],
        hot_count=len(above),
        window_s=flattening_window_s(seconds, config.capacity),
        backlog_s=backlog_s(seconds, config.capacity),
    )


def _by_topic(by_second: DataFrame, width_ms: int) -> dict[str, NDArray[np.int64]]:
    sizes = by_second.groupBy("topic").agg(F.sum("count").alias("count")).orderBy(F.desc("count")).limit(TOPICS_MAX)
    kept = [row["topic"] for row in sizes.collect()]
    named = F.when(F.col("topic").isin(kept), F.col("topic")).otherwise(OTHERS) if kept else F.col("topic")
    start = (F.floor(F.col("second") * SECOND_MS / width_ms) * width_ms).cast("bigint").alias("start")
    rows = by_second.groupBy(named.alias("topic"), start).agg(F.sum("count").alias("count")).toArrow()
    topics = np.array(rows.column("topic").to_pylist(), dtype=object)
    pairs = np.column_stack([rows.column("start").to_numpy(), rows.column("count").to_numpy()]).astype(np.int64)
    found: dict[str, NDArray[np.int64]] = {}
    for topic in sorted(set(topics.tolist())):
        part = pairs[topics == topic]
        found[topic] = part[np.argsort(part[:, 0])]
    return found


def _coarser(rows: NDArray[np.int64], width_ms: int) -> NDArray[np.int64]:
    starts, places = np.unique(rows[:, 0] // width_ms * width_ms, return_inverse=True)
    sums = np.zeros(len(starts), np.int64)
    np.add.at(sums, places, rows[:, 1])
    return np.column_stack([starts, sums])


def spread(seconds: NDArray[np.int64], window_s: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(seconds, expected messages in each) if each message moves to one of `window_s` seconds from its own on, with
    equal chance.

    Exact, but computed only at the seconds where the expectation changes, whatever the gaps between them.
    """
    if not len(seconds):
        return seconds[:, 0], np.zeros(0)
    places = seconds[:, 0] // SECOND_MS
    share = seconds[:, 1] / window_s
    points = np.concatenate([places, places + window_s])
    changes = np.concatenate([share, -share])
    order = np.argsort(points, kind="stable")
    points, changes = points[order], changes[order]
    level = np.cumsum(changes)
    last = np.append(points[1:] != points[:-1], True)
    return points[last] * SECOND_MS, np.maximum(level[last], 0.0)


def flattening_window_s(seconds: NDArray[np.int64], capacity: float) -> int | None:
    """The shortest jitter window of WINDOWS_S under which no second is expected to bring more than the capacity."""
    if not len(seconds) or int(seconds[:, 1].max()) <= capacity:
        return 0
    for window_s in WINDOWS_S:
        if float(spread(seconds, window_s)[1].max()) <= capacity * (1 + 1e-9):
            return window_s
    return None


def backlog_s(seconds: NDArray[np.int64], capacity: float) -> float:
    """The longest wait of a message, in seconds, if `capacity` messages leave each second in order."""
    if not len(seconds):
        return 0.0
    # The work left after each second is a reflected walk, computed without a loop over seconds.
    gaps = np.diff(seconds[:, 0], append=seconds[-1, 0] + SECOND_MS) / SECOND_MS * capacity
    walk = np.cumsum(seconds[:, 1] - gaps)
    before = walk + gaps - seconds[:, 1]
    floor = np.minimum.accumulate(np.minimum(before, 0.0))
    waiting = walk + gaps - floor
    return float(max(0.0, waiting.max() - capacity) / capacity)


def tables(found: Forecast) -> str:
    """The forecast as text for a terminal: load by topic, the hottest seconds, and the window that would help."""
    config = found.config
    lines = [f"{found.messages:,} messages are due within {config.days:g} days"]
    for topic, rows in sorted(found.hours.items(), key=lambda item: -int(item[1][:, 1].sum())):
        most = rows[int(np.argmax(rows[:, 1]))]
        text = f"at most {int(most[1]):,} in the hour of {_time(int(most[0]))}"
        lines.append(f"  {topic or '(no topic)':24} {int(rows[:, 1].sum()):>14,}  {text}")
    lines.append(f"{found.hot_count:,} seconds bring more than {config.capacity:,.0f} messages")
    lines += [f"  {_time(hot.second_ms)}  {hot.messages:>12,}" for hot in found.hot[:10]]
    if found.window_s is None:
        lines.append(f"no jitter window up to {WINDOWS_S[-1]} s keeps every second within it")
    elif found.window_s:
        lines.append(f"a jitter window of {found.window_s} s keeps every second within it (expected load)")
    if found.hot_count:
        lines.append(f"without one the last message of the worst moment waits {found.backlog_s:,.1f} s")
    return "\n".join(lines)


def _time(at_ms: int) -> str:
    return str(np.datetime64(at_ms, "ms").astype("datetime64[s]")).replace("T", " ") + " UTC"


def plots(found: Forecast, folder: str | Path) -> list[Path]:
    """`forecast.png` and `forecast.html` in a folder: load by hour and topic, the seconds against the capacity, and the
    same under the jitter window that flattens them."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    target = Path(folder)
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(12, 8), layout="constrained")
    starts = np.unique(np.concatenate([rows[:, 0] for rows in found.hours.values()] or [np.zeros(0, np.int64)]))
    below = np.zeros(len(starts))
    chosen = topic_colours({topic: int(rows[:, 1].sum()) for topic, rows in found.hours.items()})
    series: list[tuple[str, tuple[str, ...], str]] = [
        (topic or "(no topic)", (topic,), colour) for topic, colour in chosen.colours.items()
    ]
    if chosen.others:
        series.append((OTHERS, chosen.others, OTHERS_COLOUR))
    for label, topics, colour in series:
        counts = np.zeros(len(starts))
        for topic in topics:
            rows = found.hours[topic]
            counts[np.searchsorted(starts, rows[:, 0])] += rows[:, 1]
        times = starts.astype("datetime64[ms]")
        top.bar(times, counts, width=1 / 24, align="edge", bottom=below, color=colour, label=label)
        below += counts
    top.set_title("Messages that are due, by hour and topic")
    seconds = found.seconds
    times = seconds[:, 0].astype("datetime64[ms]")
    bottom.vlines(times, 0, seconds[:, 1], color="C0", linewidth=0.6, label="as scheduled")
    if found.window_s:
        at, level = spread(seconds, found.window_s)
        # Lines drawn by vlines do not count in the cycle of colours.
        jitter = f"with {found.window_s} s of jitter"
        bottom.step(at.astype("datetime64[ms]"), level, where="post", color="C1", label=jitter)
    bottom.axhline(found.config.capacity, color="red", linestyle="--", label="capacity")
    bottom.set_title("Messages that are due, by second, against the capacity")
    for axes in (top, bottom):
        axes.set_xlabel("due, UTC")
        time_axis(axes)
    if found.hours:
        legend_beside(top)
    legend_beside(bottom)
    picture, page = target / "forecast.png", target / "forecast.html"
    try:
        with folder_made(target):
            write_plot(figure, picture)
            write_page(page, "what is coming", "What is coming", tables(found), (picture.name, "load over time"))
    finally:
        plt.close(figure)
    return [picture, page]
