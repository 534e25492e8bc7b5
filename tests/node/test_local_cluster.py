"""A local cluster whose nodes do not stop, and what is tidied up while signals come."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tickwheel.chaos.live.cluster import ChaosCluster
from tickwheel.node import local_cluster
from tickwheel.node.local_cluster import LocalCluster, LocalNode, undisturbed


class Deaf(LocalCluster):
    """Its nodes are processes that ignore SIGTERM."""

    def command(self, node: LocalNode) -> list[str]:
        """See LocalCluster."""
        return ["/bin/sh", "-c", "trap '' TERM; echo deaf; exec sleep 60"]


@pytest.fixture
async def deaf(tmp_path: Path) -> LocalCluster:
    """Two nodes that run and heed no SIGTERM."""
    cluster = Deaf(tmp_path, 2)
    for node in cluster.nodes:
        cluster.start_node(node)
        async with asyncio.timeout(20):
            while "deaf" not in node.log_tail():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    return cluster


async def test_what_does_not_stop_is_killed_and_named(deaf: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a command can say which of its nodes did not stop."""
    monkeypatch.setattr(local_cluster, "STOP_S", 0.05)
    assert await deaf.stop() == deaf.nodes
    assert not any(node.running for node in deaf.nodes)
    assert await deaf.stop() == []


async def test_a_stop_that_is_cancelled_kills(deaf: LocalCluster) -> None:
    """By a second Ctrl-C: the nodes ran on, in a folder that was removed next."""
    stopping = asyncio.create_task(deaf.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert not any(node.running for node in deaf.nodes)


@pytest.fixture
def handlers() -> Iterator[None]:
    """What this process does at a signal, as it was."""
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    yield
    for number, handler in before:
        signal.signal(number, handler)


def test_signals_wait_until_all_is_tidied_up(handlers: None) -> None:
    """A second Ctrl-C left half of the demo's folder."""
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    with undisturbed():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
    assert not came
    os.kill(os.getpid(), signal.SIGTERM)
    assert came == [signal.SIGTERM]


DEMO = """
import asyncio, os, shutil, signal, sys
from tickwheel.node.cli import local, main
from tickwheel.node.demo import run

async def waits(self):
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(60)

def removes(path, ignore_errors, remove=shutil.rmtree):
    os.kill(os.getpid(), signal.SIGINT)
    remove(path)

run.Demo.run = waits
shutil.rmtree = removes
sys.argv = ["tickwheel", "demo"]
main.main()
"""


def test_a_second_signal_leaves_nothing_of_the_demo(tmp_path: Path) -> None:
    """It came while the folder was being removed."""
    done = subprocess.run(
        [sys.executable, "-c", DEMO], env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, check=False
    )
    assert done.returncode == 130, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [LocalCluster, partial(ChaosCluster, seed=1)])
def test_the_working_directory_is_not_where_nodes_import_from(
    kind: Callable[[Path, int], LocalCluster], tmp_path: Path
) -> None:
    """A project's own inspect.py or queue.py, from whose folder `up` was called, ended each node."""
    for name in ("inspect", "queue", "tickwheel"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')", encoding="utf-8")
    cluster = kind(tmp_path / "nodes", 1)
    command = [*cluster.command(cluster.nodes[0]), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
