"""Tens of thousands of leases: a master begins, ends, expires and returns them turn by turn, or it would be held up for
longer than its mastership lasts, and the next one just as long."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.counting import calls_of
from tests.node.core.delivery.test_leases import elected_again
from tests.node.core.delivery.test_retries import admin
from tests.node.core.trio import Client, World
from tickwheel.node.core.delivery import channel, delivery, heard_leases, inherited, leases
from tickwheel.node.core.delivery.delivery import Delivery
from tickwheel.node.core.delivery.heard_leases import HeardLeases
from tickwheel.node.core.delivery.inherited import Inherited
from tickwheel.node.core.delivery.leases import Lease, LeaseTable, in_turn, ranges_of
from tickwheel.node.core.delivery.returns import Returns
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.schedule.intake import from_batch
from tickwheel.node.core.world import ClusterMs, Now, SteadyMs
from tickwheel.node.failure import not_master
from tickwheel.node.state.settings import Settings
from tickwheel.node.state.subscription import Attempts, Positions, Subscription
from tickwheel.proto import admin_pb2, common_pb2, scheduler_pb2
from tickwheel.proto.peer_pb2 import LeaseRange
from tickwheel.wheel.units import Ids

TOPICS = [f"t{number}" for number in range(12)]
EACH = 3
COUNT = EACH * len(TOPICS)
TURN = 4


@pytest.fixture(autouse=True)
def small_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (delivery, heard_leases, inherited):
        monkeypatch.setattr(module, "TURN_LEASES", TURN)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many leases each tick, each begin and each close of a session took over or gave back."""
    done = [0]

    def marked(original: Callable[..., None]) -> Callable[..., None]:
        def call(self: Any, *args: Any, **named: Any) -> None:
            done.append(0)
            original(self, *args, **named)

        return call

    def counted(original: Callable[..., None]) -> Callable[..., None]:
        def call(self: Any, *args: Any) -> None:
            done[-1] += 1
            original(self, *args)

        return call

    monkeypatch.setattr(Inherited, "_take_over", counted(Inherited._take_over))
    monkeypatch.setattr(Returns, "give_back", counted(Returns.give_back))
    for name in ("tick", "begin", "close_session"):
        monkeypatch.setattr(Delivery, name, marked(getattr(Delivery, name)))
    yield done


def schedule(world: World, names: list[str]) -> None:
    """A message for each of these topics, with a name of its own, due in a moment."""
    master = world.elect()
    assert master.host is not None
    messages = [
        common_pb2.Message(topic=name, payload=b"%s at %d" % (name.encode(), world.now_ms), due_ms=world.now_ms + 20)
        for name in names
    ]
    answers: list[object] = []
    wanted = scheduler_pb2.ScheduleBatch(rows=scheduler_pb2.RowBatch(messages=messages))
    master.host.core.parts.publisher.schedule(from_batch(wanted, Settings()), Reply.either(answers.append))
    master.wake()
    world.run_until(lambda: bool(answers))


def holding(world: World, lease_ms: int) -> Client:
    """A consumer that settles nothing and has three messages of each topic, each under a lease of its own."""
    admin(world, create_group=admin_pb2.CreateGroupRequest(name="g", topics=TOPICS))
    client = Client(world)
    client.topics, client.settle = TOPICS, False
    client.consume(lease_ms=lease_ms)
    world.run_until(lambda: client.session is not None)
    for number in range(EACH):
        schedule(world, TOPICS)
        world.run_until(lambda number=number: len(client.got) == len(TOPICS) * (number + 1))  # type: ignore[misc]
    return client


