"""The door: what every call on a port passes. Decodes and checks its request, runs its handler, and ends it.

A request with fields or enum values that this version does not know is refused with INVALID_ARGUMENT and the field's
path. So a caller's unknown bytes never reach a handler or the parts behind it: not the log, not memory, not an answer.
A request is thereby never nested deeper than its schema. Undecodable bytes and unknown methods end with an error for
their sender; the node counts them and logs a rate-limited line.

A refusal (RequestError) ends the call with its status. Any other error of a handler ends that call only, with
NODE_FAULT and an id; the node's log has the traceback under this id. An error that the node cannot survive (serving.py,
FATAL) ends the process, whichever call ran into it.

Services are registered through a `Door` instead of the server. Runs on the loop's thread.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from tickwheel.node.failure import Failure, RequestError, invalid
from tickwheel.node.logs import logger
from tickwheel.node.server.connections import ConnectionLimiter
from tickwheel.node.server.errors import abort, refuse_call
from tickwheel.transport.connection import StreamOverError
from tickwheel.transport.server import AbortedError, DirectHandler, Server
from tickwheel.transport.server import ServerStream as Context

UNDECODABLE = "undecodable"
UNKNOWN_CONTENT = "unknown_content"
UNKNOWN_METHOD = "unknown_method"
KINDS = (UNDECODABLE, UNKNOWN_CONTENT, UNKNOWN_METHOD)
"""Label values of the metric `refused_calls`."""

Behaviour = Callable[[Any, Context], Awaitable[Any]]
Answer = Callable[[Message | Failure], None]
"""Takes the response or the Failure of a call; what comes after the first is ignored."""
DirectBehaviour = Callable[[Any, Context, Answer], None]

log = logger("door")

_MAKERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
"""By whether requests and responses are streams."""


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
        server: Server,
        refusals: Counter[str],
        fault: Callable[[Exception], Failure] | None = None,
        limiter: ConnectionLimiter | None = None,
        *,
        exact: bool = True,
    ) -> None:
        """`refusals`: counts by kind, shared by the doors of a node. `fault`: reports an error of a handler and returns
        the caller's answer; None: gRPC handles it. `limiter`: counts calls. `exact` False: requests are read by
        `read_any_version`."""
        self._limiter = limiter
        self._server = server
        self._fault = fault
        self._refusals = refusals
        self._read = read_request if exact else read_any_version

    def serve(self, add: Callable[..., None], servicer: object) -> None:
        """Register a service of generated code. `add` is its `add_...Servicer_to_server`."""
        add(servicer, self)

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """No effect: generated code registers each service twice, and the other method does the work."""

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Take a service's methods from generated code, and register them as generic handlers."""

        def handler(name: str, made: Any) -> grpc.RpcMethodHandler[Any, Any]:
            kind = made.request_deserializer.__self__
            streams = made.request_streaming, made.response_streaming
            behave = made.unary_unary or made.unary_stream or made.stream_unary or made.stream_stream
            if inspect.isasyncgenfunction(behave):
                behave = _writing(behave)
            return self.handler(f"/{service}/{name}", kind, made.response_serializer, streams, behave)

        self.register(service, {name: handler(name, made) for name, made in handlers.items()})

    def register(self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any] | DirectHandler]) -> None:
        """Register handlers that `handler` made."""
        made = grpc.method_handlers_generic_handler(service, cast(Any, handlers))
        self._server.add_generic_rpc_handlers((made,))

    def shut(self) -> None:
        """All services are registered: count calls of any other method from now on."""
        self._server.add_generic_rpc_handlers((_UnknownMethods(self._note),))

    def _note(self, kind: str, method: str, reason: str) -> None:
        self._refusals[kind] += 1
        log.warning("refused a call at the door", kind=kind, method=method[:200], reason=reason)

    def direct(
        self, method: str, kind: type[Message], serialize: Callable[[Any], bytes], behave: DirectBehaviour
    ) -> DirectHandler:
        """A handler of calls with one message each way that takes no task (transport). As `handler`; `behave` also gets
        what takes the answer, and may call it later."""
        read, limiter = self._read, self._limiter

        def begin(data: bytes, context: Context) -> None:
            def answer(outcome: Message | Failure) -> None:
                if isinstance(outcome, Failure):
                    refuse_call(context, outcome)
                else:
                    context.answer(serialize(outcome))

            try:
                if limiter is not None:
                    context.ended = partial(limiter.end, limiter.begin(context))
                request = read(kind, data)
                if type(request) is _Refused:
                    self._note_refused(method, request)
                    answer(request.failure)
                else:
                    behave(request, context, answer)
            except RequestError as error:
                answer(error.failure)
            except Exception as error:
                if self._fault is None:
                    raise
                answer(self._fault(error))

        return DirectHandler(begin)

    def _note_refused(self, method: str, refused: _Refused) -> None:
        self._note(UNDECODABLE if refused.message is None else UNKNOWN_CONTENT, method, refused.failure.message)

    def handler(
        self,
        method: str,
        kind: type[Message],
        serialize: Callable[[Any], bytes],
        streams: tuple[bool, bool],
        behave: Behaviour,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """A handler of calls of a method. `kind`: type of its requests; `streams`: whether requests and responses are
        streams; `behave` gets the request, or `Requests` of a stream, and returns the response or writes to the
        context."""
        read, limiter = self._read, self._limiter
        requests_stream = streams[0]

        note = partial(self._note_refused, method)

        def deserialize(data: bytes) -> Message | _Refused:
            return read(kind, data)

        async def serve(request: Any, context: Context) -> Any:
            connection = ""
            try:
                if limiter is not None:
                    connection = limiter.begin(context)
                if requests_stream:
                    return await behave(Requests(request, note), context)
                if type(request) is _Refused:
                    note(request)
                    raise RequestError(request.failure)
                return await behave(request, context)
            except RequestError as error:
                await abort(context, error.failure)
            except (AbortedError, StreamOverError):
                raise  # the call was aborted on purpose, or its connection is gone
            except Exception as error:
                if self._fault is None:
                    raise
                failure = self._fault(error)
                if context.cancelled():
                    raise asyncio.CancelledError from error
                await abort(context, failure)
            finally:
                if connection and limiter is not None:
                    limiter.end(connection)

        make = cast(Any, _MAKERS[streams])
        made: grpc.RpcMethodHandler[Any, Any] = make(
            serve, request_deserializer=deserialize, response_serializer=serialize
        )
        return made


def _writing(generate: Callable[[Any, Context], Any]) -> Behaviour:
    """A generator of responses as a behaviour that writes them to the context."""

    async def behave(request: Any, context: Context) -> None:
        async with aclosing(generate(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return behave
