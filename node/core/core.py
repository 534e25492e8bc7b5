"""The core of a node: everything that decides, on one thread, without I/O of its own.

Composes the replicated log, the state machine, the wheel and the parts (parts.py). Input comes as calls (peer frames,
requests to the parts, `tick`), output leaves through the ports. The server process and the simulation drive the same
class. The log reports to the core through listener.py.

Every callback given to a method is called exactly once, on the thread that drives the core. The driver
calls `tick` after any input, and no later than the time that the last `tick` returned.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tickwheel.node.core.checkpoint import Checkpointer, Restored, restore
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.listener import Applied, CoreListener
from tickwheel.node.core.parts import Parts
from tickwheel.node.core.promise import Promise
from tickwheel.node.core.proposer import Proposer
from tickwheel.node.core.serving import Serving
from tickwheel.node.core.work import Background
from tickwheel.node.core.world import ClusterMs, NodeIdentity, Now, Ports, Reported, SteadyMs
from tickwheel.node.failure import Failure, RequestError
from tickwheel.proto import admin_pb2
from tickwheel.proto.peer_pb2 import PeerFrame
from tickwheel.replication.cluster_clock import ClusterClock
from tickwheel.replication.log import LogListener, Member, ReplicatedLog
from tickwheel.replication.ports import Executor

IDLE_MS_MAX = 1_000
SLOT_MS_DEFAULT = 1_000

T = TypeVar("T")
MakeLog = Callable[[LogListener, Restored], ReplicatedLog]


class _Workers:
    """An executor whose answers are the node's own work (`Serving.attempt`)."""

    def __init__(self, executor: Executor, serving: Serving) -> None:
        self._executor = executor
        self._serving = serving

    def submit(self, work: Callable[[], T], done: Callable[[T | None, BaseException | None], None]) -> None:
        """As Executor.submit."""

        def ended(result: T | None, error: BaseException | None) -> None:
            self._serving.attempt("the end of a worker's work", None, done, result, error)

        self._executor.submit(work, ended)


