"""One Spark session and one cluster of three real nodes for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tests.pipeline.running import FEW_ROWS, RunningCluster
from tickwheel.pipeline.session import SessionConfig, build_session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """`local[2]`, quick to start, and quick with little data."""
    session = build_session(SessionConfig(master="local[2]", quick=True, shuffle_partitions=2, settings=FEW_ROWS))
    yield session
    session.stop()


@pytest.fixture(scope="session")
def cluster(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Three nodes, all alive. Spark starts first: its launch forks, which threads of gRPC would not survive."""
    with RunningCluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running
