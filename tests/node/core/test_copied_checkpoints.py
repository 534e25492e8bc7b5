"""A slave that is far behind copies a checkpoint of a peer: nothing that it holds or hears meanwhile is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import Mock

import pytest

from tests.node.core.test_failover import load
from tests.node.core.trio import DISK_NS, MS, Client, Node, World, digests
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.promise import UNHEARD, Reply
from tickwheel.node.core.watch.status import node_vitals
from tickwheel.node.failure import Failure
from tickwheel.proto import admin_pb2
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto.peer_pb2 import CheckpointChunk
from tickwheel.replication.journal import Journal
from tickwheel.storage.disk import DiskFullError
from tickwheel.storage.manifest import read_manifest


class LateCopy:
    """A slave far behind, and the copy of its master's checkpoint that arrives when the test says so."""

    def __init__(self) -> None:
        config = replace(CoreConfig(), segment_bytes=1 << 16, checkpoint_period_ms=500)
        self.world = World(6, config=config)
        self.client = Client(self.world)
        self.master = self.world.elect()
        self.slave, self.other = (n for n in self.world.nodes.values() if n is not self.master)
        self.keeps_no_tail(self.master)
        self.slave.kill()
        load(self.world, self.client, 4)
        self.chunks: list[CheckpointChunk] = []
        self.ended: list[Callable[[str | None], None]] = []
        fetch = self.slave.fetch

        def late(peer_id: str, held: object, chunk: object, done: Callable[[str | None], None]) -> None:
            def finished(problem: str | None) -> None:
                self.ended.append(done)

            self.take = chunk
            fetch(peer_id, (), self.chunks.append, finished)

        self.slave.fetch = late  # type: ignore[method-assign]
        self.slave.start()
        self.world.run_until(lambda: bool(self.ended))

    def keeps_no_tail(self, node: Node) -> None:
        """Being away for a moment is being far behind."""
        assert node.host is not None
        object.__setattr__(node.host._raft, "journal_tail_bytes_max", 1)

    def arrive(self) -> None:
        """All of it."""
        for chunk in self.chunks:
            self.take(chunk)  # type: ignore[operator]
        self.ended.pop()(None)
        self.slave.wake()


def test_slave_far_behind_gets_a_checkpoint() -> None:
    """A slave whose next entry is no longer in the log takes over a checkpoint and ends equal. Its new core contains
    errors as the old one did."""
    config = replace(CoreConfig(), segment_bytes=1 << 16, checkpoint_period_ms=500)
    world = World(6, config=config)
    client = Client(world)
    master = world.elect()
    client.consume()
    for node in world.nodes.values():
        assert node.host is not None
        # Keep no tail below a checkpoint, so that being away for a moment is being far behind.
        object.__setattr__(node.host._raft, "journal_tail_bytes_max", 1)
    slave = next(n for n in world.nodes.values() if n is not master)
    slave.kill()
    load(world, client, 4)
    faults: list[BaseException] = []
    slave.faults = lambda error_id, error: faults.append(error)
    slave.start()
    world.run_until(lambda: slave.host is not None and slave.host.installs > 0)
    assert slave.host is not None
    slave.host.core.serving.side(lambda: None, next, iter(()))
    assert [type(error) for error in faults] == [StopIteration]
    load(world, client, 1)
    world.run(6_000)
    assert not client.lost()
    assert len(digests(world)) == 1


def test_a_checkpoint_from_a_peer_forgets_no_lease() -> None:
    """P5: what a slave had heard of leases when it took over a checkpoint, it knows afterwards: its master will not
    tell it again, and counts on it in a handover."""
    config = replace(CoreConfig(), segment_bytes=1 << 16, checkpoint_period_ms=500)
    world = World(6, config=config)
    client = Client(world)
    client.settle = False
    master = world.elect()
    client.consume(lease_ms=60_000)
    for node in world.nodes.values():
        assert node.host is not None
        object.__setattr__(node.host._raft, "journal_tail_bytes_max", 1)
    slave = next(n for n in world.nodes.values() if n is not master)
    slave.kill()
    load(world, client, 4)
    slave.start()
    world.run_until(lambda: slave.host is not None and slave.host.installs > 0)
    world.run(500)
    assert len(client.got) > 500
    answers: list[object] = []
    assert master.host is not None
    master.host.core.parts.mastership.start_transfer(slave.name, answers.append)
    master.wake()
    world.run_until(lambda: world.master() is slave)
    world.run(4_000)
    assert answers == [None]
    assert not client.repeated()


