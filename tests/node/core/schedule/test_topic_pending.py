"""The limit of what is pending of a topic, on three simulated nodes: exact, through all that changes it."""

from __future__ import annotations

import pytest

from tests.node.core.delivery.test_retries import ACK, Picky, settlement
from tests.node.core.schedule.test_flow import batch, refusal, settings_refusal
from tests.node.core.test_when import change, schedule
from tests.node.core.trio import Client, Node, World
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.schedule import topic_pending
from tickwheel.node.core.schedule.intake import from_batch
from tickwheel.node.core.schedule.publisher import BatchOutcome
from tickwheel.node.core.watch.listings import topics_after
from tickwheel.node.core.watch.status import node_metrics
from tickwheel.node.failure import Failure
from tickwheel.proto import admin_pb2, common_pb2, consumer_pb2, scheduler_pb2

MINUTE_MS = 60_000


def pending_of(node: Node, topic: str) -> tuple[int, int]:
    """What an operator is told of a topic: pending and limit."""
    assert node.host is not None
    node.world.run_until(lambda: node.host is not None and node.host.core.parts.topic_pending.counted)
    (found,) = [one for one in topics_after(node.host.core) if one.name == topic]
    return found.pending, found.pending_max


def test_a_full_topic_takes_no_more_and_others_do() -> None:
    """RESOURCE_EXHAUSTED with topic, limit and when to try again; a dispatch makes room; shown and measured."""
    world = World(81)
    client = Client(world)
    master = world.elect()
    client.consume()
    change(master, topic_pending_max="t=10 *=20")
    assert isinstance(schedule(master, batch(10, world.now_ms + 500)), BatchOutcome)
    full = refusal(schedule(master, batch(1, world.now_ms + 500)), "topic_pending_max")
    assert full.grpc_code_name == "RESOURCE_EXHAUSTED"
    assert (full.metadata["value"], full.metadata["limit"]) == ("t", "10")
    assert isinstance(schedule(master, batch(20, world.now_ms + MINUTE_MS, topic="u")), BatchOutcome)
    refusal(schedule(master, batch(1, world.now_ms + MINUTE_MS, topic="u")), "topic_pending_max")
    never = schedule(master, batch(11, world.now_ms + 500))
    assert isinstance(never, Failure) and never.reason == common_pb2.INVALID_FIELD
    assert pending_of(master, "t") == (10, 10) and pending_of(master, "u") == (20, 20)
    assert master.host is not None
    metrics = node_metrics(master.host.core)
    assert metrics["topic_pending_messages"] == {("t",): 10.0, ("u",): 20.0}
    assert metrics["refused_messages"] == {("topic_pending_max",): 13.0}
    world.run(1_000)
    assert isinstance(schedule(master, batch(10, world.now_ms + 500)), BatchOutcome)
    assert settings_refusal(master, admin_pb2.Settings(topic_pending_max="t")).metadata["field"] == "topic_pending_max"


@pytest.mark.parametrize("setting", [{"pending_max": 10}, {"topic_pending_max": "t=10"}])
def test_requests_that_come_together_do_not_overrun_a_limit(setting: dict[str, object]) -> None:
    """What was let in and is not in the log yet counts: of thirty at once ten are taken."""
    world = World(82)
    master = world.elect()
    change(master, **setting)
    assert isinstance(schedule(master, batch(1, world.now_ms + MINUTE_MS, topic="t")), BatchOutcome)
    assert master.host is not None
    answers: list[BatchOutcome | Failure] = []
    for _ in range(30):
        incoming = from_batch(batch(1, world.now_ms + MINUTE_MS), master.host.core.state.settings)
        master.host.core.parts.publisher.schedule(incoming, Reply.either(answers.append))
    master.wake()
    world.run_until(lambda: len(answers) == 30)
    assert sum(isinstance(answer, BatchOutcome) for answer in answers) == 9
    assert master.host.core.wheel.pending == 10


def test_the_next_master_counts_what_was_there() -> None:
    """The limit holds after a failover, with messages in files and in memory; a repeat of what was taken passes."""
    world = World(83)
    master = world.elect()
    change(master, topic_pending_max="*=50")
    due_ms = world.now_ms + MINUTE_MS
    for topic in "tu":
        first = batch(40, due_ms, topic=topic, producer_id=f"p{topic}", sequence=1)
        assert isinstance(schedule(master, first), BatchOutcome)
    master.kill()
    world.run_until(lambda: world.master() is not None, 3_000)
    successor = world.elect()
    assert pending_of(successor, "t") == pending_of(successor, "u") == (40, 50)
    refusal(schedule(successor, batch(11, world.now_ms + MINUTE_MS)), "topic_pending_max")
    again = batch(40, due_ms, producer_id="pt", sequence=1)
    repeat = schedule(successor, again)
    assert isinstance(repeat, BatchOutcome) and repeat.repeated
    assert isinstance(schedule(successor, batch(10, world.now_ms + MINUTE_MS)), BatchOutcome)
    assert pending_of(successor, "t") == (50, 50)


def test_whatever_changes_it_the_count_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancels one by one and in bulk, moves, retries, dispatches, in pages of a few: what is told is what is there."""
    monkeypatch.setattr(topic_pending, "PAGE_UNITS_MAX", 7)
    world = World(84)
    client = Picky(
        world, lambda record, attempt: settlement(consumer_pb2.RETRY, delay_ms=MINUTE_MS) if attempt < 2 else ACK
    )
    master = world.elect()
    client.consume()
    change(master, topic_pending_max="*=1000")
    due_ms = world.now_ms + MINUTE_MS
    for topic, count in (("t", 30), ("u", 20)):
        outcome = schedule(master, batch(count, due_ms, topic=topic))
        assert isinstance(outcome, BatchOutcome)
        assert master.host is not None
        for id in outcome.ids.tolist()[:5]:
            master.host.core.serving.start(master.host.core.parts.requests.cancel(id), lambda answer: None)
        moved: list[object] = []
        moving = master.host.core.parts.requests.move(outcome.ids.tolist()[6], due_ms + 3_600_000)
        master.host.core.serving.start(moving, moved.append)
        master.wake()
        world.run_until(lambda moved=moved: bool(moved))  # type: ignore[misc]
    assert isinstance(schedule(master, batch(3, world.now_ms + 200)), BatchOutcome)
    world.run(3_000)
    assert (pending_of(master, "t")[0], pending_of(master, "u")[0]) == (28, 15)
    assert master.host is not None
    begun: list[object] = []
    selection = scheduler_pb2.Selection(topic="u")
    master.host.core.serving.start(
        master.host.core.parts.sweeper.begin_sweep(
            scheduler_pb2.BeginSweepRequest(job_id="j", selection=selection, cancel=True)
        ),
        begun.append,
    )
    master.wake()
    world.run(3_000)
    assert (pending_of(master, "t")[0], pending_of(master, "u")[0]) == (28, 0)
    assert master.host.core.wheel.pending == 28
