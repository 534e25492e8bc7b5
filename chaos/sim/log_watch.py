"""Watches a log from outside: roles, votes and leases, the entries on each disk, and the frames on the wires.

One `Census` for a run knows all journals. One `LogWatch` for each boot stands between a log and its ports, and records
events for the checkers. It reads the log's internals and changes nothing. So a promise shows as broken at the moment it
breaks, not only when bad luck lets a client see it.
"""

from __future__ import annotations

from collections.abc import Callable

from tickwheel.chaos.sim.history_log import (
    AskedUnread,
    CommitSeen,
    CommittedCut,
    Recovered,
    SentAgain,
    TermIgnored,
    VoteSeen,
)
from tickwheel.chaos.sim.history_machines import LeaseSeen, RoleSeen
from tickwheel.chaos.sim.node import Machine
from tickwheel.proto.peer_pb2 import PeerFrame
from tickwheel.replication.journal import Journal
from tickwheel.replication.ports import NS_PER_MS
from tickwheel.replication.raft import RaftLog


class Census:
    """All journals of a run, what was applied first and where, who heard which master when."""

    def __init__(self) -> None:
        self.journals: dict[str, Journal] = {}
        """The newest of each machine, also while it is down; the last one of a disk that was wiped."""
        self.applied_term: dict[int, int] = {}
        self.highest_applied = 0
        self.refuses_until_ns: dict[tuple[str, str], tuple[int, int]] = {}
        """(slave, master) to (term, until when it votes for nobody else), in true time."""

    def holders(self, index: int, term: int, voters: tuple[str, ...]) -> int:
        """How many voters have this entry on stable storage."""
        return sum(1 for name in voters if name in self.journals and _holds(self.journals[name], index, term))

    def durable(self, journal: Journal) -> int:
        """The highest committed entry that a journal has on stable storage."""
        index = min(journal.durable_index, journal.last_index, self.highest_applied)
        while index > journal.base_index and journal.term_at(index) != self.applied_term[index]:
            index -= 1  # entries that were never committed may be dropped
        return index


def _holds(journal: Journal, index: int, term: int) -> bool:
    if index <= journal.base_index:
        return True
    durable = min(journal.durable_index, journal.last_index)
    return index <= durable and journal.term_at(index) == term


