"""Rows of a delay index that a disk has lost, on three simulated nodes: nobody stops, all is delivered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from tests.node.core.delivery.test_retries import ACK, Picky, settlement
from tests.node.core.repair.test_record_repair import all_up, log_of
from tests.node.core.trio import Client, Node, World
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.watch.status import node_metrics, node_status
from tickwheel.node.rebuild import rebuild
from tickwheel.proto import consumer_pb2
from tickwheel.wheel.units import HOUR_MS

CONFIG = replace(CoreConfig(), segment_bytes=1 << 20, buffer_bytes_max=1 << 14, preload_ms=1_000)
COUNT = 250
DELAY_MS = 4_000


def index_of(node: Node) -> str:
    """The path of the hour's delay index; empty while there is none."""
    path = log_of(node)
    return f"{path.removesuffix('.log')}.index" if path else ""


def content(node: Node) -> bytes:
    """Of the hour's delay index."""
    file = node.disk.open(index_of(node))
    try:
        return file.read_at(0, file.size())
    finally:
        file.close()


def spoil(nodes: Iterable[Node], rows: Iterable[int] = (0, 3, 4, 99, 249)) -> None:
    """A byte of some rows changes."""
    for node in nodes:
        for row in rows:
            node.disk.flip(index_of(node), 96 * row + row % 92)


def loaded(world: World, client: Client, count: int = COUNT) -> None:
    """So many messages, ten milliseconds apart, in the files of every node."""
    world.elect()
    client.schedule([DELAY_MS + 10 * number for number in range(count)])
    world.run_until(lambda: all(index_of(node) for node in world.nodes.values()), 1_500)
    assert len(client.acked) == count


def all_came(world: World, client: Client) -> None:
    """Each once, none early, all nodes alike and alive."""
    assert len(client.got) == COUNT and not client.repeated() and not client.early()
    all_up(world)


@pytest.mark.parametrize("whose", ["master", "slave", "two"])
def test_a_damaged_index_is_recovered_and_all_are_delivered(whose: str) -> None:
    """P1: while the nodes run, before the ticks are loaded: rows come from other members, and are as they were."""
    world = World(1, config=CONFIG)
    client = Client(world)
    client.consume()
    loaded(world, client)
    master = world.elect()
    slaves = [node for node in world.nodes.values() if node is not master]
    victims = {"master": [master], "slave": slaves[:1], "two": [master, slaves[0]]}[whose]
    before = [content(node) for node in victims]
    spoil(victims)
    world.run(DELAY_MS + 10 * COUNT)
    all_came(world, client)
    assert world.elect() is master
    late = [when - due for seen in client.got.values() for when, _, due in seen]
    assert max(late) < 250
    assert [content(node) for node in victims] == before
    for node in victims:
        assert node.host is not None
        metrics = node_metrics(node.host.core)
        assert (metrics["index_rows_mended"], metrics["delay_indexes_damaged"]) == (5.0, 0.0)
    told = [line for node in victims for line in node.reported]
    assert len(told) == 2 * len(victims) and all("0.index" in str(line.fields["error"]) for line in told)
    assert {line.fields["rows"] for line in told if "written again" in line.event} == {5}


def test_a_replay_waits_for_rows_that_are_lost() -> None:
    """A node comes back to a damaged index and to dispatches of what it says: it applies them once it has the rows."""
    world = World(2, config=replace(CONFIG, checkpoint_period_ms=500, checkpoint_log_bytes=1 << 14))
    client = Client(world)
    client.consume()
    loaded(world, client)
    master = world.elect()
    victim = next(node for node in world.nodes.values() if node is not master)
    client.schedule([2 * HOUR_MS])
    world.run_until(lambda: len(client.acked) > COUNT)
    assert master.host is not None and victim.host is not None
    checkpointer, applied = victim.host.core.checkpointer, master.host.core.applied.index
    world.run_until(lambda: checkpointer.covered_index >= applied, 2_000)
    before = content(victim)
    victim.kill()
    spoil([victim], range(0, COUNT, 3))
    world.run(DELAY_MS)
    victim.start()
    world.run(10 * COUNT)
    all_came(world, client)
    assert content(victim) == before
    assert victim.host is not None and victim.host.core.parts.index_repair.repaired == len(range(0, COUNT, 3))


