"""A worker against fake nodes: what is acknowledged, what comes again, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.client.fake_node import FakeNode
from tickwheel.client import (
    AsyncClient,
    Client,
    ClusterUnavailable,
    Dead,
    Delivery,
    Drop,
    Handler,
    RequestRefused,
    Retry,
    SyncDelivery,
    SyncWorker,
    Worker,
)
from tickwheel.client.handling import DEFAULT_RULES, action_of
from tickwheel.client.timing import REAL, Timer
from tickwheel.client.worker_metrics import Times, WorkerMetrics
from tickwheel.proto import consumer_pb2

SOON_S = 60.0


async def until(nodes: list[FakeNode], condition: Callable[[], bool]) -> None:
    """Wait until something holds that a request to a node brings about."""
    async with asyncio.timeout(SOON_S):
        while not condition():
            changed = nodes[0].state.changed
            if condition():
                return
            await changed.wait()


def outcomes(node: FakeNode) -> list[str]:
    """The settlements that a node got, by name."""
    return [consumer_pb2.Outcome.Name(settle.outcome) for node in [node] for settle in node.settles]


def acked(nodes: list[FakeNode]) -> int:
    """Messages settled by an acknowledgement."""
    return sum(outcome == consumer_pb2.ACK for outcome in nodes[0].state.settled.values())


async def test_handlers_by_topic_on_the_loop_and_in_threads(nodes: list[FakeNode]) -> None:
    """Each topic has its own; a coroutine runs on the loop, a function beside it; both are acknowledged."""
    seen: list[tuple[str, bytes, bool]] = []

    async def mail(delivery: Delivery) -> None:
        seen.append((delivery.topic, delivery.payload, threading.current_thread() is threading.main_thread()))

    def bill(delivery: Delivery) -> None:
        seen.append((delivery.topic, delivery.payload, threading.current_thread() is threading.main_thread()))

    async with AsyncClient(nodes[0].address) as client:
        for topic in ("mails", "bills"):
            await client.schedule(topic, b"x", delay_ms=0)
        worker = Worker(client, "g", {"mails": mail, "bills": bill})
        running = asyncio.ensure_future(worker.run())
        await until(nodes, lambda: acked(nodes) == 2)
        worker.stop()
        await asyncio.wait_for(running, SOON_S)
        assert worker.metrics.total("done") == 2 and worker.running == 0
    assert sorted(seen) == [("bills", b"x", False), ("mails", b"x", True)]


async def test_nothing_is_acknowledged_before_its_handler_returned(nodes: list[FakeNode]) -> None:
    """While it runs the node knows of no settlement."""
    began, may_end = asyncio.Event(), asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        began.set()
        await may_end.wait()

    async with AsyncClient(nodes[0].address) as client:
        await client.schedule("t", b"x", delay_ms=0)
        worker = Worker(client, "g", {"t": handler})
        running = asyncio.ensure_future(worker.run())
        await asyncio.wait_for(began.wait(), SOON_S)
        await client.schedule("t", b"later", delay_ms=60_000)  # a whole exchange with the node
        assert not nodes[0].settles
        may_end.set()
        await until(nodes, lambda: acked(nodes) == 1)
        worker.stop()
        await running


class Busy(ConnectionError):
    """A user's error that passes."""


class Wrong(ValueError):
    """A user's error that stays."""


