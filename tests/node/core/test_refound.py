"""One disk of a cluster becomes a cluster of its own: what its journal holds behind the checkpoint is taken over."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from tests.node.core.test_membership import Asked, remove
from tests.node.core.trio import Client, Node, World
from tickwheel.node.config import NodeConfig, read_config
from tickwheel.node.core.checkpoint import JOURNAL_DIRECTORY, MANIFEST_PATH
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.refound import RefoundError, refound
from tickwheel.node.server.identity import IdentityError, new_identity, open_identity, read_identity, store_identity
from tickwheel.node.state.results import ImpossibleStateError
from tickwheel.replication.journal_files import read_newest, segment_path, segment_sequences
from tickwheel.storage.disk import DiskError, DiskFullError
from tickwheel.storage.simulated import PowerLost, SimulatedDisk


def configured(node: Node, cluster_id: str = "anew") -> NodeConfig:
    """Of the new cluster."""
    return read_config(None, {}, {"cluster.id": cluster_id, "node.id": node.name, "node.data_dir": "unused"})


def stopped(checkpoint_entries: int = 10) -> Node:
    """A master that has acknowledged messages and written checkpoints, and was killed."""
    world = World(config=replace(CoreConfig(), segment_bytes=1_000, checkpoint_entries=checkpoint_entries))
    client = Client(world)
    node = world.elect()
    for number in range(10):
        client.schedule([60_000] * 5)
        world.run_until(lambda: len(client.acked) == 5 * (number + 1))  # noqa: B023
    world.run(1_000)
    node.kill()
    identity = new_identity("c", node.name)
    identity.disk_uuid = node.disk_uuid
    store_identity(node.disk, identity)
    assert len(node.disk.list(JOURNAL_DIRECTORY)) > 3
    return node


def without_journal(disk: SimulatedDisk) -> None:
    """Its segments are gone for good."""
    for sequence in segment_sequences(disk.list(JOURNAL_DIRECTORY)):
        disk.remove(segment_path(JOURNAL_DIRECTORY, sequence))
    disk.fsync_dir(JOURNAL_DIRECTORY)


def test_what_changed_the_members_is_taken_over_too() -> None:
    """Such an entry names the voters before its command: skipped, recover would tell of a member that was removed."""
    world = World()
    client = Client(world)
    master = world.elect()
    client.schedule([60_000] * 5)
    gone = next(name for name in "abc" if name != master.name)
    Asked(world, remove(gone))
    client.schedule([60_000] * 5)
    world.run(1_000)
    node = world.elect()
    assert node.host is not None and node.host.core.checkpointer.written == 0, "all of it stands in the journal alone"
    applied = node.host.core.applied.index
    node.kill()
    found = refound(node.disk, configured(node))
    assert found.old_members == tuple(name for name in "abc" if name != gone)
    assert found.pending == 10 and found.index >= applied


remove_at_once = SimulatedDisk.remove


def remove_file_by_file(self: SimulatedDisk, path: str) -> None:
    """Remove as a real disk does, where a directory's files go one after the other; here the last one first."""
    if path.startswith(JOURNAL_DIRECTORY) and "/" not in path:
        for name in reversed(self.list(path)):
            remove_at_once(self, f"{path}/{name}")
    remove_at_once(self, path)


@pytest.mark.parametrize("left", [(), ("hard_state", "newest")])
def test_a_lost_journal_is_told(left: tuple[str, ...]) -> None:
    """What the disk still has is taken over, and the operator learns that the newest is missing."""
    world = World(config=replace(CoreConfig(), checkpoint_entries=10))
    client = Client(world)
    node = world.elect()
    for _ in range(20):
        client.schedule([60_000] * 5)
        world.run(500)
    assert node.host is not None and node.host.core.checkpointer.written
    node.kill()
    store_identity(node.disk, new_identity("c", node.name))
    for name in set(node.disk.list(JOURNAL_DIRECTORY)) - set(left):
        node.disk.remove(f"{JOURNAL_DIRECTORY}/{name}")
    assert refound(node.disk, configured(node)).without_journal


def with_error(kind: type[DiskError]) -> Callable[[SimulatedDisk, int], None]:
    """Lets the step of that number fail, once."""

    def arm(disk: SimulatedDisk, steps: int) -> None:
        at = count()
        take: Any = SimulatedDisk._take_step

        def step(path: str) -> None:
            if next(at) == steps:
                raise kind(path)
            take(disk, path)

        disk._take_step = step  # type: ignore[method-assign]

    return arm


