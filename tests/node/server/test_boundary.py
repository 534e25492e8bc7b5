"""An error that nobody foresaw ends the call that met it, with an id that the log has; the node goes on.

For every method of every service, by the descriptors: the next one is held to it too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import google_crc32c
import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tests.node.server.test_door import MODULES
from tests.node.server.test_door import SERVICES as KNOWN
from tests.transport.served import started
from tickwheel.client.errors import fault_of_call
from tickwheel.node.config.sections import LimitsSection
from tickwheel.node.core.serving import OwnWorkError, Serving
from tickwheel.node.failure import Failure, RequestError, invalid
from tickwheel.node.server.access import Access
from tickwheel.node.server.backup import Backups
from tickwheel.node.server.callers import Callers
from tickwheel.node.server.calls import Calls
from tickwheel.node.server.consumer_stream import ConsumerStreams
from tickwheel.node.server.door import Door
from tickwheel.node.server.endpoints import SERVICES as TABLE
from tickwheel.node.server.fault_log import MEMORY_ADVICE, REPEAT_NS, FaultLog
from tickwheel.node.server.gate import Gate
from tickwheel.node.server.handlers import Node as Served
from tickwheel.node.server.health import HealthReporter
from tickwheel.node.server.schedule_stream import ScheduleStreams
from tickwheel.node.server.services import client_server
from tickwheel.node.server.status_stream import StatusStreams
from tickwheel.node.state.results import ImpossibleStateError
from tickwheel.node.state.rights import AccessControl
from tickwheel.node.state.settings import Settings
from tickwheel.proto import (
    access_pb2,
    access_pb2_grpc,
    admin_pb2,
    bulk_pb2,
    common_pb2,
    consumer_pb2,
    scheduler_pb2,
    staging_pb2,
)
from tickwheel.transport.server import Server

SERVICES = [
    *KNOWN,
    *((service, access_pb2_grpc) for service in access_pb2.DESCRIPTOR.services_by_name.values()),
]
METHODS = {f"/{service.full_name}/{method.name}": method for service, _ in SERVICES for method in service.methods}
ASK_NOTHING = {
    "/tickwheel.v1.Scheduler/ScheduleStream",
    "/tickwheel.v1.Access/WhoAmI",
    "/tickwheel.v1.Admin/GetSettings",
}
"""Of the core but its settings, to answer; a stream of batches does for each of them."""
COLUMNS = scheduler_pb2.ColumnBatch(
    topic="t", due_ms=np.ones(1, "<i8").tobytes(), payload_sizes=np.ones(1, "<u4").tobytes(), payloads=b"x"
)
WHOLE: dict[type[Message], Message] = {
    scheduler_pb2.ScheduleRequest: scheduler_pb2.ScheduleRequest(
        message=common_pb2.Message(topic="t", payload=b"x", due_ms=1)
    ),
    scheduler_pb2.RescheduleRequest: scheduler_pb2.RescheduleRequest(delay_ms=1),
    scheduler_pb2.CancelManyRequest: scheduler_pb2.CancelManyRequest(ids=[common_pb2.MessageId()]),
    scheduler_pb2.RescheduleManyRequest: scheduler_pb2.RescheduleManyRequest(
        requests=[scheduler_pb2.RescheduleRequest(delay_ms=1)]
    ),
    scheduler_pb2.ScheduleBatch: scheduler_pb2.ScheduleBatch(columns=COLUMNS),
    staging_pb2.StageRequest: staging_pb2.StageRequest(columns=COLUMNS),
    consumer_pb2.ConsumeRequest: consumer_pb2.ConsumeRequest(open=consumer_pb2.OpenConsumer(group="g")),
    bulk_pb2.BundleData: bulk_pb2.BundleData(name="b", data=b"x", crc32c=google_crc32c.value(b"x")),
}
"""Requests that get as far as the core; of other kinds an empty one does."""


class State:
    """A state with a bug in all but its settings."""

    settings = Settings()

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class Node:
    """What a node notes of errors."""

    def __init__(self) -> None:
        self.reported: dict[str, BaseException] = {}
        self.ended_by: list[BaseException] = []
        numbers = iter(range(1, 1_000))
        self.serving = Serving(lambda bits: next(numbers))
        self.serving.contain(self.reported.__setitem__)
        self.state = State()

    def __getattr__(self, name: str) -> Any:
        """A core with a bug in every part."""
        raise KeyError(name)

    def check(self, error: grpc.aio.AioRpcError) -> None:
        """The call that ended with this was told what the node reported, and the node goes on."""
        assert error.code() is grpc.StatusCode.INTERNAL, error
        fault = fault_of_call(error)
        assert fault.reason == "NODE_FAULT"
        assert isinstance(self.reported[fault.metadata["id"]], KeyError)
        assert not self.ended_by


@asynccontextmanager
async def reached(server: Server) -> AsyncIterator[Any]:
    """A channel to a server; Any, for the stubs do not know that bytes may go as they are."""
    port = await started(server)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop()


async def call(channel: Any, path: str, method: MethodDescriptor) -> None:
    """Call a method with one request and read all of its answer."""
    kind = GetMessageClass(method.input_type)
    request = WHOLE.get(kind, kind()).SerializeToString()
    if method.client_streaming and method.server_streaming:
        both = channel.stream_stream(path)()
        await both.write(request)
        while await both.read() is not cast(Any, grpc.aio).EOF:
            pass
        await both
    elif method.client_streaming:
        await channel.stream_unary(path)(iter([request]))
    elif method.server_streaming:
        async for _ in channel.unary_stream(path)(request):
            pass
    else:
        await channel.unary_unary(path)(request)


class Audit:
    """Writes nothing, and cannot be read."""

    async def changed(self, *record: object) -> None:
        """See AuditLog."""

    async def newest(self, limit: int, before_ms: int) -> None:
        """See AuditLog."""
        raise KeyError("audit")


class Raising:
    """A service with a bug in every method."""

    def __getattr__(self, name: str) -> Any:
        async def behave(request: object, context: object) -> None:
            raise KeyError(name)

        return behave


async def test_a_bug_in_any_handler_ends_its_call() -> None:
    """Behind the door each method of each service is at the boundary, whatever its kind."""
    assert {service.full_name for service, _ in SERVICES} == set(TABLE)
    node = Node()
    server = Server()
    door = Door(server, Counter(), fault=node.serving.fault)
    for service, stubs in SERVICES:
        door.serve(getattr(stubs, f"add_{service.name}Servicer_to_server"), Raising())
    async with reached(server) as channel:
        for path, method in METHODS.items():
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call(channel, path, method)
            node.check(raised.value)
    assert len(node.reported) == len(METHODS)


async def test_a_bug_in_any_method_of_the_core_ends_its_call() -> None:
    """The real handlers over a core that raises whatever they ask of it, at once."""
    node = Node()
    calls = Calls(lambda: cast(Any, node), lambda: None, lambda wait_ms: None, node.ended_by.append)
    limits = LimitsSection()
    audit = cast(Any, Audit())
    control = AccessControl()
    callers = Callers(Access(tls=False, admin_names=()), lambda: control, lambda: False, lambda: 0)
    served = Served(
        calls,
        audit,
        ScheduleStreams(calls, limits.stream_batches_max),
        ConsumerStreams(calls, 1 << 20),
        StatusStreams(calls, limits.status_streams_max, lambda: ""),
        Backups(calls, cast(Any, None), cast(Any, None)),
        tls=False,
    )
    gate = Gate(callers, lambda: cast(Any, node.state), audit, cast(Any, None), lambda: None)
    server = client_server(limits, served, gate, HealthReporter(), Counter())
    async with reached(server) as channel:
        for path, method in METHODS.items():
            if path in ASK_NOTHING:
                continue
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call(channel, path, method)
            node.check(raised.value)
        # A batch that fails has its receipt, and the stream goes on.
        stream = channel.stream_stream("/tickwheel.v1.Scheduler/ScheduleStream")()
        for sequence in (1, 2):
            batch = scheduler_pb2.ScheduleBatch(columns=COLUMNS, producer_id="p", sequence=sequence)
            await stream.write(batch.SerializeToString())
            receipt = scheduler_pb2.BatchReceipt.FromString(cast(bytes, await stream.read()))
            assert receipt.sequence == sequence and receipt.error
        stream.cancel()


class Asking:
    """A service whose methods raise what the test gave them."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def GetStatus(self, request: object, context: object) -> admin_pb2.NodeStatus:
        raise self._error

    def __getattr__(self, name: str) -> Any:
        return self.GetStatus


