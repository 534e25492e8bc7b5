"""Files of another node lie in a node's directory: it does not take what another has promised for its own."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from tests.node.core.trio import Client, Node, World
from tickwheel.node.core.checkpoint import JOURNAL_DIRECTORY, MANIFEST_PATH, STATE_DIRECTORY, WHEEL_DIRECTORY
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.delivery.sync_files import LEASES_PATH, pack_leases, read_leases
from tickwheel.node.core.founding import PATH as FOUNDING_PATH
from tickwheel.node.rebuild import rebuild
from tickwheel.node.server.identity import new_identity, store_identity
from tickwheel.proto.peer_pb2 import Founding, LeaseRange
from tickwheel.replication.journal import HARD_STATE_FILE
from tickwheel.replication.journal_files import NEWEST_FILE, segment_path, segment_sequences
from tickwheel.storage.owner import ForeignFileError
from tickwheel.storage.simulated import SimulatedDisk
from tickwheel.storage.whole_file import read_whole, write_whole

HARD_STATE = f"{JOURNAL_DIRECTORY}/{HARD_STATE_FILE}"
NEWEST = f"{JOURNAL_DIRECTORY}/{NEWEST_FILE}"
SEGMENT = "one segment of the journal"
REFUSED = r"and this directory is that of node .*Put this node's own files back.*add it anew under a new id"


def stopped(checkpoint_entries: int = 10) -> World:
    """Three nodes with messages and checkpoints, all of them down."""
    world = World(config=replace(CoreConfig(), segment_bytes=2_000, checkpoint_entries=checkpoint_entries))
    client = Client(world)
    world.elect()
    for number in range(20):
        client.schedule([60_000])
        world.run_until(lambda: len(client.acked) == number + 1)  # noqa: B023
    world.run(1_000)
    for node in world.nodes.values():
        node.kill()
    return world


def read(disk: SimulatedDisk, path: str) -> bytes:
    """All bytes of a file."""
    file = disk.open(path)
    try:
        return file.read_at(0, file.size())
    finally:
        file.close()


def put(disk: SimulatedDisk, path: str, data: bytes) -> None:
    """A file with these bytes, durable."""
    file = disk.open(path, create=True)
    file.truncate(0)
    file.append(data)
    file.fsync()
    file.close()
    disk.fsync_dir(path.rpartition("/")[0])


def move_in(source: SimulatedDisk, target: SimulatedDisk, path: str) -> None:
    """Replace a file or a folder by that of another disk."""
    target.remove(path)
    for found in source.files(""):
        if found == path or found.startswith(f"{path}/"):
            put(target, found, read(source, found))


def all_bytes(disk: SimulatedDisk) -> dict[str, bytes]:
    """Every file."""
    return {path: read(disk, path) for path in disk.files("")}


def without_owner(disk: SimulatedDisk) -> None:
    """As the version before would have written it."""
    state = read_whole(disk, HARD_STATE)
    assert state is not None
    write_whole(disk, HARD_STATE, state[: 16 + struct.unpack_from("<I", state, 4)[0]])
    newest, founding = read_whole(disk, NEWEST), read_whole(disk, FOUNDING_PATH)
    assert newest is not None and founding is not None
    write_whole(disk, NEWEST, newest[:8])
    record = Founding.FromString(founding)
    record.ClearField("disk_uuid")
    write_whole(disk, FOUNDING_PATH, record.SerializeToString())


@pytest.mark.parametrize("what", [JOURNAL_DIRECTORY, SEGMENT, HARD_STATE, NEWEST, FOUNDING_PATH])
def test_a_node_does_not_start_with_what_another_has_promised(what: str) -> None:
    """P1: it would have forgotten its votes, and would count for entries that it does not have."""
    world = stopped()
    one, other = world.nodes["a"], world.nodes["b"]
    path = what
    if what == SEGMENT:
        ours, theirs = (segment_sequences(node.disk.list(JOURNAL_DIRECTORY)) for node in (one, other))
        path = segment_path(JOURNAL_DIRECTORY, max(sequence for sequence in ours[:-1] if sequence in theirs[:-1]))
    move_in(other.disk, one.disk, path)
    before = all_bytes(one.disk)
    with pytest.raises(ForeignFileError, match=REFUSED):
        one.start()
    assert all_bytes(one.disk) == before, "nothing was changed"


def test_the_refusal_names_the_node_whose_file_it_is() -> None:
    """The operator knows where to put it."""
    world = stopped()
    one, other = world.nodes["a"], world.nodes["b"]
    move_in(other.disk, one.disk, HARD_STATE)
    with pytest.raises(ForeignFileError, match=f"'{HARD_STATE}' is a file of node b of cluster c"):
        one.start()


def test_a_checkpoint_is_not_given_up_for_the_journal_of_another_node() -> None:
    """`tickwheel rebuild` would remove the manifest."""
    world = stopped(checkpoint_entries=10_000)
    one, other = world.nodes["a"], world.nodes["b"]
    identity = new_identity("c", "a")
    identity.disk_uuid = one.disk_uuid
    store_identity(one.disk, identity)
    move_in(other.disk, one.disk, JOURNAL_DIRECTORY)
    with pytest.raises(ForeignFileError, match=REFUSED):
        rebuild(one.disk, 2_000)


def test_a_checkpoint_of_a_cluster_of_the_same_name_is_refused() -> None:
    """In that cluster the node has another disk."""
    here, there = stopped(), World(config=replace(CoreConfig(), segment_bytes=2_000, checkpoint_entries=10))
    for node in there.nodes.values():
        node.kill()
        node.wipe()
    for node in there.nodes.values():
        node.start()
    client = Client(there)
    there.elect()
    for number in range(40):
        client.schedule([60_000])
        there.run_until(lambda: len(client.acked) == number + 1)  # noqa: B023
    there.run(1_000)
    there.nodes["a"].kill()
    for path in (MANIFEST_PATH, WHEEL_DIRECTORY, STATE_DIRECTORY):
        move_in(there.nodes["a"].disk, here.nodes["a"].disk, path)
    with pytest.raises(ForeignFileError, match="of a cluster in which node a has another disk"):
        here.nodes["a"].start()


def test_a_checkpoint_of_another_member_is_as_good_as_a_copied_one() -> None:
    """All members have the same state. The journal has the entries after it, or begins anew."""
    world = stopped()
    one, other = world.nodes["a"], world.nodes["b"]
    for path in (MANIFEST_PATH, WHEEL_DIRECTORY, STATE_DIRECTORY):
        move_in(other.disk, one.disk, path)
    for node in world.nodes.values():
        node.start()
    world.elect()
    world.run(2_000)
    assert pending(one) == pending(other) == 20


def pending(node: Node) -> int:
    """Messages that wait in a node's wheel."""
    assert node.host is not None
    return node.host.core.wheel.pending


