"""What one extension or settlement may cost: messages named twice, the pile of leases, what slaves are told of them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.node.core.delivery.test_retries import admin
from tests.node.core.trio import Client, Node, World
from tickwheel.node.core.delivery import heard_leases as module
from tickwheel.node.core.delivery.heard_leases import HeardLeases
from tickwheel.node.core.delivery.lease_feed import (
    RANGES_PER_SYNC_MAX,
    SYNC_BYTES_MAX,
    TABLE_RANGES_PER_SYNC_MAX,
    LeaseFeed,
)
from tickwheel.node.core.delivery.leases import Lease, LeaseTable, ranges_of
from tickwheel.node.core.delivery.settlements import EXTEND_MESSAGES_MAX, SETTLE_MESSAGES_MAX
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.watch.listings import named_group
from tickwheel.node.core.watch.status import node_metrics, node_status
from tickwheel.node.failure import Failure, RequestError
from tickwheel.proto import admin_pb2, consumer_pb2
from tickwheel.proto.peer_pb2 import LeaseRange

T = (1, 1)


def lease(positions: list[int] | range, until_ms: int = 1_000, session_id: int = 5) -> Lease:
    return Lease(T, np.array(positions, np.uint64), np.ones(len(positions), np.uint32), until_ms, session_id)


# -- the table


def test_extensions_of_one_message_leave_one_lease_on_master_and_slave() -> None:
    """Renewed for hours, or by a caller who means harm: neither table grows."""
    table, heard = LeaseTable(), HeardLeases()
    feed = LeaseFeed(table.open_leases)
    table.give(lease([5]))
    for number in range(1, 5_001):
        longer = lease([5], 1_000 + number)
        table.extend(longer)
        feed.add(longer)
        if number % 1_000 == 0:
            heard.hear(feed.for_peer("b", number)[0])
    assert [one.until_ms for one in table.open_leases()] == [6_000]
    assert table.out() == 1 and len(table._heap) < 200
    assert [r.until_ms for r in heard.of_channel(T)] == [6_000]


def test_extensions_of_ever_fewer_messages_do_not_pile_up() -> None:
    """Each leaves the lease before it one message: without their other positions these leases are small."""
    table = LeaseTable()
    count = 300
    table.give(lease(range(count)))
    for first in range(1, count):
        table.extend(lease(range(first, count), 1_000 + first))
    assert sum(len(one.positions) for one in table.open_leases()) <= 2 * count == 2 * table.out()
    assert [one.positions.tolist() for one in table.expire(1_500)] == [[n] for n in range(count)]


STEPS = st.one_of(
    st.tuples(
        st.sampled_from(["give", "extend"]),
        st.sets(st.integers(0, 12), min_size=1, max_size=6),
        st.integers(1, 30),
        st.integers(1, 3),
    ),
    st.tuples(st.sampled_from(["expire", "close", "floor"]), st.just(frozenset[int]()), st.integers(1, 30), st.just(0)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_the_newest_lease_of_a_message_counts(steps: list[tuple[str, set[int], int, int]]) -> None:
    """It is counted once, and comes back once: with the newest lease, whatever became of the others."""
    table = LeaseTable()
    table.give(lease([99], 10**6, 9))
    table.extend(lease([99], 10**6, 9))  # from now on the table knows which lease is the newest
    held: dict[int, tuple[int, int]] = {}
    for kind, positions, number, session_id in steps:
        ended: list[Lease] = []
        over: list[int] = []
        if kind == "give":
            table.give(lease(sorted(positions), number, session_id))
        elif kind == "extend":
            assert table.holds(T, np.arange(13, dtype=np.uint64)).tolist() == [p in held for p in range(13)]
            table.extend(lease(sorted(positions), number, session_id))
        elif kind == "expire":
            ended, over = list(table.expire(number)), [p for p, (end, _) in held.items() if end <= number]
        elif kind == "close":
            ended, over = (
                list(table.close_session(number % 3 + 1)),
                [p for p, (_, s) in held.items() if s == number % 3 + 1],
            )
        else:
            list(table.forget_settled(lambda _, floor=number: floor))  # type: ignore[misc]
            kept = {p for one in table.open_leases() for p in one.positions.tolist()}
            assert all(p in kept for p in held if p >= number)
            held = {p: how for p, how in held.items() if p in kept}
        held.update((p, (number, session_id)) for p in positions)
        assert sorted(p for one in ended for p in one.positions.tolist()) == sorted(over)
        for position in over:
            del held[position]
        assert table.out() == table.out_of_group(1) == table.out_by_group()[1] == len(held) + 1
        assert sum(len(one.positions) for one in table.open_leases()) <= 2 * (len(held) + 1)
    assert {p for one in table.of_channel(T) for p in one.positions.tolist()} >= set(held)


def test_a_settled_lease_goes_although_one_of_the_same_caller_stays() -> None:
    """A message of another topic that is held for hours keeps none of the settled ones."""
    table = LeaseTable()
    stays = lease([1], 10**9)
    stays.channel = (1, 2)
    table.give(stays)
    for position in range(100):
        table.give(lease([position], 10**9))
    list(table.forget_settled(lambda key: 100 if key == T else 0))
    assert list(table.open_leases()) == [stays] and table.out() == 1


# -- what slaves are told


def test_no_sync_has_more_than_its_share_of_the_whole_table() -> None:
    """Nor of a burst; `complete` comes with the last piece, and what is given out meanwhile beside the others."""
    count = 2 * TABLE_RANGES_PER_SYNC_MAX + 7
    held = [lease(range(0, 2 * count, 2))]
    feed, heard = LeaseFeed(lambda: held), HeardLeases()
    seen = []
    for number in range(1, 5):
        ranges, complete = feed.for_peer("b", number)
        feed.add(lease([10**6 + 2 * number]))
        heard.hear(ranges)
        feed.acknowledged("b", number)
        seen.append((len(ranges), complete))
    most = TABLE_RANGES_PER_SYNC_MAX
    assert seen == [(most, False), (most + 1, False), (8, True), (1, True)]
    assert heard.size() == count + 3 and not feed.all_heard("b")
    feed.add(lease(range(10**7, 10**7 + 2 * RANGES_PER_SYNC_MAX + 2, 2)))
    assert [len(feed.for_peer("b", number)[0]) for number in (5, 6)] == [RANGES_PER_SYNC_MAX, 2]


def test_a_sync_is_bounded_in_bytes() -> None:
    """A range of a million messages that are out for the second time names a million attempts."""
    many = Lease(T, np.arange(2_000_000, dtype=np.uint64), np.full(2_000_000, 2, np.uint32), 1_000, 5)
    feed, heard = LeaseFeed(lambda: [many]), HeardLeases()
    for number in itertools.count(1):
        ranges, complete = feed.for_peer("b", number)
        assert sum(r.ByteSize() for r in ranges) <= 2 * SYNC_BYTES_MAX
        heard.hear(ranges)
        feed.acknowledged("b", number)
        if complete:
            break
    (one,) = heard.held(0, lambda key: 0)
    assert len(one.positions) == 2_000_000 and (one.attempts == 2).all()


def test_what_is_heard_in_many_cuts_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each names other parts of the same hundred messages; without a join there would be 5,050 ranges."""
    monkeypatch.setattr(module, "JOIN_MESSAGES_MIN", 100)
    monkeypatch.setattr(module, "ENDS_MAX", 10_000)
    heard = HeardLeases()
    largest = 0
    for until_ms, (first, end) in enumerate(itertools.combinations(range(101), 2), 1):
        heard.hear([LeaseRange(group_id=1, topic_id=1, first_position=first, count=end - first, until_ms=until_ms)])
        largest = max(largest, heard.messages_by_channel().total())
    assert largest <= 400
    ends = {p: one.until_ms for one in heard.held(0, lambda key: 0) for p in one.positions.tolist()}
    pairs = enumerate(itertools.combinations(range(101), 2), 1)
    assert ends == {p: until_ms for until_ms, (first, end) in pairs for p in range(first, end)}


