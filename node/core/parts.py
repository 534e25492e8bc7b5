"""The parts of a node's core, made in the order in which they need each other.

A part is given the kernel and the few other parts that it uses; here one reads which. `ordered` lists those that follow
mastership or time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tickwheel.node.core.bulk.bulk import BulkLoad
from tickwheel.node.core.bulk.bundle_store import BundleStore
from tickwheel.node.core.bulk.cold import ColdRequests
from tickwheel.node.core.bulk.staging import StagedWrites
from tickwheel.node.core.checkpoint import Checkpointer
from tickwheel.node.core.config import DeliveryOrder
from tickwheel.node.core.delivery.consumers import ConsumerRequests
from tickwheel.node.core.delivery.dead import DeadRequests
from tickwheel.node.core.delivery.delivery import Delivery
from tickwheel.node.core.delivery.filter_skips import FilterSkips
from tickwheel.node.core.delivery.sync import SyncState
from tickwheel.node.core.delivery.sync_files import (
    LEASES_PATH,
    SYNCED_PATH,
    SoftFile,
    pack_leases,
    read_leases,
    read_synced,
)
from tickwheel.node.core.disk_room import DiskRoom
from tickwheel.node.core.founding import FOUNDERS_LOG_LEVEL, ClusterFounding
from tickwheel.node.core.kernel import Kernel
from tickwheel.node.core.mastership import Mastership
from tickwheel.node.core.membership import Membership
from tickwheel.node.core.part import Part
from tickwheel.node.core.repair.index_repair import IndexRepair
from tickwheel.node.core.repair.record_answers import RecordAnswers
from tickwheel.node.core.repair.record_repair import RecordRepair
from tickwheel.node.core.requests import ClientRequests
from tickwheel.node.core.schedule.by_key import KeyRequests
from tickwheel.node.core.schedule.creations import Creations
from tickwheel.node.core.schedule.deleting import Deleter
from tickwheel.node.core.schedule.dispatcher import Dispatcher
from tickwheel.node.core.schedule.flow import FlowControl
from tickwheel.node.core.schedule.pending import PendingRequests
from tickwheel.node.core.schedule.planner import Planner
from tickwheel.node.core.schedule.publisher import Publisher
from tickwheel.node.core.schedule.push import PushAhead
from tickwheel.node.core.schedule.recurring import ScheduleRequests
from tickwheel.node.core.schedule.retention import Retention
from tickwheel.node.core.schedule.senders import Senders
from tickwheel.node.core.schedule.sweeper import Sweeper
from tickwheel.node.core.schedule.topic_pending import TopicPending
from tickwheel.node.core.watch.counts import Counts
from tickwheel.node.core.watch.digests import Digests
from tickwheel.node.core.watch.events import Events
from tickwheel.node.core.watch.pins import PendingPins
from tickwheel.node.core.watch.settled_pins import SettledPins
from tickwheel.node.core.watch.trace import Tracer
from tickwheel.node.core.world import ClusterMs, Now, Ports
from tickwheel.node.failure import Failure
from tickwheel.node.state.schema import LOG_LEVEL
from tickwheel.proto import admin_pb2
from tickwheel.replication.log import Member

UPKEEP_PERIOD_MS = 1_000
TURN_PAUSE_MS = 5
"""Longest pause between two turns of an upkeep."""
IDLE_MS_MAX = 1_000
WAIT_STEP_NS = 1_000_000
"""Parts wait whole milliseconds: what one waits for may be due so much earlier."""


class _Driven:
    """Of some parts, those that do something in a tick, and those that may want one."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.ticking = tuple(part for part in parts if type(part).tick is not Part.tick)
        self.waiting = tuple(part for part in parts if type(part).wait_ms is not Part.wait_ms)


