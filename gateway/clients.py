"""The clients of the callers: one a token, since a client's connections carry its token.

At most CLIENTS_MAX are kept. The one that was used least recently is closed for a new one, once its calls have ended.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable

from tickwheel.client import AsyncClient

CLIENTS_MAX = 64


class _Kept:
    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.calls = 0
        self.gone = False


class Clients:
    """Clients by token."""

    def __init__(self, make: Callable[[str], AsyncClient]) -> None:
        """`make` makes the client of a token; empty: of callers without one."""
        self._make = make
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    @contextlib.asynccontextmanager
    async def of(self, token: str) -> AsyncIterator[AsyncClient]:
        """The client of a token, for one call."""
        kept = self._kept.get(token)
        if kept is None:
            kept = self._kept[token] = _Kept(self._make(token))
        self._kept.move_to_end(token)
        kept.calls += 1
        try:
            while len(self._kept) > CLIENTS_MAX:
                _, oldest = self._kept.popitem(last=False)
                oldest.gone = True
                await self._close_if_idle(oldest)
            yield kept.client
        finally:
            kept.calls -= 1
            await self._close_if_idle(kept)

    async def close(self) -> None:
        """Close all."""
        while self._kept:
            _, kept = self._kept.popitem()
            await kept.client.close()

    @staticmethod
    async def _close_if_idle(kept: _Kept) -> None:
        if kept.gone and not kept.calls:
            await kept.client.close()
