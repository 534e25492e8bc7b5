"""The Cold service: registers and lists parts of the cold tier. Every method needs the admin role, as for bulk load."""

from __future__ import annotations

from typing import Any

import grpc

from tickwheel.node.server.calls import Calls
from tickwheel.proto import cold_pb2
from tickwheel.proto.cold_pb2_grpc import ColdServicer

Context = grpc.aio.ServicerContext[Any, Any]


class ColdService(ColdServicer):
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def RegisterCold(self, request: cold_pb2.RegisterColdRequest, context: Context) -> cold_pb2.ColdJob:
        return await self._calls.answer(context, lambda done: self._calls.core.cold.register(request, done))

    async def ListColdParts(self, request: cold_pb2.ListColdPartsRequest, context: Context) -> cold_pb2.ColdParts:
        return await self._calls.answer(context, lambda done: self._calls.core.cold.parts(request, done))

    async def ListColdMoved(self, request: cold_pb2.ListColdMovedRequest, context: Context) -> cold_pb2.ColdMoved:
        return await self._calls.answer(context, lambda done: self._calls.core.cold.moved(request, done))
