"""Background work of the core: reads and writes of files beside the core's thread, through the executor port.

Owns which of the wheel's jobs are under way, so that none runs twice. Answers always come on the core's thread,
possibly before the call returns if nothing had to be read. A failed read is reported to its caller. A failed merge is
tried again, for its data is also in the journal. A failed fdatasync or a corrupt file stops the node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tickwheel.node.core.serving import Serving
from tickwheel.node.core.world import Now
from tickwheel.replication.ports import Executor
from tickwheel.storage.disk import DiskError, DiskFullError, SyncFailedError
from tickwheel.storage.segment import CorruptSegmentError
from tickwheel.wheel.engine import Wheel
from tickwheel.wheel.jobs import Job
from tickwheel.wheel.pinned import Pinned
from tickwheel.wheel.queries import CountJob, ScanJob, Wanted
from tickwheel.wheel.units import CursorKey, Ids, Units, ids_of

MERGE_RETRY_MS = 1_000
PUMP_PERIOD_MS = 20
"""Time alone changes the wheel's wishes only by the slot: without other events the wheel is asked this often."""

T = TypeVar("T")
Answer = Callable[[T | None, BaseException | None], None]


class Read(Protocol):
    """A job that only reads and needs no handing back to the wheel."""

    @property
    def done(self) -> bool: ...

    def run(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Found:
    """The message that an id names now; `units` is None if there is none."""

    units: Units | None
    ids: Ids
    cancelled: bool = False


class RemovedError(Exception):
    """A message was removed with its hour: settled by all groups, or past its retention."""


class Background:
    def __init__(
        self,
        executor: Executor,
        wheel: Wheel,
        fatal: Callable[[str], None],
        serving: Serving,
        damaged: Callable[[BaseException], bool],
    ) -> None:
        """`serving` runs each answer under the guard of the request that asked. `damaged` gets read errors and returns
        True if the damage is under repair (mending.py)."""
        self._serving = serving
        self._executor = executor
        self._wheel = wheel
        self._fatal = fatal
        self._damaged = damaged
        self._paused_until_ms = 0
        self._now_ms = 0
        self._pumped_index = -1
        self.jobs_running = 0

    # -- the wheel's own work

    def pump(self, now: Now, applied_index: int) -> None:
        """Start the jobs that the wheel wants: loading ticks ahead, mapping hours, merging.

        The wishes change with applied entries, with a job's end, and slowly with time.
        """
        now_ms = now.cluster_ms
        if applied_index == self._pumped_index and 0 <= now_ms - self._now_ms < PUMP_PERIOD_MS:
            return
        self._pumped_index = applied_index
        self._now_ms = now_ms
        # The cluster's time may have been set back before anybody acted by it.
        self._paused_until_ms = min(self._paused_until_ms, now_ms + MERGE_RETRY_MS)
        if now_ms < self._paused_until_ms:
            return
        for job in self._wheel.jobs(now_ms):
            self._start(job)

    def wait_ms(self, now: Now) -> int | None:
        """Until the end of the pause after a job that failed."""
        return self._paused_until_ms - now.cluster_ms if self._paused_until_ms > now.cluster_ms else None

    def _start(self, job: Job) -> None:
        self.jobs_running += 1

        def ended(_: object, error: BaseException | None) -> None:
            self.jobs_running -= 1
            self._pumped_index = -1
            if error is None:
                self._wheel.finish(job)
                return
            needed = self._wheel.needed(job)
            self._wheel.abandon(job)
            if not needed:
                return  # the cursor has passed the units meanwhile, and their files may be removed
            if self._damaged(error):
                self._paused_until_ms = self._now_ms + MERGE_RETRY_MS
                return
            if isinstance(error, SyncFailedError | CorruptSegmentError) or not isinstance(
                error, OSError | DiskFullError
            ):
                self._fatal(f"{job.kind} failed: {error}")
                return
            self._paused_until_ms = self._now_ms + MERGE_RETRY_MS

        self._executor.submit(job.run, ended)

    def resume(self) -> None:
        """End the pause after a failure: the cause may be gone."""
        self._paused_until_ms = 0
        self._pumped_index = -1

    def write(self, work: Callable[[], T], answer: Answer[T]) -> None:
        """Run other work that writes files of a checkpoint."""
        self.jobs_running += 1

        def ended(result: T | None, error: BaseException | None) -> None:
            self.jobs_running -= 1
            answer(result, error)

        self._executor.submit(work, ended)

    # -- reads

    def submit(self, work: Callable[[], T], answer: Answer[T]) -> None:
        """Run other work that only reads."""
        self._executor.submit(work, self._serving.bound(answer))

    def _read(self, job: Read, answer: Answer[T], value: Callable[[], T]) -> None:
        def answered(error: BaseException | None) -> None:
            if error is None:
                answer(value(), None)
            else:
                answer(None, error)

        if job.done:
            answered(None)
            return
        answered = self._serving.bound(answered)

        def ended(_: object, error: BaseException | None) -> None:
            if error is not None:
                self._damaged(error)
            answered(error)

        self._executor.submit(job.run, ended)

    def read_records(self, units: Units, answer: Answer[list[bytes]]) -> None:
        """Read the records (meta and payload) of units, in their order. RemovedError: one of them is gone."""
        job = self._wheel.reads.records(units)
        if job.missing:
            answer(None, RemovedError("a message was removed with its hour"))
            return

        def ended(_: object, error: BaseException | None) -> None:
            if error is None:
                answer(job.records, None)
            else:
                answer(None, self._explained(ids_of(units), error))

        self._read(job, ended, lambda: None)

    def _explained(self, ids: Ids, error: BaseException) -> BaseException:
        """The error to report: RemovedError if files were removed under the reader, for that is no failure of the
        disk."""
        if isinstance(error, DiskError) and self._wheel.holdings.removed(ids).any():
            return RemovedError("a message was removed with its hour")
        return error

    def read_units(self, ids: Ids, answer: Answer[Units], *, following: bool = True) -> None:
        """Read the units of existing ids, in their order. RemovedError: one of them is gone."""
        job = self._wheel.reads.lookup(ids, following=following)

        def value() -> Units:
            if not job.found.all():
                missing = ids[~job.found]
                if self._wheel.holdings.removed(missing).any():
                    raise RemovedError("a message was removed with its hour")
                raise LookupError(f"messages {missing[:3].tolist()} are in a ready queue but not in the wheel")
            return job.units

        def checked(_: object, error: BaseException | None) -> None:
            if error is not None:
                answer(None, self._explained(job.resolved, error))
                return
            try:
                units = value()
            except (LookupError, RemovedError) as problem:
                answer(None, problem)
                return
            answer(units, None)

        self._read(job, checked, lambda: None)

    def look_up(self, ids: Ids, answer: Answer[Found]) -> None:
        """Find the message that one id names now."""
        job = self._wheel.reads.lookup(ids)

        def value() -> Found:
            if not bool(job.found[0]):
                return Found(None, ids)
            return Found(job.units[:1], job.resolved[:1], bool(job.cancelled[0]))

        def ended(_: object, error: BaseException | None) -> None:
            if error is None:
                answer(value(), None)
            elif isinstance(self._explained(job.resolved, error), RemovedError):
                answer(Found(None, ids), None)
            else:
                answer(None, error)

        self._read(job, ended, lambda: None)

    def scan(
        self,
        due_min: int,
        due_max: int,
        start: CursorKey | None,
        limit: int,
        wanted: Wanted,
        answer: Answer[ScanJob],
    ) -> None:
        """Find pending units of a time range in dispatch order, as far as one job goes."""
        job = self._wheel.reads.scan(due_min, due_max, start, limit, wanted)
        self._read(job, answer, lambda: job)

    def scan_pinned(
        self,
        pinned: Pinned,
        hour: int,
        start: CursorKey | None,
        due_min: int,
        due_max: int,
        limit: int,
        answer: Answer[ScanJob],
    ) -> None:
        """Find units of one hour as of a pin, as far as one job goes."""
        job = self._wheel.reads.scan_pinned(pinned, hour, start, due_min, due_max, limit)
        self._read(job, answer, lambda: job)

    def count(self, due_min: int, due_max: int, bucket_ms: int, wanted: Wanted, answer: Answer[CountJob]) -> None:
        """Count pending units of a time range by bucket, as far as one job goes."""
        job = self._wheel.reads.count(due_min, due_max, bucket_ms, wanted)
        self._read(job, answer, lambda: job)
