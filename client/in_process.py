"""Clusters in the memory of this process, by address: clients that are given such an address open no socket.

A test runs one (tickwheel.testing), and code under test reaches it by its address like any other cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import grpc

from tickwheel.client.timing import Time


class InProcessCluster(Protocol):
    """A cluster in memory, as clients see it. Any thread may ask."""

    @property
    def time(self) -> Time:
        """Its time, by which its clients wait."""
        ...

    def channel(self, metadata: Sequence[tuple[str, str | bytes]]) -> grpc.aio.Channel:
        """A new channel to it; the metadata goes with every call."""
        ...


_clusters: dict[str, InProcessCluster] = {}


def found(address: str) -> InProcessCluster | None:
    """The cluster at this address; None: it is no address in this process."""
    return _clusters.get(address)


def register(address: str, cluster: InProcessCluster) -> None:
    """Clients made from now on find the cluster there."""
    _clusters[address] = cluster


def unregister(address: str) -> None:
    """The cluster has ended. Idempotent."""
    _clusters.pop(address, None)