class LogWatch:
    """Records one boot of a log. Its methods are called in the order of the events."""

    def __init__(self, machine: Machine, census: Census) -> None:
        self._machine = machine
        self._census = census
        self._standing = ("", -1)
        self._lease = (-1, -1)
        self._vote = (0, "")
        self._sent: dict[str, tuple[tuple[int, int], int]] = {}
        self._timeout_ns = self._stall_ns = 0
        self.entries_sent_most = 0
        self.applied_most = 0
        self._applied_now = 0
        self._committed_by: tuple[int, tuple[str, ...]] = (0, ())
        """Commit index at the last change of the voters, and the voters before it: a change may be written while
        entries committed before wait to be applied."""

    def attach(self, log: RaftLog) -> None:
        """A log was made on this machine: of a boot, or of a checkpoint that a peer sent."""
        machine, journal = self._machine, log.journal
        assert isinstance(journal, Journal)
        before = self._census.journals.get(machine.name)
        if not machine.wiped:  # entries on a disk other than the one it joined with do not count
            if before is not None:
                durable_before = self._census.durable(before)
                machine.note(Recovered, journal.last_index, durable_before)
            self._census.journals[machine.name] = journal
        self._timeout_ns = log.config.election_timeout_ms_min * NS_PER_MS
        self._stall_ns = log.config.stall_ms * NS_PER_MS
        self._vote = (journal.term, journal.voted_for)
        self._sent.clear()
        engine = log.engine
        check_cut = engine.view.check_cut

        def observed_cut(index: int) -> None:
            check_cut(index)
            if self._census.applied_term.get(index) == journal.term_at(index):
                machine.note(CommittedCut, index, journal.term_at(index))

        engine.view.check_cut = observed_cut
        voters_written = log.voters_written

        def observed_voters(index: int, entry: bytes) -> None:
            self._committed_by = (engine.commit_index, log.voters)
            voters_written(index, entry)

        log.voters_written = observed_voters  # type: ignore[method-assign]
        self._committed_by = (0, ())
        machine.network.sent = self.sent

    @property
    def term(self) -> int:
        """As last told."""
        return self._standing[1]

    # -- roles, votes, leases

    def role(self, role: str, term: int, voters: tuple[str, ...]) -> None:
        """As the log says."""
        if (role, term) != self._standing:
            self._standing = (role, term)
            machine = self._machine
            machine.note(RoleSeen, role, term, voters)
            machine.world.tell(machine.name, f"is {role} in term {term}")

    def lease(self, term: int, until_ns: int, others: tuple[str, ...]) -> None:
        """`until_ns` by the machine's clock; 0: not held."""
        if (term, until_ns) == self._lease or not (until_ns or self._lease[1]):
            return
        self._lease = (term, until_ns)
        machine = self._machine
        true_ns = machine.clock.true_ns(until_ns) if until_ns else 0
        refused_ns = self._refused_until_ns(term, others) if until_ns and others else 1 << 63
        machine.note(LeaseSeen, term, true_ns, refused_ns)

    def _refused_until_ns(self, term: int, others: tuple[str, ...]) -> int:
        refuses = self._census.refuses_until_ns
        until = [refuses.get((other, self._machine.name), (0, 0)) for other in others]
        known = sorted((until_ns for heard_term, until_ns in until if heard_term == term), reverse=True)
        needed = (len(others) + 1) // 2
        return known[needed - 1] if len(known) >= needed else 0

    def observe(self, log: RaftLog) -> None:
        """At the end of a turn."""
        self._look_at_vote(log)
        machine = self._machine
        until_ns = log.lease_until_ns()
        if until_ns or self._lease[1]:  # else there was none and is none
            held = until_ns > machine.clock.monotonic_ns()
            self.lease(self.term, until_ns if held else 0, log.other_voters)
        if self._applied_now:
            self.applied_most = max(self.applied_most, self._applied_now)
            self._applied_now = 0

    def _look_at_vote(self, log: RaftLog) -> None:
        vote = (log.journal.term, log.journal.voted_for)
        if vote != self._vote:
            self._vote = vote
            if vote[1]:
                self._machine.note(VoteSeen, *vote)

    # -- entries

    def applied(self, index: int, term: int, log: RaftLog) -> None:
        """The log hands an entry to the node."""
        self._applied_now += 1
        census = self._census
        if index <= census.highest_applied:
            return
        census.highest_applied = index
        census.applied_term[index] = term
        committed, voters = self._committed_by
        if index > committed or not voters:
            voters = log.voters  # a newcomer knew none before
        holders = census.holders(index, term, voters)
        self._machine.history.note(CommitSeen, self._machine.name, index, term, holders, len(voters))

    # -- frames

    def received(self, log: RaftLog, peer_id: str, frame: PeerFrame, hand_on: Callable[[str, PeerFrame], bool]) -> bool:
        """A frame comes in; `hand_on` gives it to the node. Returns what that returns."""
        wants_tick = hand_on(peer_id, frame)
        self._look_at(log, peer_id, frame)
        return wants_tick

    def _look_at(self, log: RaftLog, peer_id: str, frame: PeerFrame) -> None:
        """What a frame that has just been taken shows of the node."""
        machine, peers, engine = self._machine, log.peers, log.engine
        now_ns = machine.clock.monotonic_ns()
        known = peers.peers.get(peer_id)
        if known is None or known.last_heard_ns != now_ns:
            return  # refused
        kind = frame.WhichOneof("body")
        if kind == "append_entries":
            if peers.master_heard_ns == now_ns and engine.term == frame.term:
                until_ns = machine.clock.true_ns(now_ns + self._timeout_ns)
                self._census.refuses_until_ns[machine.name, peer_id] = (frame.term, until_ns)
        elif kind == "request_vote":
            self._look_at_vote(log)  # a node may vote in two terms in one turn
        elif kind == "append_result" and frame.append_result.reset and peer_id in self._sent:
            sent_on, highest = self._sent[peer_id]
            self._sent[peer_id] = (sent_on, min(highest, frame.append_result.next_index - 1))
        if engine.term < frame.term and kind != "request_vote" and log.heeds and peer_id in log.voters:
            machine.note(TermIgnored, engine.term, frame.term)

    def sent(self, peer_id: str, frame: PeerFrame) -> None:
        """A frame was put on its way."""
        entries = frame.append_entries.entries
        if entries:
            self.entries_sent_most = max(self.entries_sent_most, len(entries))
            sent_on, first = (frame.term, frame.connection_id), entries[0].index
            known_on, highest = self._sent.get(peer_id, (sent_on, 0))
            if known_on != sent_on:
                highest = 0
            if first <= highest:
                self._machine.history.note(SentAgain, self._machine.name, peer_id, first, highest)
            self._sent[peer_id] = (sent_on, max(highest, entries[-1].index))
        elif frame.HasField("ping") and self._machine.unread and self._machine.late_ns > self._stall_ns:
            machine = self._machine
            machine.note(AskedUnread, machine.unread)
