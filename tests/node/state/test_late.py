"""Late settlements: what they are answered, and that a search costs little however many topics a settlement names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.counting import lines_of
from tests.node.state.driver import settle_command
from tests.node.state.solo import Solo
from tickwheel.node.state import retrying, subscription, targets
from tickwheel.node.state.dead_letters import DeadLetters
from tickwheel.node.state.groups import WaitingRetries
from tickwheel.node.state.results import SettleResult
from tickwheel.node.state.targets import Targets
from tickwheel.proto.log_pb2 import SETTLE_ACK, SETTLE_DEAD, SETTLE_RETRY, Command

COUNT = 60


@pytest.fixture
def solo() -> Solo:
    """Of 60 messages 10 are dead, 10 came again, 10 wait to come again, and 30 were acknowledged."""
    made = Solo()
    made.create("g", "h")
    made.publish([made.now_ms + 10 * n for n in range(COUNT)], b"payload")
    made.dispatch(made.now_ms + 1_000)
    rows = [1] * 10
    made.apply(settle_command(SETTLE_DEAD, made.ready[:10], rows, range(10)))
    again = [made.now_ms + 1_000] * 10
    made.apply(settle_command(SETTLE_RETRY, made.ready[10:20], rows, range(10, 20), due_ms=again))
    made.dispatch(made.now_ms + 2_000)
    later = [made.now_ms + 60_000] * 10
    made.apply(settle_command(SETTLE_RETRY, made.ready[20:30], rows, range(20, 30), due_ms=later))
    made.apply(settle_command(SETTLE_ACK, made.ready[30:COUNT], [1] * 30, range(30, COUNT)))
    return made


def together(solo: Solo, rows: list[list[int]], *, positions: bool = True) -> list[tuple[int, int]]:
    """(settled, stale) of each part of one settlement, which names these places."""
    command = Command()
    for places in rows:
        ids = [solo.ready[place] for place in places]
        part = settle_command(SETTLE_ACK, ids, [1] * len(ids), places if positions else None)
        command.settle.batches.append(part.settle.batches[0])
    result = solo.apply(command)[0]
    assert isinstance(result, SettleResult)
    return [(part.settled, part.stale) for part in result.parts]


@pytest.mark.parametrize("positions", [True, False])
def test_each_part_is_answered_as_alone(solo: Solo, positions: bool) -> None:
    """Whatever its order, and however often a message is named."""
    rows = [[0], [5, 40, 15], [45, 25], [29, 29, 31], [50, 59], [19], [9, 0]]
    expected = [(0, 1), (1, 2), (1, 1), (1, 2), (2, 0), (0, 1), (0, 2)]
    assert together(solo, rows, positions=positions) == expected
    assert [together(solo, [places], positions=positions)[0] for places in rows] == expected


def test_what_began_to_wait_in_the_same_command_is_seen(solo: Solo) -> None:
    """The list of what waits was read for the part before."""
    solo.publish([solo.now_ms + 10], b"payload")
    solo.dispatch(solo.now_ms + 20)
    last = len(solo.ready) - 1
    command = Command()
    for kind, place, due_ms in ((SETTLE_ACK, 25, None), (SETTLE_RETRY, last, [solo.now_ms]), (SETTLE_ACK, last, None)):
        part = settle_command(kind, [solo.ready[place]], [1], [place], due_ms=due_ms)
        command.settle.batches.append(part.settle.batches[0])
    result = solo.apply(command)[0]
    assert isinstance(result, SettleResult)
    assert [(part.settled, part.stale) for part in result.parts] == [(0, 1), (1, 0), (0, 1)]


def test_letters_that_are_gone_are_dead_no_more(solo: Solo) -> None:
    """Purged out of turn, their places in the list stay."""
    group = solo.state._state.groups.get(1)
    assert group is not None
    before = group.dead.version
    group.dead.remove([2, 5, 6])
    assert group.dead.version != before
    assert group.dead.newest_origins(6).tolist() == [solo.ready[place] for place in (4, 7, 8, 9)]
    assert together(solo, [[2], [4, 5, 7], [6]]) == [(1, 0), (1, 2), (1, 0)]


def counted(monkeypatch: pytest.MonkeyPatch, counts: Counter[str], owner: type, name: str) -> None:
    """Count the calls of a method, and the rows that it returns."""
    original: Callable[..., Any] = getattr(owner, name)

    def count(self: Any, *arguments: Any) -> Any:
        found = original(self, *arguments)
        counts[owner.__name__] += 1
        counts[f"{owner.__name__} rows"] += len(found)
        return found

    monkeypatch.setattr(owner, name, count)


def test_the_search_costs_the_same_for_one_part_and_for_hundreds(solo: Solo, monkeypatch: pytest.MonkeyPatch) -> None:
    """With lists of 16,384 rows, reading them for each of 4,096 parts kept every node from its heartbeats for 8 s."""
    counts: Counter[str] = Counter()
    counted(monkeypatch, counts, DeadLetters, "newest_origins")
    counted(monkeypatch, counts, WaitingRetries, "newest")
    counted(monkeypatch, counts, Targets, "newest")
    monkeypatch.setattr(retrying, "TARGETS_MAX", 35)
    answers = together(solo, [[0, 25], [30]] * 200)
    assert answers == [(0, 2), (1, 0)] * 200
    assert counts["DeadLetters"] == 1 and counts["WaitingRetries"] == 1
    assert counts["Targets rows"] == 35
    together(solo, [[0]])
    assert counts["DeadLetters"] == 1, "no letter came since: the next command reads none either"
    solo.apply(settle_command(SETTLE_DEAD, solo.ready[60:61], [1], [60]))
    assert together(solo, [[10]]) == [(0, 1)]
    assert counts["DeadLetters"] == 2


def test_positions_far_apart_are_found_without_what_lies_between(monkeypatch: pytest.MonkeyPatch, solo: Solo) -> None:
    """As if each were looked up alone; old ones, whose rows lie in files, too."""
    monkeypatch.setattr(targets, "APART", 3)
    topic = solo.state._state.topics.get(1)
    assert topic is not None
    kept = topic.ready.targets
    units = np.zeros(1, solo.wheel.fetch(np.array(solo.ready[:1], np.uint64), 1_000)[0].dtype)
    rng = Random(4)
    has = sorted(rng.sample(range(100, 4_000), 500))
    for position in has:
        units["origin_index"], units["target_group"] = position, 1
        kept.append(np.array([position], np.int64), units)
    read: Counter[str] = Counter()
    counted(monkeypatch, read, Targets, "between")
    for in_memory in (True, False):
        if not in_memory:
            monkeypatch.setattr(type(kept.rows), "held", lambda self: (self.count, self._buffer[:0]))
        for _ in range(50):
            wanted = np.array(rng.choices(range(100, 4_200), k=rng.choice((1, 2, 7))), np.int64)
            hits, rows = kept.of(wanted)
            assert sorted(hits.tolist()) == [place for place, one in enumerate(wanted.tolist()) if one in set(has)]
            assert rows["position"].tolist() == wanted[hits].tolist()
        if not in_memory:
            break
        read.clear()
    assert read["Targets rows"] < 50 * 7 * 2


def test_a_position_that_was_settled_long_ago_is_not_looked_up(solo: Solo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client could name a hundred thousand of them, each in a file of its own."""
    monkeypatch.setattr(subscription, "LOOK_BACK", 5)
    found = solo.state.subscription(1, 1)
    assert found is not None
    looked: list[int] = []
    original = Targets.of

    def of(self: Targets, positions: Any) -> Any:
        looked.extend(positions.tolist())
        return original(self, positions)

    monkeypatch.setattr(Targets, "of", of)
    together(solo, [list(range(60))])
    far = np.array([0, 3, 1 << 63, found.stop, found.stop - 1], np.uint64)
    found.as_logged(np.array(solo.ready[:5], np.uint64), np.ones(5, np.uint32), far)
    assert looked and min(looked) >= found.floor - 5 and max(looked) < found.stop


@pytest.mark.parametrize("positions", [True, False])
def test_a_settlement_of_many_messages_is_searched_with_arrays(positions: bool) -> None:
    """A hundred thousand without positions took every node a third of a second."""

    def lines(count: int) -> int:
        solo = Solo()
        solo.create("g")
        solo.publish([solo.now_ms + 10] * count, b"payload")
        solo.dispatch(solo.now_ms + 1_000)
        command = settle_command(SETTLE_ACK, solo.ready, [1] * count, range(count) if positions else None)
        return lines_of(lambda: solo.apply(command))

    assert lines(2_000) < lines(1_000) + 100
