"""The synchronous client: runs the asyncio client on a loop in one background thread.

Every call waits for its answer; any thread may call. The deadlines are those of the asyncio client.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

from tickwheel.client.async_client import TIMEOUT_S, AsyncClient, Message, PendingCount
from tickwheel.client.cluster import TlsFiles
from tickwheel.client.consumer import HOLD_S_MAX, Consumer
from tickwheel.client.dead import Changed, DeadLetter
from tickwheel.client.delivery import Delivery
from tickwheel.client.errors import ClientClosed
from tickwheel.client.messages import Receipt
from tickwheel.client.sweeps import Selection, Sweep

A = TypeVar("A")

CREDITS = 256
"""A blocking consumer gets few messages at once, since their leases run while they wait in it."""


class SyncDelivery:
    """A delivery whose `ack`, `nack` and `extend` wait for the committed receipt."""

    def __init__(self, client: Client, delivery: Delivery) -> None:
        self._client = client
        self.inner = delivery
        self.id = delivery.id
        self.topic = delivery.topic
        self.attempt = delivery.attempt
        self.term = delivery.term
        self.due_ms = delivery.due_ms
        self.payload = delivery.payload

    def __repr__(self) -> str:
        return repr(self.inner)

    @property
    def key(self) -> str:
        return self.inner.key

    @property
    def tags(self) -> list[str]:
        return self.inner.tags

    @property
    def headers(self) -> dict[str, str]:
        return self.inner.headers

    @property
    def message_group(self) -> str:
        return self.inner.message_group

    def ack(self) -> None:
        """Acknowledge."""

        async def settle() -> None:
            await self.inner.ack()

        self._client.wait(settle())

    def dead(self, reason: str = "") -> None:
        """Move the message to the dead letters, without further attempts."""

        async def settle() -> None:
            await self.inner.dead(reason)

        self._client.wait(settle())

    def nack(self, *, delay: timedelta | None = None, level: int = 0, reason: str = "") -> None:
        """Deliver again: by the group's policy, after `delay`, or at a delay level."""

        async def settle() -> None:
            await self.inner.nack(delay=delay, level=level, reason=reason)

        self._client.wait(settle())

    def extend(self, lease: timedelta) -> bool:
        """Extend the lease, from now. False: the lease is over or the message is settled."""
        return self._client.wait(self.inner.extend(lease))