class Parts:
    """Made once for each core, before its log."""

    def __init__(
        self,
        core: Kernel,
        ports: Ports,
        founders: Sequence[Member],
        first_settings: admin_pb2.Settings | None,
        checkpointer: Checkpointer,
        on_checkpoint_needed: Callable[[str], None],
    ) -> None:
        """`founders` and `first_settings` are those of a new cluster. `on_checkpoint_needed`: see `NodeCore`."""
        self._core = core
        self._founders = founders
        self._first_settings = first_settings
        self._next_upkeep_ms = 0
        self._leases_wait = False
        """The lease file was due while an earlier write of it ran: it is written as soon as that has ended."""
        self._turns: dict[Part, Iterator[None]] = {}
        """Upkeep under way."""
        bundle_store = BundleStore(ports.disk, ports.executor, core.steady_ms, core.fatal)
        # Accepting schedules.
        self.creations = Creations(core.state, core.steady_ms)
        self.topic_pending = TopicPending(core)
        self.senders = Senders(
            core.state,
            lambda: core.leading and core.log.lease_held(),
            self._all_understand,
        )
        self.flow = FlowControl(core, self.topic_pending, self._all_understand)
        self.disk_room = DiskRoom(
            ports.disk,
            core.config.disk_high_percent,
            self.voters,
            lambda: self.sync.roomy_peers(self.voters()),
        )
        self.publisher = Publisher(core, self.creations, self.senders, self.flow, self.disk_room)
        self.planner = Planner(core, self.flow, self.publisher.full, self._all_understand)

        # Events and counts.
        self.events = Events(
            ports.disk, ports.executor, core.state, core.identity.node_id, core.config.events_bytes_max
        )
        self.tracer = Tracer(self.events, core.identity, core.serving)
        self.counts = Counts(core.state, core.config.metrics_topics)

        # Dispatch and delivery.
        push: PushAhead | None = None
        if core.config.delivery_order is DeliveryOrder.PUSH_FIRST:
            push = PushAhead(core, lambda *units: self.delivery.on_pushed(*units), lambda: self.delivery.unpush())
        self.dispatcher = Dispatcher(core, push)
        self.delivery = Delivery(
            core,
            ports.random.random,
            push,
            self.counts,
            self.events,
            lambda unread: self.record_repair.add(unread),
        )
        self.filter_skips = FilterSkips(
            core.state, core.proposer, core.background, self.delivery.wake_group, core.fatal, self._all_understand
        )
        self.retention = Retention(core)

        # The sync: what this node tells the other members.
        self.sync = SyncState(
            core, self.delivery, self.disk_room, lambda: bool(self.bulk.waiting), self._members_log_level
        )
        synced = read_synced(ports.disk)
        self.sync.remember(synced)
        self.synced_file = SoftFile(ports.disk, ports.executor, SYNCED_PATH, synced.pack())
        self.delivery.leases.heard.hear(read_leases(ports.disk, core.identity.disk_uuid))
        known = None if ports.disk.exists(LEASES_PATH) else b""
        self.lease_file = SoftFile(ports.disk, ports.executor, LEASES_PATH, known)

        # Damaged records: found here, or asked for by other members.
        self.record_repair = RecordRepair(core, self.delivery)
        self.record_answers = RecordAnswers(core)
        self.index_repair = IndexRepair(core)

        # Whether this node may vote.
        self.founding = ClusterFounding(ports.disk, core.identity, [member.node_id for member in founders], core.fatal)

        # Requests of clients and operators.
        self.mastership = Mastership(core, self.sync, self._create_cluster, self.begin_mastership, self._end_mastership)
        self.members = Membership(core, self.mastership.transfer, self.founding, self.sync)
        self.cold = ColdRequests(core, self.disk_room)
        self.bulk = BulkLoad(
            core,
            bundle_store,
            self.disk_room,
            self.cold,
            checkpointer,
            on_checkpoint_needed,
        )
        self.pending = PendingRequests(core)
        self.sweeper = Sweeper(core)
        self.deleter = Deleter(core, self.pending, self.sweeper, self._all_understand)
        self.requests = ClientRequests(core, self.senders, self.creations, self.cold, self.pending, self.members)
        self.schedules = ScheduleRequests(
            core, self.requests, self._all_understand, self.flow, self.publisher.full, self.planner
        )
        self.by_key = KeyRequests(core, self.requests, self.senders)
        self.staging = StagedWrites(core, self.publisher, self.flow, self.disk_room, self.requests)
        self.consumers = ConsumerRequests(core, self.delivery, self.requests)
        self.dead = DeadRequests(core, self._all_understand)
        self.pins = PendingPins(core)
        self.settled_pins = SettledPins(core)
        self.digests = Digests(core)

        self.ordered: tuple[Part, ...] = (
            self.dispatcher,
            core.proposer,
            self.publisher,
            self.flow,
            self.topic_pending,
            self.planner,
            self.staging,
            self.members,
            self.sweeper,
            self.deleter,
            self.bulk,
            self.delivery,
            self.record_repair,
            self.consumers,
            self.filter_skips,
            self.retention,
            self.index_repair,
            self.events,
            self.digests,
            self.counts,
        )
        """In the order in which parts tick and end; they begin in reverse order."""
        self._led = _Driven(self.ordered)
        self._following = _Driven([part for part in self.ordered if not part.of_master])
        self._keeping = tuple(part for part in self.ordered if type(part).upkeep is not Part.upkeep)
        self.rests_until_ns = 0
        """When a part or the clock wants its next tick, as of the last tick of all parts."""
        self._stood: tuple[object, ...] = ()
        """What they found then."""

    @property
    def driven(self) -> _Driven:
        """The parts that time drives now."""
        return self._led if self.mastership.elected else self._following

    def _create_cluster(self) -> None:
        founders = [replace(member, disk_uuid=self.founding.disk_of(member.node_id)) for member in self._founders]
        self.requests.create_cluster(self._first_settings, founders)

    def begin_mastership(self) -> None:
        """This node leads, has applied every entry before its term, and knows the time."""
        core = self._core
        core.clock.begin_mastership()
        now_ms = ClusterMs(core.clock.now_ms())
        for part in reversed(self.ordered):
            part.begin(core.term, now_ms)

    def _end_mastership(self, failure: Failure) -> None:
        self._core.clock.end_mastership()
        for part in self.ordered:
            part.end(failure)

    def upkeep(self, now: Now) -> None:
        """Count, forget and write what can wait, about once a second."""
        if self._turns:
            self._take_turn(next(iter(self._turns)))
        if self._leases_wait and not self.lease_file.writing:
            self._write_leases()
        if now.steady_ms < self._next_upkeep_ms:
            return
        self._next_upkeep_ms = now.steady_ms + UPKEEP_PERIOD_MS
        core = self._core
        self.disk_room.look()
        self.synced_file.write(self.sync.newest(core.term if core.leading else 0).pack())
        for part in self._keeping:
            if part is self.counts:
                # As where it counts what is applied: a mistake in it must not end the node.
                core.serving.side(self.counts.begin_anew, self.counts.upkeep, now)
            elif part not in self._turns and (turns := part.upkeep(now)) is not None:
                self._turns[part] = turns
                self._take_turn(part)
        if core.clock.known:
            self._write_leases()
        if core.leading and self.disk_room.above:
            self.mastership.seek_room(now.steady_ms)

    def _write_leases(self) -> None:
        self._leases_wait = self.lease_file.writing
        if not self._leases_wait:
            ranges, disk_uuid = self.delivery.leases.ranges(), self._core.identity.disk_uuid
            self.lease_file.write(b"" if ranges is None else lambda: pack_leases(ranges(), disk_uuid))

    def _take_turn(self, part: Part) -> None:
        if next(self._turns[part], self) is self:
            del self._turns[part]

    def resting(self, now_ns: int) -> bool:
        """Whether no part wants a tick yet, and nothing that the log and the clock change by themselves has changed
        since the last one."""
        return now_ns < self.rests_until_ns - WAIT_STEP_NS and self._stands() == self._stood

    def ticked(self, now: Now, *beside: int | None) -> int:
        """All have ticked. Returns the monotonic_ns at which they need the next tick at the latest. `beside`: waits, as
        of `Part.wait_ms`, of what is no part."""
        core = self._core
        waits = [part.wait_ms(now) for part in self.driven.waiting]
        waits += [*beside, self.mastership.wait_ms(), self.founding.wait_ms(now), self._next_upkeep_ms - now.steady_ms]
        if self._turns:
            waits.append(TURN_PAUSE_MS)
        wait_ms = min([IDLE_MS_MAX, *[wait for wait in waits if wait is not None]])
        wake_ns = core.monotonic_ns() + max(0, wait_ms) * 1_000_000
        self.rests_until_ns, self._stood = min(wake_ns, core.clock.wanted_ns()), self._stands()
        return self.rests_until_ns

    def _stands(self) -> tuple[object, ...]:
        core, mastership = self._core, self.mastership
        leads = mastership.term, mastership.changes, mastership.begun, mastership.handing_over, core.log.lease_held()
        return (core.applied.index, *leads, core.clock.steers, self.index_repair.holds_log)

    def voters(self) -> list[str]:
        """Ids of the voting members."""
        return [member.node_id for member in self._core.log.members() if not member.learner]

    def _members_log_level(self) -> int:
        """The highest level that every member is known to read; 0: none."""
        return next((level for level in range(LOG_LEVEL, 0, -1) if self._all_understand(level)), 0)

    def _all_understand(self, level: int) -> bool:
        """Whether every other member reads a log of a level. For a founder that has said nothing yet, perhaps because
        it is away, its part in the founding says it. A learner that has said nothing holds nobody up: if it is of an
        earlier version, it stops at the first entry that it cannot read and says so, as it would where the log had
        such entries before it came."""
        core = self._core

        def understands(peer: Member) -> bool:
            said = self.sync.understands(level, peer.node_id)
            if said is not None:
                return said
            return peer.learner or (level <= FOUNDERS_LOG_LEVEL and bool(self.founding.disk_of(peer.node_id)))

        return all(understands(member) for member in core.log.members() if member.node_id != core.identity.node_id)
