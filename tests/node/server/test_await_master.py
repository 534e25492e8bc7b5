"""Who waits for another master is told of it, at once and only then; thousands who wait do not stop the loop."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tickwheel.node.failure import RequestError
from tickwheel.node.server import status_stream
from tickwheel.node.server.status_stream import TOLD_AT_ONCE, WAIT_MS_MAX, StatusStreams
from tickwheel.proto.admin_pb2 import AwaitMasterRequest, AwaitMasterResponse
from tickwheel.replication.log import Role

SOON_S = 10.0
"""Much less than the wait that the callers ask for."""


class Scene:
    """A node that knows what it is told to know."""

    def __init__(self) -> None:
        self.term = 1
        self.master_id = ""
        self.role = Role.SLAVE
        log = SimpleNamespace(status=lambda: self, members=self.members)
        self.status = StatusStreams(cast(Any, SimpleNamespace(core=SimpleNamespace(log=log))), 1, lambda: "")

    @staticmethod
    def members() -> list[Any]:
        return [SimpleNamespace(node_id=name, client_address=f"{name}:1") for name in "ab"]

    def know(self, term: int, master_id: str, role: Role = Role.SLAVE) -> None:
        self.term, self.master_id, self.role = term, master_id, role
        self.status.look()

    def ask(self, term: int = 0, address: str = "", wait_ms: int = WAIT_MS_MAX) -> asyncio.Task[AwaitMasterResponse]:
        request = AwaitMasterRequest(term=term, master_address=address, wait_ms=wait_ms)
        return asyncio.ensure_future(self.status.await_master(request))


async def passes() -> None:
    """Some passes of the loop."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_another_master_is_told_at_once() -> None:
    """Not the loss of one, for nobody can use that; and not the same one again."""
    scene = Scene()
    waiting = scene.ask()
    await passes()
    assert not waiting.done(), "it knows none"
    scene.know(1, "a")
    assert await waiting == AwaitMasterResponse(term=1, master_address="a:1", wait_ms_max=WAIT_MS_MAX)
    assert (await scene.ask()).master_address == "a:1", "the caller did not know it"
    waiting = scene.ask(1, "a:1")
    scene.know(2, "")
    scene.know(1, "a")
    await passes()
    assert not waiting.done()
    scene.know(2, "b", Role.MASTER)
    assert await waiting == AwaitMasterResponse(term=2, master_address="b:1", leads=True, wait_ms_max=WAIT_MS_MAX)


async def test_a_wait_ends_with_its_time_and_with_the_node() -> None:
    """With what the node knows; nothing is left behind, also if the caller leaves."""
    scene = Scene()
    scene.know(1, "a")
    assert (await scene.ask(1, "a:1", wait_ms=0)).master_address == "a:1"
    assert (await scene.ask(1, "a:1", wait_ms=1)).master_address == "a:1"
    leaving, waiting = scene.ask(1, "a:1"), scene.ask(1, "a:1")
    await passes()
    leaving.cancel()
    await passes()
    scene.status.stop()
    assert (await waiting).master_address == "a:1"
    assert not scene.status._waiting
    with pytest.raises(RequestError) as caught:
        await scene.ask(wait_ms=WAIT_MS_MAX + 1)
    assert caught.value.failure.metadata["field"] == "wait_ms"


async def test_thousands_are_told_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass of the loop answers some; a second change meanwhile reaches all."""
    scene = Scene()
    scene.know(1, "a")
    waiting = [scene.ask(1, "a:1") for _ in range(5 * TOLD_AT_ONCE)]
    await passes()
    with monkeypatch.context() as patched:
        patched.setattr(status_stream, "TOLD_PAUSE_S", 3_600.0)  # or a busy machine would see more groups told
        scene.know(2, "b")
    await passes()
    assert [task.done() for task in waiting] == [True] * TOLD_AT_ONCE + [False] * 4 * TOLD_AT_ONCE
    again = [scene.ask(2, "b:1") for _ in range(3)]
    await passes()
    scene.know(3, "a")
    async with asyncio.timeout(SOON_S):
        answers = await asyncio.gather(*waiting, *again)
    assert [answer.term for answer in answers] == [2] * TOLD_AT_ONCE + [3] * (4 * TOLD_AT_ONCE + 3)
