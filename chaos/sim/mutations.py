"""Old bugs, each as one broken function: the simulation must find every one of them.

`mutated` is entered by `simulate` and undoes everything at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from tickwheel.chaos.sim.mutation_table import MUTATIONS, Break, Patches, aimed, mutation
from tickwheel.node.core import host
from tickwheel.node.core import parts as parts_module
from tickwheel.node.core.checkpoint import Checkpointer
from tickwheel.node.core.core import CoreListener, NodeCore
from tickwheel.node.core.delivery import consumers, inherited
from tickwheel.node.core.delivery.channel import Channel
from tickwheel.node.core.delivery.delivery import Delivery
from tickwheel.node.core.delivery.heard_leases import HeardLeases
from tickwheel.node.core.delivery.inherited import Inherited
from tickwheel.node.core.delivery.lease_feed import LeaseFeed
from tickwheel.node.core.delivery.returns import Returns
from tickwheel.node.core.delivery.settlements import Settlements
from tickwheel.node.core.delivery.sync import SyncState
from tickwheel.node.core.founding import ClusterFounding
from tickwheel.node.core.install import COMPLETE, STAGING, CheckpointCopy
from tickwheel.node.core.kernel import Kernel
from tickwheel.node.core.mastership import Mastership
from tickwheel.node.core.membership import Membership
from tickwheel.node.core.parts import Parts
from tickwheel.node.core.promise import UNHEARD, Reply
from tickwheel.node.core.requests import ClientRequests, everybody
from tickwheel.node.core.schedule.dispatcher import Dispatcher, Phase
from tickwheel.node.core.world import ClusterMs, Now
from tickwheel.node.state.cold import ColdTier
from tickwheel.node.state.machine import StateMachine
from tickwheel.node.state.producers import Producers
from tickwheel.node.state.results import SettleResult
from tickwheel.node.state.snapshot import StateCheckpoint
from tickwheel.proto import scheduler_pb2
from tickwheel.replication import judge
from tickwheel.replication.cluster_clock import ClusterClock
from tickwheel.replication.config import RaftConfig
from tickwheel.replication.conversation import Conversation
from tickwheel.replication.frames import Envelope
from tickwheel.replication.journal import FsyncWork, HardState
from tickwheel.replication.log import NO_INTRODUCTION, ProposalOutcome, ProposalResult
from tickwheel.replication.pysyncobj_seam import LEADER, Engine
from tickwheel.replication.raft import RaftLog
from tickwheel.storage.simulated import SimulatedDisk
from tickwheel.storage.whole_file import write_whole
from tickwheel.wheel import window
from tickwheel.wheel.checkpoint import CheckpointJob
from tickwheel.wheel.engine import Wheel
from tickwheel.wheel.jobs import hour_directory
from tickwheel.wheel.units import CursorKey

__all__ = ["LAYERS", "MUTATIONS", "mutated"]


def _repeats_taken(patches: Patches) -> None:
    """Frames that came before, or are of an earlier start of their sender, are taken."""

    def refuses(original: Any, self: Envelope, peer_id: str, frame: Any) -> str:
        reason: str = original(self, peer_id, frame)
        return "" if reason in ("it came twice", "it is of an earlier start") else reason

    patches.replace(Envelope, "refuses", refuses)


def _no_sync_at_handover(patches: Patches) -> None:
    """A planned handover sends no sync of its own: what was given out last is told with the next one."""
    patches.replace(Conversation, "sync_now", lambda original, self: None)


LAYERS: dict[str, Break] = {"repeats_taken": _repeats_taken, "no_sync_at_handover": _no_sync_at_handover}
"""Guards that stand in front of others and do no harm alone when they are gone: taken away so that those behind are
needed."""


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """Run with one bug put in; "" puts in none."""
    patches = Patches()
    try:
        if name in LAYERS:
            LAYERS[name](patches)
        elif name:
            aim = MUTATIONS[name].aim
            if aim is not None and aim.without:
                LAYERS[aim.without](patches)
            MUTATIONS[name].apply(patches)
        yield
    finally:
        patches.undo()


# -- what is promised to clients before it is safe


@mutation(FsyncWork, "run", level="log")
def journal_not_synced(original: Any, self: FsyncWork) -> None:
    """The journal is not fsynced before entries are acknowledged."""
    self.files = []
    original(self)


@mutation(RaftLog, "propose", level="log")
def acknowledged_when_appended(
    original: Any, self: RaftLog, command: bytes, done: Callable[[ProposalResult], None], voters: Any = None
) -> None:
    """A proposal is acknowledged when it is appended."""
    before = self.status().last_index
    original(self, command, lambda result: None, voters)
    after = self.status().last_index
    done(
        ProposalResult(ProposalOutcome.COMMITTED, after)
        if after > before
        else ProposalResult(ProposalOutcome.NOT_MASTER)
    )


@mutation(judge, "_heartbeat", level="log", aim=aimed("old-answers", nodes=5, batch_entries=1, log_pause_ms=12))
def unverified_committed(original: Any, term: int, leader_commit: int, own_commit: int, matched: int = 0) -> Any:
    """A slave commits up to the end of its own log instead of what the master has verified."""
    return original(term, leader_commit, own_commit, leader_commit if matched else 0)


@mutation(Settlements, "propose", aim=aimed("kill", "isolate", nodes=3))
def settled_before_commit(
    original: Any, self: Settlements, columns: list[Any], reply: Reply[Any], *, awaited: bool = True
) -> None:
    """A settlement is answered before it is committed."""
    original(self, columns, UNHEARD, awaited=awaited)
    reply.done(SettleResult.of(tuple([SettleResult(settled=len(some.ids) // 8) for some in columns])))


@mutation(ClientRequests, "cancel")
async def cancelled_before_apply(original: Any, self: ClientRequests, number: int, *permitted: Any) -> Any:
    """A cancel is answered before it is applied."""
    self._core.require_master()
    self._core.serving.start(original(self, number, *permitted), lambda outcome: None)
    return scheduler_pb2.CANCELLED


@mutation(HardState, "store", level="log", aim=aimed("kill-voters"))
def vote_not_stored(original: Any, self: HardState, term: int, voted_for: str) -> None:
    """Term and vote are not on stable storage before the vote is given."""
    self.term, self.voted_for = term, voted_for


@mutation(Engine, "_SyncObj__setCurrentTerm", level="log", aim=aimed("full-voter", nodes=3))
def term_ahead_of_disk(original: Any, self: Engine, term: int, voted_for: str | None) -> None:
    """On a full disk a node goes on in a term that was not stored."""
    self._SyncObj__raftCurrentTerm = term
    self._SyncObj__votedForNodeId = voted_for
    self.view.setCurrentTerm(term, voted_for)


# -- mastership


@mutation(NodeCore, "may_act", aim=aimed("isolate", "freeze", "partition"))
def lease_not_checked(original: Any, self: NodeCore) -> Any:
    """A master acts without its lease."""
    return self.leading


@mutation(Conversation, "_on_sync", aim=aimed("late-syncs", nodes=3))
def sync_term_not_checked(original: Any, self: Conversation, peer_id: str, frame: Any) -> None:
    """A sync of an older term is taken."""
    if self.engine.state != LEADER:
        self._listener.sync_in(peer_id, frame)


@mutation(Mastership, "lead_was_applied")
def cursor_from_sync(original: Any, self: Mastership, lead: Any) -> None:
    """A new master takes its cursor from the sync instead of the log."""
    core = self._core
    heard = self._sync.heard
    if self.elected and lead.node_id == core.identity.node_id and heard.at_ns:
        core.wheel.window.cursor = CursorKey(heard.tick * core.state.settings.slot_ms, 0)
    original(self, lead)


@mutation(HeardLeases, "held", aim=aimed("kill", "handover"))
def leases_forgotten(original: Any, self: HeardLeases, now_ms: Any, epochs: Any) -> Any:
    """A new master forgets the leases that it heard of."""
    return []


@mutation(Delivery, "end", aim=aimed("flap", "isolate", "freeze"))
def own_leases_forgotten(original: Any, self: Delivery, failure: Any) -> None:
    """A master that is elected again forgets what it gave out."""
    heard, self.leases.heard = self.leases.heard, HeardLeases()
    original(self, failure)
    self.leases.heard = heard


@mutation(parts_module, "read_leases", aim=aimed("kill-all", nodes=3, lease_ms=10_000))
def lease_file_ignored(original: Any, *_: Any) -> Any:
    """A node that starts does not read what it had written down of leases."""
    return []


@mutation(Parts, "upkeep", aim=aimed("kill-all", nodes=3, lease_ms=10_000))
def lease_file_rare(original: Any, self: Parts, now: Any) -> None:
    """Leases are written down every eight seconds only."""
    file = self.lease_file
    rarely = now.steady_ms // 1_000 % 8
    write = file.write
    if rarely:
        file.write = lambda content: None  # type: ignore[method-assign]
    try:
        original(self, now)
    finally:
        file.write = write  # type: ignore[method-assign]


@mutation(Settlements, "extend", aim=aimed("kill", "handover", nodes=3, parcels=1))
def extensions_not_told(original: Any, self: Settlements, *args: Any) -> Any:
    """Slaves do not hear of extended leases."""
    feed, self._feed = self._feed, LeaseFeed(list)
    try:
        return original(self, *args)
    finally:
        self._feed = feed


@mutation(consumers, "require_current", aim=aimed("isolate", "freeze", "partition", nodes=3, parcels=1))
def extended_without_lease(original: Any, kernel: Kernel) -> None:
    """A master extends leases of deliveries without its own lease."""
    kernel.require_master()


@mutation(
    LeaseFeed,
    "_note_given",
    aim=aimed("kill", nodes=3, splits=1, lease_ms=10_000, settle_grid_ms=1, sync_period_ms=100),
)
def leases_told_by_their_first_message(original: Any, self: LeaseFeed) -> None:
    """Slaves are not told of a lease if its first message is settled by the next sync, whatever else it names."""
    self._given = [
        lease
        for lease in self._given
        if len(lease.positions) and int(lease.positions[0]) >= self._floor_of(lease.channel)
    ]
    original(self)


HANDOVER_UNDER_LOAD = aimed(
    "handover-delivering",
    nodes=3,
    lease_ms=10_000,
    sync_period_ms=100,
    settle_grid_ms=100,
    loop_gap_us=5_000,
    without="no_sync_at_handover",
)
"""Messages are delivered until the next master has the role, which no sync tells of the last leases."""


@mutation(CoreListener, "handover_ready", aim=HANDOVER_UNDER_LOAD)
def handover_without_leases(original: Any, self: CoreListener, peer_id: Any) -> Any:
    """A planned handover does not wait until the next master has heard of all leases."""
    return True


@mutation(Channel, "take", aim=aimed("handover", "kill", nodes=3, dispatch_ahead_ms=400))
def passed_taken_for_due(original: Any, self: Channel, now_ms: Any, limit: Any) -> Any:
    """A new master hands out at once what was dispatched before it led, also what is not due."""
    return original(self, max(now_ms, self.hold_until_ms), limit)


@mutation(aim=aimed("kill-left", nodes=3, consumers=1, lease_ms=10_000))
def stale_lease(patches: Patches) -> None:
    """A new master holds what came back meanwhile by its old lease."""
    inside = {"hear": False, "return": False}

    def within(place: str) -> Callable[..., Any]:
        def noted(original: Any, self: Any, *args: Any, **named: Any) -> Any:
            inside[place] = True
            try:
                return original(self, *args, **named)
            finally:
                inside[place] = False

        return noted

    def current(original: Any, subscription: Any, lease: Any) -> Any:
        return np.ones(len(lease.positions), np.bool_) if inside["hear"] else original(subscription, lease)

    def release_hold(original: Any, self: Channel, positions: Any) -> None:
        if not inside["return"]:
            original(self, positions)

    patches.replace(Inherited, "_take_over", within("hear"))
    patches.replace(Returns, "give_back", within("return"))
    patches.replace(inherited, "current", current)
    patches.replace(Channel, "release_hold", release_hold)


@mutation(LeaseFeed, "all_heard", aim=HANDOVER_UNDER_LOAD)
def last_leases_not_waited_for(original: Any, self: LeaseFeed, peer_id: str) -> Any:
    """A planned handover does not wait for leases that no sync has told yet."""
    given, self._given = self._given, []
    try:
        return original(self, peer_id)
    finally:
        self._given = given


# -- the cluster clock


@mutation(ClusterClock, "_set_members", aim=aimed("skew", "clock-steps"))
def own_clock_trusted(original: Any, self: ClusterClock, names: Any) -> Any:
    """Each node goes by its own clock."""
    return original(self, [self._node_id])


@mutation(ClusterClock, "_set_members", aim=aimed("wrong-start", nodes=3))
def one_peer_believed(original: Any, self: ClusterClock, names: Any) -> None:
    """The time of one of the others is taken for the cluster's."""
    original(self, sorted(set(names) - {self._node_id})[:1])


