"""Connections: how many there may be on a port, which go when there are more, and how much one caller may ask at once.

gRPC accepts whoever calls and knows no limit. The guard looks at the process's sockets once a second and shuts those on
a port that are too many: of the address with the most, those that never had a call first, busy ones last, the newest
first. In between, accepting ends at the limit of descriptors; those above are kept for files (storage/descriptors.py),
so a burst costs no file its descriptor. Connections that stay idle or silent gRPC ends itself (services.py).

On the loop's thread.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import grpc

from tickwheel.node.core.failure import Failure, limit_reached
from tickwheel.node.server.errors import abort
from tickwheel.storage.descriptors import DescriptorReserve

SPARE_DESCRIPTORS = 32
"""Left free below the limit: for connections to and from peers, metrics, and files opened without the reserve."""
CONNECTIONS_LEAST = 8
"""Allowed on the client port however few descriptors there are."""
PEER_CONNECTIONS_MAX = 64
"""On the peers' port: each member has one, and a second while it copies a checkpoint."""
_DIRECTORY = "/proc/self/fd"
"""Read without pathlib, which takes three times as long for each of thousands of descriptors."""
_MAPPED = "::ffff:"

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Connection:
    """A socket of this process that was accepted. `number`: the socket's, rising with time."""

    descriptor: int
    number: int
    port: int
    host: str
    caller: str
    """The other side as gRPC names it."""


def too_many(connections: Iterable[Connection], worth: Callable[[str], int], most: int) -> list[Connection]:
    """Which have to go so that `most` are left. `worth` of a caller: those with the least go first. Pure."""
    left: dict[str, list[Connection]] = {}
    for connection in sorted(connections, key=lambda c: (-worth(c.caller), c.number)):
        left.setdefault(connection.host, []).append(connection)
    surplus = sum(map(len, left.values())) - most
    gone: list[Connection] = []
    while len(gone) < surplus:
        # Down to what the next one has, so that all with the most give up alike.
        largest, *others = sorted(left.values(), key=len, reverse=True)
        count = min(surplus - len(gone), max(1, len(largest) - (len(others[0]) if others else 0)))
        gone += reversed(largest[-count:])
        del largest[-count:]
    return gone


def caller_of(host: str, port: int) -> str:
    """The other side of a connection as gRPC names it (`context.peer()`)."""
    host = host.removeprefix(_MAPPED)
    return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"


class ConnectionGuard:
    """See the module. One per node."""

    def __init__(self, descriptors: DescriptorReserve, connections_max: int, caller_calls_max: int) -> None:
        self._descriptors = descriptors
        self._caller_calls_max = caller_calls_max
        self._connections_max = connections_max
        self._client_port = self._peer_port = 0
        self._calls: Counter[str] = Counter()
        """Under way, by connection."""
        self._hosts: Counter[str] = Counter()
        """Under way, by address of the caller."""
        self._used: set[str] = set()
        """Connections that had a call; those that are gone leave with the next look."""
        self._users: dict[str, set[str]] = {}
        """Connections over which a user has called; those that are gone leave with the next look."""
        self._others: dict[int, int] = {}
        """Sockets that were accepted on neither port: descriptor to number."""
        self.open = 0
        """Connections of clients at the last look."""
        self.most = connections_max
        """How many were allowed then."""
        self.descriptors_open = 0
        self.shut = 0
        """Connections ended because there were too many."""

    def watch(self, client_port: int, peer_port: int) -> None:
        """Both are bound."""
        self._client_port, self._peer_port = client_port, peer_port

    def look(self) -> int:
        """Shut what is too much; returns how many that were."""
        names = self._descriptors.run_briefly(lambda: os.listdir(_DIRECTORY))  # noqa: PTH208
        found = [connection for name in names if (connection := self._connection(int(name))) is not None]
        clients = [connection for connection in found if connection.port == self._client_port]
        peers = [connection for connection in found if connection.port == self._peer_port]
        others = len(names) - len(clients) - max(0, len(peers) - PEER_CONNECTIONS_MAX)
        self.descriptors_open, self.open = len(names), len(clients)
        self.most = max(
            CONNECTIONS_LEAST, min(self._connections_max, self._descriptors.limit - others - SPARE_DESCRIPTORS)
        )
        self._used.intersection_update(connection.caller for connection in found)
        for name, callers in list(self._users.items()):
            callers &= self._used
            if not callers:
                del self._users[name]
        victims = too_many(clients, self._worth, self.most) + too_many(peers, self._worth, PEER_CONNECTIONS_MAX)
        for connection in victims:
            self._shut(connection)
        self.shut += len(victims)
        return len(victims)

    def admit(self, user: str, caller: str, connections_max: int) -> Failure | None:
        """A user calls over a connection; the refusal if that is one more than its quota allows."""
        callers = self._users.setdefault(user, set())
        if caller not in callers:
            if len(callers) >= connections_max:
                return limit_reached("quotas.connections_max", connections_max, 1_000)
            callers.add(caller)
        return None

    def _worth(self, caller: str) -> int:
        return 2 if self._calls[caller] else int(caller in self._used)

    def _connection(self, descriptor: int) -> Connection | None:
        try:
            kind, _, number = os.readlink(f"{_DIRECTORY}/{descriptor}").partition(":[")  # noqa: PTH115
        except OSError:
            return None
        if kind != "socket":
            return None
        place = int(number.rstrip("]"))
        if self._others.get(descriptor) == place:
            return None
        with contextlib.suppress(OSError):
            borrowed = socket.socket(fileno=descriptor)
            try:
                if borrowed.family in (socket.AF_INET, socket.AF_INET6):
                    port = int(borrowed.getsockname()[1])
                    host, from_port, *_ = borrowed.getpeername()
                    if port in (self._client_port, self._peer_port):
                        return Connection(descriptor, place, port, host, caller_of(host, from_port))
            finally:
                borrowed.detach()
        self._others[descriptor] = place
        return None

    def _shut(self, connection: Connection) -> None:
        # Of a copy: gRPC may close its own at any moment, and the number be another file's then.
        with contextlib.suppress(OSError):
            copy = socket.socket(fileno=self._descriptors.run(lambda: os.dup(connection.descriptor)))
            with copy:
                if copy.getsockname()[1] == connection.port:
                    copy.shutdown(socket.SHUT_RDWR)

    def counted(self, behave: Any) -> Any:
        """A handler whose calls count, and which serves no more of one address than allowed."""
        if inspect.isasyncgenfunction(behave):

            async def generator(request: Any, context: Context) -> AsyncIterator[Any]:
                caller, host = await self._begin(context)
                try:
                    async for response in behave(request, context):
                        yield response
                finally:
                    self._end(caller, host)

            return generator

        async def coroutine(request: Any, context: Context) -> Any:
            caller, host = await self._begin(context)
            try:
                return await behave(request, context)
            finally:
                self._end(caller, host)

        return coroutine

    async def _begin(self, context: Context) -> tuple[str, str]:
        caller = context.peer()
        host = caller.rpartition(":")[0]
        if self._hosts[host] >= self._caller_calls_max:
            await abort(context, limit_reached("limits.caller_calls_max", self._caller_calls_max, 1_000))
        self._calls[caller] += 1
        self._used.add(caller)
        self._hosts[host] += 1
        return caller, host

    def _end(self, caller: str, host: str) -> None:
        for counts, name in ((self._calls, caller), (self._hosts, host)):
            counts[name] -= 1
            if not counts[name]:
                del counts[name]
