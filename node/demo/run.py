"""Runs the demonstration: cluster, schedule, consume, kill, restart, report.

Owns the order of events. The consumer's clock is this machine's, the same as the nodes'.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tickwheel.client import AsyncClient, Consumer, NodeRole, NodeStatus
from tickwheel.client.errors import Fault
from tickwheel.node.demo.flights import Flight, compressed, flights_of
from tickwheel.node.demo.report import Tally
from tickwheel.node.local_cluster import LocalCluster, LocalNode

TOPIC = "departures"
GROUP = "travellers"
START_MS = 8_000
"""Reminders begin so long after scheduling began: it ends before."""
WAIT_S_MAX = 60.0
"""So long after the last due time a missing reminder is waited for: longer than a lease."""
LEASE_MS = 10_000
BATCH = 1_000
STATUS_PERIOD_S = 0.02
VIEW_PERIOD_S = 0.1
LINES = 8


@dataclass(slots=True)
class Events:
    """The loss of the master."""

    killed_s: float = 0.0
    killed: str = ""
    new_master: str = ""
    without_master_ms: int = 0
    first_delivery_ms: int = 0
    """From the kill to the first delivery by the new master."""
    restarted: bool = False


def now_ms() -> int:
    """This machine's wall clock."""
    return time.time_ns() // 1_000_000


