"""The cluster under chaos: real node processes below one directory, with a network between them and knobs at each.

Owns processes, network and knobs, and counts the lives of each node. Faults act through this; nobody else signals a
node.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tickwheel.chaos.live.dialers import dialer
from tickwheel.chaos.live.knobs import Effects, Knobs, read_effects, write_knobs
from tickwheel.chaos.live.network import CLIENTS, Network
from tickwheel.chaos.live.proxy import Proxies
from tickwheel.chaos.live.switch import Switch
from tickwheel.node.local_cluster import LocalCluster, LocalNode


class ChaosCluster(LocalCluster):
    """A LocalCluster whose nodes can be spoilt. Start and stop it like one."""

    def __init__(
        self,
        directory: Path,
        nodes: int,
        seed: int,
        config: Mapping[str, Mapping[str, object]] | None = None,
        *,
        clients_apart: bool = False,
        knobs: bool = True,
        switch: Switch | None = None,
    ) -> None:
        """`clients_apart`: proxies stand between clients and nodes as well. Without `knobs` the nodes are begun as
        always; their clocks and disks cannot be spoilt. With a `switch` the nodes, new ones, live in its namespaces,
        and their clients must be in the namespace of its clients."""
        self._switch = switch
        if switch is not None:
            config = {**(config or {}), "listen": {**(config or {}).get("listen", {}), "insecure": True}}
        super().__init__(
            directory,
            nodes,
            config=config,
            cluster_id="chaos",
            peers_apart=switch is None,
            clients_apart=clients_apart and switch is None,
        )
        self._proxies = Proxies([node.node_id for node in self.nodes], self._recognise, seed)
        self.network: Network = switch or self._proxies
        self._with_knobs = knobs or switch is not None
        self.lives = dict.fromkeys((node.node_id for node in self.nodes), 0)
        self.paused: set[str] = set()
        self.killed: set[str] = set()
        """Killed on purpose and not started again."""
        self.failing: set[str] = set()
        """Nodes whose disks were told to fail: they may end by themselves, and are left alone then."""
        self._knobs = {node.node_id: Knobs() for node in self.nodes}

    def _recognise(self, port: int, remote_port: int) -> str | None:
        pids = {node.node_id: node.pid for node in self.nodes if node.pid is not None}
        return dialer(port, remote_port, pids)

    def host(self, node_id: str) -> str:
        return super().host(node_id) if self._switch is None else self._switch.namespaces[node_id].address

    def command(self, node: LocalNode) -> list[str]:
        if not self._with_knobs:
            return super().command(node)
        command = [sys.executable, "-P", "-m", "tickwheel.chaos.live.node_start"]
        command += ["--config", str(node.config_file), "--knobs", str(self._knob_file(node))]
        command += ["--parent", str(os.getpid())]
        if self._switch is not None:
            command += ["--namespace", self._switch.namespaces[node.node_id].path]
        return command

    def start_node(self, node: LocalNode) -> None:
        if not node.running:
            self.killed.discard(node.node_id)
            self.lives[node.node_id] += 1
            super().start_node(node)

    @property
    def node_ids(self) -> list[str]:
        return [node.node_id for node in self.nodes]

    async def start(self) -> None:
        """The network, then nodes, until all are ready."""
        if self._switch is not None:
            self._switch.start()
        for node in self.nodes:
            if node.peer_advertised:
                await self._proxies.listen(node.node_id, node.peer_dialled, node.peer_address)
            if node.client_advertised:
                await self._proxies.listen(node.node_id, node.client_dialled, node.client_address, CLIENTS)
        await super().start()

    async def stop(self) -> list[LocalNode]:
        """Stop everything in order; idempotent. A node that does not stop is killed, as in LocalCluster."""
        self.network.heal_all()
        for node in self.nodes:
            self.resume(node)
        try:
            return await super().stop()
        finally:
            self.kill_all()
            await self.network.stop()

    def kill_all(self) -> None:
        """Kill all nodes at once, in any state; for an end that cannot wait."""
        for node in self.nodes:
            if node.process is not None and node.running:
                node.process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    node.process.wait(5.0)

    def died(self) -> list[LocalNode]:
        """Nodes whose process has ended although nobody killed it and nothing excuses it."""
        excused = self.killed | self.failing
        return [
            node for node in self.nodes if node.process is not None and not node.running and node.node_id not in excused
        ]

    def majority_connected(self) -> bool:
        """Whether more than half of the nodes run, have room on their disks and reach each other."""
        able = [
            node.node_id
            for node in self.nodes
            if node.running
            and node.node_id not in self.paused | self.failing
            and not self._knobs[node.node_id].disk_full
        ]
        needed = len(self.nodes) // 2 + 1
        ways = self.network.ways
        return any(
            all(ways[a, b].passes and ways[b, a].passes for a, b in itertools.combinations(some, 2))
            for some in itertools.combinations(able, needed)
        )

    # -- signals

    async def kill(self, node: LocalNode) -> None:
        """SIGKILL, and wait until it is gone."""
        self.killed.add(node.node_id)
        self.paused.discard(node.node_id)
        await self.kill_node(node)

    def pause(self, node: LocalNode) -> None:
        """SIGSTOP."""
        self.signal_node(node, signal.SIGSTOP)
        self.paused.add(node.node_id)

    def resume(self, node: LocalNode) -> None:
        """SIGCONT; nothing if it runs."""
        if node.node_id in self.paused:
            self.paused.discard(node.node_id)
            self.signal_node(node, signal.SIGCONT)

    async def is_stopped(self, node: LocalNode) -> bool:
        """Whether the kernel says, within a second, that its process is stopped."""
        return await within(1.0, lambda: node.pid is not None and _state_of(node.pid) == "T")

    async def has_ended(self, node: LocalNode, within_s: float) -> bool:
        """Whether its process is gone, or goes in time."""
        return await within(within_s, lambda: not node.running)

    # -- knobs

    def _knob_file(self, node: LocalNode) -> Path:
        return node.directory / "knobs.json"

    def turn(self, node: LocalNode, **knobs: int) -> int:
        """Turn the given knobs of a node. Returns the number of the change."""
        before = self._knobs[node.node_id]
        changes: dict[str, Any] = dict(knobs)
        turned = replace(before, turn=before.turn + 1, **changes)
        self._knobs[node.node_id] = turned
        write_knobs(self._knob_file(node), turned)
        return turned.turn

    async def has_read(self, node: LocalNode, turn: int, within_s: float) -> bool:
        """Whether its process goes by this change of its knobs, or is gone, in time."""

        def has() -> bool:
            effects = self.effects(node)
            return not node.running or (effects.pid == node.pid and effects.turn >= turn)

        return await within(within_s, has)

    def knobs(self, node: LocalNode) -> Knobs:
        """The knobs of a node as last turned."""
        return self._knobs[node.node_id]

    def effects(self, node: LocalNode) -> Effects:
        """The effects that the node has reported of its knobs."""
        return read_effects(self._knob_file(node))


async def within(seconds: float, holds: Callable[[], bool]) -> bool:
    """Whether it holds, or does in time."""
    end_s = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < end_s:  # noqa: ASYNC110  # only asking tells
        await asyncio.sleep(0.01)
    return held


def _state_of(pid: int) -> str:
    """The kernel's letter for the state of a process."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    return stat.rpartition(")")[2].split()[0]


def anonymous_bytes(pid: int) -> int | None:
    """Memory of a process that is no file's (RssAnon), as the kernel counts; None if gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")), None)


def waited_ms(pid: int) -> float | None:
    """How long the main thread of a process has waited for a processor in all, as the kernel counts; None if gone."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e6
    except (OSError, IndexError):
        return None
