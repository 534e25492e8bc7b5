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


def test_a_master_gives_up_before_others_may_elect() -> None:
    """Late answers do not make it wait longer: a slave that was never late would elect another meanwhile."""
    lone = Lone()
    term = lone.lead()
    for gap_ms in (50, 300, 50):
        lone.run(gap_ms)
        for peer in lone.peers.values():
            peer.answer(term, lone.journal.last_index + 1)
    lone.run(lone.config.election_timeout_ms_min)
    assert lone.log.status().role is not Role.MASTER


def test_what_is_added_has_a_bound_and_an_outage_adds_nothing() -> None:
    lateness = Lateness(RaftConfig())
    lateness.note(701 * MS, 1)
    assert lateness.added_ns(1) == 0
    lateness.note(690 * MS, 1)
    assert lateness.added_ns(1) == 600 * MS
