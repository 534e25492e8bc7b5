"""Retries and dead letters as the log applies them: real wheel, simulated disk, crashes."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.node.state.driver import settle_command
from tests.node.state.solo import Solo
from tickwheel.node.state import machine, retrying, targets
from tickwheel.node.state.groups import Group, RetryPolicy
from tickwheel.node.state.results import SettleResult
from tickwheel.node.state.subscription import Subscription
from tickwheel.proto.log_pb2 import LEASE_EXPIRED, SETTLE_ACK, SETTLE_DEAD, SETTLE_RETRY
from tickwheel.wheel.units import HOUR_MS


@pytest.fixture
def solo() -> Solo:
    """Two groups, and six messages that were dispatched."""
    made = Solo()
    made.create("g", "h")
    made.publish([made.now_ms + 10 * n for n in range(6)], b"payload")
    made.dispatch(made.now_ms + 1_000)
    return made


def place_of(solo: Solo, group_id: int = 1) -> Subscription:
    """A group's place in the topic."""
    found = solo.state.subscription(group_id, 1)
    assert found is not None
    return found


def group_of(solo: Solo, group_id: int = 1) -> Group:
    """A group."""
    found = solo.state._state.groups.get(group_id)
    assert found is not None
    return found


def settle(solo: Solo, *arguments: object, **named: object) -> SettleResult:
    """One settlement of group 1."""
    result = solo.apply(settle_command(*arguments, **named))[0]  # type: ignore[arg-type]
    assert isinstance(result, SettleResult)
    return result


def test_a_retry_reaches_its_group_alone_with_id_and_count(solo: Solo) -> None:
    """Settled at its position at once, a copy of the record later, nothing for the other group; and after a crash."""
    first = solo.ready[:6]
    assert settle(solo, SETTLE_RETRY, first[:1], [1], [0], due_ms=[solo.now_ms + 5_000]).settled == 1
    solo.settle(1), solo.settle(2)
    assert place_of(solo).floor == 6, "a waiting retry holds no position"
    solo.checkpoint()
    solo.crash()
    solo.dispatch(solo.now_ms + 6_000)
    positions, ids, attempts = place_of(solo).deliverable(0, 10)
    assert positions.tolist() == [6] and attempts.tolist() == [1]
    units, records = solo.wheel.fetch(ids, 1_000)
    assert records == [b"payload"] and units["attempts"].tolist() == [1]
    assert not len(place_of(solo, 2).deliverable(0, 10)[0]), "the other group sees nothing of it"
    assert place_of(solo, 2).floor == 7
    named = place_of(solo).as_logged(np.array(first[:1], np.uint64), np.array([2], np.uint32), positions)
    assert [column.tolist() for column in named if column is not None] == [ids.tolist(), [1], [6]]
    searched = place_of(solo).as_logged(np.array(first[:1], np.uint64), np.array([2], np.uint32), None)
    assert (searched[0].tolist(), searched[1].tolist()) == (ids.tolist(), [1])
    stale = place_of(solo).as_logged(np.array(first[:1], np.uint64), np.array([1], np.uint32), None)
    assert stale[1].tolist() == [0], "the attempt before is stale"
    solo.crash()


def test_a_repeated_nack_is_stale_not_a_second_retry(solo: Solo) -> None:
    """The answer to a nack was lost in a failover and it comes again: one retry, however often."""
    columns = ([solo.ready[0]], [1], [0])
    due = [solo.now_ms + 1_000]
    assert settle(solo, SETTLE_RETRY, *columns, due_ms=due).settled == 1
    for positions in ([0], None):
        again = settle(solo, SETTLE_RETRY, [solo.ready[0]], [1], positions, due_ms=due)
        assert (again.settled, again.stale) == (0, 1)
    both = settle(solo, SETTLE_RETRY, [solo.ready[1]] * 2, [1, 1], [1, 1], due_ms=due * 2)
    assert both.taken == 2
    assert solo.wheel.pending == 2


@pytest.mark.parametrize("positions", [[0], None])
def test_a_late_acknowledgement_of_what_left_is_stale(solo: Solo, positions: list[int] | None) -> None:
    """Its lease ended and it comes again: nobody may be told that it is done."""

    def late() -> tuple[int, int]:
        result = settle(solo, SETTLE_ACK, solo.ready[:1], [1], positions)
        return result.settled, result.stale

    def repeat() -> tuple[int, int]:
        result = settle(solo, SETTLE_ACK, solo.ready[6:7], [1], [6])
        return result.settled, result.stale

    settle(solo, SETTLE_ACK, solo.ready[1:3], [1, 1], [1, 2])
    settle(solo, SETTLE_RETRY, solo.ready[:1], [1], [0], due_ms=[solo.now_ms + 1_000])
    assert late() == (0, 1), "it waits in the wheel"
    again = settle(solo, SETTLE_ACK, solo.ready[:3], [1, 1, 1], [0, 1, 2])
    assert (again.settled, again.stale) == (2, 1), "repeats of acknowledgements are what they were"
    solo.dispatch(solo.now_ms + 2_000)
    assert late() == (0, 1), "it has come again"
    assert repeat() == (1, 0) and late() == (0, 1), "and is done there, not here"
    assert repeat() == (1, 0)


