"""One log on a bad day: a disk that hangs, a disk that is full, a handover that fails, a node that dies meanwhile."""

from __future__ import annotations

import pytest

from tests.replication.lone import MS, STEP_MS, Lone
from tickwheel.proto.peer_pb2 import PeerFrame
from tickwheel.replication.config import RaftConfig
from tickwheel.replication.entries import naming
from tickwheel.replication.log import ProposalOutcome, ProposalResult, Role
from tickwheel.storage.disk import FsyncFailedError


def keep_answering(lone: Lone, term: int, ms: int, *, disk: bool) -> None:
    """Time passes; both peers answer every heartbeat, acknowledging nothing new."""
    for _ in range(0, ms, 50):
        lone.run(50, disk=disk)
        for peer in lone.peers.values():
            peer.answer(term, 1, success=False)


def test_a_master_whose_disk_hangs_stands_down() -> None:
    """It would hold its lease and commit nothing for as long as one fdatasync takes."""
    lone = Lone()
    term = lone.lead()
    outcome = lone.propose(b"never durable")
    keep_answering(lone, term, lone.config.fsync_hang_ms - 200, disk=False)
    assert lone.log.status().role is Role.MASTER
    keep_answering(lone, term, 500, disk=False)
    assert lone.log.status().role is not Role.MASTER
    assert lone.log.status().hangs_ms > lone.config.fsync_hang_ms, "the reason to be told"
    assert [result.outcome for result in outcome] == [ProposalOutcome.UNKNOWN]
    lone.drain()
    lone.run(3_000, disk=False)
    assert not lone.sent_of("request_vote") and not lone.sent_of("ping"), "stands for election with a disk that hangs"
    pauses_ns = []
    for _ in range(100):
        lone.clock.now_ns += STEP_MS * MS
        pauses_ns.append(lone.log.tick() - lone.clock.now_ns)
    assert max(pauses_ns) > 100 * MS, "looks again and again meanwhile"
    lone.executor.run()
    lone.run(3_000)
    assert lone.sent_of("ping"), "takes part again once the disk answers"
    assert not lone.log.status().hangs_ms


def test_a_slave_whose_disk_is_slow_answers_that_it_lives() -> None:
    """Without an answer the master would lose its lease for the time of one slow fdatasync."""
    lone = Lone()
    lone.peers["b"].append(1, (0, 0), [(1, 1, b"\x00one")])
    assert not lone.sent_of("append_result"), "the disk is asked first"
    lone.run(lone.config.answer_within_ms + STEP_MS, disk=False)
    answers = [frame.append_result for frame in lone.sent_of("append_result")]
    assert [(answer.success, answer.next_index) for answer in answers] == [(False, 1)]
    lone.executor.run()
    last = lone.sent_of("append_result")[-1].append_result
    assert (last.success, last.next_index) == (True, 2)


def test_a_handover_that_nobody_takes_up_stands_down() -> None:
    """The request to lead may still be on its way: leading on in the same term could make two masters."""
    lone = Lone()
    term = lone.lead()
    ended: list[str | None] = []
    lone.log.transfer("b", ended.append)
    for peer in lone.peers.values():
        peer.answer(term, lone.journal.last_index + 1)
    lone.run(2 * STEP_MS)
    assert lone.sent_of("timeout_now", "b")
    keep_answering(lone, term, lone.config.handover_answer_ms + 200, disk=True)
    assert ended == ["b did not become master in time"]
    assert lone.log.status().role is not Role.MASTER


def test_a_handover_to_a_slave_that_stays_behind_is_given_up() -> None:
    """The lease was never given up, so the master goes on in its term, and takes proposals again."""
    lone = Lone()
    term = lone.lead()
    lone.propose(b"that b never gets")
    lone.peers["c"].answer(term, lone.journal.last_index + 1)
    lone.run(STEP_MS)
    ended: list[str | None] = []
    lone.log.transfer("b", ended.append)
    keep_answering(lone, term, lone.config.handover_wait_ms + 200, disk=True)
    assert ended == ["b did not catch up in time"]
    assert lone.log.status().role is Role.MASTER and lone.term == term
    outcome = lone.propose(b"on it goes")
    assert not outcome, "taken, and under way"


def test_a_handover_is_answered_when_the_node_dies() -> None:
    """A fatal error must not leave the asker waiting."""
    lone = Lone()
    term = lone.lead()
    ended: list[str | None] = []
    lone.log.transfer("b", ended.append)
    lone.peers["b"].heartbeat(term, 0)
    assert lone.problems and "and so do we" in lone.problems[0]
    assert ended == ["this node stops"]


def test_a_full_disk_halts_and_recovers() -> None:
    """No room for the next file: a master gives up, says why, takes nothing; with room it takes part again."""
    lone = Lone()
    lone.lead()
    lone.disk.fill(0)
    for number in range(3):
        lone.propose(bytes(600_000) + b"%d" % number)
        lone.run(2 * STEP_MS)
    assert "full" in lone.log.status().halted
    assert lone.log.status().role is not Role.MASTER
    assert lone.propose(b"no")[0].outcome is ProposalOutcome.NOT_MASTER
    assert not lone.problems
    lone.disk.fill(1 << 40)
    lone.run(lone.config.disk_retry_ms + 200)
    assert not lone.log.status().halted


