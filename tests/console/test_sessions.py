"""Users of a console and their views of the cluster."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

from tickwheel.client import AsyncClient
from tickwheel.console.sessions import Sessions, Visitor


async def test_pages_that_open_together_share_a_view() -> None:
    """Also while the view of somebody who has left is closed: a second view would keep its connections for ever."""
    sessions = Sessions(lambda token: AsyncClient("127.0.0.1:1", token=token))
    left = await sessions.view(Visitor(sessions.log_in("one")))
    left.used_s = left.watch._wanted_s = -1e9
    closing, go = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        closing.set()
        await go.wait()

    here = Visitor(sessions.log_in("two"))
    with patch.object(left, "close", slow):
        pages = [asyncio.ensure_future(sessions.view(here)) for _ in range(2)]
        await closing.wait()
        go.set()
        first, second = await asyncio.gather(*pages)
    assert first is second
    await left.close()
    await sessions.close()
