"""Each gap of pysyncobj 0.3.17: walked into on purpose, harmless with its guard, harmful without.

A scenario returns whether the harm came about. It is run twice, with all guards and with its own one switched
off: the first must be harmless, the second harmful, or the guard guards nothing. Gaps that are closed by not
using the code that has them are tested by what is used instead.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import fields, replace

import pysyncobj.syncobj
import pytest

from tests.replication.lone import MS, STEP_MS, Lone, committed
from tickwheel.proto.peer_pb2 import AppendEntries, AppendResult, PeerFrame, Ping, TimeoutNow
from tickwheel.replication.config import RaftConfig
from tickwheel.replication.entries import REGULAR
from tickwheel.replication.guards import Guards
from tickwheel.replication.log import ProposalOutcome, Role
from tickwheel.replication.pysyncobj_globals import PickleRefusedError, entered
from tickwheel.replication.pysyncobj_seam import WrongLibraryError, require_known_version

Scenario = Callable[[Guards], bool]
SCENARIOS: dict[str, tuple[int, Scenario]] = {}
"""Guard to (number of the gap, scenario)."""


def scenario(gap: int) -> Callable[[Scenario], Scenario]:
    """Enter a scenario, named after its guard, into the table."""

    def enter(function: Scenario) -> Scenario:
        SCENARIOS[function.__name__] = (gap, function)
        return function

    return enter


@scenario(1)
def known_entries_stripped(guards: Guards) -> bool:
    """A slave that holds and acknowledged 1..5 gets the message with 1..2 once more: 3..5 must stay."""
    lone = Lone(guards)
    lone.follow("b", 1, 5, commit=0)
    lone.peers["b"].append(1, (0, 0), [(1, 1, REGULAR + b"1"), (2, 1, REGULAR + b"2")])
    lone.run(STEP_MS)
    return lone.journal.last_index < 5


@scenario(1)
def resets_fenced(guards: Guards) -> bool:
    """A success for an early message arrives while later ones are under way: nothing is sent twice."""
    lone = Lone(guards)
    term = lone.lead()
    first = lone.journal.last_index + 1
    for number in range(4):
        lone.propose(b"command %d" % number)
    lone.drain()
    lone.peers["b"].answer(term, first + 1)
    lone.run(STEP_MS)
    again = [e.index for f in lone.sent_of("append_entries", "b") for e in f.append_entries.entries]
    return bool(again)


@scenario(2)
def bare_commit_clamped(guards: Guards) -> bool:
    """A heartbeat that verifies no entry names a commit index; our entries up to it may not be the committed ones."""
    lone = Lone(guards)
    lone.follow("b", 1, 3)
    lone.peers["c"].heartbeat(2, commit=3)
    lone.run(STEP_MS)
    return any(command for _, _, command in lone.applied)


@scenario(3)
def answers_fenced(guards: Guards) -> bool:
    """An answer of an earlier connection says that a slave holds what it has lost since: it commits nothing."""
    lone = Lone(guards)
    term = lone.lead()
    outcome = lone.propose(b"only here")
    lone.run(STEP_MS)
    stale = AppendResult(next_index=lone.journal.last_index + 1, success=True)
    lone.peers["b"].send(PeerFrame(append_result=stale), term, lone.connection_of("b") - 1)
    lone.run(STEP_MS)
    return committed(outcome)


@scenario(4)
def votes_counted_once(guards: Guards) -> bool:
    """Of five, one peer's vote that comes twice and this node's own make no majority."""
    lone = Lone(guards, others=("b", "c", "d", "e"))
    for _ in range(1_000):
        lone.run(STEP_MS)
        for peer_id, frame in lone.drain():
            if frame.WhichOneof("body") == "ping":
                pong = PeerFrame()
                pong.pong.echo_sent_ns = frame.ping.sent_ns
                lone.peers[peer_id].send(pong, frame.term)
            elif frame.WhichOneof("body") == "request_vote" and peer_id == "b":
                lone.peers["b"].vote(frame.term)
                lone.peers["b"].vote(frame.term)
                return lone.log.status().role is Role.MASTER
    raise AssertionError("never stood for election")


@scenario(5)
def higher_term_obeyed(guards: Guards) -> bool:
    """A frame of a higher term ends mastership at once, whatever it says."""
    lone = Lone(guards)
    term = lone.lead()
    lone.peers["b"].send(PeerFrame(ping=Ping(sent_ns=1)), term + 1)
    lone.run(STEP_MS)
    return lone.log.status().role is Role.MASTER


@scenario(6)
def campaign_asked_first(guards: Guards) -> bool:
    """A node whose questions nobody answers does not raise its term, for then it would depose a healthy master."""
    lone = Lone(guards)
    lone.run(5_000)
    return lone.term > 0


@scenario(6)
def votes_sticky(guards: Guards) -> bool:
    """A node that hears its master grants no vote to one that does not, and keeps its term."""
    lone = Lone(guards)
    lone.run(lone.config.election_timeout_ms_min)
    lone.follow("b", 1, 1)
    lone.peers["c"].ask_for_vote(2)
    lone.run(STEP_MS)
    return lone.term > 1


@scenario(7)
def lease_from_sending(guards: Guards) -> bool:
    """Answers that took longer than the lease prove nothing about now."""
    lone = Lone(guards)
    term = lone.lead()
    lone.drain()
    sent_ns = lone.clock.now_ns
    lone.clock.now_ns += (lone.config.lease_ms + 1) * MS
    for peer in lone.peers.values():
        peer.answer(term, lone.journal.last_index + 1, echo_ns=sent_ns)
    return lone.log.lease_held()


@scenario(8)
def durable_before_acknowledged(guards: Guards) -> bool:
    """An entry that the disk has not taken yet is not acknowledged."""
    lone = Lone(guards)
    lone.peers["b"].append(1, (0, 0), [(1, 1, REGULAR + b"1")])
    lone.run(100, disk=False)
    early = [f for f in lone.sent_of("append_result") if f.append_result.success and f.append_result.next_index == 2]
    lone.executor.run()
    late = [f for f in lone.sent_of("append_result") if f.append_result.success and f.append_result.next_index == 2]
    assert late, "acknowledged once it is durable"
    return bool(early)


@scenario(9)
def dumps_refused(guards: Guards) -> bool:
    """pysyncobj is told to write a dump and cut its log: with its own serializer it would pickle and forget entries."""
    lone = Lone(guards)
    lone.lead()
    for number in range(3):
        lone.propose(b"%d" % number)
    lone.run(STEP_MS)
    lone.engine.forceLogCompaction()
    lone.run(STEP_MS)
    return bool(lone.problems)


@scenario(10)
def apply_errors_fatal(guards: Guards) -> bool:
    """An exception in apply stops the node with its reason; it does not come back with every tick."""
    lone = Lone(guards)
    lone.follow("b", 1, 2)
    lone.apply_raises = ValueError("an impossible state")
    lone.peers["b"].append(1, (2, 1), [], commit=2)
    raised = 0
    for _ in range(3):
        try:
            lone.run(STEP_MS)
        except ValueError:
            raised += 1
    assert raised or ["an impossible state" in problem for problem in lone.problems] == [True]
    return raised > 1


@scenario(12)
def loss_reported_unknown(guards: Guards) -> bool:
    """A proposal under way when mastership is lost is not reported as refused: it commits a moment later."""
    lone = Lone(guards)
    term = lone.lead()
    outcome = lone.propose(b"in doubt")
    index = lone.journal.last_index
    lone.run(STEP_MS)
    lone.peers["b"].append(term + 1, (index, term), [(index + 1, term + 1, b"\x01")], commit=index + 1)
    lone.run(2 * STEP_MS)
    assert (index, term, b"in doubt") in lone.applied
    return outcome[0].outcome is not ProposalOutcome.UNKNOWN


class Exploit:
    """Unpickling it runs code of whoever sent it."""

    ran = 0

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return run_exploit, ()


def run_exploit() -> None:
    """What the sender wants to run."""
    Exploit.ran += 1


@scenario(13)
def pickle_refused(guards: Guards) -> bool:
    """Nothing inside the engine can unpickle, whatever it got from where."""
    lone = Lone(guards)
    data, before = pickle.dumps(Exploit()), Exploit.ran
    with entered(lone.engine):
        try:
            pysyncobj.syncobj.pickle.loads(data)
        except PickleRefusedError:
            return False
    return Exploit.ran > before


@scenario(15)
def slices_bounded(guards: Guards) -> bool:
    """What pysyncobj reads of a long log at once is bounded, however far behind a slave is."""
    lone = Lone(guards, config=RaftConfig(batch_entries_max=16))
    lone.follow("b", 1, 500)
    return len(lone.engine.view.rows(1, 500)) > 16


@scenario(16)
def foreign_commands_fatal(guards: Guards) -> bool:
    """A membership command of pysyncobj (pickled, unguarded) in the log stops the node; it does not pass in silence."""
    lone = Lone(guards)
    lone.peers["b"].append(1, (0, 0), [(1, 1, b"\x02" + pickle.dumps(("add", "evil:1")))])
    lone.run(STEP_MS)
    lone.peers["b"].append(1, (1, 1), [], commit=1)
    lone.run(2 * STEP_MS)
    return not lone.problems


@scenario(17)
def proposals_local(guards: Guards) -> bool:
    """A command that pysyncobj queued in one term is not appended in a later one, of which its sender knows nothing."""
    lone = Lone(guards)
    lone.engine._applyCommand(REGULAR + b"queued while deposed", None)
    lone.lead()
    lone.run(2 * STEP_MS)
    slave = Lone(guards)
    slave.follow("b", 1, 1)
    assert slave.propose(b"not ours to take")[0].outcome is ProposalOutcome.NOT_MASTER
    entries = lone.journal.slice(1, 100, 1 << 20)
    return any(b"queued while deposed" in command for _, _, command in entries)


@scenario(19)
def own_durability_counts(guards: Guards) -> bool:
    """Slaves have acknowledged, the master's own disk has not: the master commits nothing by counting itself."""
    lone = Lone(guards, others=("b", "c", "d", "e"))
    term = lone.lead()
    outcome = lone.propose(b"where is it")
    lone.run(2 * STEP_MS, disk=False)
    for name in ("b", "c"):
        lone.peers[name].answer(term, lone.journal.last_index + 1)
    lone.run(2 * STEP_MS, disk=False)
    early = committed(outcome)
    lone.executor.run()
    lone.run(2 * STEP_MS)
    assert committed(outcome)
    return early


