"""The column of the table of endpoints that says which methods need the master is true: a slave is asked every one."""

from __future__ import annotations

from typing import Any

from tests.node.core.test_endpoint_mistakes import METHODS, REQUESTS, answered, node_of
from tests.node.core.test_serving import world_with_messages
from tickwheel.node.failure import Failure
from tickwheel.node.server.endpoints import ANY_NODE, MASTER
from tickwheel.proto import common_pb2


def not_master(answer: Any) -> bool:
    """Whether this refuses for want of mastership: the call as a whole, or its messages in a receipt."""
    if isinstance(answer, Failure):
        return answer.reason == common_pb2.NOT_MASTER
    return answer is not None and b"NOT_MASTER" in answer.SerializeToString()


async def test_a_slave_refuses_what_needs_the_master_and_serves_the_rest() -> None:
    """With a request that the master takes up. Where the table refuses, whatever the request holds."""
    world, master, _ = world_with_messages()
    slave = next(node for node in world.nodes.values() if node is not master)
    assert slave.host is not None and not slave.host.core.leading
    ended_by: list[BaseException] = []
    node, _ = node_of(slave, ended_by)
    applied = slave.host.core.applied.index
    wrong = []
    for name, endpoint in METHODS.items():
        requests = [REQUESTS[name], type(REQUESTS[name])()] if endpoint.needs is MASTER else [REQUESTS[name]]
        for request in requests:
            answers = await answered(world, node, name, request)
            if any(not_master(answer) for answer in answers) == (endpoint.needs is ANY_NODE):
                wrong.append(f"{name} needs {endpoint.needs.name}: {answers}")
    assert not wrong, "\n".join(wrong)
    assert not ended_by and slave.host.core.applied.index == applied, "nothing of it got into the log"