@mutation(SyncState, "take_over", aim=aimed("kill-installed", nodes=3, journal_tail_bytes=0, lease_ms=20_000))
def leases_forgotten_with_checkpoint(original: Any, self: SyncState, earlier: SyncState) -> None:
    """A slave that takes over a checkpoint forgets the leases that it heard of."""
    self.heard = earlier.heard


@mutation(NodeCore, "writing", aim=aimed("hung-install", nodes=3, journal_tail_bytes=0))
def installed_over_writes(original: Any, self: NodeCore) -> Any:
    """A peer's checkpoint is put in place while the own disk still writes."""
    return False


@mutation(RaftConfig, "lease_over_ms", level="log", aim=aimed("reset", "isolate", nodes=3))
def lease_taken_for_over(original: Any, self: RaftConfig, lease_ms: int) -> int:
    """A slave that loses the connection to its master takes the master's lease for over."""
    return 0


# -- the wheel


@mutation(Dispatcher, "begin")
def alignment_left_out(original: Any, self: Dispatcher, term: int, now_ms: ClusterMs) -> None:
    """A new master goes on from now: what is overdue is not aligned."""
    original(self, term, now_ms)
    self._wheel.dispatch(CursorKey(now_ms, 0))


@mutation(Dispatcher, "tick")
def alignment_swapped(original: Any, self: Dispatcher, now: Now) -> None:
    """The two cases of the alignment are swapped: a cursor behind the clock waits."""
    if self.phase is Phase.ALIGNING and self._wheel.cursor.due_ms < now.cluster_ms:
        return
    original(self, now)


