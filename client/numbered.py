"""Numbered calls of one client: each has a producer id and a sequence, by which nodes recognize repeats.

A lane is used again only if the outcome of its sequence is certain. If the cluster's record of a lane differs from the
client's (it was restored from a backup), a new lane replaces it.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from tickwheel.client.cluster import Cluster
from tickwheel.client.errors import SequenceError
from tickwheel.client.lanes import Doubt, Lane, Lanes

N = TypeVar("N")

Invoke = Callable[[grpc.aio.Channel, float], Awaitable[N]]


def new_producer_id() -> str:
    """A random, unique producer id."""
    return f"p-{secrets.token_hex(8)}"


class Numbered:
    """The numbered calls of one client."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._lanes = Lanes(new_producer_id())
        self.owner = secrets.token_hex(16)
        """The secret that owns this client's producer ids; nodes with certificates use those as the owner instead."""

    async def call(
        self,
        begin: Callable[[Lane, Doubt], Invoke[N]],
        timeout_s: float,
        *,
        counts: Callable[[N], bool] = lambda _: True,
        divisible: bool = False,
    ) -> N:
        """Call the master under a lane's sequence. `begin` returns the tries of a request of this lane.

        `counts`: whether the node has recorded the sequence. `divisible` as in `Cluster.call`.
        """
        while True:
            lane = self._lanes.take()
            doubt = Doubt(lane.sequence)
            try:
                response = await self._cluster.call(begin(lane, doubt), timeout_s, doubt=doubt, divisible=divisible)
                lane.sequence += counts(response)
                return response
            except SequenceError:
                if doubt.exists or lane.sequence == 1:
                    raise
            finally:
                if not (doubt.exists or doubt.foreign):
                    self._lanes.give_back(lane)