# -- on a master


class Holder(Client):
    """Keeps what it is given, and shows the batches."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.settle = False
        self.batches: list[consumer_pb2.DeliverBatch] = []

    def _deliver(self, batch: consumer_pb2.DeliverBatch) -> None:
        self.batches.append(batch)
        super()._deliver(batch)


def holding(count: int) -> tuple[World, Node, Holder, consumer_pb2.DeliverBatch]:
    """A consumer that holds so many messages, in one batch."""
    world = World()
    client = Holder(world)
    master = world.elect()
    client.consume(lease_ms=5_000)
    world.run(100)
    client.schedule([100] * count)
    world.run_until(lambda: len(client.got) == count)
    assert len(client.batches) == 1
    return world, master, client, client.batches[0]


def extended(
    master: Node, batch: consumer_pb2.DeliverBatch, times: int = 1, **named: bytes
) -> consumer_pb2.ExtendReceipt | Failure:
    """The answer to an extension that names a batch so many times."""
    assert master.host is not None
    columns = {"ids": batch.ids, "attempts": batch.attempts, "positions": batch.positions} | named
    request = consumer_pb2.ExtendBatch(group="g", topic="t", lease_ms=20_000)
    for name, column in columns.items():
        setattr(request, name, column * times)
    try:
        return master.host.core.parts.consumers.extend(request)
    except RequestError as error:
        return error.failure


@pytest.mark.parametrize("positions", [True, False])
def test_a_message_named_often_in_an_extension_is_extended_once(positions: bool) -> None:
    world, master, _, batch = holding(2)
    assert master.host is not None
    delivery = master.host.core.parts.delivery
    before = len(delivery.leases.feed._events)
    receipt = extended(master, batch, 100, **({} if positions else {"positions": b""}))
    assert isinstance(receipt, consumer_pb2.ExtendReceipt)
    assert (receipt.extended, receipt.refused) == (2, 0)
    assert delivery.leases.in_flight == 2 and len(list(delivery.leases.held())) == 1
    assert len(delivery.leases.feed._events) - before <= 1
    world.run(200)
    for node in world.nodes.values():
        if node is not master:
            assert node.host is not None
            held = node.host.core.parts.delivery.leases.heard.held(world.now_ms, lambda key: 0)
            assert [(len(one.positions), one.until_ms) for one in held] == [(2, receipt.lease_until_ms)]


def test_an_extension_names_a_bounded_number_of_messages() -> None:
    """Copies count: they are bytes that the master reads."""
    _, master, _, batch = holding(1)
    assert isinstance(extended(master, batch, EXTEND_MESSAGES_MAX), consumer_pb2.ExtendReceipt)
    refused = extended(master, batch, EXTEND_MESSAGES_MAX + 1)
    assert isinstance(refused, Failure) and refused.grpc_code_name == "INVALID_ARGUMENT"
    assert refused.metadata["field"] == "ids" and refused.metadata["value"] == str(EXTEND_MESSAGES_MAX + 1)
    assert str(EXTEND_MESSAGES_MAX) in refused.metadata["limit"]


def test_only_what_is_out_can_be_extended() -> None:
    """Leases would else grow with the backlog, by messages that nobody has."""
    world, master, client, batch = holding(1)
    assert client.session is not None
    client.session.close()
    given_back = extended(master, batch)
    assert isinstance(given_back, consumer_pb2.ExtendReceipt) and (given_back.extended, given_back.refused) == (0, 1)
    client.closed = True  # it opens again
    world.run_until(lambda: len(client.batches) == 2)
    older = extended(master, batch)
    assert isinstance(older, consumer_pb2.ExtendReceipt) and (older.extended, older.refused) == (0, 1)
    newer = extended(master, client.batches[1])
    assert isinstance(newer, consumer_pb2.ExtendReceipt) and (newer.extended, newer.refused) == (1, 0)


def test_a_message_that_nobody_has_is_not_extended() -> None:
    world = World()
    master = world.elect()
    assert master.host is not None
    admin(world, create_topic=admin_pb2.CreateTopicRequest(name="t"))
    admin(world, create_group=admin_pb2.CreateGroupRequest(name="g", topics=["t"]))
    client = Holder(world)
    client.schedule([100] * 3)
    state = master.host.core.state
    world.run_until(lambda: state.backlog.total == 3)
    subscription = state.subscription(state.group_id("g") or 0, state.topic_id("t") or 0)
    assert subscription is not None
    positions, ids, attempts = subscription.deliverable(0, 3)
    waiting = consumer_pb2.DeliverBatch(
        ids=ids.tobytes(), attempts=attempts.astype("<u4").tobytes(), positions=positions.tobytes()
    )
    receipt = extended(master, waiting)
    assert isinstance(receipt, consumer_pb2.ExtendReceipt) and (receipt.extended, receipt.refused) == (0, 3)
    assert master.host.core.parts.delivery.leases.in_flight == 0


@pytest.mark.parametrize("outcome", [consumer_pb2.ACK, consumer_pb2.RETRY, consumer_pb2.DEAD, consumer_pb2.SKIP])
@pytest.mark.parametrize("positions", [True, False])
def test_a_message_named_often_in_a_settlement_is_settled_and_counted_once(
    outcome: consumer_pb2.Outcome.ValueType, positions: bool
) -> None:
    """Also with a wrong attempt beside the right one. The queue of retries gets one row, not one for each copy."""
    world, master, _, batch = holding(2)
    assert master.host is not None
    settlements = master.host.core.parts.delivery.settlements
    copies = 400
    request = consumer_pb2.SettleBatch(
        group="g",
        topic="t",
        outcome=outcome,
        ids=batch.ids * copies,
        attempts=np.array([0, 0, 1, 1] * (copies // 2), "<u4").tobytes(),
        positions=batch.positions * copies if positions else b"",
    )
    answers: list[object] = []
    settlements.settle(request, settlements._group("g"), world.now_ms, Reply.either(answers.append))
    assert settlements.retries.rows == (2 if outcome in (consumer_pb2.RETRY, consumer_pb2.DEAD) else 0)
    world.run_until(lambda: bool(answers))
    (result,) = answers
    counts = (result.settled, result.stale, result.unknown)  # type: ignore[attr-defined]
    assert counts == (2, 0, 0)


def test_the_row_with_the_right_position_counts() -> None:
    """Push-first: a consumer may know a message by the position that was expected, and by the one that it got."""
    world, master, _, batch = holding(1)
    assert master.host is not None
    position = int(np.frombuffer(batch.positions, "<u8")[0])
    request = consumer_pb2.SettleBatch(
        group="g",
        topic="t",
        outcome=consumer_pb2.ACK,
        ids=batch.ids * 3,
        attempts=np.array([1, 1, 9], "<u4").tobytes(),
        positions=np.array([position + 1, position, position + 2], "<u8").tobytes(),
    )
    answers: list[object] = []
    settlements = master.host.core.parts.delivery.settlements
    settlements.settle(request, settlements._group("g"), world.now_ms, Reply.either(answers.append))
    world.run_until(lambda: bool(answers))
    assert (answers[0].settled, answers[0].unknown) == (1, 0)  # type: ignore[attr-defined]


def test_a_settlement_names_a_bounded_number_of_messages() -> None:
    _, master, _, batch = holding(1)
    assert master.host is not None
    count = SETTLE_MESSAGES_MAX + 1
    request = consumer_pb2.SettleBatch(
        group="g", topic="t", outcome=consumer_pb2.ACK, ids=batch.ids * count, attempts=batch.attempts * count
    )
    answers: list[object] = []
    master.host.core.parts.consumers.settle(request, Reply.either(answers.append))
    (refused,) = answers
    assert isinstance(refused, Failure) and refused.metadata["field"] == "ids"
    assert str(SETTLE_MESSAGES_MAX) in refused.metadata["limit"] and refused.metadata["value"] == str(count)


def test_status_and_metrics_walk_over_no_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients renew by default: what is out may be many leases."""
    _, master, _, batch = holding(20)
    assert isinstance(extended(master, batch), consumer_pb2.ExtendReceipt)

    def walked(*_: object) -> Iterator[Lease]:
        raise AssertionError("something walks over all leases")

    monkeypatch.setattr(LeaseTable, "open_leases", walked)
    monkeypatch.setattr(LeaseTable, "of_channel", walked)
    assert master.host is not None
    core = master.host.core
    group = named_group(core, "g")
    assert group is not None and group.in_flight == 20
    assert node_status(core).in_flight == 20
    assert node_metrics(core)["in_flight_messages"] == 20.0
    assert core.parts.delivery.leases.in_flight_by_group() == Counter({group.group_id: 20})


