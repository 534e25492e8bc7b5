"""The check of append_entries on a slave, before pysyncobj sees them: no message may cut committed entries.

`judge` takes an append_entries of the current or a higher term, and decides what pysyncobj gets and how this node
answers. Pure: it reads the journal and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tickwheel.proto.peer_pb2 import AppendEntries
from tickwheel.replication.entries import REGULAR, VOTERS, split
from tickwheel.replication.guards import Guards
from tickwheel.replication.journal import Journal
from tickwheel.replication.pysyncobj_seam import Message


class ImpossibleMessageError(Exception):
    """A message that no healthy master of the same version sends. Stops the node: one side may have lost entries."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The decision on an append_entries."""

    hand_on: Message | None
    """The message for pysyncobj; None for no message."""
    next_index: int = 0
    """The index that the answer asks for next; 0: pysyncobj answers itself, or there is no answer."""
    success: bool = False
    reset: bool = False


def judge(term: int, append: AppendEntries, journal: Journal, commit_index: int, guards: Guards) -> Judgement:
    """Decide on an append_entries in a frame of `term`.

    Strips entries that the journal already has, so that they truncate nothing, and clamps the commit index to the
    entries that the message verifies. Raises ImpossibleMessageError if the message replaces committed entries.
    """
    if not append.HasField("previous_index"):
        # The message verifies no entry, so it commits none.
        commit = min(append.commit_index, commit_index) if guards.bare_commit_clamped else append.commit_index
        return Judgement({"type": "append_entries", "term": term, "commit_index": commit})
    previous, previous_term = append.previous_index, append.previous_term
    rows = [(entry.command, entry.index, entry.term) for entry in append.entries]
    if not guards.known_entries_stripped:
        return Judgement(_message(term, append.commit_index, previous, previous_term, rows))
    last = journal.last_index
    if previous > last:
        # Not `last + 1`: entries after the commit index may differ too. Two answers that send the master to different
        # places can then alternate for ever.
        return Judgement(_heartbeat(term, 0, commit_index), next_index=commit_index + 1, reset=True)
    if previous < journal.base_index:
        # Entries up to the base are committed and applied here, so the master's are equal.
        rows = [row for row in rows if row[1] > journal.base_index]
        previous, previous_term = journal.base_index, journal.base_term
        if not rows and append.entries and append.entries[-1].index < journal.base_index:
            previous = int(append.entries[-1].index)
            return Judgement(_heartbeat(term, append.commit_index, commit_index, previous), previous + 1, True)
    if journal.term_at(previous) != previous_term:
        if previous <= commit_index:
            raise ImpossibleMessageError(
                f"entry {previous} is committed with term {journal.term_at(previous)}, a master of term {term} "
                f"holds term {previous_term} there"
            )
        return Judgement(_heartbeat(term, 0, commit_index), next_index=commit_index + 1, reset=True)
    known = 0
    while known < len(rows) and rows[known][1] <= last and journal.term_at(rows[known][1]) == rows[known][2]:
        known += 1
    matched = previous + known
    if known == len(rows) and last > matched:
        return Judgement(_heartbeat(term, append.commit_index, commit_index, matched), matched + 1, True)
    if known < len(rows) and matched < commit_index:
        raise ImpossibleMessageError(
            f"a master of term {term} wants entry {matched + 1} replaced, which is committed up to {commit_index}"
        )
    return Judgement(_message(term, append.commit_index, matched, journal.term_at(matched), rows[known:]))


def check_readable(rows: Sequence[tuple[bytes, int, int]], problem_of: Callable[[bytes, int], str]) -> None:
    """Raise ImpossibleMessageError if this version cannot read an entry, before it is written.

    Voters count from when they are written, so a list must be readable by then. And a majority must not commit an
    entry that it cannot apply.
    """
    for entry, index, _ in rows:
        kind = entry[:1]
        if kind == REGULAR:
            problem = problem_of(entry, 1)
        elif kind == VOTERS:
            try:
                problem = problem_of(entry, len(entry) - len(split(entry)[1]))
            except ValueError as error:
                problem = str(error)
        else:
            continue
        if problem:
            raise ImpossibleMessageError(
                f"entry {index} of the master cannot be read by this version ({problem}): it is not written, and this "
                "node stops; start the version that the other nodes run"
            )


def _heartbeat(term: int, leader_commit: int, own_commit: int, matched: int = 0) -> Message:
    """A message without entries. It commits at most up to `matched`, or what this node has committed already."""
    commit = max(min(leader_commit, matched), min(leader_commit, own_commit))
    return {"type": "append_entries", "term": term, "commit_index": commit}


def _message(term: int, commit: int, previous: int, previous_term: int, rows: list[tuple[bytes, int, int]]) -> Message:
    return {
        "type": "append_entries",
        "term": term,
        "commit_index": commit,
        "entries": rows,
        "prevLogIdx": previous,
        "prevLogTerm": previous_term,
    }
