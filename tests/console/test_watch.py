"""The shared look at the cluster, without a cluster: how long it asks, and that it starts over."""

from __future__ import annotations

import asyncio

import pytest

from tickwheel.client import AsyncClient
from tickwheel.console import watch as watching
from tickwheel.console.watch import Listing, Watch


def tasks_of(watch: Watch) -> int:
    """Tasks of this loop that run a watch."""
    return sum("Watch." in str(task.get_coro()) for task in asyncio.all_tasks())


async def test_a_watch_sleeps_and_wakes_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once nobody wants anything it ends all it began; the next page begins one run and not a second beside it."""
    monkeypatch.setattr(watching, "IDLE_S", 0.0)
    async with AsyncClient("127.0.0.1:1", timeout_s=0.1) as client:
        watch = Watch(client)
        for _ in range(2):
            await watch.picture()
            running = watch._task
            assert running is not None and tasks_of(watch) <= 2
            await asyncio.wait({running}, timeout=20)
            assert running.done() and watch._task is None and tasks_of(watch) == 0


async def test_a_page_after_a_rest_gets_no_old_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would show nodes that have died since as alive, until they have not answered in time."""
    monkeypatch.setattr(watching, "IDLE_S", 0.0)
    async with AsyncClient("127.0.0.1:1", timeout_s=0.1) as client:
        watch = Watch(client)
        await watch.picture()
        running = watch._task
        assert running is not None
        await asyncio.wait({running}, timeout=20)
        looking, go_on, look = asyncio.Event(), asyncio.Event(), watch._look

        async def slow() -> None:
            looking.set()
            await go_on.wait()
            await look()

        monkeypatch.setattr(watch, "_look", slow)
        pictures = watch.listen()
        assert (await anext(pictures)).startswith(b"event: history")
        showing = asyncio.ensure_future(anext(pictures))
        await looking.wait()
        await asyncio.sleep(0)
        assert not showing.done()
        go_on.set()
        assert (await showing).startswith(b"event: picture")
        await pictures.aclose()
        await watch.close()


async def test_a_mistake_in_one_look_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and who listens gets the next picture."""
    monkeypatch.setattr(watching, "PERIOD_S", 0.1)
    async with AsyncClient("127.0.0.1:1", timeout_s=0.1) as client:
        watch = Watch(client)
        drawn, whole = 0, watch._drawn

        def broken() -> dict[str, object]:
            nonlocal drawn
            drawn += 1
            if drawn == 1:
                raise RuntimeError("a mistake")
            return whole()

        monkeypatch.setattr(watch, "_drawn", broken)
        pictures = watch.listen()
        assert (await anext(pictures)).startswith(b"event: history")
        async with asyncio.timeout(20):
            assert (await anext(pictures)).startswith(b"event: picture")
        assert "a look at the cluster failed" in caplog.text
        await pictures.aclose()
        await watch.close()
        assert tasks_of(watch) == 0


async def test_a_listing_that_was_asked_for_before_a_change_is_asked_for_anew() -> None:
    """Else whoever made the change would not see it for some seconds."""
    there, asked, go_on = ["old"], asyncio.Event(), asyncio.Event()

    async def ask() -> list[str]:
        found = list(there)
        asked.set()
        await go_on.wait()
        return found

    listing = Listing(ask)
    looking = asyncio.ensure_future(listing.get())
    await asked.wait()
    there.append("new")
    listing.forget()
    go_on.set()
    assert await looking == ["old"]
    assert await listing.get() == ["old", "new"]
    there.append("newer")
    assert await listing.get() == ["old", "new"], "it is good for a while"
