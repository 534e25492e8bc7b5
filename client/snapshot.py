"""Reading everything that is pending, or that a group has settled, as of one applied index, from one node in parts.

Owns the choice of the node: a slave if there is one that serves, so that deliveries go on undisturbed. Whoever reads
parts elsewhere needs no more than address and pin.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc
import numpy as np

from tickwheel.client.backoff import Backoff, Deadline
from tickwheel.client.cluster import Cluster
from tickwheel.client.errors import ClusterUnavailable, Fault, RequestRefused, error_of, fault_of_call
from tickwheel.proto import admin_pb2, snapshot_pb2
from tickwheel.proto.snapshot_pb2_grpc import SnapshotStub

A = TypeVar("A")
READ_TIMEOUT_S = 60.0
GONE = "its node was restarted or cannot be reached, or nobody has read it for ten minutes"


@dataclass(frozen=True, slots=True)
class Pin:
    """What is pending on one node after one entry of the log."""

    address: str
    pin_id: int
    node_id: str
    applied_index: int
    cursor_due_ms: int
    hours: tuple[int, ...]
    """Hours since 1970 that may hold something."""
    units: tuple[int, ...]
    """How many units each had: about what there is to read. Empty if the node does not tell."""
    topics: dict[int, str]

    @property
    def handle(self) -> str:
        """What `held` takes, anywhere."""
        return f"{self.pin_id}@{self.address}"


@dataclass(frozen=True, slots=True)
class SettledTopic:
    """One topic of the group, and positions of its ready queue."""

    topic_id: int
    name: str
    first: int
    end: int
    """From and below: what there is to read."""
    began: int
    """Below it everything was dispatched before the group's start."""
    judged_from: int
    """What is settled from here on was acknowledged, skipped by the filter, or is dead; between the two that is not
    known."""
    retained: int
    """Below it all is removed with its hours, and can be read no more."""
    floor: int
    """Below it the group has settled all."""
    open: int
    """Of what lies from the floor on, how many it has not; retries of other groups may be counted."""


@dataclass(frozen=True, slots=True)
class SettledPin:
    """What a group has settled on one node after one entry of the log."""

    address: str
    pin_id: int
    applied_index: int
    topics: tuple[SettledTopic, ...]
    filter: str
    """Of the group, normalised; empty: everything."""
    dead_next: int
    dead_count: int
    """Number of its next dead letter, and how many it has."""


