"""Concurrent calls of one method at one node, each about one message, travel together as the rows of one call.

Owns the rows that wait and those under way, by node. Only tries are shared: each caller repeats its own request, has
its own deadline, and gets the answer or the refusal of its own row. A row whose caller is gone before it is sent is
left out. A node without the shared call gets single ones.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

import grpc

from tickwheel.client.cluster import TRY_TIMEOUT_S, Cluster
from tickwheel.client.errors import Fault, fault_of_call, fault_of_status
from tickwheel.client.line import Line
from tickwheel.client.tries import TryFailedError
from tickwheel.client.versions import OlderNodes
from tickwheel.proto import scheduler_pb2
from tickwheel.proto.scheduler_pb2_grpc import SchedulerStub

if TYPE_CHECKING:
    from tickwheel.proto.scheduler_pb2_grpc import SchedulerAsyncStub

Q = TypeVar("Q")
A = TypeVar("A")

One: TypeAlias = "Callable[[SchedulerAsyncStub, Q, float], Awaitable[A]]"
"""The single call. The last argument is its time-out."""
Many: TypeAlias = "Callable[[SchedulerAsyncStub, list[Q], float], Awaitable[Sequence[tuple[A, bytes]]]]"
"""The shared call: for each request its answer, or the serialized status of its refusal."""

UNDER_WAY_MAX = 2
ROWS_MAX = 500
"""Rows that a node takes in one call."""


class _Row(Generic[Q, A]):
    __slots__ = ("future", "request", "shared")

    def __init__(self, request: Q, future: asyncio.Future[A]) -> None:
        self.request = request
        self.future = future
        self.shared: _Shared[Q, A] | None = None


class _Shared(Generic[Q, A]):
    """One call under way, and its rows."""

    __slots__ = ("rows", "task")

    def __init__(self, rows: list[_Row[Q, A]]) -> None:
        self.rows = rows
        self.task: asyncio.Task[None] | None = None


class RowCalls(Generic[Q, A]):
    """The calls of one method."""

    def __init__(self, cluster: Cluster, one: One[Q, A], many: Many[Q, A]) -> None:
        self._cluster = cluster
        self._one = one
        self._many = many
        self._older = OlderNodes()
        self._lines: weakref.WeakKeyDictionary[grpc.aio.Channel, Line[_Row[Q, A]]] = weakref.WeakKeyDictionary()

    async def call(self, channel: grpc.aio.Channel, request: Q, try_s: float) -> A:
        """One try at this node. Raises TryFailedError."""
        loop = asyncio.get_running_loop()
        line = self._lines.get(channel)
        if line is None:
            line = self._lines[channel] = Line(
                lambda row: 0, lambda row: row.future.done(),
                under_way_max=UNDER_WAY_MAX, calls_max=ROWS_MAX, bytes_max=0,
            )  # fmt: skip
        row: _Row[Q, A] = _Row(request, loop.create_future())
        line.add(row)
        loop.call_soon(self._send, channel, line)
        try:
            async with asyncio.timeout(try_s):
                return await row.future
        except TimeoutError:
            raise TryFailedError(Fault("DEADLINE_EXCEEDED", "the node did not answer")) from None
        finally:
            shared = row.shared
            if shared is not None and shared.task is not None and all(other.future.done() for other in shared.rows):
                shared.task.cancel()

    def _send(self, channel: grpc.aio.Channel, line: Line[_Row[Q, A]]) -> None:
        while rows := line.take():
            shared = _Shared(rows)
            for row in rows:
                row.shared = shared
            shared.task = asyncio.ensure_future(self._run(channel, line, rows))

    async def _run(self, channel: grpc.aio.Channel, line: Line[_Row[Q, A]], rows: list[_Row[Q, A]]) -> None:
        try:
            await self._try(self._cluster.stub(SchedulerStub, channel), channel, rows)
        except grpc.aio.AioRpcError as error:
            fault = fault_of_call(error)
            for row in rows:
                _fail(row, TryFailedError(fault))
        except Exception as error:  # a mistake of this client: nobody may wait for ever
            for row in rows:
                _fail(row, error)
        finally:
            for row in rows:
                row.shared = None
            line.ended()
            self._send(channel, line)

    async def _try(self, stub: SchedulerAsyncStub, channel: grpc.aio.Channel, rows: list[_Row[Q, A]]) -> None:
        if len(rows) > 1 and not self._older.lacks(channel):
            try:
                results = await self._many(stub, [row.request for row in rows], TRY_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if not self._older.note(channel, error):
                    raise
            else:
                for row, (answer, refusal) in zip(rows, results, strict=True):
                    if refusal:
                        _fail(row, TryFailedError(fault_of_status(refusal)))
                    elif not row.future.done():
                        row.future.set_result(answer)
                return
        await asyncio.gather(*(self._alone(stub, row) for row in rows))

    async def _alone(self, stub: SchedulerAsyncStub, row: _Row[Q, A]) -> None:
        try:
            answer = await self._one(stub, row.request, TRY_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            _fail(row, TryFailedError(fault_of_call(error)))
        else:
            if not row.future.done():
                row.future.set_result(answer)


def _fail(row: _Row[Q, A], error: Exception) -> None:
    if not row.future.done():
        row.future.set_exception(error)


def cancel_calls(cluster: Cluster) -> RowCalls[scheduler_pb2.CancelRequest, scheduler_pb2.CancelResponse]:
    """The calls of Cancel, by id."""

    async def many(
        stub: SchedulerAsyncStub, requests: list[scheduler_pb2.CancelRequest], try_s: float
    ) -> Sequence[tuple[scheduler_pb2.CancelResponse, bytes]]:
        request = scheduler_pb2.CancelManyRequest(ids=[one.id for one in requests])
        response = await stub.CancelMany(request, timeout=try_s)
        return [(scheduler_pb2.CancelResponse(outcome=result.outcome), result.error) for result in response.results]

    return RowCalls(cluster, lambda stub, request, try_s: stub.Cancel(request, timeout=try_s), many)


def reschedule_calls(cluster: Cluster) -> RowCalls[scheduler_pb2.RescheduleRequest, scheduler_pb2.RescheduleResponse]:
    """The calls of Reschedule."""

    async def many(
        stub: SchedulerAsyncStub, requests: list[scheduler_pb2.RescheduleRequest], try_s: float
    ) -> Sequence[tuple[scheduler_pb2.RescheduleResponse, bytes]]:
        response = await stub.RescheduleMany(scheduler_pb2.RescheduleManyRequest(requests=requests), timeout=try_s)
        return [(result.response, result.error) for result in response.results]

    return RowCalls(cluster, lambda stub, request, try_s: stub.Reschedule(request, timeout=try_s), many)