def test_files_of_the_version_before_are_read() -> None:
    """They name no owner. What the node writes next does."""
    world = stopped()
    for node in world.nodes.values():
        without_owner(node.disk)
        node.start()
    master = world.elect()
    assert pending(master) == 20
    master.kill()
    move_in(master.disk, (one := next(n for n in world.nodes.values() if n.host is not None)).disk, HARD_STATE)
    one.kill()
    with pytest.raises(ForeignFileError, match=f"a file of node {master.name} of cluster c"):
        one.start()


@pytest.mark.parametrize("foreign", [True, False])
def test_leases_of_another_cluster_hold_nothing(foreign: bool) -> None:
    """P4: in that cluster the same positions are other messages, and these waited until its leases were over. A file of
    the version before names no disk and counts as before."""
    world = World(3)
    client = Client(world)
    world.elect()
    client.consume()
    client.schedule([100])
    world.run(2_000)
    assert len(client.got) == 1
    theirs = LeaseRange(group_id=1, topic_id=1, first_position=1, count=5, until_ms=world.now_ms + 600_000)
    for node in world.nodes.values():
        node.kill()
        write_whole(node.disk, LEASES_PATH, pack_leases([[theirs]], "disk-of-another" if foreign else ""))
    for node in world.nodes.values():
        node.start()
    client.at = None
    world.elect()
    client.consume()
    client.schedule([100] * 5)
    world.run(4_000)
    assert len(client.got) == (6 if foreign else 1)


def test_leases_name_the_disk_that_they_were_written_on() -> None:
    """The next start takes them for its own."""
    world = World(3)
    client = Client(world)
    client.settle = False
    world.elect()
    client.consume(lease_ms=60_000)
    client.schedule([100])
    world.run(3_000)
    for node in world.nodes.values():
        assert read_leases(node.disk, node.disk_uuid) and not read_leases(node.disk, "disk-of-another")
