"""The core of a node: everything that decides, on one thread, without I/O of its own.

Composes the replicated log, the state machine, the wheel and the parts (parts.py). Input comes as calls (peer frames,
requests to the parts, `tick`), output leaves through the ports. The server process and the simulation drive the same
class. The log reports to the core through `CoreListener`.

Every callback given to a method is called exactly once, on the thread that drives the core. The driver
calls `tick` after any input, unless `receive` returned False, and no later than the time that the last `tick` returned.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from google.protobuf.message import DecodeError

from tickwheel.node.core.checkpoint import Checkpointer, Restored, restore
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.kernel import Applied, Kernel
from tickwheel.node.core.parts import IDLE_MS_MAX, Parts
from tickwheel.node.core.promise import Promise
from tickwheel.node.core.proposer import Proposer
from tickwheel.node.core.schedule.deleting import has_removed
from tickwheel.node.core.serving import OwnWorkError, Serving
from tickwheel.node.core.stagger import Stagger
from tickwheel.node.core.work import Background
from tickwheel.node.core.world import ClusterMs, NodeIdentity, Now, Ports, Reported, SteadyMs
from tickwheel.node.failure import Failure, refuse
from tickwheel.node.state.machine import AnyResult
from tickwheel.node.state.results import AdminResult, DispatchResult, SweepResult
from tickwheel.node.state.schema import command_problem, read_entry
from tickwheel.proto import admin_pb2
from tickwheel.proto.log_pb2 import Command, LogEntry
from tickwheel.proto.parsing import wants_memory
from tickwheel.proto.peer_pb2 import PeerFrame
from tickwheel.replication.cluster_clock import ClusterClock
from tickwheel.replication.log import ApplyLaterError, LogListener, LogStatus, Member, ReplicatedLog
from tickwheel.replication.ports import Executor
from tickwheel.storage.disk import DiskError

SLOT_MS_DEFAULT = 1_000

_OF_THE_LOG = frozenset(("append_entries", "append_result", "request_vote", "vote", "timeout_now", "ping", "pong"))
"""Frames that concern the log alone: parts look only if it changes what they act by (`Parts.resting`)."""

P = ParamSpec("P")
T = TypeVar("T")
MakeLog = Callable[[LogListener, Restored], ReplicatedLog]


class _Workers:
    """An executor whose answers are the node's own work (`Serving.attempt`)."""

    def __init__(self, executor: Executor, serving: Serving) -> None:
        self._executor = executor
        self._serving = serving

    def submit(self, work: Callable[[], T], done: Callable[[T | None, BaseException | None], None]) -> None:
        """As Executor.submit."""
        attempt = self._serving.attempt
        self._executor.submit(
            work, lambda result, error: attempt("the end of a worker's work", None, done, result, error)
        )


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
        self.parts: Parts
        self.config, self.identity = config, identity
        self.random_bits: Callable[[int], int] = ports.random.getrandbits
        self.serving = Serving(self.random_bits)
        ports = self._ports = replace(ports, executor=_Workers(ports.executor, self.serving))
        self.disk, self.executor = ports.disk, ports.executor
        self._on_fatal, self.report = on_fatal, report
        self.started_ns = ports.clock.monotonic_ns()
        self.stopped = False
        self.lacks_checkpoint = ""
        """Why this node could not keep the checkpoint that it needs, for its operator. Empty: it needs none, or is
        copying it. The node's host knows."""
        self._stirred = True
        """A frame or connection has come that concerns parts, so that they look at the next tick."""
        self.recover_to, self._recovered = 0, False
        self.clock = ClusterClock(ports.clock, identity.node_id, config.clock)
        slot_ms = (first_command.slot_ms if first_command is not None else 0) or SLOT_MS_DEFAULT
        restored = restore(ports.disk, config, slot_ms, identity.wheel_group)
        self._restored_members = restored.members
        self.state, self.wheel = restored.state, restored.wheel
        self.applied = Applied(restored.applied_index, restored.applied_term)
        stagger = partial(Stagger, identity.node_id, lambda: self.parts.voters())
        self.background = Background(
            ports.executor,
            self.wheel,
            self.fatal,
            self.serving,
            lambda e: self.parts.index_repair.damaged(e),
            lambda e: self.parts.index_repair.lost(e),
            stagger(),
        )
        self.proposer = Proposer(
            config, identity.wheel_group, self.clock.now_ms, self.serving, self.state.sweeps.stamp_floor_ms
        )
        self.checkpointer = Checkpointer(self, restored, stagger())
        self.parts = Parts(self, ports, members, first_command, self.checkpointer, on_checkpoint_needed)
        self.refusal = self.parts.mastership.refusal
        self.listener = CoreListener(self, self.applied, self.parts, self.checkpointer, on_checkpoint_needed)
        self.log = make_log(self.listener, restored)
        self.proposer.attach(self.log, self.parts.publisher)

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
        self.parts.events.stop()
        self.log.stop()

    def fatal(self, reason: str, error: BaseException | None = None) -> None:
        """Stop the process; see `Kernel`."""
        if wants_memory(error):  # whoever drives the node ends it, in a way that it is started again
            raise OwnWorkError(reason) from error
        if not self.serving.damaged(reason, error):
            self.stop()
            self._on_fatal(reason)

    @property
    def writing(self) -> bool:
        """Another thread is writing to files of a checkpoint or the journal. This can outlast `stop`."""
        return self.checkpointer.running or self.background.jobs_running > 0 or self.log.fsyncing

    def tick(self, *, woken: bool = True) -> int:
        """Do what is due; returns the monotonic_ns at which the next call is needed at the latest. `woken` False: no
        input has come since the last call but frames, and answers of the executor that syncs the journal."""
        parts, serving = self.parts, self.serving
        if serving.damage and not self.stopped:
            parts.mastership.leave(serving.damage)
        if self.stopped:
            return self.monotonic_ns() + IDLE_MS_MAX * 1_000_000
        # While the node is stuck, its parts do not tick, however long ago they asked to.
        log_wants_ns = self.log.tick(None if serving.stuck else parts.rests_until_ns)
        if serving.stuck:
            first = parts.mastership.leave_stuck()
            return self.monotonic_ns() if first else log_wants_ns  # at once: the log begins the handover
        now_ns = self.monotonic_ns()
        if not (woken or self._stirred) and parts.resting(now_ns):
            return min(log_wants_ns, parts.rests_until_ns)  # the log had something to do by itself
        self._stirred = False
        parts.founding.tick(SteadyMs(now_ns // 1_000_000), self.state.members, self.log.send_beside)
        self.clock.tick(now_ns, parts.voters, self.log.send_beside)
        if self.leading and not parts.delivery.active and self.clock.known:
            parts.begin_mastership()
        now = self._now(now_ns)
        for part in parts.driven.ticking:
            part.tick(now)
        if parts.mastership.elected:
            parts.mastership.tick()
            # Send the new proposals at once instead of at the next timer.
            self.proposer.flush()
            log_wants_ns = min(log_wants_ns, self.log.tick())
            if serving.stuck:
                return self.monotonic_ns()
            now = self._now(now_ns)
            if parts.delivery.has_news:
                parts.delivery.tick(now)
                self.proposer.flush()
        self.background.pump(now, self.applied.index)
        parts.upkeep(now)
        if not self.wheel.ingestion.absorbing:
            self.checkpointer.tick(now)
            if self.checkpointer.running:
                parts.events.flush()  # no replay brings back the events of entries that the checkpoint covers
        return min(log_wants_ns, parts.ticked(now, self.background.wait_ms(now), self.checkpointer.wait_ms(now)))

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

    def require_master(self) -> None:
        refuse(self.refusal())

    # -- peers

    def receive(self, peer_id: str, frame: PeerFrame) -> bool:
        """Take a frame from a peer. The caller has checked the peer's identity. False: the next `tick` may wait for the
        time that the last one returned."""
        waits_for_time = not self.clock.may_dispatch()
        wanted = self.log.receive(peer_id, frame)
        if wanted and frame.WhichOneof("body") in _OF_THE_LOG and not waits_for_time:
            return True
        stirred = wanted or waits_for_time or bool(self.serving.stuck)
        self._stirred = self._stirred or stirred
        return stirred

    def peer_connected(self, peer_id: str) -> None:
        """The connection to a peer is open."""
        self._stirred = True
        self.log.peer_connected(peer_id)
        self.parts.founding.connected(peer_id, self.log.send_beside)
        self.clock.peer_connected(peer_id)

    def peer_disconnected(self, peer_id: str) -> None:
        """The connection to a peer broke; frames in flight are lost."""
        self._stirred = True
        self.parts.delivery.leases.feed.forget_peer(peer_id)
        self.log.peer_disconnected(peer_id)

    # -- progress and time, as in `Kernel`

    @property
    def recovering(self) -> bool:
        if not self._recovered:
            self._recovered = self.log.status().caught_up
        return not self._recovered

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


BUFFERS_APPLIED_MAX = 3
"""Arrival buffers full of what is not merged, from which on a node applies no more of its log until the disk has caught
up; more than what a master stops accepting at (publisher.BUFFERS_ACCEPTED_MAX)."""


def _attempted(
    call: Callable[Concatenate[CoreListener, P], T | None],
) -> Callable[Concatenate[CoreListener, P], T | None]:
    """The call as the node's own work: damage makes the node stuck, and None is returned. The log would end the node at
    once for what it cannot tell from damage of its own."""

    @wraps(call)
    def attempted(self: CoreListener, /, *args: P.args, **named: P.kwargs) -> T | None:
        return self.serving.attempt("a call of the log", None, call, self, *args, **named)

    return attempted


class CoreListener:
    """The core's side of its log: applies entries, and passes the log's other events to the parts they concern.

    Implements LogListener. Owns the effects of an applied command outside the state: counts, notes, members, and the
    parts that have to look again. Only the state machine changes the state itself. Only the log calls this, on the
    thread that drives the core.
    """

    def __init__(
        self,
        core: Kernel,
        applied: Applied,
        parts: Parts,
        checkpointer: Checkpointer,
        checkpoint_needed: Callable[[str], None],
    ) -> None:
        """`checkpoint_needed`: this node must start again from the checkpoint of this peer."""
        self._core = core
        self.serving = core.serving
        self._applied = applied
        self._parts = parts
        self._checkpointer = checkpointer
        self._checkpoint_needed = checkpoint_needed

    def apply(self, index: int, term: int, command: bytes) -> object:
        """Apply an entry and note its effects. One that does not even begin like an entry stops the node."""
        core = self._core
        if not command:
            self._nothing(index, term)
            return []
        try:
            entry = read_entry(command)
        except DecodeError as error:
            core.fatal(f"log entry {index} cannot be read ({error}): was it written by a newer version?")
            return []
        if entry is None:
            self._applied.passed_over.append(index)
            self._nothing(index, term)
            return []
        applied, parts = self._applied, self._parts
        before = applied.index, applied.term
        try:
            if not parts.index_repair.ready(entry):
                raise ApplyLaterError(f"entry {index} waits for rows of an index that are lost here")
            applied.index, applied.term = index, term
            applied.stamped_ms = max(applied.stamped_ms, entry.stamped_ms)
            results = core.state.apply(index, term, entry)
            for each, result in zip(entry.commands, results, strict=True):
                # Nothing replicated depends on counts and events. Without `side`, every node would end at this entry by
                # a mistake in them, and again at each start.
                core.serving.side(parts.topic_pending.spoil, self._count, index, entry, each, result)
                self._follow(each, result)
        except DiskError as error:
            applied.index, applied.term = before
            core.serving.stick(f"log entry {index} could not be applied: {error}", error)
            raise ApplyLaterError(core.serving.stuck) from error
        return results

    def _count(self, index: int, entry: LogEntry, command: Command, result: AnyResult) -> None:
        """Count an applied command, and record its events unless they are recorded already."""
        parts = self._parts
        published = parts.counts.applied(command, result)
        parts.topic_pending.applied(command, result, published)
        if parts.events.enabled and index > parts.events.noted_to:
            parts.events.applied(index, self._core.clock.now_ms(), entry, command, result)

    def _follow(self, command: Command, result: AnyResult) -> None:
        """The effects of an applied command on the parts."""
        kind = command.WhichOneof("body")
        if kind == "dispatch":
            if isinstance(result, DispatchResult):
                self._parts.delivery.dispatched(result)
            self._core.clock.judge_cursor(command.dispatch.due_ms)
        elif kind == "lead":
            self._parts.mastership.lead_was_applied(command.lead)
        elif kind == "admin" and isinstance(result, AdminResult):
            self._administered(command.admin.WhichOneof("body") or "", result)
        elif kind == "sweep" and isinstance(result, SweepResult) and has_removed(result) and self._core.leading:
            self._parts.filter_skips.refresh()
            self._parts.delivery.administered()

    def _nothing(self, index: int, term: int) -> None:
        """An entry without an effect."""
        self._applied.index, self._applied.term = index, term
        self._core.state.note_applied(index, term)

    def _administered(self, kind: str, result: AdminResult) -> None:
        core = self._core
        if result.members is not None:
            core.log.set_members(result.members)
            self._parts.founding.look_again()
        if core.leading and (result.unsettled_removed or result.settings is not None):
            self._parts.delivery.windows_moved()
        if not core.leading or kind == "create_topic" or (result.group is None and result.topic is None):
            return
        if kind == "create_group" and result.group is not None:
            # The most frequent one, since consumers create: it changes nothing of the others.
            self._parts.filter_skips.subscribed(result.group.group_id)
            self._parts.delivery.subscribed(result.group.group_id)
        else:
            self._parts.filter_skips.refresh()
            self._parts.delivery.administered()

    problem_of = staticmethod(command_problem)
    """Why this node cannot apply a command. No command of a newer version is half understood."""

    @_attempted
    def role_changed(self, status: LogStatus) -> None:
        """Lead, follow or step down. Ignored once the core has stopped."""
        if not self._core.stopped:
            self._parts.mastership.role_changed(status)

    @_attempted
    def sync_out(self, peer_id: str) -> PeerFrame | None:
        """The sync of this master for one slave; None: nothing to send now."""
        return self._parts.sync.outgoing(peer_id)

    @_attempted
    def sync_unsent(self, peer_id: str) -> None:
        """The sync did not leave: what it told of leases is told again."""
        self._parts.delivery.leases.feed.unsent(peer_id)

    @_attempted
    def sync_in(self, peer_id: str, frame: PeerFrame) -> PeerFrame | None:
        """Take in a sync, and the master's clock with it. Returns the answer."""
        self._core.clock.heard_master(frame.sync.clock_ms)
        return self._parts.sync.incoming(peer_id, frame)

    @_attempted
    def beside_in(self, peer_id: str, frame: PeerFrame) -> PeerFrame | None:
        """Take a frame about bundles, records, the founding, or the clock of a machine. Returns the answer, if any."""
        core = self._core
        if core.serving.stuck:
            return None
        kind = frame.WhichOneof("body")
        if kind == "bundle_ask":
            return self._parts.bulk.ask_in(peer_id, frame.bundle_ask)
        if kind == "bundle_piece":
            self._parts.bulk.piece_in(peer_id, frame.bundle_piece)
            return None
        if kind == "record_ask":
            self._parts.record_answers.ask_in(peer_id, frame.record_ask)
            return None
        if kind == "record_answer":
            if not frame.record_answer.units_only:
                self._parts.record_repair.answer_in(peer_id, frame.record_answer)
            self._parts.index_repair.answer_in(peer_id, frame.record_answer)
            return None
        if kind == "founding":
            return self._parts.founding.receive(peer_id, frame, core.log.send_beside)
        return core.clock.receive(peer_id, frame)

    @_attempted
    def sync_reply_in(self, peer_id: str, frame: PeerFrame) -> None:
        """Take in a slave's answer: its sync, the identity of its disk, and a sample of its clock."""
        self._parts.sync.reply(peer_id, frame)
        self._parts.members.came_with(peer_id, frame.disk_uuid)
        self._core.clock.sync_answered(peer_id, frame.sync_reply.echo_sent_ns, frame.sync_reply.clock_ms)

    def may_apply(self) -> bool:
        """Arrivals that the disk is too slow to take in wait in the journal, not in memory. Entries after a bundle wait
        until the bundle is here and read as far as it is due. While a checkpoint is captured or a digest made, in turns
        of a few milliseconds, the state must stay as it is."""
        core = self._core
        parts = self._parts
        waits = parts.index_repair.holds_log or core.wheel.ingestion.absorbing
        looks = self._checkpointer.capturing or parts.digests.making
        if core.serving.stuck or waits or looks:
            return False
        return core.wheel.holdings.buffer_bytes < BUFFERS_APPLIED_MAX * core.config.buffer_bytes_max

    def may_vote(self) -> bool:
        """False with a new disk until it is known that no member lost an old one."""
        return self._parts.founding.may_vote

    def handover_ready(self, peer_id: str) -> bool:
        """The next master must know all deliveries in flight, or it would repeat them. It must also have applied what
        this master had applied when it was asked to hand over, or it would lead and not serve."""
        # A master without an agreed time has handed out nothing.
        if not self._parts.sync.enabled or not self._parts.delivery.active:
            return True
        applied = self._parts.sync.applied_of(peer_id) >= self._parts.mastership.handed_over_index
        return applied and self._parts.delivery.leases.feed.all_heard(peer_id)

    @_attempted
    def checkpoint_needed(self, peer_id: str, applied_index: int) -> None:
        """Fetch the checkpoint of `peer_id`: the log no longer reaches back far enough."""
        self._checkpoint_needed(peer_id)

    @_attempted
    def forgot(self, peer_id: str, last_index: int, acknowledged_index: int) -> None:
        """A member came back without entries that it had acknowledged."""
        self._parts.members.forgot(peer_id, last_index, acknowledged_index)

    def damaged(self, error: DiskError) -> None:
        """The log cannot read or write its own journal: another node leads, then this one stops."""
        self.serving.stick(f"the journal met damage: {error}", error)

    def fatal(self, reason: str) -> None:
        """Stop the node, with this reason."""
        self._core.fatal(reason)
