"""A worker: calls a handler for each delivery of a group, and settles the delivery by how that ends.

Owns the handlers that run and the end of the worker. Invariants:
- A delivery is acknowledged only after its handler has returned, or by a rule that says Drop. It is settled once at
  most.
- At most `concurrency` handlers run. One that outlives its time-out takes its place until it really ends, although its
  delivery is given back at the time-out.
- The consumer below renews leases, reopens its stream at the next master, and repeats settlements.
- After `stop` no handler begins. Running handlers have `drain_max` to end. Then they are cancelled and their deliveries
  not settled: these come again, like all that wait in the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from tickwheel.client.async_client import AsyncClient
from tickwheel.client.consumer import HOLD_S_MAX, UNAVAILABLE_S_MAX, Consumer
from tickwheel.client.delivery import Delivery, SettleReceipt
from tickwheel.client.errors import TickwheelError, check_names, refused
from tickwheel.client.handler_threads import HandlerThreads
from tickwheel.client.handling import DEFAULT_RULES, Dead, Drop, Handler, Retry, Rules, action_of
from tickwheel.client.moments import span_ms_of
from tickwheel.client.requests import checked_count
from tickwheel.client.states import StartFrom
from tickwheel.client.tasks import start_task
from tickwheel.client.timing import Timer
from tickwheel.client.worker_metrics import TopicMetrics, WorkerMetrics

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from tickwheel.client.tracing import Handling

_log = logging.getLogger("tickwheel.worker")

CONCURRENCY = 16
DRAIN_MAX = timedelta(seconds=20)
"""With the ends of handlers that are cancelled and of settlements it stays below the 30 s that Kubernetes gives."""
CANCEL_S = 2.0
"""How long a cancelled handler may take to end."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class HandlerTimeout(TickwheelError):
    """A handler took longer than its time-out."""


class WorkerOptions(TypedDict, total=False):
    """How a worker works; what is left out has the default named here."""

    concurrency: int
    """Handlers that run at a time; 16."""
    prefetch: int
    """Messages that wait in the worker, so that a handler begins as soon as another has ended; by default as many as
    `concurrency`. 0 suits handlers that take long: what waits here could run in another worker."""
    timeout: timedelta | None
    """The longest that a handler may take; None: no limit."""
    on_error: Rules
    """What follows which exception of a handler; these rules go before DEFAULT_RULES."""
    drain_max: timedelta
    """How long running handlers may take to end after a signal or `stop`; DRAIN_MAX."""
    signals: Collection[signal.Signals]
    """Signals that stop it, if it runs in the main thread; SIGINT and SIGTERM. Without any the program calls `stop`."""
    registry: CollectorRegistry | None
    """Shows `metrics` to Prometheus."""
    name: str
    """Of the consumer, for logs and status."""
    start_from: StartFrom | datetime
    """Where a new group starts; EARLIEST."""
    filter: str
    """Tags that a new group takes: `a || b`, or `*`."""
    lease: timedelta | None
    """Of a delivery; None: the node's default."""
    hold_max: timedelta | None
    """How long leases are renewed; 0: never; None: an hour, or longer if a time-out needs that."""
    unavailable_s_max: float
    """Seconds without a master after which `run` raises ClusterUnavailable; 60. math.inf: never."""


class _Call:
    """One call of a handler."""

    __slots__ = (
        *("began_s", "delivery", "from_thread", "handler", "in_thread", "metrics", "on_loop"),
        *("settled", "span", "task", "timed_out", "timer"),
    )

    def __init__(self, delivery: Delivery, handler: Handler, metrics: TopicMetrics, *, on_loop: bool) -> None:
        self.delivery = delivery
        self.handler = handler
        self.on_loop = on_loop
        """Whether the handler runs on the loop; else in a thread."""
        self.metrics = metrics
        self.in_thread = False
        self.from_thread = False
        """Whether its error was raised in a thread."""
        self.began_s = time.monotonic()
        self.settled = False
        self.timed_out = False
        self.timer: Timer | None = None
        self.task: asyncio.Task[None] | None = None
        self.span: Handling | None = None

    def __str__(self) -> str:
        return f"the handling of message {self.delivery.id}"

    def traced(self) -> AbstractContextManager[None]:
        """Spans begun inside are children of the handler's."""
        return self.span.current() if self.span is not None else contextlib.nullcontext()


