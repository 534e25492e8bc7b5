"""The fixtures for users of pytest."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

from tickwheel.testing import FakeCluster, SyncFakeCluster

pytest_plugins = ["tickwheel.testing.fixtures"]


async def test_a_cluster_in_memory(tickwheel: FakeCluster) -> None:
    """With a client; nobody has to close either."""
    await tickwheel.client.schedule("t", "x", delay=timedelta(days=1))
    await tickwheel.clock.advance(days=1)
    [delivery] = await tickwheel.take("t")
    assert delivery.payload == b"x"


async def test_a_consumer_may_be_left_open(tickwheel: FakeCluster) -> None:
    """A test that fails leaves one: nothing complains beside its failure."""
    await tickwheel.client.schedule("t", "x", delay=timedelta(0))
    consumer = tickwheel.client.consumer("g", "t")
    assert (await anext(aiter(consumer))).payload == b"x"


def test_a_cluster_in_memory_without_a_loop(tickwheel_sync: SyncFakeCluster) -> None:
    """The blocking client is at hand."""
    tickwheel_sync.client.schedule("t", "x", delay=timedelta(days=1))
    tickwheel_sync.clock.advance(days=1)
    assert len(tickwheel_sync.take("t")) == 1


def test_naming_the_fixtures_imports_no_node() -> None:
    """A session whose tests do not ask for a cluster pays nothing for it."""
    code = "import sys, tickwheel.testing.fixtures; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "tickwheel.testing.fixtures" in loaded and not loaded & {"numpy", "grpc", "tickwheel.node"}
