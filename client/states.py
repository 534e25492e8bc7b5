"""Outcomes, states and places of the cluster as enums. Each member is a text too, so it prints, compares and becomes
JSON as that text."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from tickwheel.client.errors import refused
from tickwheel.client.moments import ms_of
from tickwheel.proto import consumer_pb2


class CancelOutcome(StrEnum):
    """What became of a cancel. It is final."""

    CANCELLED = "CANCELLED"
    """It will never be delivered; also if it was cancelled before."""
    ALREADY_DISPATCHED = "ALREADY_DISPATCHED"
    """Too late."""
    NOT_FOUND = "NOT_FOUND"


class RescheduleOutcome(StrEnum):
    """What became of a reschedule. It is final."""

    RESCHEDULED = "RESCHEDULED"
    ALREADY_DISPATCHED = "ALREADY_DISPATCHED"
    """Too late."""
    NOT_FOUND = "NOT_FOUND"
    CANCELLED = "CANCELLED"
    """It was cancelled before."""


class MessageState(StrEnum):
    """The state of a message."""

    PENDING = "PENDING"
    """It waits for its time."""
    DISPATCHED = "DISPATCHED"
    """Its time has come: it is with its groups."""
    CANCELLED = "CANCELLED"
    REMOVED = "REMOVED"
    """Its hour was removed: every group has settled it, or retention was over."""
    COLD = "COLD"
    """It waits in the cold tier; the cluster has its id only."""


class SweepState(StrEnum):
    """The state of a job that cancels, moves or deletes many messages."""

    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    STOPPED = "STOPPED"
    """Somebody stopped it; what it had done stays done."""
    UNKNOWN = "UNKNOWN"
    """Of a node of a later version."""


class DeadCause(StrEnum):
    """Why a group has given a message up."""

    REFUSED = "refused"
    """The last of its attempts was nacked, or its handler failed."""
    DECLARED_DEAD = "declared_dead"
    """The consumer said so."""
    LEASE_EXPIRED = "lease_expired"
    """The lease of its last attempt ran out."""
    PAYLOAD_LOST = "payload_lost"
    """No member of the cluster can read it any more."""
    UNKNOWN = "unknown"
    """Of a node of a later version."""


class Settlement(StrEnum):
    """What became of a delivery."""

    ACK = "ACK"
    RETRY = "RETRY"
    """It failed and comes again."""
    DEAD = "DEAD"
    SKIP = "SKIP"
    """The group's filter does not want it."""
    RETURN = "RETURN"
    """Its lease ran out, and it comes again."""
    UNKNOWN = "UNKNOWN"
    """Of a node of a later version."""


class StartFrom(StrEnum):
    """Where a group starts. A datetime in its place starts at what is due from then on."""

    EARLIEST = "earliest"
    """With everything that is retained."""
    LATEST = "latest"
    """With what is dispatched from now on."""
    TIME = "time"
    """With what is due from `start_ms` on."""


def start_of(start_from: StartFrom | str | datetime, start_ms: int) -> tuple[consumer_pb2.StartFrom.ValueType, int]:
    """The place for a node, and its time in milliseconds. Raises RequestRefused for a place that there is not."""
    if isinstance(start_from, datetime):
        if start_ms:
            raise refused("start_ms", start_ms, "not together with a datetime in start_from")
        return consumer_pb2.TIME, ms_of("start_from", start_from)
    if start_from not in list(StartFrom):
        raise refused("start_from", start_from, f"{', '.join(StartFrom)} or a datetime with a time zone")
    return consumer_pb2.StartFrom.Value(start_from.upper()), start_ms