FAILURES = ("fsync", "write", "hard state")


def fail_disk(lone: Lone, failure: str, term: int) -> list[ProposalResult]:
    """The journal of this master fails in this way while an entry is on its way; what became of that."""
    outcome = lone.propose(b"lost?")
    assert len(lone.executor.waiting) == 1 and not outcome
    if failure == "fsync":
        lone.disk.fail_fsync()
        work, done = lone.executor.waiting.pop(0)
        with pytest.raises(FsyncFailedError) as failed:
            work()
        done(None, failed.value)
        return outcome
    lone.disk.fail_write()
    if failure == "write":
        another = lone.propose(b"not even written")
        assert [result.outcome for result in another] == [ProposalOutcome.UNKNOWN]
    else:
        lone.peers["b"].answer(term + 1, 1)
    # The disk had begun with the entry before: its answer comes too late to count.
    lone.executor.run()
    return outcome


@pytest.mark.parametrize("failure", FAILURES)
def test_after_a_failed_write_a_master_promises_nothing_and_hands_over(failure: str) -> None:
    """A later fdatasync may lie about the pages that this one lost: nothing is committed, acknowledged or voted for any
    more, whatever the peers say. A handover still works, up to the answer of the next master."""
    lone = Lone()
    term = lone.lead()
    commit, applied = lone.log.status().commit_index, list(lone.applied)
    outcome = fail_disk(lone, failure, term)
    assert lone.problems and ("stable storage" if failure == "fsync" else "cannot write to") in lone.problems[0]
    durable, stored = lone.journal.durable_index, (lone.journal.term, lone.journal.voted_for)
    lone.drain()
    for peer in lone.peers.values():
        peer.answer(term, lone.journal.last_index + 1)
    lone.run(100)
    refused = lone.propose(b"refused")
    assert [result.outcome for result in refused] == [ProposalOutcome.QUEUE_FULL]
    assert lone.log.status().role is Role.MASTER and lone.log.status().commit_index == commit == durable
    assert lone.applied == applied and not outcome

    ended: list[str | None] = []
    lone.log.transfer("b", ended.append, applying=False)
    assert [result.outcome for result in outcome] == [ProposalOutcome.UNKNOWN]
    lone.run(2 * STEP_MS)
    assert lone.sent_of("timeout_now", "b") and not lone.log.lease_held() and not ended
    lone.peers["b"].ask_for_vote(term + 2, transfer=True)
    lone.peers["c"].ask_for_vote(term + 3, transfer=True)
    lone.run(2 * STEP_MS)
    assert not lone.sent_of("vote") and not ended
    lone.peers["b"].append(term + 2, (lone.journal.last_index, lone.journal.last_term), [])
    lone.run(2 * STEP_MS)
    assert ended == [None] and lone.log.status().role is not Role.MASTER
    lone.run(5_000)
    for kind in ("vote", "append_result", "request_vote", "ping"):
        assert not lone.sent_of(kind), kind
    assert (lone.journal.term, lone.journal.voted_for) == stored and lone.journal.durable_index == durable


@pytest.mark.parametrize("failure", ["fsync", "write"])
def test_a_slave_whose_journal_fails_acknowledges_nothing_more(failure: str) -> None:
    """Not what it has written, and not what it wrote before: whoever drives it is told to stop it."""
    lone = Lone()
    lone.peers["b"].append(1, (0, 0), [(1, 1, b"\x00one")])
    if failure == "fsync":
        lone.disk.fail_fsync()
        work, done = lone.executor.waiting.pop(0)
        with pytest.raises(FsyncFailedError) as failed:
            work()
        done(None, failed.value)
    else:
        lone.disk.fail_write()
        lone.peers["b"].append(1, (1, 1), [(2, 1, b"\x00two")])
    assert len(lone.problems) == 1
    for _ in range(20):
        lone.peers["b"].append(1, (1, 1), [(2, 1, b"\x00two")])
        lone.peers["c"].ask_for_vote(9, transfer=True)
        lone.run(50)
    assert not lone.sent_of("append_result") and not lone.sent_of("vote") and lone.journal.durable_index == 0


def test_a_full_disk_keeps_a_node_in_the_term_that_it_can_remember() -> None:
    """A term that was not stored would be forgotten by a restart: until there is room for it the node acknowledges
    nothing in it, however often its master speaks, and soon after there is room it does."""
    lone = Lone()
    lone.follow("b", 1, 2)
    lone.disk.fill(0)
    heartbeats = 3 * lone.config.disk_retry_ms // 50
    for _ in range(heartbeats):
        lone.peers["c"].append(3, (2, 1), [(3, 3, b"\x00three")])
        lone.run(50)
    assert lone.log.status().halted and not lone.problems
    assert (lone.term, lone.journal.term, lone.journal.last_index) == (1, 1, 2)
    lone.disk.make_room()
    for _ in range(heartbeats):
        lone.peers["c"].append(3, (2, 1), [(3, 3, b"\x00three")])
        lone.run(50)
        assert lone.term == lone.journal.term, "a restart would forget the term"
    assert (lone.term, lone.journal.last_index) == (3, 3) and not lone.log.status().halted
    assert lone.sent_of("append_result", "c")[-1].append_result.success