@mutation(Channel, "take")
def not_held_until_due(original: Any, self: Channel, now_ms: Any, limit: Any) -> Any:
    """Messages are handed out when they are dispatched, a little ahead of their time."""
    return original(self, now_ms + 8, limit)


@mutation(Wheel, "append")
def late_not_clamped(original: Any, self: Wheel, units: Any, records: Any) -> Any:
    """A late arrival keeps its due time below the cursor."""
    window = self.window
    cursor, window.cursor = window.cursor, CursorKey(0, 0)
    try:
        return original(self, units, records)
    finally:
        window.cursor = cursor


@mutation(window._Slot, "sort", aim=aimed("kill", "handover", nodes=3, turn=1))
def last_millisecond_not_sorted(original: Any, self: Any, to: CursorKey) -> None:
    """Of a tick sorted in turns, arrivals due in the millisecond in which a dispatch ends are left out."""
    if self.fresh_units <= window.SORTED_UNITS_MAX or (self.first_due_ms or 0) < to.due_ms:
        original(self, to)


@mutation(Wheel, "finish")
def ids_at_merge(original: Any, self: Wheel, job: Any) -> None:
    """Ids depend on when a node merges, not on the log alone."""
    original(self, job)
    if job.kind == "merge":
        self.holdings.hours.next_index[:] += 1


