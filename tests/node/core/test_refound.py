"""One disk of a cluster becomes a cluster of its own: what its journal holds behind the checkpoint is taken over."""

from __future__ import annotations

from tests.node.core.test_membership import Asked, remove
from tests.node.core.trio import Client, World
from tickwheel.node.config import read_config
from tickwheel.node.refound import refound


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
    applied = node.host.core.applied_index
    node.kill()
    flags = {"cluster.id": "anew", "node.id": node.name, "node.data_dir": "unused"}
    found = refound(node.disk, read_config(None, {}, flags))
    assert found.old_members == tuple(name for name in "abc" if name != gone)
    assert found.pending == 10 and found.index >= applied
