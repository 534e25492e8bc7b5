"""The lease: what a majority's answers allow, however often it is looked at in between."""

from __future__ import annotations

from tickwheel.replication.lease import Lease
from tickwheel.replication.ports import NS_PER_MS

LEASE_MS = 300


def test_a_majority_counts_from_when_it_was_asked() -> None:
    """Of five, the second newest of the others' answers is the majority's; looking does not freeze it."""
    lease, others = Lease(LEASE_MS), ("b", "c", "d", "e")
    now_ns = 1_000 * NS_PER_MS
    assert lease.until_ns(others, now_ns) == 0
    lease.note("b", now_ns - 10)
    assert lease.until_ns(others, now_ns) == 0
    lease.note("c", now_ns - 20)
    assert lease.until_ns(others, now_ns) == now_ns - 20 + LEASE_MS * NS_PER_MS
    lease.note("d", now_ns - 5)
    assert lease.until_ns(others, now_ns) == now_ns - 10 + LEASE_MS * NS_PER_MS
    assert lease.until_ns(others, now_ns + LEASE_MS * NS_PER_MS) == 0


def test_answers_of_who_is_no_member_any_more_do_not_count() -> None:
    """After a change of members the majority is looked for among those that are there now."""
    lease, now_ns = Lease(LEASE_MS), 1_000 * NS_PER_MS
    lease.note("b", now_ns)
    assert lease.until_ns(("b", "c"), now_ns) > now_ns
    assert lease.until_ns(("c", "d"), now_ns) == 0


def test_nothing_of_before_a_stall_or_an_earlier_term_counts() -> None:
    """After a gap of its loop the master needs answers to questions asked since; in a new term, all anew."""
    lease, now_ns = Lease(LEASE_MS), 1_000 * NS_PER_MS
    others = ("b", "c")
    lease.note("b", now_ns)
    assert lease.until_ns(others, now_ns) > 0
    lease.invalidate(now_ns + 1)
    assert lease.until_ns(others, now_ns) == 0
    lease.note("b", now_ns + 1)
    assert lease.until_ns(others, now_ns) > 0
    lease.reset(now_ns + 2)
    assert lease.until_ns(others, now_ns + 2) == 0
    lease.note("b", now_ns + 1)  # by a slave that is in the new term, to a question of the one before
    assert lease.until_ns(others, now_ns + 2) == 0
    lease.note("b", now_ns + 2)
    assert lease.until_ns(others, now_ns + 2) > 0
