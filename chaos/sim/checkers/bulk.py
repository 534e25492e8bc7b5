"""What comes in bulk comes once: staged publication, bulk load and the cold tier."""

from __future__ import annotations

from dataclasses import dataclass, field

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history_bulk import (
    AbortAnswered,
    BlockStaged,
    ColdListed,
    ColdLoaded,
    ColdLooked,
    ColdParked,
    CommitAnswered,
    CommitAsked,
    LoadAnswered,
    TakeOverAsked,
    WriteSeen,
)
from tickwheel.chaos.sim.history_messages import (
    CancelAnswered,
    CancelSent,
    Delivered,
    RescheduleAnswered,
    RescheduleSent,
    ScheduleSent,
)
from tickwheel.chaos.sim.world import MS

COMMITTED = ("STAGED_PUBLISHING", "STAGED_PUBLISHED")
WRITTEN_FOR = ("ledger", "search")
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
    """Staged publication: rows staged by a batch's winning attempts come once to each group, other rows of it never.

    A batch belongs to a job. The cluster does not tell which commit of it won. The winner was asked for before any
    commit was acknowledged, its run was not aborted before, and every delivered row belongs to the attempts that it
    named.

    Judges the groups of writes.py, or those that a test names.
    """

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
        self._came: dict[str, set[int]] = {group: set() for group in WRITTEN_FOR}

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


LOADED_FOR = ("shelves", "mirrors")


class LoadsOnce(Checker):
    """Bulk load: each message of a bundle that was taken over comes, under one id, and none of a bundle nobody asked
    for.

    Other checkers judge that it is not early, not twice and not after its cancel. The counts of a load are true.

    Judges the groups of loads.py.
    """

    promise = "load"
    what_is_owed = "deliveries (group, message) of what was loaded"

    def __init__(self) -> None:
        self._due_ms: dict[int, int] = {}
        self._bundles: dict[tuple[str, int], tuple[int, ...]] = {}
        self._taken: dict[str, int] = {}
        self._owner: dict[int, tuple[str, int]] = {}
        self._ids: dict[int, int] = {}
        self._cancelled: set[int] = set()
        """Messages that are cancelled, or may be, as far as is known."""
        self._missing: dict[str, set[int]] = {group: set() for group in LOADED_FOR}
        self._came: dict[str, set[int]] = {group: set() for group in LOADED_FOR}

    def _on_schedule_sent(self, record: ScheduleSent) -> None:
        if not record.node:
            self._due_ms.update((row.uid, row.due_ms or 0) for row in record.rows)

    def _on_take_over_asked(self, record: TakeOverAsked) -> None:
        self._bundles[record.job, record.sequence] = record.uids
        self._owner.update((uid, (record.job, record.sequence)) for uid in record.uids)

    def _on_cancel_sent(self, record: CancelSent) -> None:
        if record.uid in self._owner:
            self._cancelled.add(record.uid)

    def _on_delivered(self, record: Delivered) -> None:
        if record.uid not in self._owner:
            return
        uid = record.uid
        if self._ids.setdefault(uid, record.id) != record.id:
            job, sequence = self._owner[uid]
            self.broken(
                f"{record.node} delivers message {uid} of bundle {sequence} of {job} under two ids "
                f"({self._ids[uid]:#x}, {record.id:#x}): loaded twice"
            )
        self._came.setdefault(record.group, set()).add(uid)
        self._missing.setdefault(record.group, set()).discard(uid)

    def _on_load_answered(self, record: LoadAnswered) -> None:
        name = f"bundle {record.sequence} of {record.job}"
        if record.taken < record.sequence:
            self.broken(f"{name} was answered with {record.taken} bundles taken over")
        asked = [sequence for sequence in range(1, record.taken + 1) if (record.job, sequence) in self._bundles]
        units = sum(len(self._bundles[record.job, sequence]) for sequence in asked)
        if len(asked) < record.taken or units != record.units:
            self.broken(
                f"{name}: {record.taken} bundles with {record.units} messages are said to be taken over; "
                f"{len(asked)} of them, with {units}, were asked for"
            )
        for sequence in range(self._taken.get(record.job, 0) + 1, record.taken + 1):
            for uid in self._bundles[record.job, sequence]:
                for group, missing in self._missing.items():
                    if uid not in self._came[group] and uid not in self._cancelled:
                        missing.add(uid)
        self._taken[record.job] = max(record.taken, self._taken.get(record.job, 0))

    def _on_cancel_answered(self, record: CancelAnswered) -> None:
        uid = record.uid
        if uid not in self._owner:
            return
        came = all(uid in came for came in self._came.values())
        if record.outcome == "NOT_FOUND" and not (came and self.hour_may_be_gone(record.id, record.at_ns)):
            self.broken(f"cancel of message {uid}, which was loaded as {record.id:#x}: NOT_FOUND")
        if record.outcome == "CANCELLED":
            for missing in self._missing.values():
                missing.discard(uid)
            return
        self._cancelled.discard(uid)
        job, sequence = self._owner[uid]
        for group, missing in self._missing.items():
            if sequence <= self._taken.get(job, 0) and uid not in self._came[group]:
                missing.add(uid)

    def owed(self, at_ns: int) -> list[tuple[str, int]]:
        wall_ms = self.wall_ms(at_ns)
        return [
            (group, uid)
            for group, missing in self._missing.items()
            for uid in sorted(missing)
            if self._due_ms[uid] <= wall_ms and uid not in self._cancelled
        ]


