"""The verdict of a live run: each broken promise, planted by hand in a small history, is found and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.chaos_live.stories import BEGAN_MS, DRAIN_MS, END_MS, KILL_MS, LEASE_MS, Story, good
from tickwheel.chaos.live.report import headline
from tickwheel.chaos.live.verdict import Verdict, judge

NEW = [90_001]
"""A message that only the planted part of a history knows."""


def judged(story: Story) -> Verdict:
    return judge(story.sorted())


def test_a_good_run_breaks_nothing() -> None:
    """The checker has no false alarm on a clean failover; its figures are those of the story."""
    verdict = judged(good())
    assert verdict.broken == []
    assert not verdict.void
    assert verdict.holds
    assert verdict.counts["acknowledged"] * 2 == verdict.counts["delivered"] == verdict.counts["settled"]
    [failover] = verdict.failovers
    assert (failover["old"], failover["new"], failover["term"]) == ("n1", "n2", 2)
    assert failover["without_ms"] == 700
    assert "kill-master" in failover["cause"]
    assert verdict.outside.worst == verdict.inside.worst == 3.0
    assert verdict.elections_without_fault == 0


def test_what_a_node_said_before_it_was_stopped_and_sent_afterwards_is_no_second_lease() -> None:
    """A SIGSTOP falls between a status and its sending: its clock tells that it is old, and the next one is another."""
    story = good()
    for at_ms in (1_500, 3_500):
        story.status(KILL_MS + at_ms, "n1", "MASTER", 1, clock=1_000 - at_ms)
        story.status(KILL_MS + at_ms + 20, "n1", "SLAVE", 2)
    assert judged(story).broken == []


def _lost(story: Story) -> None:
    story.ack(1_010, story.send(1_000, 1_100, NEW), NEW)
    story.got(1_105, "steady", NEW)


def _invented(story: Story) -> None:
    story.got(1_105, "steady", NEW)


def _alien(story: Story) -> None:
    story.tell(1_000, "alien", group="steady", payload="00ff")


def _refused_and_delivered(story: Story) -> None:
    request = story.send(1_000, 1_100, NEW)
    story.tell(1_010, "fail", b=request, reason="no master", unknown=False)
    for group in ("steady", "moody"):
        story.got(1_105, group, NEW)


def _early(story: Story) -> None:
    story.ack(1_010, story.send(1_000, 1_500, NEW), NEW)
    for group in ("steady", "moody"):
        story.got(1_480, group, NEW)


def _moved_and_early(story: Story) -> None:
    _changed(story, "move", "RESCHEDULED", asked=BEGAN_MS + 3_000)
    for group in ("steady", "moody"):
        story.got(2_005, group, NEW)


def _late_after_the_heal(story: Story) -> None:
    story.ack(9_410, story.send(9_400, 9_500, NEW), NEW)
    for group in ("steady", "moody"):
        story.got(15_000, group, NEW, term=2)


def _twice(story: Story, again_ms: float, **again: Any) -> None:
    story.ack(1_010, story.send(1_000, 1_100, NEW), NEW)
    story.got(1_105, "moody", NEW)
    story.got(1_105, "steady", NEW)
    story.got(again_ms, "steady", NEW, **again)


def _twice_for_nothing(story: Story) -> None:
    _twice(story, 2_000)


def _twice_after_its_settlement(story: Story) -> None:
    story.ack(1_010, story.send(1_000, 1_100, NEW), NEW)
    story.got(1_105, "moody", NEW)
    story.settle(1_200, story.got(1_105, "steady", NEW), [0])
    story.got(1_105 + LEASE_MS + 1_000, "steady", NEW, term=2)


def _scheduled_twice(story: Story) -> None:
    _twice(story, 1_105 + LEASE_MS + 10, ids=[7], term=2)


def _repeat_with_other_ids(story: Story) -> None:
    request = story.send(1_000, 1_100, NEW, "repeat")
    story.ack(1_010, request, NEW)
    story.tell(1_020, "again", b=request, ids=[5])
    for group in ("steady", "moody"):
        story.got(1_105, group, NEW)


def _cursor_back(story: Story) -> None:
    story.status(2_050, "n3", "SLAVE", 1, cursor=[int(BEGAN_MS) + 500, 0])


def _synced_back(story: Story) -> None:
    story.status(2_050, "n3", "SLAVE", 1, synced=[0, 0])


def _two_masters_of_a_term(story: Story) -> None:
    story.status(2_050, "n3", "MASTER", 1, lease=False)


def _two_leases(story: Story) -> None:
    story.status(KILL_MS + 1_500, "n1", "MASTER", 1)


def _two_leases_by_a_clock_that_is_behind(story: Story) -> None:
    for at_ms in (1_500, 1_550):
        story.status(KILL_MS + at_ms, "n1", "MASTER", 1, clock=-1_500)


def _delivery_of_an_old_term(story: Story) -> None:
    story.ack(1_010, story.send(1_000, 1_100, NEW), NEW)
    for group in ("steady", "moody"):
        story.got(KILL_MS + 2_500, group, NEW, term=1)


def _digests_differ(story: Story) -> None:
    story.all_of("digest")[2].update(digest="ab", parts={"wheel": "bb", "groups": "dd"})


def _changed(story: Story, what: str, outcome: str, **fields: Any) -> None:
    story.ack(1_010, story.send(1_000, 2_000, NEW), NEW)
    story.tell(1_100, what, b=4_000, uid=NEW[0], id="0-1-1", **fields)
    story.tell(1_110, "cancelled" if what == "cancel" else "moved", b=4_000, uid=NEW[0], outcome=outcome)


def _cancelled_and_delivered(story: Story) -> None:
    _changed(story, "cancel", "CANCELLED")
    story.got(2_005, "moody", NEW)


def _cancel_not_found(story: Story) -> None:
    _changed(story, "cancel", "NOT_FOUND")
    for group in ("steady", "moody"):
        story.got(2_005, group, NEW)


def _too_late_to_cancel_and_lost(story: Story) -> None:
    _changed(story, "cancel", "ALREADY_DISPATCHED")


def _memory_grows(story: Story) -> None:
    for second in range(6):
        story.tell(1_000 * second, "memory", node="n2", bytes=(120 + 100 * second) << 20)


def _a_queue_grows(story: Story) -> None:
    story.status(2_050, "n1", "MASTER", 1, uncommitted=5_000)


def _no_master_for_long(story: Story) -> None:
    _leaves(story, "n2", 4_700, 15_500)


def _not_healed(story: Story) -> None:
    story.drop(lambda record: record["k"] == "healed")


def _a_node_missing_at_the_end(story: Story) -> None:
    story.drop(lambda record: record["k"] == "digest" and record["node"] == "n3")


def _not_at_rest(story: Story) -> None:
    story.all_of("digest")[1]["applied"] = 76


def _died(story: Story) -> None:
    story.tell(3_000, "died", node="n3", code=3, log="fatal")


def _goes_on(story: Story) -> None:
    story.tell(3_000, "wrong", text="n3 went on after an fdatasync had failed")


def _leaves(story: Story, node: str, from_ms: float, until_ms: float) -> None:
    times = (BEGAN_MS + from_ms, BEGAN_MS + until_ms)
    story.drop(lambda r: r["k"] == "status" and r["node"] == node and times[0] < r["t"] < times[1])


@pytest.mark.parametrize(
    ("promise", "spoil", "words"),
    [
        ("P1", _lost, "never came to moody"),
        ("P1", _too_late_to_cancel_and_lost, "never came to steady, moody"),
        ("P2", _invented, "never sent"),
        ("P2", _alien, "what nobody sent"),
        ("P2", _refused_and_delivered, "refused for good"),
        ("P3", _early, "20 ms early"),
        ("P3", _moved_and_early, "ms early"),
        ("P4", _late_after_the_heal, "5,500 ms late"),
        ("P5", _twice_for_nothing, "not handed back"),
        ("P5", _twice_after_its_settlement, "acknowledgement was committed"),
        ("P5", _scheduled_twice, "two ids"),
        ("P5", _repeat_with_other_ids, "other ids"),
        ("P6", _cursor_back, "the cursor of n3 went back"),
        ("P6", _synced_back, "synced tick of n3"),
        ("P7", _two_masters_of_a_term, "n1 and n3 both"),
        ("P7", _two_leases, "n1 held its lease of term 1"),
        ("P7", _two_leases_by_a_clock_that_is_behind, "n1 held its lease of term 1"),
        ("P7", _delivery_of_an_old_term, "a delivery of term 1"),
        ("P8", _digests_differ, "n1 and n3 differ at index 77: groups"),
        ("P9", _cancelled_and_delivered, "was cancelled and came to moody"),
        ("P9", _cancel_not_found, "NOT_FOUND"),
        ("P11", _memory_grows, "n2 holds 520 MiB"),
        ("P11", _a_queue_grows, "5000 entries in flight"),
        ("P10", _no_master_for_long, "without a master"),
        ("P10", _not_healed, "did not agree"),
        ("P10", _a_node_missing_at_the_end, "only n1, n2 answered"),
        ("P10", _not_at_rest, "one index: n1 at 77, n2 at 76"),
        ("process", _died, "n3 ended by itself with code 3"),
        ("process", _goes_on, "n3 went on after"),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_a_broken_promise_is_found(promise: str, spoil: Callable[[Story], None], words: str) -> None:
    """A checker that does not see this would let the real thing pass."""
    story = good()
    spoil(story)
    verdict = judged(story)
    assert set(verdict.broken_counts) == {promise}
    assert any(words in one.text for one in verdict.broken), [one.text for one in verdict.broken]


def _handed_back(story: Story) -> None:
    _twice(story, 2_500, attempt=2)
    story.settle(1_200, story.all_of("got")[-2]["g"], [0], "retry")


def _lease_over(story: Story) -> None:
    _twice(story, 1_105 + LEASE_MS + 10, term=2)


def _session_gone(story: Story) -> None:
    _twice(story, 1_500)
    story.tell(1_450, "session", consumer="steady-1", session="steady-1/1.1")


def _session_gone_told_late(story: Story) -> None:
    _twice(story, 1_500, session="steady-1/1.1")
    story.tell(1_530, "session", consumer="steady-1", session="steady-1/1.1")


def _session_gone_told_after_another_had_it(story: Story) -> None:
    """The stream was gone before, or nobody else would have got it."""
    _twice(story, 1_500, attempt=2, consumer="steady-2", session="steady-2/1.0")
    story.tell(1_530, "session", consumer="steady-1", session="steady-1/1.1")


def _failover(story: Story) -> None:
    uids = NEW
    story.ack(3_610, story.send(3_600, 3_700, uids), uids)
    story.got(3_705, "moody", uids)
    story.got(3_705, "steady", uids)
    story.got(4_650, "steady", uids, term=2)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_handed_back, "handed back"),
        (_lease_over, "lease over"),
        (_session_gone, "session gone"),
        (_session_gone_told_late, "session gone"),
        (_session_gone_told_after_another_had_it, "session gone"),
        (_failover, "failover"),
    ],
    ids=["handed_back", "lease_over", "session_gone", "told_late", "told_after_another_had_it", "failover"],
)
def test_an_allowed_duplicate_is_counted_with_its_reason(spoil: Callable[[Story], None], reason: str) -> None:
    """P5 allows some repeats: they break nothing, and the report says how many there were and why."""
    story = good()
    spoil(story)
    verdict = judged(story)
    assert verdict.broken == []
    assert verdict.duplicates == {reason: 1}


def test_who_refuses_late_does_not_hide_who_refused_before() -> None:
    """The first holder says once more that it refuses, after the second one did: both deliveries were handed back."""
    story = good()
    story.ack(1_010, story.send(1_000, 1_100, NEW), NEW)
    story.got(1_105, "moody", NEW)
    first = story.got(1_105, "steady", NEW)
    story.settle(1_200, first, [0], "retry")
    story.settle(1_400, story.got(1_300, "steady", NEW, attempt=2), [0], "retry")
    story.settle(1_450, first, [0], "retry")
    story.got(1_500, "steady", NEW, attempt=3)
    verdict = judged(story)
    assert verdict.broken == []
    assert verdict.duplicates == {"handed back": 2}


def test_a_message_whose_outcome_is_unknown_may_come_or_not() -> None:
    """A lost answer is nobody's broken promise; neither is a cancel without one."""
    story = good()
    for uid, came in ((90_001, True), (90_002, False)):
        request = story.send(1_000, 1_100, [uid])
        story.tell(1_010, "fail", b=request, reason="answer lost", unknown=True)
        if came:
            story.got(1_105, "steady", [uid])
    assert judged(story).broken == []


