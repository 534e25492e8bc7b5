"""One node in memory: the core and the handlers of a real one, on virtual time and a disk in memory.

Runs on a loop of its own, in a thread. All of it happens at one moment of virtual time, in zero time, until `advance`
lets time pass from one event to the next. The configuration has no pauses that only save work.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import grpc

from tickwheel.client import in_process
from tickwheel.node.config import NodeConfig
from tickwheel.node.config.sections import ClusterSection, ListenSection, NodeSection
from tickwheel.node.core.host import NodeHost, raft_config
from tickwheel.node.core.world import ClusterMs, NodeIdentity, Now, Ports, Reported, SteadyMs
from tickwheel.node.server.client_port import ClientPort
from tickwheel.node.server.resolving import resolve
from tickwheel.proto.peer_pb2 import PeerFrame
from tickwheel.storage.simulated import SimulatedDisk
from tickwheel.testing.channel import MemoryChannel, MetadataPairs, ServerCall
from tickwheel.testing.virtual_time import MS, SECOND, VirtualTime
from tickwheel.transport.server import Head
from tickwheel.wheel.units import Ids, Units

T = TypeVar("T")

FOUNDING_MS = 5_000
"""Virtual time that a node has to elect itself and learn the time, before its clients see it."""
STEP_NS_MAX = 3_600 * SECOND
"""Longest step of time: work that needs no exact moment, such as the removal of old hours, is looked after each."""
LATE_STEPS = 1_000
"""Steps of a millisecond that an advance takes for messages that are scheduled for now, by handlers too."""
TURNS_MAX = 100_000
"""Ticks at one moment, after which the node has a fault."""
PASSES = 50
"""Passes of a loop in which nothing is sent, after which it is taken to be idle if it does not tell."""
BUSY_PASSES = 1_000
"""Passes after which a loop that is never idle is not waited for any more."""
PING_S = 10.0
"""How long a client's loop may be busy, in real time."""
LOOK_S = 0.1
"""Pause between two looks whether a loop still runs."""
SEGMENT_BYTES = 1 << 20

_log = logging.getLogger("tickwheel.testing")
_numbers = itertools.count(1)


class NodeFailedError(Exception):
    """The node in memory has stopped by a fault of its own."""


def _when_idle(loop: asyncio.AbstractEventLoop, call: Callable[[], None], passes: int = 0) -> None:
    """Call once a loop has nothing more to do but to wait; on this loop."""
    # asyncio's own loops have what they are about to call in `_ready`; others are given passes enough.
    ready: Collection[object] | None = getattr(loop, "_ready", None)
    if passes < PASSES if ready is None else ready and passes < BUSY_PASSES:
        loop.call_soon(_when_idle, loop, call, passes + 1)
    else:
        call()