@scenario(20)
def starts_silent(guards: Guards) -> bool:
    """A node that has just started may have heard a master a moment before: it grants no vote yet."""
    lone = Lone(guards)
    lone.run(STEP_MS)
    lone.peers["b"].ask_for_vote(1)
    lone.run(STEP_MS)
    return bool(lone.sent_of("vote"))


@scenario(20)
def input_drained_first(guards: Guards) -> bool:
    """After a stall the heartbeats that wait in the socket are read before an overdue election begins."""
    lone = Lone(guards)
    lone.follow("b", 1, 1)
    lone.drain()
    lone.clock.now_ns += 2_000 * MS
    lone.log.tick()
    return bool(lone.sent_of("ping"))


@scenario(21)
def transfer_marked(guards: Guards) -> bool:
    """The vote request of a planned handover says what it is, and is not refused as too early."""
    lone = Lone(guards)
    lone.follow("b", 1, 1)
    lone.peers["b"].send(PeerFrame(timeout_now=TimeoutNow()), 1)
    lone.run(STEP_MS)
    marks = {frame.request_vote.transfer for frame in lone.sent_of("request_vote")}
    other = Lone(guards)
    other.run(other.config.election_timeout_ms_min)
    other.follow("b", 1, 1)
    other.peers["c"].ask_for_vote(2, transfer=True in marks)
    other.run(STEP_MS)
    return not other.sent_of("vote")


