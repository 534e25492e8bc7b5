"""Reads all pending messages, or all that a group has settled, as of one applied index, from one node in parts.

Chooses the node: a slave if one serves, so that the reads do not disturb deliveries. Another process that reads parts
needs only the address and the pin.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray

from tickwheel.client.answers import reader
from tickwheel.client.backoff import Backoff, Deadline
from tickwheel.client.calls import ServiceCalls
from tickwheel.client.errors import ClusterUnavailable, Fault, RequestRefused, error_of, fault_of_call
from tickwheel.client.requests import request_of
from tickwheel.proto import admin_pb2, snapshot_pb2
from tickwheel.proto.snapshot_pb2_grpc import SnapshotStub

A = TypeVar("A")
READ_TIMEOUT_S = 60.0
GONE = "its node was restarted or cannot be reached, or nobody has read it for ten minutes"


@dataclass(frozen=True, slots=True)
class Pin:
    """The pending messages on one node after one entry of the log."""

    address: str
    pin_id: int
    node_id: str
    applied_index: int
    cursor_due_ms: int
    hours: tuple[int, ...]
    """Hours since 1970 that may hold messages."""
    units: tuple[int, ...]
    """Units in each hour, roughly the amount to read. Empty if the node does not tell."""
    topics: dict[int, str]
    spans: bool = False
    """Whether the node reads several hours at once."""

    @property
    def handle(self) -> str:
        """The handle for `held`, valid in any process."""
        return f"{self.pin_id}@{self.address}"


@dataclass(frozen=True, slots=True)
class SettledTopic:
    """One topic of the group, with positions in its ready queue."""

    topic_id: int
    name: str
    first: int
    end: int
    """The positions to read begin at `first` and end before `end`."""
    began: int
    """Messages below this position were dispatched before the group's start."""
    judged_from: int
    """Settled messages from here on were acknowledged, skipped by the filter, or are dead. Between `began` and this
    position the reason is not known."""
    retained: int
    """Messages below this position were removed with their hours and can no longer be read."""
    floor: int
    """The group has settled all messages below this position."""
    open: int
    """Number of unsettled messages from the floor on; retries of other groups may be included."""


@dataclass(frozen=True, slots=True)
class SettledPin:
    """The messages that a group has settled, on one node after one entry of the log."""

    address: str
    pin_id: int
    applied_index: int
    topics: tuple[SettledTopic, ...]
    filter: str
    """The group's filter, normalized; empty: all messages."""
    dead_next: int
    dead_count: int
    """The number of its next dead letter, and the count of its dead letters."""


@dataclass(frozen=True, slots=True)
class PinnedPage:
    """A page of pending messages as columns of n elements, in delivery order. Views of the received bytes."""

    ids: NDArray[np.uint64]
    topic_ids: NDArray[np.uint32]
    """For `Pin.topics`."""
    due_ms: NDArray[np.int64]
    due_requested_ms: NDArray[np.int64]
    scheduled_ms: NDArray[np.int64]
    sizes: NDArray[np.uint32]
    """Bytes of meta and payload together."""
    meta_sizes: NDArray[np.uint32]
    """Bytes of the meta alone."""
    target_groups: NDArray[np.uint32]
    """The group that a retry goes to; 0: all."""
    records: bytes
    """Meta and payload of each, one behind the other; empty unless asked for."""


@dataclass(frozen=True, slots=True)
class SettledPage:
    """A page of messages that a group has settled and that wait for no retry, as columns of n elements in the order of
    dispatch. Views of the received bytes."""

    ids: NDArray[np.uint64]
    """Under which they were scheduled."""
    positions: NDArray[np.uint64]
    due_ms: NDArray[np.int64]
    """When they were due first; without elements for retries, like the next six."""
    last_due_ms: NDArray[np.int64]
    """When their last delivery was due."""
    scheduled_ms: NDArray[np.int64]
    """When they were scheduled; 0: not known any more."""
    sizes: NDArray[np.uint32]
    """Bytes of meta and payload together."""
    meta_sizes: NDArray[np.uint32]
    """Bytes of the meta alone."""
    records: bytes
    """Meta and payload of each, one behind the other; empty unless asked for."""
    removed: int
    """Positions that were passed over because their hours are removed."""
    next: int | None
    """The first position behind the page; None: this is the last one."""


