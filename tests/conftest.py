"""Settings for every test: hypothesis profiles, the seed of a failing run in the output, and two lanes of a whole run.

`make test` runs all tests in two processes (pytest-xdist). What happens in simulated time, or takes only a processor,
is one lane; whatever has real nodes, Spark or the time of day in it is the other, one test after the other as without
lanes. The first stands back when both want the same processor, so the second has nearly the machine that it would
have alone.
"""

from __future__ import annotations

import compileall
import os
import signal
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
"""Folders of the first lane."""
NICE = 15
"""Of the first lane: it gets what the other leaves, and that is more than half."""
PRODUCT = (
    *("bench", "chaos", "client", "node", "pipeline", "proto", "replication", "src", "storage", "transport", "wheel"),
)


class Lanes(LoadScopeScheduling):  # type: ignore[misc]  # the library has no types
    """Each lane goes to one process as a whole."""

    def _split_scope(self, nodeid: str) -> str:
        return lane(nodeid)


def lane(nodeid: str) -> str:
    """Of a test."""
    return "computing" if nodeid.startswith(COMPUTING) else "real"


def pytest_configure(config: pytest.Config) -> None:
    """Compile the product. Where Python may not write bytecode by itself (PYTHONDONTWRITEBYTECODE), each of the
    hundreds of nodes and commands that tests start would compile it anew, which is a third of its start."""
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
    """A process of such a run that computes stands back; it gets tests of this lane alone."""
    if os.environ.get("PYTEST_XDIST_WORKER") and lane(item.nodeid) == "computing" and os.nice(0) < NICE:
        os.nice(NICE)
