"""What nodes note about messages: the events of `admin.trace`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from tickwheel.client.ids import text_of
from tickwheel.client.moments import moment_if, moment_of
from tickwheel.client.states import Settlement, enum_of
from tickwheel.proto import admin_pb2


class EventKind(StrEnum):
    """What happened to a message."""

    SCHEDULED = "scheduled"
    """It is in the log: proposed at `stamped`, committed and applied on the node at `at`."""
    DISPATCHED = "dispatched"
    """It entered the ready queue."""
    DELIVERED = "delivered"
    """A consumer got it. Only the master notes it."""
    SETTLED = "settled"
    """A delivery was settled."""
    CANCELLED = "cancelled"
    MOVED = "moved"
    """It got another time, and the id `new_id`."""
    UNKNOWN = "unknown"
    """Of a node of a later version."""


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One event. A field that does not apply to its kind is 0, empty or None."""

    kind: EventKind
    id: str
    """The message id."""
    at: datetime
    """When the node noted it, by the cluster's time there, in UTC."""
    stamped: datetime | None
    """When a master proposed it, in UTC; None: it was not proposed."""
    term: int
    log_index: int
    """Of the log entry; 0: it has none."""
    topic: str
    group: str
    consumer: str
    """Name of the consumer, as it gave it."""
    attempt: int
    """Of a delivery. Settlements count it from 1 with each unit, deliveries go on."""
    due: datetime | None
    """Its due time, of a move the new one, in UTC."""
    new_id: str
    """Of a move."""
    settle: Settlement | None
    reason: str
    """What the consumer said."""
    unit: str
    """Of a dispatch or settlement: id of the unit that left the wheel; of a retry it differs from `id`."""
    schedule: str
    """The recurring schedule whose run it is; empty: none."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The notes of one node."""

    node_id: str
    events: tuple[TraceEvent, ...]
    """In the order in which they were noted, at most 1,000."""
    oldest: datetime | None
    """How far back the node's notes reach, in UTC; None: it has none."""
    lost: int
    """Batches that were not noted, because they came faster than they could be written."""
    complete: bool
    """False: there are more events."""
    enabled: bool
    """Whether the node notes events at all."""


def event_of(wire: admin_pb2.TraceEvent) -> TraceEvent:
    """An event from its protobuf message."""
    return TraceEvent(
        kind=enum_of(EventKind, admin_pb2.TraceEvent.Kind.DESCRIPTOR, wire.kind),
        id=text_of(wire.id),
        at=moment_of(wire.at_ms),
        stamped=moment_if(wire.stamped_ms),
        term=wire.term,
        log_index=wire.log_index,
        topic=wire.topic,
        group=wire.group,
        consumer=wire.consumer,
        attempt=wire.attempt,
        due=moment_if(wire.due_ms),
        new_id=text_of(wire.new_id) if wire.HasField("new_id") else "",
        settle=Settlement.__members__.get(wire.settle, Settlement.UNKNOWN) if wire.settle else None,
        reason=wire.reason,
        unit=text_of(wire.unit) if wire.HasField("unit") else "",
        schedule=wire.schedule,
    )


def trace_of(wire: admin_pb2.TraceResponse) -> Trace:
    """A node's notes from their protobuf message."""
    return Trace(
        node_id=wire.node_id,
        events=tuple(map(event_of, wire.events)),
        oldest=moment_if(wire.oldest_ms),
        lost=wire.lost,
        complete=wire.complete,
        enabled=wire.enabled,
    )
