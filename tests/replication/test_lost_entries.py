"""A log has lost entries that it had acknowledged: its disk did not keep them, or an older copy was put back."""

from __future__ import annotations

import pytest

from tests.replication.lone import STEP_MS, Lone, committed
from tickwheel.proto.peer_pb2 import PeerFrame, Ping, Pong
from tickwheel.replication.log import Role


def test_a_slave_that_lost_what_it_acknowledged_is_told_of() -> None:
    """Once, with what it has lost; and nothing of that counts for a majority any more."""
    lone = Lone(others=("b", "c", "d", "e"))
    term = lone.lead()
    outcome = lone.propose(b"x")
    index = lone.log.status().last_index
    lone.run(STEP_MS)
    lone.peers["b"].answer(term, index + 1)
    for _ in range(2):
        lone.run(STEP_MS)
        lone.peers["b"].answer(term, 1, success=False, reset=True, last_index=index - 1)
    assert lone.forgotten == [("b", index - 1, index)]
    lone.peers["c"].answer(term, index + 1)
    lone.run(STEP_MS)
    assert not outcome, "two disks of five have it: b counted as the third"
    assert lone.sent_of("append_entries", "b")[-1].append_entries.entries, "b gets it again"
    lone.peers["b"].answer(term, index + 1)
    lone.run(STEP_MS)
    assert committed(outcome) and len(lone.forgotten) == 1


@pytest.mark.parametrize("last_index", [None, 0, 5])
def test_a_slave_that_asks_for_earlier_entries_has_lost_nothing_by_that(last_index: int | None) -> None:
    """After a broken connection it asks behind its commit index, whatever it has. An older node does not say."""
    lone = Lone()
    term = lone.lead()
    lone.propose(b"x")
    index = lone.log.status().last_index
    lone.run(STEP_MS)
    lone.peers["b"].answer(term, index + 1)
    said = None if last_index is None else index + last_index
    lone.peers["b"].answer(term, 1, success=False, reset=True, last_index=said)
    assert not lone.forgotten and lone.engine.match_index("b") == index


def test_a_slave_that_asks_for_earlier_entries_says_what_it_has() -> None:
    """Its master compares that with what it acknowledged."""
    lone = Lone()
    lone.follow("b", 1, 3)
    lone.drain()
    lone.peers["b"].append(1, (9, 1), [])
    [answer] = lone.sent_of("append_result", "b")
    assert answer.append_result.reset and answer.append_result.last_log_index == 3


def heartbeat(lone: Lone) -> None:
    """Of the master, who has committed five entries."""
    lone.peers["b"].heartbeat(1, 5)


def ping(lone: Lone) -> None:
    """Of a member that has them and would lead."""
    asked = Ping(sent_ns=lone.clock.now_ns, last_log_index=5, last_log_term=1, commit_index=5)
    lone.peers["c"].send(PeerFrame(ping=asked), 1)


def pong(lone: Lone) -> None:
    """Of a member that has them."""
    said = Pong(echo_sent_ns=lone.clock.now_ns, last_log_index=5, last_log_term=1, commit_index=5)
    lone.peers["c"].send(PeerFrame(pong=said), 1)


@pytest.mark.parametrize("heard", [heartbeat, ping, pong])
def test_nobody_leads_without_what_is_known_to_be_committed(heard: object) -> None:
    """P1: two logs that lost the same entries made a majority, though this node had heard that they are committed."""
    lone = Lone()
    lone.follow("b", 1, 3, commit=3)
    assert callable(heard)
    heard(lone)
    lone.drain()
    lone.run(20 * lone.config.election_timeout_ms_max)
    assert lone.log.status().role is Role.SLAVE and not lone.sent_of("ping"), "it lacks two entries itself"
    asked = Ping(sent_ns=lone.clock.now_ns, last_log_index=4, last_log_term=1)
    lone.peers["c"].send(PeerFrame(ping=asked), 1)
    assert lone.sent_of("pong")[-1].pong.hears_master
    lone.peers["c"].ask_for_vote(2, (4, 1))
    lone.run(STEP_MS)
    assert lone.term == 2 and not lone.sent_of("vote")
    lone.peers["c"].ask_for_vote(3, (5, 1))
    lone.run(STEP_MS)
    assert lone.sent_of("vote")[-1].vote.granted


def test_it_stands_again_once_it_has_all() -> None:
    """And no tick is wanted before, or it would spin."""
    lone = Lone()
    lone.follow("b", 1, 3, commit=3)
    lone.peers["b"].heartbeat(1, 5)
    lone.run(20 * lone.config.election_timeout_ms_max)
    lone.clock.now_ns = lone.log.tick()
    assert lone.log.tick() - lone.clock.now_ns > 100_000_000
    lone.peers["b"].append(1, (3, 1), [(4, 1, b"\x004"), (5, 1, b"\x005")], commit=5)
    lone.drain()
    lone.run(20 * lone.config.election_timeout_ms_max)
    assert lone.sent_of("ping")
