"""Fixtures for pytest: `pytest_plugins = ["tickwheel.testing.fixtures"]` in the top conftest.py of a project.

They are plain functions, so they work with pytest-asyncio, anyio and tests without a loop. What they need is imported
when a test asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tickwheel.testing import FakeCluster, SyncFakeCluster


@pytest.fixture
def tickwheel() -> Iterator[FakeCluster]:
    """A cluster in memory, for this test alone, with a clock that stands still until the test moves it."""
    from tickwheel.testing import FakeCluster

    cluster = FakeCluster()
    yield cluster
    cluster.close()


@pytest.fixture
def tickwheel_sync() -> Iterator[SyncFakeCluster]:
    """The same for a test without a loop."""
    from tickwheel.testing import SyncFakeCluster

    with SyncFakeCluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def tickwheel_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real node in a process of its own, one for all tests: let each use topics of its own."""
    from tickwheel.testing.real_node import real_node

    with real_node(tmp_path_factory.mktemp("tickwheel-node")) as address:
        yield address
