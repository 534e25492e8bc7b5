"""Three nodes in one process on a simulated clock, network, disk and executor; for tests of the core.

Small on purpose: links are in order with a fixed delay and may be cut, disks lose what was not synced. The
simulation in chaos/sim does all this with chance; here a test says what happens.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import google_crc32c
import numpy as np

from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.delivery.consumers import ConsumerHandle
from tickwheel.node.core.host import NodeHost, raft_config
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.schedule.intake import KIND_DUE, IncomingBatch
from tickwheel.node.core.schedule.publisher import BatchOutcome
from tickwheel.node.core.world import NodeIdentity, Ports, Reported
from tickwheel.node.failure import Failure
from tickwheel.proto import common_pb2, consumer_pb2
from tickwheel.proto.common_pb2 import HeldFile
from tickwheel.proto.peer_pb2 import CheckpointChunk, PeerFrame
from tickwheel.replication.journal import FsyncWork
from tickwheel.replication.log import Member
from tickwheel.storage.disk import DiskFullError
from tickwheel.storage.simulated import SimulatedDisk
from tickwheel.wheel.jobs import MergeJob

T = TypeVar("T")

MS = 1_000_000
EPOCH_MS = 1_800_000_000_000
LINK_NS = MS // 2
DISK_NS = MS // 2
BOOT_NS = 10**9


def places(name: str) -> tuple[str, str, str]:
    """Id and addresses of a member."""
    return name, f"peer-{name}", f"client-{name}"


class World:
    """Virtual time and three nodes."""

    def __init__(self, seed: int = 1, names: str = "abc", config: CoreConfig | None = None) -> None:
        self.now_ns = 0
        self.agenda: list[tuple[int, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.rng = random.Random(seed)
        self.config = config or replace(CoreConfig(), segment_bytes=1 << 20, sync_period_ms=100)
        self.cut: set[frozenset[str]] = set()
        self.nodes = {name: Node(self, name) for name in names}
        for node in self.nodes.values():
            node.start()

    def at(self, when_ns: int, action: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (when_ns, next(self.order), action))

    def run(self, ms: float) -> None:
        """Let so much time pass."""
        until_ns = self.now_ns + int(ms * MS)
        while self.agenda and self.agenda[0][0] <= until_ns:
            self.now_ns, _, action = heapq.heappop(self.agenda)
            action()
        self.now_ns = until_ns

    def run_until(self, condition: Callable[[], bool], ms: float = 10_000) -> None:
        """Let time pass until something holds; it must within `ms`."""
        limit_ns = self.now_ns + int(ms * MS)
        while not condition():
            assert self.now_ns < limit_ns, "it did not come to hold in time"
            self.run(5)

    @property
    def now_ms(self) -> int:
        return EPOCH_MS + self.now_ns // MS

    def master(self) -> Node | None:
        return next(
            (n for n in self.nodes.values() if n.host and n.host.core.leading and n.host.core.log.lease_held()), None
        )

    def elect(self) -> Node:
        self.run_until(lambda: self.master() is not None)
        master = self.master()
        assert master is not None
        return master

    def connected(self, one: str, other: str) -> bool:
        nodes = self.nodes
        return bool(nodes[one].host and nodes[other].host) and frozenset((one, other)) not in self.cut

    def cut_off(self, name: str) -> None:
        """Take a node off the network: its connections break."""
        for other in self.nodes:
            if other != name:
                self.cut.add(frozenset((name, other)))
                for a, b in ((name, other), (other, name)):
                    host = self.nodes[a].host
                    if host is not None:
                        host.peer_disconnected(b)
                        self.nodes[a].wake()

    def join(self, name: str) -> Node:
        """A node with an empty disk that waits to be added."""
        self.nodes[name] = Node(self, name, joining=True)
        self.nodes[name].start()
        return self.nodes[name]

    def heal(self) -> None:
        self.cut.clear()
        for one, other in itertools.permutations(self.nodes, 2):
            host = self.nodes[one].host
            if host is not None and self.nodes[other].host is not None:
                host.peer_connected(other)
                self.nodes[one].wake()


class Node:
    """One machine; implements the ports."""

    def __init__(self, world: World, name: str, *, joining: bool = False) -> None:
        self.world = world
        self.name = name
        self.joining = joining
        self.boot = 0
        self.host: NodeHost | None = None
        self.disk_uuid = f"disk-{name}"
        self.disk = SimulatedDisk(random.Random(f"{name}{world.rng.random()}"))
        self.wake_ns: int | None = None
        self.woken = True
        """Input has come since the last tick that is not for the log alone."""
        self.fatal = ""
        self.no_room = ""
        self.reported: list[Reported] = []
        """What operators would read, of all its lives."""
        self.holds_merges = False
        """Its disk takes no merge to its end."""
        self.holds_checkpoints = False
        """Nor a checkpoint of its own."""
        self.holds_syncs = False
        """Nor a sync of its journal."""
        self.held: list[Callable[[], None]] = []
        self.copied_bytes = 0
        """Of checkpoints, received from peers."""
        self.faults: Callable[[str, BaseException], None] | None = None
        """Gets contained errors with their ids; None: errors raise."""
        self.copy_bytes_left: int | None = None
        """Before the link breaks; None: it does not."""
        self.calls: set[str] = set()
        """Whom it wants to be connected to."""

    # Clock

    def monotonic_ns(self) -> int:
        return self.world.now_ns + BOOT_NS

    def wall_ms(self) -> int:
        return self.world.now_ms

    # Executor

    def submit(self, work: Callable[[], T], done: Callable[[T | None, BaseException | None], None]) -> None:
        boot = self.boot

        def go() -> None:
            if boot != self.boot:
                return
            try:
                result, error = work(), None
            except Exception as raised:
                result, error = None, raised
            done(result, error)
            self.woken |= not sync
            self._tick_now()

        merge = isinstance(getattr(work, "__self__", None), MergeJob)
        checkpoint = getattr(work, "__qualname__", "").startswith("Checkpointer.")
        sync = isinstance(getattr(work, "__self__", None), FsyncWork)
        if (merge and self.holds_merges) or (checkpoint and self.holds_checkpoints) or (sync and self.holds_syncs):
            self.held.append(go)
        else:
            self.world.at(self.world.now_ns + DISK_NS, go)

    def release(self) -> None:
        """The disk has caught up."""
        self.holds_merges = self.holds_checkpoints = self.holds_syncs = False
        held, self.held = self.held, []
        for go in held:
            self.world.at(self.world.now_ns + DISK_NS, go)

    # Network and CheckpointSource

    def send(self, peer_id: str, frame: PeerFrame) -> bool:
        if not self.world.connected(self.name, peer_id):
            return False
        data, target = frame.SerializeToString(), self.world.nodes[peer_id]
        boot = target.boot

        def arrive() -> None:
            if target.boot != boot or not target.host or not self.world.connected(self.name, peer_id):
                return
            if target.host.receive(self.name, PeerFrame.FromString(data)):
                target._tick_now()

        self.world.at(self.world.now_ns + LINK_NS, arrive)
        return True

    def set_peers(self, addresses: dict[str, str]) -> None:
        self.calls = set(addresses)

    def fetch(
        self,
        peer_id: str,
        held: Sequence[HeldFile],
        chunk: Callable[[CheckpointChunk], bool | None],
        done: Callable[[str | None], None],
    ) -> None:
        source = self.world.nodes[peer_id]
        if source.host is None:
            done(f"{peer_id} is not there")
            return
        checkpointer = source.host.core.checkpointer
        known = {file.path: file for file in held}

        def files_ready(files: object) -> None:
            assert isinstance(files, list)
            broken = False
            for copied in files:
                file = source.disk.open(copied.path)
                data = file.read_at(0, copied.bytes)
                file.close()
                earlier, offset = known.get(copied.path), 0
                if earlier is not None and google_crc32c.value(data[: earlier.bytes]) == earlier.crc32c:
                    offset = min(earlier.bytes, len(data))
                data = data[offset:]
                if self.copy_bytes_left is not None:
                    data = data[: self.copy_bytes_left]
                    self.copy_bytes_left -= len(data)
                self.copied_bytes += len(data)
                chunk(CheckpointChunk(path=copied.path, offset=offset, data=data, crc32c=google_crc32c.value(data)))
                if self.copy_bytes_left == 0:
                    broken = True
                    break
            checkpointer.copied(files)
            done("the link broke" if broken else None)
            self.wake()

        checkpointer.request(Reply.either(files_ready))
        source.wake()

    # Random

    def random(self) -> float:
        return self.world.rng.random()

    def getrandbits(self, bits: int) -> int:
        return self.world.rng.getrandbits(bits)

    # Life

    def start(self) -> None:
        self.boot += 1
        self.wake_ns = None
        members = [] if self.joining else [Member(*places(name)) for name in sorted(self.world_names())]
        self.host = NodeHost(
            self.world.config,
            raft_config(self.world.config),
            NodeIdentity("c", self.name, disk_uuid=self.disk_uuid),
            Ports(self.disk, self, self, self, self, self),
            seed=None,
            members=members,
            joining=self.joining,
            on_fatal=self._on_fatal,
            source=self,
            report=self.reported.append,
            faults=self.faults,
            on_no_room=self._on_no_room,
        )
        self.host.start()
        for other in self.world_nodes():
            if other is not self and self.world.connected(self.name, other.name):
                assert other.host is not None
                self.host.peer_connected(other.name)
                other.host.peer_connected(self.name)
                other.wake()
        self.wake()

    def world_names(self) -> list[str]:
        return list(getattr(self.world, "nodes", {}) or "abc")

    def world_nodes(self) -> list[Node]:
        return [n for n in getattr(self.world, "nodes", {}).values() if n.host is not None]

    def _on_no_room(self, error: DiskFullError) -> None:
        self.no_room = str(error)
        self._ended()

    def _on_fatal(self, reason: str) -> None:
        self.fatal = reason
        self._ended()

    def _ended(self) -> None:
        self.boot += 1
        self.host = None
        self.world.at(self.world.now_ns, self._connections_break)

    def _connections_break(self) -> None:
        """As they do when a process ends."""
        for other in self.world_nodes():
            assert other.host is not None
            other.host.peer_disconnected(self.name)
            other.wake()

    def kill(self) -> None:
        """SIGKILL and power loss at once: what was not synced may be gone."""
        self.boot += 1
        self.host = None
        self.disk.crash()
        self._connections_break()

    def wipe(self) -> None:
        """It is down, and its disk is replaced by an empty one."""
        assert self.host is None
        self.disk_uuid += "'"
        self.disk = SimulatedDisk(random.Random(f"{self.name}{self.world.rng.random()}"))

    def wake(self) -> None:
        self.woken = True
        self._tick_now()

    def _tick_now(self) -> None:
        if self.wake_ns is None or self.wake_ns > self.world.now_ns:
            self._sleep_until(self.world.now_ns)

    def _sleep_until(self, when_ns: int) -> None:
        boot = self.boot
        self.wake_ns = when_ns

        def tick() -> None:
            if boot != self.boot or self.host is None or self.wake_ns != when_ns:
                return
            self.wake_ns = None
            woken, self.woken = self.woken, False
            wanted_ns = self.host.tick(woken=woken) - BOOT_NS
            if self.host is not None and self.wake_ns is None:
                self._sleep_until(max(wanted_ns, self.world.now_ns + MS // 10))

        self.world.at(when_ns, tick)


class Client:
    """Schedules and consumes, and remembers everything that was promised."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.group, self.topics = "g", ["t"]
        """What it consumes."""
        self.acked: dict[bytes, int] = {}
        self.refused: list[Failure] = []
        self.got: dict[bytes, list[tuple[int, int, int]]] = {}
        """record -> (when, attempt, due_ms) of each delivery"""
        self.count = 0
        self.session: ConsumerHandle | None = None
        self.at: Node | None = None
        self.boot = 0
        self.settle = True
        self.outcome: consumer_pb2.Outcome.ValueType = consumer_pb2.ACK
        self.gives_credit = True
        """Takes as many again as it has settled."""
        self.closed = False
        self.unsettled: list[consumer_pb2.SettleBatch] = []
        """Settlements that a master refused: the next one gets them."""

    def schedule(self, delays_ms: list[int], producer: str = "", sequence: int = 0) -> None:
        master = self.world.master()
        if master is None or master.host is None:
            return
        due = [self.world.now_ms + delay for delay in delays_ms]
        records = [b"m%d" % (self.count + i) for i in range(len(due))]
        self.count += len(due)
        batch = IncomingBatch(
            producer_id=producer,
            sequence=sequence,
            count=len(due),
            topics=["t"],
            topic_of=None,
            when=np.array(due, np.int64),
            kinds=KIND_DUE,
            sizes=np.array([len(r) for r in records], np.uint32),
            records=b"".join(records),
        )

        def done(outcome: BatchOutcome | Failure) -> None:
            if isinstance(outcome, Failure):
                self.refused.append(outcome)
            else:
                self.acked.update(zip(records, due, strict=True))

        master.host.core.parts.publisher.schedule(batch, Reply(done, done))
        master.wake()

    def consume(self, credits: int = 10_000, lease_ms: int = 5_000) -> None:
        """Open a consumer at the master, and again wherever the master goes."""
        master = self.world.master()
        if (
            master is not None
            and master.host is not None
            and (self.at is not master or self.closed or self.boot != master.boot)
        ):
            self.at, self.boot, self.closed = master, master.boot, False
            request = consumer_pb2.OpenConsumer(
                group=self.group, topics=self.topics, credits=credits, lease_ms=lease_ms
            )
            master.host.core.serving.start(
                master.host.core.parts.consumers.open(request, self._deliver, self._closed), self._opened
            )
            master.wake()
        self.world.at(self.world.now_ns + 20 * MS, lambda: self.consume(credits, lease_ms))

    def _opened(self, session: ConsumerHandle | Failure) -> None:
        if isinstance(session, Failure):
            self.closed = True
        else:
            self.session = session
            refused, self.unsettled = self.unsettled, []
            for settle in refused:
                self._settle(session, settle)

    def _settle(self, session: ConsumerHandle, settle: consumer_pb2.SettleBatch) -> None:
        def done(receipt: object) -> None:
            if isinstance(receipt, Failure):
                self.unsettled.append(settle)

        session.settle(settle, Reply(done, done))

    def _closed(self, failure: Failure) -> None:
        self.closed = failure.reason != common_pb2.UNKNOWN_NAME  # whose group is gone makes no other

    def _deliver(self, batch: consumer_pb2.DeliverBatch) -> None:
        at = 0
        sizes = np.frombuffer(batch.sizes, "<u4").tolist()
        attempts = np.frombuffer(batch.attempts, "<u4").tolist()
        due = np.frombuffer(batch.due_ms, "<i8").tolist()
        for size, attempt, due_ms in zip(sizes, attempts, due, strict=True):
            self.got.setdefault(batch.records[at : at + size], []).append((self.world.now_ms, attempt, due_ms))
            at += size
        session, node = self.session, self.at
        if not self.settle or session is None or node is None:
            return
        settle = consumer_pb2.SettleBatch(
            group=self.group, topic=batch.topic, outcome=self.outcome,
            ids=batch.ids, attempts=batch.attempts, positions=batch.positions, epoch=batch.epoch,
        )  # fmt: skip

        def answer() -> None:
            if node.host is not None and not self.closed:
                self._settle(session, settle)
                if self.gives_credit:
                    session.credit(len(attempts))
                node.wake()

        self.world.at(self.world.now_ns + MS, answer)

    def lost(self) -> set[bytes]:
        return set(self.acked) - set(self.got)

    def early(self) -> list[bytes]:
        return [r for r, seen in self.got.items() if any(when < self.acked.get(r, when) for when, _, _ in seen)]

    def repeated(self) -> list[bytes]:
        return [r for r, seen in self.got.items() if len(seen) > 1]


def digests(world: World) -> set[tuple[int, bytes]]:
    """(applied index, digest) of all nodes; one element when they agree."""
    found = set()
    for node in world.nodes.values():
        assert node.host is not None, node.fatal
        digest = node.host.core.state.digest()
        found.add((digest.applied_index, digest.digest))
    return found
