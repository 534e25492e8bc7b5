"""The table of results in docs/BENCHMARK.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tickwheel.bench import __main__ as bench
from tickwheel.bench.document import BEGIN, END, results_table, with_table
from tickwheel.bench.figures import Figure

ROOT = Path(__file__).parents[2]


def test_the_document_says_what_was_measured() -> None:
    """Figure by figure: nobody has to copy one, and none can be left behind."""
    records = json.loads((ROOT / bench.RESULTS).read_text(encoding="utf-8"))
    document = (ROOT / bench.DOCUMENT).read_text(encoding="utf-8")
    assert with_table(document, results_table(records, {name: bench.title(name) for name in bench.ALL})) == document


def test_what_is_measured_goes_into_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for each load, with day and load; what is a part of another load stays out."""
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "latest.json")
    monkeypatch.setattr(bench, "DOCUMENT", tmp_path / "BENCHMARK.md")
    bench.DOCUMENT.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    figures = [
        Figure("rate", 12_345.0, "msg/s", "20,000", "1 topic"),
        Figure("lateness_p99", float("nan"), "ms", "", "1 topic"),
        Figure("call_p50", 0.1, "ms", "", "a part"),
        Figure("restart_to_ready", 1.5, "s", "3"),
    ]
    bench.write("T8", [figures], {"day": "2026-01-02", "load_before": 0.25})
    before, _, rest = bench.DOCUMENT.read_text(encoding="utf-8").partition(f"{BEGIN}\n\n")
    table, _, after = rest.partition(f"\n\n{END}")
    assert (before, after) == ("before\n", "\nafter\n")
    assert table.splitlines()[2:] == [
        f"| **{bench.title('T8')}** | | | |",
        "| 1 topic | rate 12,345/s (20,000), p99 none | 2026-01-02 | 0.25 |",
        "|  | restart to ready 1.500 s (3) | 2026-01-02 | 0.25 |",
    ]


@pytest.mark.parametrize("text", ["", BEGIN, END, f"{END} {BEGIN}"])
def test_a_document_without_marks_is_refused(text: str) -> None:
    """Nothing is written over."""
    with pytest.raises(ValueError, match="results: begin"):
        with_table(text, "table")
