"""The counts of what groups have still to settle agree with the windows, whatever was done."""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random

import numpy as np
import pytest

from tests.counting import calls_of
from tests.node.state.driver import admin, publish_command
from tests.node.state.solo import HOUR_0, Solo
from tickwheel.node.state.results import AdminResult
from tickwheel.node.state.subscription import Backlog
from tickwheel.proto import admin_pb2
from tickwheel.proto.consumer_pb2 import EARLIEST, LATEST
from tickwheel.proto.log_pb2 import SETTLE_RETURN
from tickwheel.wheel.units import HOUR_MS


def recounted(solo: Solo) -> Counter[tuple[int, int]]:
    """By (group, topic), from the windows themselves."""
    waiting: Counter[tuple[int, int]] = Counter()
    for subscription in solo.state.groups.subscriptions():
        values = np.frombuffer(subscription.window_bytes(), "<u2")
        settled = subscription.floor + int(np.count_nonzero(values == 0))
        assert subscription.backlog == solo.state.ready_count(subscription.topic_id) - settled
        waiting[subscription.group_id, subscription.topic_id] += subscription.backlog
    return waiting


def summed(waiting: Counter[tuple[int, int]], place: int) -> dict[int, int]:
    """By group (0) or topic (1), where it is not 0."""
    sums: Counter[int] = Counter()
    for key, count in waiting.items():
        sums[key[place]] += count
    return {key: count for key, count in sums.items() if count}


def check(solo: Solo) -> None:
    """The counts that are kept are those."""
    expected = recounted(solo)
    assert solo.state.backlog.by_group == summed(expected, 0)
    assert solo.state.backlog.by_topic == summed(expected, 1)
    assert solo.state.backlog.total == expected.total()


@pytest.mark.parametrize("seed", range(6))
def test_counts_agree_with_the_windows_after_everything_that_changes_them(seed: int) -> None:
    rng = Random(seed)
    solo = Solo(seed)
    solo.create("g", "h")
    for name in ("f", "filtered"):
        solo.apply(
            admin(
                create_group=admin_pb2.CreateGroupRequest(name=name, topics=["t"], start_from=EARLIEST, filter="a||b")
            )
        )
    hour = HOUR_0
    for step in range(60):
        what = rng.randrange(9)
        if what <= 2:
            due = sorted(solo.now_ms + rng.randrange(3_000) for _ in range(rng.randrange(1, 40)))
            solo.publish(due, b"x")
            solo.dispatch(due[-1] + 1)
        elif what == 3:
            solo.settle(rng.randrange(1, 5), limit=rng.randrange(1, 30))
        elif what == 4:
            subscription = solo.state.subscription(1, 1)
            if subscription is not None and subscription.backlog > 3:
                positions, ids, attempts = subscription.deliverable(subscription.floor + 2, 3)
                solo.settle_some(1, ids, attempts, positions)
        elif what == 5:
            solo.retry(rng.randrange(1, 10), 500)
        elif what == 6:
            solo.settle(2, SETTLE_RETURN, limit=5)
        elif what == 7:
            start = rng.choice((EARLIEST, LATEST))
            solo.apply(admin(reset_group=admin_pb2.ResetGroupRequest(name="h", start_from=start)))
        else:
            hour += 1
            solo.dispatch(hour * HOUR_MS)
            solo.remove(hour - 1)
        check(solo)
        if step == 30:
            solo.checkpoint()
    solo.crash()
    check(solo)
    solo.apply(admin(delete_group=admin_pb2.DeleteGroupRequest(name="g")))
    check(solo)
    solo.apply(admin(delete_topic=admin_pb2.DeleteTopicRequest(name="t")))
    check(solo)
    assert not solo.state.backlog.by_topic
    assert {group.group_id for group in solo.state.groups} == {2, 3, 4}
    assert not solo.state.backlog.by_group


@pytest.mark.parametrize("seed", range(20))
def test_a_raised_floor_counts_what_was_unsettled(seed: int) -> None:
    """As the values of the positions say, with retries for other groups inside the window and beyond it: wherever the
    new floor lies."""
    rng = Random(seed)
    solo = Solo(seed)
    solo.create("g", "h")
    hour = HOUR_0
    for _ in range(12):
        hour += 1
        solo.dispatch(hour * HOUR_MS)
        for _ in range(rng.randrange(4)):
            due = sorted(solo.now_ms + rng.randrange(3_000) for _ in range(rng.randrange(1, 12)))
            solo.publish(due, b"x")
            solo.dispatch(due[-1] + 1)
            solo.retry(rng.randrange(1, 5), 500, group_id=rng.choice((1, 2)))
            for group_id in (1, 2):
                subscription = solo.state.subscription(group_id, 1)
                assert subscription is not None
                positions, ids, attempts = subscription.deliverable(
                    subscription.floor + rng.randrange(6), rng.randrange(1, 4)
                )
                if len(ids) and rng.random() < 0.5:
                    solo.settle_some(group_id, ids, attempts, positions)
                solo.settle(group_id, SETTLE_RETURN, limit=rng.randrange(3))
        topic = solo.state._state.topics.get(1)
        assert topic is not None
        kept = hour - rng.randrange(3)
        position = topic.ready.first_of_hour(kept)
        expected = 0
        for group_id in (1, 2):
            subscription = solo.state.subscription(group_id, 1)
            assert subscription is not None
            window = subscription._window
            if position > window.floor and kept > solo.state.hour_min_kept:
                expected += int(np.count_nonzero(window.span(window.floor, position)))
        assert solo.remove(kept).unsettled_removed == expected
        check(solo)


