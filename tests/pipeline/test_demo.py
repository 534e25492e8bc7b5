"""The demonstration: a few days of the year of flights, in a short form."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

from pyspark.sql import SparkSession
from rich.console import Console

from tickwheel.pipeline.demo.run import DemoConfig, PipelineDemo


def processes_of(text: str) -> list[str]:
    """Command lines of processes that name something."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line:
            found.append(line)
    return found


def test_two_days_go_through_all_of_it(spark: SparkSession, tmp_path: Path) -> None:
    """Everything that was built is loaded and pending, the squeezed day arrives once although it was written twice,
    the audit finds nothing, and the reports are where it says."""
    said = io.StringIO()
    config = DemoConfig(tmp_path / "demo", days=2, seconds=1.0, ahead_s=1.0, master="local[2]")
    config.out.mkdir()
    assert PipelineDemo(config, Console(file=said, width=200)).run(), said.getvalue()
    text = said.getvalue()
    for expected in ("1,785 reminders", "1,785 messages taken over", "1,785 in all", "lost: 0", "duplicated: 0"):
        assert expected in text, text
    reports = [Path(line.strip()) for line in text.split("Reports")[1].splitlines()[1:]]
    assert {path.name for path in reports} >= {"forecast.html", "audit.html"}
    assert all(path.stat().st_size > 300 for path in reports)
    assert not (config.out / "nodes").exists()
    assert spark.range(1).count() == 1  # a session that was there before is left alone


def test_an_interrupt_leaves_no_processes_and_nothing_of_sparks_start_is_shown(tmp_path: Path) -> None:
    """Ctrl-C ends nodes and Spark. What is said until then is the demonstration's own."""
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "tickwheel.node.cli", "pipeline", "demo", "--out", str(out), "--days", "1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert any("is master" in line for line in lines)
        assert processes_of(str(out / "nodes"))
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130, rest + errors
    assert "all processes are stopped" in rest
    assert errors == ""
    assert not processes_of(str(out))
