"""A cluster of real nodes for the tests of a module."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tickwheel.node.local_cluster import LocalCluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """Three nodes for all tests here. What a killed gateway had comes again after a lease."""
    config = {"delivery": {"lease_ms": 8_000}}
    async with LocalCluster(tmp_path_factory.mktemp("cluster"), 3, config=config) as started:
        yield started