def test_a_checkpoint_that_comes_too_late_sets_nobody_back() -> None:
    """P1, P6: while it was copied another master sent the log, and the slave's own checkpoint has cut its journal above
    it: in its place the node would have a state that no journal goes on from, and never start again."""
    late = LateCopy()
    world, slave = late.world, late.slave
    late.keeps_no_tail(slave)
    late.master.kill()
    load(world, late.client, 2)
    assert slave.host is not None
    checkpointer = slave.host.core.checkpointer
    checkpointer.request(Reply.either(checkpointer.copied))
    world.run(500)
    applied = slave.host.core.applied.index
    assert slave.host.core.checkpointer.covered_index > 0 and applied > 0
    late.arrive()
    load(world, late.client, 1)
    assert slave.host is not None, slave.fatal
    assert slave.host.core.applied.index > applied and not slave.host.installs
    slave.kill()
    slave.start()
    late.master.start()
    world.run_until(lambda: len(digests(world)) == 1)
    late.client.consume()
    world.run(6_000)
    assert not late.client.lost()


def test_a_checkpoint_for_which_the_disk_has_no_room_is_fetched_again() -> None:
    """P10: a full disk ends no node, not with the last bytes of a copy either; there may be room soon."""
    late = LateCopy()
    world, slave = late.world, late.slave
    late.arrive()
    late.chunks.clear()
    slave.disk.fill(0)
    world.run(20)
    assert slave.host is not None, slave.fatal
    assert not slave.host.installs and not slave.disk.exists("staging")
    slave.disk.make_room()
    world.run_until(lambda: bool(late.ended))
    late.arrive()
    world.run_until(lambda: slave.host is not None and slave.host.installs > 0)
    world.run_until(lambda: len(digests(world)) == 1)


def test_a_disk_without_room_for_a_checkpoint_is_told_and_not_filled_again_at_once() -> None:
    """P10, P11: such a node copied the same checkpoint again and again, as fast as it could, and said nothing. What
    follows the piece that found no room is not wanted."""
    late = LateCopy()
    world, slave = late.world, late.slave
    assert slave.host is not None
    slave.disk.fill(100)
    taken = [late.take(chunk) for chunk in late.chunks]  # type: ignore[operator]
    assert not taken[-1] and late.chunks
    late.chunks.clear()
    late.ended.pop()(None)
    (line,) = [line for line in slave.reported if line.event == "a checkpoint could not be copied"]
    assert "No space left" in str(line.fields["reason"]) and "free space" in str(line.fields["reason"])
    slave.disk.make_room()
    world.run(1_500)
    assert not late.ended and not slave.host.installs
    status = node_vitals(slave.host.core)
    assert status.state == admin_pb2.NODE_RECOVERING
    assert status.state_reason.endswith(str(line.fields["reason"]))
    world.run_until(lambda: bool(late.ended))
    late.arrive()
    world.run_until(lambda: slave.host is not None and slave.host.installs > 0)
    world.run_until(lambda: slave.host is not None and not node_vitals(slave.host.core).state_reason)


def test_a_checkpoint_that_cannot_be_put_in_place_ends_the_node() -> None:
    """It must not stay up doing nothing: the next start finishes it, or says what is wrong."""
    late = LateCopy()
    slave = late.slave
    slave.disk.read_error("staging/complete")
    late.arrive()
    late.world.run(100)
    assert "put in place" in slave.fatal and "Input/output" in slave.fatal
    slave.disk.heal_reads()
    slave.start()
    assert slave.host is not None and slave.host.core.applied.index > 0
    late.world.run_until(lambda: len(digests(late.world)) == 1)


