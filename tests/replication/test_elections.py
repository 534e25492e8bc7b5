"""After the loss of a master: when slaves may vote and stand, and that their votes do not split."""

from __future__ import annotations

import pytest

from tests.replication.lone import MS, STEP_MS, Lone
from tests.replication.test_conformance import OverRaft
from tickwheel.proto.peer_pb2 import PeerFrame, Ping, Pong
from tickwheel.replication.campaign import ROUNDS_OPEN, WAYS_APART, Campaign, Next
from tickwheel.replication.log import Role
from tickwheel.replication.raft import RaftLog

TERM = 3
ROUND_NS = 100
START_NS = 10_000


def following(*, left: bool, lease_ms: int | None = None) -> Lone:
    """A slave that has just heard its master, b. `left`: its connection to b has broken. `lease_ms`: b's, if it is not
    the slave's own."""
    lone = Lone()
    if lease_ms is not None:
        lone.peers["b"].lease_ms = lease_ms
    for _ in range(20):
        lone.peers["b"].heartbeat(TERM, 0)
        lone.run(50)
    lone.peers["b"].heartbeat(TERM, 0)
    if left:
        lone.log.peer_disconnected("b")
    lone.drain()
    return lone


def lease_over_ms(lone: Lone) -> int:
    return lone.config.lease_over_ms(lone.config.lease_ms)


def test_a_slave_without_a_connection_to_its_master_asks_once_the_lease_is_over() -> None:
    lone = following(left=True)
    lone.run(lone.config.lease_ms)
    assert not lone.sent_of("ping"), "the master may still hold its lease"
    lone.run(lease_over_ms(lone) - lone.config.lease_ms + 2 * STEP_MS)
    assert lone.sent_of("ping")


def test_a_slave_that_is_still_connected_waits_for_the_timeout() -> None:
    lone = following(left=False)
    lone.run(lone.config.election_timeout_ms_min - STEP_MS)
    assert not lone.sent_of("ping")


def test_a_master_that_is_heard_again_is_not_replaced() -> None:
    """Its connection broke and came back."""
    lone = following(left=True)
    lone.log.peer_connected("b")
    lone.run(50)
    lone.peers["b"].heartbeat(TERM, 0)
    lone.run(lone.config.election_timeout_ms_min - 2 * STEP_MS)
    assert not lone.sent_of("ping")


@pytest.mark.parametrize("left", [True, False])
def test_no_vote_while_the_master_may_hold_its_lease(left: bool) -> None:
    lone = following(left=left)
    wait_ms = lease_over_ms(lone) if left else lone.config.election_timeout_ms_min
    lone.run(wait_ms - STEP_MS)
    lone.peers["c"].ask_for_vote(TERM + 1)
    lone.run(STEP_MS)
    assert lone.term == TERM and not lone.sent_of("vote")
    lone.run(STEP_MS)
    lone.peers["c"].ask_for_vote(TERM + 1)
    lone.run(STEP_MS)
    assert lone.term == TERM + 1 and lone.sent_of("vote")


@pytest.mark.parametrize(
    ("lease_ms", "wait_ms"),
    [(0, 400), (390, 390), (1_000, 400)],
    ids=["not told, as before", "longer than this node's", "longer than this node waits"],
)
def test_the_masters_own_lease_counts(lease_ms: int, wait_ms: int) -> None:
    """While `raft.lease_ms` is changed node by node, the master may hold another lease than this node would."""
    lone = following(left=True, lease_ms=lease_ms)
    while lone.clock.now_ns - lone.log.peers.master_heard_ns < (wait_ms - STEP_MS) * MS:
        lone.run(STEP_MS)
    lone.peers["c"].ask_for_vote(TERM + 1)
    lone.run(STEP_MS)
    assert lone.term == TERM and not lone.sent_of("vote") and not lone.sent_of("ping")
    lone.run(2 * STEP_MS)
    assert lone.sent_of("ping")