def test_a_retry_on_a_slave_that_has_lost_the_row() -> None:
    """P8: what a nack copies is looked up in the index of every node: who cannot read it waits for it, and goes on."""
    world = World(3, config=CONFIG)
    client = Picky(
        world, lambda record, attempt: settlement(consumer_pb2.RETRY, delay_ms=1_000) if attempt < 2 else ACK
    )
    client.consume()
    loaded(world, client, 150)
    master = world.elect()
    victim = next(node for node in world.nodes.values() if node is not master)
    assert victim.host is not None
    window = victim.host.core.wheel.window
    world.run_until(lambda: bool(window.loaded_units))
    assert not client.got
    spoil([victim], range(20))  # loaded already: a nack is the first to look at them again
    world.run(4_000)
    assert {len(seen) for seen in client.got.values()} == {2} and len(client.got) == 150
    assert victim.host.core.parts.index_repair.repaired == 20
    all_up(world)


def test_while_nobody_answers_it_waits_and_says_so() -> None:
    """Cut off from the others, a node with a damaged index goes on, says what it waits for, and catches up."""
    world = World(4, config=CONFIG)
    client = Client(world)
    client.consume()
    loaded(world, client)
    master = world.elect()
    victim = next(node for node in world.nodes.values() if node is not master)
    spoil([victim], [5])
    world.cut_off(victim.name)
    world.run(DELAY_MS + 10 * COUNT)
    assert victim.host is not None and not victim.fatal
    assert "1 rows of the index of hour" in node_status(victim.host.core).state_reason
    world.heal()
    world.run(2_000)
    all_came(world, client)
    assert not node_status(victim.host.core).state_reason


def test_a_disk_that_reads_nothing_for_a_while_is_not_written_to() -> None:
    """Reads fail, and later they do not: the index is read then, and nothing of it needed repair."""
    world = World(5, config=CONFIG)
    client = Client(world)
    client.consume()
    loaded(world, client)
    victim = world.elect()
    victim.disk.read_error(index_of(victim))
    world.at(world.now_ns + (DELAY_MS - 950) * 1_000_000, victim.disk.heal_reads)
    world.run(DELAY_MS + 10 * COUNT)
    all_came(world, client)


def test_a_cluster_of_one_stops_and_says_which_file() -> None:
    """Nobody else has what is lost: the node must not go on without, and its last words name file and remedy."""
    world = World(6, "a", CONFIG)
    client = Client(world)
    client.consume()
    loaded(world, client)
    node = world.elect()
    spoil([node], [7])
    world.run(DELAY_MS)
    assert node.host is None and "0.index" in node.fatal and "tickwheel rebuild" in node.fatal


def test_a_cluster_of_one_makes_all_of_it_anew_from_its_journal() -> None:
    """P1, P6, P8: with a damaged index, or heads, a node whose journal is whole has all its state again, to the byte:
    what was cancelled, moved, dispatched and settled stays so, and the others are delivered once."""
    config = replace(CONFIG, checkpoint_period_ms=500, checkpoint_log_bytes=1 << 14)
    world = World(8, "a", config)
    client = Client(world)
    client.consume()
    loaded(world, client)
    node = world.elect()
    assert node.host is not None
    hour = world.now_ms // HOUR_MS
    cancelled = range(COUNT - 3, COUNT)
    for number in cancelled:
        node.host.core.serving.start(node.host.core.parts.requests.cancel(hour << 32 | number), lambda outcome: None)
    world.run(DELAY_MS + 1_000)
    assert node.host.core.checkpointer.written and 50 < len(client.got) < COUNT - 3
    before, killed_ms = content(node), world.now_ms
    node.kill()
    spoil([node], range(0, COUNT, 2))
    node.disk.flip(f"{index_of(node).removesuffix('.index')}.heads", 60)
    assert rebuild(node.disk, config.segment_bytes).entries > 10
    node.start()
    world.run(10 * COUNT + 6_000)
    assert node.host is not None and not node.fatal
    assert content(node) == before
    assert set(client.got) == {b"m%d" % number for number in range(COUNT) if number not in cancelled}
    assert not client.early()
    first_ms = {record: seen[0][0] for record, seen in client.got.items()}
    assert all(killed_ms - 100 < first_ms[record] <= killed_ms for record in client.repeated())


def test_damage_beyond_rows_stops_the_node_as_before() -> None:
    """Heads say where rows lie: when they are damaged too nothing is guessed; the others deliver everything."""
    world = World(7, config=CONFIG)
    client = Client(world)
    client.consume()
    loaded(world, client)
    master = world.elect()
    victim = next(node for node in world.nodes.values() if node is not master)
    spoil([victim], [7])
    heads = f"{index_of(victim).removesuffix('.index')}.heads"
    victim.disk.flip(heads, victim.disk.size(heads) - 2)
    world.run(DELAY_MS + 10 * COUNT)
    assert victim.host is None and "hours/" in victim.fatal
    assert len(client.got) == COUNT and not client.repeated()
    assert {node.fatal for node in world.nodes.values() if node is not victim} == {""}