@scenario(22)
def apply_sliced(guards: Guards) -> bool:
    """Applying a long stretch of committed entries leaves room for heartbeats."""
    lone = Lone(guards)
    lone.follow("b", 1, 400)
    lone.apply_takes_ns = MS
    before_ns = lone.clock.now_ns
    lone.peers["b"].append(1, (400, 1), [], commit=400)
    lone.log.tick()
    slice_ms = (lone.clock.now_ns - before_ns) / MS
    while len(lone.applied) < 400 and not lone.problems:
        lone.run(STEP_MS)
    return slice_ms > 2 * lone.config.apply_slice_ms


@pytest.mark.parametrize("guard", [name for _, name in sorted((gap, name) for name, (gap, _) in SCENARIOS.items())])
def test_guard_is_needed_and_enough(guard: str) -> None:
    """Without its guard the gap does harm, with it none."""
    run = SCENARIOS[guard][1]
    assert not run(Guards()), "harm in spite of the guard"
    assert run(replace(Guards(), **{guard: False})), "no harm without the guard: it guards nothing here"


def test_every_guard_has_a_scenario() -> None:
    """No switch without the scenario that shows what it is for."""
    assert {field.name for field in fields(Guards)} == set(SCENARIOS)


def test_no_other_version_is_accepted() -> None:
    """The guards hold for the internals of one version of pysyncobj."""
    require_known_version()
    with pytest.raises(WrongLibraryError, match=r"0\.3\.18"):
        require_known_version("0.3.18")


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 3 * 65_536, 1 << 20])
def test_gap_11_a_command_travels_whole_and_once(size: int) -> None:
    """Sizes at which pysyncobj would cut a command in pieces, and send its end twice, go in one message, once."""
    lone = Lone()
    lone.lead()
    lone.drain()
    lone.propose(bytes(size - 1))
    lone.run(STEP_MS)
    messages = [f.append_entries for f in lone.sent_of("append_entries", "b") if f.append_entries.entries]
    assert [[len(entry.command) for entry in message.entries] for message in messages] == [[size]]


