"""A whole node on a machine: NodeHost on simulated ports, with records of what it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import google_crc32c
import numpy as np

from tickwheel.chaos.sim import moments
from tickwheel.chaos.sim.doors import Door
from tickwheel.chaos.sim.executor import SyncExecutor
from tickwheel.chaos.sim.history_machines import (
    CheckpointBegan,
    CheckpointTaken,
    ContentSeen,
    CursorSeen,
    DigestSeen,
    HoursRemoved,
    LeasesGathered,
    LeasesKept,
    LeasesUnread,
    SizesSeen,
    SyncedSeen,
)
from tickwheel.chaos.sim.history_operators import RunSeen, ScheduleChanged
from tickwheel.chaos.sim.log_process import (
    CLUSTER_ID,
    SIZES_EVERY_NS,
    members_of,
    note_sync,
    note_sync_sent,
    with_shape,
)
from tickwheel.chaos.sim.log_watch import Census, LogWatch
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.rolled import Rolled
from tickwheel.chaos.sim.shape import Shape
from tickwheel.chaos.sim.tight import tightened
from tickwheel.chaos.sim.world import MS, SECOND
from tickwheel.node.core.checkpoint import BackupFile
from tickwheel.node.core.config import CoreConfig, DeliveryOrder
from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.delivery import sync_files
from tickwheel.node.core.host import NodeHost, raft_config
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.world import NodeIdentity, Ports
from tickwheel.node.failure import Failure
from tickwheel.node.state.machine import AnyResult
from tickwheel.node.state.results import AdminResult, ScheduleResult
from tickwheel.proto.admin_pb2 import Settings
from tickwheel.proto.common_pb2 import HeldFile
from tickwheel.proto.log_pb2 import LogEntry
from tickwheel.proto.peer_pb2 import CheckpointChunk, PeerFrame
from tickwheel.proto.schedules_pb2 import RunOutcome
from tickwheel.replication.frames import Refusal
from tickwheel.replication.guards import Guards
from tickwheel.replication.log import NO_INTRODUCTION, LogStatus
from tickwheel.replication.raft import RaftLog
from tickwheel.wheel.units import LACKING, Ids, Units

DIGEST_EVERY = 50
"""Entries between two digests of the state."""
COPY_NS = 20 * MS
COPY_NS_MOST = 3 * SECOND
PIECES = 8
"""A copy that a fault may break is cut into about this many pieces."""
PIECE_BYTES_LEAST = 256
PIECE_NS = 5 * MS


class _ObservedHost(NodeHost):
    """Records digests at fixed indexes, so that nodes can be compared, and the syncs heard."""

    machine: Machine
    watch: LogWatch
    rolled: Rolled
    leases_gathered: list[int]
    """Empty but while the lease file is being written: its failures before."""

    def _build(self) -> NodeCore:
        core = super()._build()
        machine = self.machine
        heard = core.listener
        apply, role_changed = heard.apply, heard.role_changed
        sync_out, sync_in = heard.sync_out, heard.sync_in
        watch = self.watch
        watch.attach(raft_of(core))
        moments.watch(machine, core.wheel)
        appended = _AppendSum(core)
        _count_commands(machine, core, self.rolled)
        self.leases_gathered = _note_leases(machine, core)

        def observed_apply(index: int, term: int, command: bytes) -> object:
            machine.may_apply()
            watch.applied(index, term, raft_of(core))
            result = apply(index, term, command)
            note_schedules(machine, index, command, result)
            note_removals(machine, index, command, result)
            checksum = appended.taken()
            if checksum:
                machine.note(ContentSeen, index, checksum)
            if index % DIGEST_EVERY == 0 and core.state.applied_index == index:
                note_digest(machine, core)
            return result

        def observed_sync_out(peer_id: str) -> PeerFrame | None:
            frame = sync_out(peer_id)
            if frame is not None:
                note_sync_sent(machine, peer_id, frame)
            return frame

        def observed_sync_in(peer_id: str, frame: PeerFrame) -> PeerFrame | None:
            note_sync(machine, peer_id, frame)
            return sync_in(peer_id, frame)

        def observed_role_changed(status: LogStatus) -> None:
            watch.role(status.role.value, status.term, raft_of(core).voters)
            role_changed(status)

        heard.role_changed = observed_role_changed  # type: ignore[method-assign]
        heard.apply = observed_apply  # type: ignore[method-assign]
        heard.sync_out = observed_sync_out  # type: ignore[method-assign]
        heard.sync_in = observed_sync_in  # type: ignore[method-assign]
        return core


def _count_commands(machine: Machine, core: NodeCore, rolled: Rolled) -> None:
    apply = core.state.apply

    def observed(index: int, term: int, entry: LogEntry) -> list[AnyResult]:
        rolled.applied(index, entry, machine.world.now_ns)
        return apply(index, term, entry)

    core.state.apply = observed  # type: ignore[method-assign]


def _note_leases(machine: Machine, core: NodeCore) -> list[int]:
    """Tell of each time that a node gathers what it knows of leases; the list has the failures before, until the end
    of the write was seen."""
    file = core.parts.lease_file
    write = file.write
    under_way: list[int] = []

    def observed(content: bytes | Callable[[], bytes]) -> None:
        if not file.writing:
            if under_way == [file.failures]:
                machine.note(LeasesKept)  # a write that waited for this one begins before its end was seen
            under_way[:] = [file.failures]
            machine.note(LeasesGathered)
        write(content)

    file.write = observed  # type: ignore[method-assign]
    return under_way


class _AppendSum:
    """Checksums what a wheel appends; the state's digest holds numbers of units, not what is in them."""

    def __init__(self, core: NodeCore) -> None:
        self._sum = 0
        append = core.wheel.append

        def observed(units: Units, records: bytes | memoryview) -> Ids:
            ids = append(units, records)
            alike = units.copy()
            alike["flags"] &= ~np.uint8(LACKING)  # of this node's disk alone
            self._sum = google_crc32c.extend(self._sum, alike.tobytes()) or 1
            return ids

        core.wheel.append = observed  # type: ignore[method-assign]

    def taken(self) -> int:
        """The checksum since the last call; 0: nothing was appended."""
        value, self._sum = self._sum, 0
        return value