def test_a_full_disk_is_told_until_there_is_room_for_a_vote() -> None:
    """The journal's next file has its room already: the halt ended, and began anew with the next change of the term."""
    lone = Lone()
    lone.follow("b", 1, 2)
    lone.disk.fill(0)
    lone.peers["c"].append(3, (2, 1), [(3, 3, b"\x00three")])
    lone.run(50)
    assert lone.journal.reserve_ready
    for _ in range(3 * lone.config.disk_retry_ms // 50):
        assert "full" in lone.log.status().halted
        lone.run(50)
    lone.disk.make_room()
    lone.run(lone.config.disk_retry_ms + 200)
    assert not lone.log.status().halted and lone.journal.term == 1


def test_a_candidate_whose_disk_is_full_stays_a_slave() -> None:
    """It asks for no vote in a term that it may not remember having voted in."""
    lone = Lone()
    lone.follow("b", 1, 2)
    lone.drain()
    lone.disk.fill(0)
    halts: set[str] = set()
    for _ in range(2_000 // STEP_MS):
        lone.run(STEP_MS)
        halts.add(lone.log.status().halted)
        for peer_id, frame in lone.drain():
            if frame.WhichOneof("body") == "ping":
                pong = PeerFrame()
                pong.pong.echo_sent_ns = frame.ping.sent_ns
                lone.peers[peer_id].send(pong, frame.term)
            assert frame.WhichOneof("body") != "request_vote"
    assert any(halts), "never tried"
    assert lone.log.status().role is Role.SLAVE and lone.term == lone.journal.term == 1


def test_a_large_entry_does_not_hide_what_follows_it() -> None:
    """A deposed master with entries that nobody else has gives them up, however large the last one that it shares with
    the new master is: what is read of the log at once is bounded, and all that is cut must be seen."""
    lone = Lone(config=RaftConfig(batch_bytes_max=1_000))
    lone.peers["b"].append(1, (0, 0), [(1, 1, b"\x00" + bytes(2_000)), (2, 1, b"\x00lost"), (3, 1, b"\x00lost")])
    lone.run(2 * STEP_MS)
    assert lone.journal.last_index == 3
    lone.peers["c"].append(2, (1, 1), [(2, 2, b"\x00kept")], commit=2)
    lone.run(2 * STEP_MS)
    assert not lone.problems
    assert (lone.journal.last_index, lone.journal.last_term) == (2, 2)
    assert [command for _, _, command in lone.applied][-1] == b"kept"


def test_an_entry_that_cannot_be_read_is_not_written_and_ends_the_node() -> None:
    """A newer master's: what a majority cannot apply must not be committed by it, and is never passed over."""
    for entry in (b"\x00newer", naming(["a", "b", "c"], b"newer")):
        lone = Lone()
        lone.follow("b", 1, 2)
        lone.unreadable[b"newer"] = "field 1000 of Command"
        lone.drain()
        lone.peers["b"].append(1, (2, 1), [(3, 1, b"\x00fine"), (4, 1, entry)], commit=2)
        lone.run(STEP_MS)
        assert "entry 4" in lone.problems[0] and "field 1000 of Command" in lone.problems[0]
        assert lone.journal.last_index == 2
        assert not [f for f in lone.sent_of("append_result") if f.append_result.success]


def test_nothing_is_applied_behind_what_ended_the_node() -> None:
    """The state lacks an entry from then on: nobody may be told what became of a later one."""
    lone = Lone()
    lone.follow("b", 1, 4)
    applied: list[int] = []

    def apply(index: int, term: int, command: bytes) -> object:
        applied.append(index)
        if index == 2:
            lone.log._fatal("it cannot be read")
        return None

    lone.apply = apply  # type: ignore[method-assign]
    lone.peers["b"].append(1, (4, 1), [], commit=4)
    lone.run(2 * STEP_MS)
    assert applied == [1, 2]
    assert lone.problems == ["it cannot be read"]


def test_a_newcomer_that_has_just_started_grants_no_vote() -> None:
    """It may be a voter by its master's log, not yet by its own, and have answered it a moment ago: the lease counts
    on that answer."""
    lone = Lone(members=())
    lone.run(STEP_MS)
    lone.peers["b"].ask_for_vote(1)
    lone.run(STEP_MS)
    assert not lone.sent_of("vote")
    lone.run(lone.config.election_timeout_ms_min)
    lone.peers["b"].ask_for_vote(2)
    lone.run(STEP_MS)
    assert lone.sent_of("vote")
