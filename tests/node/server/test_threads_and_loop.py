"""The worker threads of a node, and its event loop's way with gRPC's wake-ups."""

from __future__ import annotations

import asyncio
import functools
import gc
import socket
import threading
import weakref
from collections import Counter

import grpc
import pytest
import uvloop

from tickwheel.node.server.door import Door
from tickwheel.node.server.loop import NodeLoop
from tickwheel.node.server.ports import ThreadExecutor
from tickwheel.proto import scheduler_pb2
from tickwheel.proto.scheduler_pb2_grpc import SchedulerServicer, SchedulerStub, add_SchedulerServicer_to_server


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
    await asyncio.sleep(0)
    await asyncio.to_thread(lambda: None)
    gc.collect()
    executor.stop()
    assert seen() is None


class Wakers:
    """The pair of sockets and the reader of grpc.aio, without gRPC."""

    def __init__(self) -> None:
        self.reading, self.writing = socket.socketpair()
        self.reading.setblocking(False)
        self.turns = 0

    def _handle_events(self, loop: object) -> None:
        self.reading.recv(1)
        self.turns += 1


def test_wake_ups_of_a_burst_take_one_turn() -> None:
    """A hundred events that wait are one call of the reader; a later one is not lost."""

    async def main() -> tuple[int, int]:
        loop = asyncio.get_running_loop()
        wakers = Wakers()
        wakers.writing.send(bytes(100))
        loop.add_reader(wakers.reading, functools.partial(wakers._handle_events, loop))
        for _ in range(5):
            await asyncio.sleep(0.001)
        burst = wakers.turns
        wakers.writing.send(b"1")
        for _ in range(5):
            await asyncio.sleep(0.001)
        loop.remove_reader(wakers.reading)
        wakers.reading.close()
        wakers.writing.close()
        return burst, wakers.turns

    assert uvloop.run(main(), loop_factory=NodeLoop) == (1, 2)


class Answering(SchedulerServicer):
    """Answers one method."""

    async def Cancel(
        self, request: scheduler_pb2.CancelRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> scheduler_pb2.CancelResponse:
        return scheduler_pb2.CancelResponse(outcome=scheduler_pb2.CANCELLED)


WAITS_FOR_A_METHOD = "_request_registered_call"
"""Name of the coroutine of grpc.aio that waits for the next call of one registered method."""


@pytest.mark.parametrize("registered", [True, False])
def test_methods_are_looked_up(registered: bool) -> None:
    """A call is found, and no task waits for each method there is: that made every call dearer with each of them.

    With the methods registered there is one for each, or this looks at the wrong thing. Other tasks, as those of the
    call that is just ending, come and go as they like."""

    async def main() -> int:
        server = grpc.aio.server()
        servicer = Answering()  # type: ignore[abstract]  # one is enough
        if registered:
            add_SchedulerServicer_to_server(servicer, server)
        else:
            Door(server, Counter()).serve(add_SchedulerServicer_to_server, servicer)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            answer = await SchedulerStub(channel).Cancel(scheduler_pb2.CancelRequest())
            assert answer.outcome == scheduler_pb2.CANCELLED
            names = [getattr(task.get_coro(), "__name__", "") for task in asyncio.all_tasks()]
        await server.stop(None)
        return names.count(WAITS_FOR_A_METHOD)

    waiting = uvloop.run(main(), loop_factory=NodeLoop)
    methods = len(scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"].methods)
    assert waiting == (methods if registered else 0)