class SyncConsumer:
    """Iterate it, in one thread at a time."""

    def __init__(self, client: Client, consumer: Consumer) -> None:
        self._client = client
        self._consumer = consumer
        self._deliveries = aiter(consumer)

    def __iter__(self) -> Iterator[SyncDelivery]:
        while (delivery := self.next(None)) is not None:
            yield delivery

    def next(self, timeout_s: float | None) -> SyncDelivery | None:
        """The next delivery; None when the consumer is closed or nothing came within `timeout_s`."""

        async def one() -> Delivery | None:
            self._pending = self._pending or asyncio.ensure_future(anext(self._deliveries, None))
            done, _ = await asyncio.wait({self._pending}, timeout=timeout_s)
            if not done:
                return None
            pending, self._pending = self._pending, None
            return pending.result()

        delivery = self._client.wait(one())
        return SyncDelivery(self._client, delivery) if delivery is not None else None

    _pending: asyncio.Task[Delivery | None] | None = None

    def close(self) -> None:
        """End. Deliveries in hand are delivered again elsewhere. Idempotent."""
        if self._client.closed:
            return

        async def end() -> None:
            await self._consumer.close()
            if self._pending is not None:
                self._pending.cancel()
                await asyncio.gather(self._pending, return_exceptions=True)

        self._client.wait(end())

    def __enter__(self) -> SyncConsumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SyncSweeps:
    """`Client.sweeps`: see SweepClient."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def cancel(self, selection: Selection, *, job_id: str | None = None) -> Sweep:
        """Start a job that cancels messages; returns at once."""
        return self._client.wait(self._client.asynchronous.sweeps.cancel(selection, job_id=job_id))

    def reschedule(
        self,
        selection: Selection,
        *,
        due_ms: int | None = None,
        delay: timedelta | None = None,
        shift: timedelta | None = None,
        job_id: str | None = None,
    ) -> Sweep:
        """Start a job that moves messages; returns at once."""
        sweeps = self._client.asynchronous.sweeps
        return self._client.wait(sweeps.reschedule(selection, due_ms=due_ms, delay=delay, shift=shift, job_id=job_id))

    def get(self, job_id: str) -> Sweep:
        """The state of a job."""
        return self._client.wait(self._client.asynchronous.sweeps.get(job_id))

    def list(self) -> tuple[Sweep, ...]:
        """All jobs that the cluster keeps."""
        return self._client.wait(self._client.asynchronous.sweeps.list())

    def stop(self, job_id: str) -> Sweep:
        """Stop a job. Messages already cancelled or moved stay so."""
        return self._client.wait(self._client.asynchronous.sweeps.stop(job_id))

    def wait(self, job_id: str) -> Sweep:
        """Wait until the job has ended; returns its last state."""
        return self._client.wait(self._client.asynchronous.sweeps.wait(job_id))


class Client:
    """As AsyncClient, for code without a loop. Use it as a context manager."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        tls: TlsFiles | None = None,
        timeout_s: float = TIMEOUT_S,
        name: str = "",
        token: str = "",
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tickwheel-client", daemon=True)
        self._thread.start()

        async def make() -> AsyncClient:
            return AsyncClient(addresses, tls=tls, timeout_s=timeout_s, name=name, token=token)

        try:
            self._client = self.wait(make())
        except BaseException:
            self._stop_loop()
            raise

    @property
    def sweeps(self) -> SyncSweeps:
        """Cancelling and moving many messages."""
        return SyncSweeps(self)

    def wait(self, work: Coroutine[Any, Any, A]) -> A:
        """Run a coroutine on the client's loop and wait for it. ClientClosed after `close`."""
        if self.closed:
            work.close()
            raise ClientClosed
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    @property
    def asynchronous(self) -> AsyncClient:
        """The client below, for `wait`."""
        return self._client

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._loop.is_closed()

    def close(self) -> None:
        """End consumers and producers and close the connections. Idempotent."""
        if self._thread.is_alive():
            self.wait(self._client.close())
            self._stop_loop()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def schedule(
        self,
        topic: str,
        payload: bytes | str,
        *,
        due_ms: int | None = None,
        delay_ms: int | None = None,
        delay: timedelta | None = None,
        level: int | None = None,
        key: str = "",
        tags: Sequence[str] = (),
        headers: Mapping[str, str] | None = None,
        message_group: str = "",
        jitter: timedelta | None = None,
    ) -> Receipt:
        """See AsyncClient.schedule."""
        return self.wait(
            self._client.schedule(
                topic,
                payload,
                due_ms=due_ms,
                delay_ms=delay_ms,
                delay=delay,
                level=level,
                key=key,
                tags=tags,
                headers=headers,
                message_group=message_group,
                jitter=jitter,
            )
        )

    def cancel(self, message_id: str) -> str:
        """See AsyncClient.cancel."""
        return self.wait(self._client.cancel(message_id))

    def reschedule(
        self,
        message_id: str,
        *,
        due_ms: int | None = None,
        delay_ms: int | None = None,
        delay: timedelta | None = None,
        level: int | None = None,
    ) -> tuple[str, Receipt | None]:
        """See AsyncClient.reschedule."""
        return self.wait(
            self._client.reschedule(message_id, due_ms=due_ms, delay_ms=delay_ms, delay=delay, level=level)
        )

    def get(self, message_id: str, *, content: bool = False) -> Message:
        """See AsyncClient.get."""
        return self.wait(self._client.get(message_id, content=content))

    def list_pending(
        self,
        topic: str = "",
        *,
        tag: str = "",
        key: str = "",
        key_prefix: str = "",
        due_ms_min: int = 0,
        due_ms_max: int = 0,
        content: bool = False,
        meta: bool = False,
    ) -> Iterator[Message]:
        """See AsyncClient.list_pending."""
        pages = self._client.list_pending(
            topic,
            tag=tag,
            key=key,
            key_prefix=key_prefix,
            due_ms_min=due_ms_min,
            due_ms_max=due_ms_max,
            content=content,
            meta=meta,
        )

        async def one() -> Message | None:
            return await anext(pages, None)

        while (message := self.wait(one())) is not None:
            yield message

    def dead_letters(self, group: str) -> Iterator[DeadLetter]:
        """See DeadClient.list."""
        letters = self._client.dead.list(group)

        async def one() -> DeadLetter | None:
            return await anext(letters, None)

        while (letter := self.wait(one())) is not None:
            yield letter

    def dead_letter(self, group: str, number: int) -> DeadLetter:
        """See DeadClient.get."""
        return self.wait(self._client.dead.get(group, number))

    def replay_dead(self, group: str, numbers: Sequence[int] | None = None) -> Changed:
        """See DeadClient.replay."""
        return self.wait(self._client.dead.replay(group, numbers))

    def purge_dead(self, group: str, numbers: Sequence[int] | None = None) -> Changed:
        """See DeadClient.purge."""
        return self.wait(self._client.dead.purge(group, numbers))

    def count_pending(
        self,
        topic: str = "",
        *,
        tag: str = "",
        key: str = "",
        key_prefix: str = "",
        due_ms_min: int = 0,
        due_ms_max: int = 0,
        bucket_ms: int = 0,
    ) -> PendingCount:
        """See AsyncClient.count_pending."""
        return self.wait(
            self._client.count_pending(
                topic,
                tag=tag,
                key=key,
                key_prefix=key_prefix,
                due_ms_min=due_ms_min,
                due_ms_max=due_ms_max,
                bucket_ms=bucket_ms,
            )
        )

    def consumer(
        self,
        group: str,
        topics: str | Sequence[str] = (),
        *,
        start_from: str = "earliest",
        start_ms: int = 0,
        credits: int = CREDITS,
        lease: timedelta | None = None,
        name: str = "",
        messages_max: int = 0,
        filter: str = "",
        hold_max: timedelta = timedelta(seconds=HOLD_S_MAX),
    ) -> SyncConsumer:
        """See AsyncClient.consumer."""

        async def make() -> SyncConsumer:
            consumer = self._client.consumer(
                group,
                topics,
                start_from=start_from,
                start_ms=start_ms,
                credits=credits,
                lease=lease,
                name=name,
                messages_max=messages_max,
                filter=filter,
                hold_max=hold_max,
            )
            return SyncConsumer(self, consumer)

        return self.wait(make())
