"""Figures, their tables, and plots that show what was there and nothing else."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
from matplotlib import pyplot
from rich.console import Console
from rich.table import Table

from tickwheel.bench.figures import Figure, Timeline, drawn, loads_table, medians, others_table, plot, timeline


def text_of(table: Table) -> list[list[str]]:
    """Cells of each printed row."""
    out = io.StringIO()
    Console(file=out, width=300).print(table)
    return [[cell.strip() for cell in line.strip("│┃").split("│")] for line in out.getvalue().splitlines()]


def test_medians_are_of_each_figure() -> None:
    """Of all runs of a case."""
    runs = [[Figure("rate", value, "msg/s")] for value in (3.0, 9.0, 4.0)]
    assert medians(runs) == [Figure("rate", 4.0, "msg/s")]


def test_a_load_is_one_row_with_repeats_elections_and_lateness() -> None:
    """Figures of one load stand beside each other, whatever order they come in; a target is in brackets."""
    figures = [
        Figure("elections", 1, "", "0", "100 topics"),
        Figure("rate", 5_000, "msg/s", load="1 topic"),
        Figure("lateness_p99", 12.5, "ms", "8", "100 topics"),
        Figure("repeats", 7, "msg", load="100 topics"),
        Figure("cpu_of_one_topic", 1.2, "", load="100 topics"),
    ]
    rows = text_of(loads_table([("T17", figures)]))
    many = next(row for row in rows if "100 topics" in row)
    assert many == ["T17", "100 topics", "", "", "12 (8)", "", "", "7", "", "1 (0)", "", ""]
    assert any(row[1:3] == ["1 topic", "5,000"] for row in rows)
    others = text_of(others_table([("T17", [figures, figures])]))
    assert ["T17", "100 topics", "cpu_of_one_topic", "1.200", "1.200, 1.200", "", ""] in others
    assert not any("repeats" in row for row in others)


def test_a_gap_is_a_gap() -> None:
    """Where nothing came there is no lateness, and the rate is nothing: no line leads over it."""
    late = [np.array([1, 3]), np.array([5]), np.array([900])]
    found = timeline("kill", late, [100.0, 100.1, 101.3], [(100.3, "master lost")])
    assert found.seconds == [0.0, 0.25, 0.5, 0.75, 1.0, 1.25]
    assert found.rate == [12.0, 0.0, 0.0, 0.0, 0.0, 4.0]
    assert found.late_p50_ms[0] == 3.0 and found.late_p50_ms[5] == 900.0
    assert all(math.isnan(value) for value in found.late_p50_ms[1:5] + found.late_p99_ms[1:5])
    [(at_s, what)] = found.marks
    assert math.isclose(at_s, 0.3, abs_tol=1e-9) and what == "master lost"


def test_nothing_came_at_all() -> None:
    """Such a load has an empty plot, and breaks nothing."""
    assert timeline("none", [], []) == Timeline("none")


def test_a_plot_is_a_picture(tmp_path: Path) -> None:
    """Of all loads of a case, also of one without a delivery."""
    late = [np.array([1, 3]), np.array([5])]
    timelines = [timeline("kill", late, [0.0, 2.0], [(0.5, "master lost"), (1.0, "master lost")]), Timeline("none")]
    plot("T6. Loss of the master", timelines, tmp_path / "T6.png")
    assert (tmp_path / "T6.png").read_bytes().startswith(b"\x89PNG")


def test_the_axes_of_a_plot_hold_every_load() -> None:
    """Its loads share them; the first one is not the largest."""
    loads = [timeline("kill", [np.array([late_ms])], [0.0], []) for late_ms in (5, 900)]
    figure = drawn("T6. Loss of the master", loads)
    low, high = figure.axes[0].get_ylim()
    pyplot.close(figure)
    assert low == 0 and high > 900
