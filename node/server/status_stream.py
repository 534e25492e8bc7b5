"""WatchStatus: the status of this node, again and again. AwaitMaster: who is master, once that changes.

Callers that wait for the master cost nothing while they wait, however many they are. A change answers them in groups,
for a new master has more to do than to tell thousands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.watch.status import node_status
from tickwheel.node.failure import RequestError, invalid, limit_reached
from tickwheel.node.server.calls import Calls
from tickwheel.node.server.resolving import resolve
from tickwheel.proto import admin_pb2
from tickwheel.replication.log import Role
from tickwheel.transport.server import ServerStream as Context


def master_of(core: NodeCore) -> admin_pb2.AwaitMasterResponse:
    """The master that a node knows."""
    log = core.log.status()
    master = next((member for member in core.log.members() if member.node_id == log.master_id), None)
    address = master.client_address if master is not None else ""
    return admin_pb2.AwaitMasterResponse(
        term=log.term, master_address=address, leads=log.role is Role.MASTER, wait_ms_max=WAIT_MS_MAX
    )


INTERVAL_MS_MIN, INTERVAL_MS_MAX, INTERVAL_MS_DEFAULT = 50, 60_000, 1_000
WAIT_MS_MAX = 600_000
"""Of a caller that waits for the master: a thousand idle clients ask twice a second."""
TOLD_AT_ONCE = 64
"""Callers that are answered in one pass of the loop: some milliseconds of work."""
TOLD_PAUSE_S = 0.005


class StatusStreams:
    """Shows the status of a node."""

    def __init__(self, calls: Calls, streams_max: int, certificate_reason: Callable[[], str]) -> None:
        self._calls = calls
        self._streams_max = streams_max
        self._certificate_reason = certificate_reason
        self._watching = 0
        self._stopping = asyncio.Event()
        self._master = admin_pb2.AwaitMasterResponse()
        """The master as of the last look."""
        self._waiting: dict[asyncio.Future[None], None] = {}
        """Callers that wait for another master."""
        self._telling: asyncio.TimerHandle | None = None

    def stop(self) -> None:
        """End the streams and answer who waits, so that a stop does not wait for them."""
        self._stopping.set()
        for future in self._waiting:
            resolve(future, None)

    def status(self) -> admin_pb2.NodeStatus:
        """The status as of now."""
        status = node_status(self._calls.core)
        status.certificate_reason = self._certificate_reason()
        return status

    def look(self) -> None:
        """Called when the term or the master may have changed: tells those that wait for another master."""
        before, self._master = self._master, master_of(self._calls.core)
        if self._master.master_address and self._master != before:
            if self._telling is not None:
                self._telling.cancel()
            self._tell(list(self._waiting))

    def _tell(self, waiting: list[asyncio.Future[None]]) -> None:
        for future in waiting[:TOLD_AT_ONCE]:
            resolve(future, None)
        rest = waiting[TOLD_AT_ONCE:]
        self._telling = asyncio.get_running_loop().call_later(TOLD_PAUSE_S, self._tell, rest) if rest else None

    async def await_master(self, request: admin_pb2.AwaitMasterRequest) -> admin_pb2.AwaitMasterResponse:
        """The master that this node knows, once it is another one than the caller's, or when its wait is over."""
        if request.wait_ms > WAIT_MS_MAX:
            raise invalid("wait_ms", request.wait_ms, f"0 to {WAIT_MS_MAX}")
        loop = asyncio.get_running_loop()
        over_s = loop.time() + request.wait_ms / 1_000
        self.look()
        while not self._stopping.is_set() and loop.time() < over_s and not self._differs(request):
            changed: asyncio.Future[None] = loop.create_future()
            self._waiting[changed] = None
            try:
                await asyncio.wait({changed}, timeout=over_s - loop.time())
            finally:
                del self._waiting[changed]
        return self._master

    def _differs(self, known: admin_pb2.AwaitMasterRequest) -> bool:
        named = self._master
        return bool(named.master_address) and (named.term, named.master_address) != (known.term, known.master_address)

    async def serve(self, request: admin_pb2.WatchStatusRequest, context: Context) -> None:
        """Serve one stream."""
        interval_ms = request.interval_ms or INTERVAL_MS_DEFAULT
        if not INTERVAL_MS_MIN <= interval_ms <= INTERVAL_MS_MAX:
            raise invalid("interval_ms", interval_ms, f"{INTERVAL_MS_MIN} to {INTERVAL_MS_MAX}")
        if self._watching >= self._streams_max:
            raise RequestError(limit_reached("status_streams", self._streams_max))
        self._watching += 1
        try:
            while not self._stopping.is_set():
                await context.write(self.status())
                try:
                    await asyncio.wait_for(self._stopping.wait(), interval_ms / 1_000)
                except TimeoutError:
                    continue
        finally:
            self._watching -= 1
