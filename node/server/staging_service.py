"""The Staging service: takes blocks of bulk writers, and the commit that schedules them once.

Thin: a block becomes an IncomingBatch; everything else goes to the core unchanged.
"""

from __future__ import annotations

from typing import Any

import grpc

from tickwheel.node.core.failure import RequestError
from tickwheel.node.core.intake import from_batch
from tickwheel.node.server.calls import Calls
from tickwheel.node.server.errors import abort
from tickwheel.node.server.gate import caller
from tickwheel.proto import scheduler_pb2, staging_pb2
from tickwheel.proto.staging_pb2_grpc import StagingServicer

Context = grpc.aio.ServicerContext[Any, Any]


class StagingService(StagingServicer):
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def Stage(self, request: staging_pb2.StageRequest, context: Context) -> staging_pb2.StagedJob:
        calls, owner = self._calls, caller().actor
        try:
            batch = from_batch(scheduler_pb2.ScheduleBatch(columns=request.columns), calls.core.settings)
        except RequestError as error:
            await abort(context, error.failure)
        return await calls.answer(context, lambda done: calls.core.stage(request, batch, done, owner))

    async def Commit(self, request: staging_pb2.CommitStagedRequest, context: Context) -> staging_pb2.StagedJob:
        calls, owner = self._calls, caller().actor
        return await calls.answer(context, lambda done: calls.core.commit_staged(request, done, owner))

    async def Abort(self, request: staging_pb2.AbortStagedRequest, context: Context) -> staging_pb2.StagedJob:
        calls, owner = self._calls, caller().actor
        return await calls.answer(context, lambda done: calls.core.abort_staged(request, done, owner))

    async def GetStagedJob(self, request: staging_pb2.GetStagedJobRequest, context: Context) -> staging_pb2.StagedJob:
        calls, owner = self._calls, caller().actor
        return await calls.answer(context, lambda done: calls.core.staged_job(request, done, owner))
