"""The question before an election: how long its answers count, and what ends it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists, sampled_from, tuples

from tickwheel.replication.campaign import ROUNDS_OPEN, Campaign, Next

ROUND_NS = 100
START_NS = 10_000
PEERS = ("b", "c", "d", "e")


def ask(campaign: Campaign, now_ns: int, others: tuple[str, ...] = PEERS) -> None:
    """A round begins."""
    assert campaign.next(others, now_ns) is Next.ASK


def test_a_node_alone_asks_nobody() -> None:
    """And campaigns at once."""
    assert Campaign(ROUND_NS).next((), START_NS) is Next.CAMPAIGN


def test_answers_may_take_longer_than_a_round() -> None:
    """Asked again every round, a majority that is 2.4 rounds away is heard all the same."""
    campaign = Campaign(ROUND_NS)
    for round_ in range(3):
        ask(campaign, START_NS + round_ * ROUND_NS)
        assert campaign.next(PEERS, START_NS + round_ * ROUND_NS + 30) is Next.WAIT
    campaign.answered("b", START_NS, True)
    assert campaign.next(PEERS, START_NS + 240) is Next.WAIT
    campaign.answered("c", START_NS, True)
    assert campaign.next(PEERS, START_NS + 240) is Next.CAMPAIGN
    assert campaign.wanted_ns() == 0


def test_an_answer_gets_old() -> None:
    """Two that answer at different times are no majority once the first question is closed."""
    campaign = Campaign(ROUND_NS)
    ask(campaign, START_NS)
    campaign.answered("b", START_NS, True)
    later_ns = START_NS + ROUNDS_OPEN * ROUND_NS
    ask(campaign, later_ns)
    campaign.answered("c", later_ns, True)
    assert campaign.next(PEERS, later_ns + 1) is Next.WAIT


def test_answers_from_before_a_master_count_no_more() -> None:
    """What was asked before it was heard of is closed, however soon the next question follows."""
    campaign = Campaign(ROUND_NS)
    ask(campaign, START_NS)
    campaign.end()
    campaign.answered("b", START_NS, True)
    ask(campaign, START_NS + 10)
    campaign.answered("b", START_NS, True)
    campaign.answered("c", START_NS + 9, True)
    assert campaign.next(PEERS, START_NS + 11) is Next.WAIT


@pytest.mark.parametrize("overtaken", [False, True])
def test_the_youngest_answer_counts(overtaken: bool) -> None:
    """Of one that would have voted and hears a master by now; also when its answers overtake each other."""
    campaign = Campaign(ROUND_NS)
    ask(campaign, START_NS, ("b", "c"))
    ask(campaign, START_NS + ROUND_NS, ("b", "c"))
    answers = [(START_NS, True), (START_NS + ROUND_NS, False)]
    for asked_ns, would in reversed(answers) if overtaken else answers:
        campaign.answered("b", asked_ns, would)
    assert campaign.next(("b", "c"), START_NS + ROUND_NS + 1) is Next.WAIT


@pytest.mark.parametrize("voters", [2, 3, 4, 5])
@given(steps=lists(tuples(integers(0, 3), integers(0, 60), integers(0, 400), sampled_from([True, True, False]))))
def test_a_campaign_has_a_majority_behind_it(voters: int, steps: list[tuple[int, int, int, bool]]) -> None:
    """Never without so many peers that, with this node, they are more than half, each asked within the open rounds."""
    others = PEERS[: voters - 1]
    campaign = Campaign(ROUND_NS)
    said: dict[str, tuple[int, bool]] = {}
    now_ns = START_NS
    for place, pause_ns, age_ns, would in steps:
        now_ns += pause_ns
        peer = others[place % len(others)]
        asked_ns = now_ns - age_ns
        campaign.answered(peer, asked_ns, would)
        if asked_ns >= said.get(peer, (0, False))[0]:
            said[peer] = (asked_ns, would)
        if campaign.next(others, now_ns) is Next.CAMPAIGN:
            willing = [p for p, (asked, would) in said.items() if would and now_ns - asked < ROUNDS_OPEN * ROUND_NS]
            assert 2 * (len(willing) + 1) > voters
            said.clear()
