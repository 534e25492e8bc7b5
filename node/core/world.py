"""The world as a node sees it, and who the node is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from tickwheel.replication.ports import Clock, Executor, Network, Random
from tickwheel.storage.disk import Disk

ClusterMs = NewType("ClusterMs", int)
"""A moment of the cluster clock, in milliseconds since 1970. Due times and leases go by it. It is not known at first,
and may be set back until somebody has acted by it."""
SteadyMs = NewType("SteadyMs", int)
"""A moment for waiting, in milliseconds by this machine's monotonic clock. It advances evenly and means nothing
to others."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The world as a node sees it."""

    disk: Disk
    clock: Clock
    executor: Executor
    """Reads, merges, checkpoints."""
    sync_executor: Executor
    """The journal's fdatasync: never behind a read."""
    network: Network
    random: Random


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Who this node is."""

    cluster_id: str
    node_id: str
    wheel_group: int = 0
    disk_uuid: str = ""
