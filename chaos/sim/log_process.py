"""The replicated log alone on a machine: the shortest way to a Raft bug.

The listener keeps no state but where it stands; a checkpoint of it is a file with index and term.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace

from tickwheel.chaos.sim.history import Applied, LeaseSeen, RoleSeen, SyncHeard
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.shape import Shape
from tickwheel.proto.peer_pb2 import PeerFrame
from tickwheel.replication.config import RaftConfig
from tickwheel.replication.guards import Guards
from tickwheel.replication.journal import Journal
from tickwheel.replication.log import LogStatus, Member
from tickwheel.replication.raft import RaftLog

CLUSTER_ID = "simulated"
CHECKPOINT_PATH = "checkpoint"
SEGMENT_BYTES = 256 << 10
COMMAND = struct.Struct("<Q")


def members_of(names: Sequence[str]) -> list[Member]:
    """Members with addresses that name them."""
    return [Member(name, f"{name}.invalid:7001", f"{name}.invalid:7000") for name in names]


def with_shape(config: RaftConfig, shape: Shape) -> RaftConfig:
    """The log's limits as the shape of the run wants them."""
    return replace(
        config,
        journal_tail_bytes_max=shape.journal_tail_bytes,
        batch_entries_max=shape.batch_entries,
        apply_entries_max=shape.apply_entries,
        apply_batch_entries=min(config.apply_batch_entries, shape.apply_entries),
    )


class Watcher:
    """Writes role and lease of a log to the history, when they change."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._standing = ("", -1)
        self._lease = (-1, -1)

    @property
    def term(self) -> int:
        """As last told."""
        return self._standing[1]

    def role(self, role: str, term: int) -> None:
        if (role, term) != self._standing:
            self._standing = (role, term)
            machine = self._machine
            machine.history.add(RoleSeen(machine.world.now_ns, machine.name, machine.boot, role, term))
            machine.world.tell(machine.name, f"is {role} in term {term}")

    def lease(self, term: int, until_ns: int) -> None:
        """`until_ns` by the machine's clock; 0: not held."""
        if (term, until_ns) != self._lease and (until_ns or self._lease[1]):
            self._lease = (term, until_ns)
            machine = self._machine
            true_ns = machine.clock.true_ns(until_ns) if until_ns else 0
            machine.history.add(LeaseSeen(machine.world.now_ns, machine.name, machine.boot, term, true_ns))


class LogProcess:
    """`Process` and `LogListener`: a RaftLog whose applied state is a position."""

    def __init__(
        self, machine: Machine, names: Sequence[str], config: RaftConfig, guards: Guards, checkpoint_every: int
    ) -> None:
        self.machine = machine
        self._watcher = Watcher(machine)
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

    # -- Process

    def start(self) -> None:
        self.role_changed(self.log.status())
        self.log.start()

    def tick(self) -> int:
        wanted_ns = self.log.tick()
        if self._applied[0] - self._checkpointed >= self._checkpoint_every:
            self._checkpoint()
        return wanted_ns

    def receive(self, peer_id: str, frame: PeerFrame) -> None:
        self.log.receive(peer_id, frame)

    def peer_connected(self, peer_id: str) -> None:
        self.log.peer_connected(peer_id)

    def peer_disconnected(self, peer_id: str) -> None:
        self.log.peer_disconnected(peer_id)

    def stop(self) -> None:
        self.log.stop()

    def observe(self) -> None:
        until_ns = self.log.lease_until_ns()
        held = until_ns > self.machine.clock.monotonic_ns()
        self._watcher.lease(self._watcher.term, until_ns if held else 0)

    @property
    def position(self) -> tuple[int, int]:
        """Index and term of the last entry applied."""
        return self._applied

    # -- LogListener

    def apply(self, index: int, term: int, command: bytes) -> object:
        number = COMMAND.unpack_from(command)[0] if command else 0
        machine = self.machine
        self._applied = (index, term)
        machine.history.add(Applied(machine.world.now_ns, machine.name, machine.boot, index, term, number))
        return number

    def role_changed(self, status: LogStatus) -> None:
        self._watcher.role(status.role.value, status.term)

    def sync_out(self, peer_id: str) -> PeerFrame | None:
        self._sync_number += 1
        frame = PeerFrame()
        frame.sync.number = self._sync_number
        frame.sync.sent_ns = self.machine.clock.monotonic_ns()
        return frame

    def sync_in(self, peer_id: str, frame: PeerFrame) -> PeerFrame | None:
        note_sync(self.machine, peer_id, frame)
        answer = PeerFrame()
        answer.sync_reply.number = frame.sync.number
        return answer

    def handover_ready(self, peer_id: str) -> bool:
        """See LogListener."""
        return True

    def sync_reply_in(self, peer_id: str, frame: PeerFrame) -> None:
        """Nothing waits for it."""

    def checkpoint_needed(self, peer_id: str, applied_index: int) -> None:
        """Copy the peer's checkpoint, as a fetch would, and restart from it."""
        disk = self.machine.fabric.machines[peer_id].disk
        if not disk.exists(CHECKPOINT_PATH):
            return
        data = disk.open(CHECKPOINT_PATH).read_at(0, 64)
        if _parse(data)[0] <= self._applied[0]:
            return
        self._write_checkpoint(data)
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
        aside.sync()
        aside.close()
        disk.rename("checkpoint.aside", CHECKPOINT_PATH)
        disk.sync_dir("")

    def _read_checkpoint(self) -> tuple[int, int]:
        disk = self.machine.disk
        if not disk.exists(CHECKPOINT_PATH):
            return (0, 0)
        return _parse(disk.open(CHECKPOINT_PATH).read_at(0, 64))


RESTART_FROM_CHECKPOINT = "restart from the checkpoint"


def _parse(data: bytes) -> tuple[int, int]:
    index, term, crc = struct.unpack("<QQI", data)
    assert crc == zlib.crc32(data[:16]), "the simulated checkpoint is synced before it is renamed"
    return index, term


def note_sync(machine: Machine, peer_id: str, frame: PeerFrame) -> None:
    """Write down that a sync was heard, with the true time of its sending."""
    sent_ns = machine.fabric.machines[peer_id].clock.true_ns(frame.sync.sent_ns)
    machine.history.add(SyncHeard(machine.world.now_ns, machine.name, machine.boot, peer_id, frame.term, sent_ns))