# -- the state machine


@mutation()
def idempotence_off(patches: Patches) -> None:
    """A repeated batch is scheduled again."""
    patches.replace(Producers, "span", lambda original, self, producer_id: None)
    patches.replace(Producers, "repeated", lambda original, self, sender, count: None)


@mutation(Producers, "repeated", aim=aimed("kill", "isolate", nodes=3, twins=1))
def checksums_not_compared(original: Any, self: Producers, sender: Any, count: Any) -> Any:
    """A sequence that was accepted with other content counts as repeated."""
    return original(self, sender._replace(checksum=None), count)


@mutation(ClientRequests, "cancel")
async def cancel_not_replicated(original: Any, self: ClientRequests, number: int, *permitted: Any) -> Any:
    """A cancel is done by the master alone."""
    self._core.require_master()
    units = (await self._find(number, everybody)).units
    if units is None:
        return await original(self, number)
    outcome = self._core.wheel.cancel(number, int(units["due_ms"][0]))
    return scheduler_pb2.CancelOutcome.Value(outcome.name)


@mutation()
def stamped_at_apply(patches: Patches) -> None:
    """Each node stamps with its own clock what the master should have stamped."""
    clocks: dict[StateMachine, int] = {}

    def apply(original: Any, self: StateMachine, index: int, term: int, entry: Any) -> Any:
        entry.stamped_ms += clocks.setdefault(self, len(clocks))
        return original(self, index, term, entry)

    patches.replace(StateMachine, "apply", apply)


# -- checkpoints


@mutation()
def manifest_before_files(patches: Patches) -> None:
    """The manifest is durable before the files that it names."""
    running = [False]

    def run(original: Any, self: StateCheckpoint) -> None:
        running[0] = True
        try:
            original(self)
        finally:
            running[0] = False

    def sync(original: Any, self: SimulatedDisk, *args: Any) -> None:
        if not running[0]:
            original(self, *args)

    patches.replace(StateCheckpoint, "run", run)
    patches.replace(SimulatedDisk, "fsync_content", sync)
    patches.replace(SimulatedDisk, "fsync_dir", sync)


