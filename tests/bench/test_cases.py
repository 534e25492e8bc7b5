"""The benchmark can run: no timing fails a test, a case that breaks does."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tickwheel.bench import __main__ as bench
from tickwheel.bench.cases import LINES, Figure


@pytest.mark.parametrize("case", ["T2", "T4", "T9", "T10", "T11", "T12", "T13"])
async def test_a_case_runs(case: str) -> None:
    """Against three real nodes, for seconds: every figure is a number, nothing was early, what can be plotted is."""
    LINES.clear()
    figures = await bench.ALL[case](True)
    assert figures and len({figure.name for figure in figures}) == len(figures)
    for figure in figures:
        assert math.isfinite(figure.value) and figure.value >= 0, figure
        if figure.name.endswith(("early", "lost")):
            assert figure.value == 0, figure
    assert bool(LINES) == (case == "T4")


def test_every_case_of_the_table_is_there() -> None:
    """T1 to T16, each described by what it does."""
    assert list(bench.ALL) == [f"T{number}" for number in range(1, 17)]
    assert all(case.__doc__ for case in bench.ALL.values())


def test_results_are_medians_and_keep_other_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One record a figure with the values of all runs; a case that is measured again replaces only itself."""
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results" / "latest.json")
    runs = [[Figure("rate", value, "msg/s", "5")] for value in (3.0, 9.0, 4.0)]
    bench.write("T9", runs, quick=False)
    bench.write("T2", runs[:1], quick=False)
    bench.write("T9", runs[1:2], quick=False)
    records = json.loads((tmp_path / "results" / "latest.json").read_text(encoding="utf-8"))
    assert [(r["case"], r["value"], r["runs"]) for r in records] == [("T2", 3.0, [3.0]), ("T9", 9.0, [9.0])]
    assert records[0]["settings"]["fdatasync"] is True
    assert bench.medians(runs)[0].value == 4.0


def test_a_plot_is_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One panel a line."""
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "latest.json")
    bench.plot("T4", {"lateness p50, ms": ([0.0, 0.25], [1.0, 2.0]), "messages/s": ([0.0, 0.25], [10.0, 20.0])})
    assert (tmp_path / "T4.png").read_bytes().startswith(b"\x89PNG")
