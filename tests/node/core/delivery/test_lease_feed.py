"""The sync of leases: each slave hears of every lease, whatever is lost, and of none again without need."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tickwheel.node.core.delivery import heard_leases, lease_feed
from tickwheel.node.core.delivery.heard_leases import HeardLeases
from tickwheel.node.core.delivery.lease_feed import RANGES_PER_SYNC_MAX, LeaseFeed
from tickwheel.node.core.delivery.leases import ChannelKey, Lease, LeaseCopy, ranges_of
from tickwheel.proto.peer_pb2 import LeaseRange


def lease(number: int) -> Lease:
    """The lease of one message, in a topic of its own."""
    return Lease((1, number), np.array([7], np.uint64), np.ones(1, np.uint32), 1_000 + number, 5)


class Peers:
    """A master's feed and slaves behind connections that are in order. Each has the topics that it heard of."""

    def __init__(self, *names: str) -> None:
        self.given: list[Lease] = []
        self.feed = LeaseFeed(lambda: self.given)
        self.known: dict[str, set[int]] = {name: set() for name in names}
        self.under_way: dict[str, deque[tuple[int, list[LeaseRange]]]] = {name: deque() for name in names}
        self.answers: dict[str, deque[int]] = {name: deque() for name in names}
        self.number = 0

    def give(self, count: int) -> None:
        """Consumers get so many messages."""
        for _ in range(count):
            self.given.append(lease(len(self.given)))
            self.feed.add(self.given[-1])

    def send(self, name: str, *, fits: bool = True) -> list[LeaseRange]:
        """The next sync leaves, or does not since the connection takes no more."""
        self.number += 1
        ranges, _ = self.feed.for_peer(name, self.number)
        if fits:
            self.under_way[name].append((self.number, ranges))
        else:
            self.feed.unsent(name)
        return ranges

    def arrive(self, name: str) -> None:
        """The oldest sync arrives; its answer leaves."""
        if self.under_way[name]:
            number, ranges = self.under_way[name].popleft()
            self.known[name].update(r.topic_id for r in ranges)
            self.answers[name].append(number)

    def answer(self, name: str) -> None:
        """The oldest answer arrives."""
        if self.answers[name]:
            self.feed.acknowledged(name, self.answers[name].popleft())

    def cut(self, name: str) -> None:
        """The connection breaks, and the slave starts again without what it knew."""
        self.under_way[name].clear()
        self.answers[name].clear()
        self.known[name].clear()
        self.feed.forget_peer(name)

    def settle(self, name: str) -> None:
        """Syncs go both ways, undisturbed."""
        for _ in range(4):
            self.send(name)
            while self.under_way[name]:
                self.arrive(name)
            while self.answers[name]:
                self.answer(name)


def test_a_burst_over_many_topics_does_not_wait_for_answers() -> None:
    """Syncs go on where the last one ended: the slave is not behind by a round trip for each of them."""
    peers = Peers("b")
    peers.settle("b")
    peers.give(3 * RANGES_PER_SYNC_MAX)
    told = [r.topic_id for _ in range(3) for r in peers.send("b")]
    assert told == list(range(3 * RANGES_PER_SYNC_MAX))
    assert not peers.send("b") and not peers.feed.all_heard("b")
    for _ in range(4):
        peers.arrive("b")
        peers.answer("b")
    assert peers.feed.all_heard("b")


def test_the_whole_table_is_told_once_to_a_slave_that_is_slow_to_answer() -> None:
    """Putting it together takes the master's time, and joining it the slave's: many times over could cost the
    mastership, and then there is one more table to tell."""
    peers = Peers("b")
    peers.give(100)
    assert len(peers.send("b")) == 100
    peers.give(1)
    assert [len(peers.send("b")) for _ in range(3)] == [1, 0, 0]


