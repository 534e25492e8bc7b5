"""The real node of the fixtures does not outlive the tests."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

CODE = """
import sys
from pathlib import Path
from tickwheel.testing import real_node
before = real_node.LocalCluster.start_node
def start_node(self, node):
    before(self, node)
    print(node.pid, flush=True)
real_node.LocalCluster.start_node = start_node
with real_node.real_node(Path(sys.argv[1])):
    print("runs", flush=True)
    sys.stdin.read()
"""


def test_a_node_ends_with_tests_that_are_killed(tmp_path: Path) -> None:
    """Nobody is left to stop it, so its system does."""
    with subprocess.Popen(
        [sys.executable, "-c", CODE, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as tests:
        assert tests.stdout is not None
        node = int(tests.stdout.readline())
        assert tests.stdout.readline() == "runs\n"
        handle = os.pidfd_open(node)
        try:
            tests.kill()
            assert os.waitid(os.P_PID, tests.pid, os.WEXITED | os.WNOWAIT) is not None
            ended = select.select([handle], [], [], 20.0)[0]
        finally:
            os.close(handle)
    assert ended, "the node still runs"
