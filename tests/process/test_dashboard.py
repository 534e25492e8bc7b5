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
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
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
VARIABLES = {"$job": "tickwheel-here", "$instance": ".*", "$__rate_interval": "8s"}
SOON_S = 60.0
HOUR_MS = 3_600_000


class Prometheus:
    """A server that scrapes every second and has the project's alerts."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/api/v1/"
        self.began_s = time.time()

    def _ask(self, method: str, **query: object) -> Any:
        with urllib.request.urlopen(f"{self._url}{method}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
            return json.load(answer)["data"]

    async def now(self, expression: str) -> list[dict[str, Any]]:
        """Series of an expression at this moment; none if the server does not answer yet."""
        try:
            return list((await asyncio.to_thread(self._ask, "query", query=expression))["result"])
        except OSError:
            return []

    async def until(self, expression: str) -> None:
        """Until the expression has a series."""
        async with asyncio.timeout(SOON_S):
            while True:
                if await self.now(expression):
                    return
                await asyncio.sleep(0.2)

    async def seen(self, expression: str) -> list[float]:
        """All values of all series since the beginning."""
        span = {"start": self.began_s, "end": time.time(), "step": 1}
        found = await asyncio.to_thread(self._ask, "query_range", query=expression, **span)
        return [float(value) for series in found["result"] for _, value in series["values"]]


@contextlib.contextmanager
def prometheus(nodes: list[LocalNode], directory: Path) -> Iterator[Prometheus]:
    """deploy/prometheus, with these targets and a scrape each second."""
    text = (
        (FOLDER / "prometheus.yml")
        .read_text(encoding="utf-8")
        .replace("15s", "1s")
        .replace("tickwheel-orders", "tickwheel-here")
    )
    targets = json.dumps([node.metrics_address for node in nodes])
    (directory / "prometheus.yml").write_text(re.sub(r"targets: .*", f"targets: {targets}", text), encoding="utf-8")
    shutil.copyfile(FOLDER / "alerts.yml", directory / "alerts.yml")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    options = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={address}"]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(["prometheus", *options], cwd=directory, stdout=log, stderr=log)
    try:
        yield Prometheus(address)
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


def asked(expression: str) -> str:
    """As Grafana asks it for all nodes of this cluster."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


async def test_every_panel_shows_the_loss_of_the_master(tmp_path: Path) -> None:
    """No query fails and each panel finds data; a new master leaves its mark, and the alert for a dead node begins."""
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    async with LocalCluster(tmp_path / "cluster", 3) as cluster:
        client = cluster.client()
        await client.admin.update_settings(topic_pending_max="full=3")
        with prometheus(cluster.nodes, tmp_path) as server:
            async with load(client):
                await server.until("sum(up) == 3")
                await server.until("sum(rate(tickwheel_delivered_messages_total[8s])) > 0")
                master = await cluster.master()
                await cluster.kill_node(master)
                other = f'instance!="{master.metrics_address}"'
                await server.until(f"sum(up) == 2 and sum(rate(tickwheel_delivered_messages_total{{{other}}}[8s])) > 0")
                await server.until('ALERTS{alertname="TickwheelNodeDown"}')
            empty, marks = [], []
            for panel in panels(board):
                values = [value for target in panel["targets"] for value in await server.seen(asked(target["expr"]))]
                if not values:
                    empty.append(panel["title"])
            for annotation in board["annotations"]["list"]:
                marks += await server.seen(asked(annotation["expr"])) if "expr" in annotation else []
    assert empty == list(WITHOUT_DATA)
    assert marks
