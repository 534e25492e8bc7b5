"""Calls for the cold tier: register parts and list those that wait.

Every call may be repeated: a known job is answered with its existing part numbers.
"""

from __future__ import annotations

import grpc
import numpy as np

from tickwheel.client.cluster import Cluster
from tickwheel.client.listing import listed
from tickwheel.proto import cold_pb2
from tickwheel.proto.cold_pb2_grpc import ColdStub


class ColdClient:
    """`AsyncClient.cold`. Needs the admin role."""

    def __init__(self, cluster: Cluster, timeout_s: float) -> None:
        self._cluster = cluster
        self._timeout_s = timeout_s

    async def register(self, request: cold_pb2.RegisterColdRequest) -> cold_pb2.ColdJob:
        """Register the parts of a job; a repeat returns the same job."""

        async def invoke(channel: grpc.aio.Channel, try_s: float) -> cold_pb2.ColdJob:
            return await ColdStub(channel).RegisterCold(request, timeout=try_s)

        return await self._cluster.call(invoke, self._timeout_s)

    async def parts(self, *, waiting_only: bool = False) -> tuple[list[cold_pb2.ColdPart], int]:
        """(all parts that the cluster keeps, by ascending number; the highest number ever given)."""

        async def fetch(last: cold_pb2.ColdPart | None) -> cold_pb2.ColdParts:
            request = cold_pb2.ListColdPartsRequest(after=last.number if last else 0, waiting_only=waiting_only)

            async def invoke(channel: grpc.aio.Channel, try_s: float) -> cold_pb2.ColdParts:
                return await ColdStub(channel).ListColdParts(request, timeout=try_s)

            return await self._cluster.call(invoke, self._timeout_s)

        found, page = await listed(fetch, lambda page: page.parts)
        return found, page.last_part

    async def moved(self, due_below_ms: int, after: int = 0) -> tuple[list[int], list[int], bool]:
        """A page of moved messages that still wait and are due before a time: (ids, due times, whether more follow)."""
        request = cold_pb2.ListColdMovedRequest(after=after, due_below_ms=due_below_ms)

        async def invoke(channel: grpc.aio.Channel, try_s: float) -> cold_pb2.ColdMoved:
            return await ColdStub(channel).ListColdMoved(request, timeout=try_s)

        page = await self._cluster.call(invoke, self._timeout_s)
        return np.frombuffer(page.ids, "<u8").tolist(), np.frombuffer(page.due_ms, "<i8").tolist(), page.more
