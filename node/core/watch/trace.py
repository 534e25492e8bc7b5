"""Answers requests for the events that this node recorded about single messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from tickwheel.node.core.message_ids import id_of, message_id_of
from tickwheel.node.core.promise import Promise
from tickwheel.node.core.serving import Serving
from tickwheel.node.core.watch.events import RUN_OF, Events, FindJob
from tickwheel.node.core.work import read
from tickwheel.node.failure import RequestError, invalid, limit_reached
from tickwheel.proto import admin_pb2, common_pb2
from tickwheel.proto.log_pb2 import SettleKind
from tickwheel.storage.events import EventKind, EventRecord

if TYPE_CHECKING:
    from tickwheel.node.core.world import NodeIdentity

IDS_MAX = 100
TRACES_MAX = 4
"""Traces under way at a time: each reads all event files."""

_TEXTS = {
    EventKind.DISPATCHED: ("topic",),
    EventKind.DELIVERED: ("topic", "group", "consumer"),
    EventKind.SETTLED: ("topic", "group", "reason"),
}


class Tracer:
    def __init__(self, events: Events, identity: NodeIdentity, serving: Serving) -> None:
        self._serving = serving
        self._events = events
        self._identity = identity
        self._under_way = 0

    async def trace(self, request: admin_pb2.TraceRequest) -> admin_pb2.TraceResponse:
        """Read the event files for some ids."""
        if not 1 <= len(request.ids) <= IDS_MAX:
            raise invalid("ids", len(request.ids), f"1 to {IDS_MAX}")
        if self._under_way >= TRACES_MAX:
            raise RequestError(limit_reached("traces", TRACES_MAX, 500))
        ids = np.array([id_of(number, self._identity.wheel_group) for number in request.ids], np.uint64)
        found: Promise[FindJob] = Promise()
        self._under_way += 1
        try:
            self._events.find(ids, self._serving.bound(found.answered))
            job = await read(found, "the event files")
        finally:
            self._under_way -= 1
        messages = job.message_of
        return admin_pb2.TraceResponse(
            node_id=self._identity.node_id,
            events=[self._event(record, row, messages) for record, row in job.found],
            oldest_ms=job.oldest_ms,
            lost=job.lost,
            complete=job.complete,
            enabled=self._events.enabled,
        )

    def _event(self, record: EventRecord, row: int, messages: Mapping[int, int]) -> admin_pb2.TraceEvent:
        columns = {name: int(values[row]) for name, values in record.columns.items()}
        event = admin_pb2.TraceEvent(
            kind=admin_pb2.TraceEvent.Kind.Value(record.kind.name),
            id=self._id(columns["id"] if "id" in columns else messages.get(columns["unit"], columns["unit"])),
            at_ms=record.at_ms,
            stamped_ms=record.stamped_ms,
            term=record.term,
            log_index=record.log_index,
            attempt=columns.get("attempt", 0),
            due_ms=columns.get("due_ms", 0),
        )
        for name, text in zip(_TEXTS.get(record.kind, ()), record.texts, strict=False):
            setattr(event, name, text)
        if record.kind is EventKind.SCHEDULED:
            names = dict(text.split("=", 1) for text in record.texts if "=" in text)
            event.topic = names.get(str(columns["topic_id"]), "")
            event.schedule = names.get(f"{RUN_OF}{columns['id']}", "")
        if "new_id" in columns:
            event.new_id.CopyFrom(self._id(columns["new_id"]))
        if "unit" in columns:
            event.unit.CopyFrom(self._id(columns["unit"]))
        if record.kind is EventKind.SETTLED and record.detail in SettleKind.values():
            event.settle = SettleKind.Name(SettleKind.ValueType(record.detail)).removeprefix("SETTLE_")
        return event

    def _id(self, number: int) -> common_pb2.MessageId:
        return message_id_of(number, self._identity.wheel_group)