FAULTS: dict[str, Callable[[SimulatedDisk, int], None]] = {
    "a kill": SimulatedDisk.lose_power_after,
    "a power loss": SimulatedDisk.lose_power_after,
    "a full disk": with_error(DiskFullError),
    "an error of the disk": with_error(DiskError),
}


def steps_of(whole: SimulatedDisk, node: Node) -> int:
    """How many changes and fsyncs an undisturbed run makes."""
    for steps in count(20, 20):
        disk = copy.deepcopy(whole)
        disk.lose_power_after(steps)
        try:
            refound(disk, configured(node))
        except PowerLost:
            continue
        return steps
    raise AssertionError


@pytest.mark.parametrize("gone", [False, True], ids=["with its journal", "without its journal"])
@pytest.mark.parametrize("fault", FAULTS)
def test_it_can_be_repeated_after_any_fault_at_any_step(
    fault: str, *, gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1: before, a node without its journal was given a new one first. It started as a member that had forgotten."""
    node = stopped()
    assert node.disk.exists(MANIFEST_PATH)
    if gone:
        without_journal(node.disk)
    monkeypatch.setattr(SimulatedDisk, "remove", remove_file_by_file)
    whole = copy.deepcopy(node.disk)
    wanted = refound(copy.deepcopy(whole), configured(node))
    assert wanted.without_journal == gone and wanted.pending >= 40
    for steps in range(steps_of(whole, node)):
        disk = node.disk = copy.deepcopy(whole)
        FAULTS[fault](disk, steps)
        try:
            refound(disk, configured(node))
        except (PowerLost, DiskError):
            disk.crash() if fault == "a power loss" else disk.kill()
        disk.__dict__.pop("_take_step", None)
        disk.lose_power_after(-1)
        identity = read_identity(disk)
        assert identity is not None
        if identity.cluster_id == "anew":
            continue
        try:
            node.start()
        except ImpossibleStateError as error:
            interrupted = "tickwheel recover was interrupted" in str(error)
            assert interrupted or (gone and f"{JOURNAL_DIRECTORY} was removed" in str(error))
            if interrupted:
                with pytest.raises(IdentityError, match="tickwheel recover was interrupted"):
                    open_identity(disk, "anew", node.name, "here")
        else:
            assert node.host is not None and node.host.core.log.status().last_index >= wanted.index and not gone
            node.kill()
        again = refound(disk, configured(node))
        assert (again.pending, again.index) == (wanted.pending, wanted.index)


def test_a_refusal_begins_no_journal() -> None:
    """P1: the old cluster's id, where the journal was removed: the node must still be refused as one without it."""
    node = stopped()
    without_journal(node.disk)
    with pytest.raises(RefoundError, match="as before"):
        refound(node.disk, configured(node, "c"))
    with pytest.raises(RefoundError, match=r"entry 5 is not among those to be replayed \(there are none\)"):
        refound(node.disk, configured(node), [5])
    with pytest.raises(ImpossibleStateError, match=f"{JOURNAL_DIRECTORY} was removed"):
        node.start()


def test_it_can_be_repeated_with_the_entries_that_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command, after the state is the new cluster's; it was told that there is no such entry."""
    node = stopped(checkpoint_entries=10_000)
    skipped = [refound(copy.deepcopy(node.disk), configured(node)).index]
    wanted = refound(copy.deepcopy(node.disk), configured(node), skipped)
    assert len(wanted.skipped) == 1
    monkeypatch.setattr(SimulatedDisk, "remove", remove_file_by_file)
    whole = copy.deepcopy(node.disk)
    begun = 0
    for steps in count():
        disk = copy.deepcopy(whole)
        disk.lose_power_after(steps)
        try:
            refound(disk, configured(node), skipped)
        except PowerLost:
            disk.crash()
        else:
            break
        identity = read_identity(disk)
        if identity is not None and identity.cluster_id == "c":
            begun += disk.exists(MANIFEST_PATH)
            again = refound(disk, configured(node), skipped)
            assert (again.pending, again.index) == (wanted.pending, wanted.index)
    assert begun


def test_a_journal_without_its_newest_segments_can_be_set_aside() -> None:
    """The text says so; there may be no backup."""
    node = stopped()
    first, *later = segment_sequences(node.disk.list(JOURNAL_DIRECTORY))
    for sequence in later:
        node.disk.remove(segment_path(JOURNAL_DIRECTORY, sequence))
    assert first < read_newest(node.disk, JOURNAL_DIRECTORY)
    with pytest.raises(DiskError, match=r"was removed. Put the file back.*move journal/ out of the directory and run"):
        refound(node.disk, configured(node))
    node.disk.remove(JOURNAL_DIRECTORY)
    found = refound(node.disk, configured(node))
    assert found.without_journal and found.pending >= 40
