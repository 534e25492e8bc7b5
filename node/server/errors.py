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

METADATA_BYTES_MAX = 8 << 10
"""Trailing metadata that gRPC libraries accept by default. With more, the caller gets RESOURCE_EXHAUSTED instead."""
MESSAGE_BYTES_MAX = 768
"""The message is in the metadata three times: percent-encoded, in the status, and as the description of a field."""
VALUE_BYTES_MAX = 256
CUT = "…"


class AbortingContext(Protocol):
    """The part of a servicer context that ends a call with an error."""

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[tuple[str, bytes], ...] = ()
    ) -> NoReturn: ...


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _cut(text: str, bytes_max: int) -> str:
    """The text, or its beginning if its UTF-8 is longer than this."""
    data = text.encode(errors="replace")
    if len(data) <= bytes_max:
        return data.decode()
    return data[: bytes_max - len(CUT.encode())].decode(errors="ignore") + CUT


def status_of(failure: Failure) -> status_pb2.Status:
    """The google.rpc.Status of a failure. Long texts are cut, for they may be a caller's own."""
    metadata = {name: _cut(value, VALUE_BYTES_MAX) for name, value in failure.metadata.items()}
    message = _cut(failure.message, MESSAGE_BYTES_MAX)
    details: list[Message] = [
        error_details_pb2.ErrorInfo(
            reason=common_pb2.ErrorReason.Name(failure.reason), domain=DOMAIN, metadata=metadata
        )
    ]
    if failure.reason == common_pb2.INVALID_FIELD and "field" in metadata:
        violation = error_details_pb2.BadRequest.FieldViolation(field=metadata["field"], description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if "retry_after_ms" in metadata:
        seconds, rest_ms = divmod(int(metadata["retry_after_ms"]), 1_000)
        delay = duration_pb2.Duration(seconds=seconds, nanos=rest_ms * 1_000_000)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    code = grpc.StatusCode[failure.grpc_code_name]
    return status_pb2.Status(code=int(code.value[0]), message=message, details=[_packed(detail) for detail in details])


def serialized_status(failure: Failure) -> bytes:
    """The serialized google.rpc.Status of a failure, also for the `error` field of receipts."""
    data: bytes = status_of(failure).SerializeToString()
    return data


class FailingCall(Protocol):
    """The part of a direct call that ends it with an error."""

    def fail(
        self, code: grpc.StatusCode, details: str, trailing_metadata: tuple[tuple[str, bytes], ...] = ()
    ) -> None: ...


def refuse_call(call: FailingCall, failure: Failure) -> None:
    """End a direct call with the failure."""
    status = status_of(failure)
    code = grpc.StatusCode[failure.grpc_code_name]
    call.fail(code, status.message, ((DETAILS_KEY, status.SerializeToString()),))


async def abort(context: AbortingContext, failure: Failure) -> NoReturn:
    """End the call with the failure: always raises."""
    status = status_of(failure)
    await context.abort(
        grpc.StatusCode[failure.grpc_code_name], status.message, ((DETAILS_KEY, status.SerializeToString()),)
    )
