"""The cold tier: makes parts known to the cluster and asks what of them waits.

All of it may be repeated: a job that is known is answered with the numbers that it has.
"""

from __future__ import annotations

import grpc
import numpy as np

from tickwheel.client.cluster import Cluster
from tickwheel.proto import cold_pb2
from tickwheel.proto.cold_pb2_grpc import ColdStub


class ColdClient:
    """`AsyncClient.cold`. Needs the admin role."""

    def __init__(self, cluster: Cluster, timeout_s: float) -> None:
        self._cluster = cluster
        self._timeout_s = timeout_s

    async def register(self, request: cold_pb2.RegisterColdRequest) -> cold_pb2.ColdJob:
        """Make the parts of a job known, once."""

        async def invoke(channel: grpc.aio.Channel, try_s: float) -> cold_pb2.ColdJob:
            return await ColdStub(channel).RegisterCold(request, timeout=try_s)

        return await self._cluster.call(invoke, self._timeout_s)

    async def parts(self, *, waiting_only: bool = False) -> tuple[list[cold_pb2.ColdPart], int]:
        """All parts that the cluster remembers, by rising number, and the highest number that it ever gave."""
        found: list[cold_pb2.ColdPart] = []
        while True:
            after = found[-1].number if found else 0
            request = cold_pb2.ListColdPartsRequest(after=after, waiting_only=waiting_only)

            async def invoke(
                channel: grpc.aio.Channel, try_s: float, request: cold_pb2.ListColdPartsRequest = request
            ) -> cold_pb2.ColdParts:
                return await ColdStub(channel).ListColdParts(request, timeout=try_s)

            page = await self._cluster.call(invoke, self._timeout_s)
            found += page.parts
            if not page.more:
                return found, page.last_part

    async def moved(self, due_below_ms: int, after: int = 0) -> tuple[list[int], list[int], bool]:
        """A page of messages that were moved, wait and are due before a time: ids, due times, whether there is more."""
        request = cold_pb2.ListColdMovedRequest(after=after, due_below_ms=due_below_ms)

        async def invoke(channel: grpc.aio.Channel, try_s: float) -> cold_pb2.ColdMoved:
            return await ColdStub(channel).ListColdMoved(request, timeout=try_s)

        page = await self._cluster.call(invoke, self._timeout_s)
        return np.frombuffer(page.ids, "<u8").tolist(), np.frombuffer(page.due_ms, "<i8").tolist(), page.more
