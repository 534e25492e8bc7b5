"""What is due together leaves in one batch whatever its topics, and is settled by one command, where the consumer takes
that. Any other consumer gets a batch and sends a settlement for each topic."""

from __future__ import annotations

from collections.abc import Iterator
from time import process_time

import numpy as np
import pytest

from tests.node.core.trio import Node, World
from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.delivery import agenda, delivery, handing, retries, settlements
from tickwheel.node.core.delivery.channel import Channel, Share
from tickwheel.node.core.delivery.consumers import ConsumerHandle
from tickwheel.node.core.delivery.leases import Lease, LeaseTable
from tickwheel.node.core.delivery.sessions import Session
from tickwheel.node.core.delivery.settlements import Joined
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.schedule.intake import from_batch
from tickwheel.node.core.world import ClusterMs, Now
from tickwheel.node.failure import Failure, limit_reached, refuse
from tickwheel.node.state.results import SettleResult
from tickwheel.node.state.settings import Settings
from tickwheel.node.state.subscription import mark_of
from tickwheel.proto import common_pb2, scheduler_pb2
from tickwheel.proto.admin_pb2 import CreateGroupRequest, ResetGroupRequest
from tickwheel.proto.admin_pb2 import Settings as SettingsMessage
from tickwheel.proto.consumer_pb2 import (
    ACK,
    EARLIEST,
    RETRY,
    DeliverBatch,
    OpenConsumer,
    Outcome,
    SettleBatch,
    SettleReceipt,
)
from tickwheel.proto.log_pb2 import SETTLE_ACK, AdminCommand, Command, SettleColumns

TOPICS = ("a", "b", "c")


def administer(world: World, command: AdminCommand) -> None:
    """Put into the log by the master, and applied."""
    master = world.elect()
    assert master.host is not None
    results: list[object] = []
    master.host.core.proposer.submit(Command(admin=command), Reply.either(results.append))
    master.wake()
    world.run_until(lambda: bool(results))
    assert not isinstance(results[0], Failure) and getattr(results[0], "failure", None) is None, results


def schedule(world: World, topics: str, in_ms: int = 100) -> None:
    """A message for each letter of `topics`, all due in the same moment."""
    due_ms = world.now_ms + in_ms
    messages = [common_pb2.Message(topic=t, payload=t.encode(), due_ms=due_ms) for t in topics]
    wanted = scheduler_pb2.ScheduleBatch(rows=scheduler_pb2.RowBatch(messages=messages))
    answers: list[object] = []
    master = world.elect()
    assert master.host is not None
    master.host.core.parts.publisher.schedule(from_batch(wanted, Settings()), Reply.either(answers.append))
    master.wake()
    world.run_until(lambda: bool(answers))
    assert not isinstance(answers[0], Failure), answers


class Taker:
    """A consumer of all topics that settles only when told to."""

    def __init__(self, world: World, *, mixes: bool, credits: int = 1_000) -> None:
        self.world = world
        self.batches: list[DeliverBatch] = []
        self.sessions: list[ConsumerHandle] = []
        self.node: Node = world.elect()
        assert self.node.host is not None
        core = self.node.host.core
        request = OpenConsumer(group="g", topics=TOPICS, credits=credits)
        opening = core.parts.consumers.open(request, self.batches.append, lambda failure: None)
        core.serving.start(opening, self._opened)
        self.node.wake()
        world.run_until(lambda: bool(self.sessions))
        self.sessions[0].mix(mixes)

    def _opened(self, session: ConsumerHandle | Failure) -> None:
        assert isinstance(session, ConsumerHandle), session
        self.sessions.append(session)

    def settle(self, settlement: SettleBatch) -> SettleReceipt | Failure:
        answers: list[SettleReceipt | Failure] = []
        self.sessions[0].settle(settlement, Reply.either(answers.append))
        self.node.wake()
        self.world.run_until(lambda: bool(answers))
        return answers[0]

    def leave(self) -> None:
        self.sessions[0].close()
        self.node.wake()