class SnapshotClient:
    """The snapshot calls of one cluster."""

    def __init__(self, cluster: Cluster, timeout_s: float) -> None:
        self._cluster = cluster
        self._timeout_s = timeout_s

    async def pin(
        self, topics: Sequence[str] = (), *, due_ms_min: int = 0, due_ms_max: int = 0, reader: str = "slave"
    ) -> Pin:
        """Pin what is pending: everything that was acknowledged before this call and has not been delivered.

        ClusterUnavailable names the addresses that were asked."""

        async def ask(channel: grpc.aio.Channel, index: int, left_s: float) -> snapshot_pb2.PinResponse:
            request = snapshot_pb2.PinRequest(
                topics=topics, due_ms_min=due_ms_min, due_ms_max=due_ms_max, applied_index_min=index
            )
            return await SnapshotStub(channel).Pin(request, timeout=left_s)

        return _pin_of(*await self._pinned(reader, ask))

    async def held(self, handle: str) -> Pin:
        """A pin that was made before. RequestRefused: its node holds it no more, or cannot be reached."""
        number, _, address = handle.partition("@")
        if not (number.isdecimal() and address):
            raise RequestRefused(f"{handle!r} is no handle of a pin (NUMBER@HOST:PORT)", "INVALID_FIELD")
        found = await self._holder(int(number), [address])
        if found is None:
            raise RequestRefused(f"pin {handle} is gone: {GONE}", "WRONG_STATE")
        return found

    async def agreed(
        self, name: str, topics: Sequence[str] = (), *, due_ms_min: int = 0, due_ms_max: int = 0, reader: str = "slave"
    ) -> Pin:
        """The pin that all read who read under this name: made by the first of them, as `pin` makes it.

        RequestRefused: the node that holds it does so no more, or cannot be reached; begin anew under another name.
        """
        pin_id = await self._agree(name, 0)
        if not pin_id:
            own = await self.pin(topics, due_ms_min=due_ms_min, due_ms_max=due_ms_max, reader=reader)
            pin_id = await self._agree(name, own.pin_id)
            if pin_id == own.pin_id:
                return own
            await self.unpin(own.address, own.pin_id)
        found = await self._holder(pin_id, list(await self._cluster.statuses()))
        if found is None:
            text = f"what is read as {name} is gone: {GONE}; run the query again, or load() anew"
            raise RequestRefused(text, "WRONG_STATE")
        return found

    async def _agree(self, name: str, pin_id: int) -> int:
        request = snapshot_pb2.AgreePinRequest(name=name, pin_id=pin_id)

        async def invoke(channel: grpc.aio.Channel, try_s: float) -> snapshot_pb2.AgreePinResponse:
            return await SnapshotStub(channel).AgreePin(request, timeout=try_s)

        return int((await self._cluster.call(invoke, self._timeout_s)).pin_id)

    async def _holder(self, pin_id: int, addresses: Sequence[str]) -> Pin | None:
        """The pin at the one of these nodes that holds it."""
        request = snapshot_pb2.PinRequest(pin_id=pin_id)

        async def ask(address: str) -> Pin | None:
            try:
                answer = await SnapshotStub(self._cluster.channel(address)).Pin(request, timeout=self._timeout_s)
            except grpc.aio.AioRpcError as error:
                fault = fault_of_call(error)
                if fault.elsewhere or fault.later or isinstance(error_of(fault), RequestRefused):
                    return None
                raise error_of(fault) from None
            return _pin_of(address, answer) if answer.pin_id == pin_id else None

        return next((pin for pin in await asyncio.gather(*map(ask, addresses)) if pin is not None), None)

    async def pin_settled(self, group: str, *, due_ms_min: int = 0, reader: str = "slave") -> SettledPin:
        """Pin what a group has settled and the cluster still keeps; everything that was acknowledged before this call.

        RequestRefused: there is no such group. ClusterUnavailable names the addresses that were asked."""

        async def ask(channel: grpc.aio.Channel, index: int, left_s: float) -> snapshot_pb2.PinSettledResponse:
            request = snapshot_pb2.PinSettledRequest(group=group, due_ms_min=due_ms_min, applied_index_min=index)
            return await SnapshotStub(channel).PinSettled(request, timeout=left_s)

        address, answer = await self._pinned(reader, ask)
        if not answer.HasField("dead_count"):
            text = f"node {answer.node_id} is of an earlier version and does not say what its dead letters were"
            raise RequestRefused(text, "UNIMPLEMENTED")
        topics = tuple(
            SettledTopic(
                topic.topic_id,
                topic.name,
                topic.first,
                topic.end,
                topic.began,
                topic.judged_from,
                topic.retained,
                topic.floor,
                topic.open,
            )
            for topic in answer.topics
        )
        return SettledPin(
            address,
            answer.pin_id,
            answer.applied_index,
            topics,
            answer.filter,
            answer.dead_next,
            answer.dead_count,
        )

    async def _pinned(self, reader: str, ask: Callable[[grpc.aio.Channel, int, float], Awaitable[A]]) -> tuple[str, A]:
        """The answer of a node that has applied what the master had, and its address."""
        deadline = Deadline(self._timeout_s)
        backoff = Backoff()
        while True:
            # The master's position now is at or behind everything that anybody was told of.
            master = await self._cluster.master(deadline)
            statuses = await self._cluster.statuses()
            leader = statuses.get(master)
            fault: Fault | None = leader if isinstance(leader, Fault) else None
            if isinstance(leader, admin_pb2.NodeStatus):
                address = _reader(statuses, master) if reader == "slave" else master
                try:
                    answer = await ask(self._cluster.channel(address), leader.applied_index, deadline.left_s)
                except grpc.aio.AioRpcError as error:
                    fault = fault_of_call(error)
                    if not (fault.elsewhere or fault.later):
                        raise error_of(fault) from None
                else:
                    return address, answer
            else:
                self._cluster.forget(master)
            if deadline.over:
                asked = ", ".join(self._cluster.addresses)
                said = fault.message if fault is not None else "no status"
                raise ClusterUnavailable(f"no node could be read from; asked {asked}: {said}", "NO_MASTER")
            await backoff.pause(deadline, fault.retry_after_s if fault is not None else 0.0)

    async def unpin(self, address: str, pin_id: int) -> None:
        """Nobody reads it any more. A node that cannot be reached forgets it by itself."""
        try:
            await SnapshotStub(self._cluster.channel(address)).Unpin(
                snapshot_pb2.UnpinRequest(pin_id=pin_id), timeout=self._timeout_s
            )
        except grpc.aio.AioRpcError as error:
            fault = fault_of_call(error)
            if not fault.elsewhere:
                raise error_of(fault) from None

    async def pages(
        self, address: str, pin_id: int, hour: int, *, content: bool
    ) -> AsyncIterator[snapshot_pb2.PinnedPage]:
        """All pages of one hour. RequestRefused: the pin is gone, or the hour; pin anew."""
        request = snapshot_pb2.ReadPinnedRequest(pin_id=pin_id, hour=hour, content=content)
        stub = SnapshotStub(self._cluster.channel(address))
        while True:
            try:
                page = await stub.ReadPinned(request, timeout=READ_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise error_of(fault_of_call(error)) from None
            yield page
            if not page.HasField("next_due_ms"):
                return
            request.start_due_ms, request.start_index = page.next_due_ms, page.next_index

    async def settled_pages(
        self, address: str, pin_id: int, topic_id: int, first: int, end: int, *, content: bool, retries: bool = False
    ) -> AsyncIterator[snapshot_pb2.SettledPage]:
        """All pages of positions of one topic; with `retries` where those stand instead. RequestRefused: the pin is
        gone; pin anew."""
        request = snapshot_pb2.ReadSettledRequest(
            pin_id=pin_id, topic_id=topic_id, first=first, end=end, content=content, retries=retries
        )
        stub = SnapshotStub(self._cluster.channel(address))
        while True:
            try:
                page = await stub.ReadSettled(request, timeout=READ_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise error_of(fault_of_call(error)) from None
            yield page
            if not page.HasField("next"):
                return
            request.first = page.next


def _pin_of(address: str, answer: snapshot_pb2.PinResponse) -> Pin:
    return Pin(
        address,
        answer.pin_id,
        answer.node_id,
        answer.applied_index,
        answer.cursor_due_ms,
        tuple(np.frombuffer(answer.hours, "<u4").tolist()),
        tuple(np.frombuffer(answer.units, "<u4").tolist()),
        dict(answer.topics),
    )


def _reader(statuses: dict[str, admin_pb2.NodeStatus | Fault], master: str) -> str:
    """The slave that is furthest, if one serves; else the master."""
    slaves = [
        (status.applied_index, address)
        for address, status in statuses.items()
        if isinstance(status, admin_pb2.NodeStatus)
        and status.role != admin_pb2.MASTER
        and status.state == admin_pb2.NODE_SERVING
    ]
    return max(slaves)[1] if slaves else master
