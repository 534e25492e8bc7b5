"""The replicated log alone on a machine: the shortest way to a Raft bug.

The listener's only state is its position. Its checkpoint is a file with index and term.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace

from tickwheel.chaos.sim.history_log import Applied
from tickwheel.chaos.sim.history_machines import CheckpointTaken, SizesSeen, SyncHeard
from tickwheel.chaos.sim.log_watch import Census, LogWatch
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.shape import Shape
from tickwheel.chaos.sim.world import MS
from tickwheel.proto.peer_pb2 import PeerFrame
from tickwheel.replication.config import RaftConfig
from tickwheel.replication.frames import Refusal
from tickwheel.replication.guards import Guards
from tickwheel.replication.journal import Journal
from tickwheel.replication.log import LogStatus, Member
from tickwheel.replication.raft import RaftLog
from tickwheel.storage.disk import DiskError

CLUSTER_ID = "simulated"
CHECKPOINT_PATH = "checkpoint"
SEGMENT_BYTES = 256 << 10
COMMAND = struct.Struct("<Q")
SIZES_EVERY_NS = 100 * MS


def members_of(names: Sequence[str]) -> list[Member]:
    """Members with addresses that name them."""
    return [Member(name, f"{name}.invalid:7001", f"{name}.invalid:7000") for name in names]


def with_shape(config: RaftConfig, shape: Shape) -> RaftConfig:
    """The log's limits as the shape of the run wants them."""
    return replace(
        config,
        append_period_ms=shape.sync_period_ms,
        journal_tail_bytes_max=shape.journal_tail_bytes,
        batch_entries_max=shape.batch_entries,
        batch_bytes_max=shape.batch_bytes,
        apply_entries_max=shape.apply_entries,
        apply_batch_entries=min(config.apply_batch_entries, shape.apply_entries),
    )


