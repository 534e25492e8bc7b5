"""A real node on this machine for tests: a process with files and ports of its own, which ends with the tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tickwheel.node.local_cluster import LocalCluster


@contextmanager
def real_node(directory: Path) -> Iterator[str]:
    """A running node with its files in that directory; gives its address. For code without a running loop, in the main
    thread."""
    cluster = LocalCluster(directory, 1, cluster_id="tests")
    with asyncio.Runner() as runner:
        try:
            runner.run(cluster.start())
            yield cluster.addresses[0]
        finally:
            runner.run(cluster.stop())