@pytest.mark.parametrize("again", [True, False], ids=["the same", "another"])
def test_a_new_master_takes_leases_over_in_turns(turns: list[int], *, again: bool) -> None:
    """All count as out at once, none comes before its lease is over, and then each comes."""
    world = World(3)
    client = holding(world, 30_000)
    before = world.elect()
    world.run(1_500)  # the slaves have heard of all of them
    turns[:] = [0]
    if again:
        elected_again(world, before)
    else:
        before.kill()
        world.run_until(lambda: world.master() not in (None, before))
    master = world.master()
    assert master is not None and master.host is not None
    watched = master.host.core.parts.delivery
    world.run_until(lambda: watched.active)
    assert watched.leases.in_flight == COUNT == watched.leases.in_flight_by_group().total()
    assert watched.leases.inherited.left
    world.run_until(lambda: not watched.leases.inherited.left)
    # A turn ends with the channel in which it is over, and a tick serves consumers too.
    assert watched.leases.in_flight == COUNT and sum(turns) >= COUNT and max(turns) <= 2 * (TURN + EACH)
    schedule(world, TOPICS[:2])
    world.run_until(lambda: len(client.got) == COUNT + 2)
    world.run(5_000)
    assert not client.repeated()
    world.run_until(lambda: len(client.repeated()) == COUNT + 2, 60_000)
    assert {tuple(attempt for _, attempt, _ in seen) for seen in client.got.values()} == {(1, 2)}


def taking_over(world: World) -> Delivery:
    """The master is killed: the delivery of the next one, which has begun."""
    before = world.elect()
    before.kill()
    world.run_until(lambda: world.master() not in (None, before))
    master = world.master()
    assert master is not None and master.host is not None
    watched = master.host.core.parts.delivery
    world.run_until(lambda: watched.active)
    return watched


def test_slaves_are_told_what_is_not_taken_over_yet() -> None:
    """New messages do not wait until it is, and what is held does not come with them."""
    world = World(4)
    client = holding(world, 30_000)
    world.run(1_500)
    watched = taking_over(world)
    assert watched.leases.inherited.left and len(list(watched.leases.held())) < COUNT
    assert named(r for some in watched.leases.all_held() for r in ranges_of(some)) == COUNT
    assert watched.leases.inherited.left
    schedule(world, TOPICS[-1:])
    world.run_until(lambda: len(client.got) == COUNT + 1)
    assert not client.repeated()


@pytest.mark.parametrize("room", [1, 0])
def test_a_group_with_a_limit_is_served_while_leases_are_taken_over(room: int) -> None:
    """What is still to be taken over counts as out, by group."""
    world = World(4)
    client = holding(world, 30_000)
    admin(world, settings=admin_pb2.Settings(group_in_flight_max=COUNT + room))
    world.run(1_500)
    watched = taking_over(world)
    (group_id,) = watched.leases.in_flight_by_group()
    assert watched.leases.inherited.left and watched.leases.in_flight_of_group(group_id) == COUNT
    assert watched._room(group_id) == room and watched.leases.inherited.left
    world.run_until(lambda: not watched.leases.inherited.left)
    assert watched._room(group_id) == room and not watched.leases.inherited.out and not watched.leases.inherited._out_of
    schedule(world, TOPICS[-2:])
    world.run_until(lambda: len(client.got) == COUNT + room)
    world.run(1_000)
    assert len(client.got) == COUNT + room and not client.repeated()


@pytest.mark.parametrize("how", ["left", "ran out"])
def test_many_messages_come_back_in_turns(turns: list[int], how: str) -> None:
    world = World(5)
    client = holding(world, 30_000 if how == "left" else 4_000)
    turns[:] = [0]
    if how == "left":
        assert client.session is not None
        client.session.close()
        client.closed = True
        client.at = None
    world.run_until(lambda: len(client.repeated()) == COUNT, 60_000)
    assert max(turns) <= TURN and sum(turns) == COUNT


def ended_and_begun(world: World, steps: str) -> Delivery:
    """The master's deliveries after ends (e) and begins (b) of its mastership."""
    master = world.elect()
    assert master.host is not None
    watched = master.host.core.parts.delivery
    for step in steps:
        if step == "e":
            watched.end(not_master(None, None))
        else:
            watched.begin(watched.term, ClusterMs(world.now_ms))
    return watched


@pytest.mark.parametrize("steps", ["e", "ee", "eb", "ebb", "ebe", "ebbe", "eebe"])
def test_no_lease_is_forgotten_between_two_turns(steps: str) -> None:
    """An end may come without a begin, and a second begin without an end: a lead command may be applied twice. The
    file has all leases meanwhile."""
    world = World(6)
    holding(world, 30_000)
    watched = ended_and_begun(world, steps)
    assert watched.leases.in_flight == (COUNT if steps.endswith("b") else 0)
    written = watched.leases.ranges()
    assert written is not None and named(r for ranges in written() for r in ranges) == COUNT


