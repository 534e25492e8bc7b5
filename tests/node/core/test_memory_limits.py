"""What a caller could make grow without end is refused at its limit, with the field and when to come again."""

from __future__ import annotations

import numpy as np
import pytest

from tests.node.core.trio import Client, World
from tickwheel.node.core import membership
from tickwheel.node.core.delivery import dead, settlements
from tickwheel.node.core.delivery.consumers import CONSUMER_NAME_LENGTH_MAX
from tickwheel.node.core.promise import Reply
from tickwheel.node.failure import Failure
from tickwheel.proto import admin_pb2, common_pb2, consumer_pb2, dead_pb2
from tickwheel.proto.log_pb2 import AdminCommand


def settle(world: World, first: int, count: int) -> object:
    """Acknowledge messages of group `g` at positions from `first` on, without a lease."""
    master = world.elect()
    assert master.host is not None
    subscription = master.host.core.state.subscription(1, 1)
    assert subscription is not None
    positions, ids, attempts = subscription.deliverable(first, count)
    batch = consumer_pb2.SettleBatch(
        group="g",
        topic="t",
        outcome=consumer_pb2.ACK,
        ids=ids.tobytes(),
        attempts=attempts.astype(np.uint32).tobytes(),
        positions=positions.tobytes(),
    )
    answers: list[object] = []
    master.host.core.parts.consumers.settle(batch, Reply.either(answers.append))
    master.wake()
    world.run_until(lambda: bool(answers))
    return answers[0]


def test_settling_far_ahead_is_refused_once_windows_take_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.elect()
    client = Client(world)
    client.settle = False
    client.consume(credits=1)
    client.schedule([10] * 9_000)
    world.run_until(lambda: len(client.got) == 1)
    monkeypatch.setattr(settlements, "WINDOW_VALUES_MAX", 1_000)
    assert isinstance(settle(world, 100, 10), consumer_pb2.SettleReceipt)
    refused = settle(world, 8_000, 10)
    assert isinstance(refused, Failure)
    assert refused.reason == common_pb2.LIMIT_REACHED and refused.metadata["field"] == "window_values"
    assert isinstance(settle(world, 0, 500), consumer_pb2.SettleReceipt)  # what moves the floor goes on
    while True:
        receipt = settle(world, 0, 500)
        assert isinstance(receipt, consumer_pb2.SettleReceipt)
        master = world.elect()
        assert master.host is not None
        if not master.host.core.state.backlog.total:
            break
    assert master.host.core.state.backlog.window_values == 0


def test_letters_that_are_gone_out_of_turn_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead, "GONE_MAX", 2)
    world = World()
    world.elect()
    client = Client(world)
    client.outcome = consumer_pb2.DEAD
    client.consume()
    client.schedule([10] * 6)
    master = world.elect()
    assert master.host is not None
    host = master.host
    world.run_until(lambda: host.core.state.dead_letters_kept() == 6)

    def purge(numbers: list[int]) -> object:
        answers: list[object] = []
        host.core.serving.start(
            host.core.parts.dead.purge(dead_pb2.PurgeDeadRequest(group="g", numbers=numbers)), answers.append
        )
        master.wake()
        world.run_until(lambda: bool(answers))
        return answers[0]

    assert isinstance(purge([2, 4]), dead_pb2.ChangeDeadResponse)
    refused = purge([5])
    assert isinstance(refused, Failure) and refused.metadata["field"] == "dead_letters_gone"
    assert isinstance(purge([]), dead_pb2.ChangeDeadResponse)
    assert host.core.state.dead_letters_kept() == 0


def test_names_and_members_that_a_caller_states_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    master = world.elect()
    assert master.host is not None
    opened: list[object] = []
    request = consumer_pb2.OpenConsumer(
        group="g", topics=["t"], credits=1, consumer_name="n" * (CONSUMER_NAME_LENGTH_MAX + 1)
    )
    master.host.core.serving.start(
        master.host.core.parts.consumers.open(request, lambda batch: None, lambda failure: None), opened.append
    )
    assert isinstance(opened[0], Failure) and opened[0].metadata["field"] == "consumer_name"
    answers: list[object] = []
    long = admin_pb2.Member(node_id="d", peer_address="p" * (membership.ADDRESS_LENGTH_MAX + 1))
    master.host.core.serving.start(master.host.core.parts.requests.admin(AdminCommand(add_member=long)), answers.append)
    assert isinstance(answers[0], Failure) and answers[0].metadata["field"] == "member.peer_address"
    monkeypatch.setattr(membership, "REMOVED_MAX", 0)
    remove = admin_pb2.RemoveMemberRequest(node_id="b" if master.name != "b" else "c")
    master.host.core.serving.start(
        master.host.core.parts.requests.admin(AdminCommand(remove_member=remove)), answers.append
    )
    world.run_until(lambda: len(answers) == 2)
    assert isinstance(answers[1], Failure) and answers[1].metadata["field"] == "members_removed"
