"""The demonstration as a user runs it, squeezed further: three processes, the master killed, nothing lost."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_demo_loses_nothing() -> None:
    """Exit code 0; every flight's reminder arrives, none early, although the master died half way."""
    done = subprocess.run(
        [sys.executable, "-m", "tickwheel.node.cli.main", "demo", "--seconds", "6", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["scheduled"] == 27_004
    assert (report["lost"], report["early"], report["invented"]) == (0, 0, 0)
    assert report["new_master"] not in {"", report["killed"]}
    assert report["killed_node_is_back"]
