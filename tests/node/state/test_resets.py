"""Pause and reset in the replicated state: what they leave behind, and that a restart keeps it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.node.state.driver import HOUR_0, Driver, admin, dispatch_command, publish_command, settle_command
from tests.node.state.test_filtering import agrees_after_a_restart, grouped, subscription, wanted
from tickwheel.node.state.results import SettleResult
from tickwheel.proto import admin_pb2
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto.consumer_pb2 import EARLIEST, LATEST, START_FROM_UNSPECIFIED, TIME, StartFrom
from tickwheel.proto.log_pb2 import SETTLE_ACK, SETTLE_RETURN, Command


def reset(node: Driver, start_from: StartFrom.ValueType, start_ms: int = 0, topics: tuple[str, ...] = ()) -> Any:
    """Let group g begin anew; the failure if it is refused."""
    request = admin_pb2.ResetGroupRequest(name="g", start_from=start_from, start_ms=start_ms, topics=topics)
    return node.apply(admin(reset_group=request))[0].failure


def settle(node: Driver, kind: int, positions: list[int], attempts: list[int], epoch: int | None) -> SettleResult:
    """Settle positions as a consumer of an epoch does."""
    ids = [int(n) for n in subscription(node)._ready.read(0, 100)]
    command: Command = settle_command(kind, [ids[p] for p in positions], attempts, positions)
    if epoch is not None:
        command.settle.batches[0].epoch = epoch
    result: SettleResult = node.apply(command)[0]
    return result


def test_reset_begins_attempts_anew_and_voids_what_is_out() -> None:
    """P1: an acknowledgement from before a reset settles nothing after it, however late it comes."""
    node = Driver()
    node.create()
    node.group()
    node.ready([HOUR_0 + n for n in range(6)])
    settle(node, SETTLE_ACK, [0, 1, 4], [1, 1, 1], 0)
    settle(node, SETTLE_RETURN, [2, 3], [1, 1], 0)
    assert wanted(node) == [2, 3, 5]
    assert reset(node, EARLIEST) is None
    assert wanted(node) == [0, 1, 2, 3, 4, 5]
    assert subscription(node).attempts_of(subscription(node).deliverable(0, 10)[0]).tolist() == [1] * 6
    assert subscription(node).returned_count == 0
    late = settle(node, SETTLE_ACK, [0, 5], [1, 1], 0)
    assert (late.settled, late.stale) == (0, 2)
    assert settle(node, SETTLE_ACK, [0], [1], 1).settled == 1
    assert settle(node, SETTLE_ACK, [1], [1], None).settled == 1
    assert wanted(node) == [2, 3, 4, 5]
    agrees_after_a_restart(node)


@pytest.mark.parametrize(
    ("start_from", "start_ms", "left"),
    [(EARLIEST, 0, [0, 1, 2, 3]), (LATEST, 0, []), (TIME, HOUR_0 + 2_000, [2, 3]), (TIME, HOUR_0 + 9_000, [])],
)
def test_reset_to_a_place(start_from: StartFrom.ValueType, start_ms: int, left: list[int]) -> None:
    """Earliest is all that is retained, latest nothing that was dispatched, a time what is due from its tick on."""
    node = Driver()
    node.create()
    node.group()
    node.ready([HOUR_0 + 1_000 * n for n in range(4)])
    assert reset(node, start_from, start_ms, ("orders",)) is None
    assert wanted(node) == left
    node.apply(publish_command([("", 0, [HOUR_0 + 8_000, HOUR_0 + 9_000])]))
    node.apply(dispatch_command(HOUR_0 + 9_001))
    assert wanted(node) == [*left, *([5] if start_ms == HOUR_0 + 9_000 else [4, 5])]
    agrees_after_a_restart(node)


def test_a_reset_meets_the_filter_again() -> None:
    """What had been skipped by an earlier filter comes back with a reset to earliest, if the filter of now takes it."""
    node = Driver()
    node.create()
    grouped(node, "a")
    node.ready([HOUR_0])
    assert (wanted(node), subscription(node).floor) == ([], 1)
    node.apply(admin(set_group_filter=admin_pb2.SetGroupFilterRequest(name="g", filter="*")))
    assert wanted(node) == []
    assert reset(node, EARLIEST) is None
    assert wanted(node) == [0]


def test_what_cannot_be_reset_or_paused_is_refused() -> None:
    """Names and places that do not exist get a typed failure, and nothing has changed."""
    node = Driver()
    node.create(("orders", "more"))
    node.group()
    before = node.state.digest().digest
    for failure, reason in (
        (reset(node, START_FROM_UNSPECIFIED), pb.INVALID_FIELD),
        (reset(node, EARLIEST, topics=("orders", "more")), pb.INVALID_FIELD),
        (node.apply(admin(reset_group=admin_pb2.ResetGroupRequest(name="x")))[0].failure, pb.UNKNOWN_NAME),
        (node.apply(admin(set_topic_paused=admin_pb2.SetPausedRequest(name="x")))[0].failure, pb.UNKNOWN_NAME),
        (node.apply(admin(set_group_paused=admin_pb2.SetPausedRequest(name="x")))[0].failure, pb.UNKNOWN_NAME),
    ):
        assert failure is not None and failure.reason == reason
    assert node.state.digest().digest == before


def test_a_pause_is_part_of_the_state() -> None:
    """Paused topics and groups stay so over a restart; a second command changes nothing."""
    node = Driver()
    node.create()
    node.group()
    for _ in range(2):
        node.apply(admin(set_topic_paused=admin_pb2.SetPausedRequest(name="orders", paused=True)))
        node.apply(admin(set_group_paused=admin_pb2.SetPausedRequest(name="g", paused=True)))
    agrees_after_a_restart(node)
    assert node.state.topic_paused(1) and node.state.group_paused(1)
    node.apply(admin(set_group_paused=admin_pb2.SetPausedRequest(name="g", paused=False)))
    assert not node.state.group_paused(1)