settled_topic_of = reader(SettledTopic, snapshot_pb2.SettledTopic)
pinned_page_of = reader(PinnedPage, snapshot_pb2.PinnedPage)
settled_page_of = reader(SettledPage, snapshot_pb2.SettledPage)


class SnapshotClient(ServiceCalls[SnapshotStub]):
    """The snapshot calls of one cluster."""

    _service = SnapshotStub

    async def pin(
        self, topics: Sequence[str] = (), *, due_ms_min: int = 0, due_ms_max: int = 0, reader: str = "slave"
    ) -> Pin:
        """Pin the pending messages: all that were acknowledged before this call and not delivered.

        Raises ClusterUnavailable, which names the addresses asked.
        """

        async def ask(channel: grpc.aio.Channel, index: int, left_s: float) -> snapshot_pb2.PinResponse:
            request = request_of(
                snapshot_pb2.PinRequest,
                topics=topics,
                due_ms_min=due_ms_min,
                due_ms_max=due_ms_max,
                applied_index_min=index,
            )
            return await SnapshotStub(channel).Pin(request, timeout=left_s)

        address, answer = await self._pinned(reader, ask)
        return _pin_of(address, await self._with_all_topics(address, answer))

    async def _with_all_topics(self, address: str, answer: snapshot_pb2.PinResponse) -> snapshot_pb2.PinResponse:
        """The answer with the names of all topics, of which one answer holds so many only."""
        topics_to = answer.topics_to
        while topics_to:
            request = snapshot_pb2.PinRequest(pin_id=answer.pin_id, topics_after=topics_to)
            more = await self._ask_at(address, lambda stub: stub.Pin, request, READ_TIMEOUT_S)
            answer.topics.update(more.topics)
            topics_to = more.topics_to
        return answer

    async def held(self, handle: str) -> Pin:
        """An existing pin, by its handle. Raises RequestRefused if its node no longer holds it or is unreachable."""
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
        """The pin shared by all callers that use this name; the first of them makes it, as `pin` does.

        Raises RequestRefused if the node no longer holds the pin or is unreachable; then start anew under another name.
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
        request = request_of(snapshot_pb2.AgreePinRequest, name=name, pin_id=pin_id)
        return int((await self._ask(lambda stub: stub.AgreePin, request)).pin_id)

    async def _holder(self, pin_id: int, addresses: Sequence[str]) -> Pin | None:
        """The pin on whichever of these nodes holds it; None if none does."""
        request = request_of(snapshot_pb2.PinRequest, pin_id=pin_id)

        async def ask(address: str) -> Pin | None:
            try:
                answer = await SnapshotStub(self._cluster.channel(address)).Pin(request, timeout=self._timeout_s)
            except grpc.aio.AioRpcError as error:
                fault = fault_of_call(error)
                if fault.elsewhere or fault.later or isinstance(error_of(fault), RequestRefused):
                    return None
                raise error_of(fault) from None
            if answer.pin_id != pin_id:
                return None
            return _pin_of(address, await self._with_all_topics(address, answer))

        return next((pin for pin in await asyncio.gather(*map(ask, addresses)) if pin is not None), None)

    async def pin_settled(self, group: str, *, due_ms_min: int = 0, reader: str = "slave") -> SettledPin:
        """Pin the messages that a group has settled and the cluster still keeps: all acknowledged before this call.

        Raises RequestRefused if there is no such group, and ClusterUnavailable, which names the addresses asked.
        """

        async def ask(channel: grpc.aio.Channel, index: int, left_s: float) -> snapshot_pb2.PinSettledResponse:
            request = request_of(
                snapshot_pb2.PinSettledRequest, group=group, due_ms_min=due_ms_min, applied_index_min=index
            )
            return await SnapshotStub(channel).PinSettled(request, timeout=left_s)

        address, answer = await self._pinned(reader, ask)
        if not answer.HasField("dead_count"):
            text = f"node {answer.node_id} is of an earlier version and does not say what its dead letters were"
            raise RequestRefused(text, "UNIMPLEMENTED")
        found, topics_to = list(answer.topics), answer.topics_to
        while topics_to:
            further = request_of(
                snapshot_pb2.PinSettledRequest, group=group, pin_id=answer.pin_id, topics_after=topics_to
            )
            more = await self._ask_at(address, lambda stub: stub.PinSettled, further, READ_TIMEOUT_S)
            found += more.topics
            topics_to = more.topics_to
        return SettledPin(
            address,
            answer.pin_id,
            answer.applied_index,
            tuple(map(settled_topic_of, found)),
            answer.filter,
            answer.dead_next,
            answer.dead_count,
        )

    async def _pinned(self, reader: str, ask: Callable[[grpc.aio.Channel, int, float], Awaitable[A]]) -> tuple[str, A]:
        """(address, answer) of a node that has applied as much as the master had when this was called."""
        deadline = Deadline(self._timeout_s)
        backoff = Backoff()
        while True:
            # The master's applied index now covers everything that any client was told of.
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
        """Release a pin. An unreachable node drops it by itself later."""
        try:
            await SnapshotStub(self._cluster.channel(address)).Unpin(
                request_of(snapshot_pb2.UnpinRequest, pin_id=pin_id), timeout=self._timeout_s
            )
        except grpc.aio.AioRpcError as error:
            fault = fault_of_call(error)
            if not fault.elsewhere:
                raise error_of(fault) from None

    async def pages(
        self, address: str, pin_id: int, hour: int, *, content: bool, hour_end: int = 0
    ) -> AsyncIterator[PinnedPage]:
        """All pages of one hour, or of those before `hour_end` if the pin `spans`. Some may be empty.

        Raises RequestRefused if the pin or the hour is gone: pin anew.
        """
        request = request_of(
            snapshot_pb2.ReadPinnedRequest, pin_id=pin_id, hour=hour, content=content, hour_end=hour_end
        )
        while True:
            page = await self._ask_at(address, lambda stub: stub.ReadPinned, request, READ_TIMEOUT_S)
            yield pinned_page_of(page)
            if not page.HasField("next_due_ms"):
                return
            request.start_due_ms, request.start_index = page.next_due_ms, page.next_index

    async def settled_pages(
        self, address: str, pin_id: int, topic_id: int, first: int, end: int, *, content: bool, retries: bool = False
    ) -> AsyncIterator[SettledPage]:
        """All pages of one topic's positions from `first` to before `end`, or of its retries with `retries`.

        Raises RequestRefused if the pin is gone: pin anew.
        """
        request = snapshot_pb2.ReadSettledRequest(
            pin_id=pin_id, topic_id=topic_id, first=first, end=end, content=content, retries=retries
        )
        while True:
            page = await self._ask_at(address, lambda stub: stub.ReadSettled, request, READ_TIMEOUT_S)
            yield settled_page_of(page)
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
        answer.spans,
    )


def _reader(statuses: dict[str, admin_pb2.NodeStatus | Fault], master: str) -> str:
    """The address of the serving slave that has applied most; without one, the master."""
    slaves = [
        (status.applied_index, address)
        for address, status in statuses.items()
        if isinstance(status, admin_pb2.NodeStatus)
        and status.role != admin_pb2.MASTER
        and status.state == admin_pb2.NODE_SERVING
    ]
    return max(slaves)[1] if slaves else master
