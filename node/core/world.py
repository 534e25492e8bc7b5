"""The ports of a node, its identity, its two kinds of time, its chance, and what it tells its operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NewType

import numpy as np
from numpy.typing import NDArray

from tickwheel.replication.ports import Clock, Executor, Network, Random
from tickwheel.storage.disk import Disk
from tickwheel.storage.owner import Owner

ClusterMs = NewType("ClusterMs", int)
"""A moment of the cluster clock, in ms since 1970. Due times and leases go by it. It is unknown at first, and may be
set back until somebody has acted by it."""
SteadyMs = NewType("SteadyMs", int)
"""A moment of this machine's monotonic clock, in ms, for measuring waits. It advances evenly and means nothing to other
nodes."""


@dataclass(frozen=True, slots=True)
class Now:
    """The moment of a tick, and what the node may do in it."""

    cluster_ms: ClusterMs
    steady_ms: SteadyMs
    acting: bool
    """See `Kernel.may_act`."""
    dispatching: bool
    """The cluster's time is certain enough to dispatch by it."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Everything outside the core that it uses: clock, disk, threads, chance."""

    disk: Disk
    clock: Clock
    executor: Executor
    """Runs reads, merges and checkpoints."""
    sync_executor: Executor
    """Runs the journal's fdatasync, so that it never waits behind a read."""
    network: Network
    random: Random


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    cluster_id: str
    node_id: str
    wheel_group: int = 0
    disk_uuid: str = ""

    @property
    def owner(self) -> Owner:
        """The data directory that this node's files name as theirs."""
        return Owner(self.cluster_id, self.node_id, self.disk_uuid)


@dataclass(frozen=True, slots=True)
class Reported:
    """A line for the operator; `level` is the name of a logger's method."""

    level: str
    event: str
    fields: dict[str, object] = field(default_factory=dict)


FRACTION_BITS = 53
"""Bits of a random fraction: as many as a float holds exactly."""


def fractions(count: int, random_bits: Callable[[int], int]) -> NDArray[np.float64]:
    """Random numbers from 0 to below 1."""
    drawn = np.frombuffer(random_bits(64 * count).to_bytes(8 * count, "little"), "<u8")
    return (drawn >> np.uint64(64 - FRACTION_BITS)) / float(1 << FRACTION_BITS)
