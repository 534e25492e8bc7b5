"""Tasks that fail, die, are copied or cancelled: what counts is there once, what does not is not there at all."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.pipeline.retry_job import PAYLOAD_BYTES, ROWS
from tests.pipeline.running import RunningCluster
from tests.pipeline.two_workers import HOSTS


@pytest.mark.timeout(400)
def test_retried_killed_copied_failed_and_cancelled_jobs_write_every_row_once(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    """In a process of its own, with executors of their own on two hosts, and rows staged whenever something happens. A
    job that failed or was cancelled is run again under the same job id, while tasks of the cancelled one may still be
    at work. That speculative copies ran, and which attempt counted, is what Spark tells."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.pipeline.retry_job", cluster.addresses, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=360,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    said = found["said"]
    assert said == {
        "FailAtTheEnd": "done ",
        "KillTheWorker": "done ",
        "FailAlways": "planned done ",
        "Overtaken": "done ",
        "Abreast": "done ",
        "Held": "cancelled done ",
        "KillTheExecutor": "done ",
    }
    for topic in said:
        payloads = cluster.payloads(topic)
        assert all(len(payload) == PAYLOAD_BYTES for payload in payloads)
        names = Counter({payload.partition(".")[0]: count for payload, count in payloads.items()})
        assert names == Counter(f"row-{number}" for number in range(ROWS)), topic
    for name, tasks in found["copied"].items():
        pair = sorted((task for task in tasks if task["partition"] == 1), key=lambda task: task["attempt"])
        assert [task["speculative"] for task in pair] == [False, True], (name, tasks)
        assert {task["host"] for task in pair} == set(HOSTS), (name, tasks)
        assert sorted(task["status"] for task in pair) == ["KILLED", "SUCCESS"], (name, tasks)
    [winner] = [task for task in found["copied"]["Overtaken"] if task["partition"] == 1 and task["status"] == "SUCCESS"]
    assert winner["speculative"]
