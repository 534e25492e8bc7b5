"""Whether mastership stays while nobody asks for a handover, and whether a node itself is to blame if it does not.

Owns the looks at the nodes' metrics pages and what follows from them. A slice is work that kept a node's loop from what
was due. It costs the mastership if it is longer than the lease of the master. A busy machine makes slices too: the
kernel counts how long the loop's thread was ready and had no processor, and only the rest is the node's own.
"""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

from tickwheel.chaos.live.cluster import waited_ms
from tickwheel.node.local_cluster import LocalCluster, LocalNode
from tickwheel.node.metrics import TIME_BOUNDS_MS
from tickwheel.replication.config import RaftConfig

LOOKS_S = 0.2
PAGE_S = 5.0
LEASE_MS = RaftConfig().lease_ms
"""Of the master, as the nodes of a LocalCluster have it."""
LONG_MS = max(bound for bound in TIME_BOUNDS_MS if bound <= LEASE_MS)
"""Slices above this are counted: the nodes' histogram has no bound at the lease."""

_LATE = "tickwheel_loop_lag_seconds"
_VALUE = re.compile(
    rf'^(tickwheel_term|{_LATE}_(?:sum|count|bucket))(?:\{{.*?(?:le="([^"]+)")?\}})? (\S+)$', re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Look:
    """A node at one moment. `slices` are those above LONG_MS; they, `late_ms` and `waited_ms` count from its start."""

    at_s: float
    term: int
    slices: int
    late_ms: float
    waited_ms: float


@dataclass(frozen=True, slots=True)
class Slice:
    """A slice above LONG_MS, somewhere between two moments. `late_ms`: no less than its length."""

    from_s: float
    until_s: float
    late_ms: float
    waited_ms: float

    @property
    def own_ms(self) -> float:
        """What is left of it without the time in which the machine had no processor for the loop."""
        return self.late_ms - self.waited_ms

    def __str__(self) -> str:
        return f"{self.late_ms:.0f} ms, of which it waited {self.waited_ms:.0f} ms for a processor"


def read(page: str, at_s: float, waited_ms: float) -> Look:
    """What a metrics page shows. Raises KeyError if it lacks a figure."""
    values = {(name, bound): float(value) for name, bound, value in _VALUE.findall(page)}
    short = next(
        value
        for (name, bound), value in values.items()
        if name == f"{_LATE}_bucket" and float(bound) == LONG_MS / 1_000
    )
    return Look(
        at_s,
        int(values["tickwheel_term", ""]),
        int(values[f"{_LATE}_count", ""] - short),
        1_000 * values[f"{_LATE}_sum", ""],
        waited_ms,
    )


def slices(looks: Sequence[Look]) -> list[Slice]:
    """The slices between looks at one node. A page that is built right after a slice may not count it yet, so one may
    lie before the last look that does not show it."""
    found = []
    for place in range(1, len(looks)):
        last, first = looks[place], looks[max(0, place - 2)]
        if last.slices > looks[place - 1].slices:
            found.append(Slice(first.at_s, last.at_s, last.late_ms - first.late_ms, last.waited_ms - first.waited_ms))
    return found


class MastershipWatch:
    """Looks at all nodes of a cluster, every LOOKS_S from `start` to `stop`."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._looks: dict[str, list[Look]] = {node.node_id: [] for node in cluster.nodes}
        self._looking = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to look."""
        self._task = asyncio.create_task(self._look_always())

    async def stop(self) -> None:
        """Stop; raises what went wrong with looking, if anything did."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    async def look(self) -> None:
        """Look at each node once. One that does not answer is looked at the next time."""
        async with self._looking:
            await asyncio.gather(*(self._look_at(node) for node in self._cluster.nodes))

    @property
    def term(self) -> int:
        """The highest that a node has shown."""
        return max((looks[-1].term for looks in self._looks.values() if looks), default=0)

    def take(self) -> dict[str, list[Slice]]:
        """The slices by node since the last call."""
        found = {node_id: slices(looks) for node_id, looks in self._looks.items()}
        for looks in self._looks.values():
            del looks[:-2]
        return {node_id: some for node_id, some in found.items() if some}

    async def _look_always(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOKS_S)

    async def _look_at(self, node: LocalNode) -> None:
        try:
            page = await asyncio.to_thread(_page, node.metrics_address)
        except OSError:
            return  # the other checks tell of a node that is gone
        waited = waited_ms(node.pid) if node.pid is not None else None
        if waited is not None:
            self._looks[node.node_id].append(read(page, time.monotonic(), waited))


def _page(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=PAGE_S) as answer:
        text: str = answer.read().decode("utf-8")
        return text
