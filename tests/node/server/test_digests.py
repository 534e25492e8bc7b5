"""Digests take time in proportion to the state: callers share them, and cannot keep the loop from its work."""

from __future__ import annotations

import asyncio
import time

import pytest

from tickwheel.node.server import digests
from tickwheel.node.server.digests import PAUSE_FACTOR, Digests
from tickwheel.proto.admin_pb2 import StateDigest

COST_S = 0.01


class Scene:
    """A state whose digest takes a while."""

    def __init__(self) -> None:
        self.index = 0
        self.computed: list[tuple[float, float]] = []
        self.broken = False
        self.digests = Digests(self._compute)

    def _compute(self) -> StateDigest:
        start_s = time.monotonic()
        while time.monotonic() < start_s + COST_S:
            pass
        self.computed.append((start_s, time.monotonic()))
        if self.broken:
            raise RuntimeError("on purpose")
        return StateDigest(applied_index=self.index)


async def test_callers_share_a_digest_that_is_not_older_than_their_call() -> None:
    scene = Scene()
    assert [digest.applied_index for digest in await asyncio.gather(*(scene.digests.get() for _ in range(50)))] == [
        0
    ] * 50
    assert len(scene.computed) == 1
    scene.index = 1
    assert (await scene.digests.get()).applied_index == 1


async def test_callers_leave_the_loop_its_time() -> None:
    """Whoever asks again and again, from however many connections, gets a twentieth of it."""
    scene = Scene()

    async def ask() -> None:
        for _ in range(3):
            await scene.digests.get()

    await asyncio.gather(*(ask() for _ in range(20)))
    assert len(scene.computed) <= 4
    pauses = zip(scene.computed, scene.computed[1:], strict=False)
    assert all(after[0] - before[1] >= (PAUSE_FACTOR - 1) * COST_S for before, after in pauses)


async def test_a_caller_waits_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the digest before took."""
    monkeypatch.setattr(digests, "PAUSE_S_MAX", 0.02)
    scene = Scene()
    await scene.digests.get()
    await scene.digests.get()
    (_, end_s), (start_s, _) = scene.computed
    assert 0.019 <= start_s - end_s < PAUSE_FACTOR * COST_S


async def test_an_error_or_a_caller_that_goes_holds_nobody_up() -> None:
    scene = Scene()
    scene.broken = True
    with pytest.raises(RuntimeError):
        await scene.digests.get()
    scene.broken = False
    waiting = asyncio.ensure_future(scene.digests.get())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert (await asyncio.wait_for(scene.digests.get(), 10)).applied_index == 0
