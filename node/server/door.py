"""The door: what every call on a port passes. Decodes and checks its request, runs its handler, and ends it.

A request with fields or enum values that this version does not know is refused with INVALID_ARGUMENT and the field's
path. So a caller's unknown bytes never reach a handler or the parts behind it: not the log, not memory, not an answer.
So is a request that holds more than its method may need (bounds.py): before it costs the loop more than its decoding.
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
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter, methodcaller
from typing import Any, cast

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, EncodeError, Message

from tickwheel.node.core.metas import HEADERS_OF_REQUEST_MAX
from tickwheel.node.core.promise import Reply
from tickwheel.node.failure import Failure, RequestError, invalid
from tickwheel.node.logs import logger
from tickwheel.node.server.bounds import (
    FIELDS_MAX,
    TooManyFieldsError,
    check_fields,
    decoded_varint,
    elements_max,
    headers_in,
)
from tickwheel.node.server.connections import ConnectionLimiter
from tickwheel.node.server.errors import abort, refuse_call
from tickwheel.proto import common_pb2
from tickwheel.proto.parsing import parsed
from tickwheel.transport.connection import StreamOverError
from tickwheel.transport.server import AbortedError, DirectHandler, Opened, Server, StreamHandler
from tickwheel.transport.server import ServerStream as Context

UNDECODABLE = "undecodable"
TOO_LARGE = "too_large"
UNKNOWN_CONTENT = "unknown_content"
UNKNOWN_METHOD = "unknown_method"
KINDS = (UNDECODABLE, TOO_LARGE, UNKNOWN_CONTENT, UNKNOWN_METHOD)
"""Label values of the metric `refused_calls`."""

Behaviour = Callable[[Any, Context], Awaitable[Any]]
"""Takes the response, which may be serialized, or the Failure of a call; what comes after the first is ignored."""
DirectBehaviour = Callable[[Any, Context, Reply[Message | bytes]], None]
Plain = Callable[[bytes], Any]

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

    kind: str
    failure: Failure
    message: Message | None = None


NO_LIMIT = 1 << 62
FEW_BYTES = 2 * min(FIELDS_MAX, HEADERS_OF_REQUEST_MAX)
"""Too few for more fields or headers than a request may have: each takes at least two."""
_Known = dict[int, str]
"""Values of an enum that this version knows, with their names."""


class _Shape:
    """What is checked in messages of a type: the lengths of repeated fields, and the values of enums. Fields that can
    hold neither are not looked at. Fields are kept by name, those with one value apart from repeated ones."""

    def __init__(self, descriptor: Descriptor) -> None:
        self.lists: list[tuple[str, int]] = []
        """Repeated fields and how many elements they may have."""
        self.listing: list[tuple[str, _Shape]] = []
        self.each_listing: list[tuple[str, _Shape]] = []
        """Messages whose lists are checked: single ones, and elements that hold lists themselves. A row of a batch
        holds none; the lists of its meta are bounded by the bytes of a meta (intake.py)."""
        self.enums: list[tuple[str, _Known]] = []
        self.each_enums: list[tuple[str, _Known]] = []
        self.valued: list[tuple[str, _Shape]] = []
        self.each_valued: list[tuple[str, _Shape]] = []
        """Messages that can hold enums."""
        for field in descriptor.fields:
            name, many = field.name, field.is_repeated
            if many:
                self.lists.append((name, elements_max(field)))
            if field.enum_type is not None:
                known = {value.number: value.name for value in field.enum_type.values}
                (self.each_enums if many else self.enums).append((name, known))
            if _is_message(field):
                assert field.message_type is not None
                shape = _shape_of(field.message_type)
                if shape.holds_enums:
                    (self.each_valued if many else self.valued).append((name, shape))
                if shape.lists or (shape.holds_lists and not many):
                    (self.each_listing if many else self.listing).append((name, shape))
        self.elements_max: int = min(
            [limit for _, limit in self.lists]
            + [shape.elements_max for _, shape in (*self.listing, *self.each_listing)],
            default=NO_LIMIT,
        )
        """The least of all limits: a request of no more bytes has no list that is too long."""
        self.holds_lists: bool = bool(self.lists or self.listing or self.each_listing)
        self.holds_enums: bool = bool(self.enums or self.each_enums or self.valued or self.each_valued)
        self._flat = not (self.each_enums or self.valued or self.each_valued)
        """Whether messages of this type hold their enums in fields with one value: no code of ours runs for each."""

    def overfull(self, message: Message) -> tuple[str, int, int] | None:
        """(path, elements, limit) of the first list that is too long; None for none."""
        for name, limit in self.lists:
            count = len(getattr(message, name))
            if count > limit:
                return name, count, limit
        for name, shape in self.listing:
            if message.HasField(name):
                found = shape.overfull(getattr(message, name))
                if found is not None:
                    return f"{name}.{found[0]}", *found[1:]
        for name, shape in self.each_listing:
            for number, part in enumerate(getattr(message, name)):
                found = shape.overfull(part)
                if found is not None:
                    return f"{name}[{number}].{found[0]}", *found[1:]
        return None

    def knows(self, message: Message) -> bool:
        """Whether this version knows all values of enums in a message of this type."""
        for name, known in self.enums:
            if getattr(message, name) not in known:
                return False
        for name, known in self.each_enums:
            if not known.keys() >= set(getattr(message, name)):
                return False
        for name, shape in self.valued:
            if message.HasField(name) and not shape.knows(getattr(message, name)):
                return False
        for name, shape in self.each_valued:
            messages = getattr(message, name)
            if messages and not shape.knows_each(messages):
                return False
        return True

    def knows_each(self, messages: Sequence[Message]) -> bool:
        """As `knows`, for all of several messages."""
        if len(messages) == 1:
            return self.knows(messages[0])
        if self._flat:
            return all(known.keys() >= set(map(attrgetter(name), messages)) for name, known in self.enums)
        return all(map(self.knows, messages))

    def unknown_value(self, message: Message) -> tuple[str, int, str] | None:
        """(path, value, allowed values) of an enum value that this version does not know; None for none. The first one:
        values in a message come before those in its parts. Slow: only for refusals."""
        for name, known in self.enums:
            value = getattr(message, name)
            if value not in known:
                return name, value, _allowed(known)
        for name, known in self.each_enums:
            for number, value in enumerate(getattr(message, name)):
                if value not in known:
                    return f"{name}[{number}]", value, _allowed(known)
        for name, shape in self.valued:
            if message.HasField(name):
                found = shape.unknown_value(getattr(message, name))
                if found is not None:
                    return f"{name}.{found[0]}", *found[1:]
        for name, shape in self.each_valued:
            parts = getattr(message, name)
            first = shape.first_unknown(parts)
            found = None if first is None else shape.unknown_value(parts[first])
            if found is not None:
                return f"{name}[{first}].{found[0]}", *found[1:]
        return None

    def first_unknown(self, messages: Iterable[Message]) -> int | None:
        """The index of the first message with a value that this version does not know."""
        if not self._flat:
            return next((number for number, message in enumerate(messages) if not self.knows(message)), None)
        places = [
            next((number for number, value in enumerate(map(attrgetter(name), messages)) if value not in known), None)
            for name, known in self.enums
        ]
        return min((place for place in places if place is not None), default=None)


def _allowed(known: _Known) -> str:
    return ", ".join(f"{name} ({number})" for number, name in known.items())


@cache
def _shape_of(descriptor: Descriptor) -> _Shape:
    """No request type contains itself (a test ensures that)."""
    return _Shape(descriptor)


@cache
def _shape_of_kind(kind: type[Message]) -> _Shape:
    return _shape_of(cast(Descriptor, kind.DESCRIPTOR))


def _is_message(field: FieldDescriptor) -> bool:
    """Whether a field holds messages. The maps of requests hold texts only (a test ensures that)."""
    return field.message_type is not None and not field.message_type.GetOptions().map_entry


_size = methodcaller("ByteSize")


def _unknown_field(message: Message, known: Message) -> tuple[str, str]:
    """(path, type) of the first field that this version does not know; empty for none. `known`: the same message
    without such fields, so that only messages whose sizes differ are looked into. Empties the message."""
    inside = _unknown_inside(message, known)
    for field, _ in message.ListFields():
        message.ClearField(field.name)
    unknown = message.SerializeToString()  # what is left; protobuf's UnknownFieldSet makes an object for each of them
    return (str(decoded_varint(unknown, 0)[0] >> 3), message.DESCRIPTOR.name) if unknown else inside


def _unknown_inside(message: Message, known: Message) -> tuple[str, str]:
    for field, value in message.ListFields():
        if not _is_message(field):
            continue
        same = getattr(known, field.name)
        parts, rest = (value, same) if field.is_repeated else ([value], [same])
        sizes = enumerate(zip(map(_size, parts), map(_size, rest), strict=True))
        number = next((number for number, (size, size_known) in sizes if size != size_known), None)
        if number is not None:
            inner, owner = _unknown_field(parts[number], rest[number])
            if inner:
                return f"{field.name}[{number}].{inner}" if field.is_repeated else f"{field.name}.{inner}", owner
    return "", ""


def _no_request(kind: type[Message], data: bytes, error: DecodeError) -> _Refused:
    wanted = f"a {kind.DESCRIPTOR.full_name} ({error})"
    return _Refused(UNDECODABLE, invalid("request", f"{len(data)} bytes", wanted).failure)


def _no_memory(data: bytes) -> _Refused:
    text = f"the node has no memory left for this request of {len(data)} bytes: send less at a time, or later"
    facts = {"field": "request", "value": f"{len(data)} bytes", "retry_after_ms": "1000"}
    return _Refused(TOO_LARGE, Failure(common_pb2.LIMIT_REACHED, text, facts))


def read_request(kind: type[Message], data: bytes, bytes_max: int | None = None) -> Message | _Refused:
    """The bytes of a request as a message, or its refusal: more than `bytes_max`, no message of this kind, too many
    elements, content that this version does not know; or the node has no memory for it. Raises nothing.

    Costs about a serialization in C beside the decoding, and no Python code per row of a batch that has fewer than
    FIELDS_MAX rows' worth of bytes.
    """
    try:
        return _read_request(kind, data, bytes_max)
    except (MemoryError, EncodeError):  # bytes that were decoded can be encoded, if there is memory
        return _no_memory(data)


def _read_request(kind: type[Message], data: bytes, bytes_max: int | None) -> Message | _Refused:
    if bytes_max is not None and len(data) > bytes_max:
        return _Refused(TOO_LARGE, invalid("request", f"{len(data)} bytes", f"at most {bytes_max} bytes").failure)
    try:
        if len(data) > FEW_BYTES:
            check_fields(kind, data)
            headers = headers_in(kind, data)
            if headers:
                allowed = f"at most {HEADERS_OF_REQUEST_MAX} in all metas"
                return _Refused(TOO_LARGE, invalid("headers", headers, allowed).failure)
        message = parsed(kind, data)
    except DecodeError as error:
        return _no_request(kind, data, error)
    except TooManyFieldsError as error:
        wanted = f"at most {FIELDS_MAX} fields and elements in a request"
        return _Refused(TOO_LARGE, invalid(error.path, f"more than {FIELDS_MAX}", wanted).failure)
    shape = _shape_of_kind(kind)  # type: ignore[arg-type]  # a class is hashable, though its objects are not
    overfull = shape.overfull(message) if len(data) > shape.elements_max else None
    if overfull is not None:
        place, count, limit = overfull
        return _Refused(TOO_LARGE, invalid(place, count, f"at most {limit}").failure, message)
    message.DiscardUnknownFields()
    size = message.ByteSize()
    if size != len(data) and size != (whole := parsed(kind, data)).ByteSize():  # clients write what is counted here
        place, owner = _unknown_field(whole, message)
        allowed = f"only fields of {owner or kind.__name__} that this version knows"
        return _Refused(UNKNOWN_CONTENT, invalid(place or "request", "unknown field", allowed).failure, message)
    wrong = None if shape.knows(message) else shape.unknown_value(message)
    if wrong is not None:
        place, value, known = wrong
        return _Refused(
            UNKNOWN_CONTENT, invalid(place, value, f"a value that this version knows: {known}").failure, message
        )
    return message


def read_any_version(kind: type[Message], data: bytes) -> Message | _Refused:
    """The bytes of a request as a message, with whatever content: for peers and health checks, which may be a version
    ahead. A refusal only for bytes that are no message of this kind."""
    try:
        return parsed(kind, data)
    except DecodeError as error:
        return _no_request(kind, data, error)
    except MemoryError:
        return _no_memory(data)


class Requests:
    """The messages of a request stream. Raises RefusedRequestError for a refused one; reading can continue after it."""

    def __init__(self, requests: Any, note: Callable[[_Refused], None]) -> None:
        """`requests`: the context of the call."""
        self._requests = requests
        self._note = note
        self._ready: deque[Any] = deque()

    def __aiter__(self) -> Requests:
        return self

    async def __anext__(self) -> Any:
        return self._checked(self._ready.popleft() if self._ready else await anext(self._requests))

    def now(self) -> Any:
        """The next message, if there is no need to wait for it; else None."""
        ready = self._ready
        if not ready:
            ready.extend(self._requests.take_now())
            if not ready:
                return None
        return self._checked(ready.popleft())

    def _checked(self, request: Any) -> Any:
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
        self._exact = exact

    def serve(self, add: Callable[..., None], servicer: object) -> None:
        """Register a service of generated code. `add` is its `add_...Servicer_to_server`."""
        add(servicer, self)

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """No effect: generated code registers each service twice, and the other method does the work."""

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Take a service's methods from generated code, and register them as generic handlers. A method with streams
        both ways that is a plain function is taken as the `open` of `stream`."""

        def handler(name: str, made: Any) -> grpc.RpcMethodHandler[Any, Any] | StreamHandler:
            kind = made.request_deserializer.__self__
            streams = made.request_streaming, made.response_streaming
            behave = made.unary_unary or made.unary_stream or made.stream_unary or made.stream_stream
            if inspect.isasyncgenfunction(behave):
                behave = _writing(behave)
            elif all(streams) and not inspect.iscoroutinefunction(behave):
                return self.stream(f"/{service}/{name}", kind, behave)
            return self.handler(f"/{service}/{name}", kind, made.response_serializer, streams, behave)

        self.register(service, {name: handler(name, made) for name, made in handlers.items()})

    def register(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any] | DirectHandler | StreamHandler]
    ) -> None:
        """Register handlers that `handler` made."""
        made = grpc.method_handlers_generic_handler(service, cast(Any, handlers))
        self._server.add_generic_rpc_handlers((made,))

    def shut(self) -> None:
        """All services are registered: count calls of any other method from now on."""
        self._server.add_generic_rpc_handlers((_UnknownMethods(self._note),))

    def _note(self, kind: str, method: str, reason: str) -> None:
        self._refusals[kind] += 1
        log.warning("refused a call at the door", kind=kind, method=method[:200], reason=reason)

    def _reader(self, kind: type[Message], bytes_max: int | None, plain: Plain | None) -> Callable[[bytes], Any]:
        if not self._exact:
            return partial(read_any_version, kind)
        read = partial(read_request, kind, bytes_max=bytes_max)
        if plain is None:
            return read
        assert bytes_max is None, "plain requests are not measured"

        def read_plain(data: bytes) -> Any:
            found = plain(data)
            return read(data) if found is None else found

        return read_plain

    def direct(
        self,
        method: str,
        kind: type[Message],
        serialize: Callable[[Any], bytes],
        behave: DirectBehaviour,
        bytes_max: int | None = None,
        *,
        plain: Plain | None = None,
    ) -> DirectHandler:
        """A handler of calls with one message each way that takes no task (transport). As `handler`; `behave` also gets
        what takes the answer, and may call it later."""
        read, limiter = self._reader(kind, bytes_max, plain), self._limiter

        def begin(data: bytes, context: Context) -> None:
            def answer(response: Message | bytes) -> None:
                context.answer(response if type(response) is bytes else serialize(response))

            fail = partial(refuse_call, context)
            try:
                if limiter is not None:
                    context.ended = partial(limiter.end, limiter.begin(context))
                request = read(data)
                if type(request) is _Refused:
                    self._note_refused(method, request)
                    fail(request.failure)
                else:
                    behave(request, context, Reply(answer, fail))
            except RequestError as error:
                fail(error.failure)
            except Exception as error:
                if self._fault is None:
                    raise
                fail(self._fault(error))

        return DirectHandler(begin)

    def stream(self, method: str, kind: type[Message], open_stream: Callable[[Context], Opened]) -> StreamHandler:
        """A handler of calls with streams both ways that takes no task (transport). `open_stream` returns what takes
        the requests. An error of it ends the call as gRPC does."""
        read, limiter = self._reader(kind, None, None), self._limiter

        def opened(context: Context) -> Opened:
            try:
                counted = partial(limiter.end, limiter.begin(context)) if limiter is not None else None
            except RequestError as error:
                refuse_call(context, error.failure)
                return Opened(lambda _: None, lambda: None)
            serving = open_stream(context)

            def take(data: bytes) -> None:
                request = read(data)
                if type(request) is _Refused:
                    self._note_refused(method, request)
                    refuse_call(context, request.failure)
                else:
                    serving.take(request)

            def ended() -> None:
                if counted is not None:
                    counted()
                serving.ended()

            return Opened(take, ended)

        return StreamHandler(opened)

    def _note_refused(self, method: str, refused: _Refused) -> None:
        self._note(refused.kind, method, refused.failure.message)

    def handler(
        self,
        method: str,
        kind: type[Message],
        serialize: Callable[[Any], bytes],
        streams: tuple[bool, bool],
        behave: Behaviour,
        bytes_max: int | None = None,
        *,
        plain: Plain | None = None,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """A handler of calls of a method. `kind`: type of its requests; `streams`: whether requests and responses are
        streams; `behave` gets the request, or `Requests` of a stream, and returns the response or writes to the
        context. `bytes_max`: of one request, if the door is `exact`; None: what a connection takes. `plain` as in
        `Endpoint`."""
        limiter = self._limiter
        requests_stream = streams[0]

        note = partial(self._note_refused, method)

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
            serve, request_deserializer=self._reader(kind, bytes_max, plain), response_serializer=serialize
        )
        return made


def _writing(generate: Callable[[Any, Context], Any]) -> Behaviour:
    """A generator of responses as a behaviour that writes them to the context."""

    async def behave(request: Any, context: Context) -> None:
        async with aclosing(generate(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return behave
