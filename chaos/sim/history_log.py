"""Records of logs for the history (history.py): events at disks and wires, seen by log_watch.py, and events of runs of
the log alone.
"""

from __future__ import annotations

from tickwheel.chaos.sim.history import Record
from tickwheel.chaos.sim.history_machines import OfBoot


class VoteSeen(OfBoot):
    """A node has recorded its vote in a term."""

    term: int
    voted_for: str


class TermIgnored(OfBoot):
    """A node took a frame of a higher term and stays in its own."""

    term: int
    heard: int


class CommitSeen(Record):
    """An entry was applied for the first time anywhere; `holders` of the voters have it on stable storage."""

    node: str
    index: int
    term: int
    holders: int
    voters: int


class CommittedCut(OfBoot):
    """A node cut an entry from its log that was applied somewhere."""

    index: int
    term: int


class Recovered(OfBoot):
    """A node's log after a start; `durable_before` is the last committed entry that was on stable storage before."""

    last_index: int
    durable_before: int


class SentAgain(Record):
    """A master sends an entry again on a connection without being asked to."""

    node: str
    peer: str
    index: int
    sent_before: int


class AskedUnread(OfBoot):
    """A node asks for an election when its timer comes too late and input waits for it unread. A smaller delay counts
    as none: there the server's loop reads first (node/server/driver.py), which a simulated machine does not have."""

    waiting: int


class Unpickled(OfBoot):
    """Code pickled by a stranger ran inside a node."""


# -- the log alone


class Applied(OfBoot):
    """A node applied an entry; `command` 0 is an entry that no client proposed."""

    index: int
    term: int
    command: int


class Proposed(Record):
    node: str
    command: int


class ProposalEnded(Record):
    node: str
    command: int
    outcome: str
    index: int
