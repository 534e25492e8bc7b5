"""Hours go when nobody needs them: from the wheel, from ready queues, from the disk; and nothing else goes."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tests.node.state.solo import HOUR_0, Solo
from tickwheel.node.state import sequence
from tickwheel.storage.blocks import BLOCK_BYTES
from tickwheel.wheel.engine import CancelOutcome
from tickwheel.wheel.units import HOUR_MS, UNIT


def hour_of_messages(solo: Solo, count: int = 200, payload: bytes = b"x" * 100) -> None:
    """Messages due evenly over the next hour."""
    start_ms = solo.now_ms
    solo.publish([start_ms + number * HOUR_MS // count for number in range(count)], payload)


def test_disk_use_stays_bounded_under_a_steady_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty hours of messages, settled and removed as the master would: the disk holds what three hours hold."""
    monkeypatch.setattr(sequence, "SEGMENT_BYTES", BLOCK_BYTES)
    solo = Solo()
    solo.create("g")
    sizes = []
    for hour in range(60):
        hour_of_messages(solo, 600)
        for part in range(4):
            solo.dispatch(solo.now_ms + HOUR_MS // 4)
            while solo.settle():
                pass
            solo.pump()
            if part % 2:
                solo.checkpoint()
        solo.remove(min(solo.state.removable_hours(), HOUR_0 + hour), forced_below=0)
        if hour % 20 == 7:
            solo.crash()
        sizes.append(solo.bytes_on_disk())
    assert max(sizes[5:]) < 4 * 600 * 200 + 40_000, sizes
    assert max(sizes[40:]) <= 1.2 * max(sizes[5:20])
    assert solo.state.removed_unsettled == 0
    assert solo.state.hour_min_kept == HOUR_0 + 59


@pytest.mark.parametrize("seed", range(12))
def test_any_history_with_removal_is_what_its_account_says(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merges, checkpoints, removals and power losses in any order: all that is kept can be read, digests are equal."""
    monkeypatch.setattr(sequence, "SEGMENT_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(sequence, "KEEP_BYTES", 4_096)
    monkeypatch.setattr(sequence, "PIECE_BYTES", 2_048)
    monkeypatch.setattr(sequence, "CAPACITY_LEAST", 16)
    rng = Random(seed)
    solo = Solo(seed)
    solo.create("g", "h")

    def remove() -> None:
        hour = solo.now_ms // HOUR_MS
        solo.remove(hour - rng.randrange(2), forced_below=rng.choice((0, 0, hour - 3)))

    def dispatch() -> None:
        solo.dispatch(solo.now_ms + rng.choice((1_000, HOUR_MS // 3, 2 * HOUR_MS)))

    steps = [
        lambda: hour_of_messages(solo, rng.choice((1, 30, 300)), b"%d" % rng.getrandbits(60) * rng.choice((1, 40))),
        lambda: hour_of_messages(solo, 40),
        dispatch,
        dispatch,
        lambda: solo.settle(rng.choice((1, 2)), limit=rng.choice((7, 500))),
        lambda: solo.settle(rng.choice((1, 2)), limit=rng.choice((7, 500))),
        lambda: solo.bury(3),
        lambda: solo.retry(rng.choice((2, 60)), rng.choice((1, 60_000, 3 * HOUR_MS)), rng.choice((1, 2))),
        solo.pump,
        remove,
        lambda: solo.checkpoint(rng.choice((solo.pump, remove, dispatch, lambda: None))),
        solo.crash,
    ]
    for _ in range(120):
        rng.choice(steps)()
    solo.crash()
    assert solo.state.hour_min_kept > 0


def test_a_removal_that_meets_a_merge_is_no_damage() -> None:
    """A merge began before its hours were removed and a checkpoint deleted their files: it goes on, nothing is left."""
    solo = Solo()
    solo.create("g")
    for _ in range(2):  # the second merge appends to files that are there
        hour_of_messages(solo, 300)
        solo.pump()
    hour_of_messages(solo, 300)
    merge = next(job for job in solo.wheel.jobs(0) if job.kind == "merge")
    solo.dispatch(solo.now_ms + 2 * HOUR_MS)
    while solo.settle():
        pass
    solo.remove(HOUR_0 + 2, forced_below=0)
    assert solo.state.hour_min_kept == HOUR_0 + 2
    solo.checkpoint()
    merge.run()
    solo.wheel.finish(merge)
    solo.checkpoint()
    assert not [name for name in solo.disk.list("wheel/hours") if int(name) < HOUR_0 + 2]
    solo.crash()


def test_a_crash_behind_the_checkpoint_leaves_no_files() -> None:
    """The manifest that forgot an hour was durable, its files were not removed yet: the next start removes them."""
    solo = Solo()
    solo.create("g")
    hour_of_messages(solo, 300)
    solo.pump()
    solo.checkpoint()
    assert solo.disk.list("wheel/hours")
    solo.dispatch(solo.now_ms + 2 * HOUR_MS)
    while solo.settle():
        pass
    solo.remove(HOUR_0 + 1, forced_below=0)
    solo.checkpoint(remove_old=False)
    solo.disk.kill()
    solo.restart()
    assert not solo.disk.list("wheel/hours")
    assert len(solo.disk.list("wheel/runs")) == 1
    assert len(solo.disk.list("state/windows")) == 1


def test_a_group_created_meanwhile_keeps_its_hours() -> None:
    """The master saw everything settled; before its removal is applied a group comes that starts earliest."""
    solo = Solo()
    solo.create("g")
    hour_of_messages(solo, 20)
    solo.dispatch(solo.now_ms + 2 * HOUR_MS)
    solo.settle()
    below = solo.state.removable_hours()
    assert below == HOUR_0 + 2
    solo.group("later")
    assert solo.remove(below, forced_below=0).unsettled_removed == 0
    assert solo.state.hour_min_kept == HOUR_0
    assert solo.settle(2) == 20


def test_a_topic_without_a_group_retains_until_retention_is_over() -> None:
    """Then what no group ever saw is counted, and a group created later starts at what is still there."""
    solo = Solo()
    solo.create()
    for _ in range(3):
        hour_of_messages(solo, 10)
        solo.dispatch(solo.now_ms + HOUR_MS)
    assert solo.state.removable_hours() == HOUR_0
    assert solo.remove(HOUR_0 + 2, forced_below=HOUR_0 + 2).unsettled_removed == 20
    assert solo.state.removed_unsettled == 20
    solo.group("late")
    assert solo.settle(1) == 10
    solo.crash()


def test_dead_letters_outlive_their_hours_but_not_the_retention() -> None:
    """They hold no hour and keep their payloads; when the retention is over for them they go and are counted."""
    solo = Solo()
    solo.create("g")
    hour_of_messages(solo, 10)
    solo.dispatch(solo.now_ms + HOUR_MS)
    solo.bury(4)
    solo.settle()
    hour_of_messages(solo, 10)
    solo.dispatch(solo.now_ms + 2 * HOUR_MS)
    solo.settle()
    assert solo.state.dead_letters_kept() == 4
    assert solo.state.removable_hours() == HOUR_0 + 3
    assert solo.remove(HOUR_0 + 1, forced_below=HOUR_0 + 1).unsettled_removed == 0
    solo.checkpoint()
    solo.crash()
    group = solo.state._state.groups.get(1)
    assert group is not None
    assert [group.dead.content(letter) for _, letter in group.dead.page(0, 9)] == [(b"", b"x" * 100)] * 4
    assert solo.remove(HOUR_0 + 2, forced_below=HOUR_0 + 2).unsettled_removed == 4
    assert solo.state.dead_letters_kept() == 0
    solo.checkpoint()
    solo.crash()
    assert solo.state.dead_letters_kept() == 0


def test_questions_about_removed_hours_have_answers() -> None:
    """Look-up, cancel, move, records, scan, count, settlement: definite answers, also while files go under a reader."""
    solo = Solo()
    solo.create("g")
    ids = solo.publish([solo.now_ms + 1_000 * n for n in range(300)], b"y" * 90)
    solo.pump()
    subscription = solo.state.subscription(1, 1)
    assert subscription is not None
    moved = ids[5]
    successor = np.zeros(1, UNIT)
    successor["due_requested_ms"] = solo.now_ms + 5 * HOUR_MS
    successor["size"] = 1
    assert solo.wheel.cancel(ids[4], solo.now_ms + 4_000) is CancelOutcome.CANCELLED
    assert solo.wheel.move(moved, solo.now_ms + 5_000, successor, b"z")[0] is CancelOutcome.MOVED
    due_ms = solo.now_ms + 1_000
    solo.dispatch(solo.now_ms + 2 * HOUR_MS)
    positions, ready_ids, attempts = subscription.deliverable(0, 1_000)
    lookup = solo.wheel.reads.lookup(np.array(ids, np.uint64))
    lookup.run()
    reading = solo.wheel.reads.records(lookup.units[:10])
    solo.settle()
    solo.checkpoint()
    solo.remove(HOUR_0 + 1, forced_below=0)
    solo.checkpoint()
    # A worker that was to read it finds no file; one that comes later is told at once.
    with pytest.raises(Exception, match="cannot open"):
        reading.run()
    assert solo.wheel.holdings.removed(np.array(ids[:1], np.uint64)).all()
    assert solo.wheel.reads.records(lookup.units[:10]).missing
    again = solo.wheel.reads.lookup(np.array([*ids[:5], moved], np.uint64))
    again.run()
    assert again.found.tolist() == [False] * 5 + [True]
    assert solo.wheel.cancel(ids[1], due_ms) is CancelOutcome.NOT_FOUND
    assert solo.wheel.cancel(ids[4], due_ms) is CancelOutcome.NOT_FOUND
    assert solo.wheel.move(ids[1], due_ms, successor.copy(), b"z")[0] is CancelOutcome.NOT_FOUND
    assert solo.wheel.cancel(moved, due_ms) is CancelOutcome.CANCELLED
    scan = solo.wheel.reads.scan(0, solo.now_ms + 10 * HOUR_MS, None, 100)
    scan.run()
    assert not len(scan.units)
    count = solo.wheel.reads.count(0, solo.now_ms + 10 * HOUR_MS, HOUR_MS)
    count.run()
    assert count.buckets == []
    # Late settlements of what is gone change nothing and read nothing.
    result, changed = subscription.settle(1, attempts, subscription.find(ready_ids, positions))
    assert not len(changed) and not result.unknown
    result, changed = subscription.settle(1, attempts, subscription.find(ready_ids, None))
    assert not len(changed) and result.unknown == len(ready_ids)


def test_retention_begins_with_the_dispatch() -> None:
    """What was long due when it was scheduled is removed when its dispatch is as old as the retention, not before."""
    solo = Solo()
    solo.create("g")
    late = solo.publish([solo.now_ms - 90 * HOUR_MS] * 5, b"late")
    solo.dispatch(solo.now_ms)
    dispatched = solo.now_ms // HOUR_MS
    solo.now_ms += 30 * HOUR_MS
    solo.publish([solo.now_ms], b"in time")
    solo.dispatch(solo.now_ms + 1)
    solo.checkpoint()
    solo.crash()
    assert solo.remove(dispatched, forced_below=dispatched).hour_min_kept <= late[0] >> 32
    assert solo.state.removed_unsettled == 0
    assert solo.remove(dispatched + 1, forced_below=dispatched + 1).hour_min_kept == dispatched + 1
    assert solo.state.removed_unsettled == 5
