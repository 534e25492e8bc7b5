"""The DeadLetters service: lists, replays and purges dead letters. Changes need the admin role."""

from __future__ import annotations

from typing import Any

import grpc

from tickwheel.node.server.calls import Calls
from tickwheel.proto import dead_pb2
from tickwheel.proto.dead_pb2_grpc import DeadLettersServicer

Context = grpc.aio.ServicerContext[Any, Any]


class DeadService(DeadLettersServicer):
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def ListDead(self, request: dead_pb2.ListDeadRequest, context: Context) -> dead_pb2.ListDeadResponse:
        return await self._calls.answer(context, lambda done: self._calls.core.list_dead(request, done))

    async def GetDead(self, request: dead_pb2.GetDeadRequest, context: Context) -> dead_pb2.DeadLetter:
        return await self._calls.answer(context, lambda done: self._calls.core.get_dead(request, done))

    async def ReplayDead(self, request: dead_pb2.ReplayDeadRequest, context: Context) -> dead_pb2.ChangeDeadResponse:
        return await self._calls.answer(context, lambda done: self._calls.core.replay_dead(request, done))

    async def PurgeDead(self, request: dead_pb2.PurgeDeadRequest, context: Context) -> dead_pb2.ChangeDeadResponse:
        return await self._calls.answer(context, lambda done: self._calls.core.purge_dead(request, done))
