"""A busy machine is not a lost master: a node waits longer where frames have come late, and only there."""

from __future__ import annotations

from tests.replication.lone import MS, STEP_MS, Lone
from tickwheel.replication.campaign import WINDOW_NS, Lateness
from tickwheel.replication.config import RaftConfig
from tickwheel.replication.log import Role

TERM = 3


def follow(lone: Lone, gaps_ms: list[int]) -> None:
    """b leads and is heard after each of `gaps_ms`."""
    lone.peers["b"].heartbeat(TERM, 0)
    for gap_ms in gaps_ms:
        lone.run(gap_ms)
        lone.peers["b"].heartbeat(TERM, 0)
    lone.drain()


def asks_within(lone: Lone, ms: int) -> bool:
    """Whether the node, which hears nothing, wants to be elected in the next `ms`."""
    lone.run(ms)
    return bool(lone.sent_of("ping"))


def test_a_quiet_cluster_replaces_its_master_as_quickly_as_configured() -> None:
    lone = Lone()
    follow(lone, [50, 60, 50, 190, 50])
    assert asks_within(lone, lone.config.election_timeout_ms_max + 2 * STEP_MS)


def test_a_slave_whose_master_pauses_waits_twice_the_longest_pause() -> None:
    lone = Lone()
    follow(lone, [50, 350, 50, 50])
    assert not asks_within(lone, 2 * 350 - 2 * STEP_MS)
    added_ms = 2 * 350 - lone.config.election_timeout_ms_min
    assert asks_within(lone, lone.config.election_timeout_ms_max + added_ms - 2 * 350 + 4 * STEP_MS)


def test_a_pause_is_forgotten() -> None:
    lone = Lone()
    follow(lone, [50, 350] + [50] * (2 * WINDOW_NS // (50 * MS) + 2))
    assert asks_within(lone, lone.config.election_timeout_ms_max + 2 * STEP_MS)


def test_the_pause_before_a_new_master_is_no_sign_of_a_busy_machine() -> None:
    lone = Lone()
    lone.peers["b"].heartbeat(TERM, 0)
    lone.run(390)
    lone.peers["c"].heartbeat(TERM + 1, 0)
    lone.run(50)
    lone.peers["c"].heartbeat(TERM + 1, 0)
    lone.drain()
    assert asks_within(lone, lone.config.election_timeout_ms_max + 2 * STEP_MS)


def answers(lone: Lone, term: int, gaps_ms: list[int]) -> None:
    """The node leads, and both slaves answer after each of `gaps_ms`."""
    for gap_ms in gaps_ms:
        lone.run(gap_ms)
        for peer in lone.peers.values():
            peer.answer(term, lone.journal.last_index + 1)


def leads(lone: Lone) -> bool:
    return lone.log.status().role is Role.MASTER


def test_a_master_whose_slaves_answer_in_time_gives_up_as_quickly_as_configured() -> None:
    lone = Lone()
    answers(lone, lone.lead(), [50, 60, 50, 150, 50])
    lone.run(lone.config.fallback_ms)
    assert leads(lone)
    lone.run(lone.config.append_period_ms + 2 * STEP_MS)
    assert not leads(lone)


def test_a_master_whose_slaves_pause_waits_twice_the_longest_pause_without_its_lease() -> None:
    lone = Lone()
    answers(lone, lone.lead(), [50, 300, 50])
    lone.run(lone.config.lease_ms + lone.config.append_period_ms)
    assert not lone.log.lease_held()
    lone.run(2 * 250 - lone.config.lease_ms - lone.config.append_period_ms)
    assert leads(lone)
    lone.run(3 * lone.config.append_period_ms)
    assert not leads(lone)


def test_a_master_that_stood_still_itself_asks_before_it_gives_up() -> None:
    lone = Lone()
    term = lone.lead()
    answers(lone, term, [50, 50])
    lone.clock.now_ns += lone.config.election_timeout_ms_max * MS
    lone.run(STEP_MS)
    assert leads(lone) and not lone.log.lease_held()
    answers(lone, term, [STEP_MS])
    assert leads(lone) and lone.log.lease_held()


def test_a_slave_whose_connection_broke_is_silent() -> None:
    """No question can be sent to it, and it does not count as one that has answered them all."""
    lone = Lone()
    answers(lone, lone.lead(), [50, 50])
    for peer_id in lone.peers:
        lone.log.peer_disconnected(peer_id)
    lone.run(lone.config.fallback_ms + 2 * lone.config.append_period_ms)
    assert not leads(lone)


def test_what_is_added_has_a_bound_and_an_outage_adds_nothing() -> None:
    config = RaftConfig()
    lateness = Lateness(config, config.election_timeout_ms_min)
    lateness.note(701 * MS, 1)
    assert lateness.added_ns(1) == 0
    lateness.note(690 * MS, 1)
    assert lateness.added_ns(1) == 600 * MS