@pytest.mark.parametrize(
    ("raised", "outcome", "delay_ms", "reason"),
    [
        (RuntimeError("no luck"), "RETRY", 0, "RuntimeError: no luck"),
        (Busy("too many"), "RETRY", 300_000, "Busy: too many"),
        (Wrong("no address"), "DEAD", 0, "Wrong: no address"),
        (KeyError("gone"), "ACK", 0, ""),
        (TimeoutError("7"), "RETRY", 7_000, "TimeoutError: 7"),
        (Retry(timedelta(seconds=3), reason="not yet"), "RETRY", 3_000, "not yet"),
        (Dead("by hand"), "DEAD", 0, "by hand"),
        (Drop(), "ACK", 0, ""),
    ],
)
async def test_what_follows_an_error(
    nodes: list[FakeNode], raised: Exception, outcome: str, delay_ms: int, reason: str
) -> None:
    """By the nearest class of the exception, or as the handler itself says; a function may choose."""

    async def handler(delivery: Delivery) -> None:
        raise raised

    rules: Any = {
        ConnectionError: Retry(timedelta(minutes=5)),
        ValueError: Dead,
        LookupError: Drop(),
        TimeoutError: lambda delivery, error: Retry(timedelta(seconds=int(str(error)))),
    }
    async with AsyncClient(nodes[0].address) as client:
        await client.schedule("t", b"x", delay_ms=0)
        worker = Worker(client, "g", {"t": handler}, on_error=rules, concurrency=1, prefetch=0)
        running = asyncio.ensure_future(worker.run())
        await until(nodes, lambda: bool(nodes[0].settles))
        worker.stop()
        await running
    first = nodes[0].settles[0]
    assert consumer_pb2.Outcome.Name(first.outcome) == outcome
    assert (first.delay_ms, first.reason) == (delay_ms, reason)


class Panic(BaseException):
    """As extensions in other languages raise it."""


async def test_no_error_of_a_handler_keeps_its_place(nodes: list[FakeNode], caplog: pytest.LogCaptureFixture) -> None:
    """Not one that is no Exception, from a thread not even SystemExit, nor one whose text is no UTF-8, as the name of a
    file may be: each message is settled, and the worker goes on."""
    caplog.set_level(logging.CRITICAL, "tickwheel.worker")  # pytest's processes tell each other UTF-8 alone
    errors = {b"a": Panic("a"), b"b": SystemExit(3), b"c": FileNotFoundError("\udcff"), b"d": KeyboardInterrupt()}

    def handler(delivery: Delivery) -> None:
        if delivery.attempt == 1:
            raise errors[delivery.payload]

    async def on_the_loop(delivery: Delivery) -> None:
        if delivery.attempt == 1:
            raise Panic("here")

    async with AsyncClient(nodes[0].address) as client:
        for payload in errors:
            await client.schedule("t", payload, delay_ms=0)
        await client.schedule("u", b"x", delay_ms=0)
        rules: Any = {OSError: Dead()}
        worker = Worker(client, "g", {"t": handler, "u": on_the_loop}, concurrency=1, prefetch=0, on_error=rules)
        running = asyncio.ensure_future(worker.run())
        await until(nodes, lambda: acked(nodes) == 5)
        worker.stop()
        await asyncio.wait_for(running, SOON_S)
    assert {settle.reason for settle in nodes[0].settles} == {
        *("Panic: a", "SystemExit: 3", "KeyboardInterrupt: ", "FileNotFoundError: ?", "Panic: here", "")
    }
    assert sorted(outcomes(nodes[0])) == [*["ACK"] * 5, "DEAD", *["RETRY"] * 4]


async def test_undecodable_payloads_become_dead_letters(nodes: list[FakeNode]) -> None:
    """By default: they will not be better next time."""

    async def handler(delivery: Delivery) -> None:
        delivery.json()

    async with AsyncClient(nodes[0].address) as client:
        await client.schedule("t", b"{", delay_ms=0)
        worker = Worker(client, "g", {"t": handler})
        running = asyncio.ensure_future(worker.run())
        await until(nodes, lambda: bool(nodes[0].settles))
        worker.stop()
        await running
    assert outcomes(nodes[0])[0] == "DEAD" and "no JSON" in nodes[0].settles[0].reason


def test_rules_of_a_handler_go_first() -> None:
    """Then those of the worker, then the defaults; the class that is nearest counts, not the order."""
    delivery: Any = None
    rules = {**DEFAULT_RULES, Exception: Dead(), OSError: Drop()}
    assert isinstance(action_of(ValueError(), delivery, rules)[0], Dead)
    assert isinstance(action_of(ConnectionError(), delivery, rules)[0], Drop)
    assert isinstance(action_of(ValueError(), delivery, DEFAULT_RULES)[0], Retry)
    assert action_of(ValueError(), delivery, DEFAULT_RULES)[1] is False
    with pytest.raises(RequestRefused, match="after"):
        Retry(timedelta(seconds=-1))


