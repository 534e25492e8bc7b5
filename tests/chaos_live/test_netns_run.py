"""Real processes in network namespaces: a short run from start to verdict, and nothing left behind by a sudden end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

JOB = Path(__file__).with_name("netns_job.py")
REFUSED = 3
GONE_S = 10.0
SPOKEN_TO_S = 4.0
"""By then; TCP alone takes five seconds and more."""


def _command(directory: Path, what: str) -> list[str]:
    return [sys.executable, str(JOB), str(directory), what]


@pytest.mark.slow
def test_a_short_run_between_namespaces_holds_its_promises(tmp_path: Path) -> None:
    """The master's packets are lost, some of everybody's are, connections are refused: each has an effect that is
    seen, another master serves, nothing is lost, early or different. Checkpoints, forwarded calls and clients go the
    same way, so a node that cannot live with TCP's own pauses would show here."""
    done = subprocess.run(_command(tmp_path, "run"), capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == REFUSED:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["broken"] == []
    assert not verdict["void"]
    assert [fault["kind"] for fault in verdict["faults"]] == ["master-alone", "loss", "cut"]
    assert all(fault["count"] for fault in verdict["faults"]), verdict["faults"]
    assert verdict["failovers"]
    assert verdict["counts"]["acknowledged"] > 600


@pytest.mark.slow
def test_a_loss_between_namespaces_is_measured(tmp_path: Path) -> None:
    """The packets from and to the master are lost for a while, its clients' too: every step of the way back is seen
    and nothing is lost. A client that waits for the old master's kernel to answer would show here."""
    done = subprocess.run(_command(tmp_path, "failover"), capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == REFUSED:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    [loss] = figures["losses"]
    steps = [loss[name] for name in ("detection_ms", "election_ms", "alignment_ms", "delivery_ms")]
    assert None not in steps
    assert loss["total_ms"] > 300, "quicker than a lease: it was not cut off"
    assert figures["lost"] == figures["early"] == 0
    assert figures["acknowledged"] > 1_000


@pytest.mark.slow
def test_who_was_cut_off_is_spoken_to_again_at_once(tmp_path: Path) -> None:
    """All packets of a slave and of a client were lost for seven seconds: TCP by itself would be silent for nearly as
    long after that, and for two minutes after longer cuts, with all networks whole. And nodes 150 ms there and back
    from each other elect a master: their connections were given up before they could be made, and the answers to the
    question before an election not waited for."""
    done = subprocess.run(_command(tmp_path, "silence"), capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == REFUSED:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < SPOKEN_TO_S


def _in_namespaces(wanted: set[int]) -> list[str]:
    """Processes that live in one of these."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                inode = os.stat(process / "ns" / "net").st_ino  # noqa: PTH116  # follows the link to the namespace
            except OSError:
                continue
            if inode in wanted:
                found.append(process.name)
    return found


def test_a_sudden_end_leaves_no_namespace(tmp_path: Path) -> None:
    """SIGKILL of whoever supervises: its nodes end with it, and namespaces without a name and without a process end
    with them. Otherwise every broken-off run would leave one on the machine."""
    with subprocess.Popen(_command(tmp_path, "wait"), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as job:
        assert job.stdout is not None
        assert job.stderr is not None
        line = job.stdout.readline()
        if not line and job.wait() == REFUSED:
            pytest.skip(job.stderr.read().decode().strip())
        told = json.loads(line)
        spaces = set(told["namespaces"])
        assert {str(pid) for pid in told["pids"]} <= set(_in_namespaces(spaces))
        job.send_signal(signal.SIGKILL)
    end_s = time.monotonic() + GONE_S
    while (left := _in_namespaces(spaces)) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert left == []
