"""The clients of the callers: one a token, since a client's connections carry its token.

At most CLIENTS_MAX are kept, of tokens for which a node has done something. The one that was used least recently is
closed for a new one, once its calls have ended. Tokens that no node knows displace none: their clients are closed at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable

from tickwheel.client import AsyncClient

CLIENTS_MAX = 64
TRIED_MAX = 16
"""Clients of unknown tokens at a time; further tokens wait in turn. Each opens connections, and the nodes take a
bounded number from one address."""


class _Kept:
    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.calls = 0


class Clients:
    """Clients by token."""

    def __init__(self, make: Callable[[str], AsyncClient]) -> None:
        """`make` makes the client of a token; empty: of callers without one."""
        self._make = make
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._tried: dict[str, _Kept] = {}
        """Of tokens for which no node has done anything yet, while they have calls."""
        self._master = ""
        """Known to the client that worked last. A new one begins there: it need not look for the master at all nodes,
        each of which would note the refusal of a wrong token."""
        self._trying = asyncio.Semaphore(TRIED_MAX)
        """A place is held for each of `_tried`."""

    @contextlib.asynccontextmanager
    async def of(self, token: str) -> AsyncIterator[AsyncClient]:
        """The client of a token, for one call."""
        if token not in self._kept and token not in self._tried:
            await self._try(token)
        found = self._kept.get(token) or self._tried[token]
        found.calls += 1
        try:
            yield found.client
            await self._keep(token, found)
        finally:
            found.calls -= 1
            if not found.calls and self._kept.get(token) is not found:
                if self._tried.get(token) is found:
                    del self._tried[token]
                    self._trying.release()
                await found.client.close()

    async def _try(self, token: str) -> None:
        """Make the client of an unknown token, unless another call has made it while this one waited for a place."""
        await self._trying.acquire()
        if token in self._kept or token in self._tried:
            self._trying.release()
            return
        try:
            found = self._tried[token] = _Kept(self._make(token))
            found.client.cluster.learn(self._master)
        except BaseException:
            self._trying.release()
            raise

    async def _keep(self, token: str, found: _Kept) -> None:
        self._master = found.client.cluster.known_master or self._master
        if self._tried.get(token) is found:
            self._kept[token] = self._tried.pop(token)
            self._trying.release()
        if self._kept.get(token) is found:
            self._kept.move_to_end(token)
        if len(self._kept) > CLIENTS_MAX:
            _, oldest = self._kept.popitem(last=False)
            if not oldest.calls:
                await oldest.client.close()

    async def close(self) -> None:
        """Close all."""
        for found in (*self._kept.values(), *self._tried.values()):
            await found.client.close()
        self._kept.clear()
