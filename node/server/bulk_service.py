"""The Bulk service: receives bundles and takes their messages over.

Thin: the core's BulkDesk does the work. Every method needs the admin role, since a bundle brings hundreds of thousands
of messages, for any topic.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from tickwheel.node.core.bundle_store import Held
from tickwheel.node.core.failure import Failure, invalid
from tickwheel.node.server.calls import Calls
from tickwheel.node.server.errors import abort
from tickwheel.proto import bulk_pb2
from tickwheel.proto.bulk_pb2_grpc import BulkServicer

Context = grpc.aio.ServicerContext[Any, Any]


def _state(held: Held) -> bulk_pb2.BundleState:
    return bulk_pb2.BundleState(name=held.name, bytes=held.bytes, held=held.held)


class BulkService(BulkServicer):
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def OfferBundle(self, request: bulk_pb2.BundleOffer, context: Context) -> bulk_pb2.BundleState:
        answer = self._calls.core.bulk.offer(request.name, request.bytes)
        if isinstance(answer, Failure):
            await abort(context, answer)
        return _state(answer)

    async def SendBundle(
        self, request_iterator: AsyncIterator[bulk_pb2.BundleData], context: Context
    ) -> bulk_pb2.BundleState:
        state: Held | None = None
        async for piece in request_iterator:
            if state is not None and piece.name != state.name:
                await abort(context, invalid("name", piece.name, f"{state.name}, as before in this stream").failure)
            state = await self._take(context, piece)
            if state.held or state.bytes != piece.offset + len(piece.data):
                break
        if state is None:
            await abort(context, invalid("pieces", 0, "one or more").failure)
        return _state(state)

    async def _take(self, context: Context, piece: bulk_pb2.BundleData) -> Held:
        bulk = self._calls.core.bulk
        return await self._calls.answer(
            context,
            lambda done: bulk.take(piece.name, piece.total_bytes, piece.offset, piece.data, piece.crc32c, done),
        )

    async def TakeOver(self, request: bulk_pb2.TakeOverRequest, context: Context) -> bulk_pb2.LoadState:
        return await self._calls.answer(context, lambda done: self._calls.core.bulk.take_over(request, done))

    async def GetLoad(self, request: bulk_pb2.GetLoadRequest, context: Context) -> bulk_pb2.LoadState:
        return self._calls.core.bulk.load(request.job_id)
