"""The door: every request of every service, decoded and looked through before a service sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, ServiceDescriptor
from google.protobuf.internal.encoder import _VarintBytes as varint  # type: ignore[attr-defined]  # the wire, by hand
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tests.transport.served import started
from tickwheel.node.server.door import (
    UNDECODABLE,
    UNKNOWN_CONTENT,
    UNKNOWN_METHOD,
    Door,
    RefusedRequestError,
    read_any_version,
    read_request,
)
from tickwheel.proto import (
    access_pb2,
    access_pb2_grpc,
    admin_pb2,
    admin_pb2_grpc,
    bulk_pb2,
    bulk_pb2_grpc,
    cold_pb2,
    cold_pb2_grpc,
    consumer_pb2,
    consumer_pb2_grpc,
    dead_pb2,
    dead_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    schedules_pb2,
    schedules_pb2_grpc,
    snapshot_pb2,
    snapshot_pb2_grpc,
    staging_pb2,
    staging_pb2_grpc,
)
from tickwheel.transport.server import Server

MODULES: dict[Any, Any] = {
    access_pb2: access_pb2_grpc,
    admin_pb2: admin_pb2_grpc,
    bulk_pb2: bulk_pb2_grpc,
    cold_pb2: cold_pb2_grpc,
    consumer_pb2: consumer_pb2_grpc,
    dead_pb2: dead_pb2_grpc,
    scheduler_pb2: scheduler_pb2_grpc,
    schedules_pb2: schedules_pb2_grpc,
    snapshot_pb2: snapshot_pb2_grpc,
    staging_pb2: staging_pb2_grpc,
}
SERVICES: list[tuple[ServiceDescriptor, Any]] = [
    (service, stubs) for module, stubs in MODULES.items() for service in module.DESCRIPTOR.services_by_name.values()
]
METHODS = [(f"/{service.full_name}/{method.name}", method) for service, _ in SERVICES for method in service.methods]
REQUESTS: list[Descriptor] = list({m.input_type.full_name: m.input_type for _, m in METHODS}.values())
NESTED = varint(900 << 3 | 3) * 97 + varint(900 << 3 | 4) * 97
"""An unknown field: groups in each other, 97 deep."""
UNKNOWN_ENUM = 77


def places(descriptor: Descriptor, path: tuple[FieldDescriptor, ...] = ()) -> Iterator[tuple[FieldDescriptor, ...]]:
    """Every way down from a message to itself or a message in it; raises RecursionError if one contains itself."""
    yield path
    for field in descriptor.fields:
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            yield from places(field.message_type, (*path, field))


def at(root: Message, path: tuple[FieldDescriptor, ...]) -> Message:
    """The message at the end of a way, made on the way."""
    message = root
    for field in path:
        value = getattr(message, field.name)
        if field.is_repeated:
            message = value.add()
        else:
            value.SetInParent()
            message = value
    return message


CASES = [(request, path) for request in REQUESTS for path in places(request)]


@pytest.mark.parametrize("unknown", [varint(900 << 3) + b"\x01", NESTED], ids=["plain", "nested"])
def test_unknown_fields_are_refused_wherever_they_stand(unknown: bytes) -> None:
    """In the request and in every message that can stand in it; the path says where. The rest of it passes."""
    for request, path in CASES:
        kind = GetMessageClass(request)
        root = kind()
        at(root, path)
        assert isinstance(read_request(kind, root.SerializeToString()), kind), request.full_name
        at(root, path).MergeFromString(unknown)
        refused = read_request(kind, root.SerializeToString())
        assert not isinstance(refused, Message), f"{request.full_name} {[field.name for field in path]}"
        assert refused.failure.grpc_code_name == "INVALID_ARGUMENT"
        assert refused.failure.metadata["field"].endswith("900")
        way = [part.split("[")[0] for part in refused.failure.metadata["field"].split(".")[:-1]]
        assert way == [field.name for field in path]
        assert refused.message is not None
        assert b"\xa3\x38" not in refused.message.SerializeToString(), "what is not known is kept nowhere"


def test_unknown_values_of_enums_are_refused_wherever_they_stand() -> None:
    """Nothing may write a value into the log that the next version may understand and this one does not."""
    found = 0
    for request, path in CASES:
        kind = GetMessageClass(request)
        owner = path[-1].message_type if path else request
        assert owner is not None
        for field in owner.fields:
            if field.enum_type is None:
                continue
            root = kind()
            if field.is_repeated:
                getattr(at(root, path), field.name).append(UNKNOWN_ENUM)
            else:
                setattr(at(root, path), field.name, UNKNOWN_ENUM)
            refused = read_request(kind, root.SerializeToString())
            assert not isinstance(refused, Message), f"{request.full_name} {field.full_name}"
            assert refused.failure.metadata["field"].split(".")[-1].split("[")[0] == field.name
            assert refused.failure.metadata["value"] == str(UNKNOWN_ENUM)
            found += 1
    assert found > 3, "this looks at the wrong thing"


def test_what_is_no_message_is_refused_and_raises_nothing() -> None:
    """Cut, wrong wire types, deeper than protobuf reads: a refusal each."""
    deep = varint(900 << 3 | 3) * 200 + varint(900 << 3 | 4) * 200
    for request in REQUESTS:
        kind = GetMessageClass(request)
        for data in (b"\xff", b"\x0a\x05a", deep, b"\x0c", b"\xff" * 40):
            for read in (read_request, read_any_version):
                refused = read(kind, data)
                assert not isinstance(refused, Message)
                assert refused.message is None
                assert refused.failure.metadata["field"] == "request"


class _NeverReached:
    """A servicer whose methods must not be called; streams are read to their end."""

    def __getattr__(self, name: str) -> Any:
        async def method(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            if isinstance(request, Message):
                raise AssertionError(f"{name} was called")
            async for _ in request:
                raise AssertionError(f"{name} was given a request")

        return method


async def refusal_of(channel: Any, path: str, method: Any, data: bytes) -> grpc.StatusCode:
    """What a call with one request of these bytes answers."""

    async def requests() -> AsyncIterator[bytes]:
        yield data

    try:
        if method.client_streaming and method.server_streaming:
            async for _ in channel.stream_stream(path)(requests()):
                pass
        elif method.client_streaming:
            await channel.stream_unary(path)(requests())
        elif method.server_streaming:
            async for _ in channel.unary_stream(path)(data):
                pass
        else:
            await channel.unary_unary(path)(data)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_every_method_of_every_service_is_behind_the_door() -> None:
    """Bytes that are no request, and requests of a newer version, end with INVALID_ARGUMENT and reach no service; what
    names no method ends with UNIMPLEMENTED. Each is counted by its kind."""
    refusals: Counter[str] = Counter()
    server = Server()
    door = Door(server, refusals)
    for service, module in SERVICES:
        door.serve(getattr(module, f"add_{service.name}Servicer_to_server"), _NeverReached())
    door.shut()
    port = await started(server)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for path, method in METHODS:
            assert await refusal_of(channel, path, method, b"\xff\xff") is grpc.StatusCode.INVALID_ARGUMENT, path
            assert await refusal_of(channel, path, method, NESTED) is grpc.StatusCode.INVALID_ARGUMENT, path
        none = cast(Any, type("Method", (), {"client_streaming": False, "server_streaming": False}))
        for path in ("/tickwheel.v1.Admin/Nothing", "/nobody", "/a/b/c"):
            assert await refusal_of(channel, path, none, b"") is grpc.StatusCode.UNIMPLEMENTED, path
    await server.stop()
    assert refusals == {UNDECODABLE: len(METHODS), UNKNOWN_CONTENT: len(METHODS), UNKNOWN_METHOD: 3}


async def test_a_stream_can_be_read_on_behind_a_refused_message() -> None:
    """So a service may refuse one batch and go on, as ScheduleStream does."""
    seen: list[object] = []

    class Reader(_NeverReached):
        async def ScheduleStream(self, requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            while True:
                try:
                    seen.append((await anext(requests)).sequence)
                except StopAsyncIteration:
                    return
                except RefusedRequestError as error:
                    assert isinstance(error.message, scheduler_pb2.ScheduleBatch)
                    seen.append(-error.message.sequence)

    server = Server()
    Door(server, Counter()).serve(scheduler_pb2_grpc.add_SchedulerServicer_to_server, Reader())
    port = await started(server)

    async def batches() -> AsyncIterator[bytes]:
        for sequence in (1, 2, 3):
            data: bytes = scheduler_pb2.ScheduleBatch(sequence=sequence).SerializeToString()
            yield data + (NESTED if sequence == 2 else b"")

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        async for _ in cast(Any, channel).stream_stream("/tickwheel.v1.Scheduler/ScheduleStream")(batches()):
            pass
    await server.stop()
    assert seen == [1, -2, 3]