def test_a_disk_that_is_full_when_a_checkpoint_is_put_in_place_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends with another code than for damaged data, so its service starts it again."""
    late = LateCopy()
    slave = late.slave
    with monkeypatch.context() as full:
        full.setattr(Journal, "reset_to", Mock(side_effect=DiskFullError("No space left on device")))
        late.arrive()
        late.world.run(100)
    assert slave.no_room == "No space left on device" and not slave.fatal
    slave.start()
    late.world.run_until(lambda: len(digests(late.world)) == 1)


@pytest.mark.parametrize("held", ["holds_checkpoints", "holds_merges"])
def test_a_checkpoint_from_a_peer_waits_for_what_the_own_disk_still_writes(held: str) -> None:
    """P1: a slow checkpoint of its own would rename its manifest over the new one and remove a file that this names, a
    slow merge write into hours that are not its own: the node could not start again."""
    config = replace(CoreConfig(), segment_bytes=1 << 16, buffer_bytes_max=1 << 14, checkpoint_period_ms=500)
    world = World(7, config=config)
    client = Client(world)
    master = world.elect()
    load(world, client, 1)
    for node in world.nodes.values():
        assert node.host is not None
        object.__setattr__(node.host._raft, "journal_tail_bytes_max", 1)
    slave = next(n for n in world.nodes.values() if n is not master)
    slave.kill()
    load(world, client, 4)
    setattr(slave, held, True)
    slave.start()
    assert slave.host is not None
    slave.host.core.checkpointer.request(UNHEARD)
    slave.wake()
    world.run_until(lambda: bool(slave.held))
    world.run(1_500)
    slave.release()
    world.run_until(lambda: slave.host is not None and slave.host.installs > 0)
    world.run(20)
    slave.kill()
    slave.start()
    load(world, client, 1)
    world.run_until(lambda: len(digests(world)) == 1)


def test_a_checkpoint_from_a_peer_waits_for_the_sync_of_the_own_journal() -> None:
    """P1: besides, a sync empties the file that it reserves, and the new journal may have written to it by then."""
    world = World(6, config=replace(CoreConfig(), segment_bytes=1 << 16))
    client = Client(world)
    master = world.elect()
    load(world, client, 1)
    slave = next(n for n in world.nodes.values() if n is not master)
    assert slave.host is not None
    slave.holds_syncs = True
    client.schedule([1_000])
    world.run_until(lambda: bool(slave.held))
    slave.host._checkpoint_needed(master.name)
    world.run(DISK_NS / MS)  # until its staging directory has been read
    answers: list[object] = []
    slave.host.core.checkpointer.request(Reply.either(answers.append))
    world.run(1_000)
    assert not slave.host.installs
    slave.host.core.checkpointer.request(Reply.either(answers.append))
    world.run(10)
    reasons = [answer.reason for answer in answers if isinstance(answer, Failure)]
    assert reasons == [pb.RECOVERING] * 2, "who asks for a checkpoint meanwhile is told to ask again"
    slave.release()
    world.run_until(lambda: slave.host is not None and slave.host.installs > 0)
    load(world, client, 1)
    world.run_until(lambda: len(digests(world)) == 1)


class BrokenCopy:
    """A slave far behind, whose first copy of the master's checkpoint broke halfway."""

    def __init__(self) -> None:
        config = replace(CoreConfig(), segment_bytes=1 << 16, buffer_bytes_max=1 << 14, checkpoint_period_ms=500)
        self.world = World(6, config=config)
        self.client = Client(self.world)
        self.master = self.world.elect()
        load(self.world, self.client, 1)
        for node in self.world.nodes.values():
            assert node.host is not None
            object.__setattr__(node.host._raft, "journal_tail_bytes_max", 1)
        self.slave = next(n for n in self.world.nodes.values() if n is not self.master)
        self.slave.kill()
        load(self.world, self.client, 4)
        assert self.master.host is not None
        asked: list[object] = []
        self.master.host.core.checkpointer.request(Reply.either(asked.append))
        self.master.wake()
        self.world.run_until(lambda: bool(asked))
        (files,) = asked
        assert isinstance(files, list)
        self.master.host.core.checkpointer.copied(files)
        self.whole_bytes = sum(file.bytes for file in files)
        self.slave.copy_bytes_left = self.whole_bytes // 2
        self.slave.start()
        self.world.run_until(lambda: self.slave.copy_bytes_left == 0)
        self.first_bytes, self.slave.copied_bytes = self.slave.copied_bytes, 0
        assert self.first_bytes == self.whole_bytes // 2

    def ends_well(self) -> None:
        """The link is whole again: the slave becomes equal, and keeps nothing of the copy."""
        self.slave.copy_bytes_left = None
        self.world.run_until(lambda: self.slave.host is not None and self.slave.host.installs > 0)
        self.client.consume()
        self.world.run(6_000)
        self.world.run_until(lambda: len(digests(self.world)) == 1)
        assert not self.client.lost()
        assert not self.slave.disk.exists("staging")


