"""Staged publication: rows staged by a batch's winning attempts come once to each group, other rows of it never.

A batch belongs to a job. The cluster does not tell which commit of it won. The winner was asked for before any commit
was acknowledged, its run was not aborted before, and every delivered row belongs to the attempts that it named.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history_bulk import AbortAnswered, BlockStaged, CommitAnswered, CommitAsked, WriteSeen
from tickwheel.chaos.sim.history_messages import Delivered, ScheduleSent
from tickwheel.chaos.sim.world import MS

COMMITTED = ("STAGED_PUBLISHING", "STAGED_PUBLISHED")
GROUPS = ("ledger", "search")
LATE_NS = 1_000 * MS

_Batch = tuple[str, int]
"""(job, number)"""


@dataclass(slots=True)
class _Commit:
    run: str
    attempts: tuple[int, ...]


@dataclass(slots=True)
class _Known:
    """One batch as the checker knows it."""

    commits: list[_Commit] = field(default_factory=list)
    """Commits that may have won."""
    committed_ns: int = 0
    """Time since which it is certain that one has won; 0: it is not certain."""
    told: set[str] = field(default_factory=set)
    """Runs that were told of the commit."""
    asked_ns: dict[str, int] = field(default_factory=dict)
    """By run: when it first asked to commit."""
    published: int = -1
    """Number of messages published, as reported once publication was over; -1: not reported."""


class WritesOnce(Checker):
    """Judges the groups of writes.py, or those that a test names."""

    promise = "staged"

    def __init__(self) -> None:
        self._due_ms: dict[int, int] = {}
        """By uid: due time of every staged message."""
        self._staged: dict[int, set[int]] = {}
        """By attempt."""
        self._owner: dict[int, tuple[_Batch, str, int]] = {}
        """Batch, run and attempt of each message."""
        self._batches: dict[_Batch, _Known] = {}
        self._aborted: dict[str, int] = {}
        self._ids: dict[int, int] = {}
        self._came: dict[str, set[int]] = {group: set() for group in GROUPS}

    def _on_block_staged(self, record: BlockStaged) -> None:
        self._staged.setdefault(record.attempt, set()).update(record.uids)
        for uid in record.uids:
            self._owner[uid] = ((record.job, record.batch), record.run, record.attempt)

    def _on_schedule_sent(self, record: ScheduleSent) -> None:
        # Written just before the block that it belongs to; without a node.
        if not record.node:
            self._due_ms.update((row.uid, row.due_ms or 0) for row in record.rows)

    def _on_commit_asked(self, record: CommitAsked) -> None:
        known = self._known(record.job, record.batch)
        known.asked_ns[record.run] = record.at_ns
        if not known.committed_ns and record.run not in self._aborted:
            known.commits.append(_Commit(record.run, record.attempts))

    def _known(self, job: str, batch: int) -> _Known:
        return self._batches.setdefault((job, batch), _Known())

    def _on_delivered(self, record: Delivered) -> None:
        if record.uid not in self._owner:
            return
        uid = record.uid
        (job, batch), run, attempt = self._owner[uid]
        what = f"{record.node} delivers message {uid} of attempt {attempt} of {run} of write {job}/{batch}"
        if self._ids.setdefault(uid, record.id) != record.id:
            self.broken(f"{what} under two ids ({self._ids[uid]:#x}, {record.id:#x}): published twice")
        self._came.setdefault(record.group, set()).add(uid)
        known = self._known(job, batch)
        known.commits = [commit for commit in known.commits if attempt in commit.attempts]
        if not known.commits:
            why = "its run was aborted" if run in self._aborted else "no commit that can have won names that attempt"
            self.broken(f"{what}; {why}")

    def _on_commit_answered(self, record: CommitAnswered) -> None:
        known = self._known(record.job, record.batch)
        name = f"write {record.job}/{record.batch}"
        if record.state in COMMITTED:
            known.committed_ns = known.committed_ns or record.at_ns
            known.told.add(record.run)
            if not known.commits:
                self.broken(f"{name} is {record.state}; no commit of it can have been carried out")
            return
        # A commit that was on its way before may have been refused before the other was carried out.
        asked_ns = known.asked_ns.get(record.run, record.at_ns)
        if known.committed_ns and (record.run in known.told or asked_ns > known.committed_ns):
            self.broken(f"{name}: a commit of {record.run} is {record.state} after one was acknowledged")
        # A refused commit was not carried out before, nor will it be: its rows will never be staged again.
        known.commits = [commit for commit in known.commits if commit.run != record.run]

    def _on_abort_answered(self, record: AbortAnswered) -> None:
        known = self._known(record.job, record.batch)
        if record.state in COMMITTED:
            return
        if known.committed_ns and known.committed_ns < record.asked_ns:
            self.broken(
                f"write {record.job}/{record.batch} is {record.state} for an abort; its commit was acknowledged before"
            )
        self._aborted[record.run] = record.at_ns
        known.commits = [commit for commit in known.commits if commit.run != record.run]
        for uid in self._ids:
            if self._owner[uid][1] == record.run:
                self.broken(f"{record.run} was aborted; its message {uid} was delivered before")

    def _on_write_seen(self, record: WriteSeen) -> None:
        known = self._known(record.job, record.batch)
        name = f"write {record.job}/{record.batch}"
        if record.state not in COMMITTED:
            self.broken(f"{name} is {record.state} after its commit was acknowledged")
        if record.state != "STAGED_PUBLISHED" or not record.rows:
            return  # rows are counted for the last batch alone
        if record.published != record.rows or record.discarded:
            self.broken(f"{name}: {record.published} of {record.rows} rows published, {record.discarded} discarded")
        known.published = record.rows

    def _rows(self, commit: _Commit) -> set[int]:
        return set().union(*(self._staged.get(attempt, set()) for attempt in commit.attempts))

    def _lacking(self, known: _Known, at_ns: int) -> list[tuple[str, int]]:
        """(group, uid) of messages that have not come, for the possible winner that lacks the fewest."""
        wall_ms = self.wall_ms(at_ns)
        least: list[tuple[str, int]] | None = None
        for commit in known.commits:
            rows = self._rows(commit)
            due = sorted(uid for uid in rows if self._due_ms[uid] <= wall_ms)
            lacking = [(group, uid) for group, came in self._came.items() for uid in due if uid not in came]
            if known.published not in (-1, len(rows)):
                continue
            if least is None or len(lacking) < len(least):
                least = lacking
        return [("", 0)] if least is None else least

    def missing(self, at_ns: int) -> str:
        for (job, batch), known in self._batches.items():
            if known.committed_ns and (lacking := self._lacking(known, at_ns)):
                return f"{len(lacking)} deliveries of write {job}/{batch}, for instance {lacking[0]}"
        return ""

    def settle_accounts(self, at_ns: int) -> None:
        for (job, batch), known in self._batches.items():
            if known.committed_ns and (lacking := self._lacking(known, at_ns - LATE_NS)):
                group, uid = lacking[0]
                what = f"message {uid} to {group}" if uid else f"no commit of it has {known.published} messages"
                self.broken(f"write {job}/{batch} was committed and has not come whole: {what}")
