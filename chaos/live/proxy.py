"""What lies between the nodes: one listener before each node, and one way for each directed pair.

Owns the connections between nodes, and between clients and nodes if it stands there too: all clients are one end
then. Bytes of a way are passed on in order or not at all; a way can be stalled (bytes wait, nothing is reset), cut
(connections are reset, new ones refused), delayed with jitter, or throttled. What one node says to another goes one
way, over whichever connection; so one direction alone can be stopped. Every way counts what faults did to it. A node
that dials is recognised by its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

CLIENTS = "clients"
"""The other end of a way that is no node."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Spoiling:
    """What one fault does to a way; several add up."""

    stalled: bool = False
    """Nothing passes, nothing is reset."""
    cut: bool = False
    """Connections are reset and new ones refused."""
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    """Up to so much more delay, by dice for each chunk."""
    bytes_per_s: int = 0
    """0: as fast as it goes."""


@dataclass(slots=True)
class Way:
    """From one node to another, as all that spoils it together leaves it."""

    source: str
    target: str
    counts: Counts = field(default_factory=Counts)
    _spoilt: list[Spoiling] = field(default_factory=list)
    _open: asyncio.Event = field(default_factory=asyncio.Event)
    _delay_ms: float = 0.0
    _jitter_ms: float = 0.0
    _bytes_per_s: int = 0
    _free_s: float = 0.0
    cut: bool = False

    def __post_init__(self) -> None:
        self._open.set()

    @property
    def name(self) -> str:
        return f"{self.source}>{self.target}"

    @property
    def passes(self) -> bool:
        """Whether anything gets through, however late."""
        return self._open.is_set() and not self.cut

    def spoil(self, spoiling: Spoiling) -> None:
        """From now on, until `mend`. To cut, use Proxies.spoil: it knows the connections."""
        self._spoilt.append(spoiling)
        self._settle()

    def mend(self, spoiling: Spoiling) -> None:
        """This one is over; nothing if it was over before."""
        if spoiling in self._spoilt:
            self._spoilt.remove(spoiling)
            self._settle()

    def mend_all(self) -> None:
        """As it was."""
        self._spoilt.clear()
        self._settle()

    def _settle(self) -> None:
        spoilt = self._spoilt
        self.cut = any(one.cut for one in spoilt)
        self._delay_ms = sum(one.delay_ms for one in spoilt)
        self._jitter_ms = sum(one.jitter_ms for one in spoilt)
        self._bytes_per_s = min((one.bytes_per_s for one in spoilt if one.bytes_per_s), default=0)
        if any(one.stalled for one in spoilt):
            self._open.clear()
        else:
            self._open.set()

    def due_s(self, now_s: float, size: int, rng: random.Random) -> float:
        """When bytes that came now may go on."""
        due = now_s
        if self._delay_ms or self._jitter_ms:
            due += (self._delay_ms + rng.random() * self._jitter_ms) / 1_000
        if self._bytes_per_s:
            self._free_s = due = max(due, self._free_s) + size / self._bytes_per_s
        if due > now_s:
            self.counts.late_bytes += size
        return due

    async def passable(self, size: int) -> None:
        """Until the way is not stalled."""
        if not self._open.is_set():
            self.counts.held_bytes += size
            await self._open.wait()


class _Connection:
    """One connection that `dialler` opened to `target`."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.writers = (near, far)

    def abort(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class Proxies:
    """All listeners and ways of a cluster."""

    def __init__(self, node_ids: list[str], recognise: Callable[[int, int], str | None], seed: int) -> None:
        """`recognise(port, remote_port)`: the node that connected from that port to that port."""
        self._recognise = recognise
        self._rng = random.Random(seed)
        ends = [*node_ids, CLIENTS]
        self.ways = {(a, b): Way(a, b) for a in ends for b in ends if a != b}
        self._servers: list[asyncio.Server] = []
        self._connections: dict[_Connection, tuple[str, str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

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

    def ways_of(self, node_id: str, *, clients: bool = False) -> list[Way]:
        """The ways from and to a node."""
        return [way for ends, way in self.ways.items() if node_id in ends and (clients or CLIENTS not in ends)]

    def between(self, some: Iterable[str], others: Iterable[str]) -> list[Way]:
        """The ways from any of some to any of the others, one direction."""
        return [self.ways[a, b] for a in some for b in others if a != b]

    def spoil(self, ways: list[Way], spoiling: Spoiling) -> None:
        """Do this to all of these ways, until `mend`."""
        for way in ways:
            way.spoil(spoiling)
        if spoiling.cut:
            self._reset(ways)

    def mend(self, ways: list[Way], spoiling: Spoiling) -> None:
        """End it."""
        for way in ways:
            way.mend(spoiling)

    def _reset(self, ways: list[Way]) -> None:
        named = {(way.source, way.target) for way in ways}
        for connection, (dialler, target) in list(self._connections.items()):
            if (dialler, target) in named or (target, dialler) in named:
                way = self.ways[dialler, target]
                way.counts.reset += 1
                connection.abort()

    def mend_all(self) -> None:
        """No fault any more."""
        for way in self.ways.values():
            way.mend_all()

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
