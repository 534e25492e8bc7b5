"""Consuming without a stream: each call pulls one batch, and a later call settles it, from any process with its handle.

For programs that consume in steps decided elsewhere, such as a stream of Spark. If the answer to a pull is lost, its
messages stay leased until the lease ends. A settlement can be repeated safely.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import numpy as np

from tickwheel.client.cluster import Cluster
from tickwheel.client.filtering import mismatches, without
from tickwheel.proto import consumer_pb2
from tickwheel.proto.consumer_pb2_grpc import ConsumerStub

TRY_TIMEOUT_S = 30.0


def handle_of(batch: consumer_pb2.DeliverBatch) -> consumer_pb2.SettleBatch:
    """The handle that names the deliveries of a batch in a settlement. It omits positions, to be short."""
    return consumer_pb2.SettleBatch(
        group=batch.group, topic=batch.topic, ids=batch.ids, attempts=batch.attempts, epoch=batch.epoch
    )


class PullClient:
    """The consumer's unary calls."""

    def __init__(self, cluster: Cluster, timeout_s: float) -> None:
        self._cluster = cluster
        self._timeout_s = timeout_s

    async def pull(self, request: consumer_pb2.PullRequest) -> consumer_pb2.DeliverBatch:
        """Pull one batch, empty if nothing came in time. Settles messages that the group's filter does not want."""

        async def invoke(channel: grpc.aio.Channel, try_s: float) -> consumer_pb2.DeliverBatch:
            return await self._cluster.stub(ConsumerStub, channel).Pull(request, timeout=try_s)

        batch = await self._cluster.call(invoke, self._timeout_s, try_timeout_s=TRY_TIMEOUT_S)
        foreign = mismatches(batch)
        if not len(foreign):
            return batch
        handle = handle_of(batch)
        handle.ids = np.frombuffer(batch.ids, "<u8")[foreign].tobytes()
        handle.attempts = np.frombuffer(batch.attempts, "<u4")[foreign].tobytes()
        await self.settle([handle], consumer_pb2.SKIP)
        return without(batch, foreign)

    async def settle(
        self, handles: Sequence[consumer_pb2.SettleBatch], outcome: consumer_pb2.Outcome.ValueType, delay_ms: int = 0
    ) -> int:
        """Settle deliveries. Returns how many were settled; those delivered again meanwhile do not count."""
        settled = 0
        for handle in handles:
            request = consumer_pb2.SettleBatch()
            request.CopyFrom(handle)
            request.outcome = outcome
            request.delay_ms = delay_ms

            async def invoke(
                channel: grpc.aio.Channel, try_s: float, request: consumer_pb2.SettleBatch = request
            ) -> consumer_pb2.SettleReceipt:
                return await self._cluster.stub(ConsumerStub, channel).Settle(request, timeout=try_s)

            receipt = await self._cluster.call(invoke, self._timeout_s)
            settled += receipt.settled
        return settled