def test_p3_allows_what_the_master_says_its_time_may_be_off_by() -> None:
    """By true time a message may come early by the error bound of the cluster clock, and by no more."""
    story = good()
    _early(story)
    for record in story.all_of("status"):
        record["error"] = 30.0
    verdict = judged(story)
    assert verdict.broken == []
    assert verdict.earliest_ms == 20.0
    for record in story.all_of("status"):
        record["agreed"] = "UNAGREED"
    assert set(judged(story).broken_counts) == {"P3"}


def test_no_master_is_no_breach_while_no_majority_is_connected() -> None:
    """P10 asks for a majority: two nodes of three cut off for long excuse the standstill."""
    story = good()
    _leaves(story, "n2", 4_700, 15_500)
    story.tell(4_700, "majority", holds=False)
    story.tell(15_000, "majority", holds=True)
    assert judged(story).broken == []


@pytest.mark.parametrize(("waited_ms", "broken", "unjudged"), [(200, {"P10"}, []), (300, set(), [36_100])])
def test_a_standstill_without_a_processor_is_not_judged_but_told(
    waited_ms: int, broken: set[str], unjudged: list[int]
) -> None:
    """P10: over half a minute without a master counts while nodes had more than half of the processor that they
    wanted; below that nobody can say whose fault it is, and the report says so instead of calling it held."""
    story = good()
    _leaves(story, "n2", 4_550, END_MS)
    story.status(40_000, "n2", "MASTER", 2)
    for tick in range(80):
        story.tell(500.0 * tick, "cpu", node="n1", ms=500, waited=waited_ms)
    verdict = judged(story)
    assert set(verdict.broken_counts) == broken
    assert verdict.unjudged_ms == unjudged
    assert ("could not be judged" in headline(verdict)[2]) is bool(unjudged)


