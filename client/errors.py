"""Errors of the client, named by whoever has to act.

Owns the exceptions of the client and how a node's answer becomes one. A `TickwheelError` carries the node's reason
(a name of ErrorReason in common.proto, or of the gRPC status when a node gave none) and its metadata; the text is
for people. Nothing else is raised for what a cluster answers; a wrong argument is a `RequestRefused` too, with the
same fields, when a node would refuse it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from tickwheel.transport.channel import NO_CONNECTION

DETAILS_KEY = "grpc-status-details-bin"

ELSEWHERE = frozenset({"NOT_MASTER", "NO_MASTER", "RECOVERING", "OUTCOME_UNKNOWN", "DISK_FULL"})
"""Reasons for which this node cannot serve the request now: it is repeated at the master."""

NOT_YET = frozenset({"RECOVERING", "DISK_FULL"})
"""Those of them that a master gives, too: it says why it does not carry the request out yet."""

TRANSPORT = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "UNKNOWN", "INTERNAL", "ABORTED"})
"""gRPC codes without a node's reason: the connection or the node failed during the call."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An unsuccessful end of a call, as data."""

    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def master_address(self) -> str:
        """The master's address, if the node named it; else empty."""
        return self.metadata.get("master_address", "")

    @property
    def master_term(self) -> int:
        """The term of the named master; 0 if the node did not state it."""
        term = self.metadata.get("term", "")
        return int(term) if term.isdigit() else 0

    @property
    def retry_after_s(self) -> float:
        """The pause that the node asks for, in seconds; 0 for none."""
        value = self.metadata.get("retry_after_ms", "0")
        return int(value) / 1_000 if value.isdigit() else 0.0

    @property
    def elsewhere(self) -> bool:
        """Whether the request is worth repeating at the (perhaps new) master."""
        return self.reason in ELSEWHERE or self.reason in TRANSPORT

    @property
    def lost(self) -> bool:
        """Whether no node has answered with the outcome of the request."""
        return self.reason in TRANSPORT

    @property
    def not_sent(self) -> bool:
        """Whether the request was certainly not sent, for lack of a connection."""
        return self.reason == "UNAVAILABLE" and self.message.startswith(NO_CONNECTION)

    def never_accepted(self, sequence: int) -> bool:
        """Whether the node states that the producer has not reached this sequence: no try of it was accepted."""
        last = self.metadata.get("accepted_sequence", "")
        return last.isdigit() and int(last) < sequence

    @property
    def later(self) -> bool:
        """Whether the request is worth repeating at the same node after a pause."""
        return self.reason in ("LIMIT_REACHED", "NO_AGREED_TIME")


