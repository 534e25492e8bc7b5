"""A TCP proxy between the nodes: one listener before each node.

Owns the connections between nodes, and between clients and nodes if it stands there too: all clients are one end
then. Bytes of a way are passed on in order or not at all. A node that dials is recognised by its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from tickwheel.chaos.live.network import Counts, Network, Way

CHUNK_BYTES = 64 << 10
CHUNKS_MAX = 64
"""Chunks of one direction of a connection that wait in the proxy; then the sender is held back."""


class _Connection:
    """One connection that `dialler` opened to `target`."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.writers = (near, far)

    def abort(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class Proxies(Network):
    """All listeners and ways of a cluster."""

    held_unit = "bytes held"

    def __init__(self, node_ids: list[str], recognise: Callable[[int, int], str | None], seed: int) -> None:
        """`recognise(port, remote_port)`: the node that connected from that port to that port."""
        super().__init__(node_ids, seed)
        self._recognise = recognise
        self._servers: list[asyncio.Server] = []
        self._connections: dict[_Connection, tuple[str, str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def held(self, counts: Counts) -> int:
        return counts.held_bytes

    async def listen(self, target: str, address: str, behind: str, dialler: str | None = None) -> None:
        """Stand before node `target`: listen at `address`, pass on to `behind`. Without `dialler` it is found out."""
        host, _, port = address.rpartition(":")

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                await self._serve(dialler, target, behind, reader, writer)
            finally:
                self._tasks.discard(task)
                writer.transport.abort()

        self._servers.append(await asyncio.start_server(accepted, host, int(port)))

    def _cut(self, ways: list[Way]) -> None:
        named = {(way.source, way.target) for way in ways}
        for connection, (dialler, target) in list(self._connections.items()):
            if (dialler, target) in named or (target, dialler) in named:
                way = self.ways[dialler, target]
                way.counts.reset += 1
                connection.abort()

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
        self, known: str | None, target: str, behind: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        own_port = writer.get_extra_info("sockname")[1]
        dialler = known or self._recognise(writer.get_extra_info("peername")[1], own_port)
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