def test_an_end_brings_no_lease_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tens of thousands that ran out and wait for the log, each would cost as much as a delivery."""
    world = World(8)
    holding(world, 4_000)
    master = world.elect()
    assert master.host is not None
    watched = master.host.core.parts.delivery
    retries = watched.settlements.retries
    for _ in range(COUNT // TURN):
        watched.tick(Now(ClusterMs(world.now_ms + 5_000), SteadyMs(0), acting=True, dispatching=True))
    under_way = sum(rows for line in retries._proposed for _, rows in line.proposed)
    assert retries.rows == COUNT > under_way > 0
    given: list[Lease] = []
    monkeypatch.setattr(LeaseTable, "give", lambda self, lease: given.append(lease))
    ended_and_begun(world, "e")
    assert retries.rows == under_way and not given


def test_a_slave_is_told_of_what_is_taken_over_while_the_table_is_told() -> None:
    """Half of the channels before their turn in the table comes: what is out, and what waits for its dispatch."""
    world = World(7)
    holding(world, 30_000)
    watched = ended_and_begun(world, "e")
    keys = watched.leases.heard.channels()
    until_ms = world.now_ms + 30_000
    watched.leases.heard.hear(
        LeaseRange(group_id=g, topic_id=t, first_position=50, count=1, ids=bytes(7) + b"x", until_ms=until_ms)
        for g, t in keys
    )
    watched.begin(watched.term, ClusterMs(world.now_ms))
    table = (r for some in watched.leases.all_held() for r in ranges_of(some))
    told = [next(table)]
    watched.leases.feed._note_given()
    since = watched.leases.feed._end
    for key in keys[::2]:
        watched.leases.inherited.take(key)
    watched.leases.feed._note_given()
    told += [*table, *itertools.islice(watched.leases.feed._events, since - watched.leases.feed._first, None)]
    assert watched.leases.inherited.left
    assert named(r for r in told if not r.ids) == COUNT
    assert {r.topic_id for r in told if r.ids} == {topic_id for _, topic_id in keys}


def test_a_lease_that_is_settled_soon_enters_no_list() -> None:
    """Over many topics nearly all are by the next upkeep. The others end, and count until then."""
    table = LeaseTable()
    given = [Lease((1, number), *one(0), 5_000 + number, 7) for number in range(10)]
    for lease in given:
        table.give(lease)
    assert table.next_end_ms() == 5_000 and table.out() == 10
    for _ in table.forget_settled(lambda channel: int(channel[1] < 8)):
        pass
    assert [lease.closed for lease in given] == [True] * 8 + [False] * 2
    assert table.next_end_ms() == 5_008 == table._heap[0][0] and len(table._heap) == table.out() == 2
    assert table.groups() == {1: 2} and table.channels() == [(1, 8), (1, 9)]
    assert list(table.expire(5_008)) == given[8:9] and list(table.close_session(7)) == given[9:]
    assert table.next_end_ms() is None and not table.out()


def test_a_lease_that_ends_before_the_next_upkeep_is_over() -> None:
    """Though it is in no list yet; the end of a shorter one that was listed since is no end of it."""
    table = LeaseTable()
    late, soon = (Lease((1, 1), *one(number), until_ms, 7) for number, until_ms in enumerate((2_000, 1_000)))
    table.give(late)
    table.give(soon)
    assert not list(table.expire(999)) and not table._heap
    assert list(table.expire(1_000)) == [soon]
    assert table.next_end_ms() == 2_000 and list(table.expire(2_000)) == [late]


def test_no_lease_is_over_because_a_turn_settled_the_last_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next tick comes before the next turn. It must look for no end of a lease that is gone."""
    monkeypatch.setattr(leases, "TURN_FRESH", 2)
    table = LeaseTable()
    for listed in ((), (Lease((1, 9), *one(0), 9_000, 7),)):
        for lease in listed:
            table.give(lease)
        table.channels()
        for number in range(leases.TURN_FRESH):
            table.give(Lease((1, number), *one(0), 1_000, 7))
        turns = table.forget_settled(lambda channel: int(channel[1] < 9))
        next(turns)
        assert table.next_end_ms() == (9_000 if listed else None)
        assert not list(table.expire(1_000)) and table.out() == len(listed)


