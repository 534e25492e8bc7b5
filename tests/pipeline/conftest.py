"""One Spark session and one cluster of three real nodes for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.pipeline.running import FEW_ROWS, RunningCluster, forget_calls
from tickwheel.pipeline.session import SessionConfig, build_session


@pytest.fixture(scope="session")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Three nodes that come up while Spark does."""
    running = RunningCluster(tmp_path_factory.mktemp("cluster"))
    running.launch()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def spark(launched: RunningCluster) -> Iterator[SparkSession]:
    """`local[2]`, quick to start, and quick with little data; its workers are forked with what they import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).with_name("warm")), prepend=os.pathsep)
        session = build_session(SessionConfig(master="local[2]", quick=True, shuffle_partitions=2, settings=FEW_ROWS))
    yield session
    session.stop()


@pytest.fixture(scope="session")
def cluster(spark: SparkSession, launched: RunningCluster) -> RunningCluster:
    """Three nodes, all alive. No channel is opened before Spark runs: its launch forks, which threads of gRPC would not
    survive."""
    launched.start_all()
    return launched


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test whose time is over may be cut off within a call of the JVM: that test fails, and not those after it."""
    if call.excinfo is not None and not isinstance(call.excinfo.value, Exception):
        forget_calls()
    return (yield)
