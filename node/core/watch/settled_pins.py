"""Pins of settled messages: readers see the messages that a group has settled and the cluster still keeps, as of one
applied index.

Owns the pins of this node, master or slave. A pin has, for each topic of the group, the floor, a bit for each position
of the open window, and the ids of messages that wait for a retry. It holds no file. A message is done if its last
position for the group is settled and it waits for no retry. Pages give the settled positions, and separately the
positions of retries, so that readers can tell which position is the last. Hours that are removed meanwhile are skipped
and counted.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.core.kernel import Kernel
from tickwheel.node.core.metas import ANSWER_BYTES_MAX, count_fitting, fitting
from tickwheel.node.core.schedule.intake import DUE_MS_LIMIT
from tickwheel.node.core.watch.pin_table import PinTable
from tickwheel.node.core.work import RemovedError, UnreadableError
from tickwheel.node.failure import invalid, refused
from tickwheel.node.state.ready import ReadyLog
from tickwheel.node.state.subscription import Subscription
from tickwheel.node.state.targets import origins_of
from tickwheel.proto import common_pb2
from tickwheel.proto.snapshot_pb2 import (
    PinSettledRequest,
    PinSettledResponse,
    ReadSettledRequest,
    SettledPage,
    SettledTopic,
)
from tickwheel.wheel.units import Ids, ids_of, picked

PINS_MAX = 16
"""Each pin has a bit for each message of the group's open windows."""
PAGE_POSITIONS = 4_096
PAGE_RETRIES = 65_536
"""Positions searched for retries at a time."""