def test_leases_of_an_ended_mastership_become_ranges_in_turns() -> None:
    table, heard = LeaseTable(), HeardLeases()
    for number in range(10):
        table.give(Lease((1, number % 2), *one(number), 5_000, 7))
    heard.keep(table.open_leases())
    assert heard.size() == 10 and heard.messages_by_channel() == {(1, 0): 5, (1, 1): 5} and len(heard) == 2
    steps = 0
    for _ in heard.prune(1_000, lambda key: 0, lambda key: 0):
        steps += 1
    known = heard.by_group()[1]
    assert heard.size() == 10 and steps >= 2 and all(isinstance(r, LeaseRange) for r in known)
    assert sorted(r.first_position for some in known for r in ranges_of(some)) == list(range(10))


@pytest.mark.parametrize(("epoch", "kept"), [(0, 1), (1, 0), (None, 1)])
def test_a_lease_of_a_later_epoch_is_not_below_the_floor_of_an_earlier_one(epoch: int | None, kept: int) -> None:
    """A slave may hear of a delivery before it has applied the reset of the group."""
    heard = HeardLeases()
    heard.hear([LeaseRange(group_id=1, topic_id=2, first_position=0, count=1, until_ms=5_000, epoch=1)])
    assert heard.size() == 1
    for _ in heard.prune(1_000, lambda key: 1, lambda key: epoch):
        pass
    assert heard.size() == kept


def test_many_leases_of_one_channel_are_taken_over_as_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those given out and those heard of; none ends earlier than it was told, nor a second later."""
    monkeypatch.setattr(heard_leases, "ENDS_MAX", 10)
    heard = HeardLeases()
    given = [Lease((1, 1), *one(number), 5_000 + 100 * number, 7) for number in range(20)]
    heard.hear(r for lease in given[:10] for r in ranges_of(lease))
    heard.keep(given[10:])
    held = heard.held(1_000, lambda key: 0)
    assert len(held) == 3
    ends = {position: lease.until_ms for lease in held for position in lease.positions.tolist()}
    assert len(ends) == 20 and all(0 <= ends[n] - (5_000 + 100 * n) < 1_000 for n in range(20))


def test_many_leases_by_ids_are_taken_over_as_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages delivered ahead of their dispatch, one lease each; two are named again with other ends."""
    monkeypatch.setattr(heard_leases, "ENDS_MAX", 10)
    heard = HeardLeases()

    def by_id(number: int, until_ms: int) -> Lease:
        return Lease((1, 1), *one(50 + number), until_ms, 7, ids=np.array([900 - number], np.uint64))

    heard.hear(r for n in range(10) for r in ranges_of(by_id(n, 5_000 + 100 * n)))
    heard.keep([by_id(n, 5_000 + 100 * n) for n in range(10, 20)])
    heard.keep([by_id(3, 9_000), by_id(4, 2_000)])
    held = heard.held(1_000, lambda key: 0)
    assert len(held) == 4
    ends = {
        (int(id), int(position)): lease.until_ms
        for lease in held
        if lease.ids is not None
        for id, position in zip(lease.ids, lease.positions, strict=True)
    }
    assert len(ends) == 20 == sum(len(lease.positions) for lease in held)
    told = {n: 9_000 if n == 3 else 5_000 + 100 * n for n in range(20)}
    assert all(0 <= ends[900 - n, 50 + n] - until_ms < 1_000 for n, until_ms in told.items())


