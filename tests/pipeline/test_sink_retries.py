"""Tasks that fail, die or are cancelled: what counts is there once, what does not is not there at all."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.pipeline.running import RunningCluster

ROWS = 4_000


@pytest.mark.timeout(400)
def test_retried_killed_failed_and_cancelled_jobs_write_every_row_once(cluster: RunningCluster) -> None:
    """In a process of its own, with a Spark that repeats tasks. A job that failed or was cancelled is run again under
    the same job id, while tasks of the cancelled one may still be at work."""
    script = Path(__file__).with_name("retry_job.py")
    done = subprocess.run(
        [sys.executable, str(script), cluster.endpoints],
        capture_output=True,
        text=True,
        check=False,
        timeout=360,
        cwd=script.parents[2],
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    said = json.loads(done.stdout.strip().splitlines()[-1])
    assert said == {
        "fail_half_way": "done ",
        "fail_at_the_end": "done ",
        "kill_the_worker": "done ",
        "fail_always": "planned done ",
        "slow": "cancelled done ",
    }
    for topic in said:
        assert cluster.payloads(topic) == Counter(f"row-{number}" for number in range(ROWS)), topic
