"""One disk of a cluster becomes a cluster of its own: what its journal holds behind the checkpoint is taken over."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import count

import pytest

from tests.node.core.test_membership import Asked, remove
from tests.node.core.trio import Client, Node, World
from tickwheel.node.config import NodeConfig, read_config
from tickwheel.node.core.checkpoint import JOURNAL_DIRECTORY
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.refound import refound
from tickwheel.node.server.identity import new_identity, read_identity, store_identity
from tickwheel.node.state.results import ImpossibleStateError
from tickwheel.storage.simulated import PowerLost, SimulatedDisk


def configured(node: Node) -> NodeConfig:
    """Of the new cluster."""
    return read_config(None, {}, {"cluster.id": "anew", "node.id": node.name, "node.data_dir": "unused"})


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


def test_it_can_be_repeated_after_a_power_loss_at_any_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it has ended no node starts on the directory as a member of the old cluster once the state is changed."""
    world = World(config=replace(CoreConfig(), segment_bytes=1 << 14))
    client = Client(world)
    node = world.elect()
    for number in range(10):
        client.schedule([60_000] * 200)
        world.run_until(lambda: len(client.acked) == 200 * (number + 1))  # noqa: B023
    node.kill()
    store_identity(node.disk, new_identity("c", node.name))
    assert len(node.disk.list(JOURNAL_DIRECTORY)) > 3
    monkeypatch.setattr(SimulatedDisk, "remove", remove_file_by_file)
    whole = copy.deepcopy(node.disk)
    for steps in count():
        node.disk = copy.deepcopy(whole)
        node.disk.lose_power_after(steps)
        try:
            found = refound(node.disk, configured(node))
        except PowerLost:
            node.disk.crash()
        else:
            break
        identity = read_identity(node.disk)
        assert identity is not None
        if identity.cluster_id == "anew":
            continue
        before = copy.deepcopy(node.disk)
        try:
            node.start()
        except ImpossibleStateError as error:
            assert "tickwheel recover was interrupted" in str(error) or f"{JOURNAL_DIRECTORY} was removed" in str(error)
        else:
            assert node.host is not None and node.host.core.state.cluster_id in ("", "c")
            node.kill()
        repeated = refound(before, configured(node))
        assert repeated.pending == 2_000 and not repeated.without_journal
    assert steps > 10 and found.pending == 2_000 and not found.without_journal


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