@mutation(
    CheckpointJob,
    "run",
    aim=aimed("power-removing", nodes=3, hours_kept=0, buffer_bytes=4 << 10, hour_after_ms=7_000, seconds=10),
)
def hours_removed_early(original: Any, self: CheckpointJob) -> None:
    """Files of an hour are removed before the manifest that needs them no more is durable."""
    original(self)
    for hour in self.doomed:
        self._disk.remove(hour_directory(self._directory, hour))


@mutation(Checkpointer, "_begin", aim=aimed("power-in-checkpoint", nodes=3, segment_bytes=8 << 10))
def journal_cut_early(original: Any, self: Checkpointer, now_ms: int) -> None:
    """The journal is cut before the checkpoint that covers it is durable."""
    index, term = self._core.applied.index, self._core.applied.term
    if index:
        log: Any = self._core.log
        config = log.config
        log.config = replace(config, journal_tail_bytes_max=0)
        log.checkpointed(index, term)
        log.config = config
    original(self, now_ms)


@mutation(Membership, "introduction", aim=aimed("strangers", nodes=3, loop_gap_us=30_000, seconds=12))
def members_not_shown(original: Any, self: Membership) -> Any:
    """A caller does not show who the members are."""
    return NO_INTRODUCTION


@mutation(Membership, "refuses", aim=aimed("replace", nodes=3, loop_gap_us=30_000, batch_entries=1, seconds=12))
def newcomers_not_told(original: Any, self: Membership, *args: Any) -> Any:
    """A newcomer does not keep who it is shown the members are, and reads that they are those of long ago."""
    return original(self, *args) if self._core.log.members() else None


@mutation(ColdTier, "_withheld", aim=aimed("kill", "isolate", nodes=3, cold=1))
def cold_marks_ignored(original: Any, self: ColdTier, *args: Any) -> Any:
    """Messages of the cold tier that were cancelled or moved come with their part."""
    return original(self, *args)[:0]


@mutation(ColdTier, "wants", aim=aimed("kill", "isolate", nodes=3, cold=1))
def cold_loaded_twice(original: Any, self: ColdTier, cold: Any) -> Any:
    """A part of the cold tier is taken over again when that is repeated."""
    return True


@mutation(Membership, "refuses", aim=aimed("wiped-disk", "kill", "isolate", nodes=3, seconds=10))
def disks_not_compared(original: Any, self: Membership, *args: Any) -> Any:
    """A member that comes with another disk is let in."""
    refusal = original(self, *args)
    return None if refusal is not None and refusal.final and not refusal.removed else refusal


@mutation(ClusterFounding, "may_vote", aim=aimed("stale-founders", nodes=3))
def new_disks_vote(original: Any, self: ClusterFounding) -> Any:
    """A node with a new disk votes, whatever its disk was before."""
    return True


@mutation(host, "install_if_complete", aim=aimed("broken-copy", nodes=3, journal_tail_bytes=0, seconds=10))
def broken_copies_installed(original: Any, disk: Any) -> bool:
    """What is left of a broken copy of a checkpoint is put in place at the next start."""
    if disk.exists(STAGING) and not disk.exists(COMPLETE):
        write_whole(disk, COMPLETE, b"complete")
    return bool(original(disk))


@mutation(aim=aimed("broken-copy", "power", nodes=3, journal_tail_bytes=0, seconds=10))
def resumed_files_not_synced(patches: Patches) -> None:
    """What an earlier try brought of a checkpoint is not synced with the rest."""

    def begin(original: Any, self: CheckpointCopy) -> Any:
        self.__dict__["written"] = set()
        return original(self)

    def take(original: Any, self: CheckpointCopy, chunk: Any) -> None:
        original(self, chunk)
        if chunk.data:
            self.__dict__["written"].add(f"{STAGING}/{chunk.path}")

    def finish(original: Any, self: CheckpointCopy) -> None:
        self._disk.ignore_fsync(  # type: ignore[attr-defined]
            lambda path: (
                path.startswith(f"{STAGING}/")
                and not path.startswith(COMPLETE)
                and path not in self.__dict__["written"]
            )
        )
        try:
            original(self)
        finally:
            self._disk.ignore_fsync(None)  # type: ignore[attr-defined]

    patches.replace(CheckpointCopy, "begin", begin)
    patches.replace(CheckpointCopy, "take", take)
    patches.replace(CheckpointCopy, "finish", finish)


# Last: these come after the others in the table, which keeps the order of entry.
from tickwheel.chaos.sim import (  # noqa: E402, F401
    mutations_of_bulk,
    mutations_of_groups,
    mutations_of_keys,
    mutations_of_ports,
    mutations_of_schedules,
)
