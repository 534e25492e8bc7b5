"""What lies between the nodes: one listener before each node, and one way for each directed pair.

Owns the connections between nodes. Bytes of a way are passed on in order or not at all; a way can be stalled (bytes
wait, nothing is reset), cut (connections are reset, new ones refused), delayed with jitter, or throttled. What one
node says to another goes one way, over whichever connection; so one direction alone can be stopped. Every way counts
what faults did to it. A dialler is recognised by its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

CHUNK_BYTES = 64 << 10
CHUNKS_MAX = 64
"""Chunks of one direction of a connection that wait in the proxy; then the sender is held back."""


@dataclass(slots=True)
class Counts:
    """What passed a way, and what happened to it."""

    bytes: int = 0
    held_bytes: int = 0
    """Waited because the way was stalled."""
    late_bytes: int = 0
    """Delayed or throttled."""
    reset: int = 0
    """Connections reset or refused."""


@dataclass(slots=True)
class Way:
    """From one node to another. Change the fields while it runs; `release` wakes what was stalled."""

    source: str
    target: str
    stalled: bool = False
    cut: bool = False
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    bytes_per_s: int = 0
    """0: as fast as it goes."""
    counts: Counts = field(default_factory=Counts)
    _open: asyncio.Event = field(default_factory=asyncio.Event)
    _free_s: float = 0.0

    def __post_init__(self) -> None:
        self._open.set()

    @property
    def name(self) -> str:
        return f"{self.source}>{self.target}"

    def stall(self) -> None:
        """Nothing passes until `release`."""
        self.stalled = True
        self._open.clear()

    def release(self) -> None:
        """All as it was."""
        self.stalled = self.cut = False
        self.delay_ms = self.jitter_ms = 0.0
        self.bytes_per_s = 0
        self._open.set()

    def due_s(self, now_s: float, size: int, rng: random.Random) -> float:
        """When bytes that came now may go on."""
        due = now_s
        if self.delay_ms or self.jitter_ms:
            due += (self.delay_ms + rng.random() * self.jitter_ms) / 1_000
        if self.bytes_per_s:
            self._free_s = due = max(due, self._free_s) + size / self.bytes_per_s
        if due > now_s:
            self.counts.late_bytes += size
        return due

    async def passable(self, size: int) -> None:
        """Until the way is not stalled."""
        if self.stalled:
            self.counts.held_bytes += size
        await self._open.wait()


class _Connection:
    """One connection that `dialler` opened to `target`."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.writers = (near, far)

    def abort(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class PeerProxies:
    """All listeners and ways of a cluster."""

    def __init__(self, node_ids: list[str], recognise: Callable[[int, int], str | None], seed: int) -> None:
        """`recognise(port, remote_port)`: the node that connected from that port to that port."""
        self._recognise = recognise
        self._rng = random.Random(seed)
        self.ways = {(a, b): Way(a, b) for a in node_ids for b in node_ids if a != b}
        self._servers: list[asyncio.Server] = []
        self._connections: dict[_Connection, tuple[str, str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, target: str, address: str, behind: str) -> None:
        """Stand before node `target`: listen at `address`, pass on to `behind`."""
        host, _, port = address.rpartition(":")

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                await self._serve(target, behind, reader, writer)
            finally:
                self._tasks.discard(task)
                writer.transport.abort()

        self._servers.append(await asyncio.start_server(accepted, host, int(port)))

    def ways_of(self, node_id: str, *, out: bool = True, into: bool = True) -> list[Way]:
        """The ways from and to a node."""
        return [
            way for way in self.ways.values() if (out and way.source == node_id) or (into and way.target == node_id)
        ]

    def cut(self, ways: list[Way]) -> None:
        """Reset the connections of these ways and refuse new ones until they are released."""
        for way in ways:
            way.cut = True
        named = {(way.source, way.target) for way in ways}
        for connection, (dialler, target) in list(self._connections.items()):
            if (dialler, target) in named or (target, dialler) in named:
                way = self.ways[dialler, target]
                way.counts.reset += 1
                connection.abort()

    def release_all(self) -> None:
        """No fault any more."""
        for way in self.ways.values():
            way.release()

    async def stop(self) -> None:
        """Idempotent."""
        for server in self._servers:
            server.close()
        for connection in list(self._connections):
            connection.abort()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(
        self, target: str, behind: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        own_port = writer.get_extra_info("sockname")[1]
        dialler = self._recognise(writer.get_extra_info("peername")[1], own_port)
        if dialler is None or dialler == target:
            return
        forth, back = self.ways[dialler, target], self.ways[target, dialler]
        if forth.cut or back.cut:
            forth.counts.reset += 1
            return
        host, _, port = behind.rpartition(":")
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            return  # the node is not there: its peer sees the connection end, as without a proxy
        connection = _Connection(writer, far_writer)
        self._connections[connection] = (dialler, target)
        pumps = [
            asyncio.ensure_future(self._pump(reader, far_writer, forth)),
            asyncio.ensure_future(self._pump(far_reader, writer, back)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._connections.pop(connection, None)
            connection.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way) -> None:
        """Pass on until either end is gone."""
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(CHUNKS_MAX)
        sending = asyncio.ensure_future(self._send(waiting, writer, way))
        try:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(CHUNK_BYTES):
                    way.counts.bytes += len(data)
                    await waiting.put((way.due_s(time.monotonic(), len(data), self._rng), data))
            await waiting.put((0.0, b""))
            await asyncio.gather(sending)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _send(self, waiting: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, way: Way) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                due_s, data = await waiting.get()
                pause_s = due_s - time.monotonic()
                if pause_s > 0:
                    await asyncio.sleep(pause_s)
                await way.passable(len(data))
                if not data:
                    return
                writer.write(data)
                await writer.drain()