class MemoryNode:
    """A cluster of one in memory. Made in any thread; `run` and `call` reach its own."""

    def __init__(self, start_ms: int, seed: int) -> None:
        """Has elected itself when made. `start_ms`: its time then. `seed`: of its random numbers."""
        self.address = f"in-process-{next(_numbers)}:7700"
        self.time = VirtualTime(start_ms - FOUNDING_MS, self._changed)
        self._events = itertools.count(1)
        self._event = 0
        """Number of the last event: something was sent, or may give somebody something to do."""
        self._watcher: asyncio.Future[None] | None = None
        """Waits on the node's loop for the next event."""
        self._works: deque[Callable[[], None]] = deque()
        self._tick_queued = True
        """From the first, until the thread runs."""
        self._ticking = False
        self._fault: BaseException | None = None
        self._calls: set[ServerCall] = set()
        self._client_loops: dict[int, asyncio.AbstractEventLoop] = {}
        self._given_up: set[int] = set()
        """Ids of handlers that took too long to wait for."""
        self._late_ms = 0
        """Due time of the last message that was due when it was scheduled."""
        self._closed = False
        self.loop = asyncio.new_event_loop()
        self._moving = asyncio.Lock()
        rng = random.Random(seed)
        config = NodeConfig(
            cluster=ClusterSection(id="memory"),
            node=NodeSection(id="memory-1", data_dir="memory"),
            listen=ListenSection(client_bind=self.address),
        )
        core_config = replace(
            config.core,
            segment_bytes=SEGMENT_BYTES,
            dispatch_ahead_ms=0,
            dispatch_period_ms=0,
            delivery_period_ms=0,
            gather_ms=0,
            gather_busy_ms=0,
        )
        ports = Ports(SimulatedDisk(rng), self.time, self, self, self, rng)
        self._host = NodeHost(
            core_config,
            raft_config(core_config),
            NodeIdentity(config.cluster.id, config.node.id, 0, "memory"),
            ports,
            seed=config.seed_settings,
            members=config.members,
            on_fatal=self._fatal,
            report=_report,
            faults=_request_failed,
        )
        wake = self._wake
        self._port = ClientPort(
            config, lambda: self._host.core, ports, wake, lambda wait_ms: wake(), self._failed, Counter()
        )
        self._note_late()
        self._host.start()
        self._found()
        self._thread = threading.Thread(target=self._serve, name=self.address, daemon=True)
        self._thread.start()
        in_process.register(self.address, self)

    def _note_late(self) -> None:
        """Note when messages come that were due when they were scheduled: if anything has been dispatched at that
        moment, they come a millisecond later."""
        wheel = self._host.core.wheel
        append = wheel.append

        def noted(units: Units, records: bytes | memoryview) -> Ids:
            ids = append(units, records)
            late = units["due_ms"] > units["due_requested_ms"]
            if late.any():
                self._late_ms = max(self._late_ms, int(units["due_ms"][late].max()))
            return ids

        wheel.append = noted  # type: ignore[method-assign]

    def _found(self) -> None:
        over_ns = self.time.now_ns + FOUNDING_MS * MS
        while (wanted_ns := self._tick()) < over_ns:
            self.time.pass_to(wanted_ns)
        self.time.pass_to(over_ns)
        self._tick()
        core = self._host.core
        if not core.may_act() or not core.parts.delivery.active:
            raise NodeFailedError("the node in memory did not become master")

    def _serve(self) -> None:
        self.loop.call_soon(self._tick_soon)
        self.loop.run_forever()

    # -- what others use

    def channel(self, metadata: MetadataPairs) -> grpc.aio.Channel:
        """A new channel, for `client.in_process`."""
        made: Any = MemoryChannel(self, metadata)
        return made  # type: ignore[no-any-return]

    def begin(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the node's loop."""
        if self._closed:
            work.close()
            raise NodeFailedError("the cluster in memory is closed")
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def know(self, loop: asyncio.AbstractEventLoop) -> None:
        """A loop that clients may run on: it has to have nothing more to do before time passes. Any thread may call."""
        self._client_loops[id(loop)] = loop

    def close(self) -> None:
        """End its calls and its thread. Idempotent; not from the node's own thread."""
        if self._closed:
            return
        in_process.unregister(self.address)
        self.begin(self._end()).result()
        self._closed = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _end(self) -> None:
        for call in list(self._calls):
            call.cut(grpc.StatusCode.UNAVAILABLE, "the cluster in memory has ended")
        self._port.node.status.stop()
        self._host.stop()
        own = asyncio.current_task()
        left = [task for task in asyncio.all_tasks() if task is not own]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    # -- `channel.Node`

    @property
    def message_bytes_max(self) -> int:
        return self._port.server.limits.message_bytes_max

    def find(self, method: str) -> Any:
        return self._port.server.find(Head(method, (), None, None, b"", 0, None))

    def tell(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> bool:
        self._changed()
        try:
            if loop is not self.loop:
                self.know(loop)
            loop.call_soon_threadsafe(call)
        except RuntimeError:  # closed
            return False
        return True

    def note(self, call: ServerCall, *, ended: bool) -> None:
        if ended:
            self._calls.discard(call)
        else:
            self._calls.add(call)

    # -- the ports of the core

    def submit(self, work: Callable[[], T], done: Callable[[T | None, BaseException | None], None]) -> None:
        """As Executor: done within the tick, or soon."""

        def run() -> None:
            try:
                result, error = work(), None
            except Exception as raised:
                result, error = None, raised
            done(result, error)

        self._works.append(run)
        self._wake()

    def send(self, peer_id: str, frame: PeerFrame) -> bool:
        """As Network: there is no peer."""
        return False

    def set_peers(self, addresses: Mapping[str, str]) -> None:
        """As Network."""

    # -- the core

    def _changed(self) -> None:
        """Any thread may call it."""
        self._event = next(self._events)
        watcher = self._watcher
        if watcher is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(resolve, watcher, None)

    def _wake(self) -> None:
        if self._ticking or self._tick_queued:
            return
        self._tick_queued = True
        self._changed()
        self.loop.call_soon_threadsafe(self._tick_soon)

    def _tick_soon(self) -> None:
        self._tick_queued = False
        try:
            self._tick()
        except Exception as error:
            self._failed(error)

    def _tick(self) -> int:
        """Tick until nothing more is to be done at this moment. Returns when the core wants the next one, in ns."""
        self._ticking = True
        core, seen = self._host.core, (-1, -1)
        try:
            for _ in range(TURNS_MAX):
                wanted_ns = self._host.tick()
                stands = core.log.status().last_index, core.applied.index
                if not self._works and wanted_ns > self.time.now_ns and stands == seen:
                    return wanted_ns
                seen = stands  # one tick more: what a tick leaves for the next one may not say when it is due
                while self._works:
                    self._works.popleft()()
        finally:
            self._ticking = False
        raise NodeFailedError(f"the node in memory has no rest at {self.time.wall_ms()}")

    def _wanted_ns(self) -> int | None:
        """When a part of the core has something to do; None: nothing is to come. Beats of the heart do not count."""
        core, now_ns = self._host.core, self.time.now_ns
        now = Now(
            ClusterMs(core.clock.at_ms(now_ns)), SteadyMs(now_ns // MS), core.may_act(), core.clock.may_dispatch(now_ns)
        )
        waits = [part.wait_ms(now) for part in core.parts.ordered]
        waits += [core.background.wait_ms(now), core.checkpointer.wait_ms(now)]
        wait_ms = min((wait for wait in waits if wait is not None), default=None)
        return None if wait_ms is None else now_ns + max(1, wait_ms) * MS

    def _fatal(self, reason: str) -> None:
        self._failed(NodeFailedError(reason))

    def _failed(self, error: BaseException) -> None:
        if self._fault is None:
            self._fault = error
            _log.error("the node in memory has stopped", exc_info=error)
            for call in list(self._calls):
                call.cut(grpc.StatusCode.UNAVAILABLE, f"the node in memory has stopped: {error!r}")

    # -- time

    async def advance(self, until_ns: int, wait_s: float) -> None:
        """Let time pass to a moment, from one event to the next; on the node's loop."""
        async with self._moving:
            while True:
                await self.rest(wait_s)
                times = (self._wanted_ns(), self.time.next_timer_ns())
                next_ns = min([self.time.now_ns + STEP_NS_MAX, *(time for time in times if time is not None)])
                if next_ns > until_ns:
                    break
                self.time.pass_to(next_ns)
            self.time.pass_to(until_ns)
            await self.rest(wait_s)
            for _ in range(LATE_STEPS):
                late_ms = self._late_ms - self.time.wall_ms()
                if late_ms <= 0:
                    break
                self.time.pass_to(self.time.now_ns + late_ms * MS)
                await self.rest(wait_s)

    async def rest(self, wait_s: float) -> None:
        """Wait until nothing more happens at this moment, and handlers have ended, for which it waits `wait_s` of real
        time at most."""
        while True:
            event = self._event
            self.time.fire_due()
            self._tick_soon()
            if self._fault is not None:
                raise NodeFailedError("the node in memory has stopped") from self._fault
            await asyncio.gather(*(self._ping(loop) for loop in (self.loop, *self._client_loops.values())))
            if event != self._event:
                continue
            working = self.time.working.keys() - self._given_up
            if not working:
                self._given_up &= self.time.working.keys()
                return
            if not await self._event_after(event, wait_s):
                self._given_up |= working
                if wait_s > 0:
                    _log.warning("%d handlers have not ended within %g s: time passes on", len(working), wait_s)

    async def _ping(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let a loop do what it has to do."""
        done: asyncio.Future[None] = self.loop.create_future()

        def answer() -> None:
            self.loop.call_soon_threadsafe(resolve, done, None)

        try:
            loop.call_soon_threadsafe(_when_idle, loop, answer)
        except RuntimeError:  # closed
            self._client_loops.pop(id(loop), None)
            return
        until_s = self.loop.time() + PING_S
        while not (await asyncio.wait({done}, timeout=LOOK_S))[0]:
            if not loop.is_running():
                self._client_loops.pop(id(loop), None)
                return
            if self.loop.time() > until_s:
                raise NodeFailedError(f"the loop of a client is blocked for {PING_S:g} s: {loop!r}")

    async def _event_after(self, event: int, wait_s: float) -> bool:
        """Whether something happened after that event, or does within so much real time."""
        watcher = self._watcher = self.loop.create_future()
        try:
            if self._event != event:
                return True
            await asyncio.wait({watcher}, timeout=wait_s)
            return self._event != event
        finally:
            self._watcher = None


def _report(line: Reported) -> None:
    level = logging.getLevelNamesMapping().get(line.level.upper(), logging.INFO)
    _log.log(level, "%s %s", line.event, line.fields)


def _request_failed(error_id: str, error: BaseException) -> None:
    _log.error("a request failed by a mistake of the node, id %s", error_id, exc_info=error)
