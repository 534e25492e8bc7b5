"""The synchronous client: runs the asyncio client on a loop in one background thread.

Every call waits for its answer; any thread may call. Methods, parameters and deadlines are those of the asyncio client.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

from tickwheel.client.access import AccessClient
from tickwheel.client.admin import AdminClient
from tickwheel.client.async_client import TIMEOUT_S, AsyncClient
from tickwheel.client.blocking import Blocking, each, following, waiting
from tickwheel.client.bulk import BulkClient
from tickwheel.client.cluster import TlsFiles
from tickwheel.client.cold import ColdClient
from tickwheel.client.consumer import HOLD_S_MAX, Consumer
from tickwheel.client.dead import DeadClient
from tickwheel.client.delivery import Delivery
from tickwheel.client.errors import ClientClosed
from tickwheel.client.producer import (
    BATCH_BYTES_MAX,
    BATCH_MESSAGES_MAX,
    BUFFER_BYTES_MAX,
    IN_FLIGHT_MAX,
    LINGER_MS,
    Producer,
)
from tickwheel.client.pulling import PullClient
from tickwheel.client.snapshot import SnapshotClient
from tickwheel.client.staging import StagingClient
from tickwheel.client.sweeps import SweepClient

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


class SyncAdmin(Blocking[AdminClient]):
    """`Client.admin`."""

    know_all = waiting(AdminClient.know_all)
    trace = waiting(AdminClient.trace)
    statuses = waiting(AdminClient.statuses)
    server_infos = waiting(AdminClient.server_infos)
    master_status = waiting(AdminClient.master_status)
    transfer = waiting(AdminClient.transfer)
    add_member = waiting(AdminClient.add_member)
    remove_member = waiting(AdminClient.remove_member)
    create_topic = waiting(AdminClient.create_topic)
    delete_topic = waiting(AdminClient.delete_topic)
    topics = waiting(AdminClient.topics)
    create_group = waiting(AdminClient.create_group)
    set_group_filter = waiting(AdminClient.set_group_filter)
    pause_topic = waiting(AdminClient.pause_topic)
    pause_group = waiting(AdminClient.pause_group)
    reset_group = waiting(AdminClient.reset_group)
    update_group = waiting(AdminClient.update_group)
    delete_group = waiting(AdminClient.delete_group)
    groups = waiting(AdminClient.groups)
    settings = waiting(AdminClient.settings)
    update_settings = waiting(AdminClient.update_settings)
    digest = waiting(AdminClient.digest)
    disk_use = waiting(AdminClient.disk_use)
    backup = each(AdminClient.backup)


class SyncAccess(Blocking[AccessClient]):
    """`Client.access`."""

    who_am_i = waiting(AccessClient.who_am_i)
    set_user = waiting(AccessClient.set_user)
    delete_user = waiting(AccessClient.delete_user)
    users = waiting(AccessClient.users)
    create_token = waiting(AccessClient.create_token)
    revoke_token = waiting(AccessClient.revoke_token)
    set_role = waiting(AccessClient.set_role)
    delete_role = waiting(AccessClient.delete_role)
    roles = waiting(AccessClient.roles)
    audit = waiting(AccessClient.audit)


class SyncDead(Blocking[DeadClient]):
    """`Client.dead`."""

    page = waiting(DeadClient.page)
    list = each(DeadClient.list)
    get = waiting(DeadClient.get)
    replay = waiting(DeadClient.replay)
    purge = waiting(DeadClient.purge)


class SyncStaging(Blocking[StagingClient]):
    """`Client.staging`."""

    job = waiting(StagingClient.job)
    reserve = waiting(StagingClient.reserve)
    stage = waiting(StagingClient.stage)
    commit = waiting(StagingClient.commit)
    abort = waiting(StagingClient.abort)


class SyncSnapshot(Blocking[SnapshotClient]):
    """`Client.snapshot`."""

    pin = waiting(SnapshotClient.pin)
    held = waiting(SnapshotClient.held)
    agreed = waiting(SnapshotClient.agreed)
    pin_settled = waiting(SnapshotClient.pin_settled)
    unpin = waiting(SnapshotClient.unpin)
    pages = each(SnapshotClient.pages)
    settled_pages = each(SnapshotClient.settled_pages)


class SyncPulling(Blocking[PullClient]):
    """`Client.pulling`."""

    pull = waiting(PullClient.pull)
    settle = waiting(PullClient.settle)


class SyncBulk(Blocking[BulkClient]):
    """`Client.bulk`."""

    send = waiting(BulkClient.send)
    take_over = waiting(BulkClient.take_over)
    load = waiting(BulkClient.load)


class SyncCold(Blocking[ColdClient]):
    """`Client.cold`."""

    register = waiting(ColdClient.register)
    parts = waiting(ColdClient.parts)
    moved = waiting(ColdClient.moved)


class SyncSweeps(Blocking[SweepClient]):
    """`Client.sweeps`."""

    cancel = waiting(SweepClient.cancel)
    reschedule = waiting(SweepClient.reschedule)
    get = waiting(SweepClient.get)
    list = waiting(SweepClient.list)
    stop = waiting(SweepClient.stop)
    follow = each(SweepClient.follow)
    wait = waiting(SweepClient.wait)


class SyncProducer(Blocking[Producer]):
    """As Producer: `send` returns once there is room, and its future gets the receipt. Use it as a context manager."""

    send = following(Producer.send)
    schedule = waiting(Producer.schedule)
    flush = waiting(Producer.flush)
    close = waiting(Producer.close)
    abandon = waiting(Producer.abandon)

    def __enter__(self) -> SyncProducer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.runner.wait(self.inner.__aexit__(kind, error, trace))


class Client(Blocking[AsyncClient]):
    """As AsyncClient, for code without a loop. Use it as a context manager."""

    schedule = waiting(AsyncClient.schedule)
    cancel = waiting(AsyncClient.cancel)
    reschedule = waiting(AsyncClient.reschedule)
    get = waiting(AsyncClient.get)
    list_pending = each(AsyncClient.list_pending)
    count_pending = waiting(AsyncClient.count_pending)

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
            inner = self.wait(make())
        except BaseException:
            self._stop_loop()
            raise
        super().__init__(self, inner)
        self.admin = SyncAdmin(self, inner.admin)
        self.access = SyncAccess(self, inner.access)
        self.dead = SyncDead(self, inner.dead)
        self.staging = SyncStaging(self, inner.staging)
        self.snapshot = SyncSnapshot(self, inner.snapshot)
        self.pulling = SyncPulling(self, inner.pulling)
        self.bulk = SyncBulk(self, inner.bulk)
        self.cold = SyncCold(self, inner.cold)
        self.sweeps = SyncSweeps(self, inner.sweeps)
        self.dead_letters = self.dead.list
        self.dead_letter = self.dead.get
        self.replay_dead = self.dead.replay
        self.purge_dead = self.dead.purge

    def begin(self, work: Coroutine[Any, Any, A], /) -> concurrent.futures.Future[A]:
        """Run a coroutine on the client's loop. ClientClosed after `close`."""
        if self.closed:
            work.close()
            raise ClientClosed
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, A], /) -> A:
        """Run a coroutine on the client's loop and wait for it. ClientClosed after `close`."""
        future = self.begin(work)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    @property
    def asynchronous(self) -> AsyncClient:
        """The client below, for `wait`."""
        return self.inner

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._loop.is_closed()

    def close(self) -> None:
        """End consumers and producers and close the connections. Idempotent."""
        if self._thread.is_alive():
            self.wait(self.inner.close())
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

    def producer(
        self,
        *,
        producer_id: str | None = None,
        batch_messages_max: int = BATCH_MESSAGES_MAX,
        batch_bytes_max: int = BATCH_BYTES_MAX,
        linger_ms: float = LINGER_MS,
        buffer_bytes_max: int = BUFFER_BYTES_MAX,
        in_flight_max: int = IN_FLIGHT_MAX,
        timeout_s: float = 60.0,
    ) -> SyncProducer:
        """See AsyncClient.producer."""

        async def make() -> Producer:
            return self.inner.producer(
                producer_id=producer_id,
                batch_messages_max=batch_messages_max,
                batch_bytes_max=batch_bytes_max,
                linger_ms=linger_ms,
                buffer_bytes_max=buffer_bytes_max,
                in_flight_max=in_flight_max,
                timeout_s=timeout_s,
            )

        return SyncProducer(self, self.wait(make()))

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
            consumer = self.inner.consumer(
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
