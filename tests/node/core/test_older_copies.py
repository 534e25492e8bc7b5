"""An older copy of a node's own directory is put back, or its disk has lost what it had stored: the master tells."""

from __future__ import annotations

import copy

import pytest

from tests.node.core.trio import Client, Node, World
from tickwheel.node.core.watch.status import node_vitals


def running(seed: int = 1) -> tuple[World, Client, Node, Node]:
    """Three nodes with messages; the master, and a slave."""
    world = World(seed)
    client = Client(world)
    master = world.elect()
    schedule(world, client, 5)
    return world, client, master, next(node for node in world.nodes.values() if node is not master)


def schedule(world: World, client: Client, count: int) -> None:
    """So many acknowledged entries."""
    for _ in range(count):
        before = len(client.acked)
        client.schedule([8_000])
        world.run_until(lambda: len(client.acked) == before + 1)  # noqa: B023
    world.run(500)


def last_index(node: Node) -> int:
    """End of a node's log."""
    assert node.host is not None
    return node.host.core.log.status().last_index


def put_back(node: Node, older: object) -> None:
    """The copy takes the place of the directory."""
    assert node.host is None
    node.disk = copy.deepcopy(older)  # type: ignore[assignment]


def set_back(world: World, client: Client, master: Node, *members: Node) -> int:
    """Stop the members, each with a copy from before the last five entries. Returns how far the log was committed."""
    older = {}
    for node in members:
        node.kill()
        older[node.name] = copy.deepcopy(node.disk)
        node.start()
        world.run(500)
    schedule(world, client, 5)
    committed = last_index(master)
    for node in members:
        node.kill()
        put_back(node, older[node.name])
    world.run(2_000)
    return committed


def told(node: Node) -> list[dict[str, object]]:
    """What a node said of members that lost entries."""
    return [line.fields for line in node.reported if line.event == "a member has lost entries that it had acknowledged"]


def test_the_master_tells_of_a_member_that_came_back_with_an_older_copy() -> None:
    """Once, in its log and as a metric; and the member has all again."""
    world, client, master, slave = running()
    slave.kill()
    older = copy.deepcopy(slave.disk)
    slave.start()
    schedule(world, client, 5)
    acknowledged = last_index(slave)
    slave.kill()
    put_back(slave, older)
    slave.start()
    world.run(3_000)
    [facts] = told(master)
    assert facts["peer"] == slave.name and facts["acknowledged"] == acknowledged
    assert isinstance(facts["log_ends"], int) and facts["log_ends"] < acknowledged
    assert master.host is not None
    assert master.host.core.parts.members.metrics()["peer_logs_forgotten"] == 1
    assert last_index(slave) == last_index(master)


def test_a_member_that_was_away_or_lost_its_power_is_none() -> None:
    """What it had not synced it has not acknowledged; and a new master knows nothing yet."""
    world, client, master, slave = running()
    for _ in range(3):
        slave.kill()
        schedule(world, client, 2)
        slave.start()
        schedule(world, client, 2)
    master.kill()
    world.run(2_000)
    other = world.elect()
    schedule(world, client, 2)
    master.start()
    schedule(world, client, 2)
    world.run(2_000)
    assert other is not master and not any(told(node) for node in world.nodes.values())


@pytest.mark.parametrize("seed", [0, 4])
@pytest.mark.parametrize("whole", [True, False])
def test_two_older_copies_follow_the_third_that_has_all(seed: int, *, whole: bool) -> None:
    """P1: in runs like these one of them was elected, and the third, which has more that is committed, stopped.
    `whole` False: the third reaches one of them alone."""
    world, client, master, one = running(seed)
    [two] = [node for node in world.nodes.values() if node not in (master, one)]
    set_back(world, client, master, one, two)
    if not whole:
        world.cut.add(frozenset((master.name, two.name)))
    one.start()
    two.start()
    world.run(4_000)
    assert world.master() is master and not master.fatal


def test_two_older_copies_elect_no_master_without_what_the_third_knows() -> None:
    """P1: one of them hears from the third, which cannot reach the other, that more was committed. Once the third is
    gone they wait for it, and say why."""
    world, client, master, one = running()
    [two] = [node for node in world.nodes.values() if node not in (master, one)]
    committed = set_back(world, client, master, one, two)
    assert world.master() is None
    world.cut_off(two.name)
    one.start()
    world.run_until(lambda: one.host is not None and one.host.core.log.status().heard_commit_index == committed)
    master.kill()
    world.heal()
    two.start()
    world.run(20_000)
    assert world.master() is None and one.host is not None
    assert f"and those up to {committed} are committed" in node_vitals(one.host.core).state_reason
    master.start()
    world.elect()
    client.consume()
    world.run(15_000)
    assert set(client.got) == set(client.acked)
