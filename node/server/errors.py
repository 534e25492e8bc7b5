"""Failures of the core as gRPC statuses with google.rpc details.

The details always hold an ErrorInfo (reason, domain, metadata), a BadRequest if a field is at fault, and a RetryInfo if
waiting helps. Clients read the details, people the message.
"""

from __future__ import annotations

from typing import NoReturn, Protocol

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from tickwheel.node.failure import Failure
from tickwheel.proto import common_pb2

DOMAIN = "tickwheel.v1"
DETAILS_KEY = "grpc-status-details-bin"
"""Trailing metadata in which gRPC libraries of all languages look for a google.rpc.Status."""


class AbortingContext(Protocol):
    """The part of a servicer context that ends a call with an error."""

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[tuple[str, bytes], ...] = ()
    ) -> NoReturn: ...


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def status_of(failure: Failure) -> status_pb2.Status:
    """The google.rpc.Status of a failure."""
    metadata = failure.metadata
    details: list[Message] = [
        error_details_pb2.ErrorInfo(
            reason=common_pb2.ErrorReason.Name(failure.reason), domain=DOMAIN, metadata=metadata
        )
    ]
    if failure.reason == common_pb2.INVALID_FIELD and "field" in metadata:
        violation = error_details_pb2.BadRequest.FieldViolation(field=metadata["field"], description=failure.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if "retry_after_ms" in metadata:
        seconds, rest_ms = divmod(int(metadata["retry_after_ms"]), 1_000)
        delay = duration_pb2.Duration(seconds=seconds, nanos=rest_ms * 1_000_000)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    code = grpc.StatusCode[failure.grpc_code_name]
    return status_pb2.Status(
        code=int(code.value[0]), message=failure.message, details=[_packed(detail) for detail in details]
    )


def serialized_status(failure: Failure) -> bytes:
    """The serialized google.rpc.Status of a failure, also for the `error` field of receipts."""
    data: bytes = status_of(failure).SerializeToString()
    return data


async def abort(context: AbortingContext, failure: Failure) -> NoReturn:
    """End the call with the failure: always raises."""
    await context.abort(
        grpc.StatusCode[failure.grpc_code_name], failure.message, ((DETAILS_KEY, serialized_status(failure)),)
    )
