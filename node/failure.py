"""Refusals: a reason for programs, words for people.

Every refusal of the core is a `Failure`; the gRPC services turn it into a status with details.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tickwheel.node.times import in_words
from tickwheel.proto import common_pb2 as pb

_CODES = {
    pb.INVALID_FIELD: "INVALID_ARGUMENT",
    pb.NOT_MASTER: "UNAVAILABLE",
    pb.NO_MASTER: "UNAVAILABLE",
    pb.OUTCOME_UNKNOWN: "UNAVAILABLE",
    pb.LIMIT_REACHED: "RESOURCE_EXHAUSTED",
    pb.SEQUENCE_GAP: "FAILED_PRECONDITION",
    pb.SEQUENCE_FORGOTTEN: "ALREADY_EXISTS",
    pb.UNKNOWN_NAME: "NOT_FOUND",
    pb.NAME_TAKEN: "ALREADY_EXISTS",
    pb.DISK_FULL: "RESOURCE_EXHAUSTED",
    pb.ROLE_REQUIRED: "PERMISSION_DENIED",
    pb.RECOVERING: "UNAVAILABLE",
    pb.WRONG_STATE: "FAILED_PRECONDITION",
    pb.NO_AGREED_TIME: "UNAVAILABLE",
    pb.FILTER_DIFFERS: "FAILED_PRECONDITION",
    pb.UNAUTHENTICATED: "UNAUTHENTICATED",
    pb.RIGHT_REQUIRED: "PERMISSION_DENIED",
    pb.SEQUENCE_TAKEN: "ALREADY_EXISTS",
    pb.KEY_TAKEN: "ALREADY_EXISTS",
    pb.NODE_FAULT: "INTERNAL",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """A typed refusal. `metadata` holds facts for programs (see ErrorReason in common.proto)."""

    reason: pb.ErrorReason.ValueType
    message: str
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def grpc_code_name(self) -> str:
        """Name of the gRPC status code that goes with the reason."""
        return _CODES[self.reason]


Permitted = Callable[[str], Failure | None]
"""Called with the topic of a message that a request names by its id; empty: the message has no topic any more, or the
topic is unknown. Returns the caller's refusal; None: the caller may go on."""


class RequestError(Exception):
    """Carries the Failure of a refused request. Raised and caught inside the core only."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def refuse(failure: Failure | None) -> None:
    """Raise a refusal as RequestError; None: do nothing."""
    if failure is not None:
        raise RequestError(failure)


def refused(reason: pb.ErrorReason.ValueType, text: str, **facts: object) -> RequestError:
    """A refusal with facts for programs; as text they are its metadata."""
    return RequestError(Failure(reason, text, {name: str(value) for name, value in facts.items()}))


def invalid(name: str, value: object, limit: str) -> RequestError:
    """The refusal of a field's value: names the field, the value and what is allowed. The text has words beside the
    milliseconds of times; the metadata, which programs read, has the numbers alone."""
    shown, said = in_words(name, value, limit)
    told = _cut(shown) or "''"
    facts = {"field": name, "value": _cut(str(value)), "limit": limit}
    return RequestError(Failure(pb.INVALID_FIELD, f"{name}: {told}: {said}", facts))


def _cut(text: str) -> str:
    return text if len(text) <= 100 else text[:97] + "..."


def limit_reached(what: str, limit: object, retry_after_ms: int = 100) -> Failure:
    """The refusal because a queue or quota is full for now."""
    return Failure(
        pb.LIMIT_REACHED,
        f"{what}: limit {limit} reached; retry after {retry_after_ms} ms",
        {"field": what, "limit": str(limit), "retry_after_ms": str(retry_after_ms)},
    )


def not_master(master_id: str | None, master_address: str | None, term: int = 0) -> Failure:
    """The refusal because this node is not master. Names the master and its term as far as known."""
    if master_id and master_address:
        return Failure(
            pb.NOT_MASTER,
            f"not the master; that is {master_id} at {master_address}",
            {"master_id": master_id, "master_address": master_address, "term": str(term)},
        )
    return Failure(pb.NO_MASTER, "no master is known at the moment; retry", {"retry_after_ms": "100"})


def beginning() -> Failure:
    """The refusal because this node has just been elected and is about to serve."""
    return Failure(pb.NO_MASTER, "this node was just elected and begins to serve; retry", {"retry_after_ms": "10"})


def no_agreed_time() -> Failure:
    """The refusal of a delay before the cluster has an agreed time."""
    return Failure(
        pb.NO_AGREED_TIME,
        "the nodes have not agreed on a time since the master's start, so a delay cannot be resolved; "
        "give a due time, or retry",
        {"retry_after_ms": "500"},
    )


def node_fault(error_id: str) -> Failure:
    """The failure through a mistake of ours. The node's log has the details under this id."""
    return Failure(
        pb.NODE_FAULT,
        f"a mistake in the node: the request may have been carried out; the node's log tells more under {error_id}",
        {"id": error_id},
    )


def no_memory(error_id: str) -> Failure:
    """The failure because the node got no memory. Not a definite refusal: a part of the request may be done."""
    return Failure(
        pb.OUTCOME_UNKNOWN,
        "the node got no memory while it served the request, which may have been carried out: repeat it with the same "
        "producer id and sequence, or look it up. Ask for less at a time, or give the node more memory (its log tells "
        f"more under {error_id})",
        {"id": error_id, "retry_after_ms": "1000"},
    )


def outcome_unknown() -> Failure:
    """The answer when mastership was lost while the request was under way: it may or may not take effect."""
    return Failure(
        pb.OUTCOME_UNKNOWN,
        "mastership changed on the way: the request may have been carried out; "
        "repeat it with the same producer id and sequence, or look it up",
        {"retry_after_ms": "100"},
    )