class LogProcess:
    """`Process` and `LogListener`: a RaftLog whose applied state is a position."""

    def __init__(
        self,
        machine: Machine,
        names: Sequence[str],
        config: RaftConfig,
        guards: Guards,
        checkpoint_every: int,
        census: Census,
    ) -> None:
        self.machine = machine
        self.watch = LogWatch(machine, census)
        self._config = config
        self._next_sizes_ns = 0
        self._checkpoint_every = checkpoint_every
        applied = self._read_checkpoint()
        journal = Journal.open(machine.disk, "journal", segment_bytes=SEGMENT_BYTES)
        if applied[0] > journal.base_index:
            journal.reset_to(*applied)
        self._applied = applied
        self._checkpointed = applied[0]
        self._sync_number = 0
        self.log = RaftLog(
            config,
            machine.name,
            CLUSTER_ID,
            machine.clock,
            machine.executor,
            machine.network,
            machine.world.stream(f"node/{machine.name}/{machine.boot}"),
            self,
            journal,
            members_of(names),
            applied,
            guards=guards,
        )
        self.watch.attach(self.log)

    # -- Process

    def start(self) -> None:
        self.role_changed(self.log.status())
        self.log.start()

    def tick(self, *, woken: bool) -> int:
        wanted_ns = self.log.tick()
        if self._applied[0] - self._checkpointed >= self._checkpoint_every:
            self._checkpoint()
        return wanted_ns

    def receive(self, peer_id: str, frame: PeerFrame) -> bool:
        return self.watch.received(self.log, peer_id, frame, self.log.receive)

    def peer_connected(self, peer_id: str) -> None:
        self.log.peer_connected(peer_id)

    def peer_disconnected(self, peer_id: str) -> None:
        self.log.peer_disconnected(peer_id)

    def stop(self) -> None:
        self.log.stop()

    def refuses(self, peer_id: str) -> Refusal | None:
        return None

    def observe(self) -> None:
        self.watch.observe(self.log)
        now_ns = self.machine.world.now_ns
        if now_ns >= self._next_sizes_ns:
            self._next_sizes_ns = now_ns + SIZES_EVERY_NS
            self.machine.history.note(SizesSeen, self.machine.name, self._sizes())

    def _sizes(self) -> tuple[tuple[str, int, int], ...]:
        config, watch = self._config, self.watch
        proposals, proposal_bytes = self.log.in_flight()
        return (
            ("proposals in flight", proposals, config.proposals_max),
            ("bytes of proposals in flight", proposal_bytes, config.proposal_bytes_max + config.command_bytes_max),
            ("entries of a message", watch.entries_sent_most, config.batch_entries_max),
            ("entries applied in a turn", watch.applied_most, config.apply_entries_max),
        )

    @property
    def position(self) -> tuple[int, int]:
        """Index and term of the last entry applied."""
        return self._applied

    # -- LogListener

    def apply(self, index: int, term: int, command: bytes) -> object:
        number = COMMAND.unpack_from(command)[0] if command else 0
        machine = self.machine
        machine.may_apply()
        self._applied = (index, term)
        self.watch.applied(index, term, self.log)
        machine.note(Applied, index, term, number)
        return number

    def problem_of(self, entry: bytes, start: int) -> str:
        return ""

    def role_changed(self, status: LogStatus) -> None:
        self.watch.role(status.role.value, status.term, self.log.voters)

    def sync_out(self, peer_id: str) -> PeerFrame | None:
        self._sync_number += 1
        frame = PeerFrame()
        frame.sync.number = self._sync_number
        frame.sync.sent_ns = self.machine.clock.monotonic_ns()
        note_sync_sent(self.machine, peer_id, frame)
        return frame

    def sync_unsent(self, peer_id: str) -> None:
        pass

    def sync_in(self, peer_id: str, frame: PeerFrame) -> PeerFrame | None:
        note_sync(self.machine, peer_id, frame)
        answer = PeerFrame()
        answer.sync_reply.number = frame.sync.number
        return answer

    def may_vote(self) -> bool:
        return True

    def may_apply(self) -> bool:
        return True

    def handover_ready(self, peer_id: str) -> bool:
        return True

    def sync_reply_in(self, peer_id: str, frame: PeerFrame) -> None:
        """Nothing waits for it."""

    def beside_in(self, peer_id: str, frame: PeerFrame) -> PeerFrame | None:
        """Nothing is sent beside the log."""
        return None

    def forgot(self, peer_id: str, last_index: int, acknowledged_index: int) -> None:
        self.fatal(f"{peer_id} has acknowledged entry {acknowledged_index}, and its log ends at {last_index}")

    def damaged(self, error: DiskError) -> None:
        self.fatal(str(error))

    def checkpoint_needed(self, peer_id: str, applied_index: int) -> None:
        """Copy the peer's checkpoint, as a fetch would, and restart from it."""
        disk = self.machine.fabric.machines[peer_id].disk
        if not disk.exists(CHECKPOINT_PATH):
            return
        if self.machine.copies_fail:
            self.machine.copies_failed += 1
            return
        data = disk.open(CHECKPOINT_PATH).read_at(0, 64)
        if _parse(data)[0] <= self._applied[0]:
            return
        self._write_checkpoint(data)
        self.machine.note(CheckpointTaken)
        self.machine.fatal(f"{RESTART_FROM_CHECKPOINT} of {peer_id}")

    def fatal(self, reason: str) -> None:
        self.machine.fatal(reason)

    # -- checkpoints

    def _checkpoint(self) -> None:
        index, term = self._applied
        body = struct.pack("<QQ", index, term)
        self._write_checkpoint(body + struct.pack("<I", zlib.crc32(body)))
        self._checkpointed = index
        self.log.checkpointed(index, term)

    def _write_checkpoint(self, data: bytes) -> None:
        disk = self.machine.disk
        aside = disk.open("checkpoint.aside", create=True)
        aside.truncate(0)
        aside.append(data)
        aside.fsync()
        aside.close()
        disk.rename("checkpoint.aside", CHECKPOINT_PATH)
        disk.fsync_dir("")

    def _read_checkpoint(self) -> tuple[int, int]:
        disk = self.machine.disk
        if not disk.exists(CHECKPOINT_PATH):
            return (0, 0)
        return _parse(disk.open(CHECKPOINT_PATH).read_at(0, 64))


RESTART_FROM_CHECKPOINT = "restart from the checkpoint"


def _parse(data: bytes) -> tuple[int, int]:
    index, term, crc = struct.unpack("<QQI", data)
    assert crc == zlib.crc32(data[:16]), "the simulated checkpoint is fsynced before it is renamed"
    return index, term


def note_sync_sent(machine: Machine, peer_id: str, frame: PeerFrame) -> None:
    """Remember when a sync left, and which one it follows."""
    now_ns = machine.world.now_ns
    machine.syncs_sent[peer_id, frame.sync.sent_ns] = now_ns, machine.last_syncs.get(peer_id, 0)
    machine.last_syncs[peer_id] = now_ns


def note_sync(machine: Machine, peer_id: str, frame: PeerFrame) -> None:
    """Write down that a sync was heard, with the true times of its sending and of that of the one before it."""
    sent_ns, before_ns = machine.fabric.machines[peer_id].syncs_sent[machine.name, frame.sync.sent_ns]
    machine.note(SyncHeard, peer_id, frame.term, sent_ns, before_ns, frame.sync.complete)
