"""Records of logs for the history (history.py): events at disks and wires, seen by log_watch.py, and events of runs of
the log alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from tickwheel.chaos.sim.history import Record


@dataclass(slots=True)
class VoteSeen(Record):
    """A node has recorded its vote in a term."""

    node: str
    boot: int
    term: int
    voted_for: str


@dataclass(slots=True)
class TermIgnored(Record):
    """A node took a frame of a higher term and stays in its own."""

    node: str
    boot: int
    term: int
    heard: int


@dataclass(slots=True)
class CommitSeen(Record):
    """An entry was applied for the first time anywhere; `holders` of the voters have it on stable storage."""

    node: str
    index: int
    term: int
    holders: int
    voters: int


@dataclass(slots=True)
class CommittedCut(Record):
    """A node cut an entry from its log that was applied somewhere."""

    node: str
    boot: int
    index: int
    term: int


@dataclass(slots=True)
class Recovered(Record):
    """A node's log after a start; `durable_before` is the last committed entry that was on stable storage before."""

    node: str
    boot: int
    last_index: int
    durable_before: int


@dataclass(slots=True)
class SentAgain(Record):
    """A master sends an entry again on a connection without being asked to."""

    node: str
    peer: str
    index: int
    sent_before: int


@dataclass(slots=True)
class AskedUnread(Record):
    """A node asks for an election after a stall while input waits for it unread. A shorter pause counts as none: there
    the server's loop reads first (node/server/driver.py), which a simulated machine does not have."""

    node: str
    boot: int
    waiting: int


@dataclass(slots=True)
class Unpickled(Record):
    """Code pickled by a stranger ran inside a node."""

    node: str
    boot: int


# -- the log alone


@dataclass(slots=True)
class Applied(Record):
    """A node applied an entry; `command` 0 is an entry that no client proposed."""

    node: str
    boot: int
    index: int
    term: int
    command: int


@dataclass(slots=True)
class Proposed(Record):
    node: str
    command: int


@dataclass(slots=True)
class ProposalEnded(Record):
    node: str
    command: int
    outcome: str
    index: int