@pytest.mark.parametrize("reset", [True, False], ids=["connections reset", "silence"])
def test_slaves_that_ask_at_the_same_moment_do_not_split_the_votes(reset: bool) -> None:
    cluster = OverRaft()
    for _ in range(3):
        old = cluster.master()
        term = cluster.logs[old].status().term
        if reset:
            cluster.stop(old)
        else:
            cluster.logs.pop(old).stop()
            for log in cluster.logs.values():  # so that their time-outs end together
                assert isinstance(log, RaftLog)
                log.engine.postpone_election(cluster.clock.now_ns + 1_000 * MS)
        new = cluster.master()
        assert cluster.logs[new].status().term == term + 1
        cluster.start(old)
        cluster.until(lambda old=old: cluster.logs[old].status().master_id is not None)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("index", "term", "refused"),
    [(9, 1, True), (1_000, TERM, False), (0, TERM + 1, False)],
    ids=["shorter log", "longer log", "later term"],
)
def test_a_node_that_asks_refuses_one_whose_log_is_behind(index: int, term: int, refused: bool) -> None:
    lone = following(left=True)
    lone.peers["b"].append(TERM, (0, 0), [(at, TERM, b"x") for at in range(1, 20)], 0)
    lone.log.peer_connected("b")
    lone.log.peer_disconnected("b")
    while not lone.sent_of("ping"):
        lone.run(STEP_MS)
    lone.drain()
    lone.peers["c"].send(PeerFrame(ping=Ping(sent_ns=1, last_log_index=index, last_log_term=term)), TERM)
    assert [frame.pong.hears_master for frame in lone.sent_of("pong")] == [refused]


def test_who_insists_asks_again_at_once_and_not_for_ever() -> None:
    campaign = Campaign(ROUND_NS)
    assert not campaign.insists(START_NS), "it does not ask"
    assert campaign.next(("b", "c"), START_NS) is Next.ASK
    assert campaign.next(("b", "c"), START_NS + 1) is Next.WAIT
    assert campaign.insists(START_NS + 2)
    assert campaign.next(("b", "c"), START_NS + 2) is Next.ASK
    assert not campaign.insists(START_NS + (ROUNDS_OPEN + 1) * ROUND_NS)


def test_who_gives_way_forgets_its_own_answers_and_keeps_its_turn_for_a_while() -> None:
    """A node that asks again and again without success keeps nobody from asking."""
    campaign = Campaign(ROUND_NS)
    assert campaign.next(("b", "c"), START_NS) is Next.ASK
    assert campaign.gives_way(START_NS + 1)
    campaign.answered("b", START_NS, True)
    assert campaign.next(("b", "c"), START_NS + 2) is Next.ASK, "that answer counts no more"
    assert not campaign.gives_way(START_NS + 3)
    campaign.answered("b", START_NS + 2, True)
    assert campaign.next(("b", "c"), START_NS + 4) is Next.CAMPAIGN
    assert campaign.gives_way(START_NS + 1 + WAYS_APART * ROUND_NS)


def test_master_is_elected_though_a_deaf_node_asks_all_the_time() -> None:
    """c hears nobody, so it cannot win; a must become master all the same."""
    lone = Lone()
    for step in range(400):
        lone.run(STEP_MS)
        if step % 4 == 0:
            ping = Ping(sent_ns=lone.clock.now_ns, last_log_index=1_000, last_log_term=1)
            lone.peers["c"].send(PeerFrame(ping=ping), 0)
        for peer_id, frame in lone.drain():
            if peer_id == "b" and frame.WhichOneof("body") == "ping":
                lone.peers["b"].send(PeerFrame(pong=Pong(echo_sent_ns=frame.ping.sent_ns)), frame.term)
            elif peer_id == "b" and frame.WhichOneof("body") == "request_vote":
                lone.peers["b"].vote(frame.term)
        if lone.log.status().role is Role.MASTER:
            return
    raise AssertionError("never elected")


def test_after_a_stall_frames_are_read_first_though_the_connection_has_broken() -> None:
    """The slave stood still for so long that its connection was given up. Its master may be well."""
    lone = following(left=False)
    lone.clock.now_ns += 1_000 * MS
    lone.log.tick()
    lone.log.peer_disconnected("b")
    lone.run(lone.config.campaign_round_ms - STEP_MS)
    assert not lone.sent_of("ping")
    lone.run(2 * STEP_MS)
    assert lone.sent_of("ping")
