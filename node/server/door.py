"""The door: decodes and checks the bytes of every request before a service sees it.

A request with fields or enum values that this version does not know is refused with INVALID_ARGUMENT and the field's
path. So a caller's unknown bytes never reach a service or the parts behind it: not the log, not memory, not an answer.
A request is thereby never nested deeper than its schema. Undecodable bytes and unknown methods end with an error for
their sender; the node counts them and logs a rate-limited line.

Services are registered through a `Door` instead of the server. Runs on the loop's thread.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from tickwheel.node.core.failure import Failure, RequestError, invalid
from tickwheel.node.logs import logger
from tickwheel.node.server.boundary import Fault, contained
from tickwheel.node.server.connections import ConnectionGuard
from tickwheel.node.server.errors import abort
from tickwheel.node.server.gate import Gate

UNDECODABLE = "undecodable"
UNKNOWN_CONTENT = "unknown_content"
UNKNOWN_METHOD = "unknown_method"
ANSWER_LOST = "answer_lost"
KINDS = (UNDECODABLE, UNKNOWN_CONTENT, UNKNOWN_METHOD, ANSWER_LOST)
"""Label values of the metric `refused_calls`: the kinds of refusals, and answers whose callers had gone."""
GRPC_LOGGER = "grpc._cython.cygrpc"

Context = grpc.aio.ServicerContext[Any, Any]

log = logger("door")


class RefusedRequestError(RequestError):
    """One message of a request stream is refused; the stream can still be read. `message`: if it could be decoded."""

    def __init__(self, failure: Failure, message: Message | None) -> None:
        super().__init__(failure)
        self.message = message


@dataclass(frozen=True, slots=True)
class _Refused:
    """Takes the place of a refused request between deserialization and the handler, which can end the call."""

    failure: Failure
    message: Message | None = None


class _Shape:
    """The places in messages of a type that can hold enums, so that only these are searched for unknown values."""

    def __init__(self, descriptor: Descriptor) -> None:
        self.enums: list[FieldDescriptor] = [field for field in descriptor.fields if field.enum_type is not None]
        self.messages: list[tuple[FieldDescriptor, _Shape]] = []
        for field in descriptor.fields:
            if field.message_type is not None:
                shape = _shape_of(field.message_type)
                if shape.enums or shape.messages:
                    self.messages.append((field, shape))

    def unknown_value(self, message: Message, path: str = "") -> tuple[str, object, str] | None:
        """(path, value, allowed values) of the first enum value that this version does not know; None for none."""
        for field in self.enums:
            assert field.enum_type is not None
            known = field.enum_type.values_by_number
            for place, value in _values(message, field, path):
                if value not in known:
                    return place, value, ", ".join(f"{number.name} ({number.number})" for number in known.values())
        for field, shape in self.messages:
            for place, value in _values(message, field, path):
                found = shape.unknown_value(cast(Message, value), place + ".")
                if found is not None:
                    return found
        return None


_shapes: dict[str, _Shape] = {}
"""By full name of the message type. No request type contains itself (a test ensures that)."""


def _shape_of(descriptor: Descriptor) -> _Shape:
    shape = _shapes.get(descriptor.full_name)
    if shape is None:
        shape = _shapes[descriptor.full_name] = _Shape(descriptor)
    return shape


_shapes_by_type: dict[type, _Shape | None] = {}


def _shape_of_type(kind: type[Message]) -> _Shape | None:
    """The shape of a message type; None if it can hold no enum."""
    if kind not in _shapes_by_type:
        shape = _shape_of(cast(Descriptor, kind.DESCRIPTOR))
        _shapes_by_type[kind] = shape if shape.enums or shape.messages else None
    return _shapes_by_type[kind]


def _values(message: Message, field: FieldDescriptor, path: str) -> list[tuple[str, object]]:
    """(path, value) of each value in a field; none for a message field that is not set."""
    value = getattr(message, field.name)
    if field.is_repeated:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            return [(f"{path}{field.name}[{key}]", value[key]) for key in value]
        return [(f"{path}{field.name}[{number}]", item) for number, item in enumerate(value)]
    if field.message_type is not None and not message.HasField(field.name):
        return []
    return [(path + field.name, value)]


def _unknown_field(message: Message, path: str = "") -> tuple[str, str]:
    """(path, type) of the first field that this version does not know; empty for none. Slow: only for refusals."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        return f"{path}{unknown[0].field_number}", message.DESCRIPTOR.name
    for field, _ in message.ListFields():
        if field.message_type is not None:
            for place, value in _values(message, field, path):
                if isinstance(value, Message):
                    found = _unknown_field(value, place + ".")
                    if found[0]:
                        return found
    return "", ""