def _nothing() -> None:
    """Input that only asks for a turn."""


def note_schedules(machine: Machine, index: int, command: bytes, results: object) -> None:
    """Write down what a node did with recurring schedules when it applied an entry."""
    if not isinstance(results, list) or not any(isinstance(result, ScheduleResult) for result in results):
        return
    number = 0
    entry = LogEntry.FromString(command)
    for place, (part, result) in enumerate(zip(entry.commands, results, strict=True)):
        if not isinstance(result, ScheduleResult):
            continue
        request_id = part.schedule.extra.request_id
        for note in result.notes:
            run = note.run
            outcome = RunOutcome.Name(run.outcome)
            facts = (note.name, note.revision, outcome, run.planned_ms, run.at_ms, run.id, run.times, request_id)
            machine.history.note(RunSeen, machine.name, index, number, *facts)
            number += 1
        change = part.schedule.WhichOneof("body") or ""
        if change in ("put", "pause", "resume", "delete") and result.schedule is not None:
            after = result.schedule
            from_ms = getattr(part.schedule, change).from_ms
            interval_ms = after.definition(content=False).spec.interval_ms
            machine.history.note(
                ScheduleChanged,
                machine.name,
                index,
                place,
                after.name,
                change,
                from_ms,
                after.revision,
                interval_ms,
                after.next_ms,
            )


def note_removals(machine: Machine, index: int, command: bytes, results: object) -> None:
    """Write down what a node removed with its hours when it applied an entry."""
    if not isinstance(results, list):
        return
    removals = [place for place, one in enumerate(results) if isinstance(one, AdminResult) and one.hour_min_kept]
    entry = LogEntry.FromString(command) if removals else LogEntry()
    for place in removals:
        asked, result = entry.commands[place].admin.remove_hours, results[place]
        removed = (result.hour_min_kept, asked.forced_below, asked.dead_before_ms, result.unsettled_removed)
        machine.note(HoursRemoved, index, *removed)