def test_the_removal_of_hours_takes_few_steps_a_subscription() -> None:
    """With everything of thousands of subscriptions unsettled, every hour; arrays of one element took most of it."""
    solo = Solo()
    solo.create()
    names = [f"t{number}" for number in range(20)]
    for name in names:
        solo.apply(admin(create_topic=admin_pb2.CreateTopicRequest(name=name)))
    for number in range(5):
        request = admin_pb2.CreateGroupRequest(name=f"g{number}", topics=names, start_from=EARLIEST)
        solo.apply(admin(create_group=request))
    solo.apply(*[publish_command([("", 0, [solo.now_ms])], topic_id, b"x") for topic_id in range(2, 22)])
    solo.dispatch((HOUR_0 + 2) * HOUR_MS)
    removed: list[AdminResult] = []
    calls = calls_of(lambda: removed.append(solo.remove(HOUR_0 + 1)))
    assert removed[0].unsettled_removed == 100
    assert calls < 100 * 18


def test_a_dispatch_takes_as_many_steps_for_one_group_as_for_ten() -> None:
    """One may put a message each into thousands of topics."""
    counted = []
    for groups in (1, 10):
        solo = Solo()
        solo.create()
        names = [f"t{number}" for number in range(20)]
        for name in names:
            solo.apply(admin(create_topic=admin_pb2.CreateTopicRequest(name=name)))
        for number in range(groups):
            request = admin_pb2.CreateGroupRequest(name=f"g{number}", topics=names, start_from=EARLIEST)
            solo.apply(admin(create_group=request))
        solo.apply(*[publish_command([("", 0, [solo.now_ms])], topic_id, b"x") for topic_id in range(2, 22)])
        counted.append(calls_of(partial(solo.dispatch, solo.now_ms + 1)))
        check(solo)
        assert solo.state.backlog.total == 20 * groups
    assert counted[1] < counted[0] + 20


def test_the_fullest_topics_come_first_and_no_more_than_asked_for() -> None:
    backlog = Backlog()
    for topic_id in range(1, 50):
        backlog.add(1, topic_id, topic_id % 7)
    found = backlog.fullest(10)
    assert found == [6, 13, 20, 27, 34, 41, 48, 5, 12, 19]


def test_a_window_that_covers_nothing_holds_no_array() -> None:
    """A subscription of a quiet topic costs hundreds of bytes, not thousands; there may be many."""
    solo = Solo()
    solo.create("g")
    subscription = solo.state.subscription(1, 1)
    assert subscription is not None and len(subscription._window._values) == 0
    solo.publish([solo.now_ms + n for n in range(100)], b"x")
    solo.dispatch(solo.now_ms + 200)
    positions, ids, attempts = subscription.deliverable(50, 10)
    solo.settle_some(1, ids, attempts, positions)
    assert len(subscription._window._values) >= 10
    solo.settle()
    assert subscription.floor == 100 and len(subscription._window._values) == 0


def test_what_windows_hold_is_counted() -> None:
    """It is what bounds them together (node/core/delivery/settlements.py)."""
    solo = Solo()
    solo.create("g", "h")

    def held() -> int:
        return sum(len(s._window._values) for s in solo.state.groups.subscriptions())

    solo.publish([solo.now_ms + n for n in range(5_000)], b"x")
    solo.dispatch(solo.now_ms + 6_000)
    for group_id, first in ((1, 4_900), (2, 3_000), (1, 10)):
        subscription = solo.state.subscription(group_id, 1)
        assert subscription is not None
        positions, ids, attempts = subscription.deliverable(first, 10)
        growth, before = subscription.growth(int(positions[-1])), held()
        solo.settle_some(group_id, ids, attempts, positions)
        assert held() - before == growth
        assert solo.state.backlog.window_values == held() > 0
    solo.checkpoint()
    solo.crash()
    assert solo.state.backlog.window_values == held() > 0
    solo.settle(1)
    assert solo.state.backlog.window_values == held()
    solo.apply(admin(delete_topic=admin_pb2.DeleteTopicRequest(name="t")))
    assert solo.state.backlog.window_values == 0


def test_the_tick_of_each_message_is_known_before_and_after_a_start() -> None:
    """Of the last tick and of earlier ones, of several in one dispatch; also where hours were removed."""
    solo = Solo()
    solo.create("g")
    due_ms = [solo.now_ms + 700 * number for number in range(20)]
    solo.publish(due_ms, b"x")
    for number in (5, 6, 7, 20):
        solo.dispatch(due_ms[number - 1] + 1)
    wanted = [due // 1_000 * 1_000 for due in due_ms]

    def ticks() -> list[int | None]:
        log = solo.state.ready_log(1)
        assert log is not None
        return [log.due_tick_ms(position) for position in range(log.first_retained, log.count + 1)]

    assert ticks() == [*wanted, None]
    solo.checkpoint()
    solo.restart()
    assert ticks() == [*wanted, None]
    solo.settle()
    solo.dispatch(solo.now_ms + 2 * HOUR_MS)
    solo.remove(HOUR_0 + 2, forced_below=0)
    assert ticks() == [None]
    solo.checkpoint()
    solo.restart()
    assert ticks() == [None]
    solo.publish([solo.now_ms + 1], b"x")
    solo.dispatch(solo.now_ms + 10)
    assert ticks() == [(solo.now_ms - 9) // 1_000 * 1_000, None]
