"""WatchStatus: the status of this node, again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from tickwheel.node.core.watch.status import node_status
from tickwheel.node.failure import RequestError, invalid, limit_reached
from tickwheel.node.server.calls import Calls
from tickwheel.proto import admin_pb2

Context = grpc.aio.ServicerContext[Any, Any]

INTERVAL_MS_MIN, INTERVAL_MS_MAX, INTERVAL_MS_DEFAULT = 50, 60_000, 1_000


class StatusStreams:
    """Shows the status of a node."""

    def __init__(self, calls: Calls, streams_max: int, certificate_reason: Callable[[], str]) -> None:
        self._calls = calls
        self._streams_max = streams_max
        self._certificate_reason = certificate_reason
        self._watching = 0
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End the streams, so that a stop does not wait for them."""
        self._stopping.set()

    def status(self) -> admin_pb2.NodeStatus:
        """The status as of now."""
        status = node_status(self._calls.core)
        status.certificate_reason = self._certificate_reason()
        return status

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
