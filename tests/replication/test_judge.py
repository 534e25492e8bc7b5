"""The guard's judgement on a slave against a plain model of Raft's rule, over logs and messages of all shapes."""

from __future__ import annotations

from random import Random

from hypothesis import assume, given
from hypothesis import strategies as st

from tickwheel.proto.peer_pb2 import AppendEntries, Entry
from tickwheel.replication.guards import Guards
from tickwheel.replication.journal import Journal
from tickwheel.replication.judge import ImpossibleMessageError, judge
from tickwheel.storage.simulated import SimulatedDisk

TERMS = st.lists(st.integers(1, 4), max_size=8).map(sorted)
"""Terms of the entries of a log, in order."""


def journal_of(terms: list[int]) -> Journal:
    """A journal that holds entries of these terms."""
    journal = Journal.open(SimulatedDisk(Random(1)), "j", segment_bytes=4096)
    for term in terms:
        journal.append(journal.last_index + 1, term, b"\x00%d" % term)
    return journal


def common(one: list[int], other: list[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@given(own=TERMS, master=TERMS, data=st.data())
def test_what_both_hold_is_never_cut_and_nothing_unverified_is_committed(
    own: list[int], master: list[int], data: st.DataObject
) -> None:
    """Any message of a master whose log agrees with what is committed here: early, late, again, overlapping."""
    shared = common(own, master)
    # Log matching: equal index and term mean equal logs up to there.
    assume(all(a != b for a, b in zip(own[shared:], master[shared:], strict=False)))
    commit = data.draw(st.integers(0, shared))
    previous = data.draw(st.integers(0, len(master)))
    last = data.draw(st.integers(previous, len(master)))
    leader_commit = data.draw(st.integers(0, len(master)))
    append = AppendEntries(
        commit_index=leader_commit,
        previous_index=previous,
        previous_term=master[previous - 1] if previous else 0,
        entries=[Entry(index=i, term=master[i - 1], command=b"\x00") for i in range(previous + 1, last + 1)],
    )
    journal = journal_of(own)
    term = max([4, *own, *master])
    judgement = judge(term, append, journal, commit, Guards())
    after, committed = list(own), commit
    message = judgement.hand_on
    assert message is not None
    if "entries" in message:
        at = message["prevLogIdx"]
        assert at <= len(own) and (at == 0 or own[at - 1] == message["prevLogTerm"] or at == journal.base_index)
        after = own[:at] + [row[2] for row in message["entries"]]
        assert len(after) >= shared or after[:shared] == own[:shared]
        verified = at + len(message["entries"])
        committed = max(commit, min(message["commit_index"], verified))
    else:
        committed = max(commit, min(message["commit_index"], len(own)))
    assert after[: min(shared, len(after))] == own[: min(shared, len(after))]
    assert len(after) >= shared, "an entry that the master holds as well was cut off"
    assert after[:committed] == master[:committed], "committed what the master does not hold"
    if judgement.success:
        assert own[: judgement.next_index - 1] == master[: judgement.next_index - 1], "acknowledged another's entry"
    if judgement.reset:
        assert judgement.next_index <= commit + 1


@given(own=TERMS.filter(bool), data=st.data())
def test_a_master_without_a_committed_entry_is_impossible(own: list[int], data: st.DataObject) -> None:
    """Committed here, another term there: one of both has lost what must not be lost; never a silent repair."""
    commit = data.draw(st.integers(1, len(own)))
    index = data.draw(st.integers(1, commit))
    append = AppendEntries(
        previous_index=index - 1,
        previous_term=own[index - 2] if index > 1 else 0,
        entries=[Entry(index=index, term=9, command=b"\x00")],
    )
    try:
        judge(9, append, journal_of(own), commit, Guards())
    except ImpossibleMessageError:
        return
    raise AssertionError("a committed entry would have been replaced")
