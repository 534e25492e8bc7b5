"""The forecast against plain counting, and the windows that it advises against a simulation second by second."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import pyplot
from matplotlib.colors import to_rgba_array
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray
from pyspark.sql import SparkSession

from tests.pipeline.full_disk import full_disk
from tickwheel.pipeline.forecast import (
    Forecast,
    ForecastConfig,
    ForecastError,
    backlog_s,
    flattening_window_s,
    forecast,
    plots,
    spread,
    tables,
)
from tickwheel.pipeline.plot_style import COLOURS, OTHERS
from tickwheel.pipeline.schedules import ScheduleConfig, write_schedule

START_MS = 1_800_000_000_000


def seconds_of(counts: dict[int, int]) -> NDArray[np.int64]:
    """As a forecast holds them."""
    return np.array([[START_MS + at * 1_000, count] for at, count in sorted(counts.items())], np.int64).reshape(-1, 2)


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(st.integers(0, 60), st.integers(1, 500), max_size=12),
    st.integers(1, 20),
    st.integers(1, 300),
)
def test_spreading_and_waiting_are_those_of_a_walk_second_by_second(
    counts: dict[int, int], window_s: int, capacity: int
) -> None:
    """The array work knows gaps; a loop over all seconds does not need to."""
    level = [0.0] * 100
    for at, count in counts.items():
        for place in range(at, at + window_s):
            level[place] += count / window_s
    times, expected = spread(seconds_of(counts), window_s)
    assert max(expected, default=0.0) == pytest.approx(max(level))
    for at_ms, load in zip(times.tolist(), expected.tolist(), strict=True):
        assert level[(at_ms - START_MS) // 1_000] == pytest.approx(load)
    waiting = worst = 0.0
    for second in range(62):
        waiting += counts.get(second, 0)
        worst = max(worst, waiting - capacity)
        waiting = max(0.0, waiting - capacity)
    assert backlog_s(seconds_of(counts), capacity) == pytest.approx(worst / capacity)
    window = flattening_window_s(seconds_of(counts), capacity)
    peak = max(counts.values(), default=0)
    assert (window == 0) == (peak <= capacity)


def test_a_forecast_counts_what_is_due(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By second, minute, hour and topic; a burst is found, told, and flattened by the window that it names."""
    config = ScheduleConfig(rows=30_000, start_ms=START_MS, seed=3, span_days=20, median_days=1)
    write_schedule(config, tmp_path / "in.parquet")
    frame = spark.read.parquet(str(tmp_path / "in.parquet"))
    found = forecast(frame, ForecastConfig(START_MS, days=3, capacity=20))
    rows = [(r.topic, r.due_ms) for r in frame.collect() if r.due_ms < START_MS + 3 * 86_400_000]
    assert found.messages == len(rows)
    by_second = Counter(due // 1_000 * 1_000 for _, due in rows)
    assert {int(a): int(b) for a, b in found.seconds} == by_second
    for topic in config.topics:
        by_hour = Counter(due // 3_600_000 * 3_600_000 for name, due in rows if name == topic)
        assert {int(a): int(b) for a, b in found.hours[topic]} == by_hour
        by_minute = Counter(due // 60_000 * 60_000 for name, due in rows if name == topic)
        assert {int(a): int(b) for a, b in found.minutes[topic]} == by_minute
    hot = {at: count for at, count in by_second.items() if count > 20}
    assert found.hot_count == len(hot) > 0
    assert {h.second_ms: h.messages for h in found.hot} == hot
    assert found.window_s and max(spread(found.seconds, found.window_s)[1]) <= 20.0001
    text = tables(found)
    assert f"{found.hot_count:,} seconds" in text and "reminders" in text
    drawn: list[Figure] = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    for path in plots(found, tmp_path / "plots"):
        assert path.stat().st_size > 500
    for axes in drawn[0].axes:
        handles, _ = axes.get_legend_handles_labels()
        parts: list[Any] = [handle[0] if isinstance(handle, tuple) else handle for handle in handles]
        colours = [part.get_facecolor() if isinstance(part, Patch) else part.get_color() for part in parts]
        assert len({str(to_rgba_array(colour)) for colour in colours}) == len(colours) == 3
    monkeypatch.undo()
    assert "hot" not in tables(forecast(frame, ForecastConfig(START_MS + 100 * 86_400_000)))


def test_bars_of_many_topics_look_different(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the largest has a colour of its own; all others are one series, and no message is left out."""
    hours = {f"t{topic}": seconds_of({0: 100 - topic, 3_600: 1}) for topic in range(30)}
    hours[OTHERS] = seconds_of({0: 1_000})
    config = ForecastConfig(START_MS, capacity=10_000)
    found = Forecast(config, 0, seconds_of({0: 1}), hours, hours, hot=[], hot_count=0, window_s=0, backlog_s=0.0)
    drawn: list[Figure] = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    plots(found, tmp_path)
    found_handles, labels = drawn[0].axes[0].get_legend_handles_labels()
    handles: list[Any] = list(found_handles)
    colours = {str(handle[0].get_facecolor()) for handle in handles}
    assert len(colours) == len(handles) == len(COLOURS) + 1
    assert labels == [*(f"t{topic}" for topic in range(len(COLOURS))), OTHERS]
    assert drawn[0].axes[0].get_xlim()[0] == pytest.approx(START_MS / 86_400_000, abs=1)
    total = sum(bar.get_height() for handle in handles for bar in handle)
    assert total == sum(int(rows[:, 1].sum()) for rows in hours.values())


def test_a_forecast_that_finds_no_room_leaves_what_was_there(tmp_path: Path) -> None:
    """It cut off the plot of an earlier forecast, and left half of its own, or an empty folder."""
    rows = {"t": seconds_of({0: 1})}
    config = ForecastConfig(START_MS, capacity=10_000)
    found = Forecast(config, 1, seconds_of({0: 1}), rows, rows, hot=[], hot_count=0, window_s=0, backlog_s=0.0)
    with full_disk(100), pytest.raises(OSError, match=r"forecast\.png"):
        plots(found, tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()
    before = {path: path.read_bytes() for path in plots(found, tmp_path / "out")}
    for bytes_max in (100, len(before[tmp_path / "out" / "forecast.html"]) - 1):
        with full_disk(bytes_max), pytest.raises(OSError):
            plots(found, tmp_path / "out")
        assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_what_cannot_be_looked_at_is_named(spark: SparkSession) -> None:
    """Columns and numbers."""
    with pytest.raises(ForecastError, match="due_ms or due_at"):
        forecast(spark.range(1), ForecastConfig(START_MS))
    with pytest.raises(ForecastError, match="days"):
        ForecastConfig(START_MS, days=0)
    with pytest.raises(ForecastError, match="capacity"):
        ForecastConfig(START_MS, capacity=0)