def test_a_lease_that_was_settled_before_the_sync_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to one slave nor to another, and whoever takes over waits for no answer. The newest of many given out
    between two syncs are told like the others."""
    monkeypatch.setattr(lease_feed, "GIVEN_MAX", 3)
    peers, floors = Peers("b", "c"), {number: 8 for number in range(20) if number % 5}
    peers.feed = LeaseFeed(lambda: peers.given, lambda key: floors.get(key[1], 7))
    for name in "bc":
        peers.settle(name)
    peers.give(20)
    assert not peers.feed.all_heard("b"), "the newest may have to be told"
    assert [[r.topic_id for r in peers.send(name)] for name in "bc"] == [[0, 5, 10, 15]] * 2
    peers.settle("b")
    assert peers.feed.all_heard("b")


def test_a_lost_sync_is_told_again() -> None:
    """The answer to a later one tells of it."""
    peers = Peers("b")
    peers.settle("b")
    peers.give(2)
    peers.send("b")
    peers.under_way["b"].clear()
    peers.give(1)
    peers.send("b")
    peers.arrive("b")
    peers.answer("b")
    assert not peers.feed.all_heard("b")
    assert [r.topic_id for r in peers.send("b")] == [0, 1, 2]


def test_a_sync_that_could_not_be_sent_is_told_with_the_next_one() -> None:
    """At once: if an election came first, consumers would get these messages again."""
    peers = Peers("b")
    peers.settle("b")
    peers.give(2)
    peers.send("b", fits=False)
    assert [r.topic_id for r in peers.send("b")] == [0, 1]


def test_a_slave_that_is_too_far_behind_gets_the_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_feed, "EVENTS_MAX", 100)
    peers = Peers("b", "c")
    peers.settle("b")
    peers.settle("c")
    peers.give(101)
    assert len(peers.send("b")) == 101


def test_what_is_given_out_does_not_wait_for_the_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tens of thousands of leases that takes seconds, and an election meanwhile would bring it again."""
    monkeypatch.setattr(lease_feed, "TABLE_RANGES_PER_SYNC_MAX", 10)
    peers = Peers("b")
    peers.give(100)
    peers.send("b")
    peers.give(3)
    assert {100, 101, 102} <= {r.topic_id for r in peers.send("b")}


@pytest.mark.parametrize("lost", [0, 7])
def test_the_whole_table_is_told_however_much_is_given_out(monkeypatch: pytest.MonkeyPatch, lost: int) -> None:
    """Between two syncs more than is kept for slaves that are behind, and every so often a sync is lost: the table does
    not restart: the slave hears of everything that was out, and of all events in the end."""
    monkeypatch.setattr(lease_feed, "EVENTS_MAX", 6)
    monkeypatch.setattr(lease_feed, "TABLE_RANGES_PER_SYNC_MAX", 10)
    peers = Peers("b")
    peers.give(200)
    for number in range(1, 41):
        peers.send("b")
        if lost and not number % lost:
            peers.under_way["b"].pop()
        else:
            peers.arrive("b")
            peers.answer("b")
        peers.give(8 if number < 35 else 0)
    assert set(range(200)) <= peers.known["b"]
    for _ in range(20):
        peers.settle("b")
    assert peers.feed.all_heard("b") and len(peers.known["b"]) == len(peers.given)


def test_few_pieces_are_kept_for_a_slave_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_feed, "TABLE_RANGES_PER_SYNC_MAX", 10)
    peers = Peers("b")
    peers.give(200)
    told = [len(peers.send("b")) for _ in range(20)]
    assert sum(told) == 10 * lease_feed.PIECES_UNANSWERED_MAX == sum(map(len, peers.feed._told["b"].pieces))
    for _ in range(20):
        peers.settle("b")
    assert peers.feed.all_heard("b") and len(peers.known["b"]) == 200


STEPS = st.one_of(
    st.tuples(st.just("give"), st.integers(1, 4)),
    st.tuples(st.sampled_from(["send", "refuse", "arrive", "answer", "lose", "unheard", "cut"]), st.sampled_from("bc")),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(STEPS, max_size=60))
