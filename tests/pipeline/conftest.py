"""One Spark session for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tickwheel.pipeline.session import SessionConfig, build_session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """`local[2]`, quick to start."""
    session = build_session(SessionConfig(master="local[2]", quick=True, shuffle_partitions=2))
    yield session
    session.stop()
