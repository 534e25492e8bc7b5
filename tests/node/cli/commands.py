"""Commands run in the process of a test, and the node that they are for."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tickwheel.node.cli import program as cli
from tickwheel.node.local_cluster import LocalCluster

Run = Callable[..., "Result"]


class Result(NamedTuple):
    """What one command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def running(capfd: pytest.CaptureFixture[str], *first: str) -> Run:
    """Runs commands that begin with these words."""

    def go(*arguments: str) -> Result:
        capfd.readouterr()
        code = cli.run([*first, *arguments])
        return Result(code, *capfd.readouterr())

    return go


@contextlib.contextmanager
def one_node(directory: Path) -> Iterator[str]:
    """The address of a real node."""
    cluster = LocalCluster(directory, 1)
    with asyncio.Runner() as runner:
        try:
            runner.run(cluster.start())
            yield cluster.addresses[0]
        finally:
            runner.run(cluster.stop())
