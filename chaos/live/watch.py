"""The supervisor's view of the nodes: asks them over the public API and records their answers.

Owns one status stream a node, on a way that no fault spoils, and the newest status of each. Records:

| k | fields |
|---|---|
| status | node, life, role, state, term, master, lease; cursor [due, index], tick and synced [tick, local]; applied,
  uncommitted (entries of its log), pending, ready; clock (ms ahead of true time), error (how far the node says that
  may be off, ms), agreed (whether the clocks agree, in its words); lag (of its loop, ms) |
| silent | node, life: the stream broke |
| memory | node, bytes: memory of its process that is no file's |
| cpu | node, ms, waited: of `ms`, the node's loop was ready but had no processor for `waited` ms |

A stream that breaks or says nothing is part of the picture, not an error.
"""

from __future__ import annotations

import asyncio
import math
import time

import grpc

from tickwheel.chaos.live.cluster import ChaosCluster, anonymous_bytes, waited_ms
from tickwheel.chaos.live.history import HistoryWriter, TrueTime
from tickwheel.node.local_cluster import LocalNode
from tickwheel.proto import admin_pb2
from tickwheel.proto.admin_pb2_grpc import AdminStub

INTERVAL_MS = 50
AGAIN_S = 0.1
PROCESSORS_S = 0.5
FRESH_S = 0.4
"""A status older than this says nothing about now."""


class Watch:
    """Start with `start`, end with `stop`."""

    def __init__(self, cluster: ChaosCluster, history: HistoryWriter, time_of_run: TrueTime) -> None:
        self._cluster = cluster
        self._history = history
        self._time = time_of_run
        self._tasks: list[asyncio.Task[None]] = []
        self._newest: dict[str, tuple[float, admin_pb2.NodeStatus]] = {}
        self._lives: dict[str, int] = {}
        """In which life each was heard last."""

    def start(self) -> None:
        """Watch all nodes."""
        self._tasks = [asyncio.create_task(self._watch(node)) for node in self._cluster.nodes]
        self._tasks.append(asyncio.create_task(self._watch_processors()))

    async def stop(self) -> None:
        """Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def master(self) -> LocalNode | None:
        """The node of the newest term whose fresh status says that it leads; None if there is none."""
        now_s = time.monotonic()
        leading = [
            status
            for at_s, status in self._newest.values()
            if now_s - at_s < FRESH_S and status.role == admin_pb2.MASTER and status.lease_held
        ]
        if not leading:
            return None
        return self._cluster.node(max(leading, key=lambda status: status.term).node_id)

    def heard(self, node: LocalNode) -> tuple[admin_pb2.NodeStatus, float] | None:
        """(status, ms by which its time was ahead of true time at its arrival) of the node's present life. None without
        a fresh status."""
        at_s, status = self._newest.get(node.node_id, (-math.inf, None))
        of_this_life = self._lives.get(node.node_id) == self._cluster.lives[node.node_id]
        if status is None or not of_this_life or time.monotonic() - at_s >= FRESH_S:
            return None
        return status, status.clock_ms - self._time.now_ms() + (time.monotonic() - at_s) * 1_000

    async def _watch(self, node: LocalNode) -> None:
        options = [
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.min_reconnect_backoff_ms", 50),
            ("grpc.max_reconnect_backoff_ms", 100),
        ]
        async with grpc.aio.insecure_channel(node.client_address, options=options) as channel:
            stub = AdminStub(channel)
            while True:
                call = stub.WatchStatus(admin_pb2.WatchStatusRequest(interval_ms=INTERVAL_MS))
                life = self._cluster.lives[node.node_id]
                heard = False
                try:
                    async for status in call:
                        heard = True
                        self._newest[node.node_id] = (time.monotonic(), status)
                        self._lives[node.node_id] = life
                        self._write(status, life)
                except grpc.aio.AioRpcError:
                    if heard:
                        self._history.write("silent", node=node.node_id, life=life)
                finally:
                    call.cancel()
                await asyncio.sleep(AGAIN_S)

    async def _watch_processors(self) -> None:
        """Record memory and waits for a processor: a node without a processor cannot lead."""
        before: dict[int, tuple[float, float]] = {}
        while True:
            found = {}
            for node in self._cluster.nodes:
                in_all_ms = waited_ms(node.pid) if node.pid is not None else None
                if node.pid is None or in_all_ms is None:
                    continue
                now_ms = time.monotonic() * 1_000
                found[node.pid] = (now_ms, in_all_ms)
                if (held := anonymous_bytes(node.pid)) is not None:
                    self._history.write("memory", node=node.node_id, bytes=held)
                if node.pid in before:
                    last_ms, last_waited_ms = before[node.pid]
                    passed, waited = round(now_ms - last_ms), round(in_all_ms - last_waited_ms)
                    self._history.write("cpu", node=node.node_id, ms=passed, waited=waited)
            before = found
            await asyncio.sleep(PROCESSORS_S)

    def _write(self, status: admin_pb2.NodeStatus, life: int) -> None:
        self._history.write(
            "status",
            node=status.node_id,
            life=life,
            role=admin_pb2.Role.Name(status.role),
            state=admin_pb2.NodeState.Name(status.state).removeprefix("NODE_"),
            term=status.term,
            master=status.master_id,
            lease=status.lease_held,
            cursor=[status.cursor_due_ms, status.cursor_index],
            tick=[status.tick, status.local_index],
            synced=[status.synced_tick, status.synced_local_index],
            applied=status.applied_index,
            uncommitted=status.last_index - min(status.commit_index, status.last_index),
            pending=status.pending,
            ready=status.ready,
            clock=round(status.clock_ms - self._time.now_ms()),
            error=round(status.clock_error_ms, 1),
            agreed=admin_pb2.ClockState.Name(status.clock_state).removeprefix("CLOCK_"),
            lag=status.loop_lag_ms,
        )
