"""Servers of the tests, on any free port of this machine."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tickwheel.transport.client import ClientConnection, Names, connect
from tickwheel.transport.limits import Limits
from tickwheel.transport.server import Server, bind


async def started(server: Server, secured: ssl.SSLContext | None = None) -> int:
    """Start a server; returns its port."""
    bound = bind("127.0.0.1", 0)
    server.listen(bound, secured)
    await server.start()
    return int(bound.getsockname()[1])


async def dialled(address: str, limits: Limits, **more: Any) -> ClientConnection:
    """A connection of this client."""
    [place, *_] = await Names().find(address)
    return await connect(place, limits, **more)


@asynccontextmanager
async def serving(server: Server, secured: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """A started server at its address; stopped at the end."""
    port = await started(server, secured)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop()