def test_gap_14_an_idle_master_does_not_grow_its_log() -> None:
    """A minute of syncs every 50 ms adds no entry."""
    lone = Lone()
    term = lone.lead()
    last, before = lone.journal.last_index, lone.syncs
    for _ in range(60_000 // 50):
        lone.run(50)
        for peer in lone.peers.values():
            peer.answer(term, last + 1)
    assert lone.log.status().role is Role.MASTER
    assert lone.syncs - before > 1_000
    assert lone.journal.last_index == last


def test_gap_18_a_checkpoint_leaves_the_entries_behind_it() -> None:
    """A checkpoint at 10 that reaches a log of 20 keeps 11..20, which may have been acknowledged."""
    lone = Lone()
    lone.follow("b", 1, 20)
    lone.journal.reset_to(10, 1)
    assert (lone.journal.base_index, lone.journal.last_index) == (10, 20)
    assert lone.engine.view.getRaftCommitIndex() <= lone.journal.durable_index


def test_gap_21_proposals_are_parked_during_a_handover() -> None:
    """Under load the target never reaches the end of the log unless proposals stop; they are told to retry."""
    lone = Lone()
    term = lone.lead()
    ended: list[str | None] = []
    lone.log.transfer("b", ended.append)
    assert lone.propose(b"too late")[0].outcome is ProposalOutcome.QUEUE_FULL
    for peer in lone.peers.values():
        peer.answer(term, lone.journal.last_index + 1)
    lone.run(2 * STEP_MS)
    assert lone.sent_of("timeout_now", "b")
    assert not lone.log.lease_held()
    assert not ended


def test_bytes_for_a_gap_2_message_verify_nothing() -> None:
    """An append_entries without previous_index is told where this node stands, and acknowledges nothing."""
    lone = Lone()
    lone.follow("b", 1, 3)
    lone.drain()
    lone.peers["b"].send(PeerFrame(append_entries=AppendEntries(commit_index=3, sent_ns=5)), 1)
    results = [frame.append_result for frame in lone.sent_of("append_result")]
    assert [(r.next_index, r.success, r.reset, r.echo_sent_ns) for r in results] == [(1, False, True, 5)]
