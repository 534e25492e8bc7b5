"""Settings for every test: hypothesis profiles, the seed of a failing run in the output, and lanes of a whole run.

`make test` runs all tests in four processes (pytest-xdist). Tests with real nodes, Spark or the time of day are in
lanes: in each one test runs after the other, and two lanes run at a time, so real nodes have nearly the machine that
they would have alone. What happens in simulated time, or takes only a processor, is handed out test by test to the
other processes, and to all once no lane is left. These stand back when others want the same processor; so no processor
rests while real nodes wait.
"""

from __future__ import annotations

import compileall
import logging
import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

for _name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR"):
    os.environ.pop(_name, None)  # what the caller's terminal or a CI wants: commands would write otherwise
# Handlers of gRPC for fork end children of tests that have a server or a channel of gRPC. Read when it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun in the background: so would the commands under test
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Shared, slow machines: no deadline, since how long an example takes says nothing about its truth.
settings.register_profile("default", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=2_000)
settings.load_profile(os.environ.get("TICKWHEEL_HYPOTHESIS_PROFILE", "default"))

COMPUTING = tuple(
    f"tests/{folder}/"
    for folder in ("chaos", "node/core", "node/state", "project", "replication", "storage", "testing", "wheel")
)
"""Folders whose tests may run beside any others, in any process."""
LANES = {
    "spark": ("tests/pipeline/",),
    "clusters": ("tests/process/", "tests/chaos_live/", "tests/bench/"),
    "real": ("tests/",),
}
"""The lanes of all other tests, the longest first: a test is in the first one that has its folder. All tests with Spark
share one session."""
LANES_AT_ONCE = 2
FIRST = "tests/project/test_distribution.py"
"""Takes longest of those that compute: begun last, it would run on alone."""
NICE = 5
"""Of a process that computes: next to one with real nodes it gets a quarter of a processor, which is enough for every
test to end in its time."""
PRODUCT = (
    *("bench", "chaos", "client", "console", "gateway", "node", "pipeline", "proto", "replication", "src", "storage"),
    *("testing", "transport", "wheel"),
)


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # the library has no types
    """Each lane goes to one process as a whole; a process that has begun to compute gets none any more."""

    def _split_scope(self, nodeid: str) -> str:
        return lane(nodeid) or nodeid

    def _assign_work_unit(self, node: WorkerController) -> None:
        lanes = [name for name in LANES if name in self.workqueue]
        computing = min((name for name in self.workqueue if name not in LANES), key=_order, default=None)
        taken = [name in LANES for name in self.assigned_work[node]]
        in_lanes = sum(any(name in LANES for name in scopes) for scopes in self.assigned_work.values())
        if lanes and (computing is None or (all(taken) if taken else in_lanes < LANES_AT_ONCE)):
            self.workqueue.move_to_end(lanes[0], last=False)
        elif computing is not None:
            self.workqueue.move_to_end(computing, last=False)
        super()._assign_work_unit(node)


def _order(nodeid: str) -> bool:
    """`min` takes the first of those that this is lowest for."""
    return not nodeid.startswith(FIRST)


def lane(nodeid: str) -> str:
    """Of a test; none for one that computes."""
    if nodeid.startswith(COMPUTING):
        return ""
    return next(name for name, folders in LANES.items() if nodeid.startswith(folders))


def pytest_configure(config: pytest.Config) -> None:
    """Compile the product. Where Python may not write bytecode by itself (PYTHONDONTWRITEBYTECODE), each of the
    hundreds of nodes and commands that tests start would compile it anew, which is a third of its start. What pytest
    makes of the tests is kept too: that is half of their import."""
    sys.dont_write_bytecode = False
    if not hasattr(config, "workerinput"):
        for folder in PRODUCT:
            compileall.compile_dir(config.rootpath / folder, quiet=1)


@pytest.fixture(scope="session", autouse=True)
def _nodes_are_forks() -> Iterator[None]:
    """Where a test that was collected starts clusters of real nodes."""
    local_cluster = sys.modules.get("tickwheel.node.local_cluster")
    if local_cluster is None:
        yield
        return
    from tests import forked_nodes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_cluster, "begin", forked_nodes.begin)
        yield


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes that are started heed SIGINT, although this one may have been started in the background, to ignore
    it: that is inherited."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    """For runs in several processes."""
    return Scheduling(config, log)


def pytest_runtest_protocol(item: pytest.Item) -> None:
    """pytest gives its handlers to loggers that do not propagate. Those of pyspark make each of their handlers write
    JSON: so would every later test of this process."""
    loggers = logging.root.manager.loggerDict.values() if "pyspark" in sys.modules else ()
    for logger in loggers:
        if isinstance(logger, logging.Logger) and type(logger).__name__ == "PySparkLogger":
            logger.propagate = True
    plugin = item.config.pluginmanager.get_plugin("logging-plugin")
    assert plugin is not None
    for handler in (plugin.caplog_handler, plugin.report_handler):
        handler.setFormatter(plugin.formatter)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A process of such a run stands back from its first test that computes."""
    if os.environ.get("PYTEST_XDIST_WORKER") and not lane(item.nodeid) and os.nice(0) < NICE:
        os.nice(NICE - os.nice(0))