def raft_of(core: NodeCore) -> RaftLog:
    """The log of a core, which is pysyncobj's here."""
    assert isinstance(core.log, RaftLog)
    return core.log


def note_digest(machine: Machine, core: NodeCore) -> None:
    """Write the digest of a node's state down."""
    digest = core.state.digest()
    parts = tuple(sorted(digest.parts.items()))
    machine.note(DigestSeen, digest.applied_index, digest.digest, parts)


class CoreProcess:
    """`setup.Process` of the whole node; also its CheckpointSource."""

    def __init__(
        self,
        machine: Machine,
        names: Sequence[str],
        guards: Guards,
        config: CoreConfig,
        shape: Shape,
        census: Census,
        rolled: Rolled,
    ) -> None:
        self.machine = machine
        self.watch = LogWatch(machine, census)
        self._shape = shape
        self._raft_config = with_shape(raft_config(config), shape)
        self._cursor: tuple[int, int] = (-1, -1)
        self._recovering: bool | None = None
        self._synced = (-1, -1, -1)
        self._heard_ns = 0
        self._next_sizes_ns = 0
        self._installs = 0
        self._checkpointing = False
        ports = Ports(
            disk=machine.disk,
            clock=machine.clock,
            executor=machine.executor,
            sync_executor=SyncExecutor(machine.executor),
            network=machine.network,
            random=machine.world.stream(f"node/{machine.name}/{machine.boot}"),
        )

        if sync_files.LEASES_PATH in machine.disk.unreadable:
            machine.note(LeasesUnread)

        class Host(_ObservedHost):
            pass

        Host.machine = machine
        Host.watch = self.watch
        Host.rolled = rolled
        self.door: Door | None = None
        self.host = Host(
            config,
            self._raft_config,
            NodeIdentity(CLUSTER_ID, machine.name, disk_uuid=machine.disk_uuid),
            ports,
            seed=_first_settings(shape),
            members=[] if machine.joining else members_of(names),
            joining=machine.joining,
            on_fatal=machine.fatal,
            source=self,
            guards=guards,
        )
        self._ports = ports

    def open_door(self) -> Door:
        """The client port, which the caller closes after the run."""
        machine = self.machine
        self.door = Door(machine.name, self.host, self._ports, lambda: machine.deliver(_nothing))
        return self.door

    # -- Process

    @property
    def log(self) -> RaftLog:
        """The log of the core that runs now."""
        return raft_of(self.host.core)

    def start(self) -> None:
        status = self.host.core.log.status()
        self.watch.role(status.role.value, status.term, self.log.voters)
        self.host.start()

    def tick(self, *, woken: bool) -> int:
        wanted_ns = self.host.tick(woken=woken)
        if self.door is None:
            return wanted_ns
        self.door.run()
        timer_ns = self.door.next_ns()
        return wanted_ns if timer_ns is None else min(wanted_ns, timer_ns)

    def receive(self, peer_id: str, frame: PeerFrame) -> bool:
        return self.watch.received(raft_of(self.host.core), peer_id, frame, self.host.receive)

    def peer_connected(self, peer_id: str) -> None:
        self.host.peer_connected(peer_id)

    def peer_disconnected(self, peer_id: str) -> None:
        self.host.peer_disconnected(peer_id)

    def stop(self) -> None:
        self.host.stop()

    def refuses(self, peer_id: str) -> Refusal | None:
        caller = self.machine.fabric.machines[peer_id]
        process = caller.process
        shown = process.host.core.parts.members.introduction() if isinstance(process, CoreProcess) else NO_INTRODUCTION
        return self.host.core.parts.members.refuses(peer_id, caller.disk_uuid, shown)

    def knows_disk_of(self, node_id: str) -> bool:
        """Whether all that this node has applied is on its disk, and the disk of a member in it."""
        core = self.host.core
        named = any(member.node_id == node_id and member.disk_uuid for member in core.state.members())
        return named and self.log.journal.durable_index >= core.applied.index

    def observe(self) -> None:
        core, machine = self.host.core, self.machine
        self.watch.observe(raft_of(core))
        cursor, recovering = core.wheel.cursor, core.recovering
        if cursor != self._cursor or recovering != self._recovering:
            self._cursor, self._recovering = cursor, recovering
            machine.note(CursorSeen, core.term, *cursor, recovering)
        heard = core.parts.sync.heard
        if heard.at_ns != self._heard_ns and not core.leading:
            self._heard_ns = heard.at_ns
            synced = (heard.term, heard.tick, heard.local_index)
            if synced != self._synced:
                self._synced = synced
                machine.note(SyncedSeen, *synced)
        under_way = self.host.leases_gathered
        if under_way and not core.parts.lease_file.writing and core.parts.lease_file.failures == under_way.pop():
            machine.note(LeasesKept)
        if core.checkpointer.running != self._checkpointing:
            self._checkpointing = core.checkpointer.running
            if self._checkpointing:
                machine.note(CheckpointBegan)
        if self.host.installs != self._installs:
            self._installs = self.host.installs
            machine.note(CheckpointTaken)
        if machine.world.now_ns >= self._next_sizes_ns:
            self._next_sizes_ns = machine.world.now_ns + SIZES_EVERY_NS
            machine.history.note(SizesSeen, machine.name, self._sizes())

    def _sizes(self) -> tuple[tuple[str, int, int], ...]:
        """(name, held, limit) of each bounded resource. The last item taken in may exceed a limit of bytes."""
        core, raft = self.host.core, self._raft_config
        config = core.config
        proposals, proposal_bytes = core.log.in_flight()
        return (
            ("batches waiting", core.parts.publisher.waiting.requests, config.intake_requests_max),
            ("bytes of batches waiting", core.parts.publisher.waiting.bytes, config.intake_bytes_max),
            ("dispatches in flight", core.parts.dispatcher.in_flight, config.dispatch_in_flight_max),
            ("proposals in flight", proposals, raft.proposals_max),
            ("bytes of proposals in flight", proposal_bytes, raft.proposal_bytes_max + raft.command_bytes_max),
            ("entries of a message", self.watch.entries_sent_most, self._shape.batch_entries),
            ("sessions", len(core.parts.delivery.sessions), config.sessions_max),
        )

    def observe_lease(self) -> None:
        """Also asked for at the moment of a delivery: the lease may have come back in this very turn."""
        log = raft_of(self.host.core)
        until_ns = log.lease_until_ns()
        held = until_ns > self.machine.clock.monotonic_ns()
        self.watch.lease(self.host.core.term, until_ns if held else 0, log.other_voters)

    @property
    def position(self) -> int:
        """Index of the last entry applied."""
        return self.host.core.applied.index

    # -- CheckpointSource

    def fetch(
        self,
        peer_id: str,
        held: Sequence[HeldFile],
        chunk: Callable[[CheckpointChunk], bool | None],
        done: Callable[[str | None], None],
    ) -> None:
        """Copy a peer's checkpoint as a separate call would: late, and not at all if either node dies; piece by piece
        if a fault breaks it."""
        me, source = self.machine, self.machine.fabric.machines[peer_id]
        world, boot = me.world, me.boot
        open_call = [True]

        def answer(problem: str | None) -> None:
            if open_call[0] and me.boot == boot:
                open_call[0] = False
                me.deliver(done, problem)

        def files_ready(files: list[BackupFile] | Failure) -> None:
            process = source.process
            if isinstance(files, Failure) or not isinstance(process, CoreProcess):
                world.after(MS, answer, "the peer refuses")
                return
            known = {file.path: file for file in held}
            chunks = [_chunk_of(source, copied, known.get(copied.path)) for copied in files]
            if me.copy_fault is not None:
                pieces = list(_pieces_of(chunks, me.copy_fault.begins(chunks)))
                world.after(COPY_NS, piece, process, source.boot, files, iter(pieces))
                return
            process.host.core.checkpointer.copied(files)
            world.after(COPY_NS, arrive, chunks)

        def piece(
            from_process: CoreProcess, source_boot: int, files: list[BackupFile], pieces: Iterator[CheckpointChunk]
        ) -> None:
            """The next one, or the end: of the copy or, without the last piece, of the connection."""
            there = source.boot == source_boot and source.process is from_process
            received = next(pieces, None) if there and open_call[0] and me.boot == boot else None
            if received is not None:
                me.deliver(chunk, received)
            if received is not None and not received.last:
                world.after(PIECE_NS, piece, from_process, source_boot, files, pieces)
                return
            if there:
                source.deliver(from_process.host.core.checkpointer.copied, files)
            if received is None and me.copy_fault is not None:
                me.copy_fault.broke()
            answer("the connection broke" if received is None else None)

        def arrive(chunks: list[CheckpointChunk]) -> None:
            if me.boot == boot and open_call[0]:
                for received in chunks:
                    me.deliver(chunk, received)
                answer(None)

        process = source.process
        if me.copies_fail:
            me.copies_failed += 1
        elif isinstance(process, CoreProcess):
            source.deliver(process.host.core.checkpointer.request, Reply.either(files_ready))
        world.after(COPY_NS_MOST, answer, "the copy timed out")


