"""A fake cluster of three for every test that asks."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.client.fake_node import FakeNode, FakeState


@pytest.fixture
async def nodes() -> AsyncIterator[list[FakeNode]]:
    """Three fake nodes; the first is master."""
    state = FakeState()
    started = [await FakeNode(state, f"n{number}").start() for number in (1, 2, 3)]
    started[0].lead()
    yield started
    for node in started:
        await node.stop()
