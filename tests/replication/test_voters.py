"""Who counts, and from when: entries that name the voters, written, cut off, applied, found again after a start."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.replication.lone import STEP_MS, Lone
from tickwheel.replication.entries import Voters, naming, split
from tickwheel.replication.log import Member, ProposalOutcome, ProposalResult, Role

IDS = st.lists(st.sampled_from(["a", "b", "c", "d", "e"]), unique=True, min_size=1)


def member(node_id: str, *, learner: bool = False) -> Member:
    """A member at places nobody dials."""
    return Member(node_id, f"{node_id}:1", f"{node_id}:2", learner=learner)


@given(voters=IDS, command=st.binary(max_size=20))
def test_an_entry_gives_back_what_it_names(voters: list[str], command: bytes) -> None:
    """The ids, sorted, and the command untouched."""
    assert split(naming(voters, command)) == (tuple(sorted(voters)), command)


@given(data=st.binary(max_size=12))
def test_broken_entries_are_told(data: bytes) -> None:
    """Nothing but ValueError, whatever the bytes are; what can be read gives the same entry again."""
    try:
        voters, command = split(b"\x10" + data)
    except ValueError:
        return
    if sorted(voters) == list(voters) and "" not in voters:
        assert naming(voters, command) == b"\x10" + data


@given(st.lists(st.tuples(st.sampled_from(["write", "cut", "apply"]), IDS), max_size=30))
def test_the_newest_entry_in_the_log_names_them(steps: list[tuple[str, list[str]]]) -> None:
    """Against a plain list of (index, voters) of which a prefix is applied."""
    voters = Voters("a", ["a"])
    log: list[list[str]] = [["a"]]
    applied = 1
    for step, ids in steps:
        if step == "write":
            log.append(ids)
            voters.written(len(log), ids)
        elif step == "cut" and len(log) > applied:
            log.pop()
            voters.cut_from(len(log) + 1)
        elif step == "apply" and len(log) > applied:
            applied += 1
            voters.set_applied(log[applied - 1])
            voters.applied(applied)
        assert voters.ids == tuple(sorted(log[-1]))
        assert voters.changing == (len(log) > applied)
        assert voters.others == tuple(sorted(set(log[-1]) - {"a"}))


def test_a_master_counts_a_new_voter_from_when_the_entry_is_written() -> None:
    """With b and c it needs one of them; once d is named too it needs two, and d is one of them."""
    lone = Lone(others=("b", "c", "d"))
    lone.log.set_members([member("a"), member("b"), member("c"), member("d", learner=True)])
    term = lone.lead()
    first = lone.log.status().last_index
    results: list[ProposalResult] = []
    lone.log.propose(b"add d", results.append, ["a", "b", "c", "d"])
    index = lone.log.status().last_index
    lone.run(STEP_MS)
    lone.peers["b"].answer(term, index + 1)
    lone.run(STEP_MS)
    assert not results, "two of three, but two of four are no majority"
    assert lone.log.status().commit_index == first
    lone.peers["d"].answer(term, index + 1)
    lone.run(STEP_MS)
    assert [result.outcome for result in results] == [ProposalOutcome.COMMITTED]


def test_a_learner_neither_commits_nor_holds_the_lease() -> None:
    """It follows the log; what it acknowledges counts for nothing."""
    lone = Lone(others=("b", "c", "d"))
    lone.log.set_members([member("a"), member("b"), member("c"), member("d", learner=True)])
    term = lone.lead()
    results: list[ProposalResult] = []
    lone.log.propose(b"x", results.append)
    lone.run(STEP_MS)
    assert lone.sent_of("append_entries", "d")[-1].append_entries.entries, "a learner gets the log"
    index = lone.log.status().last_index
    lone.run(lone.config.lease_ms)
    lone.peers["d"].answer(term, index + 1)
    lone.run(STEP_MS)
    assert not results and not lone.log.lease_held()
    lone.peers["c"].answer(term, index + 1)
    lone.run(STEP_MS)
    assert results and lone.log.lease_held()


def test_one_change_at_a_time() -> None:
    """A second one before the first is applied is not appended at all."""
    lone = Lone()
    lone.lead()
    results: list[ProposalResult] = []
    lone.log.propose(b"1", results.append, ["a", "b"])
    last = lone.log.status().last_index
    lone.log.propose(b"2", results.append, ["a"])
    assert [result.outcome for result in results] == [ProposalOutcome.QUEUE_FULL]
    assert lone.log.status().last_index == last


def test_voters_that_are_cut_off_count_no_more() -> None:
    """A slave takes the voters of an entry that never commits; the next master's log goes another way."""
    lone = Lone()
    lone.follow("b", 1, 3)
    alone = naming(["b", "c"], b"remove a")
    lone.peers["b"].append(1, (3, 1), [(4, 1, alone)], commit=3)
    lone.run(STEP_MS)
    assert lone.log.status().role is Role.LEARNER, "removed, as far as its log says"
    lone.peers["c"].append(2, (3, 1), [(4, 2, b"\x01")], commit=3)
    lone.run(STEP_MS)
    assert lone.log.status().role is Role.SLAVE


def test_a_start_finds_the_voters_behind_what_is_applied() -> None:
    """Only the journal knows of them yet: a node that forgot them would count by a set too old."""
    lone = Lone(others=("b", "c", "d"))
    lone.log.set_members([member("a"), member("b"), member("c"), member("d", learner=True)])
    lone.follow("b", 1, 3)
    lone.peers["b"].append(1, (3, 1), [(4, 1, naming(["b", "c", "d"], b"remove a"))], commit=3)
    lone.run(STEP_MS)
    lone.restart()
    assert lone.log.status().role is Role.LEARNER


def test_a_node_that_does_not_know_that_it_counts_votes() -> None:
    """A master of one adds a second and is restarted before that one has heard of it: it needs its vote to lead again,
    or the cluster is locked for ever."""
    lone = Lone(others=("b",))
    lone.log.set_members([member("b"), member("a", learner=True)])
    lone.follow("b", 1, 3)
    lone.clock.now_ns += 2 * lone.config.election_timeout_ms_max * 1_000_000
    lone.peers["b"].ask_for_vote(2, (4, 1))
    assert lone.sent_of("vote", "b")


@pytest.mark.parametrize("entry", [b"\x10", b"\x10\xff\xff", b"\x10\x01\x00\xff"])
def test_an_entry_that_cannot_be_read_is_not_written(entry: bytes) -> None:
    """A master that sends one is not healthy: the node stops with a reason, and its journal has nothing of it."""
    lone = Lone()
    lone.follow("b", 1, 3)
    lone.peers["b"].append(1, (3, 1), [(4, 1, entry)], commit=3)
    assert len(lone.problems) == 1 and "cannot be read" in lone.problems[0]
    assert lone.journal.last_index == 3
