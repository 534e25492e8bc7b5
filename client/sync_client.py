"""The synchronous client: runs the asyncio client on a loop in one background thread.

Every call waits for its answer; any thread may call. Methods, parameters and deadlines are those of the asyncio client.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from tickwheel.client.access import AccessClient
from tickwheel.client.admin import AdminClient
from tickwheel.client.async_client import TIMEOUT_S, AsyncClient
from tickwheel.client.blocking import (
    Blocking,
    Closing,
    Runner,
    attribute,
    calling,
    each,
    following,
    following_all,
    making,
    reading,
    waiting,
)
from tickwheel.client.bulk import BulkClient
from tickwheel.client.cluster import TlsFiles
from tickwheel.client.cold import ColdClient
from tickwheel.client.consumer import CLOSE_S, Consumer
from tickwheel.client.dead import DeadClient
from tickwheel.client.delivery import DeliveredBatch, Delivery
from tickwheel.client.errors import ClientClosed, refused
from tickwheel.client.producer import Producer
from tickwheel.client.pulling import PullClient
from tickwheel.client.schedules import ScheduleClient
from tickwheel.client.snapshot import SnapshotClient
from tickwheel.client.staging import StagedAttemptWriter, StagingClient
from tickwheel.client.sweeps import SweepClient

if TYPE_CHECKING:
    from tickwheel.client.tracing import Tracing

A = TypeVar("A")

_log = logging.getLogger(__name__)

CREDITS = 256
"""A blocking consumer gets few messages at once, since their leases run while they wait in it."""


class SyncDelivery(Blocking[Delivery]):
    """A delivery whose `ack`, `nack`, `dead` and `extend` wait for the committed receipt."""

    topic = reading(Delivery.topic)
    id64 = reading(Delivery.id64)
    id = reading(Delivery.id)
    attempt = reading(Delivery.attempt)
    term = reading(Delivery.term)
    due_ms = reading(Delivery.due_ms)
    due = reading(Delivery.due)
    payload = reading(Delivery.payload)
    key = reading(Delivery.key)
    tags = reading(Delivery.tags)
    headers = reading(Delivery.headers)
    message_group = reading(Delivery.message_group)
    unique_key = reading(Delivery.unique_key)
    content_type = reading(Delivery.content_type)
    json = calling(Delivery.json)
    ack = waiting(Delivery.ack)
    nack = waiting(Delivery.nack)
    dead = waiting(Delivery.dead)
    extend = waiting(Delivery.extend)
    row = attribute[int]()

    def decode(self, model: type[A]) -> A:
        """The payload as a pydantic model, a msgspec Struct or a dataclass. Raises PayloadError."""
        return self.inner.decode(model)

    @property
    def batch(self) -> SyncBatch:
        """The batch that it came with."""
        return SyncBatch(self.runner, self.inner.batch)

    def __repr__(self) -> str:
        return repr(self.inner)


class SyncBatch(Blocking[DeliveredBatch]):
    """A batch whose `ack`, `nack` and `extend` wait for the committed receipt."""

    topic = reading(DeliveredBatch.topic)
    term = reading(DeliveredBatch.term)
    lease_until_ms = reading(DeliveredBatch.lease_until_ms)
    lease_until = reading(DeliveredBatch.lease_until)
    ids = reading(DeliveredBatch.ids)
    attempts = reading(DeliveredBatch.attempts)
    positions = reading(DeliveredBatch.positions)
    due_ms = reading(DeliveredBatch.due_ms)
    sizes = reading(DeliveredBatch.sizes)
    meta_sizes = reading(DeliveredBatch.meta_sizes)
    payload = calling(DeliveredBatch.payload)
    meta = calling(DeliveredBatch.meta)
    payloads = calling(DeliveredBatch.payloads)
    ack = waiting(DeliveredBatch.ack)
    nack = waiting(DeliveredBatch.nack)
    extend = waiting(DeliveredBatch.extend)
    unsettled = attribute[int]()

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[SyncDelivery]:
        return (SyncDelivery(self.runner, delivery) for delivery in self.inner)

    def delivery(self, row: int) -> SyncDelivery:
        """One row."""
        return SyncDelivery(self.runner, self.inner.delivery(row))


class SyncConsumer(Closing, Blocking[Consumer]):
    """Iterate it for deliveries, `batches()` for batches, or `run(handler)`; in one thread at a time."""

    drain = waiting(Consumer.drain)
    stop_taking = calling(Consumer.stop_taking)
    term = attribute[int]()
    reconnects = attribute[int]()
    stale = attribute[int]()
    renewed = attribute[int]()
    skipped = attribute[int]()

    def __init__(self, runner: Runner, inner: Consumer) -> None:
        super().__init__(runner, inner)
        # Taken by the loop for the calling thread. Kept for the next call if a signal interrupts this one.
        self._deliveries: deque[Delivery] = deque()
        self._batches: deque[DeliveredBatch] = deque()

    def __iter__(self) -> Iterator[SyncDelivery]:
        while (delivery := self.next(None)) is not None:
            yield delivery

    def next(self, timeout_s: float | None) -> SyncDelivery | None:
        """The next delivery; None when the consumer is closed or nothing came within `timeout_s`."""
        delivery = self._next(aiter(self.inner), self._deliveries, timeout_s)
        return SyncDelivery(self.runner, delivery) if delivery is not None else None

    def batches(self) -> Iterator[SyncBatch]:
        """The batches as they arrive, decoded when read. The rest of a batch that was begun one by one is not among
        them."""
        while (batch := self._next(self.inner.batches(), self._batches, None)) is not None:
            yield SyncBatch(self.runner, batch)

    def _next(self, coming: AsyncIterator[A], taken: deque[A], timeout_s: float | None) -> A | None:
        async def one() -> None:
            with contextlib.suppress(TimeoutError, StopAsyncIteration):
                async with asyncio.timeout(timeout_s):
                    taken.append(await anext(coming))

        if not taken:
            self.runner.wait(one())
        return taken.popleft() if taken else None

    def run(self, handler: Callable[[SyncDelivery], object], *, concurrency: int = 16) -> None:
        """Call the handler for each delivery, in up to `concurrency` threads at once.

        A delivery is acknowledged when the handler returns. If it raises, the delivery is nacked and the error logged
        with its traceback. Ends with `close` or after `messages_max`. An error of the cluster ends it too, once the
        running handlers have returned.
        """
        with concurrent.futures.ThreadPoolExecutor(concurrency, "tickwheel-handler") as threads:

            def call(delivery: Delivery) -> None:
                try:
                    handler(SyncDelivery(self.runner, delivery))
                except Exception:
                    raise
                except BaseException as error:  # SystemExit ends a thread, and must not end the loop
                    raise RuntimeError(f"the handler raised {type(error).__name__}: {error}") from error

            async def handle(delivery: Delivery) -> None:
                await asyncio.get_running_loop().run_in_executor(threads, call, delivery)

            self.runner.wait(self.inner.run(handle, concurrency=concurrency))

    def close(self) -> None:
        """End. Held deliveries are delivered again elsewhere. Idempotent."""
        if not self.runner.closed:
            self.runner.wait(self.inner.close())


class SyncAdmin(Blocking[AdminClient]):
    """`Client.admin`."""

    know_all = waiting(AdminClient.know_all)
    trace = waiting(AdminClient.trace)
    statuses = waiting(AdminClient.statuses)
    status = waiting(AdminClient.status)
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


class SyncStagedAttempt(Blocking[StagedAttemptWriter]):
    """A writer of `Client.staging.attempt`."""

    write = waiting(StagedAttemptWriter.write)
    finish = waiting(StagedAttemptWriter.finish)
    job_id = attribute[str]()
    attempt = attribute[int]()
    blocks = attribute[int]()
    rows = attribute[int]()
    published_before = attribute[bool]()
    fingerprint = attribute[int]()


class SyncStaging(Blocking[StagingClient]):
    """`Client.staging`."""

    job = waiting(StagingClient.job)
    reserve = waiting(StagingClient.reserve)
    commit = waiting(StagingClient.commit)
    abort = waiting(StagingClient.abort)
    attempt = making(StagingClient.attempt, SyncStagedAttempt)


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


class SyncSchedules(Blocking[ScheduleClient]):
    """`Client.schedules`."""

    put = waiting(ScheduleClient.put)
    get = waiting(ScheduleClient.get)
    list = each(ScheduleClient.list)
    pause = waiting(ScheduleClient.pause)
    resume = waiting(ScheduleClient.resume)
    trigger = waiting(ScheduleClient.trigger)
    backfill = waiting(ScheduleClient.backfill)
    delete = waiting(ScheduleClient.delete)
    preview = waiting(ScheduleClient.preview)


class SyncProducer(Blocking[Producer]):
    """As Producer: `send` returns once there is room, and its future gets the receipt. Use it as a context manager."""

    bytes_under_way = reading(Producer.bytes_under_way)
    reconnects = reading(Producer.reconnects)
    send = following(Producer.send)
    schedule = waiting(Producer.schedule)
    schedule_many = following_all(Producer.schedule_many)
    schedule_columns = following(Producer.schedule_columns)
    flush = waiting(Producer.flush)
    close = waiting(Producer.close)
    abandon = waiting(Producer.abandon)
    producer_id = attribute[str]()

    def __enter__(self) -> SyncProducer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.runner.wait(self.inner.__aexit__(kind, error, trace))


class Client(Closing, Blocking[AsyncClient]):
    """As AsyncClient, for code without a loop. Use it as a context manager."""

    schedule = waiting(AsyncClient.schedule)
    cancel = waiting(AsyncClient.cancel)
    reschedule = waiting(AsyncClient.reschedule)
    get = waiting(AsyncClient.get)
    cancel_by_key = waiting(AsyncClient.cancel_by_key)
    reschedule_by_key = waiting(AsyncClient.reschedule_by_key)
    get_by_key = waiting(AsyncClient.get_by_key)
    list_pending = each(AsyncClient.list_pending)
    pending_page = waiting(AsyncClient.pending_page)
    count_pending = waiting(AsyncClient.count_pending)
    producer = making(AsyncClient.producer, SyncProducer)
    consumer = making(AsyncClient.consumer, SyncConsumer, credits=CREDITS)
    timeout_s = attribute[float]()

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        tls: TlsFiles | None = None,
        timeout_s: float = TIMEOUT_S,
        name: str = "",
        token: str = "",
        tracing: Tracing | None = None,
    ) -> None:
        # A signal's handler may call the client while its thread holds one of them.
        self._closing = threading.RLock()
        """Held while it closes."""
        self._beginning = threading.RLock()
        """Held while work is handed to the loop, so that none is once `_closed` is set."""
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="tickwheel-client", daemon=True)
        self._thread.start()

        async def make() -> AsyncClient:
            return AsyncClient(addresses, tls=tls, timeout_s=timeout_s, name=name, token=token, tracing=tracing)

        try:
            inner = self.wait(make())
        except BaseException:
            self._stop_loop()
            raise
        super().__init__(self, inner)
        self.tracing = inner.tracing
        self.admin = SyncAdmin(self, inner.admin)
        self.access = SyncAccess(self, inner.access)
        self.dead = SyncDead(self, inner.dead)
        self.staging = SyncStaging(self, inner.staging)
        self.snapshot = SyncSnapshot(self, inner.snapshot)
        self.pulling = SyncPulling(self, inner.pulling)
        self.bulk = SyncBulk(self, inner.bulk)
        self.cold = SyncCold(self, inner.cold)
        self.sweeps = SyncSweeps(self, inner.sweeps)
        self.schedules = SyncSchedules(self, inner.schedules)
        self.dead_letters = self.dead.list
        self.dead_letter = self.dead.get
        self.replay_dead = self.dead.replay
        self.purge_dead = self.dead.purge

    def _run_loop(self) -> None:
        while True:
            try:
                self._loop.run_forever()
                return
            except BaseException:  # SystemExit of a callback, for example: other threads wait for this loop
                _log.exception("a callback of the client ended its loop, which goes on")

    def begin(self, work: Coroutine[Any, Any, A], /) -> concurrent.futures.Future[A]:
        """Run a coroutine on the client's loop. ClientClosed after `close`."""
        with self._beginning:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise ClientClosed

    def wait(self, work: Coroutine[Any, Any, A], /) -> A:
        """Run a coroutine on the client's loop and wait for it. ClientClosed after `close`.

        Raises RequestRefused in the loop's own thread, where callbacks of futures are called: it would wait for itself.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise refused("thread", self._thread.name, "any thread but the client's own, which calls callbacks")
        future = self.begin(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            if not self.closed:
                raise
            raise ClientClosed from None
        except BaseException:  # a signal's handler may raise anything
            future.cancel()
            raise

    @property
    def asynchronous(self) -> AsyncClient:
        """The client below, for `wait`."""
        return self.inner

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """End consumers and producers and close the connections. Idempotent."""
        with self._closing:
            if not self._closed:
                self.wait(self.inner.close())
                self._stop_loop()

    def _stop_loop(self) -> None:
        """Nothing is begun any more; what still runs is cancelled, so that no thread waits for ever."""
        with self._beginning:
            if self._closed:
                return
            self._closed = True

        async def cancel_all() -> None:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left, timeout=2 * CLOSE_S)

        asyncio.run_coroutine_threadsafe(cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
