"""When a message is due: delay levels, times that are past or too far, the jitter window; on three simulated nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.node.core.trio import MS, Client, Node, World, digests
from tickwheel.node.core.delivery.consumers import ConsumerHandle
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.schedule.intake import KIND_DELAY, from_batch, from_message
from tickwheel.node.core.schedule.publisher import BatchOutcome
from tickwheel.node.failure import Failure, RequestError
from tickwheel.node.state.results import AdminResult
from tickwheel.proto import admin_pb2, common_pb2, consumer_pb2, scheduler_pb2
from tickwheel.proto.log_pb2 import AdminCommand

DAY_MS = 86_400_000


def schedule(node: Node, batch: scheduler_pb2.ScheduleBatch | scheduler_pb2.ScheduleRequest) -> BatchOutcome | Failure:
    """Schedule at a node and wait for the answer."""
    assert node.host is not None
    settings = node.host.core.state.settings
    answers: list[BatchOutcome | Failure] = []
    try:
        request = batch if isinstance(batch, scheduler_pb2.ScheduleRequest) else None
        incoming = from_message(request, settings) if request is not None else from_batch(batch, settings)  # type: ignore[arg-type]
    except RequestError as error:
        return error.failure
    node.host.core.parts.publisher.schedule(incoming, Reply.either(answers.append))
    node.wake()
    node.world.run_until(lambda: bool(answers))
    return answers[0]


def one(**when: int) -> scheduler_pb2.ScheduleRequest:
    """A request for one message."""
    fields: dict[str, Any] = {"topic": "t", "payload": b"x", **when}
    return scheduler_pb2.ScheduleRequest(message=common_pb2.Message(**fields))


def change(node: Node, **settings: object) -> None:
    """Change replicated settings."""
    assert node.host is not None
    answers: list[AdminResult | Failure] = []
    fields: dict[str, Any] = dict(settings)
    node.host.core.serving.start(
        node.host.core.parts.requests.admin(AdminCommand(settings=admin_pb2.Settings(**fields))), answers.append
    )
    node.wake()
    node.world.run_until(lambda: bool(answers))
    assert isinstance(answers[0], AdminResult) and answers[0].failure is None, answers


def test_receipt_says_which_level_was_applied() -> None:
    """Level 0 is none, above the maximum is the maximum; the table is replaced for all nodes by one command."""
    world = World(7)
    master = world.elect()
    for asked, applied, delay_ms in ((1, 1, 1_000), (5, 5, 60_000), (18, 18, 7_200_000), (99, 18, 7_200_000)):
        outcome = schedule(master, one(delay_level=asked))
        assert isinstance(outcome, BatchOutcome) and outcome.levels is not None
        assert (outcome.levels.levels.tolist(), outcome.levels.delays_ms.tolist()) == ([applied], [delay_ms])
        assert 0 < int(outcome.due_ms[0]) - delay_ms <= world.now_ms + 1
    outcome = schedule(master, one(delay_level=0))
    assert isinstance(outcome, BatchOutcome) and outcome.levels is not None
    assert outcome.levels.levels.tolist() == [0]
    change(master, delay_levels="2s 3m")
    columns = scheduler_pb2.ColumnBatch(
        topic="t", delay_levels=np.array([1, 2, 3], "<u4").tobytes(), payload_sizes=np.ones(3, "<u4").tobytes(),
        payloads=b"abc",
    )  # fmt: skip
    outcome = schedule(master, scheduler_pb2.ScheduleBatch(columns=columns))
    assert isinstance(outcome, BatchOutcome) and outcome.levels is not None
    assert outcome.levels.levels.tolist() == [1, 2, 2]
    assert outcome.levels.delays_ms.tolist() == [2_000, 180_000, 180_000]
    world.run(300)
    assert len(digests(world)) == 1


def test_a_repeat_keeps_the_time_of_the_first_answer() -> None:
    """The table changed in between: the repeat gets the due time that holds, and no level that does not."""
    world = World(8)
    master = world.elect()
    request = one(delay_level=2)
    request.producer_id, request.sequence = "p", 1
    first = schedule(master, request)
    change(master, delay_levels="1h")
    again = schedule(master, request)
    assert isinstance(first, BatchOutcome) and isinstance(again, BatchOutcome)
    assert again.repeated and again.levels is None
    assert again.due_ms.tolist() == first.due_ms.tolist()


def test_too_far_is_refused_and_the_past_comes_at_once() -> None:
    """Beyond delay_ms_max a message is refused with field and limit; one that is past is delivered within 200 ms."""
    world = World(9)
    client = Client(world)
    master = world.elect()
    client.consume()
    change(master, delay_ms_max=DAY_MS)
    refused = schedule(master, one(due_ms=world.now_ms + DAY_MS + 1_000))
    assert isinstance(refused, Failure)
    assert (refused.reason, refused.metadata["field"]) == (common_pb2.INVALID_FIELD, "due_ms[0]")
    assert str(DAY_MS) in refused.metadata["limit"]
    refused = schedule(master, one(delay_ms=DAY_MS + 1_000))
    assert isinstance(refused, Failure) and "86401000 (1d1s): at most 86400000 (1d)" in refused.message
    assert isinstance(schedule(master, one(delay_ms=DAY_MS)), BatchOutcome)
    before_ms = world.now_ms
    client.schedule([-3_600_000])
    world.run_until(lambda: bool(client.got), 1_000)
    assert next(iter(client.got.values()))[0][0] - before_ms < 200


def test_jitter_spreads_what_is_due_together() -> None:
    """A thousand messages for one full hour with a window of a minute: none before it, spread over all of it."""
    world = World(10)
    master = world.elect()
    due_ms = (world.now_ms // 3_600_000 + 1) * 3_600_000
    columns = scheduler_pb2.ColumnBatch(
        topic="t", due_ms=np.full(1_000, due_ms, "<i8").tobytes(), payload_sizes=np.ones(1_000, "<u4").tobytes(),
        payloads=b"x" * 1_000, jitter_ms=60_000,
    )  # fmt: skip
    outcome = schedule(master, scheduler_pb2.ScheduleBatch(columns=columns))
    assert isinstance(outcome, BatchOutcome)
    moved = outcome.due_ms - due_ms
    assert moved.min() >= 0 and moved.max() <= 60_000
    per_ten_seconds = np.histogram(moved, 6, (0, 60_000))[0]
    assert per_ten_seconds.min() > 100
    refused = schedule(master, one(due_ms=due_ms, jitter_ms=DAY_MS + 1))
    assert isinstance(refused, Failure) and refused.metadata["field"] == "jitter_ms[0]"


def within_a_millisecond(world: World, node: Node) -> int:
    """Let time pass until the cluster's clock is between two milliseconds. Returns the later of these."""
    assert node.host is not None
    clock = node.host.core.clock
    while clock.next_full_ms() == clock.now_ms():
        world.run(0.3)
    return clock.next_full_ms()


