"""Whether a node's own work keeps its loop for longer than the lease of the master, so that mastership is lost.

Owns the probes: /livez of each node, which its loop answers, asked again and again from a thread for each. An answer is
late by what the loop was kept for. The nodes' histogram of loop lag would not do: it counts how late a tick begins, not
how long one takes. A busy machine makes answers late too, so the time in which the node's loop or the asking thread was
ready and had no processor is taken off, as the kernel counts it. What is left is the node's own.
"""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tickwheel.chaos.live.cluster import waited_ms
from tickwheel.node.local_cluster import LocalNode
from tickwheel.replication.config import RaftConfig

PAUSE_S = 0.05
PROBE_S = 30.0
LEASE_MS = RaftConfig().lease_ms
"""Of the master, as the nodes of a LocalCluster have it."""
NOTED_MS = 100
"""Shorter delays are not kept."""


@dataclass(frozen=True, slots=True)
class Delay:
    """A probe that was answered after more than NOTED_MS. `node_waited_ms`, `probe_waited_ms`: for a processor."""

    node_id: str
    from_s: float
    until_s: float
    node_waited_ms: float
    probe_waited_ms: float

    @property
    def own_ms(self) -> float:
        """What the node itself is to blame for."""
        return (self.until_s - self.from_s) * 1_000 - self.node_waited_ms - self.probe_waited_ms

    def __str__(self) -> str:
        return (
            f"{self.node_id} answered a probe after {(self.until_s - self.from_s) * 1_000:,.0f} ms. Its loop waited "
            f"{self.node_waited_ms:,.0f} ms of that for a processor, the probe {self.probe_waited_ms:,.0f} ms"
        )


class Probes:
    """One thread for each node, from `start` to `stop`."""

    def __init__(self, nodes: Sequence[LocalNode]) -> None:
        self.delays: list[Delay] = []
        """Since the last `take`."""
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(node,), daemon=True) for node in nodes]

    def start(self) -> None:
        """Start to ask."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ask no more. Idempotent."""
        self._stopped.set()

    def take(self) -> list[Delay]:
        """The delays since the last call."""
        taken, self.delays = self.delays, []
        return taken

    def _ask(self, node: LocalNode) -> None:
        own = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        while not self._stopped.wait(PAUSE_S):
            pid = node.pid
            if pid is None:
                return  # the other checks tell of it
            before = waited_ms(pid), _waited_ms(own), time.monotonic()
            try:
                with urllib.request.urlopen(f"http://{node.metrics_address}/livez", timeout=PROBE_S) as answer:
                    answer.read()
            except OSError:
                pass  # not alive, as it says itself, or gone: but it took this long to find out
            after = waited_ms(pid), _waited_ms(own), time.monotonic()
            if after[2] - before[2] > NOTED_MS / 1_000 and before[0] is not None and after[0] is not None:
                delay = Delay(node.node_id, before[2], after[2], after[0] - before[0], after[1] - before[1])
                self.delays.append(delay)


def _waited_ms(schedstat: Path) -> float:
    return int(schedstat.read_text(encoding="ascii").split()[1]) / 1e6
