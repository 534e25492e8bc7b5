"""The interface that a part of a node's core may use. A part never sees the core that composes it.

A part reads the kernel. It changes things through the proposer (which writes the log), the background and `fatal`.
Everything here is used on the thread that drives the core.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.proposer import Proposer
from tickwheel.node.core.serving import Serving
from tickwheel.node.core.work import Background
from tickwheel.node.core.world import NodeIdentity, Reported, SteadyMs
from tickwheel.node.failure import Failure, not_master, refuse
from tickwheel.node.state.machine import StateMachine
from tickwheel.replication.cluster_clock import ClusterClock
from tickwheel.replication.log import ReplicatedLog
from tickwheel.replication.ports import Executor
from tickwheel.storage.disk import Disk
from tickwheel.wheel.engine import Wheel

PASSED_OVER_MAX = 1_000


@dataclass(slots=True)
class Applied:
    """How far this process has applied the log. Only the core's listener changes it."""

    index: int
    """Of the newest applied entry."""
    term: int
    """Of that entry."""
    stamped_ms: int = 0
    """Latest stamp among the entries; cluster time."""
    passed_over: deque[int] = field(default_factory=lambda: deque(maxlen=PASSED_OVER_MAX))
    """Indexes of entries that nobody can decode, which this process passed over like every node: for the server."""


class Kernel(Protocol):
    """Implemented by `NodeCore`. Parts are made before the log, so a part keeps the kernel and reads `log` only when it
    works, never in its constructor."""

    config: CoreConfig
    identity: NodeIdentity
    clock: ClusterClock
    state: StateMachine
    wheel: Wheel
    log: ReplicatedLog
    proposer: Proposer
    background: Background
    serving: Serving
    report: Callable[[Reported], None]
    """Tells the operator a line."""
    disk: Disk
    executor: Executor
    random_bits: Callable[[int], int]
    refusal: Callable[[], Failure | None]
    """Why this node cannot serve a client's request now; None if it can."""
    recover_to: int
    """Last index of the journal when this process started."""
    stopped: bool
    """The core was stopped and takes no part any more."""

    applied: Applied

    @property
    def recovering(self) -> bool:
        """The replay may not have reached `recover_to` yet."""
        ...

    # -- whether it may

    @property
    def leading(self) -> bool:
        """Master, with its own lead command applied: requests are served."""
        ...

    @property
    def term(self) -> int:
        """Newest Raft term that this node knows of."""
        ...

    def may_act(self) -> bool:
        """Whether this node is master, holds its lease and is not handing over. Only then may it send anything that
        claims to be current."""
        ...

    def require_master(self) -> None:
        """Raise RequestError if there is a `refusal`."""
        ...

    # -- time beside the cluster's, and the end

    def steady_ms(self) -> SteadyMs:
        """Milliseconds for measuring waits: steady even when the cluster's time jumps."""
        ...

    def monotonic_ns(self) -> int:
        """The clock behind `steady_ms`, in nanoseconds."""
        ...

    def fatal(self, reason: str, error: BaseException | None = None) -> None:
        """Stop the process: the state is impossible, or the disk cannot be relied on.

        `error`: of a worker's work that failed and left the state sound. If it is damage, another node leads first.
        """
        ...


def not_current(kernel: Kernel) -> Failure | None:
    """As `Kernel.refusal`, also if this node has lost its lease: another may lead by now and have what is missing here.
    Asked before a caller is told that something does not exist, or given what no entry of the log decides."""
    refusal = kernel.refusal()
    return not_master(None, None) if refusal is None and not kernel.log.lease_held() else refusal


def told_by_master(kernel: Kernel, refusal: Failure | None) -> Failure | None:
    """The refusal by a right or limit that can be changed, as this node may give it: if it is `not_current` it may know
    an earlier one, and leaves the refusal to the master."""
    return None if refusal is None else not_current(kernel) or refusal


def require_current(kernel: Kernel) -> None:
    """Raise RequestError if this node is `not_current`."""
    refuse(not_current(kernel))