def test_a_copy_resumes_when_its_link_broke() -> None:
    """P10: a checkpoint of any size can be copied, however often the link breaks."""
    broken = BrokenCopy()
    broken.ends_well()
    again = broken.slave.copied_bytes
    assert again <= broken.whole_bytes - broken.first_bytes + broken.whole_bytes // 10, "files that went on"


def test_a_copy_resumes_when_its_receiver_was_restarted() -> None:
    """A process that ends leaves its files as they are."""
    broken = BrokenCopy()
    slave = broken.slave
    assert slave.host is not None
    slave.host.stop()
    slave.boot += 1
    slave.host = None
    slave._connections_break()
    slave.start()
    broken.ends_well()
    assert slave.copied_bytes <= broken.whole_bytes - broken.first_bytes + broken.whole_bytes // 10


def test_a_copy_that_lost_power_is_compared_not_trusted() -> None:
    """Nothing of it was synced: what is left has any length and any content."""
    broken = BrokenCopy()
    broken.slave.kill()
    broken.slave.start()
    broken.ends_well()


def test_files_that_differ_are_sent_anew() -> None:
    """The same length says nothing."""
    broken = BrokenCopy()
    disk = broken.slave.disk
    broken.slave.host._copy = None  # type: ignore[union-attr]  # as a process begins
    left = {path: disk.size(path) for path in disk.files("staging")}
    largest = max(left, key=lambda path: left[path])
    file = disk.open(largest)
    first = file.read_at(0, 1)[0]
    file.write_at(0, bytes([first ^ 1]))
    file.close()
    broken.ends_well()
    assert broken.slave.copied_bytes >= broken.whole_bytes - broken.first_bytes + left[largest]


def test_a_later_checkpoint_of_the_source_ends_a_copy_too() -> None:
    """Files that are the same in both are not sent again."""
    broken = BrokenCopy()
    slave, world, master = broken.slave, broken.world, broken.master
    world.cut_off(slave.name)
    load(world, broken.client, 1)
    written = master.host.core.checkpointer.written  # type: ignore[union-attr]
    world.run_until(lambda: master.host is not None and master.host.core.checkpointer.written > written)
    slave.copy_bytes_left = None
    slave.copied_bytes = 0
    world.heal()
    broken.ends_well()
    manifest = read_manifest(slave.disk)
    assert manifest is not None
    assert slave.copied_bytes < sum(file.bytes for file in manifest.files) - broken.first_bytes // 2


def test_what_is_left_of_a_copy_goes_when_the_log_comes_after_all() -> None:
    """Else it would fill the disk for nothing."""
    broken = BrokenCopy()
    slave = broken.slave
    slave.copy_bytes_left = None
    slave.kill()
    slave.disk.open("staging/wheel/x", create=True)
    slave.start()
    broken.ends_well()
    slave.kill()
    slave.disk.open("staging/wheel/x", create=True)
    slave.start()
    installs = slave.host.installs if slave.host is not None else -1
    load(broken.world, broken.client, 1)
    broken.world.run_until(lambda: not slave.disk.exists("staging"))
    assert slave.host is not None and slave.host.installs == installs
