"""Records that a disk does not give back: other members' are delivered; what nobody can read is set aside, and told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from tests.node.core.delivery.test_retries import ACK, Judge, Picky, admin, settlement
from tests.node.core.trio import Node, World, digests
from tickwheel.node.core.config import CoreConfig, DeliveryOrder
from tickwheel.node.core.delivery.fetching import Unreadable
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.schedule.intake import KIND_DUE, IncomingBatch, MetaColumns
from tickwheel.node.core.watch.status import node_status
from tickwheel.node.failure import Failure
from tickwheel.proto import admin_pb2, common_pb2, consumer_pb2, dead_pb2
from tickwheel.proto.log_pb2 import DECLARED_DEAD, PAYLOAD_LOST

CONFIG = replace(CoreConfig(), segment_bytes=1 << 20, buffer_bytes_max=1 << 14)
COUNT = 12
DELAY_MS = 2_000
RETRY = admin_pb2.RetryPolicy(exponential=admin_pb2.ExponentialBackoff(initial_ms=1_000, factor=1.0, max_ms=1_000))


def record_of(number: int) -> bytes:
    """Longer than a checked block of the log, so that damage to the middle of one spares its neighbours."""
    return b"%04d" % number * 3_000


class Seen(Picky):
    """Schedules COUNT long messages and waits until every node has merged them into its files."""

    def __init__(self, world: World, judge: Judge = lambda record, attempt: ACK, *, metas: Iterable[bytes] = ()):
        super().__init__(world, judge)
        master = world.elect()
        assert master.host is not None
        heads = list(metas) or [b""] * COUNT
        records = [head + record_of(number) for number, head in enumerate(heads)]
        self.records = records
        columns = MetaColumns.none(COUNT)
        columns.sizes = np.array([len(head) for head in heads], np.uint32)
        batch = IncomingBatch(
            producer_id="",
            sequence=0,
            count=COUNT,
            topics=["t"],
            topic_of=None,
            when=np.full(COUNT, world.now_ms + DELAY_MS, np.int64),
            kinds=KIND_DUE,
            sizes=np.array([len(record) for record in records], np.uint32),
            records=b"".join(records),
            metas=columns,
        )
        outcomes: list[object] = []
        master.host.core.parts.publisher.schedule(batch, Reply.either(outcomes.append))
        master.wake()
        world.run_until(lambda: all(log_of(node) for node in world.nodes.values()), 1_500)
        assert len(outcomes) == 1 and not isinstance(outcomes[0], Failure)

    def numbers(self) -> list[int]:
        """Of what was delivered, in the order of time."""
        found = [(when, attempt, record) for record, seen in self.got.items() for when, attempt, _ in seen]
        return [self.records.index(record) for _, _, record in sorted(found)]


def log_of(node: Node) -> str:
    """The path of the hour's delay log; empty while there is none."""
    return next((p for p in node.disk.paths() if "hours/" in p and p.endswith(".log") and node.disk.size(p)), "")


