"""Background work of the core: reads and writes of files beside the core's thread, through the executor port.

Owns which of the wheel's jobs are under way, so that none runs twice. Answers always come on the core's thread,
possibly before the call returns if nothing had to be read. A failed read is reported to its caller: raised by the reads
that are awaited, passed to the callback of those that delivery uses. A failed merge is
tried again, for its data is also in the journal. A failed fdatasync and a corrupt file stop the node once another node
leads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import numpy as np

from tickwheel.node.core.promise import Promise
from tickwheel.node.core.serving import Serving
from tickwheel.node.core.stagger import Stagger
from tickwheel.node.core.world import Now
from tickwheel.node.failure import Failure, RequestError
from tickwheel.proto import common_pb2
from tickwheel.replication.ports import Executor
from tickwheel.storage.disk import DiskError, DiskFullError, FsyncFailedError, NoDescriptorError
from tickwheel.storage.segment import CorruptSegmentError
from tickwheel.wheel.engine import Wheel
from tickwheel.wheel.jobs import Job
from tickwheel.wheel.queries import CountJob, ScanJob, Wanted
from tickwheel.wheel.reads import Pinned, RecordsJob
from tickwheel.wheel.units import CursorKey, Ids, Units, ids_of

MERGE_RETRY_MS = 1_000
MADE_AT_ONCE_BYTES = 32 << 10
"""Records in memory up to this size wait for no worker, which may be busy with a merge. They take a millisecond to
decode."""
PUMP_PERIOD_MS = 100
"""Time alone changes the wheel's wishes only by the slot: without other events the wheel is asked this often."""

T = TypeVar("T")
Answer = Callable[[T | None, BaseException | None], None]


class Read(Protocol):
    """A job that only reads and needs no handing back to the wheel."""

    @property
    def done(self) -> bool: ...

    def run(self) -> None: ...


class MadeOfRecords(Generic[T]):
    """Reads records and makes something of them, in one job. `result` is valid after `run`."""

    done = False
    result: T

    def __init__(self, records: RecordsJob, make: Callable[[list[bytes]], T]) -> None:
        self._records = records
        self._make = make

    def run(self) -> None:
        self._records.run()
        self.result = self._make(self._records.records)


@dataclass(frozen=True, slots=True)
class Found:
    """The message that an id names now; `units` is None if there is none."""

    units: Units | None
    ids: Ids
    cancelled: bool = False


REMOVED = "a message was removed with its hour"


class RemovedError(Exception):
    """A message was removed with its hour: settled by all groups, or past its retention."""


class UnreadableError(RequestError):
    """A read failed. A request that does not expect it is refused with it."""

    def __init__(self, cause: BaseException, what: str = "the schedule") -> None:
        super().__init__(Failure(common_pb2.WRONG_STATE, f"{what} cannot be read: {cause}"))


async def read(answer: Promise[T], what: str) -> T:
    """The answer of a worker that reads. Raises RemovedError, and UnreadableError, which says `what` could not be read,
    for any other error."""
    try:
        return await answer
    except RemovedError:
        raise
    except Exception as error:
        raise UnreadableError(error, what) from error


