"""Streams at the master of a cluster, one after the other: each is left as soon as another node has become master."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tickwheel.client.backoff import Deadline
from tickwheel.client.cluster import Cluster
from tickwheel.client.errors import Fault
from tickwheel.client.tasks import start_task


class MasterStream:
    def __init__(self, cluster: Cluster, talk: Callable[[str], Coroutine[Any, Any, Fault | None]]) -> None:
        """`talk` uses one stream to the node at an address until it ends, and returns the fault that ended it. Its
        cancellation abandons the stream."""
        self._cluster = cluster
        self._talk = talk
        self._talking: asyncio.Task[Fault | None] | None = None
        self._beside: list[asyncio.Task[None]] = []
        """Tasks that run as long as the talk does."""
        self._error: BaseException | None = None
        """The error that ended one of them."""
        self._address = ""

    def watch(self) -> None:
        """Have the nodes asked for the master, until `unwatch`."""
        self._cluster.watch(self, self._moved)

    def unwatch(self) -> None:
        """Idempotent."""
        self._cluster.unwatch(self)

    def _moved(self, address: str) -> None:
        # A call that got no answer has the master forgotten: it may be found again where this stream is.
        if self._talking is not None and address != self._address:
            self._talking.cancel()

    def beside(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """Called by a talk: run this until the talk ends. An error in it ends the talk, and `once` raises it."""
        self._beside.append(start_task(work, what, self._failed))

    def _failed(self, error: BaseException) -> None:
        self._error = error
        if self._talking is not None:
            self._talking.cancel()

    async def once(self, deadline: Deadline) -> Fault | None:
        """Find the master, and talk to it until the stream ends or the master changes. Returns the fault, if any. A
        cancellation ends the talk."""
        self._error = None
        address = self._address = await self._cluster.master(deadline, patient=True)
        talking = self._talking = asyncio.ensure_future(self._talk(address))
        try:
            await asyncio.wait({talking})
        finally:
            self._talking = None
            beside, self._beside = self._beside, []
            for task in (talking, *beside):
                task.cancel()
            await asyncio.wait({talking, *beside})
        if self._error is not None:
            raise self._error
        fault = Fault("UNAVAILABLE", "the master has changed") if talking.cancelled() else talking.result()
        if fault is not None and fault.elsewhere:
            self._cluster.forget(address)
            self._cluster.learn(fault.master_address, fault.master_term)
        return fault
