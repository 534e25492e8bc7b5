"""The disk under the log: its fsyncs, and the reaction to a full, failing or hanging disk.

Owns: at most one fsync at a time in a worker, the halt of a node whose disk is full, and when it may take part again.

Invariants:
- A full disk halts the node until there is room: a halted node neither votes nor acknowledges entries.
- After any other error of a write or an fsync this node's log has `failed` for good: the kernel may have dropped the
  pages. Nothing is written or counted as durable any more, not even by an fsync that was under way. So the node makes
  no promise: it commits, acknowledges and votes nothing. A master can still hand over, for which it needs no disk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tickwheel.proto.parsing import wants_memory
from tickwheel.replication.config import RaftConfig
from tickwheel.replication.journal import FsyncWork, Journal
from tickwheel.replication.ports import NS_PER_MS, Clock, Executor
from tickwheel.storage.disk import DiskError, FsyncFailedError


class StableStorage:
    """Calls `fsynced` after each fsync, inside `run_checked`; `on_halt` at a full disk; `on_failure` with each error
    that the journal does not survive."""

    def __init__(
        self,
        config: RaftConfig,
        journal: Journal,
        clock: Clock,
        executor: Executor,
        *,
        run_checked: Callable[..., None],
        on_failure: Callable[[DiskError], None],
        fsynced: Callable[[], None],
        on_halt: Callable[[], None],
    ) -> None:
        self._config = config
        self._journal = journal
        self._clock = clock
        self._executor = executor
        self._run_checked = run_checked
        self._on_failure = on_failure
        self._fsynced = fsynced
        self._on_halt = on_halt
        self.fsyncing = False
        """A worker is running an fsync; this may be true after `stop`."""
        self._began_ns = 0
        self._halted_ns = 0
        self._stopped = False
        self.halted = ""
        """Why this node is halted, for its operator; empty while it is not."""
        self.failed = False

    def stop(self) -> None:
        """Ignore the result of an fsync under way."""
        self._stopped = True

    def fsync(self) -> None:
        """Begin an fsync of what was written, unless one is under way; that one then begins the next when it ends."""
        if self.fsyncing or self.failed or not self._journal.needs_fsync:
            return
        work = self._journal.begin_fsync()
        self.fsyncing = True
        self._began_ns = self._clock.monotonic_ns()
        self._executor.submit(work.run, partial(self._run_checked, self._ended, work))

    def _ended(self, work: FsyncWork, _: object, error: BaseException | None) -> None:
        self.fsyncing = False
        if self._stopped or self.failed:
            return
        if error is not None and wants_memory(error):
            raise error  # the disk is sound; the fsync was not done, so the node ends and starts again
        try:
            self._journal.finish_fsync(work)
        except FsyncFailedError as failed:
            text = f"the journal could not be written to stable storage: {error or failed}"
            raise FsyncFailedError(text) from error
        self._fsynced()
        self.fsync()  # entries written meanwhile do not wait for the next tick

    def hangs(self, now_ns: int) -> bool:
        """Whether an fsync has run for over `fsync_hang_ms`: a master would hold its lease and commit nothing."""
        return self.fsyncing and now_ns - self._began_ns > self._config.fsync_hang_ms * NS_PER_MS

    def hangs_ms(self, now_ns: int) -> int:
        """How long the fsync has run that hangs; 0: none does."""
        return (now_ns - self._began_ns) // NS_PER_MS if self.hangs(now_ns) else 0

    def keeps_from_campaigning(self, now_ns: int) -> bool:
        """Whether a candidate could store no vote and a master no entry: the disk is full, has failed or hangs."""
        return bool(self.halted) or self.failed or self.hangs(now_ns)

    def hangs_from_ns(self) -> int:
        """When the fsync under way begins to count as hanging; 0 for no fsync."""
        return self._began_ns + (self._config.fsync_hang_ms + 1) * NS_PER_MS if self.fsyncing else 0

    def halt(self, reason: str, *, no_descriptor: bool = False) -> None:
        """Halt the node: the disk is full, or no file descriptor is left (`no_descriptor`)."""
        if not self.halted:
            # Repeated failures must not postpone the next look for room.
            self._halted_ns = self._clock.monotonic_ns()
        self.halted = f"the disk is full: {reason}; free space in the data directory"
        if no_descriptor:
            self.halted = f"no file descriptor is left: {reason}; raise the limit of open files (LimitNOFILE)"
        self._on_halt()

    def fail(self, error: DiskError) -> None:
        """The journal could not be written, or not be read where this log needs it."""
        self.failed = True
        self._on_failure(error)

    def look_for_room(self, now_ns: int) -> bool:
        """Halt if the journal's next file has no room; retry every `disk_retry_ms`. True: the halt has just ended.

        It ends once there is room for a vote, too: the node would halt again at the next change of the term.
        """
        journal = self._journal
        if self.failed:
            return False
        if not (journal.reserve_ready or journal.needs_fsync or self.fsyncing or self.halted):
            self.halt("no room for the next file of the journal")
        if not self.halted or now_ns - self._halted_ns < self._config.disk_retry_ms * NS_PER_MS or self.fsyncing:
            return False
        self._halted_ns = now_ns
        if not (journal.restore_reserve() and journal.has_room_for_votes()):
            return False
        self.halted = ""
        return True
