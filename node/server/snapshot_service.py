"""The Snapshot service: what is pending, and what a group has settled, as of one applied index, from this node,
whatever its role."""

from __future__ import annotations

from typing import Any

import grpc

from tickwheel.node.server.access import Permission
from tickwheel.node.server.calls import Calls
from tickwheel.proto import snapshot_pb2
from tickwheel.proto.snapshot_pb2_grpc import SnapshotServicer

Context = grpc.aio.ServicerContext[Any, Any]


class SnapshotService(SnapshotServicer):
    """See snapshot.proto."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def Pin(self, request: snapshot_pb2.PinRequest, context: Context) -> snapshot_pb2.PinResponse:
        calls = self._calls
        await calls.allow(context, Permission.CLIENT)
        return await calls.answer(context, lambda done: calls.core.pin(request, done))

    async def ReadPinned(self, request: snapshot_pb2.ReadPinnedRequest, context: Context) -> snapshot_pb2.PinnedPage:
        calls = self._calls
        await calls.allow(context, Permission.CLIENT)
        return await calls.answer(context, lambda done: calls.core.read_pinned(request, done))

    async def Unpin(self, request: snapshot_pb2.UnpinRequest, context: Context) -> snapshot_pb2.UnpinResponse:
        await self._calls.allow(context, Permission.CLIENT)
        self._calls.core.unpin(request.pin_id)
        return snapshot_pb2.UnpinResponse()

    async def PinSettled(
        self, request: snapshot_pb2.PinSettledRequest, context: Context
    ) -> snapshot_pb2.PinSettledResponse:
        calls = self._calls
        await calls.allow(context, Permission.CLIENT)
        return await calls.answer(context, lambda done: calls.core.pin_settled(request, done))

    async def ReadSettled(self, request: snapshot_pb2.ReadSettledRequest, context: Context) -> snapshot_pb2.SettledPage:
        calls = self._calls
        await calls.allow(context, Permission.CLIENT)
        return await calls.answer(context, lambda done: calls.core.read_settled(request, done))
