"""A worker for code without a loop: handlers run in threads, `run` blocks. It is a Worker on the client's loop."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Unpack

from tickwheel.client.blocking import Blocking, Runner, attribute
from tickwheel.client.delivery import Delivery
from tickwheel.client.errors import refused
from tickwheel.client.handling import Handler
from tickwheel.client.sync_client import Client, SyncDelivery
from tickwheel.client.worker import SIGNALS, Worker, WorkerOptions, is_async
from tickwheel.client.worker_metrics import WorkerMetrics


class SyncWorker(Blocking[Worker]):
    """Calls handlers, in threads, for the deliveries of one group. Use it once: `SyncWorker(...).run()`."""

    group = attribute[str]()
    metrics = attribute[WorkerMetrics]()
    running = attribute[int]()

    def __init__(
        self,
        client: Client,
        group: str,
        handlers: Mapping[str, Callable[[SyncDelivery], object] | Handler],
        **options: Unpack[WorkerOptions],
    ) -> None:
        """As Worker; a handler gets a SyncDelivery."""
        self._signals = options.get("signals", SIGNALS)
        options["signals"] = ()  # the client's loop runs in another thread, where signals do not come
        inside = {topic: _with_sync_delivery(client, handler) for topic, handler in handlers.items()}
        super().__init__(client, Worker(client.asynchronous, group, inside, **options))

    def run(self) -> None:
        """Handle deliveries until a signal, `stop`, or an error of the cluster, which is raised once the running
        handlers have ended. Signals are taken if this is the main thread."""
        with self._signals_taken():
            self.runner.wait(self.inner.run())

    def stop(self, *, now: bool = False) -> None:
        """End: no handler begins any more, those that run may end within `drain_max`. `now`: nobody waits for them. Any
        thread may call it. Idempotent."""
        self._tell(partial(self.inner.stop, now=now))

    def signalled(self, number: int) -> None:
        """A signal came: the first stops it in order, the second now."""
        self._tell(partial(self.inner.signalled, number))

    def _tell(self, what: Callable[[], None]) -> None:
        async def tell() -> None:
            what()

        self.runner.begin(tell())

    @contextlib.contextmanager
    def _signals_taken(self) -> Iterator[None]:
        def came(number: int, frame: FrameType | None) -> None:
            self.signalled(number)

        before = {}
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.signal(number, came) for number in self._signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _with_sync_delivery(runner: Runner, handler: Callable[[SyncDelivery], object] | Handler) -> Handler:
    given = handler if isinstance(handler, Handler) else Handler(handler)
    if is_async(given.call):
        raise refused("handlers", repr(given.call), "a plain function; Worker takes coroutine functions")

    def call(delivery: Delivery) -> object:
        return given.call(SyncDelivery(runner, delivery))

    return dataclasses.replace(given, call=call)
