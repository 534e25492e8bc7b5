"""Nacks, expired leases and dead letters on three simulated nodes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.node.core.trio import MS, Client, World, digests
from tickwheel.node.core.config import CoreConfig, DeliveryOrder
from tickwheel.node.core.delivery import channel
from tickwheel.node.core.delivery.consumers import ConsumerHandle
from tickwheel.node.core.delivery.retries import Leaving
from tickwheel.node.core.promise import UNHEARD, Reply
from tickwheel.node.failure import Failure
from tickwheel.node.state import subscription
from tickwheel.proto import admin_pb2, consumer_pb2, scheduler_pb2
from tickwheel.proto.log_pb2 import AdminCommand, Command

Judge = Callable[[bytes, int], consumer_pb2.SettleBatch | None]
"""From record and attempt what a settlement says (outcome, delay, level, reason); None: nothing is settled."""


def settlement(outcome: consumer_pb2.Outcome.ValueType, **named: object) -> consumer_pb2.SettleBatch:
    """A settlement without columns."""
    return consumer_pb2.SettleBatch(outcome=outcome, **named)  # type: ignore[arg-type]


ACK = settlement(consumer_pb2.ACK)


class Picky(Client):
    """Settles each message on its own, as `judge` says; remembers the ids it was given."""

    def __init__(self, world: World, judge: Judge, *, group: str = "g", positions: bool = True) -> None:
        super().__init__(world)
        self.judge = judge
        self.group = group
        self.with_positions = positions
        self.ids: dict[bytes, set[int]] = {}
        self.receipts: list[consumer_pb2.SettleReceipt] = []

    def _deliver(self, batch: consumer_pb2.DeliverBatch) -> None:
        at = 0
        columns = zip(
            np.frombuffer(batch.ids, "<u8").tolist(),
            np.frombuffer(batch.sizes, "<u4").tolist(),
            np.frombuffer(batch.attempts, "<u4").tolist(),
            np.frombuffer(batch.due_ms, "<i8").tolist(),
            np.frombuffer(batch.positions, "<u8").tolist(),
            strict=True,
        )
        for id64, size, attempt, due_ms, position in columns:
            record = batch.records[at : at + size]
            at += size
            self.got.setdefault(record, []).append((self.world.now_ms, attempt, due_ms))
            self.ids.setdefault(record, set()).add(id64)
            said = self.judge(record, attempt)
            if said is None:
                continue
            settle = consumer_pb2.SettleBatch(group=self.group, topic=batch.topic)
            settle.MergeFrom(said)
            settle.ids = np.array([id64], "<u8").tobytes()
            settle.attempts = np.array([attempt], "<u4").tobytes()
            if self.with_positions:
                settle.positions = np.array([position], "<u8").tobytes()
            self._later(settle)

    def _later(self, settle: consumer_pb2.SettleBatch) -> None:
        session, node = self.session, self.at

        def answer() -> None:
            if node is not None and node.host is not None and session is not None and not self.closed:
                self._settle(session, settle)
                session.credit(1)
                node.wake()

        self.world.at(self.world.now_ns + MS, answer)

    def _settle(self, session: ConsumerHandle, settle: consumer_pb2.SettleBatch) -> None:
        def done(receipt: object) -> None:
            if isinstance(receipt, consumer_pb2.SettleReceipt):
                self.receipts.append(receipt)
            else:
                self.unsettled.append(settle)

        session.settle(settle, Reply.either(done))

    def consume(self, credits: int = 10_000, lease_ms: int = 5_000) -> None:
        master = self.world.master()
        if master is not None and master.host is not None and (self.at is not master or self.closed):
            self.at, self.closed = master, False
            request = consumer_pb2.OpenConsumer(group=self.group, topics=["t"], credits=credits, lease_ms=lease_ms)
            master.host.core.serving.start(
                master.host.core.parts.consumers.open(request, self._deliver, self._closed), self._opened
            )
            master.wake()
        self.world.at(self.world.now_ns + 20 * MS, lambda: self.consume(credits, lease_ms))


def admin(world: World, **body: object) -> None:
    """Put an administrative command into the log."""
    master = world.elect()
    answers: list[object] = []
    assert master.host is not None
    master.host.core.serving.start(master.host.core.parts.requests.admin(AdminCommand(**body)), answers.append)  # type: ignore[arg-type]
    master.wake()
    world.run_until(lambda: bool(answers))


def attempts_of(client: Client) -> dict[bytes, list[int]]:
    """The attempts that each message was delivered with."""
    return {record: [attempt for _, attempt, _ in seen] for record, seen in client.got.items()}


def pauses_of(client: Client, record: bytes) -> list[int]:
    """Milliseconds between a nack (1 ms after its delivery) and the delivery after it."""
    times = [when for when, _, _ in client.got[record]]
    return [after - before - 1 for before, after in itertools.pairwise(times)]


def test_retry_until_success_counts_exact_tries() -> None:
    """Message n succeeds at try n: each is tried exactly so often, under one id, at the levels from the third on.

    One group hands positions back with its settlements, one does not, and a third that succeeds at once sees nothing.
    """
    world = World(1)

    def judge(record: bytes, attempt: int) -> consumer_pb2.SettleBatch:
        return ACK if attempt > int(record[1:]) else settlement(consumer_pb2.RETRY)

    client, without = Picky(world, judge), Picky(world, judge, group="h", positions=False)
    other = Picky(world, lambda record, attempt: ACK, group="other")
    world.elect()
    for each in (client, without, other):
        each.consume()
    client.schedule([50] * 3)
    world.run(42_000)
    for each in (client, without):
        assert attempts_of(each) == {b"m%d" % n: list(range(1, n + 2)) for n in range(3)}
        assert all(len(ids) == 1 for ids in each.ids.values())
        assert [receipt.settled for receipt in each.receipts] == [1] * 6
        for level_ms, pause in zip((10_000, 30_000), pauses_of(each, b"m2"), strict=True):
            assert level_ms <= pause <= level_ms + 200
    assert attempts_of(other) == {b"m%d" % n: [1] for n in range(3)}, "the other group: once"
    assert len(digests(world)) == 1


def test_a_nack_may_name_delay_level_or_death() -> None:
    """delay_ms, delay_level (above the maximum: the maximum), DEAD; both at once are refused."""
    world = World(2)
    says = {
        b"m0": settlement(consumer_pb2.RETRY, delay_ms=2_345),
        b"m1": settlement(consumer_pb2.RETRY, delay_level=1),
        b"m2": settlement(consumer_pb2.RETRY, delay_level=99),
        b"m3": settlement(consumer_pb2.DEAD, reason="no use"),
        b"m4": settlement(consumer_pb2.RETRY, delay_ms=1, delay_level=1),
    }
    client = Picky(world, lambda record, attempt: says[record] if attempt == 1 else ACK)
    master = world.elect()
    client.consume(lease_ms=40_000_000)
    client.schedule([50] * 5)
    world.run(20_000)
    (first,), (second,) = pauses_of(client, b"m0"), pauses_of(client, b"m1")
    assert 2_345 <= first <= 2_500 and 1_000 <= second <= 1_200
    assert [len(client.got[record]) for record in (b"m2", b"m3", b"m4")] == [1, 1, 1]
    assert len(client.unsettled) == 1, "which of the two should hold"
    assert master.host is not None
    state = master.host.core.state
    assert state.dead_letters_kept() == 1
    waiting = state._state.groups.get(1)
    assert waiting is not None
    (id64,) = client.ids[b"m2"]
    found = waiting.waiting.of(id64, master.host.core.wheel.cursor)
    assert found is not None and found[2] == 1 and found[1] - world.now_ms > 7_100_000, "level 18 is two hours"
    told: list[object] = []
    master.host.core.serving.start(master.host.core.parts.requests.get(id64, True), told.append)
    world.run_until(lambda: bool(told))
    assert isinstance(told[0], scheduler_pb2.GetResponse)
    (retry,) = told[0].retries
    assert (told[0].state, retry.group, retry.due_ms) == (scheduler_pb2.DISPATCHED, "g", found[1])
    assert told[0].message.id.hour << 32 | told[0].message.id.index == id64


def test_the_master_dies_between_nack_and_retry() -> None:
    """P1, P5: every message comes again once, whoever leads then, and the nacks that the next master gets are stale."""
    world = World(3)
    client = Picky(world, lambda record, attempt: ACK if attempt == 2 else settlement(consumer_pb2.RETRY))
    master = world.elect()
    client.consume()
    client.schedule([100] * 50)
    world.run(120)
    assert len(client.got) == 50
    master.kill()
    world.elect()
    world.run(9_000)
    master.start()
    following = world.elect()
    world.run(500)
    following.kill()
    world.elect()
    following.start()
    world.run(11_000)
    assert not client.lost()
    tries = [attempts[-1] for attempts in attempts_of(client).values()]
    assert set(tries) == {2}
    world.run(1_000)
    assert len(digests(world)) == 1


def test_expired_leases_of_a_crowd_come_again_in_bounded_pieces() -> None:
    """1,000 leases end at once: each message comes again exactly once, no entry copies more than its bound."""
    world = World(4)
    client = Picky(world, lambda record, attempt: ACK if attempt == 2 else None)
    master = world.elect()
    client.consume(lease_ms=1_000)
    client.schedule([100] * 1_000)
    world.run(13_500)
    assert {tuple(attempts) for attempts in attempts_of(client).values()} == {(1, 2)}
    assert master.host is not None
    assert master.host.core.parts.delivery.settlements.retries.rows == 0
    assert master.host.core.state.retrying.retried == 1_000
    assert len(digests(world)) == 1


def test_an_orderly_end_gives_back_at_once() -> None:
    """A consumer that closes keeps nobody waiting: no retry level, the next attempt for the next consumer."""
    world = World(5)
    client = Picky(world, lambda record, attempt: None)
    master = world.elect()
    client.consume(lease_ms=30_000)
    client.schedule([50] * 5)
    world.run(500)
    assert client.session is not None and len(client.got) == 5
    client.judge = lambda record, attempt: ACK
    client.session.close()
    client.closed = True
    master.wake()
    world.run(500)
    assert {tuple(attempts) for attempts in attempts_of(client).values()} == {(1, 2)}


def test_a_slave_that_was_away_gets_the_retries_with_a_checkpoint() -> None:
    """P8: waiting retries, targets and dead letters come with the files of a checkpoint."""
    world = World(6)
    client = Picky(world, lambda record, attempt: settlement(consumer_pb2.RETRY) if record != b"m0" else DEAD)
    master = world.elect()
    client.consume()
    slave = next(node for node in world.nodes.values() if node is not master)
    client.schedule([50] * 20)
    world.run(200)
    slave.kill()
    world.run(11_000)
    assert master.host is not None
    master.host.core.checkpointer.request(UNHEARD)
    master.wake()
    world.run(500)
    slave.start()
    world.run(3_000)
    assert slave.host is not None
    assert slave.host.core.state.dead_letters_kept() == 1
    assert len(digests(world)) == 1
    client.judge = lambda record, attempt: ACK
    master.kill()
    world.elect()
    world.run(45_000)
    assert all(attempts[-1] == 3 for record, attempts in attempts_of(client).items() if record != b"m0")


DEAD = settlement(consumer_pb2.DEAD, reason="broken")


def test_a_group_s_own_backoff() -> None:
    """Exponential with a bound and a limit of attempts, set at creation and changed by an update."""
    world = World(7)
    policy = admin_pb2.RetryPolicy(
        exponential=admin_pb2.ExponentialBackoff(initial_ms=1_000, factor=3.0, max_ms=5_000), attempts_max=4
    )
    request = admin_pb2.CreateGroupRequest(name="g", topics=["t"], retry=policy)
    admin(world, create_topic=admin_pb2.CreateTopicRequest(name="t"))
    admin(world, create_group=request)
    client = Picky(world, lambda record, attempt: settlement(consumer_pb2.RETRY, reason="never"))
    client.consume()
    client.schedule([50])
    world.run(20_000)
    assert attempts_of(client) == {b"m0": [1, 2, 3, 4]}
    for wanted_ms, pause_ms in zip((1_000, 3_000, 5_000), pauses_of(client, b"m0"), strict=True):
        assert wanted_ms <= pause_ms <= wanted_ms + 200
    jittered = admin_pb2.ExponentialBackoff(initial_ms=1_000, factor=1.0, max_ms=1_000, jitter=0.5)
    admin(world, update_group=admin_pb2.UpdateGroupRequest(name="g", retry=admin_pb2.RetryPolicy(exponential=jittered)))
    client.schedule([50])
    world.run(30_000)
    assert len(client.got[b"m1"]) == 16, "attempts_max of the settings again"
    drawn = pauses_of(client, b"m1")
    assert 500 <= min(drawn) < 900 and 1_100 < max(drawn) <= 1_700
    master = world.elect()
    assert master.host is not None and master.host.core.state.dead_letters_kept() == 2
    assert len(digests(world)) == 1


def test_a_retry_at_once_and_a_dispatch_ahead_of_its_commit() -> None:
    """Push-first: a retry that is due within a dispatch under way changes what it brings; the node must have known."""
    world = World(8, config=replace(CoreConfig(), delivery_order=DeliveryOrder.PUSH_FIRST))
    client = Picky(
        world, lambda record, attempt: ACK if attempt > 3 else settlement(consumer_pb2.RETRY, delay_ms=attempt)
    )
    world.elect()
    client.consume()
    for _ in range(15):
        client.schedule([world.rng.randrange(1, 100) for _ in range(10)])
        world.run(20)
    world.run(500)
    assert not [node.fatal for node in world.nodes.values() if node.fatal]
    assert len(client.acked) > 100 and {tuple(seen) for seen in attempts_of(client).values()} == {(1, 2, 3, 4)}
    assert len(digests(world)) == 1


def test_delay_levels_beyond_any_delay_lose_nothing() -> None:
    """The master refuses them. Where an earlier version took them, a nacked message comes again after the longest delay
    that is allowed, and one whose lease ran out too; both were lost for good."""
    world = World()
    client = Picky(
        world, lambda record, attempt: settlement(consumer_pb2.RETRY, delay_level=1) if attempt == 1 else ACK
    )
    master = world.elect()
    assert master.host is not None
    core = master.host.core
    answers: list[object] = []
    too_long = admin_pb2.Settings(delay_levels="999999999d 999999999d 999999999d")
    master.host.core.serving.start(
        master.host.core.parts.requests.admin(AdminCommand(settings=too_long)), answers.append
    )
    assert isinstance(answers[0], Failure) and answers[0].metadata["field"] == "delay_levels"
    assert core.state.settings.delay_levels != too_long.delay_levels
    admin(world, settings=admin_pb2.Settings(delay_ms_max=2_000))
    core.proposer.submit(Command(admin=AdminCommand(settings=too_long)), Reply.either(answers.append))
    master.wake()
    world.run_until(lambda: core.state.settings.delay_levels == too_long.delay_levels)
    client.consume()
    client.schedule([100] * 3)
    world.run(5_000)
    assert len(client.acked) == 3 and not client.lost()
    assert [attempts_of(client)[record] for record in sorted(client.acked)] == [[1, 2]] * 3
    assert all(receipt.settled == 1 for receipt in client.receipts)


def test_a_settlement_that_apply_refused_is_tried_again() -> None:
    """A lease that ran out: what its settlement could not do is open, and is not taken for done."""
    world = World()
    client = Picky(world, lambda record, attempt: ACK if attempt > 1 else None)
    client.consume(lease_ms=1_000)
    master = world.elect()
    assert master.host is not None
    core = master.host.core
    client.schedule([100])
    world.run_until(lambda: bool(client.got))
    retries = core.parts.delivery.settlements.retries
    added: list[Leaving] = []
    add = retries.add

    def spoiled(leaving: Leaving) -> None:
        added.append(leaving)
        if len(added) == 1:
            leaving = replace(leaving, due_ms=np.full_like(leaving.due_ms, -1))
        add(leaving)

    retries.add = spoiled  # type: ignore[method-assign]
    world.run(20_000)
    assert len(added) == 2
    assert attempts_of(client) == {b"m0": [1, 2]}
    assert not client.lost()


@pytest.mark.parametrize("fifo", [True, False], ids=["fifo", "plain"])
def test_a_message_that_comes_back_without_end_still_goes_out(fifo: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts are counted up to a limit, here 3. Under that last number it is handed out as often as it comes back."""
    monkeypatch.setattr(subscription, "ATTEMPT_MAX", 3)
    monkeypatch.setattr(channel, "ATTEMPT_MAX", 3)
    world = World(13)
    admin(world, create_topic=admin_pb2.CreateTopicRequest(name="t", fifo=fifo))
    admin(world, create_group=admin_pb2.CreateGroupRequest(name="g", topics=["t"]))
    client = Client(world)
    client.settle = False
    master = world.elect()
    client.consume(lease_ms=60_000)
    client.schedule([50])
    for times in range(1, 8):
        world.run_until(lambda: len(client.got.get(b"m0", ())) == times, 2_000)  # noqa: B023
        assert client.session is not None
        client.session.close()
        client.closed = True
        master.wake()
    assert [attempt for _, attempt, _ in client.got[b"m0"]] == [1, 2, 3, 3, 3, 3, 3]
    client.settle = True
    world.run(1_000)
    assert len(client.got[b"m0"]) == 8
    world.run(1_000)
    assert master.host is not None and master.host.core.state.backlog.total == 0 and len(digests(world)) == 1