@dataclass(frozen=True, slots=True)
class _Window:
    """The messages of one topic that a group had settled at the pin."""

    floor: int
    bits: NDArray[np.uint8]
    """One bit for each position from the floor on, packed: 1 is settled."""
    count: int
    """Positions from this one on were not settled, or did not exist."""

    def settled(self, first: int, end: int) -> NDArray[np.bool_]:
        """True for each settled position of [first, end)."""
        found = np.zeros(end - first, np.bool_)
        found[: max(0, self.floor - first)] = True
        low, high = max(first, self.floor), min(end, self.floor + self.count)
        if low < high:
            at = low - self.floor
            start = at // 8 * 8
            bits = np.unpackbits(self.bits[start // 8 : -(-(high - self.floor) // 8)], bitorder="little")
            found[low - first : high - first] = bits[at - start : high - self.floor - start]
        return found


@dataclass(slots=True)
class _Pin:
    group_id: int
    windows: dict[int, _Window]
    ends: dict[int, int]
    waiting: Ids
    used_ms: int
    told: PinSettledResponse
    """The first answer without the topics."""
    topics: list[SettledTopic] = field(default_factory=list)
    """By rising id."""


def _told(pin: _Pin, topics_after: int = 0) -> PinSettledResponse:
    """The answer about a pin, with as many of the topics with higher ids as fit."""
    answer = PinSettledResponse()
    answer.CopyFrom(pin.told)
    further = pin.topics[bisect.bisect_right(pin.topics, topics_after, key=lambda topic: topic.topic_id) :]
    page = fitting(further, SettledTopic.ByteSize)
    answer.topics.extend(page)
    if len(page) < len(further):
        answer.topics_to = page[-1].topic_id
    return answer


_NO_BITS = np.zeros(0, np.uint8)


def _window_of(subscription: Subscription) -> _Window:
    values = subscription.window_bytes()
    if not values:  # as in most topics of a group that has many
        return _Window(subscription.floor, _NO_BITS, 0)
    settled = np.frombuffer(values, "<u2") == 0
    return _Window(subscription.floor, np.packbits(settled, bitorder="little"), len(settled))


class SettledPins:
    def __init__(self, core: Kernel) -> None:
        self._core = core
        self._pins: PinTable[_Pin] = PinTable(core)

    async def pin(self, request: PinSettledRequest) -> PinSettledResponse:
        """Pin the settled messages of this moment."""
        if request.pin_id:
            return _told(self._pins.read(request.pin_id), request.topics_after)
        core, state = self._core, self._core.state
        self._pins.check_applied(request.applied_index_min)
        if not 0 <= request.due_ms_min <= DUE_MS_LIMIT:
            raise invalid("due_ms_min", request.due_ms_min, "a time in milliseconds since 1970, or 0")
        group_id = state.group_id(request.group)
        if group_id is None:
            raise refused(
                common_pb2.UNKNOWN_NAME, f"group {request.group} does not exist", field="group", value=request.group
            )
        pin_id = self._pins.new_id(PINS_MAX)
        group = state.groups.get(group_id)
        assert group is not None, "its id was found"
        told = PinSettledResponse(
            pin_id=pin_id,
            applied_index=core.applied.index,
            node_id=core.identity.node_id,
            filter=state.group_filter(group_id),
            dead_next=group.dead.next_number,
            dead_count=group.dead.count,
        )
        waiting = np.unique(state.waiting_origins(group_id))
        pin = self._pins.add(pin_id, _Pin(group_id, {}, {}, waiting, core.steady_ms(), told))
        for topic_id, subscription in sorted(group.subscriptions.items()):
            topic = state.topics.get(topic_id)
            assert topic is not None, "a topic that is deleted leaves all groups"
            ready = topic.ready
            pin.windows[topic_id] = _window_of(subscription)
            pin.ends[topic_id] = ready.count
            first = ready.position_of_due(request.due_ms_min) if request.due_ms_min else ready.first_retained
            pin.topics.append(
                SettledTopic(
                    topic_id=topic_id,
                    name=topic.name,
                    first=first,
                    end=ready.count,
                    began=subscription.began,
                    judged_from=ready.count if group.broadcasting else subscription.judged_from,
                    retained=ready.first_retained,
                    floor=subscription.floor,
                    open=subscription.backlog,
                )
            )
        return _told(pin)

    async def read(self, request: ReadSettledRequest) -> SettledPage:
        """Read a page of one topic. Hours that are removed meanwhile are skipped."""
        while True:
            pin, ready, first, stop = self._range(request)
            try:
                return await self._page(request, pin, ready, first, stop)
            except RemovedError as error:
                again = self._core.state.ready_log(request.topic_id)
                if again is not None and again.first_retained <= first:
                    raise UnreadableError(error) from error

    def unpin(self, pin_id: int) -> None:
        """Drop a pin. Idempotent."""
        self._pins.drop(pin_id)

    def _range(self, request: ReadSettledRequest) -> tuple[_Pin, ReadyLog, int, int]:
        """The pin, the topic's ready log, and the positions from where to where the page may go."""
        pin = self._pins.read(request.pin_id)
        ready = self._core.state.ready_log(request.topic_id)
        if request.topic_id not in pin.windows or ready is None:
            raise invalid("topic_id", request.topic_id, "a topic of the pin")
        stop = min(request.end, pin.ends[request.topic_id])
        return pin, ready, min(max(request.first, ready.first_retained), stop), stop

    async def _page(
        self, request: ReadSettledRequest, pin: _Pin, ready: ReadyLog, first: int, stop: int
    ) -> SettledPage:
        page = SettledPage(removed=max(0, first - request.first))
        if request.retries:
            end = min(first + PAGE_RETRIES, stop)
            rows = ready.targets.between(first, end)
            rows = rows[rows["group"] == pin.group_id]
            page.ids, page.positions = rows["origin"].tobytes(), rows["position"].tobytes()
            if end < stop:
                page.next = end
            return page
        end = min(first + PAGE_POSITIONS, stop)
        if end < stop:
            page.next = end
        settled = pin.windows[request.topic_id].settled(first, end)
        settled[ready.foreign(pin.group_id, first, end) - first] = False
        positions = first + np.flatnonzero(settled)
        if not len(positions):
            return page
        background = self._core.background
        units = await background.units_of(ready.gather(positions))
        fit = count_fitting(units["size"], ANSWER_BYTES_MAX) if request.content else len(units)
        if fit < len(units):
            page.next = int(positions[fit])
            units, positions = units[:fit], positions[:fit]
        origins = origins_of(units)
        ids: Ids = np.where(origins != 0, origins, ids_of(units))
        keep = ~np.isin(ids, pin.waiting)
        units, positions, ids = picked(units, keep), positions[keep], ids[keep]
        retried = units["target_group"] != 0
        page.ids, page.positions = ids.astype("<u8").tobytes(), positions.astype("<u8").tobytes()
        # A retry keeps in its place when it was due first.
        page.due_ms = np.where(retried, units["scheduled_ms"], units["due_ms"]).astype("<i8").tobytes()
        page.last_due_ms = units["due_ms"].tobytes()
        page.scheduled_ms = np.where(retried, 0, units["scheduled_ms"]).astype("<i8").tobytes()
        page.sizes, page.meta_sizes = units["size"].tobytes(), units["meta_size"].astype("<u4").tobytes()
        if request.content and len(units):
            page.records = b"".join(await background.records_of(units))
        return page
