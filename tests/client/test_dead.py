"""Dead letters: a change of all of them that is repeated after a lost answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tickwheel.client import RequestRefused, RetryPolicy
from tickwheel.client.dead import DeadClient
from tickwheel.testing import FakeCluster


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    """A group that gives up at the first failure."""
    async with FakeCluster() as made:
        await made.client.admin.create_group("g", ["t"], retry=RetryPolicy(attempts_max=1))
        yield made


async def die(cluster: FakeCluster, text: str) -> None:
    """One more message dies."""
    await cluster.client.schedule("t", text, delay_ms=0)
    await die_again(cluster)


async def die_again(cluster: FakeCluster) -> None:
    """The message that the group gets next dies."""
    await cluster.clock.advance(milliseconds=5)
    async with cluster.client.consumer("g", "t", messages_max=1) as consumer:
        async for delivery in consumer:
            await delivery.dead("no use")


async def letters(cluster: FakeCluster) -> list[tuple[int, bytes | None]]:
    """Numbers and payloads."""
    dead = cluster.client.dead
    return [(letter.number, (await dead.get("g", letter.number)).payload) async for letter in dead.list("g")]


def lose_an_answer(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], Awaitable[None]]) -> None:
    """The answer to the next change is lost. Something happens before the client tries again."""
    ask = DeadClient._ask
    left = [1]

    async def losing(self: DeadClient, method: Any, request: Any, **options: Any) -> Any:
        if not getattr(request, "ask", True) and left:
            left.clear()
            await ask(self, method, request, **options)
            await meanwhile()
        return await ask(self, method, request, **options)

    monkeypatch.setattr(DeadClient, "_ask", losing)


async def test_a_replay_of_all_that_is_repeated_replays_none_twice(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replayed message has died again: that letter is a new one, and stays."""
    await die(cluster, "a")
    lose_an_answer(monkeypatch, lambda: die_again(cluster))
    await cluster.client.dead.replay("g")
    assert await letters(cluster) == [(1, b"a")]
    assert (await cluster.client.dead.replay("g")).changed == 1


async def test_a_purge_of_all_that_is_repeated_keeps_what_came_since(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that died after the call had begun is in no list that anybody has seen."""
    await die(cluster, "a")
    lose_an_answer(monkeypatch, lambda: die(cluster, "b"))
    await cluster.client.dead.purge("g")
    assert await letters(cluster) == [(1, b"b")]
    assert (await cluster.client.dead.purge("g")).changed == 1


async def test_without_letters_nothing_is_changed(cluster: FakeCluster) -> None:
    """None has ever come, or all are gone."""
    assert (await cluster.client.dead.replay("g")).changed == (await cluster.client.dead.purge("g")).changed == 0
    await die(cluster, "a")
    assert (await cluster.client.dead.purge("g")).changed == 1
    assert (await cluster.client.dead.replay("g")).changed == (await cluster.client.dead.purge("g")).changed == 0


async def test_a_node_of_the_version_before_changes_all(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses the question, as a field that it does not know: it has only the number of it."""
    ask = DeadClient._ask

    async def refusing(self: DeadClient, method: Any, request: Any, **options: Any) -> Any:
        if getattr(request, "ask", False):
            number = {"ReplayDeadRequest": "5", "PurgeDeadRequest": "4"}[type(request).__name__]
            raise RequestRefused(f"{number}: unknown field", "INVALID_FIELD", {"field": number})
        return await ask(self, method, request, **options)

    monkeypatch.setattr(DeadClient, "_ask", refusing)
    await die(cluster, "a")
    await die(cluster, "b")
    assert (await cluster.client.dead.replay("g")).changed == 2
    await die_again(cluster)
    assert (await cluster.client.dead.purge("g")).changed == 1
