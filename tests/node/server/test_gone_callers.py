"""Calls whose caller goes away before the answer."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from tickwheel.testing import FakeCluster


async def test_a_pull_that_was_given_up_takes_no_message() -> None:
    """The message goes to who asks next, in its first attempt, not to nobody until a lease ends."""
    async with FakeCluster() as cluster:
        client, pulls = cluster.client, cluster._node._host.core.parts.consumers._pulls
        await client.admin.create_group("shop", ["orders"])
        waiting = asyncio.ensure_future(client.pulling.pull("shop", wait=timedelta(seconds=20)))
        await asyncio.sleep(0)
        await cluster.clock.advance(milliseconds=1)  # all that can happen has happened
        assert len(pulls) == 1
        waiting.cancel()
        await client.schedule("orders", b"pay", delay_ms=0)
        [order] = await cluster.take("orders", "shop")
        assert order.payload == b"pay" and order.attempt == 1
