"""A group's filter in the replicated state: what is skipped, when, and that all nodes agree on it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.node.state.driver import HOUR_0, Driver, admin, dispatch_command, publish_command
from tickwheel.node.state.filtering import runs_of
from tickwheel.node.state.subscription import Subscription
from tickwheel.proto import admin_pb2
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto.log_pb2 import Command, Filtered
from tickwheel.storage.tags import tag_hash, tag_mask


def ready(node: Driver, tags: Sequence[str], due_ms: int = HOUR_0) -> None:
    """Publish messages with one tag each for one time and dispatch them."""
    command = publish_command([("", 0, [due_ms] * len(tags))])
    command.publish.tag_hashes = np.array([tag_hash(tag) for tag in tags], "<u4").tobytes()
    command.publish.tag_masks = np.array([tag_mask((tag,)) for tag in tags], "<u8").tobytes()
    command.publish.one_tag_hashes = True
    assert node.apply(command)[0].requests[0].failure is None
    node.apply(dispatch_command(due_ms + 1))


def grouped(node: Driver, filter: str = "a", name: str = "g") -> admin_pb2.Group:
    """Create a group with a filter."""
    request = admin_pb2.CreateGroupRequest(name=name, topics=["orders"], filter=filter)
    result = node.apply(admin(create_group=request))[0]
    assert result.failure is None, result.failure
    return result.group  # type: ignore[no-any-return]


def subscription(node: Driver, group_id: int = 1) -> Subscription:
    """The group's place in the only topic."""
    found = node.state.subscription(group_id, 1)
    assert found is not None
    return found


def wanted(node: Driver, group_id: int = 1) -> list[int]:
    """Positions that may be handed out."""
    return [int(p) for p in subscription(node, group_id).deliverable(0, 1_000)[0]]


def swept(node: Driver, filter: str, first: int, keep: Sequence[bool], group_id: int = 1) -> tuple[int, int]:
    """What a master proposes for positions that no dispatch checked: (checked, skipped)."""
    runs = runs_of(np.array(keep, np.bool_))
    command = Command(filtered=Filtered(group_id=group_id, topic_id=1, filter=filter, first=first, runs=runs))
    result = node.apply(command)[0]
    return result.checked, result.skipped


def agrees_after_a_restart(node: Driver) -> None:
    """The checkpoint holds all of it: a node that starts from it and the log has the same digest."""
    before = node.state.digest()
    node.restart()
    assert node.state.digest() == before
    node.checkpoint()
    node.restart()
    assert node.state.digest() == before


def test_a_dispatch_skips_what_the_group_does_not_take() -> None:
    """99 of 100 do not match: none of them is handed out, the floor passes them, other groups get them."""
    node = Driver()
    node.create()
    grouped(node)
    node.group("all")
    for turn in range(5):
        ready(node, ["b"] * 99 + ["a"], HOUR_0 + turn)
    assert wanted(node) == [99, 199, 299, 399, 499]
    assert subscription(node).floor == 99
    assert subscription(node).backlog == 5
    assert node.state.filtered == 495
    assert len(wanted(node, 2)) == 500
    agrees_after_a_restart(node)


def test_what_was_there_before_the_group_waits_for_the_sweep() -> None:
    """A group that begins early: nothing is handed out unchecked; only what the sweep found, in order, counts."""
    node = Driver()
    node.create()
    ready(node, ["a", "b", "b", "a"])
    grouped(node, "b || a")
    grouped(node, "b", "h")
    assert wanted(node) == [] == wanted(node, 2)
    # A dispatch meanwhile is behind as well: the order of checks is the order of positions.
    ready(node, ["b"], HOUR_0 + 5)
    assert wanted(node, 2) == []
    keep = [False, True, True, False]
    assert swept(node, "a", 0, keep, 2) == (0, 0), "judged by another filter"
    assert swept(node, "b", 1, keep, 2) == (0, 0), "a gap"
    assert swept(node, "b", 0, [*keep, True, True], 2) == (0, 0), "beyond the end"
    assert swept(node, "b", 0, keep, 2) == (4, 2)
    assert wanted(node, 2) == [1, 2]
    assert swept(node, "b", 0, keep, 2) == (0, 0), "a repeat"
    assert swept(node, "b", 4, [True], 2) == (1, 0)
    ready(node, ["a", "b"], HOUR_0 + 9)
    assert wanted(node, 2) == [1, 2, 4, 6]
    agrees_after_a_restart(node)


def test_a_full_window_is_checked_no_further() -> None:
    """P11: a group that settles nothing keeps a bounded window; the rest is checked when there is room."""
    node = Driver()
    node.create(window_messages_max=1_000)
    grouped(node)
    ready(node, ["a"] * 10)
    ready(node, ["b"] * 2_000, HOUR_0 + 1)
    assert subscription(node).unchecked == 1_000
    assert node.state.filtered == 990
    assert len(subscription(node).window_bytes()) <= 2_000
    ready(node, ["a"], HOUR_0 + 2)
    assert wanted(node) == list(range(10))
    agrees_after_a_restart(node)


def test_another_filter_meets_what_is_unsettled() -> None:
    """After a change nothing is handed out by the old filter; what it had skipped stays skipped."""
    node = Driver()
    node.create()
    grouped(node)
    ready(node, ["a", "b", "a", "c"])
    change = admin_pb2.SetGroupFilterRequest(name="g", filter="b || c")
    assert node.apply(admin(set_group_filter=change))[0].group.filter == "b || c"
    assert wanted(node) == []
    assert swept(node, "b || c", 0, [False, True, False, True]) == (4, 2)
    assert wanted(node) == []
    ready(node, ["a", "c"], HOUR_0 + 1)
    assert wanted(node) == [5]
    node.apply(admin(set_group_filter=admin_pb2.SetGroupFilterRequest(name="g", filter="*")))
    ready(node, ["x"], HOUR_0 + 2)
    assert wanted(node) == [5, 6]
    agrees_after_a_restart(node)


def test_a_filter_belongs_to_its_group() -> None:
    """Another one is refused naming both, the same in other words is the same, none stated takes what there is."""
    node = Driver()
    node.create()
    assert grouped(node, "b||a").filter == "a || b"
    assert grouped(node, "a || b || a").filter == "a || b"
    assert grouped(node, "").filter == "a || b"
    for asked, shown in (("a", "a"), ("*", "*")):
        request = admin_pb2.CreateGroupRequest(name="g", topics=["orders"], filter=asked)
        failure = node.apply(admin(create_group=request))[0].failure
        assert failure.reason == pb.FILTER_DIFFERS
        assert (failure.metadata["value"], failure.metadata["limit"]) == (shown, "a || b")
    refused = node.apply(admin(set_group_filter=admin_pb2.SetGroupFilterRequest(name="g", filter="a ||")))[0].failure
    assert (refused.reason, refused.metadata["field"]) == (pb.INVALID_FIELD, "filter")
    unknown = node.apply(admin(set_group_filter=admin_pb2.SetGroupFilterRequest(name="h", filter="a")))[0].failure
    assert unknown.reason == pb.UNKNOWN_NAME
