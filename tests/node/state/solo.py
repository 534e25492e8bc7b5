"""One node's wheel and state over a simulated disk, with the real checkpoint and start, and a log that is never lost.

The log is a list; a checkpoint that was told durable cuts it. So what a start brings back is what lies on the disk
plus the entries after that cut, and `check` compares it with a plain account of every message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np

from tests.node.state.driver import admin, dispatch_command, publish_command, settle_command
from tickwheel.node.core.checkpoint import restore
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.state.machine import AnyResult, StateMachine
from tickwheel.node.state.results import AdminResult, DeadResult, PublishResult, SettleResult
from tickwheel.node.state.retrying import COPIES_MAX
from tickwheel.node.state.subscription import Attempts, Positions
from tickwheel.proto import admin_pb2
from tickwheel.proto.consumer_pb2 import EARLIEST
from tickwheel.proto.log_pb2 import (
    SETTLE_ACK,
    SETTLE_DEAD,
    SETTLE_RETRY,
    Command,
    CreateCluster,
    Lead,
    LogEntry,
    RemoveHours,
    ReplayDead,
)
from tickwheel.storage.disk import DiskError
from tickwheel.storage.manifest import read_manifest, write_manifest
from tickwheel.storage.simulated import UNLIMITED_BYTES, SimulatedDisk
from tickwheel.wheel.engine import Wheel
from tickwheel.wheel.units import HOUR_MS, Ids

HOUR_0 = 490_000


class Harm(Exception):
    """Something acknowledged is gone or changed."""


class Damage(Harm):
    """And the node says so: a typed error that names the file, instead of going on."""


@dataclass
class Solo:
    seed: int = 0
    config: CoreConfig = field(default_factory=lambda: CoreConfig(buffer_bytes_max=20_000))
    log: dict[int, LogEntry] = field(default_factory=dict)
    index: int = 0
    cut: int = 0
    now_ms: int = HOUR_0 * HOUR_MS
    expected: dict[int, bytes] = field(default_factory=dict)
    """Record of every message that is pending, by id."""
    records: dict[int, bytes] = field(default_factory=dict)
    """Of every message ever scheduled, by its first id."""
    ready: list[int] = field(default_factory=list)
    """Ids in the order in which they entered the ready queue of topic 1."""
    wheel: Wheel = field(init=False)
    state: StateMachine = field(init=False)

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)
        self.disk = SimulatedDisk(Random(self.seed))
        self._start()

    def _start(self) -> None:
        restored = restore(self.disk, self.config, 1_000, 0)
        self.wheel, self.state = restored.wheel, restored.state

    def create(self, *groups: str) -> None:
        """A cluster with topic `t` and groups from the earliest message on."""
        members = [admin_pb2.Member(node_id="a", peer_address="a:1", client_address="a:2")]
        cluster = CreateCluster(cluster_id="c", settings=admin_pb2.Settings(), members=members)
        self.apply(Command(lead=Lead(term=1, node_id="a")), admin(create_cluster=cluster))
        self.apply(admin(create_topic=admin_pb2.CreateTopicRequest(name="t")))
        for name in groups:
            self.group(name)

    def group(self, name: str) -> None:
        """One more group."""
        self.apply(admin(create_group=admin_pb2.CreateGroupRequest(name=name, topics=["t"], start_from=EARLIEST)))

    # -- the log

    def apply(self, *commands: Command) -> list[AnyResult]:
        """One entry."""
        self.index += 1
        self.log[self.index] = LogEntry(format_version=1, term=1, stamped_ms=self.now_ms, commands=commands)
        return self.state.apply(self.index, 1, self.log[self.index])

    def publish(self, due_ms: list[int], payload: bytes) -> list[int]:
        """Schedule; ids in the order of `due_ms`, which must rise."""
        result = self.apply(publish_command([("", 0, due_ms)], 1, payload))[0]
        assert isinstance(result, PublishResult)
        ids = [int(number) for number in result.requests[0].ids]
        self.expected.update(dict.fromkeys(ids, payload))
        self.records.update(dict.fromkeys(ids, payload))
        return ids

    def dispatch(self, due_ms: int) -> None:
        """Move the cursor to a time."""
        before = self.state.ready_count(1)
        self.apply(dispatch_command(due_ms))
        count = self.state.ready_count(1)
        topic = self.state._state.topics.get(1)
        assert topic is not None
        self.ready += topic.ready.read(before, count - before).tolist()
        self.now_ms = max(self.now_ms, due_ms)

    def settle(self, group_id: int = 1, kind: int = SETTLE_ACK, limit: int = 10_000) -> int:
        """Settle what a group can be given; how many."""
        subscription = self.state.subscription(group_id, 1)
        assert subscription is not None
        positions, ids, attempts = subscription.deliverable(subscription.floor, limit)
        if len(ids):
            self.apply(settle_command(kind, ids.tolist(), attempts.tolist(), positions.tolist(), group_id=group_id))
        return len(ids)

    def settle_some(self, group_id: int, ids: Ids, attempts: Attempts, positions: Positions) -> None:
        """Settle these."""
        columns = (ids.tolist(), attempts.tolist(), positions.tolist())
        self.apply(settle_command(SETTLE_ACK, *columns, group_id=group_id))

    def bury(self, limit: int) -> int:
        """Settle as dead letters."""
        return self.settle(kind=SETTLE_DEAD, limit=limit)

    def retry(self, limit: int, pause_ms: int, group_id: int = 1) -> int:
        """Nack what a group can be given; how many came to be retries or dead letters."""
        subscription = self.state.subscription(group_id, 1)
        assert subscription is not None
        positions, ids, attempts = subscription.deliverable(subscription.floor, limit)
        if not len(ids):
            return 0
        before = _next_indexes(self.wheel)
        due = [self.now_ms + pause_ms] * len(ids)
        columns = (ids.tolist(), attempts.tolist(), positions.tolist())
        result = self.apply(settle_command(SETTLE_RETRY, *columns, group_id=group_id, due_ms=due))[0]
        assert isinstance(result, SettleResult)
        self._expect_copies(before)
        return result.settled

    def replay(self, pause_ms: int, group_id: int = 1) -> int:
        """Deliver all dead letters of a group again; how many."""
        dead = self.state.dead_letters(group_id)
        assert dead is not None
        numbers = [number for number, _ in dead.page(0, COPIES_MAX)]
        before = _next_indexes(self.wheel)
        columns = np.array(numbers, "<u8").tobytes()
        command = ReplayDead(group_id=group_id, numbers=columns, due_ms=self.now_ms + pause_ms, marked=True)
        result = self.apply(Command(replay_dead=command))[0]
        assert isinstance(result, DeadResult)
        self._expect_copies(before)
        return result.changed

    def _expect_copies(self, before: dict[int, int]) -> None:
        """New units are copies: each has the record of the message that it names."""
        for hour, end in _next_indexes(self.wheel).items():
            for index in range(before.get(hour, 0), end):
                number = hour << 32 | index
                job = self.wheel.reads.lookup(np.array([number], np.uint64))
                job.run()
                origin = int(job.units["origin_hour"][0]) << 32 | int(job.units["origin_index"][0])
                self.expected[number] = self.records[origin]

    def remove(self, below: int, forced_below: int | None = None) -> AdminResult:
        """Remove hours."""
        command = RemoveHours(hour_min_kept=below)
        if forced_below is not None:
            command.forced_below = forced_below
        result = self.apply(admin(remove_hours=command))[0]
        assert isinstance(result, AdminResult)
        kept = self.state.hour_min_kept
        self.expected = {number: record for number, record in self.expected.items() if number >> 32 >= kept}
        return result

    # -- what runs beside it

    def pump(self) -> None:
        """Run the wheel's own work."""
        for job in self.wheel.jobs(self.now_ms):
            job.run()
            self.wheel.finish(job)

    def checkpoint(self, meanwhile: Callable[[], None] = lambda: None, *, remove_old: bool = True) -> None:
        """In the order of the node; `meanwhile` happens before its worker runs. Raises DiskError."""
        at = self.index
        checkpoint = self.state.begin_checkpoint()
        meanwhile()
        try:
            checkpoint.run()
            write_manifest(self.disk, checkpoint.manifest)
        except DiskError:
            self.state.abandon_checkpoint(checkpoint)
            raise
        self.cut = at
        self.state.checkpoint_durable(checkpoint)
        if remove_old:
            checkpoint.remove_old()

    # -- after a crash

    def restart(self) -> None:
        """Start from the disk and the log behind the cut. Raises Harm, Damage."""
        try:
            manifest = read_manifest(self.disk)
            found = manifest.applied_index if manifest is not None else 0
            if found < self.cut:
                raise Harm(f"the manifest ends at {found}, the log begins behind {self.cut}")
            self._start()
            for index in range(found + 1, self.index + 1):
                self.state.apply(index, 1, self.log[index])
        except DiskError as error:
            raise Damage(str(error)) from error

    def crash(self) -> None:
        """Lose power, start, compare. Raises Harm, Damage."""
        before = self.state.digest().digest
        self.disk.crash(scattered=self.rng.random() < 0.5)
        self.restart()
        if self.state.digest().digest != before:
            raise Harm("the digest is another")
        self.check()

    def check(self) -> None:
        """Every message can be read, every position of the ready queue has its id. Raises Harm, Damage."""
        try:
            self._check()
        except DiskError as error:
            raise Damage(str(error)) from error

    def _check(self) -> None:
        ids = np.array(sorted(self.expected), np.uint64)
        job = self.wheel.reads.lookup(ids)
        job.run()
        if not job.found.all():
            raise Harm("a message is not found")
        records = self.wheel.reads.records(job.units)
        records.run()
        if records.records != [self.expected[number] for number in ids.tolist()]:
            raise Harm("a record is another")
        topic = self.state._state.topics.get(1)
        if topic is None:
            return
        first = topic.ready.first_retained
        if topic.ready.read(first, topic.ready.count).tolist() != self.ready[first:]:
            raise Harm("the ready queue is another")
        if topic.ready.count > first and topic.ready.position_of_due(0) != first:
            raise Harm("the ticks of the ready queue are others")
        for group in self.state._state.groups:
            for _, letter in group.dead.page(0, 1 << 30):
                if group.dead.content(letter)[1] != self.records[int(letter["origin"])]:
                    raise Harm("a dead letter has another record")

    def bytes_on_disk(self) -> int:
        """Of everything there is."""
        return UNLIMITED_BYTES - self.disk.space_left()


def _next_indexes(wheel: Wheel) -> dict[int, int]:
    """The next global index of each hour."""
    return {hour: wheel.holdings.hours.units(hour) for hour in wheel.holdings.hours.used().tolist()}