def test_moved_messages_wait_no_fraction_of_a_millisecond_less() -> None:
    """The delays of a reschedule and of a sweep count from the next full millisecond."""
    world = World(9)
    master = world.elect()
    outcome = schedule(master, one(delay_ms=DAY_MS))
    assert isinstance(outcome, BatchOutcome) and master.host is not None
    parts, answers = master.host.core.parts, []  # type: ignore[var-annotated]
    full_ms = within_a_millisecond(world, master)
    moved = parts.requests.reschedule(int(outcome.ids[0]), 60_000, KIND_DELAY)
    master.host.core.serving.start(moved, answers.append)
    master.wake()
    world.run_until(lambda: bool(answers))
    assert answers[0].due_ms == full_ms + 60_000
    full_ms = within_a_millisecond(world, master)
    selection = scheduler_pb2.Selection(topic="t")
    request = scheduler_pb2.BeginSweepRequest(job_id="job", selection=selection, delay_ms=90_000)
    master.host.core.serving.start(parts.sweeper.begin_sweep(request), answers.append)
    master.wake()
    world.run_until(lambda: len(answers) == 2)
    assert answers[1].due_ms == full_ms + 90_000


class Nacking(Client):
    """Nacks each first delivery for two seconds while the clock is between two milliseconds."""

    nacked_ms = 0

    def _settle(self, session: ConsumerHandle, settle: consumer_pb2.SettleBatch) -> None:
        if self.nacked_ms:
            super()._settle(session, settle)
            return
        assert self.at is not None and self.at.host is not None
        clock, node = self.at.host.core.clock, self.at
        if clock.next_full_ms() == clock.now_ms():
            self.world.at(self.world.now_ns + 3 * MS // 10, lambda: self._settle(session, settle))
            return
        self.nacked_ms = clock.next_full_ms()
        settle.outcome, settle.delay_ms = consumer_pb2.RETRY, 2_000
        super()._settle(session, settle)
        node.wake()


def test_nacked_messages_wait_no_fraction_of_a_millisecond_less() -> None:
    """The pause of a nack counts from the next full millisecond."""
    world = World(10)
    client = Nacking(world)
    world.elect()
    client.consume()
    client.schedule([50])
    world.run_until(lambda: len(client.got.get(b"m0", [])) == 2)
    assert client.got[b"m0"][1][2] == client.nacked_ms + 2_000


def test_what_begins_before_a_pause_is_confirmed_is_not_short_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A master that was paused leaves the pause out of its time until the others confirm it, and then makes it good at
    once: by so much delays and leases that began before would be too short."""
    world = World(11)
    client = Client(world)
    master = world.elect()
    assert master.host is not None
    core, leases, delivered = master.host.core, list[int](), client._deliver

    def deliver(batch: consumer_pb2.DeliverBatch) -> None:
        leases.append(batch.lease_until_ms - core.clock.now_ms())
        delivered(batch)

    monkeypatch.setattr(client, "_deliver", deliver)
    monkeypatch.setattr(type(core.clock), "unconfirmed_ms", 800)
    client.consume(lease_ms=1_000)
    client.schedule([100])
    world.run_until(lambda: bool(leases))
    assert leases[0] == pytest.approx(1_800, abs=20)
    core.clock._doubted_ns = 800 * MS
    assert core.parts.requests.one_due(5_000, KIND_DELAY) - core.clock.now_ms() == pytest.approx(5_800, abs=1)
