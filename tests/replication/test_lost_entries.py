"""A log has lost entries that it had acknowledged: its disk did not keep them, or an older copy was put back."""

from __future__ import annotations

import pytest

from tests.replication.lone import STEP_MS, Lone, committed


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