def test_an_extended_lease_is_given_back_once_when_its_consumer_leaves() -> None:
    world, master, client, batch = holding(3)
    assert master.host is not None and client.session is not None
    for _ in range(5):
        receipt = client.session.extend(
            consumer_pb2.ExtendBatch(
                group="g", topic="t", ids=batch.ids, attempts=batch.attempts, positions=batch.positions, lease_ms=9_000
            )
        )
        assert receipt.extended == 3
    client.session.close()
    client.closed = True
    world.run_until(lambda: len(client.batches) == 2)
    world.run(15_000)
    assert {tuple(attempt for _, attempt, _ in seen)[:2] for seen in client.got.values()} == {(1, 2)}
    assert sum(len(list(ranges_of(one))) for one in master.host.core.parts.delivery.leases.held()) <= 3


# -- pulls that wait


def test_a_tick_looks_only_at_the_waiting_pulls_whose_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand may wait. They end in the order of their times, and those that got messages do not come again."""
    world = World()
    master = world.elect()
    assert master.host is not None
    core = master.host.core
    admin(world, create_topic=admin_pb2.CreateTopicRequest(name="t"))
    admin(world, create_group=admin_pb2.CreateGroupRequest(name="g", topics=["t"]))
    ended: list[int] = []
    waits = [20_000 - 10 * n for n in range(300)]

    def pull(number: int) -> None:
        request = consumer_pb2.PullRequest(group="g", messages_max=1, wait_ms=waits[number])
        core.serving.start(core.parts.consumers.pull(request), lambda answer: ended.append(number))

    for number in range(len(waits)):
        pull(number)
    world.run(100)
    consumers = core.parts.consumers
    assert len(consumers._pulls) == 300 and not ended
    client = Client(world)
    client.schedule([100] * 290)
    world.run_until(lambda: len(ended) == 290)
    assert len(consumers._ends) <= 2 * len(consumers._pulls) + 64
    left = sorted(set(range(300)) - set(ended), key=lambda number: waits[number])

    class Unwalked(dict[Any, None]):
        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("something walks over all waiting pulls")

    monkeypatch.setattr(consumers, "_pulls", Unwalked(consumers._pulls))
    world.run_until(lambda: len(ended) == 300, 25_000)
    assert ended[290:] == left and not consumers._ends
