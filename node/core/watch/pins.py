"""Pins: readers of all pending messages see those of one applied index, however long they take.

Owns the pins of this node, master or slave. A pin holds back no file and no checkpoint (wheel/reads.py). It is
forgotten when its reader drops it, or after PIN_HOLD_MS without a read. Workers read the pages; a page is bounded by
units and bytes.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np

from tickwheel.node.core.kernel import Kernel
from tickwheel.node.core.metas import ANSWER_BYTES_MAX, fitting
from tickwheel.node.core.promise import Promise
from tickwheel.node.core.schedule.intake import DUE_MS_LIMIT
from tickwheel.node.core.work import RemovedError, UnreadableError
from tickwheel.node.failure import Failure, RequestError, invalid, refuse
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
from tickwheel.wheel.units import HOUR_MS, CursorKey, Units, ids_of, picked

PINS_MAX = 256
"""Beyond this the least recently read pin goes: a reader that pins again and again must not lock out others."""
PIN_HOLD_MS = 600_000
"""A pin is kept this long without a read: its reader may be busy with other hours."""
PAGE_UNITS_MAX = 8_192
NAME_BYTES = 16
"""Upper bound of what a name in a map takes beside its own bytes."""
TOPICS_MAX = 1_000
NAMED = "pin."
"""Prefix of the ids of jobs that stand for a pin agreed under a name."""
RETRY_HINT_MS = 20


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
        self._pins: dict[int, _Pin] = {}

    @property
    def count(self) -> int:
        """Pins held now."""
        return len(self._pins)

    async def pin(self, request: PinRequest) -> PinResponse:
        """Pin the pending messages of this moment."""
        core = self._core
        if request.pin_id:
            return _told(self._pin(request.pin_id), request.topics_after)
        self._check(request)
        state = core.state
        names = {topic.topic_id: topic.name for topic in state.topics}
        topic_ids = None
        if request.topics:
            wanted = set(request.topics)
            topic_ids = frozenset(number for number, name in names.items() if name in wanted)
        due_min, due_max = request.due_ms_min, request.due_ms_max or DUE_MS_LIMIT
        pinned = core.wheel.reads.pin(due_min, due_max)
        now_ms = core.steady_ms()
        self._forget_unused(now_ms)
        if len(self._pins) >= PINS_MAX:
            del self._pins[min(self._pins, key=lambda n: self._pins[n].used_ms)]
        # By chance: a number of an earlier life of this node must name nothing.
        pin_id = core.random_bits(63) | 1
        told = PinResponse(
            pin_id=pin_id,
            applied_index=core.applied_index,
            node_id=core.identity.node_id,
            cursor_due_ms=pinned.cursor.due_ms,
            hours=pinned.hours.astype("<u4").tobytes(),
            units=pinned.bounds.astype("<u4").tobytes(),
            spans=True,
        )
        named = sorted((number, name) for number, name in names.items() if topic_ids is None or number in topic_ids)
        pin = self._pins[pin_id] = _Pin(pinned, told, named, topic_ids, due_min, due_max, now_ms)
        return _told(pin)

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
        core = self._core
        if core.recovering or core.applied_index < request.applied_index_min:
            text = f"applied {core.applied_index} of {max(core.recover_to, request.applied_index_min)}"
            raise RequestError(Failure(common_pb2.RECOVERING, text, {"retry_after_ms": str(RETRY_HINT_MS)}))
        if len(request.topics) > TOPICS_MAX:
            raise invalid("topics", len(request.topics), f"at most {TOPICS_MAX}")
        for name, value in (("due_ms_min", request.due_ms_min), ("due_ms_max", request.due_ms_max)):
            if not 0 <= value <= DUE_MS_LIMIT:
                raise invalid(name, value, "a time in milliseconds since 1970, or 0")

    def _pin(self, pin_id: int) -> _Pin:
        """A pin, which is used now. Raises RequestError: it is not known."""
        pin = self._pins.get(pin_id)
        if pin is None:
            text = f"pin {pin_id} is not known: it was not read for long, or the node was restarted; pin anew"
            raise RequestError(Failure(common_pb2.WRONG_STATE, text, {"field": "pin_id", "value": str(pin_id)}))
        pin.used_ms = self._core.steady_ms()
        return pin

    def _forget_unused(self, now_ms: int) -> None:
        for pin_id in [n for n, pin in self._pins.items() if now_ms - pin.used_ms > PIN_HOLD_MS]:
            del self._pins[pin_id]

    def unpin(self, pin_id: int) -> None:
        """Drop a pin. Idempotent."""
        self._pins.pop(pin_id, None)

    async def read(self, request: ReadPinnedRequest) -> PinnedPage:
        """Read a page of one hour, or of several."""
        core, hour = self._core, request.hour
        pin = self._pin(request.pin_id)
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
        units, next_key = _page(units, job.next_key)
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
                raise RequestError(_overtaken(int(units["due_ms"][0]) // HOUR_MS)) from None
        return page

    def _require_hour(self, hour: int) -> None:
        """Raise RequestError if the hour was removed."""
        if hour < self._core.wheel.holdings.removed_below:
            raise RequestError(_overtaken(hour))


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


def _page(units: Units, next_key: CursorKey | None) -> tuple[Units, CursorKey | None]:
    """The units that fit into a page, and where the next page begins. A large record makes a page of its own."""
    ends = np.cumsum(units["size"], dtype=np.int64)
    fit = max(1, int(np.searchsorted(ends, ANSWER_BYTES_MAX, side="right")))
    if fit >= len(units):
        return units, next_key
    following = units[fit]
    return units[:fit], CursorKey(int(following["due_ms"]), int(following["index"]))


def _overtaken(hour: int) -> Failure:
    text = (
        f"hour {hour} was removed while it was being read: all of it was delivered and settled, or retention was over"
    )
    return Failure(common_pb2.WRONG_STATE, text, {"field": "hour", "value": str(hour)})