class NodeCore:
    """One wheel group on one node; to its parts it is a `Kernel`."""

    def __init__(
        self,
        config: CoreConfig,
        identity: NodeIdentity,
        ports: Ports,
        first_command: admin_pb2.Settings | None,
        members: Sequence[Member],
        make_log: MakeLog,
        on_fatal: Callable[[str], None],
        on_checkpoint_needed: Callable[[str], None],
        report: Callable[[Reported], None],
    ) -> None:
        """`on_checkpoint_needed` gets the id of a peer: this node must start again from that peer's checkpoint."""
        self.log: ReplicatedLog
        self.checkpointer: Checkpointer
        self.parts: Parts
        self.config, self.identity = config, identity
        self.random_bits = ports.random.getrandbits
        self.serving = Serving(self.random_bits)
        ports = self._ports = replace(ports, executor=_Workers(ports.executor, self.serving))
        self.disk, self.executor = ports.disk, ports.executor
        self._on_fatal, self.report = on_fatal, report
        self.started_ns = ports.clock.monotonic_ns()
        self.stopped = False
        self.recover_to = 0
        self._recovered = False
        self.clock = ClusterClock(ports.clock, identity.node_id, config.clock)
        slot_ms = (first_command.slot_ms if first_command is not None else 0) or SLOT_MS_DEFAULT
        restored = restore(ports.disk, config, slot_ms, identity.wheel_group)
        self._restored_members = restored.members
        self.state, self.wheel = restored.state, restored.wheel
        self.applied = Applied(restored.applied_index, restored.applied_term)
        self.background = Background(
            ports.executor, self.wheel, self.fatal, self.serving, lambda error: self.parts.index_repair.damaged(error)
        )
        self.proposer = Proposer(
            config, identity.wheel_group, self.clock.now_ms, self.serving, lambda: self.state.sweeps.stamp_floor_ms
        )
        self.parts = Parts(
            self, ports, members, first_command, lambda: self.checkpointer.bundle_names, on_checkpoint_needed
        )
        self.listener = CoreListener(self, self.applied, self.parts, lambda: self.checkpointer, on_checkpoint_needed)
        self.log = make_log(self.listener, restored)
        self.proposer.attach(self.log, self.parts.publisher)
        self.checkpointer = Checkpointer(
            config,
            ports,
            self.state,
            self.log,
            lambda: (self.applied_index, self.applied_term),
            self.fatal,
            restored.applied_index,
            restored.bundle_names,
        )

    # -- life

    def start(self) -> None:
        """Replay the journal and join the cluster. Called once."""
        if self._restored_members:
            self.log.set_members(self._restored_members)
        self.recover_to = self.log.status().last_index
        self.parts.events.replayed_to(self.recover_to)
        self.log.start()

    def stop(self) -> None:
        """Leave the cluster and answer every waiting request. Idempotent."""
        if self.stopped:
            return
        self.parts.mastership.step_down()
        self.stopped = True
        self.parts.bulk.store.stop()
        self.parts.digests.stop()
        self.checkpointer.stop()
        self.parts.events.flush()
        self.log.stop()

    def fatal(self, reason: str, error: BaseException | None = None) -> None:
        """Stop the process; see `Kernel`."""
        if not self.serving.damaged(reason, error):
            self.stop()
            self._on_fatal(reason)

    @property
    def writing(self) -> bool:
        """Another thread is writing to files of a checkpoint or the journal. This can outlast `stop`."""
        return self.checkpointer.running or self.background.jobs_running > 0 or self.log.fsyncing

    def tick(self) -> int:
        """Do what is due; returns the monotonic_ns at which the next call is needed at the latest."""
        parts, serving = self.parts, self.serving
        if serving.damage and not self.stopped:
            parts.mastership.leave(serving.damage)
        if self.stopped:
            return self.monotonic_ns() + IDLE_MS_MAX * 1_000_000
        log_wants_ns = self.log.tick()
        if serving.stuck:
            first = parts.mastership.leave_stuck()
            return self.monotonic_ns() if first else log_wants_ns  # at once: the log begins the handover
        now_ns = self.monotonic_ns()
        parts.founding.tick(SteadyMs(now_ns // 1_000_000), self.state.members, self.log.send_beside)
        self.clock.tick(now_ns, parts.voters, self.log.send_beside)
        if self.leading and not parts.delivery.active and self.clock.known:
            parts.begin_mastership()
        now = self._now(now_ns)
        for part in parts.ordered:
            part.tick(now)
        if parts.mastership.elected:
            parts.mastership.tick()
            # Send the new proposals at once instead of at the next timer.
            self.proposer.flush()
            log_wants_ns = min(log_wants_ns, self.log.tick())
            if serving.stuck:
                return self.monotonic_ns()
            if parts.delivery.has_news:
                parts.delivery.tick(self._now(now_ns))
                self.proposer.flush()
        self.background.pump(now, self.applied_index)
        parts.upkeep(now)
        if not self.wheel.ingestion.absorbing:
            self.checkpointer.tick(now)
            if self.checkpointer.running:
                parts.events.flush()  # no replay brings back the events of entries that the checkpoint covers
        now = self._now(now_ns)
        waits = (*parts.waits_ms(now), self.background.wait_ms(now), self.checkpointer.wait_ms(now))
        wait_ms = min(IDLE_MS_MAX, *(wait for wait in waits if wait is not None))
        wake_ns = self.monotonic_ns() + max(0, wait_ms) * 1_000_000
        return min(log_wants_ns, wake_ns, self.clock.wanted_ns())

    def _now(self, now_ns: int) -> Now:
        cluster_ms, steady_ms = ClusterMs(self.clock.at_ms(now_ns)), SteadyMs(now_ns // 1_000_000)
        return Now(cluster_ms, steady_ms, self.may_act(), self.clock.may_dispatch(now_ns))

    # -- mastership, as in `Kernel`

    @property
    def leading(self) -> bool:
        return self.parts.mastership.begun

    @property
    def term(self) -> int:
        return self.parts.mastership.term

    def may_act(self) -> bool:
        return self.leading and not self.parts.mastership.handing_over and self.log.lease_held()

    def refusal(self) -> Failure | None:
        return self.parts.mastership.refusal()

    def require_master(self) -> None:
        failure = self.parts.mastership.refusal()
        if failure is not None:
            raise RequestError(failure)

    # -- peers

    def receive(self, peer_id: str, frame: PeerFrame) -> None:
        """Take a frame from a peer. The caller has checked the peer's identity."""
        self.log.receive(peer_id, frame)

    def peer_connected(self, peer_id: str) -> None:
        """The connection to a peer is open."""
        self.log.peer_connected(peer_id)
        self.parts.founding.connected(peer_id, self.log.send_beside)
        self.clock.peer_connected(peer_id)

    def peer_disconnected(self, peer_id: str) -> None:
        """The connection to a peer broke; frames in flight are lost."""
        self.parts.delivery.feed.forget_peer(peer_id)
        self.log.peer_disconnected(peer_id)

    # -- progress and time, as in `Kernel`

    @property
    def recovering(self) -> bool:
        if not self._recovered:
            self._recovered = self.log.status().caught_up
        return not self._recovered

    @property
    def applied_index(self) -> int:
        return self.applied.index

    @property
    def applied_term(self) -> int:
        return self.applied.term

    @property
    def stamped_ms(self) -> int:
        return self.applied.stamped_ms

    def monotonic_ns(self) -> int:
        return self._ports.clock.monotonic_ns()

    def steady_ms(self) -> SteadyMs:
        return SteadyMs(self._ports.clock.monotonic_ns() // 1_000_000)


def serve(
    core: NodeCore,
    request: Coroutine[Promise[Any], None, T],
    done: Callable[[T | Failure], None],
    *,
    master: bool = True,
) -> None:
    """Run the coroutine of a request to its end, as `Serving.start`. `master`: unless this node can serve as master,
    the request is refused and takes no step."""
    try:
        failure = core.refusal() if master else None
    except Exception:
        request.close()
        raise
    if failure is None:
        core.serving.start(request, done)
    else:
        request.close()
        done(failure)