class Worker:
    """Calls handlers for the deliveries of one group. Use it once: `await Worker(...).run()`."""

    def __init__(
        self,
        client: AsyncClient,
        group: str,
        handlers: Mapping[str, Callable[[Delivery], object] | Handler],
        **options: Unpack[WorkerOptions],
    ) -> None:
        """`handlers`: by topic. A coroutine function runs on the loop, any other function in a thread. It gets the
        Delivery and does not settle it. Raises RequestRefused for a wrong argument, TypeError for one that is none.
        """
        check_names(options, WorkerOptions)
        if not isinstance(handlers, Mapping):
            raise refused("handlers", repr(handlers), "a mapping of topics to functions")
        if not handlers:
            raise refused("handlers", "none", "a handler for at least one topic")
        concurrency = checked_count("concurrency", options.get("concurrency", CONCURRENCY), 1)
        prefetch = checked_count("prefetch", options.get("prefetch", concurrency), 0)
        self._client = client
        self._time = client.cluster.time
        self.group = group
        rules = {**DEFAULT_RULES, **options.get("on_error", {})}
        timeout, registry = options.get("timeout"), options.get("registry")
        self._handlers = {topic: _completed(handler, timeout, rules) for topic, handler in handlers.items()}
        self._no_handler = Handler(_no_handler, None, rules)
        self._on_loop = {topic: is_async(handler.call) for topic, handler in self._handlers.items()}
        self._concurrency = concurrency
        hold_max = options.get("hold_max")
        self._drain_s = span_ms_of("drain_max", options.get("drain_max", DRAIN_MAX)) / 1_000
        self._signals = options.get("signals", SIGNALS)
        self._options: dict[str, Any] = {
            "credits": concurrency + prefetch,
            "name": options.get("name", ""),
            "start_from": options.get("start_from", StartFrom.EARLIEST),
            "filter": options.get("filter", ""),
            "lease": options.get("lease"),
            "hold_max": _hold_max(self._handlers.values(), prefetch / concurrency) if hold_max is None else hold_max,
            "unavailable_s_max": options.get("unavailable_s_max", UNAVAILABLE_S_MAX),
        }
        self.metrics = WorkerMetrics(group)
        if registry is not None:
            self.metrics.export(registry)
        self._threads = HandlerThreads(f"tickwheel-{group}")
        self._slots = asyncio.Semaphore(concurrency)
        self._calls: set[_Call] = set()
        self._stopping = asyncio.Event()
        self._hurrying = asyncio.Event()
        self._begun = False
        self._fault: BaseException | None = None
        """What ended the task of a call without a settlement."""

    @property
    def running(self) -> int:
        """Number of handlers that run."""
        return len(self._calls)

    def stop(self, *, now: bool = False) -> None:
        """End: no handler begins any more, those that run may end within `drain_max`. `now`: they are cancelled.

        For the loop's thread. Idempotent.
        """
        self._stopping.set()
        if now:
            self._hurrying.set()

    async def run(self) -> None:
        """Handle deliveries until a signal, `stop`, or an error of the cluster or of this worker, which is raised once
        the running handlers have ended. Returns after settlements have been sent and answered."""
        if self._begun:
            raise refused("run", "again", "once: make another worker")
        self._begun = True
        consumer = self._client.consumer(self.group, list(self._handlers), **self._options)
        feeding = asyncio.ensure_future(self._feed(consumer))
        stopped = asyncio.ensure_future(self._stopping.wait())
        _log.info(
            "worker of group %s: handles %s", self.group, ", ".join(self._handlers),
            extra={"group": self.group, "topics": list(self._handlers), "concurrency": self._concurrency},
        )  # fmt: skip
        try:
            with self._signals_taken():
                await asyncio.wait({feeding, stopped}, return_when=asyncio.FIRST_COMPLETED)
                consumer.stop_taking()
                self._stopping.set()
                await self._drain()
        finally:
            # Whatever ends it: nothing that still runs is settled.
            left = [call.task for call in self._calls if call.task is not None]
            for task in (*left, feeding, stopped):
                task.cancel()
            await asyncio.wait({*left, feeding, stopped}, timeout=CANCEL_S)
            self._abandon()
            await consumer.close()
            self._threads.stop()
        if not feeding.cancelled() and (error := feeding.exception()) is not None:
            raise error
        if self._fault is not None:
            raise self._fault

    def _failed(self, error: BaseException) -> None:
        """A delivery was neither settled nor given back: only the end of the consumer has it delivered again."""
        self._fault = self._fault or error
        self.stop()

    async def _feed(self, consumer: Consumer) -> None:
        """Begin a handler for each delivery, when there is room."""
        async for delivery in consumer:
            await self._slots.acquire()
            if self._stopping.is_set():
                return  # not settled: it comes again
            self._begin(delivery)

    async def _drain(self) -> None:
        """Wait for the handlers that run, as long as they may take."""
        tasks = {call.task for call in self._calls if call.task is not None}
        if not tasks:
            return
        _log.info(
            "worker of group %s: ends once %d handlers have, within %g s", self.group, len(tasks), self._drain_s,
            extra={"group": self.group, "running": len(tasks), "drain_s": self._drain_s},
        )  # fmt: skip
        hurried = asyncio.ensure_future(self._hurrying.wait())
        end_s = time.monotonic() + self._drain_s
        try:
            while tasks and not hurried.done() and (left_s := end_s - time.monotonic()) > 0:
                await asyncio.wait({*tasks, hurried}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                tasks = {task for task in tasks if not task.done()}
        finally:
            hurried.cancel()

    def _abandon(self) -> None:
        for call in list(self._calls):
            self._ended(call, asyncio.CancelledError("the worker ended"))
            if not call.settled:
                call.settled = True
                call.metrics.abandoned += 1
                self._say(logging.WARNING, call, "was still running when the worker ended: it comes again", "abandoned")

    # -- one delivery

    def _begin(self, delivery: Delivery) -> None:
        topic = delivery.topic
        metrics = self.metrics.topic(topic)
        handler, on_loop = self._handlers.get(topic, self._no_handler), self._on_loop.get(topic, True)
        call = _Call(delivery, handler, metrics, on_loop=on_loop)
        metrics.running += 1
        metrics.lateness.note(self._time.wall_s() - delivery.due_ms / 1_000)
        if self._client.tracing is not None:
            call.span = self._client.tracing.handling(delivery, self.group)
        self._time.hold(call)
        call.task = start_task(self._run(call), call, self._failed)
        self._calls.add(call)
        if call.handler.timeout is not None:
            call.timer = self._time.call_later(call.handler.timeout.total_seconds(), partial(self._time_out, call))

    async def _run(self, call: _Call) -> None:
        error: BaseException | None = None
        try:
            with call.traced():
                await self._called(call)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            if call.timed_out:
                task.uncancel()
            if task.cancelling():
                raise  # the worker or the program ends: `_abandon` sees to the rest
            error = self._timeout_error(call) if call.timed_out else RuntimeError("the handler cancelled itself")
        except (KeyboardInterrupt, SystemExit, GeneratorExit) as raised:
            if not call.from_thread:
                raise  # the program ends
            error = raised
        except BaseException as raised:  # a panic of an extension, for example: the handler has ended all the same
            error = raised
        self._ended(call, error)
        self._settle(call, error)

    def _ended(self, call: _Call, error: BaseException | None) -> None:
        """The handler runs no more, or nobody waits for it any more; only the first time."""
        if call not in self._calls:
            return
        if call.timer is not None:
            call.timer.cancel()
        self._calls.discard(call)
        self._time.release(call)
        self._slots.release()
        call.metrics.running -= 1
        call.metrics.handler.note(time.monotonic() - call.began_s)
        if call.span is not None:
            if error is not None:
                call.span.failed(error)
            call.span.end()

    async def _called(self, call: _Call) -> None:
        handler, delivery = call.handler.call, call.delivery
        if call.on_loop:
            result = handler(delivery)
        else:
            call.in_thread = True
            result, error = await self._threads.run(lambda: handler(delivery))
            call.in_thread = False
            if error is not None:
                call.from_thread = True
                raise error
        if inspect.isawaitable(result):
            await result

    def _time_out(self, call: _Call) -> None:
        call.timed_out = True
        call.metrics.timed_out += 1
        if call.in_thread:
            # A thread cannot be stopped: settle the message now and let the handler run on.
            self._settle(call, self._timeout_error(call))
        elif call.task is not None:
            call.task.cancel()
            call.timer = self._time.call_later(CANCEL_S, partial(self._give_up, call))

    def _give_up(self, call: _Call) -> None:
        """The handler did not end when it was cancelled."""
        self._settle(call, self._timeout_error(call))

    @staticmethod
    def _timeout_error(call: _Call) -> HandlerTimeout:
        assert call.handler.timeout is not None
        return HandlerTimeout(f"the handler took longer than {call.handler.timeout}", "TIMEOUT")

    # -- settling

    def _settle(self, call: _Call, error: BaseException | None) -> None:
        """Settle a delivery by how its handler has ended; only the first time."""
        if call.settled:
            return
        call.settled = True
        with call.traced():
            self._settle_once(call, error)

    def _settle_once(self, call: _Call, error: BaseException | None) -> None:
        if error is not None and call.span is not None:
            call.span.failed(error)  # unless it has ended: this may be the end of its time
        if error is None:
            call.metrics.done += 1
            self._answered(call, call.delivery.ack())
            if _log.isEnabledFor(logging.DEBUG):
                self._say(logging.DEBUG, call, "is done", "done")
            return
        try:
            action, foreseen = action_of(error, call.delivery, call.handler.on_error)
        except Exception as raised:
            raised.add_note(f"raised by the rule for {type(error).__name__}: {error}")
            action, foreseen, error = Retry(), False, raised
        reason = action.reason or f"{type(error).__name__}: {error}"
        shown = None if foreseen else error
        level = logging.WARNING if foreseen else logging.ERROR
        if isinstance(action, Drop):
            call.metrics.dropped += 1
            self._answered(call, call.delivery.ack())
            self._say(level, call, f"failed and is dropped: {reason}", "dropped", shown)
        elif isinstance(action, Dead):
            call.metrics.dead += 1
            self._answered(call, call.delivery.dead(reason))
            self._say(level, call, f"failed and is a dead letter: {reason}", "dead", shown)
        else:
            after, at_level = (action.after, action.level) if isinstance(action, Retry) else (None, 0)
            call.metrics.retried += 1
            self._answered(call, call.delivery.nack(delay=after, level=at_level, reason=reason))
            self._say(level, call, f"failed and comes again: {reason}", "retried", shown)

    def _answered(self, call: _Call, receipt: Any) -> None:
        """Note how a settlement ends; the handler's place is free meanwhile."""

        def look(future: asyncio.Future[SettleReceipt]) -> None:
            if future.cancelled() or (error := future.exception()) is None:
                return
            self._say(logging.WARNING, call, f"may come again, its settlement has no receipt: {error}", "unknown")

        asyncio.ensure_future(receipt).add_done_callback(look)

    def _say(self, level: int, call: _Call, what: str, outcome: str, error: BaseException | None = None) -> None:
        delivery = call.delivery
        _log.log(
            level, "message %s of topic %s, attempt %d, group %s, %s",
            delivery.id, delivery.topic, delivery.attempt, self.group, what,
            exc_info=error,
            extra={
                "group": self.group,
                "topic": delivery.topic,
                "message_id": delivery.id,
                "attempt": delivery.attempt,
                "due_ms": delivery.due_ms,
                "outcome": outcome,
                "duration_s": round(time.monotonic() - call.began_s, 6),
            },
        )  # fmt: skip

    # -- signals

    def signalled(self, number: int) -> None:
        """A signal came: the first stops it in order, the second now."""
        again = self._stopping.is_set()
        text = "cancels what runs" if again else f"takes nothing more, {self.running} handlers run"
        name = signal.Signals(number).name
        _log.info("worker of group %s: %s: %s", self.group, name, text, extra={"group": self.group, "signal": name})
        self.stop(now=again)

    @contextlib.contextmanager
    def _signals_taken(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        before = {}
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                before[number] = signal.getsignal(number)
                loop.add_signal_handler(number, self.signalled, number)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                if handler is not None:
                    signal.signal(number, handler)


def _completed(handler: Callable[[Delivery], object] | Handler, timeout: timedelta | None, rules: Rules) -> Handler:
    """The handler with the worker's settings where it has none."""
    if not isinstance(handler, Handler):
        handler = Handler(handler)
    if not callable(handler.call):
        raise refused("handlers", repr(handler.call), "a function that takes a delivery")
    timeout = handler.timeout or timeout
    if timeout is not None and span_ms_of("timeout", timeout) <= 0:
        raise refused("timeout", timeout, "more than nothing")
    rules = {**rules, **handler.on_error}
    for kind, rule in rules.items():
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise refused("on_error", repr(kind), "a class of exceptions")
        if not (isinstance(rule, Retry | Dead | Drop) or callable(rule)):
            raise refused("on_error", repr(rule), "Retry(), Dead(), Drop() or a function that returns one of them")
    return Handler(handler.call, timeout, rules)


def _hold_max(handlers: Collection[Handler], waiting: float) -> timedelta:
    """How long the slowest delivery is held, while it waits for others and runs, if all take their whole time-out."""
    longest = max((handler.timeout for handler in handlers if handler.timeout is not None), default=timedelta(0))
    return max(timedelta(seconds=HOLD_S_MAX), longest * (2 + waiting))


def is_async(handler: Callable[..., object]) -> bool:
    """Whether a handler is a coroutine function, or an object that behaves as one."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004


async def _no_handler(delivery: Delivery) -> None:
    raise TickwheelError(f"the worker has no handler for topic {delivery.topic}", "NO_HANDLER")