async def test_a_rule_that_fails_is_a_retry(nodes: list[FakeNode], caplog: pytest.LogCaptureFixture) -> None:
    """A mistake in a rule loses nothing, and the log has it."""

    async def handler(delivery: Delivery) -> None:
        raise ValueError("first")

    def rule(delivery: Delivery, error: Exception) -> Retry:
        raise RuntimeError("second")

    async with AsyncClient(nodes[0].address) as client:
        await client.schedule("t", b"x", delay_ms=0)
        worker = Worker(client, "g", {"t": handler}, on_error={ValueError: rule})
        running = asyncio.ensure_future(worker.run())
        await until(nodes, lambda: bool(nodes[0].settles))
        worker.stop()
        await running
    assert outcomes(nodes[0])[0] == "RETRY"
    assert "raised by the rule for ValueError: first" in caplog.text


async def test_a_handler_beyond_its_time_is_cancelled(nodes: list[FakeNode]) -> None:
    """It ends, then the message comes again; the time-out is counted."""
    ended: list[str] = []

    async def handler(delivery: Delivery) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(delivery.id)

    async with AsyncClient(nodes[0].address) as client:
        await client.schedule("t", b"x", delay_ms=0)
        handlers = {"t": Handler(handler, timeout=timedelta(milliseconds=50))}
        worker = Worker(client, "g", handlers, timeout=timedelta(hours=1))
        running = asyncio.ensure_future(worker.run())
        await until(nodes, lambda: bool(nodes[0].settles))
        assert ended
        worker.stop()
        await running
    assert outcomes(nodes[0])[0] == "RETRY" and "longer than 0:00:00.05" in nodes[0].settles[0].reason
    assert worker.metrics.topics["t"].timed_out >= 1


