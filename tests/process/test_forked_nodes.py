"""Processes that are forks: to those who started them they are like others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked_nodes
from tests.forked_nodes import Forked

PROBE = """
import os, signal, sys, threading

files = [name for name in os.listdir("/proc/self/fd") if int(name) > 2 and os.path.exists(f"/proc/self/fd/{name}")]
leads = os.getsid(0) == os.getpid()
print(hash("any"), os.environ["SAID"], sys.argv[1:], files, leads, threading.active_count(), flush=True)
if sys.argv[1] == "stays":
    signal.pause()
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command of a module that says what it finds."""
    (tmp_path / "probe.py").write_text(PROBE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forked_nodes, "MODULES", ("probe",))
    return [sys.executable, "-m", "probe"]


def test_how_they_end_and_what_they_have(probe: list[str], tmp_path: Path) -> None:
    """Exit codes, signals and time-outs are those of a child. Arguments, environment, log and session are their own,
    no file is inherited, and two in turn have two orders of sets."""
    environment = {**os.environ, "SAID": "here"}
    with (tmp_path / "log").open("ab") as log:
        begun = [forked_nodes.begin([*probe, word], log, environment) for word in ("0", "7", "stays")]
        assert all(isinstance(process, Forked) for process in begun)
        assert [process.wait(20) for process in begun[:2]] == [0, 7] == [process.poll() for process in begun[:2]]
        with pytest.raises(subprocess.TimeoutExpired):
            begun[2].wait(0.05)
        assert begun[2].poll() is None
        begun[2].send_signal(signal.SIGKILL)
        assert begun[2].wait(20) == begun[2].returncode == -signal.SIGKILL
        begun[2].kill()  # does nothing
    said = [line.split(" ", 1) for line in (tmp_path / "log").read_text(encoding="utf-8").splitlines()]
    assert {rest for _, rest in said} == {f"here ['{word}'] [] True 1" for word in ("0", "7", "stays")}
    assert len({order for order, _ in said}) == 2


@pytest.mark.parametrize("changed", [{"PYTHONHASHSEED": "1"}, {"LD_PRELOAD": ""}])
def test_what_is_read_before_the_fork_is_heeded(probe: list[str], tmp_path: Path, changed: dict[str, str]) -> None:
    """Then, and by another command than those of nodes, a process is started as always."""
    with (tmp_path / "log").open("ab") as log:
        environment = {**os.environ, "SAID": "here"}
        for command, made in (([*probe, "3"], environment | changed), (["/bin/sh", "-c", "exit 3"], environment)):
            process = forked_nodes.begin(command, log, made)
            assert not isinstance(process, Forked) and process.wait(20) == 3