def test_a_recovering_node_shows_no_cursor() -> None:
    """P6 excepts a node that has not replayed to where it was and says so."""
    story = good()
    story.status(6_150, "n1", "SLAVE", 2, life=2, state="RECOVERING", cursor=[0, 0])
    assert judged(story).broken == []


def _slow_load(story: Story) -> None:
    story.drop(lambda r: r["k"] in ("send", "ack", "got", "settle", "settled") and 2_000 < r["t"] - BEGAN_MS < 3_900)


def _workload_failed(story: Story) -> None:
    story.tell(1_000, "broken", reason="KeyError")


def _workload_hung(story: Story) -> None:
    story.all_of("drained")[0]["code"] = None


def _cut_short(story: Story) -> None:
    story.drop(lambda record: record["t"] - BEGAN_MS > DRAIN_MS)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_slow_load, "0 messages/s before the first fault"),
        (_workload_failed, "the workload failed: KeyError"),
        (_workload_hung, "ended with code None"),
        (_cut_short, "not carried out to its end"),
    ],
    ids=["slow_load", "workload_failed", "workload_hung", "cut_short"],
)
def test_a_run_that_proves_nothing_says_so(spoil: Callable[[Story], None], words: str) -> None:
    """Faults on an idle or broken run find nothing: such a run must not pass for a good one."""
    story = good()
    spoil(story)
    assert words in judged(story).void


def test_a_fault_without_effect_and_an_election_without_a_fault_are_named() -> None:
    """What was injected and seen by nobody, and what happened although nothing was injected, do not stay hidden."""
    story = good()
    story.all_of("over")[0]["count"] = 0
    assert [fault["number"] for fault in judged(story).without_effect] == [1]
    story = good()
    story.drop(lambda record: record["k"] in ("begin", "over"))
    assert judged(story).elections_without_fault == 1
    assert END_MS > DRAIN_MS
