"""A cancel removes just its message: the other four come, also those with the same key, also on another topic."""

from __future__ import annotations

from collections import Counter

from tests.node.core.test_when import schedule
from tests.node.core.trio import Client, Node, World
from tickwheel.node.core.schedule.publisher import BatchOutcome
from tickwheel.node.failure import Failure
from tickwheel.proto import common_pb2, consumer_pb2, scheduler_pb2


def keyed(topic: str, key: str, due_ms: int) -> scheduler_pb2.ScheduleRequest:
    """A message with a key, which is also its payload."""
    meta = common_pb2.MessageMeta(key=key)
    message = common_pb2.Message(topic=topic, payload=f"{topic}/{key}".encode(), due_ms=due_ms, meta=meta)
    return scheduler_pb2.ScheduleRequest(message=message)


def cancel(node: Node, id64: int) -> str:
    """Outcome of a cancel."""
    assert node.host is not None
    answers: list[scheduler_pb2.CancelOutcome.ValueType | Failure] = []
    node.host.core.serving.start(node.host.core.parts.requests.cancel(id64), answers.append)
    node.wake()
    node.world.run_until(lambda: bool(answers))
    assert not isinstance(answers[0], Failure)
    return scheduler_pb2.CancelOutcome.Name(answers[0])


def test_a_cancel_removes_just_that_one() -> None:
    """Five of a topic and one with the same key of another: one is cancelled, twice; an unknown id removes nothing."""
    world = World(81)
    client = Client(world)
    master = world.elect()
    client.consume()
    due_ms = world.now_ms + 1_500
    ids = []
    for topic, key in (("t", "a"), ("t", "b"), ("t", "b"), ("t", "c"), ("t", "d"), ("u", "b")):
        outcome = schedule(master, keyed(topic, key, due_ms))
        assert isinstance(outcome, BatchOutcome)
        ids.append(int(outcome.ids[0]))
    assert cancel(master, ids[1]) == "CANCELLED"
    assert cancel(master, ids[1]) == "CANCELLED"
    assert cancel(master, ids[0] + 1_000) == "NOT_FOUND"
    got: list[consumer_pb2.DeliverBatch] = []
    assert master.host is not None
    request = consumer_pb2.OpenConsumer(group="h", topics=["u"], credits=10)
    master.host.core.serving.start(
        master.host.core.parts.consumers.open(request, got.append, lambda failure: None), lambda session: None
    )
    master.wake()
    world.run_until(lambda: len(client.got) == 4 and bool(got), 3_000)
    world.run(1_000)
    came = Counter(record.rpartition(b"t/")[2] for record in client.got)
    assert came == {b"a": 1, b"b": 1, b"c": 1, b"d": 1}
    assert [batch.records.endswith(b"u/b") for batch in got] == [True]
    assert cancel(master, ids[0]) == "ALREADY_DISPATCHED"
