"""The synchronous client, against fake nodes on a loop of another thread."""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any, assert_type

import pytest

from tests.client.fake_node import FakeNode, FakeState
from tickwheel.client import (
    AsyncClient,
    Client,
    ClientClosed,
    Group,
    Message,
    Receipt,
    RequestRefused,
    Sweep,
    SyncDelivery,
    TickwheelError,
)
from tickwheel.client.calls import listed
from tickwheel.client.delivery import Settler

SOON_S = 30.0


@pytest.fixture
def address() -> Iterator[str]:
    """One fake node that is master."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> FakeNode:
        node = await FakeNode(FakeState(), "n1").start()
        node.lead()
        return node

    node = asyncio.run_coroutine_threadsafe(start(), loop).result()

    async def stop() -> None:
        await node.stop()
        # A handler of a stream that is left on a closed loop fails a later test, when the collector finds it.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    yield node.address
    asyncio.run_coroutine_threadsafe(stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_schedule_consume_and_list(address: str) -> None:
    """Calls wait; the consumer is an iterator; nothing within the time is None."""
    with Client(address) as client:
        ids = [client.schedule("t", f"{number}", delay_ms=0).id for number in range(5)]
        assert [message.id for message in client.list_pending()] == ids
        assert client.cancel(ids[4]) == "CANCELLED"
        seen = []
        with client.consumer("g", "t") as consumer:
            for delivery in consumer:
                delivery.ack()
                seen.append(delivery.id)
                if len(seen) == 4:
                    break
            assert consumer.next(timeout_s=0.05) is None
        assert seen == ids[:4]


@pytest.mark.parametrize(
    "wrong", [{}, {"due_ms": 1, "level": 2}, {"delay_ms": -1}, {"due_ms": "soon"}, {"due_ms": 1.5}]
)
def test_wrong_times_are_refused_before_they_travel(address: str, wrong: dict[str, Any]) -> None:
    """Exactly one way to say when, a whole number within bounds: the error names the field."""
    with Client(address) as client:
        with pytest.raises(RequestRefused) as caught:
            client.schedule("t", b"x", **wrong)
        assert caught.value.field in {"when", "delay_ms", "due_ms"}
        assert caught.value.limit


def test_a_wrong_address_is_refused() -> None:
    """host:port, or a sentence; no thread stays behind."""
    before = threading.active_count()
    with pytest.raises(RequestRefused, match="host:port"):
        Client("nowhere")
    assert threading.active_count() == before


NOT_FOR_CALLERS = {
    *(name for name in vars(Settler) if not name.startswith("_")),
    "leave",
    "held_rows",
    "columns",
    "cluster",
}
"""What deliveries, batches and the client use of each other."""


def test_it_has_all_of_the_asynchronous_one(address: str) -> None:
    """Of the client, its parts, producers, consumers, batches and deliveries, with the same parameters: what is added
    to one without the other fails here."""
    with Client(address) as client, client.producer() as producer, client.consumer("g", "t") as consumer:
        client.schedule("t", "x", delay_ms=0)
        client.schedule("t", "y", delay_ms=0)
        batch = next(consumer.batches())
        delivery = next(iter(batch))
        batch.ack()
        pairs: list[tuple[Any, Any]] = [(client, client.inner), (producer, producer.inner), (consumer, consumer.inner)]
        attempt = client.staging.attempt("job", "run", 0)
        pairs += [(batch, batch.inner), (delivery, delivery.inner), (attempt, attempt.inner)]
        pairs += [
            (getattr(client, name), part)
            for name, part in vars(client.inner).items()
            if type(part).__name__.endswith("Client")
        ]
        assert len(pairs) > 13
        for blocking, asynchronous in pairs:
            kind = type(asynchronous)
            names = {*dir(kind), *getattr(asynchronous, "__dict__", {})} - NOT_FOR_CALLERS
            for name in sorted(name for name in names if not name.startswith("_")):
                assert hasattr(blocking, name), f"{kind.__name__}.{name}"
                method = getattr(kind, name, None)
                if inspect.isfunction(method):
                    offered = inspect.signature(getattr(type(blocking), name)).parameters
                    wanted = inspect.signature(method).parameters
                    assert {n: p.kind for n, p in offered.items()} == {n: p.kind for n, p in wanted.items()}, name


def test_batches_and_handlers_in_threads(address: str) -> None:
    """A batch is acknowledged as one; `run` calls handlers in threads and nacks what they raise."""
    with Client(address) as client:
        with client.producer() as producer:
            futures = producer.schedule_many("t", [(1, b"%d" % number) for number in range(6)])
            futures.append(producer.schedule_columns("t", [1, 1], [1, 1], b"67"))
            assert sum(len(future.result(10).ids) for future in futures) == 8
        with client.consumer("g", "t", messages_max=8) as consumer:
            batch = next(consumer.batches())
            assert len(batch) == len(batch.payloads()) == len(list(batch)) and batch.unsettled == len(batch)
            batch.ack()
            assert batch.unsettled == 0
        left = {*(b"%d" % n for n in range(8))} - {*batch.payloads()}
        seen: list[bytes] = []

        def handle(delivery: SyncDelivery) -> None:
            assert threading.current_thread() is not threading.main_thread()
            seen.append(delivery.payload)
            if delivery.attempt == 1 and delivery.payload == b"7":
                raise RuntimeError("planned")

        client.schedule("t", "8", delay_ms=0)
        left.add(b"8")
        with client.consumer("g", "t", messages_max=len(left)) as consumer:
            consumer.run(handle, concurrency=2)
        assert {*seen} == left


def test_users_see_the_types_of_the_asynchronous_methods(address: str) -> None:
    """mypy checks these lines; parameters and docstrings are there for people."""
    with Client(address) as client:
        receipt = client.schedule("t", "x", delay_ms=60_000)
        assert_type(receipt, Receipt)
        for message in client.list_pending("t"):
            assert_type(message, Message)
        with pytest.raises(TypeError, match="no_such"):
            client.get(receipt.id, no_such=1)  # type: ignore[call-arg]
        if not receipt.id:
            assert_type(client.get(receipt.id), Message)
            assert_type(client.sweeps.get("job"), Sweep)
            assert_type(client.admin.groups(), list[Group])
    assert Client.schedule.__doc__ == AsyncClient.schedule.__doc__
    assert list(inspect.signature(Client.schedule).parameters)[:3] == ["self", "topic", "payload"]


def test_a_producer_gives_futures_to_its_thread(address: str) -> None:
    """`send` waits for room only; the receipt comes later."""
    with Client(address) as client:
        with client.producer() as producer:
            futures = [producer.send("t", f"{number}", delay_ms=60_000) for number in range(3)]
            assert len({future.result(10).id for future in futures}) == 3
        assert len(list(client.list_pending("t"))) == 3


def in_threads(count: int, work: Callable[[], object]) -> list[object]:
    """What each of some threads returned or raised. Fails if one hangs."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
        assert not thread.is_alive()
    return results