def damage(node: Node, number: int) -> None:
    """Flip one byte in the middle of a message's record."""
    path = log_of(node)
    file = node.disk.open(path)
    data = file.read_at(0, file.size())
    file.close()
    node.disk.flip(path, data.index(record_of(number)) + len(record_of(number)) // 2)


def letters(world: World) -> list[dead_pb2.DeadLetter]:
    """The dead letters of group 1, as an operator is told."""
    master = world.elect()
    assert master.host is not None
    answers: list[object] = []
    master.host.core.serving.start(
        master.host.core.parts.dead.list(dead_pb2.ListDeadRequest(group="g")), answers.append
    )
    (answer,) = answers
    assert isinstance(answer, dead_pb2.ListDeadResponse)
    return list(answer.letters)


def cluster(seed: int, *, names: str = "abc", fifo: bool = False, config: CoreConfig = CONFIG) -> World:
    """A topic and a group."""
    world = World(seed, names, config)
    admin(world, create_topic=admin_pb2.CreateTopicRequest(name="t", fifo=fifo))
    admin(world, create_group=admin_pb2.CreateGroupRequest(name="g", topics=["t"], retry=RETRY))
    return world


def restarted(node: Node) -> None:
    """It loses power and comes back."""
    node.kill()
    node.start()
    node.world.run(1_000)


def led_by(world: World, node: Node, ms: int) -> None:
    """The master hands over to it, and so much time passes."""
    master = world.elect()
    answers: list[object] = []
    assert master.host is not None
    master.host.core.parts.mastership.start_transfer(node.name, answers.append)
    master.wake()
    world.run(ms)
    assert answers == [None] and world.elect() is node


def all_up(world: World) -> None:
    """No node has stopped, and all are in the same state."""
    world.run(500)
    assert [node.fatal for node in world.nodes.values()] == [""] * len(world.nodes)
    assert len(digests(world)) == 1


@pytest.mark.parametrize("order", list(DeliveryOrder))
def test_what_the_master_cannot_read_another_member_brings(order: DeliveryOrder) -> None:
    """P1: a bad page of the master's disk stops no node and loses nothing; all is delivered, once, in time."""
    world = cluster(1, config=replace(CONFIG, delivery_order=order))
    client = Seen(world)
    client.consume()
    master = world.elect()
    damage(master, 3)
    damage(master, 7)
    world.run(DELAY_MS + 300)
    assert sorted(client.numbers()) == list(range(COUNT))
    assert master.host is not None and master.host.core.parts.record_repair.repaired == 2
    assert all(when >= due for seen in client.got.values() for when, _, due in seen)
    assert world.elect() is master and not letters(world)
    all_up(world)


def test_what_nobody_can_read_is_set_aside_and_told() -> None:
    """Neighbours are delivered, no node stops, the dead letter says why, the operator is told; no replay invents it."""
    world = cluster(2)
    client = Seen(world)
    client.consume()
    master = world.elect()
    assert master.host is not None
    core = master.host.core
    for node in world.nodes.values():
        damage(node, 5)
    world.run(DELAY_MS + 9_000)
    assert sorted(client.numbers()) == [number for number in range(COUNT) if number != 5]
    (letter,) = letters(world)
    assert letter.cause == PAYLOAD_LOST and letter.topic == "t" and letter.payload_missing and letter.attempts == 0
    assert letter.id.index == 5 and {letter.first_due_ms} == {due for seen in client.got.values() for *_, due in seen}
    assert "0.log" in letter.error and "CRC" in letter.error
    warned, set_aside = master.reported
    assert (warned.level, set_aside.level) == ("warning", "error")
    told = set_aside.fields
    assert told["topic"] == "t" and told["group"] == "g" and told["hour"] == letter.id.hour
    subscription = core.state.subscription(1, 1)
    assert subscription is not None and subscription.floor == COUNT and core.parts.record_repair.waiting == 0
    replayed: list[object] = []
    core.serving.start(core.parts.dead.replay(dead_pb2.ReplayDeadRequest(group="g")), replayed.append)
    master.wake()
    world.run(1_000)
    assert replayed == [dead_pb2.ChangeDeadResponse(kept=1)]
    assert len(client.numbers()) == COUNT - 1
    assert {node.host.core.state.retrying.set_aside for node in world.nodes.values() if node.host} == {1}
    all_up(world)


def test_a_member_that_is_away_may_have_it() -> None:
    """P1: nothing is given up while a member has not said that it cannot read it; only this message waits."""
    world = cluster(3)
    client = Seen(world)
    client.consume()
    master = world.elect()
    away = next(node for node in world.nodes.values() if node is not master)
    for node in world.nodes.values():
        if node is not away:
            damage(node, 2)
    world.cut_off(away.name)
    world.run(DELAY_MS + 6_000)
    assert sorted(client.numbers()) == [number for number in range(COUNT) if number != 2]
    assert master.host is not None and not letters(world)
    status = node_status(master.host.core)
    assert status.unreadable_messages == 1 and f"not heard from {away.name}" in status.unreadable_reason
    assert status.state == admin_pb2.NODE_SERVING and status.state_reason == status.unreadable_reason
    world.heal()
    world.run(6_000)
    assert sorted(client.numbers()) == list(range(COUNT)) and not letters(world)
    all_up(world)


def test_a_retry_of_what_some_cannot_read() -> None:
    """P8: a copy does not depend on what a disk gives back; the node that lacks it asks for it when it is master."""
    world = cluster(4)
    client = Seen(world, lambda record, attempt: settlement(consumer_pb2.RETRY) if attempt < 3 else ACK)
    client.consume()
    master = world.elect()
    lacking = next(node for node in world.nodes.values() if node is not master)
    damage(lacking, 4)
    world.run(DELAY_MS + 500)
    assert sorted(client.numbers()) == list(range(COUNT))
    assert len(digests(world)) == 1
    led_by(world, lacking, 6_000)
    assert sorted(client.numbers()) == sorted(list(range(COUNT)) * 3)
    assert lacking.host is not None and lacking.host.core.parts.record_repair.repaired >= 1
    all_up(world)


def test_a_dead_letter_of_what_some_cannot_read() -> None:
    """P8: who lacks the record of a dead letter says so, and its replay reaches the consumer whole all the same."""
    world = cluster(5, config=replace(CONFIG, checkpoint_period_ms=500, checkpoint_log_bytes=1 << 14))
    dies = settlement(consumer_pb2.DEAD, reason="no")
    client = Seen(
        world, lambda record, attempt: dies if record == record_of(6) and len(client.got[record]) == 1 else ACK
    )
    client.consume()
    master = world.elect()
    lacking = next(node for node in world.nodes.values() if node is not master)
    damage(lacking, 6)
    world.run(DELAY_MS + 2_000)
    restarted(lacking)
    led_by(world, lacking, 2_000)
    assert lacking.host is not None
    (letter,) = letters(world)
    assert letter.cause == DECLARED_DEAD and letter.payload_missing
    lacking.host.core.serving.start(
        lacking.host.core.parts.dead.replay(dead_pb2.ReplayDeadRequest(group="g")), lambda answer: None
    )
    lacking.wake()
    world.run(2_000)
    assert len(client.got[record_of(6)]) == 2
    all_up(world)


def test_a_restart_and_an_installed_checkpoint_keep_what_is_lacking() -> None:
    """What a node lacks is remembered by its checkpoints, also as a gap in a copy that has been merged."""
    world = cluster(6, config=replace(CONFIG, checkpoint_period_ms=500, checkpoint_log_bytes=1 << 14))
    client = Seen(
        world, lambda record, attempt: settlement(consumer_pb2.RETRY, delay_ms=8_000) if attempt == 1 else ACK
    )
    client.consume()
    master = world.elect()
    lacking = next(node for node in world.nodes.values() if node is not master)
    damage(lacking, 4)
    world.run(DELAY_MS + 3_000)
    restarted(lacking)
    led_by(world, lacking, 8_000)
    assert sorted(client.numbers()) == sorted(list(range(COUNT)) * 2)
    assert lacking.host is not None and lacking.host.core.parts.record_repair.repaired >= 1
    all_up(world)


@pytest.mark.parametrize("everywhere", [False, True])
def test_order_holds_behind_what_cannot_be_read(everywhere: bool) -> None:
    """In a FIFO topic nothing overtakes it: its message group is not known until it is here or set aside."""
    metas = [common_pb2.MessageMeta(message_group=name).SerializeToString() for name in "ab" * (COUNT // 2)]
    world = cluster(7, fifo=True)
    client = Seen(world, metas=metas)
    client.consume()
    master = world.elect()
    for node in world.nodes.values():
        if everywhere or node is master:
            damage(node, 4)
    world.run(DELAY_MS + 9_000)
    wanted = [number for number in range(COUNT) if number != 4 or not everywhere]
    assert [n for n in client.numbers() if n % 2 == 0] == [n for n in wanted if n % 2 == 0]
    assert sorted(client.numbers()) == wanted
    assert len(letters(world)) == everywhere
    all_up(world)


def test_a_broadcasting_group_does_not_step_over_it() -> None:
    """P1: a consumer's place stays before a message that could not be read, until it is decided."""
    world = World(8, config=CONFIG)
    admin(world, create_topic=admin_pb2.CreateTopicRequest(name="t"))
    admin(world, create_group=admin_pb2.CreateGroupRequest(name="g", topics=["t"], broadcasting=True))
    client = Seen(world)
    client.consume()
    master = world.elect()
    away = next(node for node in world.nodes.values() if node is not master)
    for node in world.nodes.values():
        if node is not away:
            damage(node, 2)
    world.cut_off(away.name)
    world.run(DELAY_MS + 3_000)
    assert master.host is not None
    subscription = master.host.core.state.subscription(1, 1)
    assert subscription is not None and subscription.floor == 2
    world.heal()
    world.run(6_000)
    assert sorted(client.numbers()) == list(range(COUNT)) and subscription.floor == COUNT
    all_up(world)


def test_a_unit_that_cannot_be_read_comes_too() -> None:
    """After a failover the delay index is read as well: what has a bad row of it comes, and the row is repaired."""
    world = cluster(9)
    client = Seen(world)
    world.run(DELAY_MS)
    first = world.elect()
    assert first.host is not None
    other = next(node for node in world.nodes.values() if node is not first)
    led_by(world, other, 500)
    assert other.host is not None
    path = log_of(other).removesuffix(".log") + ".index"
    other.disk.flip(path, 3 * 96 + 20)
    client.consume()
    world.run(2_000)
    assert sorted(client.numbers()) == list(range(COUNT)) and other.host.core.parts.index_repair.repaired == 1
    all_up(world)


def test_a_disk_that_reads_nothing_of_an_hour() -> None:
    """Every read of a file fails for a while: all comes from the others."""
    world = cluster(10)
    client = Seen(world)
    client.consume()
    master = world.elect()
    master.disk.read_error(log_of(master))
    world.run(DELAY_MS + 1_500)
    assert sorted(client.numbers()) == list(range(COUNT))
    assert master.host is not None and master.host.core.parts.record_repair.repaired == COUNT
    all_up(world)


def test_what_has_lost_its_place_is_not_waited_for() -> None:
    """A message delivered ahead of a dispatch that failed: another one lies at its position, which is left alone."""
    world = cluster(11)
    client = Seen(world, lambda record, attempt: None)
    client.consume(lease_ms=60_000)
    world.run(DELAY_MS + 300)
    master = world.elect()
    assert master.host is not None
    core = master.host.core
    assert len(client.got) == COUNT
    number = world.now_ms // 3_600_000 << 32 | 999
    core.parts.record_repair.add(Unreadable(core.parts.delivery.channels._by_key[1, 1], 3, number, None, "bad page"))
    master.wake()
    world.run(1_000)
    assert core.parts.record_repair.waiting == 0 and not letters(world)
    all_up(world)