def test_the_latest_end_that_a_peer_can_name_stays_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded up it would lie before all others, and the message would come again at once."""
    monkeypatch.setattr(heard_leases, "ENDS_MAX", 10)
    heard = HeardLeases()
    latest = (1 << 63) - 1
    heard.hear(LeaseRange(group_id=1, topic_id=1, first_position=2 * n, count=1, until_ms=latest) for n in range(20))
    held = heard.held(1_000, lambda key: 0)
    assert sum(len(lease.positions) for lease in held) == 20
    assert all(lease.until_ms >= heard_leases.POSITION_MAX for lease in held)


def named(ranges: Iterable[LeaseRange]) -> int:
    """How many messages they name."""
    return len({(r.topic_id, r.first_position + n) for r in ranges for n in range(r.count)})


def one(position: int) -> tuple[Any, Any]:
    """The positions and attempts of a lease of one message."""
    return np.array([position], np.uint64), np.ones(1, np.uint32)


def test_leases_of_many_messages_take_a_turn_as_leases_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer leaves, or its leases end, with hundreds of thousands of messages in a few hundred leases."""
    monkeypatch.setattr(leases, "LEASE_MESSAGES", 10)
    table = LeaseTable()
    for number in range(100):
        positions = np.arange(100 * number, 100 * (number + 1), dtype=np.uint64)
        table.give(Lease((1, 1), positions, np.ones(100, np.uint32), 1_000, 5))
    first = [lease for lease, _ in in_turn(table.close_session(5, 25), 25)]
    assert len(first) == 3 and table.out() == 9_700
    ended = [lease for lease, _ in in_turn(table.expire(1_000), 25)]
    assert len(ended) == 3 and table.out() == 9_400


def test_dropped_leases_are_closed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group with a hundred thousand leases is reset. To drop them costs as much as to drop a few, and they neither
    end nor count for what is given out after that."""
    monkeypatch.setattr(leases, "TURN_DROPPED", 10)
    costs = []
    for count in (2, 100):
        table = LeaseTable()
        for number in range(count):
            table.extend(Lease((1, 1), *one(number), 1_000 + number % 2, 5))
        table.give(Lease((1, 2), *one(0), 2_000, 5))
        costs.append(calls_of(lambda table=table: table.drop((1, 1))))  # type: ignore[misc]
        assert table.channels() == [(1, 2)] and table.of_channel((1, 1)) == []
    assert costs[0] == costs[1]
    table.extend(Lease((1, 1), *one(7), 3_000, 5, epoch=1))
    assert [len(lease.positions) for lease in table.expire(1_000)] == [0] * 50
    assert [len(lease.positions) for lease in table.close_session(5, 20)] == [0] * 20
    assert len(list(table.close_dropped())) == 10 and table.out() == table.out_of_group(1) == 2
    assert table.epochs() == {(1, 2): 0, (1, 1): 1} and table.holds((1, 1), one(7)[0]).all()
    assert [lease.channel for lease in table.expire(5_000)] == [(1, 2), (1, 1)] and table.out() == 0


def test_what_is_held_or_claimed_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers leave one after the other, and each time the next one gets all that came back. What was claimed before
    costs nothing, and no tick hands out or looks at more than its share."""
    for name, value in (("SCANNED_MAX", 8), ("CLAIMED_LEAST", 2)):
        monkeypatch.setattr(channel, name, value)
    monkeypatch.setattr(delivery, "HANDED_MAX", 10)
    world = World(3)
    admin(world, create_group=admin_pb2.CreateGroupRequest(name="g", topics=["t"]))
    master, first = world.elect(), Client(world)
    first.schedule([20] * 100)
    world.run_until(lambda: len(first.acked) == 100)
    looked: list[int] = []
    returned = Subscription.returned

    def counted(self: Subscription, limit: int, first: int = 0) -> tuple[Positions, Ids, Attempts]:
        found = returned(self, limit, first)
        looked.append(len(found[0]))
        return found

    monkeypatch.setattr(Subscription, "returned", counted)
    for attempt in range(1, 4):
        looked.clear()
        client = Client(world)
        client.settle = False
        client.consume(lease_ms=30_000)
        world.run_until(lambda client=client: len(client.got) == 100)  # type: ignore[misc]
        assert {one[1] for got in client.got.values() for one in got} == {attempt}
        assert sum(looked) <= 2 * 100 and max(looked, default=0) <= 100
        assert client.session is not None
        client.session.close()
        master.wake()
