"""The door: what a caller's bytes must be before any service sees them.

Owns the first look at every request of every service: it is decoded here, and whatever this version does not know
(fields, values of enums) is refused with INVALID_ARGUMENT and the field's path. So no service, and nothing behind one,
ever holds a caller's unknown bytes: not in the log, not in memory, not in an answer. The depth of a request is thereby
that of its schema. What cannot be decoded and what names no method costs its sender an error, and the node a count and
a rate-limited line.

Services are registered through a `Door` instead of the server. All on the loop's thread.
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
"""What the door refuses, and answers whose callers had gone; label of the metric `refused_calls`."""
GRPC_LOGGER = "grpc._cython.cygrpc"

Context = grpc.aio.ServicerContext[Any, Any]

log = logger("door")


class RefusedRequestError(RequestError):
    """A message of a stream of requests is refused; `message` if it could be decoded. The stream can be read on."""

    def __init__(self, failure: Failure, message: Message | None) -> None:
        super().__init__(failure)
        self.message = message


@dataclass(frozen=True, slots=True)
class _Refused:
    """Stands for a request that is refused, from where its bytes are read to where its call can be ended."""

    failure: Failure
    message: Message | None = None


class _Shape:
    """Where in messages of a type an enum can stand, so that only there anybody has to look for unknown values."""

    def __init__(self, descriptor: Descriptor) -> None:
        self.enums: list[FieldDescriptor] = [field for field in descriptor.fields if field.enum_type is not None]
        self.messages: list[tuple[FieldDescriptor, _Shape]] = []
        for field in descriptor.fields:
            if field.message_type is not None:
                shape = _shape_of(field.message_type)
                if shape.enums or shape.messages:
                    self.messages.append((field, shape))

    def unknown_value(self, message: Message, path: str = "") -> tuple[str, object, str] | None:
        """The first value of an enum that this version does not know: its field's path, the value, what is allowed."""
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
"""By full name of the message. Requests are trees: none contains itself (a test holds that)."""


def _shape_of(descriptor: Descriptor) -> _Shape:
    shape = _shapes.get(descriptor.full_name)
    if shape is None:
        shape = _shapes[descriptor.full_name] = _Shape(descriptor)
    return shape


_shapes_by_type: dict[type, _Shape | None] = {}


def _shape_of_type(kind: type[Message]) -> _Shape | None:
    """None: no enum can stand in messages of this type."""
    if kind not in _shapes_by_type:
        shape = _shape_of(cast(Descriptor, kind.DESCRIPTOR))
        _shapes_by_type[kind] = shape if shape.enums or shape.messages else None
    return _shapes_by_type[kind]


def _values(message: Message, field: FieldDescriptor, path: str) -> list[tuple[str, object]]:
    """What stands in a field, each with its path; a message that is not there is none."""
    value = getattr(message, field.name)
    if field.is_repeated:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            return [(f"{path}{field.name}[{key}]", value[key]) for key in value]
        return [(f"{path}{field.name}[{number}]", item) for number, item in enumerate(value)]
    if field.message_type is not None and not message.HasField(field.name):
        return []
    return [(path + field.name, value)]


def _unknown_field(message: Message, path: str = "") -> tuple[str, str]:
    """Path and type of the first field that this version does not know. Only asked where there is one."""
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
    """Why a decoded request is refused; None: this version knows all of it. What it does not know is removed from it.

    Its cost is that of writing the message twice, in C: nothing here is done in Python for each row of a batch.
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
    """A request's bytes as a message, or why it is refused. Raises nothing."""
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
    """The same for callers that may be a version ahead and leave out what matters to nobody here: peers, health."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        return _Refused(invalid("request", f"{len(data)} bytes", f"a {kind.DESCRIPTOR.full_name} ({error})").failure)


class Requests:
    """The messages of a stream of requests. Raises RefusedRequestError for one that is refused, and can be read on."""

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
    """Of grpc's logger: an answer that could not be sent, since its caller went away a moment before.

    grpc logs each with a traceback, so that callers could fill a disk with them.
    """

    def __init__(self, refusals: Counter[str]) -> None:
        super().__init__()
        self._refusals = refusals

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, grpc.aio.InternalError):
            return True
        self._refusals[ANSWER_LOST] += 1
        log.warning("a caller was gone before its answer", reason=record.getMessage()[:200])
        return False


class _UnknownMethods(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
    """Asked after all services: counts calls that name no method, which gRPC answers with UNIMPLEMENTED."""

    def __init__(self, note: Callable[[str, str, str], None]) -> None:
        self._note = note

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> None:
        """See grpc: None is no handler."""
        method = handler_call_details.method
        self._note(UNKNOWN_METHOD, method if isinstance(method, str) else repr(method), "no such method")


class Door:
    """See the module. `shut` once all services are registered."""

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
        """`refusals`: counts by kind, shared by the doors of a node. `gate`: asks for rights behind the door; peers
        have none. `fault`: what is told of an error that a service raises (boundary.py); None: gRPC sees to it.
        `guard`: counts calls. Not `exact`: see `read_any_version`."""
        self._guard = guard
        self._server = server
        self._fault = fault
        self._refusals = refusals
        self._gate = gate
        self._read = read_request if exact else read_any_version

    def serve(self, add: Callable[..., None], servicer: object) -> None:
        """Register a service with the function that was generated for it."""
        add(servicer, self)

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Nothing: generated code registers each service twice, and `add_registered_method_handlers` takes it."""

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """A service's methods, as generated code hands them over; the server looks each up when it is called.

        Of methods that are registered with the server itself, grpc.aio keeps a task each that waits for its next call,
        and with every call of any method it waits anew for all of these tasks: the price of a call grows with their
        number.
        """
        guarded = {name: self._guarded(f"/{service}/{name}", handler) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, guarded),))

    def shut(self) -> None:
        """All services are registered: what comes now for another method is counted."""
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
