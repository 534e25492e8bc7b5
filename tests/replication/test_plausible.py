"""Frames of peers that cannot be true: nothing is done with them, and the log goes on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.replication.lone import STEP_MS, Lone
from tickwheel.proto.peer_pb2 import (
    AppendEntries,
    AppendResult,
    Entry,
    Hello,
    LeaseRange,
    PeerFrame,
    Ping,
    Pong,
    RequestVote,
    Sync,
    SyncReply,
)
from tickwheel.replication.grpc_network import shown_in
from tickwheel.replication.log import NO_INTRODUCTION, Role
from tickwheel.replication.plausible import (
    INDEX_MAX,
    RANGE_MAX,
    TERM_JUMP_MAX,
    TERM_MAX,
    ImplausibleFrameError,
    check_frame,
)

U64_MAX = (1 << 64) - 1
KINDS = {
    "ping": PeerFrame(ping=Ping(sent_ns=1)),
    "pong": PeerFrame(pong=Pong(echo_sent_ns=1)),
    "vote request": PeerFrame(request_vote=RequestVote(last_log_index=1, last_log_term=1)),
    "entries": PeerFrame(append_entries=AppendEntries()),
    "answer": PeerFrame(append_result=AppendResult(next_index=1)),
    "sync": PeerFrame(sync=Sync(number=1)),
    "sync reply": PeerFrame(sync_reply=SyncReply(number=1)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("term", [U64_MAX, TERM_MAX + 1, TERM_JUMP_MAX + 1_000])
def test_a_term_that_no_election_reached(kind: str, term: int) -> None:
    """Obeyed, it would be the last: nobody could stand in a higher one, and a restart remembers it."""
    lone = Lone()
    led = lone.lead()
    frame = PeerFrame()
    frame.CopyFrom(KINDS[kind])
    with pytest.raises(ImplausibleFrameError, match="term"):
        lone.peers["b"].send(frame, term)
    lone.run(STEP_MS)
    assert lone.log.status().role is Role.MASTER and lone.term == led
    lone.restart()
    assert lone.term == led and not lone.problems


def test_a_node_that_was_long_away_is_followed() -> None:
    """Thousands of elections it has not heard of are no reason to refuse a master."""
    lone = Lone()
    led = lone.lead()
    lone.peers["b"].heartbeat(led + 1_000_000, 0)
    assert lone.term == led + 1_000_000 and lone.log.status().role is Role.SLAVE


BAD = {
    "a hole before the entries": PeerFrame(
        append_entries=AppendEntries(previous_index=0, previous_term=0, entries=[Entry(index=5, term=1, command=b"r")])
    ),
    "an index beyond all": PeerFrame(
        append_entries=AppendEntries(
            previous_index=0, previous_term=0, entries=[Entry(index=U64_MAX, term=1, command=b"r")]
        )
    ),
    "entries on nothing": PeerFrame(append_entries=AppendEntries(entries=[Entry(index=1, term=1, command=b"r")])),
    "an entry of a later term": PeerFrame(
        append_entries=AppendEntries(previous_index=0, previous_term=0, entries=[Entry(index=1, term=50, command=b"r")])
    ),
    "a commit beyond all": PeerFrame(append_entries=AppendEntries(commit_index=U64_MAX)),
    "a place beyond all": PeerFrame(append_entries=AppendEntries(previous_index=U64_MAX, previous_term=1)),
    "a lease on four thousand million": PeerFrame(sync=Sync(leases=[LeaseRange(count=(1 << 32) - 1)])),
    "many large leases": PeerFrame(sync=Sync(leases=[LeaseRange(count=RANGE_MAX)] * 5)),
    "columns that do not fit": PeerFrame(sync=Sync(leases=[LeaseRange(count=3, attempts=b"1234")])),
    "a position beyond all": PeerFrame(sync=Sync(leases=[LeaseRange(count=1, first_position=U64_MAX)])),
    "a sync numbered beyond all": PeerFrame(sync=Sync(number=U64_MAX)),
    "a reply numbered beyond all": PeerFrame(sync_reply=SyncReply(number=U64_MAX)),
    "a log that ends beyond all": PeerFrame(append_result=AppendResult(next_index=1, last_log_index=U64_MAX)),
    "a question about more than its log": PeerFrame(ping=Ping(sent_ns=1, last_log_index=4, commit_index=5)),
    "an answer about more than its log": PeerFrame(pong=Pong(last_log_index=4, commit_index=5)),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_follows_a_master_may_not_say_either(kind: str) -> None:
    """Of the term's master, to a slave: its numbers lie, and nothing is written or remembered."""
    lone = Lone()
    lone.peers["b"].heartbeat(7, 0)
    assert lone.log.status().master_id == "b"
    with pytest.raises(ImplausibleFrameError):
        lone.peers["b"].send(BAD[kind], 7)
    lone.run(STEP_MS)
    assert not lone.problems and lone.journal.last_index == 0
    lone.peers["b"].append(7, (0, 0), [])
    assert lone.log.status().master_id == "b", "what it says afterwards counts"


def test_an_acknowledgement_of_what_is_not_there() -> None:
    """A slave holds what its master never had: it is not believed, and the master goes on."""
    lone = Lone()
    term = lone.lead()
    with pytest.raises(ImplausibleFrameError, match="acknowledges up to"):
        lone.peers["b"].answer(term, lone.journal.last_index + 100)
    assert not lone.problems and lone.log.status().role is Role.MASTER


def test_an_answer_from_the_future_extends_no_lease() -> None:
    """The lease counts from when a request was sent: one that was not sent yet would make it last for ever."""
    lone = Lone()
    term = lone.lead()
    with pytest.raises(ImplausibleFrameError, match="not asked"):
        lone.peers["b"].answer(term, 1, success=False, echo_ns=lone.clock.now_ns + 10**18)
    assert lone.log.lease_until_ns() <= lone.clock.now_ns + lone.config.lease_ms * 1_000_000


def test_a_frame_numbered_beyond_all_silences_nobody() -> None:
    """Later frames of its sender would all be older."""
    lone = Lone()
    term = lone.lead()
    peer = lone.peers["b"]
    before = peer.envelope._sequence
    peer.envelope._sequence = U64_MAX - 1
    with pytest.raises(ImplausibleFrameError, match="number"):
        peer.send(PeerFrame(ping=Ping(sent_ns=1)), term)
    peer.envelope._sequence = before
    asked = len(lone.sent_of("pong", "b"))
    peer.send(PeerFrame(ping=Ping(sent_ns=1)), term)
    assert len(lone.sent_of("pong", "b")) == asked + 1


def test_members_shown_as_of_an_entry_beyond_all_are_not_looked_at() -> None:
    """They would be the newest for ever."""
    assert shown_in(Hello(applied_index=INDEX_MAX + 1)) == NO_INTRODUCTION


@given(
    previous=st.integers(0, 1 << 40),
    terms=st.lists(st.integers(1, 100), max_size=20).map(sorted),
    own=st.integers(0, 1 << 40),
)
def test_what_honest_masters_send_passes(previous: int, terms: list[int], own: int) -> None:
    """Entries one after the other, of rising terms up to the frame's."""
    entries = [Entry(index=previous + 1 + place, term=term) for place, term in enumerate(terms)]
    append = AppendEntries(previous_index=previous, previous_term=1, entries=entries, commit_index=previous)
    check_frame(PeerFrame(append_entries=append, term=100), own)
