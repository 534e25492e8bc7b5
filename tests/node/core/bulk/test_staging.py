"""The master's part of bulk writes, on three nodes: a commit that has begun is finished by whoever is master."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.node.core.trio import Client, Node, World, digests
from tickwheel.node.core.bulk import staging as staged_writes
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.core import serve
from tickwheel.node.core.schedule.intake import KIND_DUE, IncomingBatch
from tickwheel.node.failure import Failure
from tickwheel.proto import admin_pb2, common_pb2, staging_pb2
from tickwheel.proto.log_pb2 import AdminCommand
from tickwheel.proto.staging_pb2 import STAGED_OPEN, STAGED_PUBLISHED, STAGED_PUBLISHING, StagedJob


def rows(world: World, records: Sequence[bytes], delay_ms: int, topic: str = "t") -> IncomingBatch:
    """A block."""
    return IncomingBatch(
        producer_id="",
        sequence=0,
        count=len(records),
        topics=[topic],
        topic_of=None,
        when=np.full(len(records), world.now_ms + delay_ms, np.int64),
        kinds=KIND_DUE,
        sizes=np.array([len(r) for r in records], np.uint32),
        records=b"".join(records),
    )


class Writer:
    """A job's tasks and driver, at whoever is master."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.answers: list[StagedJob | Failure] = []
        self.run_id = "r"

    @property
    def master(self) -> Node:
        return self.world.elect()

    def stage(self, sequence: int, records: Sequence[bytes], *, attempt: int = 5, delay_ms: int = 60_000) -> None:
        """Stage a block and wait for the answer."""
        request = staging_pb2.StageRequest(job_id="j", run_id=self.run_id, attempt=attempt, sequence=sequence)
        node = self.master
        assert node.host is not None
        node.host.core.serving.start(
            node.host.core.parts.staging.stage(request, rows(self.world, records, delay_ms)), self.answers.append
        )
        node.wake()

    def commit(self, blocks: int, count: int, *, attempt: int = 5) -> None:
        """Commit one attempt."""
        named = staging_pb2.StagedAttempt(attempt=attempt, blocks=blocks, rows=count)
        request = staging_pb2.CommitStagedRequest(job_id="j", run_id=self.run_id, attempts=[named])
        node = self.master
        assert node.host is not None
        node.host.core.serving.start(node.host.core.parts.staging.commit(request), self.answers.append)
        node.wake()

    def abort(self) -> None:
        """Drop what the run has staged."""
        node = self.master
        assert node.host is not None
        request = staging_pb2.AbortStagedRequest(job_id="j", run_id=self.run_id)
        node.host.core.serving.start(node.host.core.parts.staging.abort(request), self.answers.append)
        node.wake()

    def job(self) -> StagedJob:
        """What the master says now."""
        found: list[StagedJob | Failure] = []
        node = self.master
        assert node.host is not None
        node.host.core.serving.start(
            node.host.core.parts.staging.job(staging_pb2.GetStagedJobRequest(job_id="j")), found.append
        )
        assert isinstance(found[0], StagedJob)
        return found[0]

    def wait(self, count: int) -> None:
        """Until so many answers came; none may be a failure."""
        self.world.run_until(lambda: len(self.answers) >= count)
        failures = [a for a in self.answers if isinstance(a, Failure)]
        assert not failures, failures


def test_staged_rows_are_delivered_once_after_the_commit_and_none_before() -> None:
    """Also into a topic that did not exist; all nodes agree."""
    world = World()
    writer, client = Writer(world), Client(world)
    world.elect()
    client.consume()
    records = [b"row%d" % n for n in range(30)]
    for number in range(3):
        writer.stage(number, records[10 * number : 10 * number + 10], delay_ms=0)
    writer.stage(0, [b"loser"] * 5, attempt=6, delay_ms=0)
    writer.wait(4)
    world.run(3_000)
    assert not client.got
    writer.commit(3, 30)
    world.run_until(lambda: len(client.got) == 30)
    world.run(1_000)
    assert set(client.got) == set(records) and not client.repeated()
    assert writer.job().state == STAGED_PUBLISHED
    world.run_until(lambda: len(digests(world)) == 1)


