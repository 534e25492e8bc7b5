"""The loop driver: one tick for a batch of input, ticks at the wanted time, input before timers after a stall."""

from __future__ import annotations

import asyncio
import time

from tickwheel.node.server.driver import DRAIN_PASSES, LONG_TICK_NS, STALL_NS, TICK_GAP_NS, LoopDriver
from tickwheel.node.server.ports import BootClock


class Watch:
    """A clock that is moved by hand: what else runs on the machine causes no stall."""

    def __init__(self) -> None:
        self.now_ns = BootClock().monotonic_ns()

    def monotonic_ns(self) -> int:
        return self.now_ns

    def wall_ms(self) -> int:
        return 0


async def test_many_wakes_are_one_tick() -> None:
    """Input that comes close together is taken in by one tick, a step of the loop's timers after the last."""
    clock, times = BootClock(), asyncio.Queue[int]()

    def tick(_: bool) -> int:
        times.put_nowait(clock.monotonic_ns())
        return clock.monotonic_ns() + 10_000_000_000

    driver = LoopDriver(asyncio.get_running_loop(), clock, tick, lambda error: None)
    driver.start()
    first_ns = await times.get()
    for _ in range(5):
        driver.wake()
    assert await times.get() - first_ns >= TICK_GAP_NS * 0.8
    for _ in range(5):
        await asyncio.sleep(0)
    driver.stop()
    assert times.empty()


async def test_after_a_stall_input_comes_first() -> None:
    """What the loop delivers within a few passes after a stall is seen by the core before its overdue timers."""
    watch, loop, order = Watch(), asyncio.get_running_loop(), list[str]()
    ticked = asyncio.Event()

    def tick(_: bool) -> int:
        order.append("tick")
        if order.count("tick") == 2:
            ticked.set()
        return watch.now_ns + (1_000_000 if len(order) == 1 else 10_000_000_000)

    driver = LoopDriver(loop, watch, tick, lambda error: None)
    driver.start()
    await asyncio.sleep(0)
    assert order == ["tick"]

    def arrive(passes: int) -> None:
        if passes:
            loop.call_soon(arrive, passes - 1)
        else:
            order.append("input")

    watch.now_ns += STALL_NS * 2
    time.sleep(STALL_NS * 2 / 1e9)  # noqa: ASYNC251  # the stall itself, for the loop's timers
    arrive(DRAIN_PASSES - 3)
    await ticked.wait()
    driver.stop()
    assert order == ["tick", "input", "tick"] and driver.stalls == 1


async def test_after_a_long_tick_the_loop_rests() -> None:
    """While a log is replayed slice by slice the interpreter is free for a moment after each: without that gRPC's own
    thread gets it so seldom that a node answers nobody for seconds."""
    clock, rests, ended_ns = BootClock(), list[int](), 0
    enough = asyncio.Event()

    def tick(_: bool) -> int:
        nonlocal ended_ns
        if ended_ns:
            rests.append(clock.monotonic_ns() - ended_ns)
        if len(rests) == 5:
            enough.set()
            return clock.monotonic_ns() + 10_000_000_000
        time.sleep(LONG_TICK_NS * 1.2 / 1e9)
        ended_ns = clock.monotonic_ns()
        return ended_ns

    driver = LoopDriver(asyncio.get_running_loop(), clock, tick, lambda error: None)
    driver.start()
    await enough.wait()
    driver.stop()
    assert min(rests) >= TICK_GAP_NS * 0.8


async def test_the_time_that_ticks_take_is_counted() -> None:
    """A long tick makes no lateness of its own, but input waits for it."""
    clock, loop, ticked = BootClock(), asyncio.get_running_loop(), asyncio.Event()

    def tick(_: bool) -> int:
        time.sleep(0.03)
        ticked.set()
        return clock.monotonic_ns() + 10_000_000_000

    driver = LoopDriver(loop, clock, tick, lambda error: None)
    driver.start()
    await ticked.wait()
    driver.stop()
    took = driver.took.value()
    assert sum(took.counts) == 1 and took.sum >= 0.03


async def test_a_tick_hears_whether_input_has_come() -> None:
    """Also of what came during the tick before. A timer alone is no input, nor is what came for the log alone."""
    watch, loop, told = Watch(), asyncio.get_running_loop(), list[bool]()
    first, timed = asyncio.Event(), asyncio.Event()

    def tick(woken: bool) -> int:
        told.append(woken)
        first.set()
        if len(told) == 2:
            driver.wake()
        if len(told) == 4:
            driver.wake_log()
        if len(told) == 5:
            timed.set()
        return watch.now_ns + (2_000_000 if len(told) == 3 else 3_600_000_000_000)

    driver = LoopDriver(loop, watch, tick, lambda error: None)
    driver.start()
    async with asyncio.timeout(20):
        await first.wait()
        driver.wake()
        await timed.wait()
    driver.stop()
    assert told == [True, True, True, False, False]


async def test_input_that_may_wait_moves_the_next_tick_no_further_than_it_says() -> None:
    """Later input may need it sooner, and whatever wakes the loop takes it along."""
    clock, ticks = BootClock(), asyncio.Queue[tuple[int, bool]]()

    def tick(woken: bool) -> int:
        ticks.put_nowait((clock.monotonic_ns(), woken))
        return clock.monotonic_ns() + 10_000_000_000

    driver = LoopDriver(asyncio.get_running_loop(), clock, tick, lambda error: None)
    driver.start()
    first_ns, _ = await ticks.get()
    driver.wake_within(9_000)
    driver.wake_within(20)
    driver.wake_within(5_000)
    assert ticks.empty()
    second_ns, woken = await ticks.get()
    assert woken and 19_000_000 <= second_ns - first_ns < 5_000_000_000
    driver.wake_within(9_000)
    driver.wake()
    driver.wake_within(9_000)
    third_ns, _ = await ticks.get()
    assert third_ns - second_ns < 9_000_000_000
    driver.wake_within(0)
    assert (await ticks.get())[0] - third_ns < 9_000_000_000
    driver.stop()
    driver.wake_within(10)
    assert ticks.empty()


async def test_a_stall_is_remembered_for_a_while() -> None:
    """A node that loses its mastership says that it was held up."""
    watch, ticked = Watch(), asyncio.Event()

    def tick(_: bool) -> int:
        ticked.set()
        return watch.now_ns + 10_000_000

    driver = LoopDriver(asyncio.get_running_loop(), watch, tick, lambda error: None)
    driver.start()
    await ticked.wait()
    assert driver.stall_ms(2_000) == 0
    ticked.clear()
    watch.now_ns += 10_000_000 + 300_000_000
    driver.wake()
    await ticked.wait()
    driver.stop()
    assert driver.stall_ms(2_000) == 300
    watch.now_ns += 2_001_000_000
    assert driver.stall_ms(2_000) == 0
