"""`group_in_flight_max` counts whatever a group has out, in topics too that are not served just now."""

from __future__ import annotations

import pytest

from tests.node.core.delivery.test_leases import elected_again
from tests.node.core.delivery.test_retries import admin
from tests.node.core.delivery.test_topics_together import schedule
from tests.node.core.trio import Client, World
from tickwheel.proto import admin_pb2


@pytest.mark.parametrize("fifo", [True, False], ids=["fifo", "plain"])
@pytest.mark.parametrize("left_out", ["paused", "not taken"])
def test_what_an_earlier_master_gave_out_counts_in_topics_that_are_not_served(left_out: str, fifo: bool) -> None:
    """Three of one topic are out. The next mastership does not read that topic, as it is paused, or as its consumer
    takes the other one alone; still one more message may go out, not four."""
    world = World(1)
    admin(world, settings=admin_pb2.Settings(group_in_flight_max=4))
    for topic in "ab":
        admin(world, create_topic=admin_pb2.CreateTopicRequest(name=topic, fifo=fifo))
    admin(world, create_group=admin_pb2.CreateGroupRequest(name="g", topics=["a", "b"]))
    client = Client(world)
    client.topics, client.settle = ["a", "b"], False
    master = world.elect()
    client.consume(lease_ms=60_000)
    schedule(world, "a" if fifo else "aaa")
    world.run(500)

    assert len(client.got) == 1
    if left_out == "paused":
        admin(world, set_topic_paused=admin_pb2.SetPausedRequest(name="a", paused=True))
    else:
        client.topics = ["b"]
    elected_again(world, master)
    schedule(world, "bbbbbb")
    world.run(1_000)
    assert master.host is not None
    assert master.host.core.parts.delivery.leases.in_flight == (2 if fifo else 4)
