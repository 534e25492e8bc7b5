"""When a checkpoint is written by itself: a restart must never have much to replay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.node.core.trio import Client, World, digests
from tickwheel.node.core.checkpoint import MANIFEST_PATH, REST
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.watch.status import node_status
from tickwheel.node.state.results import ImpossibleStateError
from tickwheel.proto import admin_pb2

NEVER = 1 << 40


@pytest.mark.parametrize(
    ("entries", "log_bytes", "period_ms"),
    [(50, NEVER, NEVER), (NEVER, 1 << 14, NEVER), (NEVER, NEVER, 1_000)],
    ids=["entries", "bytes", "period"],
)
def test_a_checkpoint_is_written_by_any_of_its_limits(entries: int, log_bytes: int, period_ms: int) -> None:
    """By entries, bytes or time; what is replayed after a kill is what came since."""
    config = replace(
        CoreConfig(),
        segment_bytes=1 << 20,
        checkpoint_entries=entries,
        checkpoint_log_bytes=log_bytes,
        checkpoint_period_ms=period_ms,
    )
    world = World(config=config)
    client = Client(world)
    master = world.elect()
    for _ in range(60):
        client.schedule([60_000] * 10)
        world.run(50)
    assert master.host is not None
    checkpointer = master.host.core.checkpointer
    slave = next(node for node in world.nodes.values() if node is not master)
    assert slave.host is not None
    checkpointers = [checkpointer, slave.host.core.checkpointer]
    world.run_until(lambda: all(each.written >= 1 for each in checkpointers))
    assert checkpointer.covered_index > 10
    covered = slave.host.core.checkpointer.covered_index
    slave.kill()
    slave.start()
    assert slave.host is not None and slave.host.core.applied.index == covered
    world.run_until(lambda: len(digests(world)) == 1)


def test_after_a_long_checkpoint_comes_a_long_rest_but_for_who_asks() -> None:
    """A disk or a state that makes checkpoints long must not have the node write nothing else."""
    world = World(config=replace(CoreConfig(), segment_bytes=1 << 20, checkpoint_entries=20))
    client = Client(world)
    slave = next(node for node in world.nodes.values() if node is not world.elect())
    assert slave.host is not None
    checkpointer = slave.host.core.checkpointer

    def load() -> bool:
        client.schedule([60_000])
        world.run(10)
        return False

    slave.holds_checkpoints = True
    world.run_until(lambda: bool(slave.held) or load())
    begun_ms = world.now_ms
    for _ in range(100):
        load()
    written, took_ms = checkpointer.written, world.now_ms - begun_ms
    slave.release()
    world.run_until(lambda: checkpointer.written == written + 1 or load())
    ended_ms = world.now_ms
    world.run_until(lambda: checkpointer.written == written + 2 or load(), 20_000)
    assert world.now_ms - ended_ms == pytest.approx(REST * took_ms, rel=0.1)

    world.run_until(lambda: not checkpointer.running)
    files: list[object] = []
    slave.holds_checkpoints = True
    checkpointer.request(Reply.either(files.append))
    world.run_until(lambda: bool(slave.held), 1_000)
    world.run(10_000)
    slave.release()
    world.run_until(lambda: bool(files), 1_000)
    checkpointer.copied(files.pop())
    checkpointer.request(Reply.either(files.append))
    world.run_until(lambda: bool(files), 1_000)


def test_a_node_that_replays_with_a_full_disk_is_recovering() -> None:
    """P6: read only, it would pass for one whose older cursor counts; it says both."""
    world = World(config=replace(CoreConfig(), segment_bytes=1 << 16))
    client = Client(world)
    master = world.elect()
    client.schedule([10] * 10)
    world.run(500)
    slave = next(node for node in world.nodes.values() if node is not master)
    slave.kill()
    for _ in range(20):  # more than the file of the journal and the one that is kept ready hold
        client.schedule([10] * 1_000)
        world.run(50)
    slave.disk.fill(0)
    slave.start()
    host = slave.host
    assert host is not None
    world.run_until(lambda: bool(host.core.log.status().halted))
    status = node_status(host.core)
    assert status.state == admin_pb2.NODE_RECOVERING
    assert "replayed" in status.state_reason and "full" in status.state_reason


def test_a_checkpoint_older_than_the_journal_is_refused_with_advice() -> None:
    """P6: only damage brings it about (a manifest that was removed, or an old one put back): a bare assertion would
    not say what to do."""
    world = World(config=replace(CoreConfig(), segment_bytes=1 << 16, checkpoint_period_ms=500))
    client = Client(world)
    master = world.elect()
    slave = next(node for node in world.nodes.values() if node is not master)
    assert slave.host is not None
    object.__setattr__(slave.host._raft, "journal_tail_bytes_max", 1)
    for _ in range(100):
        client.schedule([60_000] * 100)
        world.run(20)
    slave.kill()
    paths = {path for path in slave.disk.paths() if path != MANIFEST_PATH}
    slave.disk.rename(MANIFEST_PATH, "aside")
    with pytest.raises(ImpossibleStateError, match=r"no manifest, and the journal begins behind entry \d+.*anew"):
        slave.start()
    assert paths <= set(slave.disk.paths()), "what lies beside a manifest that was lost may be all there is"
    slave.disk.rename("aside", MANIFEST_PATH)
    slave.start()
    world.run_until(lambda: len(digests(world)) == 1)