def unknown_content(message: Message) -> Failure | None:
    """The refusal of a decoded request with unknown content; None: this version knows all of it.

    Removes unknown fields from the message. Costs about two serializations in C, and no Python code per row of a batch.
    """
    before = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() != before:
        return invalid("request", "fields of a newer version", "only fields that this version knows").failure
    shape = _shape_of_type(type(message))
    wrong = shape.unknown_value(message) if shape is not None else None
    if wrong is None:
        return None
    place, value, known = wrong
    return invalid(place, value, f"a value that this version knows: {known}").failure


def read_request(kind: type[Message], data: bytes) -> Message | _Refused:
    """The bytes of a request as a message, or its refusal. Raises nothing."""
    try:
        message = kind.FromString(data)
    except DecodeError as error:
        return _Refused(invalid("request", f"{len(data)} bytes", f"a {kind.DESCRIPTOR.full_name} ({error})").failure)
    failure = unknown_content(message)
    if failure is None:
        return message
    if failure.metadata["field"] == "request":
        place, owner = _unknown_field(kind.FromString(data))
        failure = invalid(
            place or "request", "unknown field", f"only fields of {owner or kind.__name__} that this version knows"
        ).failure
    return _Refused(failure, message)


def read_any_version(kind: type[Message], data: bytes) -> Message | _Refused:
    """Like `read_request`, but ignores unknown content: for peers and health checks, which may be a version ahead."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        return _Refused(invalid("request", f"{len(data)} bytes", f"a {kind.DESCRIPTOR.full_name} ({error})").failure)


class Requests:
    """The messages of a request stream. Raises RefusedRequestError for a refused one; reading can continue after it."""

    def __init__(self, requests: AsyncIterator[Any], note: Callable[[_Refused], None]) -> None:
        self._requests = requests
        self._note = note

    def __aiter__(self) -> Requests:
        return self

    async def __anext__(self) -> Any:
        request = await anext(self._requests)
        if type(request) is _Refused:
            self._note(request)
            raise RefusedRequestError(request.failure, request.message)
        return request


class LostAnswers(logging.Filter):
    """A filter for grpc's logger: counts answers that could not be sent because the caller had just gone.

    grpc logs each of these with a traceback, so callers could fill a disk with them.
    """

    def __init__(self, refusals: Counter[str]) -> None:
        super().__init__()
        self._refusals = refusals

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, grpc.aio.InternalError):
            return True
        self._refusals[ANSWER_LOST] += 1
        log.warning("a caller was gone before its answer", reason=record.getMessage()[:200])
        return False


class _UnknownMethods(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
    """The last handler: counts calls of unknown methods, which gRPC answers with UNIMPLEMENTED."""

    def __init__(self, note: Callable[[str, str, str], None]) -> None:
        self._note = note

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> None:
        """Always None, that is, no handler."""
        method = handler_call_details.method
        self._note(UNKNOWN_METHOD, method if isinstance(method, str) else repr(method), "no such method")


class Door:
    """Registers services with a server, each method behind the checks. Call `shut` once all are registered."""

    def __init__(
        self,
        server: grpc.aio.Server,
        refusals: Counter[str],
        gate: Gate | None = None,
        fault: Fault | None = None,
        guard: ConnectionGuard | None = None,
        *,
        exact: bool = True,
    ) -> None:
        """`refusals`: counts by kind, shared by the doors of a node. `gate`: checks rights; None on the peers' port.

        `fault`: reports an error that a service raises (boundary.py); None: gRPC handles it. `guard`: counts calls.
        `exact` False: requests are read by `read_any_version`.
        """
        self._guard = guard
        self._server = server
        self._fault = fault
        self._refusals = refusals
        self._gate = gate
        self._read = read_request if exact else read_any_version

    def serve(self, add: Callable[..., None], servicer: object) -> None:
        """Register a service. `add` is its generated `add_...Servicer_to_server`."""
        add(servicer, self)

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """No effect: generated code registers each service twice, and the other method does the work."""

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Take a service's methods from generated code, and register them as generic handlers.

        For each method registered with the server itself, grpc.aio keeps a task that waits for the next call. At every
        call of any method it waits for all these tasks anew, so the cost of a call would grow with their number.
        """
        guarded = {name: self._guarded(f"/{service}/{name}", handler) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, guarded),))

    def shut(self) -> None:
        """All services are registered: count calls of any other method from now on."""
        self._server.add_generic_rpc_handlers((_UnknownMethods(self._note),))

    def _note(self, kind: str, method: str, reason: str) -> None:
        self._refusals[kind] += 1
        log.warning("refused a call at the door", kind=kind, method=method[:200], reason=reason)

    def _guarded(self, method: str, handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
        kind: type[Message] = handler.request_deserializer.__self__
        read = self._read

        def note(refused: _Refused) -> None:
            self._note(UNDECODABLE if refused.message is None else UNKNOWN_CONTENT, method, refused.failure.message)

        def deserialize(data: bytes) -> Message | _Refused:
            return read(kind, data)

        makers = {
            (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
            (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
            (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
            (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
        }
        name, make = makers[handler.request_streaming, handler.response_streaming]
        behave = getattr(handler, name)
        if self._gate is not None:
            streams = handler.request_streaming or handler.response_streaming
            generator = inspect.isasyncgenfunction(behave)
            behave = self._gate.guarded(method, behave, generator=generator, streams=streams)
        guard: Any = _guard_stream if handler.request_streaming else _guard_unary
        if inspect.isasyncgenfunction(behave):
            guard = _guard_stream_generator if handler.request_streaming else _guard_unary_generator
        handle = guard(behave, note)
        if self._fault is not None:
            handle = contained(handle, self._fault)
        if self._guard is not None:
            handle = self._guard.counted(handle)
        made: grpc.RpcMethodHandler[Any, Any] = cast(Any, make)(
            handle, request_deserializer=deserialize, response_serializer=handler.response_serializer
        )
        return made


_Behaviour = Callable[[Any, Any], Awaitable[Any]]
_Generator = Callable[[Any, Any], AsyncIterator[Any]]


def _guard_unary(behave: _Behaviour, note: Callable[[_Refused], None]) -> _Behaviour:
    async def guarded(request: Any, context: Context) -> Any:
        if type(request) is _Refused:
            note(request)
            await abort(context, request.failure)
        return await behave(request, context)

    return guarded


def _guard_stream(behave: _Behaviour, note: Callable[[_Refused], None]) -> _Behaviour:
    async def guarded(requests: AsyncIterator[Any], context: Context) -> Any:
        try:
            return await behave(Requests(requests, note), context)
        except RefusedRequestError as error:
            await abort(context, error.failure)

    return guarded


def _guard_unary_generator(behave: _Generator, note: Callable[[_Refused], None]) -> _Generator:
    async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
        if type(request) is _Refused:
            note(request)
            await abort(context, request.failure)
        async for response in behave(request, context):
            yield response

    return guarded


def _guard_stream_generator(behave: _Generator, note: Callable[[_Refused], None]) -> _Generator:
    async def guarded(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        try:
            async for response in behave(Requests(requests, note), context):
                yield response
        except RefusedRequestError as error:
            await abort(context, error.failure)

    return guarded