class Demo:
    """One run."""

    def __init__(self, directory: Path, *, month: int, span_s: float, console: Console, live: bool) -> None:
        self._directory = directory
        self._month = month
        self._span_ms = round(span_s * 1_000)
        self._console = console
        self._live = live
        self._lines: deque[str] = deque(maxlen=LINES)
        self._statuses: dict[str, NodeStatus | Fault] = {}
        self._flights: list[Flight] = []
        self.events = Events()
        self.tally = Tally([])

    async def run(self) -> Tally:
        """The whole demonstration; cleans its processes up whatever happens."""
        self._flights = flights_of(self._month)
        say = self._console.print
        say(f"{len(self._flights):,} flights from New York; starting three nodes in {self._directory}")
        cluster = LocalCluster(self._directory, 3, cluster_id="demo")
        async with cluster:
            client = cluster.client()
            master = await cluster.master()
            say(f"master is {master.node_id}; the month becomes {self._span_ms / 1000:g} s")
            start_ms = now_ms() + START_MS
            self.tally = Tally(compressed(self._flights, start_ms, self._span_ms))
            consumer = client.consumer(GROUP, TOPIC, lease=timedelta(milliseconds=LEASE_MS), name="demo")
            tasks = [
                asyncio.ensure_future(self._consume(consumer)),
                asyncio.ensure_future(self._watch(cluster)),
                asyncio.ensure_future(self._break(cluster, start_ms)),
            ]
            try:
                await self._schedule(client)
                say(f"{self.tally.scheduled:,} reminders are safe on a majority")
                await self._until_done(start_ms, tasks)
            finally:
                await consumer.close()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return self.tally

    async def _schedule(self, client: AsyncClient) -> None:
        async with client.producer() as producer:
            futures = []
            for first in range(0, len(self._flights), BATCH):
                part = range(first, min(first + BATCH, len(self._flights)))
                payloads = [b"%d " % place + self._flights[place].payload() for place in part]
                futures.append(
                    await producer.schedule_columns(
                        TOPIC,
                        np.array([self.tally.due_ms[place] for place in part], np.int64),
                        np.fromiter(map(len, payloads), np.uint32, len(payloads)),
                        b"".join(payloads),
                    )
                )
            for receipt in await asyncio.gather(*futures):
                self.tally.scheduled += len(receipt)

    async def _consume(self, consumer: Consumer) -> None:
        async for batch in consumer.batches():
            arrived_ms = now_ms()
            for payload in batch.payloads():
                place, _, text = payload.partition(b" ")
                self.tally.take(int(place), arrived_ms)
            if self.events.killed_s and not self.events.first_delivery_ms and consumer.term > self._term_killed:
                self.events.first_delivery_ms = round((time.monotonic() - self.events.killed_s) * 1_000)
            self._lines.append(text.decode())
            batch.ack()

    _term_killed = 0

    async def _watch(self, cluster: LocalCluster) -> None:
        while True:
            self._statuses = await cluster.statuses(0.5)
            await asyncio.sleep(0.2)

    async def _break(self, cluster: LocalCluster, start_ms: int) -> None:
        """SIGKILL the master half way, and start it again once another one serves."""
        await asyncio.sleep(max(0.0, (start_ms + self._span_ms / 2 - now_ms()) / 1_000))
        victim = await cluster.master()
        status = (await cluster.statuses())[victim.node_id]
        self._term_killed = status.term if isinstance(status, NodeStatus) else 0
        self.events.killed = victim.node_id
        self.events.killed_s = time.monotonic()
        await cluster.kill_node(victim)
        if not self._live:
            self._console.print(f"killed the master {victim.node_id} (SIGKILL)")
        new = await self._next_master(cluster, victim)
        self.events.without_master_ms = round((time.monotonic() - self.events.killed_s) * 1_000)
        self.events.new_master = new
        if not self._live:
            self._console.print(f"{new} is master after {self.events.without_master_ms} ms")
        await asyncio.sleep(min(3.0, self._span_ms / 8_000))
        cluster.start_node(victim)
        await cluster.wait_ready()
        self.events.restarted = True

    async def _next_master(self, cluster: LocalCluster, victim: LocalNode) -> str:
        while True:
            for node_id, status in (await cluster.statuses(0.3)).items():
                if (
                    isinstance(status, NodeStatus)
                    and node_id != victim.node_id
                    and status.role is NodeRole.MASTER
                    and status.lease_held
                    and status.term > self._term_killed
                ):
                    return node_id
            await asyncio.sleep(STATUS_PERIOD_S)

    async def _until_done(self, start_ms: int, tasks: list[asyncio.Task[None]]) -> None:
        end_ms = start_ms + self._span_ms
        view = Live(self._view(start_ms), console=self._console, auto_refresh=False) if self._live else None
        with view or contextlib.nullcontext():
            while True:
                await asyncio.sleep(VIEW_PERIOD_S)
                if view is not None:
                    view.update(self._view(start_ms), refresh=True)
                for task in tasks:
                    if task.done() and task.exception() is not None:
                        task.result()
                over = now_ms() > end_ms
                if over and self.tally.complete and self.events.restarted:
                    return
                if now_ms() > end_ms + WAIT_S_MAX * 1_000:
                    return

    # -- what is shown

    def _view(self, start_ms: int) -> Group:
        tally = self.tally
        bar = Table.grid()  # a bar alone ends without a new line
        bar.add_row(ProgressBar(total=max(1, len(self._flights)), completed=len(tally.lateness_ms), width=60))
        nodes = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        for node_id, status in sorted(self._statuses.items()):
            if isinstance(status, Fault):
                nodes.add_row(Text(node_id, "red"), Text("down", "red"))
                continue
            master = status.role is NodeRole.MASTER
            nodes.add_row(
                Text(node_id, "green" if master else ""),
                Text(status.role, "bold green" if master else ""),
                f"term {status.term}",
                f"{status.pending:,} pending",
            )
        left_s = (start_ms - now_ms()) / 1_000
        head = f"first reminder in {left_s:.0f} s" if left_s > 0 else f"{len(tally.lateness_ms):,} delivered"
        late = f"p50 {tally.lateness(50):.0f} ms, p99 {tally.lateness(99):.0f} ms late, {tally.duplicates} repeated"
        events = []
        if self.events.killed:
            events.append(Text(f"master {self.events.killed} killed (SIGKILL)", "bold red"))
        if self.events.new_master:
            waited = f"{self.events.new_master} is master after {self.events.without_master_ms} ms"
            events.append(Text(waited, "bold green"))
        if self.events.restarted:
            events.append(Text(f"{self.events.killed} is back", "green"))
        lines = [Text(line, "dim") for line in self._lines]
        return Group(nodes, Text(head, "bold"), bar, Text(late), *events, *lines)