class ColdOnce(Checker):
    """The cold tier: a parked message comes to its group or was cancelled, even if its part is loaded through a
    failover.

    Other checkers judge that it is not early, comes where it was moved to, under one id, and not after its cancel.
    Waiting parts are listed until all their messages came, loaded ones are reported as loaded, and a look-up of a
    message tells its true state.
    """

    promise = "cold"
    what_is_owed = "cold messages"

    def __init__(self) -> None:
        self._due_ms: dict[int, int] = {}
        """The latest time at which a parked message may be due, as far as is known."""
        self._missing: dict[int, str] = {}
        """Group of each message that was parked, perhaps not cancelled, and not delivered yet."""
        self._maybe_cancelled: set[int] = set()
        self._parked: dict[int, int] = {}
        """By part: time since which it is known to be registered."""
        self._loaded: dict[int, int] = {}
        """By part: time since which it is known to be loaded."""
        self._uids: dict[int, tuple[int, ...]] = {}
        """By part: its messages."""
        self._maybe_moved: set[int] = set()

    def _on_delivered(self, record: Delivered) -> None:
        if record.uid in self._due_ms:
            self._missing.pop(record.uid, None)

    def _on_cold_loaded(self, record: ColdLoaded) -> None:
        self._loaded.setdefault(record.part, record.at_ns)

    def _on_cold_parked(self, record: ColdParked) -> None:
        self._parked.setdefault(record.part, record.at_ns)
        self._uids[record.part] = record.uids
        for uid, due_ms in zip(record.uids, record.due_ms, strict=True):
            if uid not in self._due_ms:
                self._due_ms[uid] = due_ms
                self._missing[uid] = record.group

    def _on_cancel_sent(self, record: CancelSent) -> None:
        if record.uid in self._due_ms:
            self._maybe_cancelled.add(record.uid)

    def _on_cancel_answered(self, record: CancelAnswered) -> None:
        if record.uid in self._due_ms:
            self._maybe_cancelled.discard(record.uid)
            if record.outcome == "NOT_FOUND" and record.uid in self._missing:
                self.broken(f"cold message {record.uid} was parked; its cancel says NOT_FOUND")
            if record.outcome == "CANCELLED":
                self._missing.pop(record.uid, None)

    def _on_reschedule_sent(self, record: RescheduleSent) -> None:
        if record.uid in self._due_ms:
            self._maybe_moved.add(record.uid)
            self._due_ms[record.uid] = max(self._due_ms[record.uid], record.due_ms)

    def _on_reschedule_answered(self, record: RescheduleAnswered) -> None:
        if record.uid in self._due_ms and record.outcome == "RESCHEDULED":
            self._due_ms[record.uid] = record.due_ms

    def _on_cold_looked(self, record: ColdLooked) -> None:
        uid = record.uid
        if uid not in self._missing:
            return
        if record.state == "NOT_FOUND":
            self.broken(f"cold message {uid} was parked, and now it is not found")
        if record.state == "MESSAGE_CANCELLED" and uid not in self._maybe_cancelled:
            self.broken(f"cold message {uid} is cancelled; nobody asked for that")

    def _on_cold_listed(self, record: ColdListed) -> None:
        for part, since_ns in self._parked.items():
            known = part in record.known or part in self._loaded or self._is_gone(part)
            if since_ns < record.asked_ns and not known:
                self.broken(f"part {part} was registered, was not loaded, and is not listed")
        for part in record.waiting:
            if self._loaded.get(part, record.asked_ns) < record.asked_ns:
                self.broken(f"part {part} is said to wait; it was loaded before")

    def _is_gone(self, part: int) -> bool:
        """Whether nothing of a part need be left where it was due: its load, whose answer is on its way, may have been
        long ago, and a part is forgotten with its hours."""
        excused = self._maybe_cancelled | self._maybe_moved
        return all(uid not in self._missing or uid in excused for uid in self._uids[part])

    def owed(self, at_ns: int) -> list[int]:
        wall_ms = self.wall_ms(at_ns)
        return sorted(uid for uid in self._missing if self._due_ms[uid] <= wall_ms and uid not in self._maybe_cancelled)
