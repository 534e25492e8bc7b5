"""The worker threads of a node."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

from tickwheel.node.server.ports import ThreadExecutor


def unexpected(error: BaseException) -> None:
    """No `done` of these tests may raise."""
    raise error


async def test_works_come_back_on_the_loop() -> None:
    """Result or error, each once, on the loop's thread, followed by `after`."""
    loop, here = asyncio.get_running_loop(), threading.get_ident()
    came: list[tuple[object, object, int]] = []
    ended = asyncio.Event()
    wakes = 0

    def after() -> None:
        nonlocal wakes
        wakes += 1
        if wakes == 2:
            ended.set()

    def fails() -> int:
        raise OSError("no")

    executor = ThreadExecutor("test", 1, loop, unexpected, after)
    executor.submit(threading.get_ident, lambda result, error: came.append((result, error, threading.get_ident())))
    executor.submit(fails, lambda result, error: came.append((result, str(error), threading.get_ident())))
    assert executor.waiting == 2
    await ended.wait()
    executor.stop()
    assert executor.waiting == 0
    (result, error, first), second = came
    assert result != here and error is None and first == here
    assert second == (None, "no", here)


async def test_a_stop_waits_for_what_runs_and_drops_what_waits() -> None:
    """A node that stops closes its files next: nothing may still write to them, and nobody hears of it any more."""
    running, may_end = threading.Event(), threading.Event()
    ran: list[str] = []

    def slow() -> None:
        running.set()
        may_end.wait()
        ran.append("slow")

    executor = ThreadExecutor("test", 1, asyncio.get_running_loop(), unexpected)
    executor.submit(slow, lambda result, error: ran.append("done"))
    executor.submit(lambda: ran.append("next"), lambda result, error: ran.append("done"))
    await asyncio.to_thread(running.wait)
    asyncio.get_running_loop().call_later(0.02, may_end.set)
    await asyncio.to_thread(executor.stop)
    executor.stop()
    await asyncio.sleep(0)
    assert ran == ["slow"]


async def test_an_idle_thread_keeps_nothing() -> None:
    """A merge holds a hundred megabytes: they must go with it, not with the next work."""

    class Work:
        def run(self) -> None: ...

    work = Work()
    seen, ended = weakref.ref(work), asyncio.Event()
    executor = ThreadExecutor("test", 1, asyncio.get_running_loop(), unexpected, ended.set)
    executor.submit(work.run, lambda result, error: None)
    del work
    await ended.wait()
    async with asyncio.timeout(20):
        while seen() is not None:  # the thread tells of the end first
            gc.collect()
            await asyncio.sleep(0.001)
    executor.stop()