class Background:
    def __init__(
        self,
        executor: Executor,
        wheel: Wheel,
        fatal: Callable[[str, BaseException | None], None],
        serving: Serving,
        damaged: Callable[[BaseException], bool],
        lost: Callable[[CorruptSegmentError], None],
        stagger: Stagger,
    ) -> None:
        """`fatal`: see `Kernel`. `serving` runs each answer as a piece of the request that asked. `damaged` gets
        read errors and returns True if the damage is under repair (index_repair.py). `lost` gets damage that a read
        met where nothing can be repaired: in heads or in a bundle, records excepted. `stagger` says when merges may
        begin."""
        self._serving = serving
        self._executor = executor
        self._wheel = wheel
        self._fatal = fatal
        self._damaged = damaged
        self._lost = lost
        self._stagger = stagger
        self._merge_held = False
        self._paused_until_ms = 0
        self._now_ms = 0
        self._pumped_index = -1
        self.jobs_running = 0
        self.held_up = ""
        """Why the wheel's last job failed, if it is tried again; for the operator."""

    # -- the wheel's own work

    def pump(self, now: Now, applied_index: int) -> None:
        """Start the jobs that the wheel wants: loading ticks ahead, mapping hours, merging.

        The wishes change with applied entries, with a job's end, and slowly with time. A merge waits for its share.
        """
        now_ms = now.cluster_ms
        same = applied_index == self._pumped_index and not self._merge_held
        if same and 0 <= now_ms - self._now_ms < PUMP_PERIOD_MS:
            return
        self._pumped_index = applied_index
        self._now_ms = now_ms
        # The cluster's time may have been set back before anybody acted by it.
        self._paused_until_ms = min(self._paused_until_ms, now_ms + MERGE_RETRY_MS)
        if now_ms < self._paused_until_ms:
            return
        self._merge_held = self._stagger.holds(now, waits=self._wheel.files.wants_merge)
        for job in self._wheel.jobs(now_ms, merges=not self._merge_held):
            self._start(job)

    def wait_ms(self, now: Now) -> int | None:
        """Until the end of the pause after a job that failed, or until a merge may begin."""
        if self._paused_until_ms > now.cluster_ms:
            return self._paused_until_ms - now.cluster_ms
        return self._stagger.wait_ms(now.cluster_ms) if self._merge_held else None

    def _start(self, job: Job) -> None:
        self.jobs_running += 1

        def ended(_: object, error: BaseException | None) -> None:
            self.jobs_running -= 1
            self._pumped_index = -1
            if error is None:
                self.held_up = ""
                self._wheel.finish(job)
                return
            needed = self._wheel.needed(job)
            self._wheel.abandon(job)
            if not needed:
                return  # the cursor has passed the units meanwhile, and their files may be removed
            if self._damaged(error):
                self._paused_until_ms = self._now_ms + MERGE_RETRY_MS
                return
            if isinstance(error, FsyncFailedError | CorruptSegmentError) or not isinstance(
                error, OSError | DiskFullError
            ):
                self._fatal(f"{job.kind} failed: {error}", error)
            advice = "raise the limit of open files (LimitNOFILE)"
            if not isinstance(error, NoDescriptorError):
                advice = "free space in the data directory"
            self.held_up = f"a {job.kind} failed and is tried again: {error}; {advice}"
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

    def _run(
        self,
        job: Read,
        ids: Callable[[], Ids] | None,
        ended: Callable[[BaseException | None], None],
        *,
        of_records: bool = False,
    ) -> None:
        """Run a reading job in a worker, or call `ended` at once if nothing has to be read. `ids` returns those that it
        looks for: with it, RemovedError says that files were removed under the reader, which is no failure of the
        disk. `of_records`: it reads nothing but records, which other members supply one by one (record_repair.py)."""
        if job.done:
            ended(None)
            return
        ended = self._serving.bound(ended)

        def answered(_: object, error: BaseException | None) -> None:
            if error is not None:
                repairs = self._damaged(error)
                if isinstance(error, DiskError) and ids is not None and self._wheel.holdings.removed(ids()).any():
                    error = RemovedError(REMOVED)
                elif isinstance(error, CorruptSegmentError) and not repairs and not of_records:
                    self._lost(error)
            ended(error)

        self._executor.submit(job.run, answered)

    # -- reads with a callback: delivery

    def read_records(self, units: Units, answer: Answer[list[bytes]]) -> None:
        """Read the records (meta and payload) of units, in their order. RemovedError: one of them is gone."""
        job = self._wheel.reads.records(units)
        if job.missing:
            answer(None, RemovedError(REMOVED))
            return
        self._run(
            job,
            lambda: ids_of(units),
            lambda error: answer(job.records if error is None else None, error),
            of_records=True,
        )

    def read_units(self, ids: Ids, answer: Answer[Units], *, following: bool = True) -> None:
        """Read the units of existing ids, in their order. RemovedError: one of them is gone. LookupError: the wheel
        lacks one that it must have."""
        job = self._wheel.reads.lookup(ids, following=following)

        def ended(error: BaseException | None) -> None:
            if error is None and not job.found.all():
                missing = ids[~job.found]
                error = LookupError(f"messages {missing[:3].tolist()} are in a ready queue but not in the wheel")
                if self._wheel.holdings.removed(missing).any():
                    error = RemovedError(REMOVED)
            answer(job.units if error is None else None, error)

        self._run(job, lambda: job.resolved, ended)

    # -- reads that are awaited; each may raise UnreadableError

    async def records_of(self, units: Units) -> list[bytes]:
        """As `read_records`."""
        records: Promise[list[bytes]] = Promise()
        self.read_records(units, records.answered)
        return await read(records, "the schedule")

    async def units_of(self, ids: Ids) -> Units:
        """As `read_units`, following moves."""
        units: Promise[Units] = Promise()
        self.read_units(ids, units.answered)
        return await read(units, "the schedule")

    async def _read(self, job: Read, ids: Callable[[], Ids] | None = None, *, of_records: bool = False) -> None:
        """Run a reading job. `ids` and `of_records` as in `_run`."""
        ended: Promise[None] = Promise()
        self._run(job, ids, partial(ended.answered, None), of_records=of_records)
        await read(ended, "the schedule")

    async def made_of_records(self, units: Units, make: Callable[[list[bytes]], T]) -> T:
        """What `make` returns for the records of units. A worker calls it, unless they are small and in memory. So it
        may take long, and must use nothing that the core changes meanwhile. RemovedError: a record is gone."""
        records = self._wheel.reads.records(units)
        if records.missing:
            raise RemovedError(REMOVED)
        if records.done and int(units["size"].sum(dtype=np.int64)) <= MADE_AT_ONCE_BYTES:
            return make(records.records)
        job = MadeOfRecords(records, make)
        await self._read(job, lambda: ids_of(units), of_records=True)
        return job.result

    async def look_up(self, number: int) -> Found:
        """The message that an id names now."""
        ids = np.array([number], np.uint64)
        job = self._wheel.reads.lookup(ids)
        try:
            await self._read(job, lambda: job.resolved)
        except RemovedError:
            return Found(None, ids)
        if not bool(job.found[0]):
            return Found(None, ids)
        return Found(job.units[:1], job.resolved[:1], bool(job.cancelled[0]))

    async def scan(
        self, due_min: int, due_max: int, start: CursorKey | None, limit: int, wanted: Wanted, surplus: int = 0
    ) -> ScanJob:
        """Find pending units of a time range in dispatch order, as far as one job goes."""
        job = self._wheel.reads.scan(due_min, due_max, start, limit, wanted, surplus)
        await self._read(job)
        return job

    async def scan_pinned(
        self,
        pinned: Pinned,
        hours: range,
        start: CursorKey | None,
        due_min: int,
        due_max: int,
        limit: int,
        wanted: Wanted | None = None,
    ) -> ScanJob:
        """Find units of some hours as of a pin, as far as one job goes."""
        job = self._wheel.reads.scan_pinned(pinned, hours, start, due_min, due_max, limit, wanted)
        await self._read(job)
        return job

    async def count(self, due_min: int, due_max: int, bucket_ms: int, wanted: Wanted) -> CountJob:
        """Count pending units of a time range by bucket, as far as one job goes."""
        job = self._wheel.reads.count(due_min, due_max, bucket_ms, wanted)
        await self._read(job)
        return job