async def test_a_handler_that_ignores_its_cancellation(nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is settled while the handler runs on. The handler keeps its place, and its result settles nothing."""
    monkeypatch.setattr("tickwheel.client.worker.CANCEL_S", 0.05)
    may_end = asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                continue

    async with AsyncClient(nodes[0].address) as client:
        await client.schedule("t", b"x", delay_ms=0)
        worker = Worker(client, "g", {"t": handler}, concurrency=1, timeout=timedelta(milliseconds=20))
        running = asyncio.ensure_future(worker.run())
        await until(nodes, lambda: bool(nodes[0].settles))
        assert worker.running == 1
        may_end.set()
        await until(nodes, lambda: acked(nodes) == 1)
        worker.stop()
        await running
    assert outcomes(nodes[0]) == ["RETRY", "ACK"]  # the second delivery returned at once


async def test_a_thread_beyond_its_time_is_left_behind(nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its message comes again at the time-out and its place stays taken; its end settles nothing."""
    loop, began, may_end, attempts = asyncio.get_running_loop(), asyncio.Event(), threading.Event(), []
    limit, later = timedelta(minutes=5), REAL.call_later
    time_outs: list[Callable[[], None]] = []

    def handler(delivery: Delivery) -> None:
        attempts.append(delivery.attempt)
        loop.call_soon_threadsafe(began.set)
        if delivery.attempt == 1:
            may_end.wait(SOON_S)

    def call_later(delay_s: float, call: Callable[[], None]) -> Timer:
        if delay_s == limit.total_seconds():
            time_outs.append(call)
        return later(delay_s, call)

    monkeypatch.setattr(REAL, "call_later", call_later)
    async with AsyncClient(nodes[0].address) as client:
        await client.schedule("t", b"x", delay_ms=0)
        worker = Worker(client, "g", {"t": handler}, concurrency=2, timeout=limit)
        running = asyncio.ensure_future(worker.run())
        await asyncio.wait_for(began.wait(), SOON_S)
        time_outs[0]()
        await until(nodes, lambda: acked(nodes) == 1)
        assert worker.running == 1 and attempts == [1, 2]
        may_end.set()
        worker.stop()
        await asyncio.wait_for(running, SOON_S)
    assert outcomes(nodes[0]) == ["RETRY", "ACK"]
    assert worker.metrics.total("abandoned") == 0


async def test_a_stop_waits_for_what_runs(nodes: list[FakeNode]) -> None:
    """Sixteen run: all may end and are acknowledged, no other begins, and what waited comes to others."""
    may_end, began = asyncio.Event(), 0

    async def handler(delivery: Delivery) -> None:
        nonlocal began
        began += 1
        nodes[0].state.poke()
        await may_end.wait()

    async with AsyncClient(nodes[0].address) as client:
        for number in range(20):
            await client.schedule("t", str(number), delay_ms=0)
        worker = Worker(client, "g", {"t": handler}, drain_max=timedelta(minutes=5))
        running = asyncio.ensure_future(worker.run())
        await until(nodes, lambda: began == 16)
        worker.stop()
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.wait_for(running, SOON_S)
        assert began == acked(nodes) == 16
        again: list[str] = []

        async def other(delivery: Delivery) -> None:
            again.append(delivery.payload.decode())

        await until(nodes, lambda: nodes[0].consuming == 0)  # else the four go to nobody, under a new lease
        nodes[0].state.leased.clear()  # a node does this when the stream ends
        second = Worker(client, "g", {"t": other})
        running = asyncio.ensure_future(second.run())
        await until(nodes, lambda: acked(nodes) == 20)
        second.stop()
        await running
    assert sorted(again) == ["16", "17", "18", "19"]


async def test_after_a_stop_places_that_become_free_stay_free(nodes: list[FakeNode]) -> None:
    """Handlers end one by one: no other begins, and the node hands out nothing for what was settled."""
    began: list[asyncio.Event] = []

    async def handler(delivery: Delivery) -> None:
        may_end = asyncio.Event()
        began.append(may_end)
        nodes[0].state.poke()
        await may_end.wait()

    state = nodes[0].state
    async with AsyncClient(nodes[0].address) as client:
        for number in range(12):
            await client.schedule("t", str(number), delay_ms=0)
        worker = Worker(client, "g", {"t": handler}, concurrency=2, prefetch=2, drain_max=timedelta(minutes=5))
        running = asyncio.ensure_future(worker.run())
        await until(nodes, lambda: len(began) == 2 and len({*state.leased, *state.settled}) == 4)
        worker.stop()
        for _ in range(10):
            await asyncio.sleep(0)  # the worker notices
        for settled in (1, 2):
            began[settled - 1].set()
            await until(nodes, lambda settled=settled: acked(nodes) == settled)  # type: ignore[misc]
        await asyncio.wait_for(running, SOON_S)
    assert len(began) == 2 and len({*state.leased, *state.settled}) == 4


async def test_a_handler_that_ends_after_its_worker_is_counted_once(
    nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ignored that the worker cancelled it, and was given up."""
    monkeypatch.setattr("tickwheel.client.worker.CANCEL_S", 0.05)
    began, may_end, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        began.set()
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                asyncio.current_task().uncancel()  # type: ignore[union-attr]
        ended.set()

    async with AsyncClient(nodes[0].address) as client:
        await client.schedule("t", b"x", delay_ms=0)
        worker = Worker(client, "g", {"t": handler}, drain_max=timedelta(0))
        running = asyncio.ensure_future(worker.run())
        await asyncio.wait_for(began.wait(), SOON_S)
        worker.stop()
        await asyncio.wait_for(running, SOON_S)
        assert worker.running == 0 and worker.metrics.topics["t"].abandoned == 1
        may_end.set()
        await asyncio.wait_for(ended.wait(), SOON_S)
        await asyncio.sleep(0)
        assert worker.metrics.topics["t"].running == 0 and not nodes[0].settles


@pytest.mark.parametrize("how", ["over", "second"])
async def test_what_does_not_end_in_time_is_left(nodes: list[FakeNode], how: str) -> None:
    """After `drain_max`, or at once on a second stop: cancelled, not settled, counted."""
    began, cancelled = asyncio.Event(), []

    async def handler(delivery: Delivery) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(delivery.id)
            raise

    drain = timedelta(milliseconds=50) if how == "over" else timedelta(hours=1)
    async with AsyncClient(nodes[0].address) as client:
        await client.schedule("t", b"x", delay_ms=0)
        worker = Worker(client, "g", {"t": handler}, drain_max=drain)
        running = asyncio.ensure_future(worker.run())
        await asyncio.wait_for(began.wait(), SOON_S)
        worker.stop()
        if how == "second":
            worker.stop(now=True)
        await asyncio.wait_for(running, SOON_S)
        assert cancelled and not nodes[0].settles
        assert worker.metrics.topics["t"].abandoned == 1 and worker.running == 0


async def test_a_signal_stops_and_a_second_one_hurries(nodes: list[FakeNode]) -> None:
    """SIGTERM twice, as a supervisor that grows impatient sends it; handlers that were there before come back."""
    began = asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        began.set()
        await asyncio.Event().wait()

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    async with AsyncClient(nodes[0].address) as client:
        await client.schedule("t", b"x", delay_ms=0)
        worker = Worker(client, "g", {"t": handler}, drain_max=timedelta(hours=1))
        running = asyncio.ensure_future(worker.run())
        await asyncio.wait_for(began.wait(), SOON_S)
        os.kill(os.getpid(), signal.SIGTERM)
        done, _ = await asyncio.wait({running}, timeout=0.05)
        assert not done and worker.running == 1
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(running, SOON_S)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


async def test_a_worker_whose_task_is_cancelled_settles_nothing_more(nodes: list[FakeNode]) -> None:
    """Its handlers are cancelled too, and the consumer is closed."""
    began = asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        began.set()
        await asyncio.Event().wait()

    async with AsyncClient(nodes[0].address) as client:
        await client.schedule("t", b"x", delay_ms=0)
        running = asyncio.ensure_future(Worker(client, "g", {"t": handler}).run())
        await asyncio.wait_for(began.wait(), SOON_S)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not nodes[0].settles and not client._consumers


async def test_a_change_of_master_under_running_handlers(nodes: list[FakeNode]) -> None:
    """They go on; their acknowledgements go to the next master, and each message is handled once."""
    may_end, attempts = asyncio.Event(), []

    async def handler(delivery: Delivery) -> None:
        attempts.append((delivery.payload, delivery.attempt))
        nodes[0].state.poke()
        await may_end.wait()

    async with AsyncClient([node.address for node in nodes]) as client:
        for number in range(8):
            await client.schedule("t", str(number), delay_ms=0)
        worker = Worker(client, "g", {"t": handler})
        running = asyncio.ensure_future(worker.run())
        await until(nodes, lambda: len(attempts) == 8)
        nodes[1].lead(knows_leases=True)
        may_end.set()
        await until(nodes, lambda: acked(nodes) == 8)
        worker.stop()
        await asyncio.wait_for(running, SOON_S)
    assert len(attempts) == 8 and {attempt for _, attempt in attempts} == {1}


async def test_a_cluster_that_is_gone_ends_the_worker_with_its_error(nodes: list[FakeNode]) -> None:
    """Once what runs has ended; the message is not lost, since nothing was acknowledged."""
    may_end, began = asyncio.Event(), asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        began.set()
        await may_end.wait()

    async with AsyncClient([node.address for node in nodes]) as client:
        await client.schedule("t", b"x", delay_ms=0)
        worker = Worker(client, "g", {"t": handler}, unavailable_s_max=0.2)
        running = asyncio.ensure_future(worker.run())
        await asyncio.wait_for(began.wait(), SOON_S)
        for node in nodes:
            await node.stop()
        done, _ = await asyncio.wait({running}, timeout=1.0)
        assert not done, "the handler still runs"
        may_end.set()
        with pytest.raises(ClusterUnavailable):
            await asyncio.wait_for(running, SOON_S)


async def test_no_more_handlers_run_than_allowed(nodes: list[FakeNode]) -> None:
    """Whatever is prefetched; the worker never holds more than both."""
    most = now = 0

    async def handler(delivery: Delivery) -> None:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1

    async with AsyncClient(nodes[0].address) as client:
        async with client.producer() as producer:
            await producer.schedule_many("t", [(1, b"x")] * 200)
        for prefetch in (0, 5):
            worker = Worker(client, f"g{prefetch}", {"t": handler}, concurrency=3, prefetch=prefetch)
            running = asyncio.ensure_future(worker.run())
            total = 200 * (1 + (prefetch > 0))
            await until(nodes, lambda total=total: acked(nodes) == total)  # type: ignore[misc]
            worker.stop()
            await running
            assert worker.metrics.total("done") == 200
    assert most == 3


async def test_logs_have_fields(nodes: list[FakeNode], caplog: pytest.LogCaptureFixture) -> None:
    """One line for an error, with a traceback if no rule foresaw it, and with fields for machines."""
    caplog.set_level(logging.DEBUG, "tickwheel.worker")

    async def handler(delivery: Delivery) -> None:
        if delivery.attempt == 1:
            raise RuntimeError("no luck")

    async with AsyncClient(nodes[0].address) as client:
        receipt = await client.schedule("t", b"x", delay_ms=0)
        worker = Worker(client, "g", {"t": handler})
        running = asyncio.ensure_future(worker.run())
        await until(nodes, lambda: acked(nodes) == 1)
        worker.stop()
        await running
    records = [vars(record) for record in caplog.records if "message_id" in vars(record)]
    assert [record["outcome"] for record in records] == ["retried", "done"]
    first = records[0]
    assert (first["group"], first["topic"], first["message_id"], first["attempt"]) == ("g", "t", receipt.id, 1)
    assert first["duration_s"] >= 0 and "RuntimeError: no luck" in caplog.text and "Traceback" in caplog.text
    assert records[1]["levelno"] == logging.DEBUG


async def test_metrics_for_prometheus(nodes: list[FakeNode]) -> None:
    """Two workers share a registry, the global one too, which looks for doubles."""
    registry = CollectorRegistry(auto_describe=True)

    async def handler(delivery: Delivery) -> None:
        if delivery.attempt == 1 and delivery.topic == "t":
            raise RuntimeError

    async with AsyncClient(nodes[0].address) as client:
        await client.schedule("t", b"x", delay_ms=0)
        await client.schedule("u", b"x", delay_ms=0)
        workers = [Worker(client, group, {"t": handler, "u": handler}, registry=registry) for group in ("g", "h")]
        running = [asyncio.ensure_future(worker.run()) for worker in workers]
        await until(nodes, lambda: acked(nodes) == 4)
        for worker in workers:
            worker.stop()
        await asyncio.gather(*running)
    page = generate_latest(registry).decode()
    assert 'tickwheel_worker_deliveries_total{group="g",outcome="retried",topic="t"} 1.0' in page
    assert 'tickwheel_worker_deliveries_total{group="h",outcome="done",topic="u"} 1.0' in page
    assert 'tickwheel_worker_handler_seconds_bucket{group="g",le="+Inf",topic="t"} 2.0' in page
    assert 'tickwheel_worker_running{group="g",topic="t"} 0.0' in page


def test_times_are_counted_by_bounds() -> None:
    """A bound belongs to its own bucket; what lies in the past by a wrong clock counts as 0."""
    times = Times()
    for seconds in (-5.0, 0.001, 0.002, 5_000.0):
        times.note(seconds)
    assert times.count == 4 and times.counts[:2] == [2, 1] and times.counts[-1] == 1
    assert times.longest_s == 5_000.0 and times.mean_s == pytest.approx(5_000.003 / 4)
    assert WorkerMetrics("g").total("done") == 0


@pytest.mark.parametrize(
    ("handlers", "options", "field"),
    [
        ({}, {}, "handlers"),
        ({"t": "no function"}, {}, "handlers"),
        ({"t": print}, {"concurrency": 0}, "concurrency"),
        ({"t": print}, {"prefetch": -1}, "prefetch"),
        ({"t": print}, {"timeout": timedelta(0)}, "timeout"),
        ({"t": print}, {"timeout": 5}, "timeout"),
        ({"t": print}, {"drain_max": 5}, "drain_max"),
    ],
)
async def test_wrong_arguments_are_refused(handlers: Any, options: Any, field: str) -> None:
    """When the worker is made, with the argument's name."""
    async with AsyncClient("127.0.0.1:9") as client:
        with pytest.raises(RequestRefused) as caught:
            Worker(client, "g", handlers, **options)
        assert caught.value.field == field


async def test_renewals_can_be_switched_off(nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch) -> None:
    """A `hold_max` of nothing is nothing, as for a consumer: it must not count as left out."""
    held: list[timedelta] = []

    def consumer(*args: object, hold_max: timedelta, **options: object) -> None:
        held.append(hold_max)
        raise AssertionError("enough is known")

    async with AsyncClient(nodes[0].address) as client:
        monkeypatch.setattr(client, "consumer", consumer)
        for given in (timedelta(0), timedelta(seconds=3)):
            with pytest.raises(AssertionError, match="enough"):
                await Worker(client, "g", {"t": lambda delivery: None}, hold_max=given).run()
    assert held == [timedelta(0), timedelta(seconds=3)]


async def test_a_worker_runs_once(nodes: list[FakeNode]) -> None:
    """A second run says so."""
    async with AsyncClient(nodes[0].address) as client:
        worker = Worker(client, "g", {"t": print})
        worker.stop()
        await worker.run()
        with pytest.raises(RequestRefused, match="make another"):
            await worker.run()


async def test_the_blocking_worker(nodes: list[FakeNode]) -> None:
    """Handlers in threads may call the blocking client; another thread stops it; errors come again."""
    seen: list[tuple[int, int]] = []

    def work() -> SyncWorker:
        with Client(nodes[0].address) as client:
            client.schedule("t", {"n": 1}, delay_ms=0)

            def handler(delivery: SyncDelivery) -> None:
                seen.append((delivery.json()["n"], delivery.attempt))
                if delivery.attempt == 1:
                    raise RuntimeError("again")
                if delivery.json()["n"] == 1:
                    client.schedule("t", {"n": 2}, delay_ms=0)
                elif delivery.attempt == 2:
                    worker.stop()

            worker = SyncWorker(client, "g", {"t": handler}, concurrency=2)
            worker.run()
            return worker

    worker = await asyncio.wait_for(asyncio.to_thread(work), SOON_S)
    assert seen == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert (worker.metrics.total("done"), worker.metrics.total("retried"), worker.running) == (2, 2, 0)
    assert acked(nodes) == 2 and worker.group == "g"


async def test_the_blocking_worker_takes_no_coroutines(nodes: list[FakeNode]) -> None:
    """They would block the loop that they wait for."""

    async def handler(delivery: SyncDelivery) -> None:
        pass

    def work() -> None:
        with Client(nodes[0].address) as client, pytest.raises(RequestRefused, match="Worker takes"):
            SyncWorker(client, "g", {"t": handler})

    await asyncio.to_thread(work)


async def test_many_short_handlers_share_few_threads(nodes: list[FakeNode]) -> None:
    """Threads are used again; no thread for each call."""
    names: set[str] = set()

    def handler(delivery: Delivery) -> None:
        names.add(threading.current_thread().name)

    async with AsyncClient(nodes[0].address) as client:
        async with client.producer() as producer:
            await producer.schedule_many("t", [(1, b"x")] * 300)
        worker = Worker(client, "g", {"t": handler}, concurrency=4)
        running = asyncio.ensure_future(worker.run())
        await until(nodes, lambda: acked(nodes) == 300)
        worker.stop()
        await running
    assert len(names) <= 4
