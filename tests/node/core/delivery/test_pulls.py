"""A caller that goes away before it has the answer to its pull takes no message along."""

from __future__ import annotations

from typing import Any

import pytest

from tests.node.core.delivery.test_retries import admin
from tests.node.core.trio import Client, Node, World
from tickwheel.node.core.delivery.consumers import PullCaller
from tickwheel.node.failure import Failure
from tickwheel.proto import admin_pb2, common_pb2, consumer_pb2

LEASE_MS = 60_000


def pull(node: Node, caller: PullCaller | None = None, *, wait_ms: int = 20_000) -> list[Any]:
    """Ask for a message; the list gets the answer."""
    assert node.host is not None
    core, answers = node.host.core, list[Any]()
    request = consumer_pb2.PullRequest(group="g", topics=["t"], messages_max=10, wait_ms=wait_ms, lease_ms=LEASE_MS)
    core.serving.start(core.parts.consumers.pull(request, "", caller), answers.append)
    node.wake()
    return answers


@pytest.mark.parametrize("leaves", ["while its group is made", "while it waits", "as the answer comes"])
def test_a_caller_that_is_gone_gets_no_message(leaves: str) -> None:
    """Another would otherwise wait until the lease ends, and the message would have one attempt less."""
    world = World(61)
    client, master = Client(world), world.elect()
    gone = PullCaller()
    if leaves == "while its group is made":
        answers = pull(master, gone)
        gone.leave()
        world.run_until(lambda: bool(answers))
        assert isinstance(answers[0], Failure)
    else:
        admin(world, create_topic=admin_pb2.CreateTopicRequest(name="t"))
        admin(world, create_group=admin_pb2.CreateGroupRequest(name="g", topics=["t"]))
        answers = pull(master, gone)
        world.run(50)
        assert not answers
        if leaves == "while it waits":
            gone.leave()
            assert not answers[0].ids, "as if its time were over"
    client.schedule([20])
    if leaves == "as the answer comes":
        world.run_until(lambda: bool(answers))
        assert answers[0].ids
        gone.leave()
        master.wake()
    gone.leave()
    again = pull(master)
    world.run_until(lambda: bool(again), 1_000)
    [batch] = again
    assert len(batch.ids) == 8 and batch.attempts == (2 if "answer" in leaves else 1).to_bytes(4, "little")
    assert master.host is not None and not master.host.core.parts.consumers._pulls


def test_a_caller_may_leave_when_all_is_over() -> None:
    """Its pull had nothing to bring, or its node leads no more."""
    world = World(62)
    master = world.elect()
    callers = PullCaller(), PullCaller()
    ended, waiting = pull(master, callers[0], wait_ms=10), pull(master, callers[1])
    world.run_until(lambda: bool(ended))
    assert not ended[0].ids and not waiting
    assert master.host is not None
    master.host.core.log.step_down()
    assert waiting[0].reason in (common_pb2.NOT_MASTER, common_pb2.NO_MASTER)
    for caller in callers:
        caller.leave()
    world.elect()