def test_all_are_heard_of_whatever_is_lost(steps: list[tuple[str, int | str]]) -> None:
    """The master never counts a lease as heard that the slave has not heard of; once nothing is lost any more, the
    slave hears of all."""
    limits = lease_feed.EVENTS_MAX, lease_feed.RANGES_PER_SYNC_MAX, lease_feed.UNANSWERED_MAX, lease_feed.GIVEN_MAX
    lease_feed.EVENTS_MAX, lease_feed.RANGES_PER_SYNC_MAX, lease_feed.UNANSWERED_MAX, lease_feed.GIVEN_MAX = 6, 2, 3, 2
    try:
        peers = Peers("b", "c")
        for kind, what in steps:
            if isinstance(what, int):
                peers.give(what)
            elif kind == "send":
                peers.send(what)
            elif kind == "refuse":
                peers.send(what, fits=False)
            elif kind == "arrive":
                peers.arrive(what)
            elif kind == "answer":
                peers.answer(what)
            elif kind == "lose" and peers.under_way[what]:
                peers.under_way[what].popleft()
            elif kind == "unheard" and peers.answers[what]:
                peers.answers[what].popleft()
            elif kind == "cut":
                peers.cut(what)
            for name, known in peers.known.items():
                assert not peers.feed.all_heard(name) or len(known) == len(peers.given)
        for name, known in peers.known.items():
            for _ in range(10):
                peers.settle(name)
            assert peers.feed.all_heard(name) and len(known) == len(peers.given)
    finally:
        lease_feed.EVENTS_MAX, lease_feed.RANGES_PER_SYNC_MAX, lease_feed.UNANSWERED_MAX, lease_feed.GIVEN_MAX = limits


RANGES = st.builds(
    lambda topic, first, attempts, until: LeaseRange(
        group_id=1,
        topic_id=topic,
        first_position=first,
        count=len(attempts),
        attempts=b"" if set(attempts) == {1} else np.array(attempts, "<u4").tobytes(),
        until_ms=until,
    ),
    st.integers(1, 3),
    st.integers(0, 12),
    st.lists(st.integers(1, 3), min_size=1, max_size=5),
    st.integers(10, 13),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(RANGES, max_size=20), st.sampled_from([0, 1_000]))
def test_where_leases_overlap_the_highest_attempt_wins_then_the_latest_end(
    ranges: list[LeaseRange], least: int
) -> None:
    """Whether they were joined when they were heard or not; each channel has its own."""
    expected: dict[tuple[int, int], tuple[int, int]] = {}
    for r in ranges:
        attempts = np.frombuffer(r.attempts, "<u4").tolist() or [1] * r.count
        for place, attempt in enumerate(attempts):
            key = (r.topic_id, r.first_position + place)
            expected[key] = max(expected.get(key, (0, 0)), (attempt, r.until_ms))
    heard = HeardLeases()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heard_leases, "JOIN_MESSAGES_MIN", least)
        heard.hear(ranges)
    held = heard.held(0, lambda key: 0)
    found = [
        ((one.channel[1], position), (attempt, one.until_ms))
        for one in held
        for position, attempt in zip(one.positions.tolist(), one.attempts.tolist(), strict=True)
    ]
    assert len(found) == len(expected) and dict(found) == expected
    assert all((np.diff(one.positions.astype(np.int64)) > 0).all() for one in held)
    assert sum(r.count for one in held for r in ranges_of(one)) == len(expected)


def test_what_peers_claim_is_merged_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand ranges of a million messages each would be merged at once, and fill the memory."""
    ranges = [
        LeaseRange(group_id=1, topic_id=topic, first_position=first, count=3, until_ms=2_000)
        for topic in range(20)
        for first in (5, 7)
    ]

    def held() -> list[tuple[tuple[int, int], list[int]]]:
        heard = HeardLeases()
        heard.hear(ranges)
        return [(lease.channel, lease.positions.tolist()) for lease in heard.held(1_000, lambda key: 0)]

    whole = held()
    together, sizes = heard_leases._merged_together, []

    def counted(some: Sequence[LeaseRange | LeaseCopy], *, coarse: bool) -> dict[ChannelKey, list[Lease]]:
        sizes.append(sum(map(heard_leases._messages_of, some)))
        return together(some, coarse=coarse)

    monkeypatch.setattr(heard_leases, "MERGED_MESSAGES_MAX", 13)
    monkeypatch.setattr(heard_leases, "_merged_together", counted)
    assert held() == whole == [((1, topic), [5, 6, 7, 8, 9]) for topic in range(20)]
    assert max(sizes) <= 13
