"""When a try is left, and when anybody is asked who is master: on a clock that stands still until it is set."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tickwheel.client.tries import LOOK_S, Tries, TryLeftError

PATIENCE_S = 1.0


class Scene:
    """Tries of a client that believes `master` to be it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1_000.0
        self.master: str | None = "a"
        self.moved: Callable[[str], None] | None = None
        """Set while all nodes are asked."""
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now_s)
        self.looks = 0
        self.tries = Tries(PATIENCE_S, self._master, self._watch, self._unwatch)

    def _master(self) -> str | None:
        self.looks += 1
        return self.master

    def _watch(self, key: object, moved: Callable[[str], None]) -> None:
        self.moved = moved

    def _unwatch(self, key: object) -> None:
        self.moved = None

    async def go_on(self, seconds: float, *, answered: bool = False) -> None:
        """Let time pass; `answered`: other tries are, all the while."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            if answered:
                assert await self.tries.run("a", asyncio.sleep(0, "answer")) == "answer"
            self.now_s += LOOK_S
            for _ in range(3):
                await asyncio.sleep(0)

    def hanging(self, address: str = "a") -> asyncio.Task[bool]:
        """A try that nobody answers."""
        return asyncio.ensure_future(self.tries.run(address, asyncio.Event().wait()))


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


async def test_a_master_that_answers_nobody_is_asked_about_and_left(scene: Scene) -> None:
    """Not before the try has waited for long; and it is left as soon as another one is named."""
    trying = scene.hanging()
    await scene.go_on(PATIENCE_S / 2)
    assert scene.moved is None
    await scene.go_on(PATIENCE_S)
    assert scene.moved is not None
    scene.moved("b")
    with pytest.raises(TryLeftError):
        await trying


async def test_a_master_that_answers_others_is_not_asked_about(scene: Scene) -> None:
    """A call that takes long beside others asks nobody: under load all do, and questions would add to it."""
    trying = scene.hanging()
    await scene.go_on(3 * PATIENCE_S, answered=True)
    assert scene.moved is None
    await scene.go_on(2 * PATIENCE_S)
    assert scene.moved is not None
    trying.cancel()


async def test_tries_that_are_answered_soon_are_hardly_looked_at(scene: Scene) -> None:
    trying = scene.hanging()
    await scene.go_on(PATIENCE_S / 2)
    trying.cancel()
    await scene.go_on(10 * PATIENCE_S, answered=True)
    assert scene.looks <= 11


async def test_a_try_at_an_earlier_master_is_left_though_the_new_one_answers(scene: Scene) -> None:
    """Other calls have found the new master: nobody need be asked, and what waits at the old one is left."""
    trying, young = scene.hanging("old"), None
    scene.master = "old"
    await scene.go_on(2 * PATIENCE_S, answered=True)
    scene.master, young = "a", scene.hanging("old")
    await scene.go_on(LOOK_S, answered=True)
    with pytest.raises(TryLeftError):
        await trying
    assert not young.done()
    young.cancel()


async def test_a_try_that_asks_for_another_master_is_not_left(scene: Scene) -> None:
    """The earlier master's answer comes after the change."""
    answer = asyncio.Event()
    trying = asyncio.ensure_future(scene.tries.run("a", answer.wait(), stays=True))
    await scene.go_on(2 * PATIENCE_S)
    assert scene.moved is not None
    scene.moved("b")
    scene.master = "b"
    await scene.go_on(2 * PATIENCE_S)
    answer.set()
    assert await trying


async def test_the_cancellation_of_a_caller_stays_one(scene: Scene) -> None:
    """Also in the moment in which the try is left."""
    trying = scene.hanging()
    await scene.go_on(2 * PATIENCE_S)
    assert scene.moved is not None
    scene.moved("b")
    trying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await trying


async def test_nothing_is_left_behind(scene: Scene) -> None:
    """After the last try nobody is asked any more, and its task is none that somebody asked to end."""
    trying = scene.hanging()
    await scene.go_on(2 * PATIENCE_S)
    assert scene.moved is not None
    scene.moved("b")
    with pytest.raises(TryLeftError):
        await trying
    assert not trying.cancelling()
    await scene.go_on(2 * LOOK_S)
    assert scene.moved is None
