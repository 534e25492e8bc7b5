"""Pins: readers of all pending messages see those of one applied index, however long they take.

Owns the pins of this node, master or slave (pin_table.py). A pin holds back no file and no checkpoint (wheel/reads.py).
Workers read the pages; a page is bounded by units and bytes.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np

from tickwheel.node.core.kernel import Kernel
from tickwheel.node.core.metas import fitting
from tickwheel.node.core.promise import Promise
from tickwheel.node.core.schedule.intake import DUE_MS_LIMIT
from tickwheel.node.core.schedule.pending import within_bytes
from tickwheel.node.core.watch.pin_table import PinTable
from tickwheel.node.core.work import RemovedError, UnreadableError
from tickwheel.node.failure import RequestError, invalid, refuse, refused
from tickwheel.node.state.machine import CommandResult
from tickwheel.node.state.names import check_producer_id
from tickwheel.node.state.staging import StagingResult
from tickwheel.proto import common_pb2
from tickwheel.proto.log_pb2 import Command
from tickwheel.proto.snapshot_pb2 import (
    AgreePinRequest,
    AgreePinResponse,
    PinnedPage,
    PinRequest,
    PinResponse,
    ReadPinnedRequest,
)
from tickwheel.proto.staging_pb2 import CommitStagedRequest, StagingCommand
from tickwheel.wheel.queries import Wanted
from tickwheel.wheel.reads import Pinned
from tickwheel.wheel.units import HOUR_MS, CursorKey, ids_of, picked

PINS_MAX = 256
PAGE_UNITS_MAX = 8_192
NAME_BYTES = 16
"""Upper bound of what a name in a map takes beside its own bytes."""
TOPICS_MAX = 1_000
NAMED = "pin."
"""Prefix of the ids of jobs that stand for a pin agreed under a name."""


@dataclass(slots=True)
class _Pin:
    pinned: Pinned
    told: PinResponse
    """The first answer without the topics."""
    names: list[tuple[int, str]]
    """Topics by rising id."""
    topic_ids: frozenset[int] | None
    due_min: int
    due_max: int
    used_ms: int


class PendingPins:
    def __init__(self, core: Kernel) -> None:
        self._core = core
        self._pins: PinTable[_Pin] = PinTable(core)

    @property
    def count(self) -> int:
        """Pins held now."""
        return len(self._pins)

    async def pin(self, request: PinRequest) -> PinResponse:
        """Pin the pending messages of this moment."""
        core = self._core
        if request.pin_id:
            return _told(self._pins.read(request.pin_id), request.topics_after)
        self._check(request)
        state = core.state
        topic_ids = None
        if request.topics:
            found = filter(None, map(state.topics.named, set(request.topics)))
            named = sorted((topic.topic_id, topic.name) for topic in found)
            topic_ids = frozenset(number for number, _ in named)
        else:
            named = [(topic.topic_id, topic.name) for topic in state.topics]
        due_min, due_max = request.due_ms_min, request.due_ms_max or DUE_MS_LIMIT
        pinned = core.wheel.reads.pin(due_min, due_max)
        pin_id = self._pins.new_id(PINS_MAX)
        told = PinResponse(
            pin_id=pin_id,
            applied_index=core.applied.index,
            node_id=core.identity.node_id,
            cursor_due_ms=pinned.cursor.due_ms,
            hours=pinned.hours.astype("<u4").tobytes(),
            units=pinned.bounds.astype("<u4").tobytes(),
            spans=True,
        )
        pin = _Pin(pinned, told, named, topic_ids, due_min, due_max, core.steady_ms())
        return _told(self._pins.add(pin_id, pin))

    async def agree(self, request: AgreePinRequest) -> AgreePinResponse:
        """Agree on the pin to read under a name: the first one that was proposed.

        A name is a job that happens once (node/state/staging.py), without rows; its fingerprint is the pin.
        """
        core, job_id = self._core, f"{NAMED}{request.name}"
        problem = check_producer_id(job_id) if request.name else "must not be empty"
        if problem:
            raise invalid("name", request.name, problem)
        if request.pin_id and core.state.staging.job(job_id) is None:
            commit = CommitStagedRequest(job_id=job_id, run_id=NAMED, fingerprint=request.pin_id)
            command = Command(staging=StagingCommand(commit=commit))
            answer: Promise[CommandResult] = Promise()
            core.proposer.submit(command, answer.reply)
            result = await answer
            if core.state.staging.job(job_id) is None and isinstance(result, StagingResult):
                refuse(result.failure)
        job = core.state.staging.job(job_id)
        return AgreePinResponse(pin_id=job.fingerprint if job is not None else 0)

    def _check(self, request: PinRequest) -> None:
        self._pins.check_applied(request.applied_index_min)
        if len(request.topics) > TOPICS_MAX:
            raise invalid("topics", len(request.topics), f"at most {TOPICS_MAX}")
        for name, value in (("due_ms_min", request.due_ms_min), ("due_ms_max", request.due_ms_max)):
            if not 0 <= value <= DUE_MS_LIMIT:
                raise invalid(name, value, "a time in milliseconds since 1970, or 0")

    def unpin(self, pin_id: int) -> None:
        """Drop a pin. Idempotent."""
        self._pins.drop(pin_id)

    async def read(self, request: ReadPinnedRequest) -> PinnedPage:
        """Read a page of one hour, or of several."""
        core, hour = self._core, request.hour
        pin = self._pins.read(request.pin_id)
        if request.hour_end and request.hour_end <= hour:
            raise invalid("hour_end", request.hour_end, f"above hour ({hour}), or 0")
        if not 0 <= request.start_due_ms <= DUE_MS_LIMIT:
            raise invalid("start_due_ms", request.start_due_ms, "next_due_ms of the page before, or 0")
        start = CursorKey(request.start_due_ms, request.start_index) if request.start_due_ms else None
        first = max(hour, request.start_due_ms // HOUR_MS)
        hours = range(first, request.hour_end or hour + 1)
        # Hours are removed in their order: if the first one is still there, all are.
        self._require_hour(first)
        only = list(pin.topic_ids or ())
        wanted = Wanted(topic_id=only[0]) if len(only) == 1 else None
        try:
            job = await core.background.scan_pinned(
                pin.pinned, hours, start, pin.due_min, pin.due_max, PAGE_UNITS_MAX, wanted
            )
        except UnreadableError:
            self._require_hour(first)
            raise
        units = pin.pinned.known(job.units)
        if pin.topic_ids is not None:
            units = picked(units, np.isin(units["topic_id"], list(pin.topic_ids)))
        # A large record makes a page of its own.
        units, next_key = within_bytes(units, units["size"], job.next_key)
        page = PinnedPage(
            ids=ids_of(units).astype("<u8").tobytes(),
            topic_ids=units["topic_id"].tobytes(),
            due_ms=units["due_ms"].tobytes(),
            due_requested_ms=units["due_requested_ms"].tobytes(),
            scheduled_ms=units["scheduled_ms"].tobytes(),
            sizes=units["size"].tobytes(),
            meta_sizes=units["meta_size"].astype("<u4").tobytes(),
            target_groups=units["target_group"].tobytes(),
        )
        if next_key is not None:
            page.next_due_ms, page.next_index = next_key
        if request.content and len(units):
            try:
                page.records = b"".join(await core.background.records_of(units))
            except RemovedError:
                raise _overtaken(int(units["due_ms"][0]) // HOUR_MS) from None
        return page

    def _require_hour(self, hour: int) -> None:
        """Raise RequestError if the hour was removed."""
        if hour < self._core.wheel.holdings.removed_below:
            raise _overtaken(hour)


def _told(pin: _Pin, topics_after: int = 0) -> PinResponse:
    """The answer about a pin, with as many of the topics with higher ids as fit."""
    answer = PinResponse()
    answer.CopyFrom(pin.told)
    first = bisect.bisect_right(pin.names, topics_after, key=lambda item: item[0])
    further = pin.names[first:]
    page = fitting(further, lambda item: NAME_BYTES + len(item[1]))
    answer.topics.update(page)
    if len(page) < len(further):
        answer.topics_to = page[-1][0]
    return answer


def _overtaken(hour: int) -> RequestError:
    text = (
        f"hour {hour} was removed while it was being read: all of it was delivered and settled, or retention was over"
    )
    return refused(common_pb2.WRONG_STATE, text, field="hour", value=hour)
