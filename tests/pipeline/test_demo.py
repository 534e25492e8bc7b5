"""The demonstration: a few days of the year of flights, in a short form."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
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


class Interrupted:
    """A run of the command that is interrupted as soon as there is a cluster; beside other tests, for it takes long."""

    def __init__(self, out: Path) -> None:
        self.out = out
        tickwheel = [sys.executable, "-m", "tickwheel.node.cli.main"]
        command = [*tickwheel, "pipeline", "demo", "--out", str(out), "--days", "1"]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.started = False
        self.nodes: list[str] = []
        self.rest = self.errors = ""
        self._thread = threading.Thread(target=self._interrupt)
        self._thread.start()

    def _interrupt(self) -> None:
        assert self.process.stdout is not None
        self.started = any("is master" in line for line in iter(self.process.stdout.readline, ""))
        self.nodes = processes_of(str(self.out / "nodes"))
        self.process.send_signal(signal.SIGINT)
        self.rest, self.errors = self.process.communicate(timeout=90)

    def ended(self) -> None:
        """Wait for it."""
        self._thread.join(150)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def interrupted(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interrupted]:
    """Started at the first test of this module. Spark starts first."""
    run = Interrupted(tmp_path_factory.mktemp("interrupted") / "demo")
    yield run
    run.process.kill()
    run.process.wait()


def test_two_days_go_through_all_of_it(spark: SparkSession, tmp_path: Path, interrupted: Interrupted) -> None:
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


def test_an_interrupt_leaves_no_processes_and_nothing_of_sparks_start_is_shown(interrupted: Interrupted) -> None:
    """Ctrl-C ends nodes and Spark. What is said until then is the demonstration's own."""
    interrupted.ended()
    assert interrupted.started and interrupted.nodes, interrupted.errors
    assert interrupted.process.returncode == 130, interrupted.rest + interrupted.errors
    assert "all processes are stopped" in interrupted.rest
    assert interrupted.errors == ""
    assert not processes_of(str(interrupted.out))