async def code_of(error: Exception, fault: Callable[[Exception], Failure]) -> grpc.StatusCode:
    """How a call ends whose service raises this."""
    server = Server()
    Door(server, Counter(), fault=fault).serve(MODULES[admin_pb2].add_AdminServicer_to_server, Asking(error))
    async with reached(server) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await channel.unary_unary("/tickwheel.v1.Admin/GetStatus")(b"")
    return raised.value.code()


async def test_a_refusal_is_no_mistake() -> None:
    """Nobody need look for it in the log."""
    node = Node()
    assert await code_of(invalid("f", 1, "2"), node.serving.fault) is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(invalid("f", 1, "2"), RequestError) and not node.reported


@pytest.mark.parametrize("error", [ImpossibleStateError("the state"), OwnWorkError("our own")])
async def test_what_a_node_cannot_go_on_without_ends_it(error: Exception) -> None:
    """Whose request ran into it does not matter."""
    node = Node()
    calls = Calls(lambda: cast(Any, node), lambda: None, lambda wait_ms: None, node.ended_by.append)
    await code_of(error, calls.fault)
    assert node.ended_by == [error] and not node.reported


class HandClock:
    """Moves when told."""

    now_ns = 0

    def monotonic_ns(self) -> int:
        return self.now_ns

    def wall_ms(self) -> int:
        return 0


def test_a_fault_is_logged_with_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each id is in the log; the traceback of one place only now and then, with the id that has it."""
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr("tickwheel.node.server.fault_log.log.error", lambda event, **fields: lines.append(fields))
    clock = HandClock()
    faults = FaultLog(clock)

    def fail(number: int) -> None:
        try:
            raise KeyError(number)
        except KeyError as error:
            faults(f"id{number}", error)

    fail(1)
    fail(2)
    clock.now_ns += REPEAT_NS
    fail(3)
    assert [line["id"] for line in lines] == ["id1", "id2", "id3"]
    assert [isinstance(line.get("exc_info"), KeyError) for line in lines] == [True, False, True]
    assert lines[1]["like"] == "id1"
    faults("id4", MemoryError())
    assert lines[3] == {"id": "id4", "reason": MEMORY_ADVICE}
