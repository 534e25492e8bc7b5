"""`tickwheel bench`: bounds are met in the right direction, and it measures, judges and tidies up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tickwheel.bench.cli import SAYS, STYLES
from tickwheel.bench.fitness import Checked, Verdict, clock_error_ms, machine, verdict_of


def checked(value: float, good: float, worst: float) -> Checked:
    """A figure with these bounds."""
    return Checked("figure", value, "ms", good, worst, "why")


@pytest.mark.parametrize(
    ("value", "good", "worst", "verdict"),
    [
        (5, 5, 50, Verdict.GOOD),
        (6, 5, 50, Verdict.SLOW),
        (51, 5, 50, Verdict.UNFIT),
        (100, 100, 10, Verdict.GOOD),
        (99, 100, 10, Verdict.SLOW),
        (9, 100, 10, Verdict.UNFIT),
        (0, 0, 0, Verdict.GOOD),
        (1, 0, 0, Verdict.UNFIT),
        (float("nan"), 5, 50, Verdict.UNFIT),
        (float("inf"), 100, float("inf"), Verdict.SLOW),
    ],
)
def test_a_figure_is_judged_by_its_bounds(value: float, good: float, worst: float, verdict: Verdict) -> None:
    """Less is better or more is; what was not measured is unfit."""
    assert checked(value, good, worst).verdict == verdict


def test_the_worst_figure_decides() -> None:
    """And each verdict has its words."""
    good, slow, unfit = checked(1, 5, 50), checked(6, 5, 50), checked(51, 5, 50)
    assert verdict_of([good, good]) == Verdict.GOOD
    assert verdict_of([good, slow]) == Verdict.SLOW
    assert verdict_of([slow, unfit, good]) == Verdict.UNFIT
    assert set(SAYS) == set(STYLES) == {verdict.value for verdict in Verdict}


def test_the_machine_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    """Disk, timers and clock: each a number that can be."""
    found = {one.name: one.value for one in machine(tmp_path, 0.05)}
    assert 0 < found["fdatasync p50"] <= found["fdatasync p99"] < 60_000
    assert found["synced writes"] > 0 and found["timers late p99"] >= 0
    assert clock_error_ms() > 0
    assert not list(tmp_path.iterdir())


def test_the_command_measures_three_nodes_and_loses_nothing(tmp_path: Path) -> None:
    """As a process, for a moment: a verdict with its exit code, and an empty directory at the end."""
    program = "import sys; from tickwheel.bench.cli import app; app()"
    done = subprocess.run(
        [sys.executable, "-c", program, "--data", str(tmp_path), "--seconds", "0.5", "--json"],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    said = json.loads(done.stdout)
    assert done.returncode == (1 if said["verdict"] == "unfit" else 0), done.stderr
    figures = {figure["name"]: figure["value"] for figure in said["figures"]}
    assert figures["scheduled"] > 0 and figures["early"] == figures["lost"] == 0
    assert not list(tmp_path.iterdir())
