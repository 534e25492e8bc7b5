"""The benchmark can run: no timing fails a test, a case that breaks does."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tickwheel.bench import __main__ as bench
from tickwheel.bench.figures import COLUMNS, Figure
from tickwheel.bench.served import TIMELINES

MEASURED = bench.settings(quick=False, load_before=0.5)
PLOTTED = {"T4", "T17", "T18", "T21"}
"""Their messages go all the way: repeats, elections and lateness stand beside the rate, and what it cost."""


@pytest.mark.parametrize(
    "case", ["T2", "T4", "T9", "T10", "T11", "T12", "T13", "T17", "T18", "T19", "T20", "T21", "T22"]
)
async def test_a_case_runs(case: str) -> None:
    """Against three real nodes, for seconds: every figure is a number, nothing was early, what can be plotted is."""
    TIMELINES.clear()
    figures = await bench.ALL[case](True)
    assert figures and len({(figure.load, figure.name) for figure in figures}) == len(figures)
    for figure in figures:
        assert math.isfinite(figure.value) and figure.value >= 0, figure
        if figure.name.endswith(("early", "lost", "failed")):
            assert figure.value == 0, figure
    assert bool(TIMELINES) == (case in PLOTTED)
    for load in {line.load for line in TIMELINES}:
        assert set(COLUMNS) <= {figure.name for figure in figures if figure.load == load}


def test_every_case_of_the_table_is_there() -> None:
    """T1 to T22, each described by what it does."""
    assert list(bench.ALL) == [f"T{number}" for number in range(1, 23)]
    assert all(case.__doc__ for case in bench.ALL.values())


def test_results_are_medians_and_keep_other_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One record a figure with the values of all runs; a case that is measured again replaces only itself."""
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results" / "latest.json")
    monkeypatch.setattr(bench, "DOCUMENT", tmp_path / "none.md")
    runs = [[Figure("rate", value, "msg/s", "5", "1 topic")] for value in (3.0, 9.0, 4.0)]
    bench.write("T9", runs, MEASURED)
    bench.write("T2", runs[:1], MEASURED)
    bench.write("T9", runs[1:2], MEASURED)
    records = json.loads((tmp_path / "results" / "latest.json").read_text(encoding="utf-8"))
    assert [(r["case"], r["load"], r["value"], r["runs"]) for r in records] == [
        ("T2", "1 topic", 3.0, [3.0]),
        ("T9", "1 topic", 9.0, [9.0]),
    ]
    assert records[0]["settings"]["fdatasync"] is True


def test_a_lateness_of_nothing_is_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON has no nan; other readers of the results would choke on it."""
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "latest.json")
    monkeypatch.setattr(bench, "DOCUMENT", tmp_path / "none.md")
    bench.write("T4", [[Figure("lateness_p50", math.nan, "ms")]], MEASURED)
    [record] = json.loads((tmp_path / "latest.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert record["value"] is None and record["runs"] == [None]
