"""The dashboard and the alerts with a real Prometheus that scrapes three real nodes through a SIGKILL of the master.

Needs Prometheus (Debian: apt install prometheus). Grafana itself is not needed: each query of each panel is asked as
Grafana asks it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.node.test_monitoring import DASHBOARD, FOLDER, panels
from tickwheel.client import AsyncClient, Delivery, TickwheelError, Worker
from tickwheel.node.local_cluster import LocalCluster, LocalNode, free_ports

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs Prometheus (Debian: apt install prometheus)"
)

WITHOUT_DATA = {"Certificates end": "the nodes have no certificates"}
"""Panels that have nothing to show of this cluster."""
JOB = "tickwheel-here"
VARIABLES = {"$job": JOB, "$instance": ".*", "$__rate_interval": "8s"}
SOON_S = 90.0
STARTING = 503
"""Status of a Prometheus that has not read its files yet."""
HOUR_MS = 3_600_000


class Prometheus:
    """A server that scrapes every second and has the project's alerts.

    It knows what a node did after a scrape or two, and later on a busy machine. So each question is repeated until its
    answer is there; only then the test goes on.
    """

    def __init__(self, address: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self._url, self._process, self._log = f"http://{address}/api/v1/", process, log

    def _ask(self, method: str, query: dict[str, object]) -> list[dict[str, Any]]:
        try:
            with urllib.request.urlopen(f"{self._url}{method}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
                return list(json.load(answer)["data"]["result"])
        except urllib.error.HTTPError as error:
            if error.code == STARTING:
                return []
            raise AssertionError(f"{query}: {error.read().decode()}") from error
        except OSError:  # it does not listen yet, or is too busy to answer
            assert self._process.poll() is None, self._log.read_text(encoding="utf-8")
            return []

    async def until(self, expression: str) -> None:
        """Until the expression has a series now; raises as until_each."""
        await self.until_each([expression], None)

    async def until_each(self, expressions: Iterable[str], since_s: float | None) -> None:
        """Until each of the expressions has had a series: at some moment since then, or now if it is None.

        Raises:
            AssertionError: Some have none in time, or are wrong.
        """
        missing, end_s = list(expressions), time.monotonic() + SOON_S
        while missing:
            assert time.monotonic() < end_s, f"nothing after {SOON_S:.0f} s: {missing}"
            await asyncio.sleep(0.2)
            missing = [one for one in missing if not await self.has(one, since_s)]

    async def has(self, expression: str, since_s: float | None) -> bool:
        """Whether an expression has had a series at some moment since then, or has one now if it is None."""
        span = {} if since_s is None else {"start": since_s, "end": time.time(), "step": 1}
        method = "query_range" if span else "query"
        return bool(await asyncio.to_thread(self._ask, method, {"query": expression, **span}))


@contextlib.contextmanager
def prometheus(nodes: list[LocalNode], directory: Path) -> Iterator[Prometheus]:
    """deploy/prometheus, with these targets and a scrape each second."""
    text = (FOLDER / "prometheus.yml").read_text(encoding="utf-8").replace("15s", "1s").replace("tickwheel-orders", JOB)
    targets = json.dumps([node.metrics_address for node in nodes])
    (directory / "prometheus.yml").write_text(re.sub(r"targets: .*", f"targets: {targets}", text), encoding="utf-8")
    shutil.copyfile(FOLDER / "alerts.yml", directory / "alerts.yml")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    options = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={address}"]
    path = directory / "prometheus.log"
    with path.open("wb") as log:
        process = subprocess.Popen(["prometheus", *options], cwd=directory, stdout=log, stderr=log)
    try:
        yield Prometheus(address, process, path)
    finally:
        process.terminate()
        process.wait(30)


@contextlib.asynccontextmanager
async def load(client: AsyncClient) -> AsyncIterator[None]:
    """Messages come and are handled, one of ten fails, and those of one topic are too many."""

    async def handle(delivery: Delivery) -> None:
        if delivery.payload == b"0":
            raise ValueError("a bad one")

    async def send(topic: str, delay_ms: int) -> None:
        while True:
            with contextlib.suppress(TickwheelError):  # there is no master for a while, and "full" is full
                await asyncio.gather(*(client.schedule(topic, str(n), delay_ms=delay_ms) for n in range(10)))
            await asyncio.sleep(0.2)

    works = (send("orders", 300), send("full", HOUR_MS), Worker(client, "screen", {"orders": handle}).run())
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def asked(targets: list[dict[str, Any]], *, dead: str = "none") -> str:
    """What has a series if one of these queries has, as Grafana asks them for all nodes of this cluster but a dead one,
    whose last samples a rate would go on to count."""
    text = " or ".join(f"({target['expr']})" for target in targets)
    for name, value in VARIABLES.items():
        text = text.replace(name, value)
    return text.replace(f'job="{JOB}"', f'job="{JOB}",instance!="{dead}"')


@pytest.mark.timeout(300)
async def test_every_panel_shows_the_loss_of_the_master(tmp_path: Path) -> None:
    """No query fails, and each panel finds data before the master is killed and after; a new master leaves its mark,
    and the alert for a dead node begins."""
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    shown = [panel["targets"] for panel in panels(board) if panel["title"] not in WITHOUT_DATA]
    empty = [panel["targets"] for panel in panels(board) if panel["title"] in WITHOUT_DATA]
    marks = [[annotation] for annotation in board["annotations"]["list"] if "expr" in annotation]
    assert len(empty) == len(WITHOUT_DATA) and marks
    began_s = time.time()
    async with LocalCluster(tmp_path / "cluster", 3) as cluster:
        client = cluster.client()
        await client.admin.update_settings(topic_pending_max="full=3")
        with prometheus(cluster.nodes, tmp_path) as server:
            async with load(client):
                await server.until("sum(up) == 3")
                await server.until_each(map(asked, shown), began_s)
                master = await cluster.master()
                await cluster.kill_node(master)
                killed_s = time.time()
                await server.until(f'up{{instance="{master.metrics_address}"}} == 0')
                await server.until_each((asked(one, dead=master.metrics_address) for one in [*shown, *marks]), killed_s)
                await server.until('ALERTS{alertname="TickwheelNodeDown"}')
            assert not [one for one in empty if await server.has(asked(one), began_s)]
