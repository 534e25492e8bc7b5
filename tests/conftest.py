"""Settings for every test: hypothesis profiles, the seed of a failing run in the output, and lanes of a whole run.

`make test` runs all tests in three processes (pytest-xdist). Tests with Spark are one lane, those with other real
nodes or the time of day a second one, each of them one test after the other as without lanes. What happens in
simulated time, or takes only a processor, is handed out test by test to whoever is free, and stands back when others
want the same processor. So real nodes have nearly the machine that they would have alone, and no processor rests
while they wait.
"""

from __future__ import annotations

import compileall
import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

import tickwheel  # noqa: F401  # before a test imports grpc: it says how grpc forks

# Shared, slow machines: no deadline, since how long an example takes says nothing about its truth.
settings.register_profile("default", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=2_000)
settings.load_profile(os.environ.get("TICKWHEEL_HYPOTHESIS_PROFILE", "default"))

COMPUTING = tuple(
    f"tests/{folder}/" for folder in ("chaos", "node/core", "node/state", "project", "replication", "storage", "wheel")
)
"""Folders whose tests may run beside any others, in any process."""
SPARK = "tests/pipeline/"
"""Folder whose tests share one Spark session."""
NICE = 5
"""Of a process that computes: next to one with real nodes it gets a quarter of a processor, which is enough for every
test to end in its time."""
PRODUCT = (
    *("bench", "chaos", "client", "node", "pipeline", "proto", "replication", "src", "storage", "transport", "wheel"),
)


class Lanes(LoadScopeScheduling):  # type: ignore[misc]  # the library has no types
    """The lanes of real nodes and of Spark each go to one process as a whole, and first, as they are the largest."""

    def _split_scope(self, nodeid: str) -> str:
        return lane(nodeid)


def lane(nodeid: str) -> str:
    """Of a test; each one that computes is a lane of its own."""
    if nodeid.startswith(COMPUTING):
        return nodeid
    return "spark" if nodeid.startswith(SPARK) else "real"


def pytest_configure(config: pytest.Config) -> None:
    """Compile the product. Where Python may not write bytecode by itself (PYTHONDONTWRITEBYTECODE), each of the
    hundreds of nodes and commands that tests start would compile it anew, which is a third of its start. What pytest
    makes of the tests is kept too: that is half of their import."""
    sys.dont_write_bytecode = False
    if not hasattr(config, "workerinput"):
        for folder in PRODUCT:
            compileall.compile_dir(config.rootpath / folder, quiet=1)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes that are started heed SIGINT, although this one may have been started in the background, to ignore
    it: that is inherited."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Lanes:
    """For runs in several processes."""
    return Lanes(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A process of such a run stands back from its first test that computes: after that it gets no others."""
    if os.environ.get("PYTEST_XDIST_WORKER") and item.nodeid.startswith(COMPUTING) and os.nice(0) < NICE:
        os.nice(NICE - os.nice(0))