def test_a_late_acknowledgement_of_a_dead_letter_is_stale(solo: Solo) -> None:
    """It was settled otherwise: it lies among the dead letters."""
    settle(solo, SETTLE_DEAD, solo.ready[:1], [1], [0])
    result = settle(solo, SETTLE_ACK, solo.ready[:2], [1, 1], [0, 1])
    assert (result.settled, result.stale) == (1, 1)


def test_a_mass_expiry_is_taken_in_bounded_pieces(solo: Solo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command copies so many messages and bytes at most; what it did not come to is as it was, and it says so."""
    ids, due = solo.ready, [solo.now_ms + 1_000] * 6
    monkeypatch.setattr(machine, "Budget", lambda: retrying.Budget(4, 1 << 20))
    result = settle(solo, SETTLE_RETRY, ids, [1] * 6, range(6), due_ms=due)
    assert (result.taken, result.settled) == (4, 4)
    monkeypatch.setattr(machine, "Budget", lambda: retrying.Budget(4, 1))
    result = settle(solo, SETTLE_RETRY, ids[4:], [1] * 2, range(4, 6), due_ms=due[4:])
    assert (result.taken, result.settled) == (1, 1), "one message is copied however large it is"
    assert place_of(solo).floor == 5


def test_deliveries_end_in_a_dead_letter(solo: Solo) -> None:
    """After attempts_max deliveries: with payload, cause, last words, times; kept when its hour is removed."""
    due_ms = solo.now_ms - 1_000
    for attempt in range(1, 16):
        position = len(solo.ready) - 1
        solo_id = [solo.ready[position]]
        settle(solo, SETTLE_RETRY, solo_id, [1], [position], due_ms=[solo.now_ms + HOUR_MS // 4], reason="not yet")
        assert group_of(solo).dead.count == 0, attempt
        solo.dispatch(solo.now_ms + HOUR_MS // 4 + 1)
    last = len(solo.ready) - 1
    died_ms = solo.now_ms
    settle(solo, SETTLE_RETRY, [solo.ready[last]], [1], [last], due_ms=[0], reason="gave up", cause=LEASE_EXPIRED)
    solo.settle(1), solo.settle(2)
    solo.remove(solo.state.removable_hours(), forced_below=0)
    solo.checkpoint()
    solo.crash()
    dead = group_of(solo).dead
    ((number, letter),) = dead.page(0, 10)
    assert dead.content(letter) == (b"gave up", b"payload")
    assert (number, int(letter["attempts"]), int(letter["cause"])) == (0, 16, LEASE_EXPIRED)
    assert int(letter["origin"]) == solo.ready[5]
    assert (int(letter["first_due_ms"]), int(letter["died_ms"])) == (due_ms + 50, died_ms)
    assert place_of(solo).backlog == 0


def test_dead_by_the_group_s_own_limit(solo: Solo) -> None:
    """A policy with two attempts: the second failure is the last."""
    group_of(solo).retry = RetryPolicy(attempts_max=2)
    settle(solo, SETTLE_RETRY, solo.ready[:1], [1], [0], due_ms=[solo.now_ms + 10])
    solo.dispatch(solo.now_ms + 100)
    settle(solo, SETTLE_RETRY, solo.ready[6:], [1], [6], due_ms=[solo.now_ms + 10])
    assert group_of(solo).dead.count == 1 and solo.wheel.pending == 0


def test_a_waiting_retry_holds_no_hour_and_loses_nothing(solo: Solo) -> None:
    """P1: the hour of the first delivery is removed while the retry waits two hours ahead; its payload is there."""
    assert solo.retry(1, 2 * HOUR_MS) == 1
    solo.settle(1), solo.settle(2)
    solo.publish([solo.now_ms + HOUR_MS], b"mover")
    solo.dispatch(solo.now_ms + HOUR_MS + 1)
    solo.settle(1), solo.settle(2)
    solo.remove(solo.state.removable_hours(), forced_below=0)
    assert solo.state.hour_min_kept == solo.now_ms // HOUR_MS
    solo.checkpoint()
    solo.crash()
    solo.dispatch(solo.now_ms + HOUR_MS)
    _, ids, _ = place_of(solo).deliverable(0, 10)
    assert solo.wheel.fetch(ids, 1_000)[1] == [b"payload"]


def test_what_retention_removed_is_counted_not_copied(solo: Solo) -> None:
    """A nack comes when its hour is gone: nothing is left to copy; the removal has counted it."""
    ids = list(solo.ready)
    solo.publish([solo.now_ms + HOUR_MS], b"mover")
    solo.dispatch(solo.now_ms + HOUR_MS + 1)
    hour = solo.now_ms // HOUR_MS
    assert solo.remove(hour, forced_below=hour).unsettled_removed == 12
    late = settle(solo, SETTLE_RETRY, ids[:1], [1], [0], due_ms=[solo.now_ms])
    assert (late.settled, late.stale, late.taken) == (0, 1, 1)
    assert solo.wheel.pending == 0 and group_of(solo).dead.count == 0


@pytest.mark.parametrize("seed", range(6))
def test_any_history_is_the_same_after_any_crash(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1, P8: nacks, deaths, acknowledgements, merges, checkpoints in any order: equal digest, every record there."""
    monkeypatch.setattr(targets, "CACHE_ROWS", 4)
    monkeypatch.setattr(targets, "CACHE_PIECES_MAX", 2)
    rng = Random(seed)
    solo = Solo(seed)
    solo.create("g", "h")

    def tell() -> None:
        """What each group should still get: every message, minus what it acknowledged or buried."""
        for group_id in (1, 2):
            place = place_of(solo, group_id)
            positions, ids, _ = place.deliverable(0, 1 << 20)
            units, _ = solo.wheel.fetch(ids, 1 << 30) if len(ids) else (np.zeros(0, [("target_group", "<u4")]), [])
            assert set(units["target_group"].tolist()) <= {0, group_id}, "another group's retry"
            assert place.backlog >= len(positions)

    steps = [
        lambda: solo.publish(
            sorted(solo.now_ms + rng.randrange(20_000) for _ in range(30)), b"%d" % rng.getrandbits(60)
        ),
        lambda: solo.dispatch(solo.now_ms + rng.choice((500, 5_000))),
        lambda: solo.dispatch(solo.now_ms + rng.choice((500, 5_000))),
        lambda: solo.retry(rng.randrange(1, 200), rng.choice((1, 700, 9_000)), rng.choice((1, 2))),
        lambda: solo.retry(rng.randrange(1, 20), rng.choice((1, 700, 9_000)), rng.choice((1, 2))),
        lambda: solo.settle(rng.choice((1, 2)), limit=rng.randrange(1, 60)),
        lambda: solo.settle(rng.choice((1, 2)), kind=SETTLE_DEAD, limit=3),
        solo.pump,
        solo.checkpoint,
        solo.crash,
        tell,
    ]
    for _ in range(100):
        rng.choice(steps)()
    solo.crash()
    while any(solo.settle(group_id, kind=SETTLE_ACK) for group_id in (1, 2)) or solo.wheel.pending:
        solo.dispatch(solo.now_ms + 30_000)
    assert all(place_of(solo, group_id).backlog == 0 for group_id in (1, 2))


def test_death_that_is_said_too_late_is_stale(solo: Solo) -> None:
    """The lease ran out before the consumer said dead: the message comes again, and the receipt says so."""
    settle(solo, SETTLE_RETRY, solo.ready[:1], [1], [0], due_ms=[solo.now_ms + 5_000])
    late = settle(solo, SETTLE_DEAD, solo.ready[:1], [1], [0])
    assert (late.settled, late.stale, group_of(solo).dead.count) == (0, 1, 0)


@pytest.mark.parametrize("named", [False, True], ids=["positions", "ids"])
def test_after_a_death_others_are_judged_by_the_window_as_it_is_then(solo: Solo, named: bool) -> None:
    """In a FIFO topic a death makes room at the window's end: what is named there counts in the same command, as
    earlier versions of a node apply it too."""
    topic = solo.state._state.topics.get(1)
    assert topic is not None
    topic.fifo = True
    group_of(solo).retry = RetryPolicy(attempts_max=1)
    place_of(solo).window_messages_max = 4
    rows = (solo.ready[:1] + solo.ready[4:5], [1, 1], None if named else [0, 4])
    result = settle(solo, SETTLE_RETRY, *rows, due_ms=[solo.now_ms + 10] * 2)
    assert (result.settled, result.unknown, group_of(solo).dead.count) == (2, 0, 1)
    assert place_of(solo).attempts_of(np.arange(6, dtype=np.uint64)).tolist() == [0, 1, 1, 1, 2, 1]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 2)), min_size=1, max_size=12),
    acked=st.sets(st.integers(0, 5)),
)
def test_rows_of_a_shared_batch_end_as_they_would_alone(rows: list[tuple[int, int]], acked: set[int]) -> None:
    """Nacks of several callers in one batch: each hears what it would have heard of a batch of its own."""
    ended = []
    for step in (len(rows), 1):
        made = Solo()
        made.create("g")
        made.publish([made.now_ms + 10 * n for n in range(6)], b"payload")
        made.dispatch(made.now_ms + 1_000)
        for place in acked:
            settle(made, SETTLE_ACK, [made.ready[place]], [1], [place])
        results = []
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            ids = [made.ready[place] if place < 6 else 12_345 for place, _ in part]
            columns = ids, [attempt for _, attempt in part], [place for place, _ in part]
            result = settle(made, SETTLE_RETRY, *columns, due_ms=[made.now_ms + 5_000] * len(part))
            results += [result.parts[0].of_rows(row, 1) for row in range(result.taken)]
        ended.append([(result.settled, result.stale, result.unknown) for result in results])
    assert ended[0] == ended[1]
    assert all(sum(outcome) == 1 for outcome in ended[0])
