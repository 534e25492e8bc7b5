"""The core of a node: everything that decides, on one thread, without I/O of its own.

Composes the replicated log, the state machine, the wheel, dispatcher and delivery. Input comes as
calls (peer frames, client requests, `tick`), output leaves through the ports. The
server process and the simulation drive the same class. The log reports to the core through listener.py.

Every callback given to a method is called exactly once, on the thread that drives the core. The driver
calls `tick` after any input, and no later than the time that the last `tick` returned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from tickwheel.node.core.announcements import (
    Announcements,
    Delivered,
    Dispatched,
    DispatchFailed,
    PushedAhead,
    Unreadable,
)
from tickwheel.node.core.bulk import BulkDesk
from tickwheel.node.core.bundle_store import BundleStore
from tickwheel.node.core.checkpoint import Checkpointer, Restored, restore
from tickwheel.node.core.cold import ColdDesk
from tickwheel.node.core.config import CoreConfig, DeliveryOrder
from tickwheel.node.core.consumers import ConsumerDesk
from tickwheel.node.core.counters import Totals
from tickwheel.node.core.creations import Creations
from tickwheel.node.core.dead import DeadDesk
from tickwheel.node.core.deleting import Deleter
from tickwheel.node.core.delivery import Delivery
from tickwheel.node.core.disk_room import DiskRoom
from tickwheel.node.core.dispatcher import Dispatcher, Phase
from tickwheel.node.core.events import Events
from tickwheel.node.core.failure import Failure, not_master, refuse
from tickwheel.node.core.filter_sweep import FilterSweep
from tickwheel.node.core.flow import FlowControl
from tickwheel.node.core.founding import FoundingDesk
from tickwheel.node.core.lease_file import LeaseFile, read_leases
from tickwheel.node.core.listener import Applied, CoreListener
from tickwheel.node.core.membership import MemberDesk
from tickwheel.node.core.mending import Mending
from tickwheel.node.core.part import Part
from tickwheel.node.core.pending import PendingDesk
from tickwheel.node.core.pins import PinDesk
from tickwheel.node.core.proposer import Proposer
from tickwheel.node.core.publisher import Publisher
from tickwheel.node.core.push import PushAhead
from tickwheel.node.core.record_answers import RecordAnswers
from tickwheel.node.core.reign import Reign
from tickwheel.node.core.requests import RequestDesk
from tickwheel.node.core.retention import Retention
from tickwheel.node.core.salvage import Salvage
from tickwheel.node.core.senders import Senders
from tickwheel.node.core.serving import Serving
from tickwheel.node.core.settled import SettledDesk
from tickwheel.node.core.staging import StagingDesk
from tickwheel.node.core.sweeper import Sweeper
from tickwheel.node.core.sync import SyncState
from tickwheel.node.core.synced import SyncedFile, read_synced
from tickwheel.node.core.topic_pending import TopicPending
from tickwheel.node.core.topic_rates import DELIVERED, DISPATCHED, TopicRates
from tickwheel.node.core.trace import Tracer
from tickwheel.node.core.work import Background
from tickwheel.node.core.world import ClusterMs, NodeIdentity, Now, Ports, SteadyMs
from tickwheel.proto import admin_pb2, common_pb2
from tickwheel.proto.peer_pb2 import PeerFrame
from tickwheel.replication.cluster_clock import ClusterClock
from tickwheel.replication.log import LogListener, Member, ReplicatedLog
from tickwheel.storage.errors import CorruptFileError
from tickwheel.wheel.units import Units

UPKEEP_PERIOD_MS = 1_000
IDLE_MS_MAX = 1_000
SLOT_MS_DEFAULT = 1_000

MakeLog = Callable[[LogListener, Restored], ReplicatedLog]


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
    ) -> None:
        """`on_checkpoint_needed` gets the id of a peer: this node must start again from that peer's checkpoint."""
        self.mending: Mending
        self.sync: SyncState
        self.checkpointer: Checkpointer
        self.log: ReplicatedLog
        self.config = config
        self.identity = identity
        self._ports = ports
        self.disk = ports.disk
        self.executor = ports.executor
        self.random_bits = ports.random.getrandbits
        self._first_settings = first_command
        self._first_members = list(members)
        self._on_fatal = on_fatal
        self._started_ns = ports.clock.monotonic_ns()
        self._next_upkeep_ms = 0
        self._stopped = False
        self.recover_to = 0
        self._recovered = False

        # Used by every part.
        self.announcements = Announcements()
        self.clock = ClusterClock(ports.clock, identity.node_id, config.clock)
        slot_ms = (first_command.slot_ms if first_command is not None else 0) or SLOT_MS_DEFAULT
        restored = restore(ports.disk, config, slot_ms, identity.wheel_group, self._dispatched)
        self._restored_members = restored.members
        self.state, self.wheel = restored.state, restored.wheel
        self._applied = Applied(restored.applied_index, restored.applied_term)
        bundle_store = BundleStore(ports.disk, ports.executor, self.steady_ms, self.fatal)
        self.serving = Serving(self.random_bits)
        self.serving.on_damage = self._met_damage
        self._damage = ""
        """Which of this node's files is damaged; the node then leaves the cluster's service. Empty: no damage known."""
        self._leaving = False
        self.background = Background(
            ports.executor, self.wheel, self.fatal, self.serving, lambda error: self.mending.damaged(error)
        )
        self.proposer = Proposer(
            config,
            identity.wheel_group,
            self.clock.now_ms,
            self.serving,
            lambda: self.state.sweeps.stamp_floor_ms,
        )

        # Accepting schedules.
        self.creations = Creations(self.state, self.steady_ms)
        self.topic_pending = TopicPending(self)
        self.senders = Senders(
            self.state,
            lambda: self.leading and self.log.lease_held(),
            lambda level: self.sync.all_understand(level, self._peer_ids()),
        )
        self.flow = FlowControl(self, self.topic_pending)
        self.disk_room = DiskRoom(
            ports.disk,
            config.disk_high_percent,
            self._member_ids,
            lambda: self.sync.full_peers(self._member_ids()),
            lambda: self.sync.roomy_peers(self._member_ids()),
        )
        self.publisher = Publisher(self, self.creations, self.senders, self.flow, self.disk_room)

        # Dispatch and delivery.
        push = PushAhead(self) if config.delivery_order is DeliveryOrder.PUSH_FIRST else None
        self.dispatcher = Dispatcher(self, push)
        self.delivery = Delivery(self, ports.random.random, push)
        self.filter_sweep = FilterSweep(
            self.state, self.proposer, self.background, self.delivery.wake_group, self.fatal
        )
        self.retention = Retention(self)

        # Events, counts, and what the other members are told.
        self.events = Events(ports.disk, ports.executor, self.state, identity.node_id, config.events_bytes_max)
        self.tracer = Tracer(self.events, identity, self.serving)
        self.topic_rates = TopicRates()
        self.totals = Totals()
        self.sync = SyncState(self, self.delivery, self.disk_room, lambda: bool(self.bulk.waiting))
        synced = read_synced(ports.disk)
        self.sync.remember(synced)
        self.synced_file = SyncedFile(ports.disk, ports.executor, synced)
        self.delivery.heard.hear(read_leases(ports.disk), complete=True)
        self.lease_file = LeaseFile(ports.disk, ports.executor)

        # Damaged records: found here, or asked for by other members.
        self.salvage = Salvage(self, self.delivery)
        self.record_answers = RecordAnswers(self)
        self.mending = Mending(self)

        # Whether this node may vote.
        self.founding = FoundingDesk(
            ports.disk, identity, [member.node_id for member in self._first_members], self.fatal
        )

        # Requests of clients and operators.
        self.reign = Reign(self, self.sync, self._create_cluster, self._begin_reign, self._end_reign)
        self.members = MemberDesk(self, self.reign.transfer, self.founding, self.sync)
        self.cold = ColdDesk(self, self.disk_room)
        self.bulk = BulkDesk(
            self,
            bundle_store,
            self.disk_room,
            self.cold,
            lambda: self.checkpointer.bundle_names,
            on_checkpoint_needed,
        )
        self.pending = PendingDesk(self)
        self.sweeper = Sweeper(self)
        self.deleter = Deleter(self, self.pending, self.sweeper)
        self.requests = RequestDesk(
            self, self.senders, self.publisher, self.creations, self.cold, self.pending, self.members
        )
        self.staging = StagingDesk(self, self.publisher, self.disk_room, self.requests)
        self.consumers = ConsumerDesk(self, self.delivery, self.requests)
        self.dead = DeadDesk(self)
        self.pins = PinDesk(self)
        self.settled = SettledDesk(self)

        self.parts: tuple[Part, ...] = (
            self.dispatcher,
            self.proposer,
            self.publisher,
            self.flow,
            self.topic_pending,
            self.staging,
            self.members,
            self.sweeper,
            self.deleter,
            self.bulk,
            self.delivery,
            self.salvage,
            self.consumers,
            self.filter_sweep,
            self.retention,
            self.mending,
            self.events,
        )
        """In the order in which parts tick and end; they begin in reverse order."""
        self._subscribe()
        self.listener = CoreListener(
            self,
            self._applied,
            self.reign,
            self.delivery,
            self.filter_sweep,
            self.sync,
            lambda: self.checkpointer,
            on_checkpoint_needed,
            self.bulk,
            self.record_answers,
            self.salvage,
            self.mending,
            self.events,
            self.totals,
            self.topic_rates,
            self.topic_pending,
            self.founding,
            self.members,
        )
        self.log = make_log(self.listener, restored)
        self.proposer.attach(self.log, self.publisher)
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

    def _subscribe(self) -> None:
        """Subscribe the parts to announcements. Subscribers are called in the order of these lines."""
        hear = self.announcements.subscribe
        # This runs in the middle of apply. Unguarded, a mistake with one topic's messages would stop every node, and
        # again at each replay.
        hear(Dispatched, lambda what: self.serving.side(lambda: self._note_dispatched(what)))
        hear(Dispatched, self._hand_out)
        hear(PushedAhead, self.delivery.on_pushed)
        if self.delivery.push is not None:
            hear(DispatchFailed, self.delivery.unpush)
        hear(Delivered, lambda what: self.topic_rates.add(what.topic_id, DELIVERED, len(what.batch.ids) // 8))
        if self.events.enabled:
            hear(Delivered, lambda what: self.events.delivered(what.now_ms, what.consumer, what.batch))
        hear(Unreadable, self.salvage.add)

    # -- life

    def start(self) -> None:
        """Replay the journal and join the cluster. Called once."""
        if self._restored_members:
            self.log.set_members(self._restored_members)
        self.recover_to = self.log.status().last_index
        self.events.noted_to = min(self.events.noted_to, self.recover_to)
        self.log.start()

    def stop(self) -> None:
        """Leave the cluster and answer every waiting request. Idempotent."""
        if self._stopped:
            return
        self.reign.step_down()
        self._stopped = True
        self.bulk.store.stop()
        self.checkpointer.stop()
        self.events.flush()
        self.log.stop()

    @property
    def recovering(self) -> bool:
        """The replay may not yet have reached the point where this node stopped."""
        if not self._recovered:
            self._recovered = self.log.status().caught_up
        return not self._recovered

    @property
    def writing(self) -> bool:
        """Another thread is writing to files of a checkpoint or the journal. This can outlast `stop`."""
        return self.checkpointer.running or self.background.jobs_running > 0 or self.log.fsyncing

    @property
    def leading(self) -> bool:
        """Master, with its own lead command applied: requests are served."""
        return self.reign.begun

    @property
    def term(self) -> int:
        """Newest Raft term that this node knows of."""
        return self.reign.term

    @property
    def handing_over(self) -> bool:
        """A planned handover is under way: this node begins nothing new."""
        return self.reign.handing_over

    @property
    def leader_changes(self) -> int:
        """How often this node became master or ceased to be master."""
        return self.reign.changes

    def _create_cluster(self) -> None:
        members = [replace(member, disk_uuid=self.founding.disk_of(member.node_id)) for member in self._first_members]
        self.requests.create_cluster(self._first_settings, members)

    def _begin_reign(self) -> None:
        """Begin every part. The node leads, has applied everything before its term, and knows the cluster's time."""
        self.clock.begin_reign()
        now_ms = ClusterMs(self.clock.now_ms())
        for part in reversed(self.parts):
            part.begin(self.term, now_ms)

    def _end_reign(self, failure: Failure) -> None:
        """End every part: the wheel stops at once, and waiting callers get `failure`."""
        self.clock.end_reign()
        for part in self.parts:
            part.end(failure)

    def tick(self) -> int:
        """Do what is due; returns the monotonic_ns at which the next call is needed at the latest."""
        if self._stopped:
            return self._ports.clock.monotonic_ns() + IDLE_MS_MAX * 1_000_000
        if self._damage and not self._leaving:
            self._leave()
            if self._stopped:
                return self._ports.clock.monotonic_ns() + IDLE_MS_MAX * 1_000_000
        log_wants_ns = self.log.tick()
        now_ns = self._ports.clock.monotonic_ns()
        self.founding.tick(SteadyMs(now_ns // 1_000_000), self.state.members, self.log.send_beside)
        self.clock.tick(now_ns, self._member_ids, self.log.send_beside)
        if self.leading and not self.delivery.reigning and self.clock.known:
            self._begin_reign()
        now = self._now(now_ns)
        for part in self.parts:
            part.tick(now)
        if self.reign.elected:
            self.reign.tick()
            # Send the new proposals at once instead of at the next timer.
            self.proposer.flush()
            log_wants_ns = min(log_wants_ns, self.log.tick())
            if self.delivery.has_news:
                self.delivery.tick(self._now(now_ns))
                self.proposer.flush()
        self.background.pump(now, self.applied_index)
        if now.steady_ms >= self._next_upkeep_ms:
            self._next_upkeep_ms = now.steady_ms + UPKEEP_PERIOD_MS
            self._upkeep(now)
        if not self.wheel.ingestion.absorbing:
            self.checkpointer.tick(now)
            if self.checkpointer.running:
                self.events.flush()  # no replay brings back the events of entries that the checkpoint covers
        now = self._now(now_ns)
        waits = [part.wait_ms(now) for part in self.parts]
        waits += [self.founding.wait_ms(now), self.background.wait_ms(now), self.checkpointer.wait_ms(now)]
        wait_ms = min(IDLE_MS_MAX, self._next_upkeep_ms - now.steady_ms, *(wait for wait in waits if wait is not None))
        wake_ns = self._ports.clock.monotonic_ns() + max(0, wait_ms) * 1_000_000
        return min(log_wants_ns, wake_ns, self.clock.wanted_ns())

    def _now(self, now_ns: int) -> Now:
        cluster_ms, steady_ms = ClusterMs(self.clock.at_ms(now_ns)), SteadyMs(now_ns // 1_000_000)
        return Now(cluster_ms, steady_ms, self.may_act(), self.clock.may_dispatch(now_ns))

    def _upkeep(self, now: Now) -> None:
        self.topic_rates.note(now.steady_ms, self.totals, self.delivery.counters)
        self.disk_room.look()
        self.synced_file.write(self.sync.newest(self.term if self.leading else 0))
        for part in self.parts:
            part.upkeep(now)
        if self.clock.known:
            self.lease_file.write(self.delivery.lease_ranges())
        if self.leading and self.disk_room.above:
            self.reign.seek_room(now.steady_ms)

    # -- peers

    def receive(self, peer_id: str, frame: PeerFrame) -> None:
        """Take a frame from a peer. The caller has checked the peer's identity."""
        self.log.receive(peer_id, frame)

    def peer_connected(self, peer_id: str) -> None:
        """The connection to a peer is open."""
        self.log.peer_connected(peer_id)
        self.founding.connected(peer_id, self.log.send_beside)
        self.clock.peer_connected(peer_id)

    def peer_disconnected(self, peer_id: str) -> None:
        """The connection to a peer broke; frames in flight are lost."""
        self.delivery.feed.forget_peer(peer_id)
        self.log.peer_disconnected(peer_id)

    # -- dispatched messages

    def _dispatched(self, topic_id: int, first_position: int, units: Units) -> None:
        self.announcements.announce(Dispatched(topic_id, first_position, units))

    def _hand_out(self, what: Dispatched) -> None:
        def failed(failure: Failure) -> None:
            self.delivery.topic_failed(what.topic_id, failure)

        self.serving.run(failed, lambda: self.delivery.on_dispatched(what))

    def _note_dispatched(self, what: Dispatched) -> None:
        self.topic_rates.add(what.topic_id, DISPATCHED, len(what.units))
        self.topic_pending.dispatched(what.topic_id, len(what.units))
        if self.events.enabled and self.applied_index > self.events.noted_to:
            now_ms = self.clock.now_ms()
            self.events.dispatched(self.applied_index, now_ms, self.applied_term, what.topic_id, what.units)

    @property
    def applied_index(self) -> int:
        """Index of the newest applied entry of the log."""
        return self._applied.index

    @property
    def applied_term(self) -> int:
        """The term of that entry."""
        return self._applied.term

    @property
    def stamped_ms(self) -> int:
        """Latest stamp among the entries that this process applied, in cluster time."""
        return self._applied.stamped_ms

    @property
    def passed_over(self) -> deque[int]:
        """The same as `Applied.passed_over`."""
        return self._applied.passed_over

    # -- the end

    @property
    def stopped(self) -> bool:
        """The core was stopped. It stays so."""
        return self._stopped

    def _met_damage(self, error: CorruptFileError) -> None:
        self._damage = self._damage or str(error)

    def _leave(self) -> None:
        """Hand over to another member if there is one, then stop the process: this node's files are damaged."""
        self._leaving = True
        reason = f"met while serving: {self._damage}"
        if self.leading and not self.handing_over and len(self._member_ids()) > 1:
            self.transfer(None, lambda failure: self.fatal(reason))
        else:
            self.fatal(reason)

    def fatal(self, reason: str) -> None:
        """Stop the process: the state is impossible, or the disk cannot be relied on."""
        self.stop()
        self._on_fatal(reason)

    # -- whether it may serve

    def may_act(self) -> bool:
        """Whether this node is master, holds its lease and is not handing over. Only then may it send anything that
        claims to be current."""
        return self.leading and not self.handing_over and self.log.lease_held()

    def refusal(self) -> Failure | None:
        """Why this node cannot serve a client's request now; None if it can."""
        if self.leading and not self.handing_over:
            return None
        if self.recovering:
            return Failure(
                common_pb2.RECOVERING,
                f"replaying the log: at {self.applied_index} of {self.recover_to}; ask another node or retry",
                {"retry_after_ms": "200"},
            )
        status = self.log.status()
        master_id = status.master_id if status.master_id != self.identity.node_id else None
        if status.halted and master_id is None:
            return Failure(common_pb2.DISK_FULL, status.halted, {"retry_after_ms": "1000"})
        address = next((m.client_address for m in self.log.members() if m.node_id == master_id), None)
        return not_master(master_id, address, status.term)

    def require_master(self) -> None:
        """Raise the refusal as RequestError, if there is one."""
        refuse(self.refusal())

    def transfer(self, target_id: str | None, done: Callable[[Failure | None], None]) -> None:
        """Hand over by plan, as `Reign.transfer`; `done` gets None once another node leads, or why not."""
        self.serving.start(self.reign.transfer(target_id), done)

    @property
    def phase(self) -> Phase:
        """The dispatcher's state."""
        return self.dispatcher.phase

    def monotonic_ns(self) -> int:
        """Nanoseconds of the port's monotonic clock."""
        return self._ports.clock.monotonic_ns()

    def steady_ms(self) -> SteadyMs:
        """Milliseconds for measuring waits: steady even when the cluster's time jumps."""
        return SteadyMs(self._ports.clock.monotonic_ns() // 1_000_000)

    def _member_ids(self) -> list[str]:
        return [member.node_id for member in self.log.members() if not member.learner]

    def _peer_ids(self) -> list[str]:
        """Every other member, including learners."""
        return [member.node_id for member in self.log.members() if member.node_id != self.identity.node_id]

    def uptime_s(self) -> float:
        """Seconds since this core was made."""
        return (self.monotonic_ns() - self._started_ns) / 1e9

    def space_left(self) -> int:
        """Free bytes on the node's disk."""
        return self._ports.disk.space_left()
