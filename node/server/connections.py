"""Limits on connections: their number on a port, the choice of surplus ones, and the calls under way of one address.

The transport accepts every connection. The limiter looks at the process's descriptors once a second. If they have
changed it looks at what each is, and closes surplus connections on a port. It takes them from the address with the most
connections: first those that never had a call, last the busy ones, and the newest first. Between two looks accepting
ends at the limit of descriptors. Descriptors above that are reserved for files (storage/descriptors.py), so a burst
takes no descriptor from a file. The transport closes connections that stay idle or silent (transport/limits.py).

Runs on the loop's thread.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tickwheel.node.failure import Failure, RequestError, limit_reached
from tickwheel.storage.descriptors import DescriptorReserve
from tickwheel.transport.server import ServerStream as Context
from tickwheel.transport.server import caller_of

SPARE_DESCRIPTORS = 32
"""Descriptors left free below the limit for peers, metrics, and files opened without the reserve."""
CONNECTIONS_LEAST = 8
"""Connections allowed on the client port, however few descriptors there are."""
PEER_CONNECTIONS_MAX = 64
"""Connections on the peers' port; a member needs one, and a second while it copies a checkpoint."""
LOOKS_ALIKE_MAX = 10
"""After so many looks at the same descriptors the limiter looks at what each is: a number may have been used again."""
_DIRECTORY = "/proc/self/fd"
"""The process's descriptors. Read without pathlib, which takes three times as long for thousands of entries."""


@dataclass(frozen=True, slots=True)
class Connection:
    """An accepted socket of this process. `number` is the socket's inode number, which rises with time."""

    descriptor: int
    number: int
    port: int
    host: str
    caller: str
    """The other side, in gRPC's notation (`caller_of`)."""


def too_many(connections: Iterable[Connection], worth: Callable[[str], int], most: int) -> list[Connection]:
    """The connections to close so that `most` are left; those with the lowest `worth` of their caller first. Pure."""
    connections = list(connections)
    if len(connections) <= most:
        return []
    left: dict[str, list[Connection]] = {}
    for connection in sorted(connections, key=lambda c: (-worth(c.caller), c.number)):
        left.setdefault(connection.host, []).append(connection)
    surplus = sum(map(len, left.values())) - most
    gone: list[Connection] = []
    while len(gone) < surplus:
        # Down to the number of the next address, so that the addresses with the most share the loss.
        largest, *others = sorted(left.values(), key=len, reverse=True)
        count = min(surplus - len(gone), max(1, len(largest) - (len(others[0]) if others else 0)))
        gone += reversed(largest[-count:])
        del largest[-count:]
    return gone


class ConnectionLimiter:
    """Counts the calls of each connection and closes surplus connections."""

    def __init__(self, descriptors: DescriptorReserve, connections_max: int, caller_calls_max: int) -> None:
        self._descriptors = descriptors
        self._caller_calls_max = caller_calls_max
        self._connections_max = connections_max
        self._client_port = self._peer_port = 0
        self._calls: dict[str, int] = {}
        """Calls under way, by connection."""
        self._hosts: dict[str, int] = {}
        """Calls under way, by the caller's address."""
        self._used: set[str] = set()
        """Connections that had a call. The next look removes closed ones."""
        self._users: dict[str, set[str]] = {}
        """Connections over which each user has called. The next look removes closed ones."""
        self._known: dict[int, tuple[int, Connection | None]] = {}
        """Descriptor of a socket -> its number, and the connection if it belongs to one of the ports."""
        self._names: list[str] = []
        """Descriptors at the last look that saw what each is, if there was no surplus."""
        self._alike = 0
        """Looks since then that found the same."""
        self.open = 0
        """Client connections at the last look."""
        self.most = connections_max
        """Client connections allowed at the last look."""
        self.descriptors_open = 0
        self.shut = 0
        """Count of connections closed as surplus."""

    def watch(self, client_port: int, peer_port: int) -> None:
        """Set the numbers of both ports, once they are bound."""
        self._client_port, self._peer_port = client_port, peer_port

    def look(self) -> int:
        """Close surplus connections; returns their number."""
        names = self._descriptors.run_briefly(lambda: os.listdir(_DIRECTORY))  # noqa: PTH208
        self._alike += 1
        if names == self._names and self._alike < LOOKS_ALIKE_MAX:
            return 0
        self._alike = 0
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
        self._names = [] if victims else names
        return len(victims)

    def admit(self, user: str, caller: str, connections_max: int) -> Failure | None:
        """Note that a user calls over a connection. Returns the refusal if its quota allows no further connection."""
        callers = self._users.setdefault(user, set())
        if caller not in callers:
            if len(callers) >= connections_max:
                self._names = []  # the next look says which of them are closed
                return limit_reached("quotas.connections_max", connections_max, 1_000)
            callers.add(caller)
        return None

    def _worth(self, caller: str) -> int:
        return 2 if caller in self._calls else int(caller in self._used)

    def _connection(self, descriptor: int) -> Connection | None:
        try:
            kind, _, number = os.readlink(f"{_DIRECTORY}/{descriptor}").partition(":[")  # noqa: PTH115
        except OSError:
            return None
        if kind != "socket":
            return None
        place = int(number.rstrip("]"))
        known = self._known.get(descriptor)
        if known is None or known[0] != place:
            known = self._known[descriptor] = (place, self._read(descriptor, place))
        return known[1]

    def _read(self, descriptor: int, place: int) -> Connection | None:
        with contextlib.suppress(OSError):
            borrowed = socket.socket(fileno=descriptor)
            try:
                if borrowed.family in (socket.AF_INET, socket.AF_INET6):
                    port = int(borrowed.getsockname()[1])
                    host, from_port, *_ = borrowed.getpeername()
                    if port in (self._client_port, self._peer_port):
                        return Connection(descriptor, place, port, host, caller_of((host, from_port)))
            finally:
                borrowed.detach()
        return None

    def _shut(self, connection: Connection) -> None:
        # On a duplicate: the loop may close its own descriptor at any moment, and the number may then be another's.
        with contextlib.suppress(OSError):
            copy = socket.socket(fileno=self._descriptors.run(lambda: os.dup(connection.descriptor)))
            with copy:
                if copy.getsockname()[1] == connection.port:
                    copy.shutdown(socket.SHUT_RDWR)

    def begin(self, context: Context) -> str:
        """Count a call that begins; returns its connection, for `end`. Raises RequestError beyond the limit of one
        address."""
        caller = context.peer()
        host = caller.rpartition(":")[0]
        others = self._hosts.get(host, 0)
        if others >= self._caller_calls_max:
            raise RequestError(limit_reached("limits.caller_calls_max", self._caller_calls_max, 1_000))
        self._calls[caller] = self._calls.get(caller, 0) + 1
        self._used.add(caller)
        self._hosts[host] = others + 1
        return caller

    def end(self, caller: str) -> None:
        """A call over this connection has ended."""
        _count_down(self._calls, caller)
        _count_down(self._hosts, caller.rpartition(":")[0])


def _count_down(counts: dict[str, int], name: str) -> None:
    left = counts[name] - 1
    if left:
        counts[name] = left
    else:
        del counts[name]