def test_any_thread_may_close_it(address: str) -> None:
    """Several at once too, and while others wait: each of them is told."""
    for _ in range(5):
        client = Client(address)
        consumer = client.consumer("g", "t")
        client.schedule("t", "x", delay_ms=60_000)
        works = iter([*[partial(consumer.next, None)] * 2, *[client.close] * 4])
        results = in_threads(6, lambda works=works: next(works)())  # type: ignore[misc]
        assert all(result is None or isinstance(result, ClientClosed) for result in results), results


def test_a_consumer_that_is_closed_elsewhere_has_no_next(address: str) -> None:
    """A thread that waits for it gets None; so does a later call."""
    with Client(address) as client:
        consumer = client.consumer("g", "t")
        threading.Timer(0.05, consumer.close).start()
        assert in_threads(1, lambda: consumer.next(None)) == [None]
        assert in_threads(1, lambda: list(consumer)) == [[]]
        assert in_threads(1, lambda: list(consumer.batches())) == [[]]


def test_a_callback_cannot_wait_for_its_own_thread(address: str) -> None:
    """It is told, instead of waiting for ever; and whatever it raises, the client goes on."""
    with Client(address) as client:
        told: list[BaseException] = []

        def callback(future: Future[Receipt]) -> None:
            try:
                client.schedule("t", "y", delay_ms=60_000)
            except RequestRefused as error:
                told.append(error)
            raise SystemExit

        with client.producer() as producer:
            future = producer.send("t", "x", delay_ms=60_000)
            future.add_done_callback(callback)
            assert future.result(SOON_S).id
            producer.flush()
        assert in_threads(1, lambda: len(list(client.list_pending("t")))) == [1]
        assert [error.field for error in told if isinstance(error, RequestRefused)] == ["thread"]


# A signal may come between the making of a coroutine and its start on the loop: then Python warns, and nothing began.
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_signal_takes_nothing_away(address: str) -> None:
    """Its handler may raise while the consumer is waited for. What came meanwhile is the next call's."""

    class Alarm(Exception):
        """Of the handler."""

    def alarm(number: int, frame: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, alarm)
    try:
        with Client(address) as client, client.consumer("g", "t") as consumer:
            seen = []
            for number in range(30):
                try:
                    # Again and again: what a callback of the garbage collector raises is only reported.
                    signal.setitimer(signal.ITIMER_REAL, 0.002 + number / 10_000, 5.0)
                    consumer.next(None)
                    raise AssertionError("nothing was scheduled")
                except Alarm:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                client.schedule("t", f"{number}", delay_ms=0)
                delivery = consumer.next(SOON_S)
                assert delivery is not None
                delivery.ack()
                seen.append(delivery.payload)
            assert seen == [b"%d" % number for number in range(30)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_handler_that_exits_ends_its_call(address: str) -> None:
    """And not the loop that all threads of the client wait for."""
    with Client(address) as client, client.consumer("g", "t", messages_max=2) as consumer:
        client.schedule("t", "x", delay_ms=0)
        attempts: list[int] = []

        def handle(delivery: SyncDelivery) -> None:
            attempts.append(delivery.attempt)
            if delivery.attempt == 1:
                raise SystemExit

        assert in_threads(1, lambda: consumer.run(handle)) == [None]
        assert attempts == [1, 2]


async def test_an_endless_listing_is_refused() -> None:
    """A page without items that says that more follows would be asked for again for ever."""
    pages = iter([SimpleNamespace(found=[1, 2], more=True), SimpleNamespace(found=[], more=True)])
    asked: list[int | None] = []

    async def fetch(last: int | None) -> Any:
        asked.append(last)
        return next(pages)

    with pytest.raises(TickwheelError, match="empty page"):
        await listed(fetch, lambda page: page.found)
    assert asked == [None, 2]
