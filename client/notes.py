"""What nodes note about messages: the events of `admin.trace`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from tickwheel.client.answers import reader
from tickwheel.client.states import Settlement
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


_event_of = reader(
    TraceEvent,
    admin_pb2.TraceEvent,
    settle=lambda wire: Settlement.__members__.get(wire.settle, Settlement.UNKNOWN) if wire.settle else None,
)
trace_of = reader(Trace, admin_pb2.TraceResponse, events=lambda wire: tuple(map(_event_of, wire.events)))