class TickwheelError(Exception):
    """Base of all. `reason` and `metadata` are the node's own."""

    def __init__(self, message: str, reason: str = "", metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.metadata: dict[str, str] = dict(metadata or {})


class RequestRefused(TickwheelError):
    """The caller's: a field has a value that is not allowed, or the request does not fit the state."""

    @property
    def field(self) -> str:
        """The field at fault; empty if no field is."""
        return self.metadata.get("field", "")

    @property
    def value(self) -> str:
        """Its value as the node saw it."""
        return self.metadata.get("value", "")

    @property
    def limit(self) -> str:
        """The allowed values, in words."""
        return self.metadata.get("limit", "")


def printable(text: str) -> str:
    """The text, with codes for what is no character: halves of a pair of surrogates, which no answer could carry."""
    return text.encode("utf-8", "backslashreplace").decode()


def refused(field: str, value: object, limit: str) -> RequestRefused:
    """The error for a wrong argument, with the text and metadata that a node would use."""
    try:
        shown = printable(str(value)[:100])
    except ValueError:
        shown = "a number of more than 4,300 digits"  # which Python does not write out
    told = shown or "''"
    facts = {"field": field, "value": shown, "limit": limit}
    return RequestRefused(f"{field}: {told}: {limit}", "INVALID_FIELD", facts)


def check_names(given: Mapping[str, object], options: type[object]) -> None:
    """Raise TypeError for an option that the TypedDict `options` does not have, as Python does for its parameters.

    Without it nobody would notice a misspelt option: the message has no unique key, the worker its default.
    """
    if not given.keys() <= (known := options.__annotations__).keys():
        raise TypeError(f"unexpected keyword argument {next(name for name in given if name not in known)!r}")


class FilterDiffers(RequestRefused):
    """The caller's: the group has another filter (`limit`) than this consumer named (`value`)."""


class LimitReached(TickwheelError):
    """The load's: a queue, quota or window was full for as long as the call was allowed to take."""

    @property
    def retry_after_s(self) -> float:
        """Seconds after which another try makes sense."""
        return Fault(self.reason, "", self.metadata).retry_after_s


class NotFound(TickwheelError):
    """The caller's: no such topic, group, member or message."""


class PermissionRefused(TickwheelError):
    """The operator's: the certificate or the user's roles do not allow this, or the token is not valid."""


class ClusterUnavailable(TickwheelError):
    """The cluster's: no master answered in time. This call has certainly changed nothing."""


class ClientClosed(TickwheelError):
    """The caller's: the client, producer or consumer was closed before."""

    def __init__(self, what: str = "the client") -> None:
        super().__init__(f"{what} is closed", "CLOSED")


class OutcomeUnknown(TickwheelError):
    """The cluster's: the answer was lost and no other came in time; the request may have been carried out."""


class PayloadError(TickwheelError):
    """The sender's: a payload has another content type than JSON, is no JSON, or does not fit the model."""

    @property
    def content_type(self) -> str:
        """The content type that the message has; empty without one."""
        return self.metadata.get("content_type", "")

    @property
    def value(self) -> str:
        """The size of the payload and its beginning."""
        return self.metadata.get("value", "")


class SequenceError(TickwheelError):
    """The producer's: another process uses its id, or a repeat came too late to be recognised."""


class SequenceTaken(SequenceError):
    """The producer id belongs to another client, or the sequence was accepted with other content. Not accepted now."""


_REASONS: dict[type[TickwheelError], str] = {
    RequestRefused: (
        "INVALID_FIELD NAME_TAKEN WRONG_STATE INVALID_ARGUMENT FAILED_PRECONDITION OUT_OF_RANGE UNIMPLEMENTED"
    ),
    FilterDiffers: "FILTER_DIFFERS",
    LimitReached: "LIMIT_REACHED DISK_FULL RESOURCE_EXHAUSTED",
    NotFound: "UNKNOWN_NAME NOT_FOUND",
    PermissionRefused: "ROLE_REQUIRED PERMISSION_DENIED UNAUTHENTICATED RIGHT_REQUIRED",
    SequenceError: "SEQUENCE_GAP SEQUENCE_FORGOTTEN",
    SequenceTaken: "SEQUENCE_TAKEN",
    OutcomeUnknown: "OUTCOME_UNKNOWN NODE_FAULT",
    ClusterUnavailable: "NOT_MASTER NO_MASTER RECOVERING NO_AGREED_TIME UNAVAILABLE",
}
_TYPES = {reason: kind for kind, reasons in _REASONS.items() for reason in reasons.split()}


def error_of(fault: Fault) -> TickwheelError:
    """The exception for a fault after which the call is not repeated."""
    kind = _TYPES.get(fault.reason, TickwheelError)
    return kind(fault.message or fault.reason, fault.reason, fault.metadata)


def unforeseen(error: BaseException) -> TickwheelError:
    """The error of a stream that ended without a fault: an answer of a node made no sense, or this client has a bug."""
    found = TickwheelError(f"the stream ended by an unforeseen error: {error!r}", "UNFORESEEN")
    found.__cause__ = error
    return found


def fault_of_status(data: bytes) -> Fault:
    """The fault in a serialized google.rpc.Status, as in receipts."""
    try:
        status = status_pb2.Status.FromString(data)
    except DecodeError:
        return Fault("UNKNOWN", "the node's error cannot be read")
    for packed in status.details:
        info = error_details_pb2.ErrorInfo()
        if packed.Is(info.DESCRIPTOR) and packed.Unpack(info):
            return Fault(info.reason, status.message, dict(info.metadata))
    name = next((code.name for code in grpc.StatusCode if code.value[0] == status.code), "UNKNOWN")
    return Fault(name, status.message)


def fault_of_call(error: grpc.aio.AioRpcError) -> Fault:
    """The fault of a call that ended with an error."""
    trailing: Iterable[tuple[str, str | bytes]] = cast(Any, error.trailing_metadata()) or ()
    for key, value in trailing:
        if key == DETAILS_KEY and isinstance(value, bytes):
            return fault_of_status(value)
    return Fault(error.code().name, error.details() or error.code().name)