def _chunk_of(source: Machine, copied: BackupFile, held: HeldFile | None) -> CheckpointChunk:
    file = source.disk.open(copied.path)
    data = file.read_at(0, copied.bytes)
    file.close()
    offset = 0
    if held is not None and held.bytes <= len(data) and google_crc32c.value(data[: held.bytes]) == held.crc32c:
        offset = held.bytes
    data = data[offset:]
    return CheckpointChunk(path=copied.path, offset=offset, data=data, crc32c=google_crc32c.value(data))


def _pieces_of(chunks: Sequence[CheckpointChunk], bytes_left: int) -> Iterator[CheckpointChunk]:
    """The pieces of a copy that breaks after `bytes_left`. Only a whole copy has a piece that says `last`."""
    size = max(PIECE_BYTES_LEAST, sum(len(whole.data) for whole in chunks) // PIECES)
    for whole in chunks:
        for at in range(0, max(len(whole.data), 1), size):
            data = whole.data[at : min(at + size, len(whole.data))][:bytes_left]
            last = whole is chunks[-1] and at + len(data) == len(whole.data)
            broken = at + len(data) < min(at + size, len(whole.data))
            yield CheckpointChunk(
                path=whole.path, offset=whole.offset + at, data=data, crc32c=google_crc32c.value(data), last=last
            )
            bytes_left -= len(data)
            if broken:
                return


def pushes_first(seed: int) -> bool:
    """Every fourth seed delivers push-first."""
    return seed % 4 == 3


def _first_settings(shape: Shape) -> Settings | None:
    """What a founder states for the whole run; None: nothing."""
    first = Settings()
    if shape.in_flight_max:
        first.group_in_flight_max = shape.in_flight_max
    if shape.producers_max:
        first.producers_max = shape.producers_max
    if shape.retention_ms:
        first.retention_ms = shape.retention_ms
    if shape.window_messages:
        first.window_messages_max = shape.window_messages
    return first if first.ListFields() else None


def small_config(seed: int, shape: Shape) -> CoreConfig:
    """Small files and frequent checkpoints, so that a short run meets all of it."""
    config = replace(
        CoreConfig(),
        delivery_order=DeliveryOrder.PUSH_FIRST if pushes_first(seed) else DeliveryOrder.COMMIT_FIRST,
        sync_period_ms=shape.sync_period_ms,
        segment_bytes=shape.segment_bytes,
        dispatch_ahead_ms=shape.dispatch_ahead_ms,
        spaced_rate_min=shape.spaced_rate_min,
        buffer_bytes_max=shape.buffer_bytes,
        preload_ms=shape.preload_ms,
        retention_period_ms=1_000,
        hours_kept=shape.hours_kept,
        checkpoint_log_bytes=200 << 10,
        checkpoint_period_ms=shape.checkpoint_ms,
        sweep_step_messages=5,
    )
    return tightened(config) if shape.tight else config
