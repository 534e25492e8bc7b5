"""A master without its lease does not say that something does not exist: another may lead by now and have it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.node.core.trio import World
from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.schedule.intake import KIND_DUE
from tickwheel.node.failure import Failure
from tickwheel.proto import common_pb2

UNKNOWN = 5 << 32 | 7
COLD = 1 << 63 | 7


@pytest.mark.parametrize(
    "ask",
    [
        lambda core: core.parts.requests.cancel(UNKNOWN),
        lambda core: core.parts.requests.get(UNKNOWN, False),
        lambda core: core.parts.requests.get(COLD, False),
        lambda core: core.parts.requests.reschedule(UNKNOWN, 1 << 40, KIND_DUE),
    ],
    ids=["cancel", "get", "get by a cold id", "reschedule"],
)
def test_what_is_not_here_may_be_elsewhere(ask: Any) -> None:
    """A node that stood still reads a cancel before the frames by which it would learn that it was deposed. It said
    NOT_FOUND for a message that the next master had acknowledged and delivered."""
    world = World(7)
    node = world.elect()
    core = node.host.core if node.host is not None else None
    assert isinstance(core, NodeCore)
    world.cut.update(frozenset((node.name, other.name)) for other in world.nodes.values() if other is not node)
    world.run_until(lambda: not core.log.lease_held())
    assert core.parts.mastership.refusal() is None, "it takes itself for the master still"
    answers: list[Any] = []
    core.serving.start(ask(core), answers.append)
    node.wake()
    world.run_until(lambda: bool(answers))
    assert isinstance(answers[0], Failure), answers
    assert answers[0].reason == common_pb2.NO_MASTER