def settlement(batch: DeliverBatch, outcome: Outcome.ValueType = ACK, delay_ms: int = 0) -> SettleBatch:
    """Of all rows of a batch of several topics."""
    return SettleBatch(
        group=batch.group, outcome=outcome, delay_ms=delay_ms, ids=batch.ids,
        attempts=batch.attempts, positions=batch.positions, topics=batch.topics, topic_counts=batch.topic_counts,
        epochs=batch.epochs,
    )  # fmt: skip


def parts(receipt: SettleReceipt | Failure) -> list[list[int]]:
    """Settled, stale and unknown of each topic."""
    assert isinstance(receipt, SettleReceipt), receipt
    counts: list[list[int]] = np.frombuffer(receipt.parts, "<u4").reshape(-1, 3).tolist()
    return counts


def core_of(taker: Taker) -> NodeCore:
    """The core of the master that serves it."""
    assert taker.node.host is not None
    return taker.node.host.core


@pytest.fixture
def world() -> World:
    world = World()
    administer(world, AdminCommand(create_group=CreateGroupRequest(name="g", topics=TOPICS)))
    return world


def test_one_batch_and_one_command_for_all_topics(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    taker = Taker(world, mixes=True)
    schedule(world, "abcabca")
    world.run_until(lambda: bool(taker.batches))
    (batch,) = taker.batches
    assert list(batch.topics) == ["a", "b", "c"] and not batch.topic
    assert np.frombuffer(batch.topic_counts, "<u4").tolist() == [3, 2, 2] and batch.records == b"aaabbcc"
    assert np.frombuffer(batch.positions, "<u8").tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert np.frombuffer(batch.epochs, "<u4").tolist() == [mark_of(1, 0)] * 3
    core = taker.node.host.core if taker.node.host else None
    assert core is not None
    submitted: list[Command] = []
    submit = core.proposer.submit

    def watched(command: Command, *args: object, **named: object) -> None:
        submitted.append(command)
        submit(command, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(core.proposer, "submit", watched)
    receipt = taker.settle(settlement(batch))
    assert parts(receipt) == [[3, 0, 0], [2, 0, 0], [2, 0, 0]]
    assert isinstance(receipt, SettleReceipt) and receipt.settled == 7
    settles = [command for command in submitted if command.WhichOneof("body") == "settle"]
    assert len(settles) == 1 and len(settles[0].settle.batches) == 3
    world.run(10_000)
    assert len(taker.batches) == 1, "nothing came again"


def test_a_consumer_that_did_not_ask_gets_a_batch_for_each_topic(world: World) -> None:
    taker = Taker(world, mixes=False)
    schedule(world, "abc")
    world.run_until(lambda: len(taker.batches) == 3)
    assert sorted(batch.topic for batch in taker.batches) == ["a", "b", "c"]
    assert not any(batch.topics for batch in taker.batches)


def test_a_batch_is_as_large_as_the_consumer_wants_it_at_most(world: World) -> None:
    taker = Taker(world, mixes=True, credits=2)
    schedule(world, "abc")
    world.run_until(lambda: bool(taker.batches))
    world.run(500)
    assert sum(len(batch.ids) // 8 for batch in taker.batches) == 2, "no more than its credits"
    taker.sessions[0].credit(5)
    taker.node.wake()
    world.run_until(lambda: sum(len(batch.ids) // 8 for batch in taker.batches) == 3)


def test_a_batch_has_as_many_topics_as_a_settlement_may_name(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may send the columns of a batch back as they came."""
    assert handing.BATCH_TOPICS_MAX == settlements.SETTLE_TOPICS_MAX
    monkeypatch.setattr(handing, "BATCH_TOPICS_MAX", 2)
    taker = Taker(world, mixes=True)
    schedule(world, "abc")
    world.run_until(lambda: sum(len(batch.ids) // 8 for batch in taker.batches) == 3)
    assert [(len(batch.topics), batch.topic) for batch in taker.batches] == [(2, ""), (0, "c")]


def test_a_reset_of_one_topic_makes_its_rows_stale_and_no_others(world: World) -> None:
    taker = Taker(world, mixes=True)
    schedule(world, "abc")
    world.run_until(lambda: bool(taker.batches))
    first = taker.batches.pop()
    administer(world, AdminCommand(reset_group=ResetGroupRequest(name="g", topics=["b"], start_from=EARLIEST)))
    world.run_until(lambda: bool(taker.batches))
    assert parts(taker.settle(settlement(first))) == [[1, 0, 0], [0, 1, 0], [1, 0, 0]]
    again = taker.batches[0]
    assert (again.topic, again.epoch) == ("b", mark_of(1, 1))
    schedule(world, "ab")
    world.run_until(lambda: len(taker.batches) == 2)
    assert np.frombuffer(taker.batches[1].epochs, "<u4").tolist() == [mark_of(1, 0), mark_of(1, 1)]
    assert parts(taker.settle(settlement(taker.batches[1]))) == [[1, 0, 0], [1, 0, 0]]


def test_a_topic_that_is_gone_does_not_hold_up_the_others(world: World) -> None:
    """A settlement of several topics is not refused because one of them was deleted since the delivery."""
    taker = Taker(world, mixes=True)
    schedule(world, "abc")
    world.run_until(lambda: bool(taker.batches))
    settle = settlement(taker.batches[0])
    settle.topics[1] = "never-made"
    assert parts(taker.settle(settle)) == [[1, 0, 0], [0, 1, 0], [1, 0, 0]]


def test_nacks_of_several_topics_come_again_each_in_its_own(world: World) -> None:
    taker = Taker(world, mixes=True)
    schedule(world, "abc")
    world.run_until(lambda: bool(taker.batches))
    batch = taker.batches.pop()
    assert parts(taker.settle(settlement(batch, outcome=RETRY, delay_ms=50))) == [[1, 0, 0]] * 3
    world.run_until(lambda: b"".join(b.records for b in taker.batches) == b"abc")
    assert {n for b in taker.batches for n in np.frombuffer(b.attempts, "<u4").tolist()} == {2}


def test_a_message_that_is_handed_back_comes_though_its_topic_is_quiet(world: World) -> None:
    """A topic whose messages are all out costs nothing more, and is looked at again when one comes back."""
    leaver, stayer = Taker(world, mixes=True), Taker(world, mixes=True)
    schedule(world, "abcabc")
    world.run_until(lambda: sum(len(b.ids) // 8 for t in (leaver, stayer) for b in t.batches) == 6)
    world.run(200)
    host = leaver.node.host
    assert host is not None
    delivery = host.core.parts.delivery
    assert not any(group.topics for group in delivery.agenda._groups.values()), "nothing is left to hand out"
    had = b"".join(batch.records for batch in leaver.batches)
    kept = b"".join(batch.records for batch in stayer.batches)
    assert had
    leaver.leave()
    world.run_until(lambda: sum(len(batch.ids) // 8 for batch in stayer.batches) == 6)
    assert sorted(b"".join(batch.records for batch in stayer.batches)) == sorted(had + kept)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("topics", {"topic": "a"}),
        ("topics", {"epoch": 0}),
        ("topic_counts", {"topic_counts": b"\1\0\0\0"}),
        ("topic_counts", {"topic_counts": np.array([0, 2, 1], "<u4").tobytes()}),
        ("topic_counts", {"topic_counts": np.array([1, 1, 2], "<u4").tobytes()}),
        ("epochs", {"epochs": b""}),
        ("topics", {"topics": ["a"] * 513}),
        ("positions", {"positions": b""}),
        ("ids", {"ids": b"x"}),
        ("reason", {"reason": "x" * 1_025}),
        ("group", {"group": "g" * 1_025}),
    ],
)
def test_columns_that_do_not_fit_are_refused_and_settle_nothing(
    world: World, field: str, change: dict[str, bytes | str | int | list[str]]
) -> None:
    taker = Taker(world, mixes=True)
    schedule(world, "abc")
    world.run_until(lambda: bool(taker.batches))
    settle = settlement(taker.batches[0])
    for name, value in change.items():
        if isinstance(value, list):
            settle.topics[:] = value
        else:
            setattr(settle, name, value)
    refusal = taker.settle(settle)
    assert isinstance(refusal, Failure) and refusal.metadata["field"] == field
    assert parts(taker.settle(settlement(taker.batches[0]))) == [[1, 0, 0]] * 3


def test_a_topic_that_goes_before_the_apply_is_stale(world: World) -> None:
    """It went between the proposal and the apply: the settlement's other topics have their receipts."""
    taker = Taker(world, mixes=True)
    schedule(world, "a")
    world.run_until(lambda: bool(taker.batches))
    batch, host = taker.batches[0], taker.node.host
    assert host is not None
    state = host.core.state
    group_id, topic_id = state.group_id("g") or 0, state.topic_id("a") or 0
    there, gone = (
        SettleColumns(group_id=group_id, topic_id=number, kind=SETTLE_ACK, ids=batch.ids, attempts=batch.attempts)
        for number in (topic_id, 999)
    )
    answers: list[SettleResult | Failure] = []
    joined = Joined(Reply.either(answers.append), [1, 1])
    host.core.parts.delivery.settlements.propose([gone, there], joined.part([0, 1]))
    joined.close()
    taker.node.wake()
    world.run_until(lambda: bool(answers))
    (answer,) = answers
    assert isinstance(answer, SettleResult) and answer.failure is None
    assert [(part.settled, part.stale) for part in answer.parts] == [(0, 1), (1, 0)]


@pytest.mark.parametrize("outcome", [ACK, RETRY])
def test_where_one_topic_is_refused_nothing_is_settled(
    world: World, monkeypatch: pytest.MonkeyPatch, outcome: Outcome.ValueType
) -> None:
    """So its receipt says: it has an error and no counts."""
    taker = Taker(world, mixes=True)
    schedule(world, "abc")
    world.run_until(lambda: bool(taker.batches))
    core = core_of(taker)
    state = core.state
    full = limit_reached("window_values", 1, 1)
    with monkeypatch.context() as limited:
        limited.setattr(retries, "ROWS_MAX", 2)
        limited.setattr(settlements, "WINDOW_VALUES_MAX", 0)
        limited.setattr(
            settlements,
            "_check_reach",
            lambda subscription, *_: refuse(
                full if outcome == ACK and subscription.topic_id == state.topic_id("c") else None
            ),
        )
        refusal = taker.settle(settlement(taker.batches[0], outcome))
        assert isinstance(refusal, Failure) and refusal.reason == common_pb2.LIMIT_REACHED
        world.run(500)
    assert [state.topic_undelivered(state.topic_id(topic) or 0) for topic in TOPICS] == [1, 1, 1]
    assert len(taker.batches) == 1, "nothing came again"
    assert parts(taker.settle(settlement(taker.batches[0]))) == [[1, 0, 0]] * 3


def test_nothing_leaves_after_the_lease_of_mastership_has_run_out_within_a_pass(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass over many topics takes long, and a consumer that does not mix gets a batch at each of them."""
    taker = Taker(world, mixes=False)
    delivery = core_of(taker).parts.delivery
    with monkeypatch.context() as over:
        over.setattr(delivery, "_may_act", lambda: not taker.batches)
        schedule(world, "abc")
        world.run_until(lambda: bool(taker.batches))
        world.run(500)
        assert len(taker.batches) == 1
    taker.node.wake()
    world.run_until(lambda: len(taker.batches) == 3)
    assert sorted(batch.topic for batch in taker.batches) == list(TOPICS)


def test_of_what_is_mixed_nothing_leaves_where_the_lease_ran_out_within_the_pass(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even batches that are full before the pass has ended. All of it comes once the node may act again."""
    monkeypatch.setattr(handing, "BATCH_TOPICS_MAX", 1)
    taker = Taker(world, mixes=True)
    delivery = core_of(taker).parts.delivery
    gathered: list[int] = []
    with monkeypatch.context() as over:
        put = delivery._handing.put

        def noted(session: Session, share: Share, *, mixes: bool) -> None:
            gathered.append(len(share.records))
            put(session, share, mixes=mixes)

        over.setattr(delivery._handing, "put", noted)
        over.setattr(delivery, "_may_act", lambda: not gathered)
        schedule(world, "abc")
        world.run_until(lambda: len(gathered) == 3)
        world.run(500)
        assert not taker.batches
    taker.node.wake()
    world.run_until(lambda: len(taker.batches) == 3)
    assert sorted(batch.topic for batch in taker.batches) == list(TOPICS)


def test_messages_beyond_the_window_come_once_it_has_moved(world: World) -> None:
    """The window moves when a settlement is applied. No new credit and no dispatch may come after that."""
    administer(world, AdminCommand(settings=SettingsMessage(window_messages_max=1_000)))
    taker = Taker(world, mixes=True, credits=10_000)
    schedule(world, "a" * 1_500)
    world.run_until(lambda: sum(len(batch.ids) // 8 for batch in taker.batches) == 1_000)
    world.run(500)
    for batch in list(taker.batches):
        settle = SettleBatch(group="g", topic="a", outcome=ACK, ids=batch.ids, attempts=batch.attempts)
        taker.settle(settle)
    world.run_until(lambda: sum(len(batch.ids) // 8 for batch in taker.batches) == 1_500)


def test_prefetched_messages_of_a_paused_topic_keep_no_node_awake(world: World) -> None:
    """They are due and wait for an event. Their group is looked at again and again for the sake of another topic."""
    taker = Taker(world, mixes=True)
    schedule(world, "ab")
    world.run_until(lambda: bool(taker.batches))
    core = core_of(taker)
    world.run(core.config.delivery_period_ms)  # the group's next batch need not wait for its pace
    delivery, group_id, topic_id = core.parts.delivery, core.state.group_id("g") or 0, core.state.topic_id("a") or 0
    channel, unit = (
        delivery.channels.of((group_id, topic_id)),
        delivery.channels.recent.of(topic_id).find(np.zeros(1, np.uint64)),
    )
    assert channel is not None and unit is not None
    channel._unread[0] = 1
    channel.supply(0, 0, unit, b"a")
    delivery.agenda.add(group_id, topic_id)
    now = Now(ClusterMs(core.clock.now_ms()), core.steady_ms(), True, True)
    assert (delivery.wait_ms(now) or 0) <= 0
    topic = core.state._state.topics.get(topic_id)
    assert topic is not None
    topic.paused = True
    lease_ends_ms = delivery.wait_ms(now)
    assert lease_ends_ms is not None and lease_ends_ms > 1_000


def test_a_new_channel_looks_only_at_its_own_leases(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels come and go with each message of a quiet topic: their cost must not grow with all that is out."""
    taker = Taker(world, mixes=True)
    schedule(world, "abab")
    world.run_until(lambda: bool(taker.batches))
    core = core_of(taker)
    delivery, topic_id = core.parts.delivery, core.state.topic_id("a") or 0
    key = (core.state.group_id("g") or 0, topic_id)
    delivery.channels.drop(key)

    def walked(_: object) -> Iterator[Lease]:
        raise AssertionError("something walks over all leases")

    monkeypatch.setattr(LeaseTable, "open_leases", walked)
    channel = delivery.channels.of(key)
    assert channel is not None and channel._held == {0, 1}


@pytest.mark.parametrize("mixes", [False, True])
def test_a_topic_with_a_long_backlog_leaves_credits_to_the_others(world: World, mixes: bool) -> None:
    taker = Taker(world, mixes=mixes, credits=10)
    schedule(world, "a" * 200)
    world.run_until(lambda: bool(taker.batches))
    schedule(world, "b")
    world.run(500)
    for _ in range(3):
        taker.sessions[0].credit(10)
        taker.node.wake()
        world.run(100)
    assert b"b" in b"".join(batch.records for batch in taker.batches)


def test_a_pass_over_many_topics_goes_on_in_later_ticks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats and votes pass between two slices of it: after an election a thousand topics at once took a busy
    machine a second, and the next election came before they were through. No message is late for that."""
    monkeypatch.setattr(delivery, "SLICE_TOPICS_MAX", 1)
    slices: list[list[int]] = []
    cut = agenda.Pass.slice

    def noted(self: agenda.Pass, topics_max: int | None) -> list[int]:
        slices.append(cut(self, topics_max))
        return slices[-1]

    monkeypatch.setattr(agenda.Pass, "slice", noted)
    taker = Taker(world, mixes=True)
    for turn in range(20):
        schedule(world, "abcabc"[turn % 4 : turn % 4 + 3], in_ms=20 + turn % 5)
    world.run(100)
    assert sum(len(batch.ids) // 8 for batch in taker.batches) == 60
    assert max(map(len, slices)) == 1


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The topic of each look at a channel, as they come."""
    found: list[str] = []
    rests_until_ms = Channel.rests_until_ms

    def noted(self: Channel, ready_count: int, full: int) -> int | None:
        found.append(self.topic)
        return rests_until_ms(self, ready_count, full)

    monkeypatch.setattr(Channel, "rests_until_ms", noted)
    return found


def ticks_until(taker: Taker, batches: int) -> int:
    """Wakes the master five times a millisecond until it has delivered so many batches. Returns how often."""
    ticks = 0
    while len(taker.batches) < batches:
        taker.node.wake()
        taker.world.run(0.2)
        ticks += 1
    return ticks


def test_topics_rest_until_their_messages_are_due(world: World, looks: list[str]) -> None:
    """A dispatch comes some milliseconds ahead. The ticks until then pass over what it brought: with a hundred topics
    they took most of a master's time."""
    taker = Taker(world, mixes=True)
    world.run(100)
    looks.clear()
    schedule(world, "abc")
    assert ticks_until(taker, 1) > 200
    assert sum(len(batch.ids) // 8 for batch in taker.batches) == 3
    assert max(map(looks.count, "abc")) == 2, "one to claim, one to hand out"


def test_topics_rest_until_their_group_may_have_its_next_batch(world: World, looks: list[str]) -> None:
    """Though their messages are due before."""
    taker = Taker(world, mixes=True)
    world.run(100)
    looks.clear()
    due_ms = world.now_ms + 100
    schedule(world, "a", 100)
    schedule(world, "bc", due_ms + 1 - world.now_ms)
    ticks_until(taker, 1)
    assert ticks_until(taker, 2) > 10
    assert [looks.count(topic) for topic in "abc"] == [2, 2, 2]


def test_what_comes_while_a_pass_goes_on_is_served_after_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the pass is beyond its topic, and finds nothing in the others."""
    monkeypatch.setattr(delivery, "SLICE_TOPICS_MAX", 1)
    taker = Taker(world, mixes=True)
    schedule(world, "abc")
    world.run(1_000)
    core = core_of(taker)
    deliveries = core.parts.delivery
    group_id = core.state.group_id("g")
    assert group_id is not None
    batches = len(taker.batches)
    for topic in "bc":
        topic_id = core.state.topic_id(topic)
        assert topic_id is not None
        deliveries.agenda.add(group_id, topic_id)
    cut = agenda.Pass.slice
    begun: list[agenda.Pass] = []

    def held(self: agenda.Pass, topics_max: int | None) -> list[int]:
        begun.append(self)
        return []

    monkeypatch.setattr(agenda.Pass, "slice", held)
    deliveries.wake_group(group_id)
    taker.node.wake()
    schedule(world, "a", in_ms=5)
    world.run(50)
    assert len(set(map(id, begun))) == 1 and len(taker.batches) == batches
    monkeypatch.setattr(agenda.Pass, "slice", cut)
    world.run(50)
    assert len(taker.batches) == batches + 1


def test_a_long_reason_or_group_is_not_written_for_each_topic(world: World) -> None:
    """Four megabytes for each of 512 topics were two gigabytes, and three seconds."""
    one, two = np.full(512, 1, "<u4").tobytes(), np.arange(512, dtype="<u8").tobytes()
    settle = SettleBatch(
        group="g", outcome=ACK, ids=two, attempts=one, positions=two, topics=["t"] * 512, topic_counts=one, epochs=one
    )
    host = world.elect().host
    assert host is not None
    Taker(world, mixes=True)
    world.run(100)
    for name in ("reason", "group"):
        asked = SettleBatch.FromString(settle.SerializeToString())
        setattr(asked, name, "é" * 2_000_000)
        answers: list[object] = []
        before = process_time()
        host.core.parts.consumers.settle(asked, Reply.either(answers.append))
        assert process_time() - before < 0.3
        (answer,) = answers
        assert isinstance(answer, Failure) and answer.metadata["field"] == name
