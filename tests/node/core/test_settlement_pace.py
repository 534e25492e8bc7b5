"""Where messages come, are delivered and settled all the time, settlements that nobody waits for share few entries. All
others keep the pace of schedules: a consumer that waits for each answer, an ordered topic, a limit on what is out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import pytest

from tests.node.core.delivery.test_fifo import Ordered
from tests.node.core.delivery.test_retries import ACK
from tests.node.core.loading import admin
from tests.node.core.trio import MS, World
from tickwheel.node.core.delivery.consumers import ConsumerHandle, SettleReply
from tickwheel.node.core.pacing import SPACING_MS_MIN, UNHURRIED_MS_MIN
from tickwheel.node.core.promise import Reply
from tickwheel.node.failure import Failure
from tickwheel.proto import admin_pb2, consumer_pb2
from tickwheel.proto.log_pb2 import AdminCommand

STEADY_MS = 1_000
"""The flow: five messages each five milliseconds, scheduled long before, so that only dispatches and settlements make
entries."""


class Answers(Ordered):
    """Notes how long each settlement takes. `one_by_one`: sends one only when the one before has its answer."""

    def __init__(self, world: World, group: str = "g", *, one_by_one: bool = False) -> None:
        super().__init__(world, lambda record, attempt: ACK, group=group)
        self.took_ms: list[float] = []
        self._one_by_one = one_by_one
        self._waiting: deque[consumer_pb2.SettleBatch] = deque()
        self._under_way = 0

    def _settle(self, session: ConsumerHandle, settle: consumer_pb2.SettleBatch) -> None:
        self._waiting.append(settle)
        self._next(session)

    def _next(self, session: ConsumerHandle) -> None:
        if not self._waiting or (self._one_by_one and self._under_way):
            return
        self._under_way += 1
        session.settle(self._waiting.popleft(), self._reply(session, self.world.now_ns))

    def _reply(self, session: ConsumerHandle, began_ns: int) -> SettleReply:
        def answered(receipt: consumer_pb2.SettleReceipt | Failure) -> None:
            assert not isinstance(receipt, Failure) and not receipt.stale and not receipt.unknown
            self._under_way -= 1
            self.took_ms.append((self.world.now_ns - began_ns) / MS)
            self.world.at(self.world.now_ns + MS, partial(self._next, session))

        return Reply.either(answered)


def entries(world: World) -> int:
    """Length of the log."""
    node = world.master()
    assert node is not None and node.host is not None
    return node.host.core.log.status().commit_index


def flowing(
    *consumers: Callable[[World], Answers], settings: admin_pb2.Settings | None = None, fifo: bool = False
) -> tuple[World, list[Answers]]:
    """Three nodes in the middle of the flow, with these consumers."""
    world = World()
    world.elect()
    admin(world, AdminCommand(create_topic=admin_pb2.CreateTopicRequest(name="t", fifo=fifo)))
    if settings is not None:
        admin(world, AdminCommand(settings=settings))
    opened = [make(world) for make in consumers]
    for consumer in opened:
        consumer.consume()
    world.run(200)
    for place in range(0, 2 * STEADY_MS, 5):  # in an ordered topic none waits for another
        opened[0].schedule_of([str(place + number) for number in range(5)], delay_ms=1_000 + place)
    world.run(1_000 + STEADY_MS // 2)
    for consumer in opened:
        consumer.took_ms.clear()
    return world, opened


def test_settlements_that_nobody_waits_for_share_few_entries() -> None:
    world, (consumer,) = flowing(Answers)
    before = entries(world)
    world.run(STEADY_MS)
    assert entries(world) - before <= 0.5 * STEADY_MS / SPACING_MS_MIN
    assert SPACING_MS_MIN + 6 < max(consumer.took_ms) <= UNHURRIED_MS_MIN + 6


def test_a_consumer_that_waits_for_each_answer_is_not_held_up() -> None:
    """Not by its own pace, and not by that of others beside it."""
    world, (_, waiting) = flowing(Answers, partial(Answers, group="alone", one_by_one=True))
    world.run(STEADY_MS)
    assert max(waiting.took_ms) <= SPACING_MS_MIN + 6, waiting.took_ms
    assert len(waiting.took_ms) >= STEADY_MS / (SPACING_MS_MIN + 6)


@pytest.mark.parametrize(
    ("settings", "fifo"),
    [(None, True), (admin_pb2.Settings(group_in_flight_max=1_000), False)],
    ids=["an ordered topic", "a limit on messages in flight"],
)
def test_settlements_for_which_other_messages_wait_come_at_once(
    settings: admin_pb2.Settings | None, fifo: bool
) -> None:
    world, (consumer,) = flowing(Answers, settings=settings, fifo=fifo)
    world.run(STEADY_MS)
    assert max(consumer.took_ms) <= SPACING_MS_MIN + 6, consumer.took_ms
