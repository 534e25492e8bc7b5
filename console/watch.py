"""One look at the cluster for all pages that are open.

A `Watch` asks every node for its status once a second and the master for the load ahead, and writes each picture once
as bytes; a hundred pages that listen cost the nodes no more than one. It asks nothing while nobody listens. Questions
whose cost grows with the cluster (groups, load ahead) take at most one part in SHARE of the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from tickwheel.client import AsyncClient, NodeRole, NodeStatus, TickwheelError, TopicStatus
from tickwheel.client.errors import ClientClosed, Fault
from tickwheel.client.moments import MILLISECOND, ms_of
from tickwheel.console import shown

_log = logging.getLogger("tickwheel.console")

PERIOD_S = 1.0
LOAD_PERIOD_S = 2.0
LISTING_AGE_S = 3.0
"""Topics, groups and sweeps are asked for anew when somebody wants them and they are older than this."""
SHARE = 10
IDLE_S = 30.0
"""A watch that nobody has listened to for this long stops asking."""
HISTORY = 300
"""Pictures whose rates are kept for the charts: five minutes."""
HOUR_MS = 3_600_000
HOURS_AHEAD = 24


class Listing:
    """A whole listing of the master, shared and asked for anew when it is old; one question at a time."""

    def __init__(self, ask: Callable[[], Awaitable[list[Any]]]) -> None:
        self._ask = ask
        self._items: list[Any] = []
        self._good_until_s = 0.0
        self._changes = 0
        """How often `forget` was called: an answer that was asked for before a change may lack it."""
        self._asking = asyncio.Lock()

    async def get(self) -> list[Any]:
        """The items, at most as old as a listing may be. Raises TickwheelError."""
        async with self._asking:
            began_s = time.monotonic()
            if began_s >= self._good_until_s:
                changes = self._changes
                self._items = await self._ask()
                if changes == self._changes:
                    took_s = time.monotonic() - began_s
                    self._good_until_s = time.monotonic() + max(LISTING_AGE_S, took_s * SHARE)
            return self._items

    def forget(self) -> None:
        """Somebody changed what is listed: the next `get` asks anew."""
        self._changes += 1
        self._good_until_s = 0.0


class Watch:
    """The pictures of one cluster, as one user sees it."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self.topics = Listing(client.admin.topics)
        self.groups = Listing(client.admin.groups)
        self._answers: dict[str, NodeStatus | Fault] = {}
        self._last: dict[str, NodeStatus] = {}
        """The last status of each address, also of one that does not answer now."""
        self._clock: tuple[int, float] | None = None
        self._hours: list[tuple[int, int]] | None = None
        """What is ahead; None: no master has told yet."""
        self._seconds: list[tuple[int, int]] | None = None
        self._dead = 0
        self._sweeps = 0
        self._trouble = ""
        self._history: deque[list[float]] = deque(maxlen=HISTORY)
        self._number = 0
        self._picture = b""
        self._fresh = asyncio.Event()
        self._listeners = 0
        self._closed = False
        self._wanted_s = 0.0
        self._task: asyncio.Task[None] | None = None

    # -- what pages get

    @property
    def master(self) -> NodeStatus | None:
        """The node that leads and holds its lease, in the highest term; else any that claims to lead."""
        answered = [item for item in self._answers.values() if isinstance(item, NodeStatus)]
        found = [status for status in answered if status.role is NodeRole.MASTER]
        return max(found, key=lambda status: (status.term, status.lease_held), default=None)

    @property
    def refused(self) -> bool:
        """Whether every node that was asked knows this user no more."""
        answers = self._answers.values()
        return bool(answers) and all(isinstance(one, Fault) and one.reason == "UNAUTHENTICATED" for one in answers)

    def now_ms(self) -> int:
        """The cluster's time, or this machine's while none is known."""
        if self._clock is None:
            return time.time_ns() // 1_000_000
        clock_ms, heard_s = self._clock
        return clock_ms + round((time.monotonic() - heard_s) * 1_000)

    def rates(self) -> dict[str, TopicStatus]:
        """The busiest topics, by name."""
        return {topic.name: topic for topic in self.master.topics} if self.master is not None else {}

    async def picture(self) -> dict[str, Any]:
        """The present picture; asks first if there is none or an old one."""
        if self._task is None:
            await self._look()
        self._want()
        return self._drawn()

    async def listen(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events: what is kept for the charts, then each picture, until the watch is closed. A slow page
        misses some, and none gets one from before a rest: it could be of yesterday."""
        self._listeners += 1
        try:
            seen = 0 if self._task is not None else self._number
            self._want()
            history = json.dumps(list(self._history), separators=(",", ":"))
            yield f"event: history\ndata: {history}\n\n".encode()
            while not self._closed:
                if seen == self._number:
                    await self._fresh.wait()
                seen = self._number
                if self._picture:
                    yield self._picture
        finally:
            self._listeners -= 1
            self._wanted_s = time.monotonic()

    @property
    def idle(self) -> bool:
        """Whether nobody has wanted anything for a while."""
        return self._listeners == 0 and time.monotonic() - self._wanted_s > IDLE_S

    async def close(self) -> None:
        """Stop asking, and end what pages listen to. Idempotent."""
        self._closed = True
        self._fresh.set()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # -- asking

    def _want(self) -> None:
        self._wanted_s = time.monotonic()
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """Ask until nobody listens any more. The next listener starts a new task."""
        load = asyncio.create_task(self._keep_load())
        try:
            while not self.idle:
                began_s = time.monotonic()
                try:
                    await self._look()
                except Exception:
                    _log.exception("a look at the cluster failed")  # a mistake of ours: pages still get the next one
                await asyncio.sleep(max(0.1, PERIOD_S - (time.monotonic() - began_s)))
            self._task = None
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)

    async def _keep_load(self) -> None:
        while True:
            began_s = time.monotonic()
            if self.master is not None:
                try:
                    await self._load()
                except Exception:
                    _log.exception("a look at the load ahead failed")
            took_s = time.monotonic() - began_s
            await asyncio.sleep(max(LOAD_PERIOD_S if self._hours or self._number > 2 else 0.2, took_s * SHARE))

    async def _look(self) -> None:
        """Ask every node, and write the picture."""
        with contextlib.suppress(ClientClosed):
            self._answers = await self._client.admin.know_all()
        for address, answer in self._answers.items():
            if isinstance(answer, Fault):
                self._client.cluster.forget(address)
            else:
                self._last[address] = answer
        master = self.master
        if master is not None:
            if master.clock is not None:
                self._clock = (ms_of("clock", master.clock), time.monotonic())
            self._history.append(
                [
                    self.now_ms(),
                    *(round(rate, 2) for rate in (master.schedule_rate, master.dispatch_rate)),
                    *(round(rate, 2) for rate in (master.deliver_rate, master.settle_rate)),
                    shown.late_ms(master.late_p50),
                    shown.late_ms(master.late_p99),
                ]
            )
        self._number += 1
        data = json.dumps(self._drawn(), separators=(",", ":"))
        self._picture = f"event: picture\nid: {self._number}\ndata: {data}\n\n".encode()
        fresh, self._fresh = self._fresh, asyncio.Event()
        fresh.set()

    async def _load(self) -> None:
        """Ask the master for the load ahead, dead letters and sweeps."""
        now_ms = self.now_ms()
        hour_ms = now_ms // HOUR_MS * HOUR_MS
        try:
            count = self._client.count_pending
            hours = await count(bucket_ms=HOUR_MS, due_ms_max=hour_ms + HOURS_AHEAD * HOUR_MS)
            seconds = await count(bucket_ms=1_000, due_ms_max=now_ms // 60_000 * 60_000 + 120_000)
            self._dead = sum(group.dead for group in await self.groups.get())
            self._sweeps = sum(not sweep.ended for sweep in await self._client.sweeps.list())
        except TickwheelError as error:
            self._trouble = str(error)
            return
        self._trouble = ""
        self._hours = [(bucket.start_ms, bucket.count) for bucket in hours.buckets]
        self._seconds = [(bucket.start_ms, bucket.count) for bucket in seconds.buckets]

    # -- the picture

    def _drawn(self) -> dict[str, Any]:
        master = self.master
        heard = master or next(iter(self._last.values()), None)
        return {
            "now_ms": self.now_ms(),
            "cluster_id": heard.cluster_id if heard is not None else "",
            "version": heard.version if heard is not None else "",
            "slot_ms": heard.slot // MILLISECOND if heard is not None else 0,
            "tick": master.tick if master is not None else 0,
            "master_id": master.node_id if master is not None else "",
            "term": master.term if master is not None else max((one.term for one in self._last.values()), default=0),
            "numbers": shown.numbers(master) if master is not None else None,
            "nodes": self._nodes(master),
            "topics": [shown.busy_topic(topic) for topic in master.topics[:8]] if master is not None else [],
            "hours": self._hours,
            "seconds": self._seconds,
            "dead": self._dead,
            "sweeps": self._sweeps,
            "trouble": self._trouble,
        }

    def _nodes(self, master: NodeStatus | None) -> list[dict[str, Any]]:
        names = {peer.client_address: peer.node_id for status in self._last.values() for peer in status.peers}
        found = []
        for address, answer in self._answers.items():
            if isinstance(answer, Fault):
                why = self._client.cluster.why(answer)
                found.append(shown.away(address, why, self._last.get(address), names.get(address, address)))
            else:
                found.append(shown.node(address, answer, master))
        return sorted(found, key=lambda item: str(item["node_id"]))