@pytest.mark.parametrize("kill_after_ms", [0, 2, 5, 9, 14, 20, 30])
def test_a_commit_is_finished_by_the_next_master(kill_after_ms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The master dies in the middle of publishing, at one point or another: the rows are there once."""
    monkeypatch.setattr(staged_writes, "PUBLISH_AHEAD_MAX", 2)
    world = World(seed=kill_after_ms)
    writer, client = Writer(world), Client(world)
    first = world.elect()
    client.consume()
    records = [b"row%d" % n for n in range(40)]
    for number, record in enumerate(records):
        writer.stage(number, [record], delay_ms=10_000)
    writer.wait(40)
    writer.commit(40, 40)
    world.run(kill_after_ms)
    first.kill()
    world.run_until(lambda: (m := world.master()) is not None and m is not first)
    writer.commit(40, 40)
    world.run_until(lambda: writer.job().state == STAGED_PUBLISHED)
    assert writer.job().rows_published == 40
    first.start()
    world.run_until(lambda: len(client.got) == 40, ms=40_000)
    world.run(500)
    assert set(client.got) == set(records) and not client.repeated()
    world.run_until(lambda: len(digests(world)) == 1)


def test_a_node_that_was_away_gets_staged_rows_with_a_checkpoint() -> None:
    """What is staged is part of what a slave installs: it may be the next master."""
    world = World(config=replace(CoreConfig(), segment_bytes=1 << 16, checkpoint_period_ms=500))
    writer, client = Writer(world), Client(world)
    first = world.elect()
    for node in world.nodes.values():
        assert node.host is not None
        object.__setattr__(node.host._raft, "journal_tail_bytes_max", 1)
    away = next(node for node in world.nodes.values() if node is not first)
    away.kill()
    for number in range(5):
        writer.stage(number, [b"row%d" % number] * 100)
    writer.wait(5)
    for _ in range(100):
        client.schedule([60_000] * 20)
        world.run(50)
    away.start()
    world.run_until(lambda: away.host is not None and away.host.installs > 0)
    assert away.disk.list("state/staging")
    world.run_until(lambda: len(digests(world)) == 1)
    writer.commit(5, 500)
    world.run_until(lambda: writer.job().state == STAGED_PUBLISHED)
    world.run_until(lambda: len(digests(world)) == 1)


def test_while_arrivals_wait_for_the_disk_a_commit_waits_too() -> None:
    """Publishing is no way round the bound on what is not merged."""
    config = replace(CoreConfig(), segment_bytes=1 << 20, buffer_bytes_max=1 << 20)
    world = World(config=config)
    writer = Writer(world)
    master = world.elect()
    for node in world.nodes.values():
        node.holds_merges = True
    for number in range(40):
        writer.stage(number, [b"x" * 1_000] * 100)
    writer.wait(40)
    writer.commit(40, 4_000)
    world.run(3_000)
    job = writer.job()
    assert job.state == STAGED_PUBLISHING and 0 < job.rows_published < 4_000
    assert master.host is not None
    assert master.host.core.wheel.holdings.buffer_bytes < 3 * config.buffer_bytes_max
    for node in world.nodes.values():
        node.release()
    world.run_until(lambda: writer.job().state == STAGED_PUBLISHED)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"job_id": "a b"}, "job_id"),
        ({"run_id": ""}, "run_id"),
        ({"batch": -1}, "batch"),
        ({"attempt": 0}, "attempt"),
    ],
)
def test_what_is_wrong_with_a_block_is_named(change: dict[str, object], field: str) -> None:
    """And costs no entry of the log."""
    world = World()
    master = world.elect()
    assert master.host is not None
    index = master.host.core.applied.index
    request = staging_pb2.StageRequest(**{"job_id": "j", "run_id": "r", "attempt": 5, **change})  # type: ignore[arg-type]
    answers: list[StagedJob | Failure] = []
    master.host.core.serving.start(
        master.host.core.parts.staging.stage(request, rows(world, [b"x"], 1_000)), answers.append
    )
    [failure] = answers
    assert isinstance(failure, Failure) and failure.reason == common_pb2.INVALID_FIELD
    assert failure.metadata["field"] == field
    assert master.host.core.applied.index == index


def test_a_slave_names_the_master() -> None:
    """Clients find their way as with every other call."""
    world = World()
    master = world.elect()
    slave = next(node for node in world.nodes.values() if node is not master)
    assert slave.host is not None
    answers: list[StagedJob | Failure] = []
    request = staging_pb2.StageRequest(job_id="j", run_id="r", attempt=5)
    serve(slave.host.core, slave.host.core.parts.staging.stage(request, rows(world, [b"x"], 1_000)), answers.append)
    [failure] = answers
    assert isinstance(failure, Failure) and failure.metadata["master_address"] == f"client-{master.name}"


def test_the_repeat_of_a_block_needs_no_room() -> None:
    """Its answer was lost when all room was taken, by the very job that repeats it: it must not wait for itself."""
    world = World()
    writer = Writer(world)
    limited(world, staging_bytes_max=1 << 20)
    for number in range(16):
        writer.stage(number, [b"x"])
    writer.wait(16)
    writer.stage(3, [b"x"])
    writer.wait(17)
    writer.stage(16, [b"x"])
    world.run_until(lambda: len(writer.answers) == 18)
    last = writer.answers[-1]
    assert isinstance(last, Failure) and last.reason == common_pb2.LIMIT_REACHED


@pytest.mark.parametrize("another_master", [False, True])
def test_rows_of_a_killed_run_make_way_for_the_next_run(
    monkeypatch: pytest.MonkeyPatch, *, another_master: bool
) -> None:
    """A driver that is killed aborts nothing. Its rows kept their room from the run that wrote them again, for six
    hours, and for ever if that was tried more often. Tasks of the killed run that still send are refused."""
    monkeypatch.setattr(staged_writes, "RUN_IDLE_MS", 10_000)
    world = World()
    writer = Writer(world)
    limited(world, staging_bytes_max=1 << 20)
    writer.run_id = "killed"
    for number in range(12):
        writer.stage(number, [b"x"])
    writer.wait(12)
    world.run(staged_writes.RUN_IDLE_MS)
    if another_master:  # it has heard nothing of the killed run
        first = writer.master
        first.kill()
        world.run_until(lambda: world.master() not in (None, first))
        first.start()
    writer.run_id = "again"
    for number in range(16):
        writer.stage(number, [b"row%d" % number], attempt=7)
        writer.wait(12 + number + 1)
    writer.run_id = "killed"
    writer.stage(12, [b"x"])
    world.run_until(lambda: len(writer.answers) == 29)
    refused = writer.answers.pop()
    assert isinstance(refused, Failure) and refused.message == "run killed of job j is over: it was aborted"
    writer.run_id = "again"
    writer.commit(16, 16, attempt=7)
    world.run_until(lambda: writer.job().state == STAGED_PUBLISHED)
    assert writer.job().rows_published == 16
    world.run_until(lambda: len(digests(world)) == 1)


def test_runs_that_stage_side_by_side_keep_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two runs of a job at a time the first that is committed counts, however slow both are."""
    monkeypatch.setattr(staged_writes, "RUN_IDLE_MS", 10_000)
    world = World()
    writer = Writer(world)
    for number in range(3):
        for attempt, run_id in ((6, "one"), (7, "two")):
            writer.run_id = run_id
            writer.stage(number, [b"x"], attempt=attempt)
            world.run(staged_writes.RUN_IDLE_MS * 0.4)
    writer.wait(6)
    writer.run_id = "one"
    writer.commit(3, 3, attempt=6)
    writer.wait(7)
    world.run_until(lambda: writer.job().state == STAGED_PUBLISHED)


def test_a_queue_of_blocks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A master whose log stands still refuses with a retryable error, and goes on when it can."""
    monkeypatch.setattr(staged_writes, "QUEUE_BYTES_MAX", 100_000)
    monkeypatch.setattr(staged_writes, "IN_FLIGHT_BYTES_MAX", 50_000)
    world = World()
    writer = Writer(world)
    world.elect()
    writer.stage(100, [b"x"])
    writer.wait(1)
    for number in range(20):
        writer.stage(number, [b"x" * 1_000] * 20)
    world.run_until(lambda: len(writer.answers) == 21)
    failures = [a for a in writer.answers if isinstance(a, Failure)]
    assert failures and all(f.reason == common_pb2.LIMIT_REACHED for f in failures)
    assert sum(isinstance(a, StagedJob) and a.state == STAGED_OPEN for a in writer.answers) == 21 - len(failures)


def test_rows_are_staged_only_while_there_is_room_to_schedule_them() -> None:
    """They lie in the log and in the job's file, and scheduling them takes as much again. The commit is not refused any
    more: it took what the reserve keeps for settlements and checkpoints, down to the last byte on all nodes."""
    world = World()
    writer = Writer(world)
    master = writer.master
    record = bytes(50_000)
    for node in world.nodes.values():
        node.disk.fill(2 << 20)
    while not (writer.answers and isinstance(writer.answers[-1], Failure)):
        world.run(1_200)  # the node looks at its disk
        before = len(writer.answers)
        writer.stage(before, [record])
        world.run_until(lambda before=before: len(writer.answers) > before)  # type: ignore[misc]
    refused, staged = writer.answers.pop(), len(writer.answers)
    assert isinstance(refused, Failure) and refused.metadata["field"] == "storage.space_reserve_bytes"
    assert refused.reason == common_pb2.LIMIT_REACHED and "to schedule what is staged" in refused.message
    assert master.host is not None
    staging = master.host.core.state.staging
    assert staged > 2 and staging.room_bytes > staged * len(record)
    writer.commit(staged, staged)
    writer.wait(staged + 1)
    world.run_until(lambda: writer.job().state == STAGED_PUBLISHED)
    world.run(3_000)
    assert all(node.disk.space_left() and not node.fatal for node in world.nodes.values())
    assert staging.room_bytes == 0


@pytest.mark.parametrize(("small", "staged"), [(1, 6), (2, 3)])
def test_rows_are_staged_only_while_a_majority_has_room(small: int, staged: int) -> None:
    """Of six blocks of 50,000 bytes. A slave with a smaller disk than the others' may fall behind; two would take the
    cluster with them when the job is committed."""
    world = World()
    writer = Writer(world)
    slaves = [node for node in world.nodes.values() if node is not writer.master]
    for node in slaves[:small]:
        node.disk.fill(260_000)
    world.run(1_200)  # the nodes look at their disks
    for number in range(6):
        writer.stage(number, [bytes(50_000)])
        world.run_until(lambda number=number: len(writer.answers) > number)  # type: ignore[misc]
    refused = [answer for answer in writer.answers if isinstance(answer, Failure)]
    assert len(writer.answers) - len(refused) == staged
    names = ", ".join(sorted(node.name for node in slaves))
    for failure in refused:
        assert failure.reason == common_pb2.LIMIT_REACHED
        assert failure.message.startswith(f"storage.space_reserve_bytes of {names}: ")


def limited(world: World, **settings: int | str) -> Node:
    """The master of a cluster with these settings."""
    master = world.elect()
    assert master.host is not None
    done: list[object] = []
    command = AdminCommand(settings=admin_pb2.Settings(**settings))  # type: ignore[arg-type]
    master.host.core.serving.start(master.host.core.parts.requests.admin(command), done.append)
    master.wake()
    world.run_until(lambda: bool(done))
    return master


def refused_by(writer: Writer) -> str:
    """The limit by which the last block was refused."""
    answer = writer.answers[-1]
    assert isinstance(answer, Failure) and answer.reason == common_pb2.LIMIT_REACHED, answer
    return answer.metadata["field"]


@pytest.mark.parametrize(("name", "limit"), [("pending_max", 100), ("topic_pending_max", "t=100")])
def test_staged_rows_are_pending_to_be(name: str, limit: int | str) -> None:
    """They take the room of a limit before the commit, while they are published, and as messages, each once: for other
    blocks and for schedules. A repeated block needs none. What is aborted gives its room back."""
    world = World(seed=81)
    master = limited(world, **{name: limit})
    writer, client = Writer(world), Client(world)

    writer.stage(0, [b"x"] * 60)
    writer.wait(1)
    writer.stage(1, [b"x"] * 60)
    world.run_until(lambda: len(writer.answers) == 2)
    assert refused_by(writer) == name
    del writer.answers[1:]
    writer.stage(0, [b"x"] * 60)
    writer.wait(2)
    writer.abort()
    writer.wait(3)
    world.run(200)  # sums by topic are reused for a moment
    writer.run_id = "r2"
    writer.stage(0, [b"x"] * 50)
    writer.stage(1, [b"x"] * 20)
    writer.wait(5)
    client.schedule([600_000] * 31)
    world.run_until(lambda: bool(client.refused))
    client.schedule([600_000] * 30)
    world.run_until(lambda: len(client.acked) == 30)
    writer.commit(2, 70)
    world.run_until(lambda: writer.job().state == STAGED_PUBLISHED)
    assert master.host is not None
    core = master.host.core
    assert core.wheel.pending == 100 and core.state.staging.waiting_rows == 0
    staged = core.parts.flow._staged
    world.run_until(lambda: not staged._jobs and not staged._sum)


def test_the_next_master_counts_the_rows_staged_before() -> None:
    """Those of committed jobs, too, as far as they are no messages yet."""
    world = World(seed=82)
    first = limited(world, pending_max=100)
    writer = Writer(world)
    writer.stage(0, [b"x"] * 60)
    writer.wait(1)
    first.kill()
    world.run_until(lambda: world.master() not in (None, first))
    writer.stage(1, [b"x"] * 60)
    world.run_until(lambda: len(writer.answers) == 2)
    assert refused_by(writer) == "pending_max"


def test_staged_rows_pay_for_quotas() -> None:
    """As schedules do: a block that overdraws passes, then none until it is paid back."""
    world = World(seed=83)
    limited(world, topic_quotas="t=100")
    writer = Writer(world)
    writer.stage(0, [b"x"] * 200)
    writer.wait(1)
    writer.stage(1, [b"x"])
    world.run_until(lambda: len(writer.answers) == 2)
    assert refused_by(writer) == "topic_quotas"
    world.run(1_100)
    writer.stage(2, [b"x"])
    world.run_until(lambda: len(writer.answers) == 3)
    assert isinstance(writer.answers[2], StagedJob)
